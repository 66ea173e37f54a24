//! Curves over steps in stacked panels, with one shared legend. Never smooths.
use super::*;

/// What is drawn once, though several runs may be the same.
pub struct PlottedCurve {
    pub names: Vec<String>,
    pub color: &'static str,
    /// SVG's stroke-dasharray; empty: none.
    pub dashes: &'static str,
    /// (step, value); values that are not finite leave a gap.
    pub points: Vec<(f64, f64)>,
}

pub struct CurvePanel {
    pub title: String,
    pub curves: Vec<PlottedCurve>,
    /// Logarithmic values: those of 0 and below are drawn on the lower edge.
    pub log: bool,
    /// A line across at this value, and what it is.
    pub mark: Option<(f64, String)>,
    pub height: f64,
}

pub struct Curves {
    pub title: String,
    pub subtitle: String,
    /// The first one's curves make the legend.
    pub panels: Vec<CurvePanel>,
}

const LEGEND_LINE: f64 = 17.0;

impl Curves {
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, &self.subtitle);
        let legend: &[PlottedCurve] = self.panels.first().map_or(&[], |panel| &panel.curves);
        let names = legend.iter().flat_map(|curve| &curve.names);
        // What a mark means stands where the legend does, so that no curve runs through it.
        let marks = self.panels.iter().flat_map(|panel| &panel.mark).map(|(_, meaning)| SMALL.width(meaning) - 46.0);
        let widest = names.map(|name| SMALL.width(name)).chain(marks).fold(0.0, f64::max);
        let (left, right) = (76.0, WIDTH - 20.0 - widest - 34.0 - 20.0);
        let top = canvas.height;

        let mut y = top + 8.0;
        for curve in legend {
            canvas.curve(&[(right + 20.0, y), (right + 46.0, y)], curve.color, curve.dashes, "");
            for name in &curve.names {
                canvas.text(right + 54.0, y + 4.0, SMALL, name);
                y += LEGEND_LINE;
            }
            y += 7.0;
        }
        let panels = self.panels.iter().map(|panel| panel.height + 62.0).sum::<f64>();
        let spare = (y - top - panels).max(0.0);
        for (n, panel) in self.panels.iter().enumerate() {
            // A long legend makes the first panel taller, not the picture emptier.
            let height = panel.height + if n == 0 { spare.min(240.0) } else { 0.0 };
            panel.draw(&mut canvas, (left, right), height);
        }
        canvas.height = canvas.height.max(y) + 6.0;
        canvas.finish(&format!("{}. {}", self.title, self.subtitle))
    }
}

impl CurvePanel {
    fn draw(&self, canvas: &mut Canvas, (left, right): (f64, f64), height: f64) {
        canvas.text(left, canvas.height + 8.0, Style { fill: INK, ..SMALL }, &self.title);
        let bottom = canvas.height + 18.0 + height;
        let points = || self.curves.iter().flat_map(|curve| &curve.points).filter(|p| p.1.is_finite());
        let positive = |x: &f64| !self.log || *x > 0.0;
        let values = || points().map(|p| p.1).chain(self.mark.iter().map(|m| m.0)).filter(positive);
        let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        let (low, high) = if low.is_finite() { (low, high) } else { (1e-6, 1.0) };
        let marks = if self.log { decades(low, high) } else { ticks(low, high, 5) };
        let (low, high) = (marks[0], marks[marks.len() - 1]);
        let place = |value: f64| match self.log {
            true => bottom - height * (value.max(low).log10() - low.log10()) / (high.log10() - low.log10()),
            false => bottom - height * (value - low) / (high - low),
        };
        for (&mark, text) in marks.iter().zip(tick_texts(&marks)) {
            canvas.line((left, place(mark)), (right, place(mark)), GRID, 1.0, "");
            canvas.text(left - 8.0, place(mark) + 4.0, SMALL.anchored(Anchor::End), &text);
        }
        let first = points().map(|p| p.0).fold(f64::INFINITY, f64::min);
        let last = points().map(|p| p.0).fold(f64::NEG_INFINITY, f64::max);
        let (first, last) = if first.is_finite() { (first, last.max(first + 1.0)) } else { (0.0, 1.0) };
        let across = |step: f64| left + (right - left) * (step - first) / (last - first);
        let whole = |x: &f64| *x >= first && *x <= last && x.fract() == 0.0;
        for step in ticks(first, last, 8).into_iter().filter(whole) {
            canvas.line((across(step), bottom), (across(step), bottom + 5.0), QUIET, 1.0, "");
            canvas.text(across(step), bottom + 19.0, SMALL.anchored(Anchor::Middle), &tick_text(step));
        }
        canvas.text(right, bottom + 34.0, SMALL.anchored(Anchor::End), "step");
        canvas.line((left, bottom), (right, bottom), QUIET, 1.0, "");
        for curve in &self.curves {
            let hint = curve.names.join(", ");
            for run in curve.points.split(|p| !p.1.is_finite()).filter(|run| !run.is_empty()) {
                let placed: Vec<_> = run.iter().map(|p| (across(p.0), place(p.1))).collect();
                match placed[..] {
                    [single] => canvas.dot(single, curve.color),
                    _ => canvas.curve(&placed, curve.color, curve.dashes, &hint),
                }
            }
        }
        if let Some((value, meaning)) = &self.mark {
            canvas.line((left, place(*value)), (right, place(*value)), EXPOSED, 1.0, "4 3");
            canvas.text(right + 8.0, place(*value) + 4.0, Style { fill: EXPOSED, ..SMALL }, meaning);
        }
        canvas.height = bottom + 44.0;
    }
}

/// Powers of ten that span `low..=high`, two at least.
fn decades(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let every = ((last - first) / 6 + 1) as usize;
    (first..=last.max(first + 1) + every as i32 - 1).step_by(every).map(|n| 10f64.powi(n)).collect()
}
