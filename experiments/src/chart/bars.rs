//! Horizontal bars, one per run. Never sorts or scales its input.
use super::*;

/// One row.
pub struct Bar {
    pub label: String,
    /// Laid end to end: (length, color).
    pub parts: Vec<(f64, &'static str)>,
    /// Least and most of several rounds.
    pub range: Option<(f64, f64)>,
    /// Behind the bar.
    pub text: String,
    pub strong: bool,
}

pub struct Bars {
    pub title: String,
    pub subtitle: String,
    pub bars: Vec<Bar>,
    /// A line across all rows at this length.
    pub mark: Option<f64>,
    /// What the colors of parts mean.
    pub legend: Vec<(&'static str, String)>,
}

const ROW: f64 = 26.0;
const THICK: f64 = 16.0;

impl Bars {
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, &self.subtitle);
        let widest = |width: &dyn Fn(&Bar) -> f64| self.bars.iter().map(width).fold(0.0, f64::max);
        let label = |bar: &Bar| Style { bold: bar.strong, ..PLAIN };
        let left = 20.0 + widest(&|bar| label(bar).width(&bar.label)) + 12.0;
        let right = WIDTH - 20.0 - widest(&|bar| SMALL.width(&bar.text)) - 12.0;
        let longest = widest(&|bar| bar.length().max(bar.range.map_or(0.0, |r| r.1)));
        let scale = (right - left).max(100.0) / if longest > 0.0 { longest } else { 1.0 };

        if !self.legend.is_empty() {
            let mut x = left;
            for (color, meaning) in &self.legend {
                canvas.rect((x, canvas.height - 4.0), (12.0, 12.0), color, meaning);
                canvas.text(x + 18.0, canvas.height + 6.0, SMALL, meaning);
                x += 18.0 + SMALL.width(meaning) + 24.0;
            }
            canvas.height += 22.0;
        }
        let (top, mut texts) = (canvas.height, vec![]);
        for bar in &self.bars {
            let (y, hint) = (canvas.height, format!("{}: {}", bar.label, bar.text));
            let middle = y + THICK / 2.0;
            let style = label(bar).anchored(Anchor::End);
            canvas.text(left - 12.0, middle + 4.5, style, &bar.label);
            let mut x = left;
            for (length, color) in &bar.parts {
                canvas.rect((x, y), (length * scale, THICK), color, &hint);
                x += length * scale;
            }
            if let Some((low, high)) = bar.range {
                let (low, high) = (left + low * scale, left + high * scale);
                canvas.line((low, middle), (high, middle), INK, 1.5, "");
                for end in [low, high] {
                    canvas.line((end, middle - 4.0), (end, middle + 4.0), INK, 1.5, "");
                }
                x = x.max(high);
            }
            let style = if bar.strong { Style { bold: true, fill: INK, ..SMALL } } else { SMALL };
            texts.push((x + 8.0, middle + 4.5, style, &bar.text));
            canvas.height += ROW;
        }
        // The mark makes room for the texts that stand where it runs.
        let mut y = top - 5.0;
        for &(x, middle, style, text) in &texts {
            let across = |at: f64| at > x - 3.0 && at < x + style.width(text) + 3.0;
            if let Some(at) = self.mark.map(|mark| left + mark * scale).filter(|at| !across(*at)) {
                canvas.line((at, y), (at, y + ROW), INK, 1.0, "3 3");
            }
            canvas.text(x, middle, style, text);
            y += ROW;
        }
        canvas.height += 10.0;
        let said: Vec<String> = self.bars.iter().map(|bar| format!("{} {}", bar.label, bar.text)).collect();
        canvas.finish(&format!("{}: {}", self.title, said.join("; ")))
    }
}

impl Bar {
    fn length(&self) -> f64 {
        self.parts.iter().map(|part| part.0).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of an attribute.
    fn number(element: &str, name: &str) -> f64 {
        let value = element.split_once(&format!(" {name}=\"")).and_then(|(_, rest)| rest.split_once('"'));
        value.and_then(|(value, _)| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {element}"))
    }

    /// Bars that end a little before the baseline's, so that their texts stand where its line runs.
    #[test]
    fn dashed_lines_run_past_texts() {
        let bar = |(label, length): (&str, f64)| {
            let parts = vec![(length, BUSY)];
            Bar { label: label.into(), parts, range: None, text: format!("{length} MiB (0.97x)"), strong: false }
        };
        let bars = [("ddp_fp32", 100.0), ("zero1", 90.0), ("zero2", 97.0), ("tp2", 120.0)].map(bar).into();
        let picture = Bars { title: "A".into(), subtitle: "B".into(), bars, mark: Some(100.0), legend: vec![] }.svg();
        let lines: Vec<&str> = picture.lines().filter(|line| line.contains("stroke-dasharray=\"3 3\"")).collect();
        let mut met = 0;
        for text in picture.lines().filter(|line| line.contains("MiB") && line.starts_with("<text ")) {
            let said = text.split_once('>').unwrap().1.trim_end_matches("</text>");
            // DejaVu Sans: letters are half as wide as high, and more.
            let (x, y, size) = (number(text, "x"), number(text, "y"), number(text, "font-size"));
            let inside = |at: f64| at > x && at < x + 0.5 * size * said.chars().count() as f64;
            let through = |line: &&&str| inside(number(line, "x1")) && number(line, "y1") < y && number(line, "y2") > y;
            assert_eq!(lines.iter().find(through), None, "through {said:?}");
            met += usize::from(lines.iter().any(|line| inside(number(line, "x1"))));
        }
        assert!(lines.len() == 2 && met == 2, "{} dashed lines, {met} texts at them: {picture}", lines.len());
    }
}
