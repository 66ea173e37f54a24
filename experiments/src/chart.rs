//! Charts as SVG text, for the page and as files. Never knows what a number means.
pub mod areas;
pub mod bars;
pub mod curves;
pub mod gantt;
pub mod pairs;
#[cfg(feature = "png")]
mod png;
pub mod evaluations;

use flatshard::base::{Error, Result};
use std::fmt::Write;
use std::path::Path;

/// The width of every picture, in user units; a page scales it.
pub const WIDTH: f64 = 960.0;
pub const INK: &str = "#1f2933";
pub const QUIET: &str = "#64707d";
const GRID: &str = "#e3e8ed";
/// What communication does not hide.
pub const EXPOSED: &str = "#ea580c";
pub const BUSY: &str = "#b9c5d3";
/// DejaVu Sans is the widest of these: what fits in it fits in all.
const FONTS: &str = "'DejaVu Sans', Verdana, 'Segoe UI', system-ui, sans-serif";

/// The color of a family of runs, the same in every picture.
pub fn color(name: &str) -> &'static str {
    let (tp, ring) = (name.contains("tp"), name.contains("ring"));
    match name {
        _ if name.starts_with("torch") || name.starts_with("fsdp_official") => "#9aa5b1",
        _ if name.starts_with("ddp") => "#475569",
        _ if name.starts_with("zero") => "#d97706",
        _ if tp && ring => "#db2777",
        _ if tp => "#7c3aed",
        _ if ring => "#16a34a",
        _ if name.starts_with("fsdp_reference") => "#0d9488",
        _ => "#2563eb",
    }
}

/// The colors of curves, in their order: the first is what the others are compared with.
pub const CURVES: [&str; 8] = ["#475569", "#2563eb", "#ea580c", "#0d9488", "#7c3aed", "#db2777", "#16a34a", "#ca8a04"];

#[derive(Clone, Copy, PartialEq)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// How a text looks.
#[derive(Clone, Copy)]
struct Style {
    size: f64,
    anchor: Anchor,
    bold: bool,
    fill: &'static str,
}

const PLAIN: Style = Style { size: 13.0, anchor: Anchor::Start, bold: false, fill: INK };
const SMALL: Style = Style { size: 12.0, anchor: Anchor::Start, bold: false, fill: QUIET };
const TITLE: Style = Style { size: 18.0, anchor: Anchor::Start, bold: true, fill: INK };

impl Style {
    fn anchored(self, anchor: Anchor) -> Style {
        Style { anchor, ..self }
    }
    /// An upper bound for usual texts: DejaVu Sans is 0.60 em wide on average, 0.66 in bold.
    fn width(self, text: &str) -> f64 {
        text.chars().count() as f64 * self.size * if self.bold { 0.66 } else { 0.60 }
    }
}

/// An SVG picture that grows.
struct Canvas {
    body: String,
    width: f64,
    height: f64,
    paper: &'static str,
}

impl Canvas {
    /// With its title and what is to be said of it; the drawing begins at [`Canvas::height`].
    fn new(title: &str, subtitle: &str) -> Canvas {
        let mut canvas = Canvas { body: String::new(), width: WIDTH, height: 34.0, paper: "#ffffff" };
        canvas.text(20.0, 30.0, TITLE, title);
        for line in wrapped(subtitle, WIDTH - 40.0) {
            canvas.height += 17.0;
            canvas.text(20.0, canvas.height, SMALL, &line);
        }
        canvas.height += 18.0;
        canvas
    }

    /// With an edge of paper around it, so that lines do not run through it.
    fn text(&mut self, x: f64, y: f64, style: Style, text: &str) {
        self.write(x, y, style, text, " paint-order=\"stroke\" stroke=\"#ffffff\" stroke-width=\"4\"");
    }
    /// On a color.
    fn plain(&mut self, x: f64, y: f64, style: Style, text: &str) {
        self.write(x, y, style, text, "");
    }
    fn write(&mut self, x: f64, y: f64, style: Style, text: &str, edge: &str) {
        let anchor = match style.anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let (size, fill, text) = (style.size, style.fill, escaped(text));
        let bold = if style.bold { " font-weight=\"bold\"" } else { "" };
        self.push(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{fill}\"{bold}{edge}>{text}</text>"
        ));
    }
    fn rect(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), fill: &str, hint: &str) {
        self.push(&format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{fill}\"><title>{}</title></rect>",
            width.max(0.0),
            escaped(hint)
        ));
    }
    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), stroke: &str, width: f64, dashes: &str) {
        let dashes = if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
        self.push(&format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{stroke}\" stroke-width=\"{width}\"{dashes}/>"
        ));
    }
    fn curve(&mut self, points: &[(f64, f64)], stroke: &str, dashes: &str, hint: &str) {
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.push(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"2\" stroke-linejoin=\"round\" \
             stroke-dasharray=\"{dashes}\"><title>{}</title></polyline>",
            path.join(" "),
            escaped(hint)
        ));
    }
    fn area(&mut self, points: &[(f64, f64)], fill: &str, hint: &str) {
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let hint = escaped(hint);
        self.push(&format!("<polygon points=\"{}\" fill=\"{fill}\"><title>{hint}</title></polygon>", path.join(" ")));
    }
    /// A row, or several, of what colors mean.
    fn legend(&mut self, meanings: &[(&str, &str)]) {
        let mut x = 20.0;
        for (color, meaning) in meanings {
            let width = 18.0 + SMALL.width(meaning) + 18.0;
            if x + width > WIDTH - 10.0 {
                (x, self.height) = (20.0, self.height + 19.0);
            }
            self.rect((x, self.height - 4.0), (12.0, 12.0), color, meaning);
            self.text(x + 18.0, self.height + 6.0, SMALL, meaning);
            x += width;
        }
        self.height += 30.0;
    }
    fn dot(&mut self, (x, y): (f64, f64), fill: &str) {
        self.push(&format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{fill}\"/>"));
    }
    fn push(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// `label` is what a reader of the page who does not see it is told.
    fn finish(self, label: &str) -> String {
        let Canvas { body, width, height, paper } = self;
        let mut svg = String::new();
        let _ = write!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height:.0}\" width=\"{width}\" height=\"{height:.0}\" \
             font-family=\"{FONTS}\" role=\"img\" aria-label=\"{}\">\n\
             <rect width=\"{width}\" height=\"{height:.0}\" fill=\"{paper}\"/>\n{body}</svg>\n",
            escaped(label)
        ); // writing to a String does not fail
        svg
    }
}

