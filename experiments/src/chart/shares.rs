//! Shares over steps, as curves with their names at their ends, light or dark. Never computes a value.
use super::pairs::Theme;
use super::*;

/// The share of something after each of some steps.
pub struct ShareCurve {
    pub name: String,
    /// (step, share from 0 to 1)
    pub points: Vec<(f64, f64)>,
}

const PAGE: f64 = 640.0;
const NOTE: Style = Style { size: 14.0, ..SMALL };

/// `colors`: of the curves, in their order.
pub fn svg(title: &str, subtitle: &str, curves: &[ShareCurve], theme: &Theme) -> String {
    let mut canvas = Canvas { body: String::new(), width: PAGE, height: 36.0, paper: theme.paper };
    canvas.plain(20.0, canvas.height, Style { size: 21.0, fill: theme.ink, ..TITLE }, title);
    for line in wrapped_in(NOTE, subtitle, PAGE - 40.0) {
        canvas.height += 20.0;
        canvas.plain(20.0, canvas.height, Style { fill: theme.quiet, ..NOTE }, &line);
    }
    let widest = curves.iter().map(|curve| NOTE.width(&curve.name)).fold(0.0, f64::max);
    let (left, right, top, high) = (72.0, PAGE - 32.0 - widest, canvas.height + 28.0, 220.0);
    let last = curves.iter().flat_map(|curve| &curve.points).map(|point| point.0).fold(1.0, f64::max);
    let place = |(step, share): (f64, f64)| (left + (right - left) * step / last, top + high * (1.0 - share));
    let quiet = |anchor| Style { anchor, fill: theme.quiet, ..NOTE };
    for percent in [0.0, 25.0, 50.0, 75.0, 100.0] {
        let (_, y) = place((0.0, percent / 100.0));
        canvas.line((left, y), (right, y), theme.others[0], if percent == 0.0 { 1.5 } else { 0.6 }, "");
        canvas.plain(left - 8.0, y + 5.0, quiet(Anchor::End), &format!("{percent} %"));
    }
    for step in ticks(0.0, last, 8).into_iter().filter(|step| *step <= last && step.fract() == 0.0) {
        canvas.plain(place((step, 0.0)).0, top + high + 20.0, quiet(Anchor::Middle), &tick_text(step));
    }
    canvas.plain(right, top + high + 40.0, quiet(Anchor::End), "step");
    let colors = [theme.ours[1], theme.others[1], theme.ours[0]];
    for (n, curve) in curves.iter().enumerate() {
        let (color, placed) = (colors[n % colors.len()], curve.points.iter().map(|&p| place(p)).collect::<Vec<_>>());
        canvas.curve(&placed, color, "", &curve.name);
        placed.iter().for_each(|&point| canvas.dot(point, color));
        // Curves that end alike have their names below one another.
        let end = placed.last().copied().unwrap_or((right, top));
        let style = Style { fill: theme.ink, bold: true, ..NOTE };
        canvas.plain(end.0 + 10.0, end.1 + 5.0 + 18.0 * n as f64, Style { fill: color, ..style }, &curve.name);
    }
    canvas.height = top + high + 54.0;
    canvas.finish(&format!("{title}. {subtitle}"))
}