/// Writes a picture in the format that the file's name asks for.
pub fn save(svg: &str, path: &Path) -> Result<()> {
    match path.extension().and_then(|e| e.to_str()) {
        #[cfg(feature = "png")]
        Some("png") => png::write(svg, path),
        #[cfg(not(feature = "png"))]
        Some("png") => Err(Error::input(format!(
            "--plot {}: this build writes only .svg; for PNG, build with cargo build --release --features png",
            path.display()
        ))),
        Some("svg") => std::fs::write(path, svg).map_err(|e| Error::io("write", path, e)),
        _ => Err(Error::input(format!("--plot {}: the name must end in .png or .svg", path.display()))),
    }
}

/// For text and attributes of XML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Lines of small text that fit into `width`.
fn wrapped(text: &str, width: f64) -> Vec<String> {
    wrapped_in(SMALL, text, width)
}
fn wrapped_in(style: Style, text: &str, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| style.width(line) + style.width(word) + style.size <= width) {
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(word.to_string()),
        }
    }
    lines
}

/// Round numbers that span `low..=high`, about `count` of them.
fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let high = if high > low { high } else { low + 1.0 };
    let raw = (high - low) / count as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = power * [1.0, 2.0, 5.0, 10.0].into_iter().find(|m| m * power >= raw).unwrap_or(10.0);
    let first = (low / step).floor() as i64;
    (first..).map(|n| n as f64 * step).take_while(|&x| x < high + step).collect()
}

/// A number as an axis shows it.
fn tick_text(x: f64) -> String {
    let grouped = |n: i64| {
        let digits = n.unsigned_abs().to_string();
        let mut out = String::new();
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                out.push(',');
            }
            out.push(digit);
        }
        if n < 0 { format!("-{out}") } else { out }
    };
    // Ticks are sums, so their last digits are noise.
    let power = || {
        let text = format!("{x:.3e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        format!("{}e{exponent}", digits.trim_end_matches('0').trim_end_matches('.'))
    };
    match x.abs() {
        0.0 => "0".into(),
        a if a >= 1e7 => power(),
        a if a >= 10.0 || x.fract() == 0.0 => grouped(x.round() as i64),
        a if a >= 0.1 => format!("{:.2}", x).trim_end_matches('0').trim_end_matches('.').to_string(),
        a if a >= 0.9e-4 => format!("{:.5}", x).trim_end_matches('0').to_string(),
        _ => power(),
    }
}

/// Texts of all marks of an axis: with as many digits as tell them apart.
fn tick_texts(marks: &[f64]) -> Vec<String> {
    let texts: Vec<String> = marks.iter().map(|&mark| tick_text(mark)).collect();
    let distinct = |texts: &[String]| (1..texts.len()).all(|n| !texts[..n].contains(&texts[n]));
    if distinct(&texts) {
        return texts;
    }
    let precise = |digits: usize| marks.iter().map(|mark| format!("{mark:.digits$}")).collect::<Vec<_>>();
    (1..=9).map(precise).find(|texts| distinct(texts)).unwrap_or(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_span_the_values() {
        assert_eq!(ticks(0.0, 100.0, 5), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(1.2, 5.8, 5), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let flat = ticks(3.0, 3.0, 4);
        assert!(flat[0] <= 3.0 && *flat.last().unwrap() >= 3.0 && flat.len() > 1);
        assert_eq!(tick_text(12345.0), "12,345");
        assert_eq!((tick_text(0.25), tick_text(0.0), tick_text(1e-5)), ("0.25".into(), "0".into(), "1e-5".into()));
        let texts = |high| ticks(0.0, high, 5).into_iter().map(tick_text).collect::<Vec<_>>();
        assert_eq!(texts(1e-3), ["0", "0.0002", "0.0004", "0.0006", "0.0008", "0.001"]);
        assert_eq!(texts(5e-4), ["0", "0.0001", "0.0002", "0.0003", "0.0004", "0.0005"]);
        assert_eq!(texts(1e-6), ["0", "2e-7", "4e-7", "6e-7", "8e-7", "1e-6"]);
        assert_eq!(tick_texts(&[1590.9, 1591.0, 1591.1]), ["1590.9", "1591.0", "1591.1"]);
        assert_eq!(tick_texts(&[0.0, 1500.0]), ["0", "1,500"]);
        assert_eq!(texts(6e7), ["0", "2e7", "4e7", "6e7"]);
    }

    #[test]
    fn text_cannot_break_the_picture() {
        assert_eq!(escaped("a<b> & \"c\""), "a&lt;b&gt; &amp; &quot;c&quot;");
        assert_eq!(wrapped("one two three", 50.0).len(), 3);
    }
}
