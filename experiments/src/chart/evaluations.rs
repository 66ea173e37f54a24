//! Results of evaluations over steps, as curves with their names at their ends, light or dark. Never computes a value.
use super::pairs::Theme;
use super::*;

/// What evaluations of one run found.
#[derive(PartialEq, Debug)]
pub struct EvaluationCurve {
    pub name: String,
    /// Runs of one kind have one color. An index.
    pub kind: usize,
    /// (step, value)
    pub points: Vec<(f64, f64)>,
}

/// What the values are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum EvaluatedAs {
    /// From 0 to 1.
    Share,
    Loss,
}

const PAGE: f64 = 640.0;
const NOTE: Style = Style { size: 14.0, ..SMALL };
/// Distance of two names.
const LINE: f64 = 18.0;

pub fn svg(title: &str, subtitle: &str, (of, curves): (EvaluatedAs, &[EvaluationCurve]), theme: &Theme) -> String {
    let mut canvas = Canvas { body: String::new(), width: PAGE, height: 36.0, paper: theme.paper };
    canvas.plain(20.0, canvas.height, Style { size: 21.0, fill: theme.ink, ..TITLE }, title);
    for line in wrapped_in(NOTE, subtitle, PAGE - 40.0) {
        canvas.height += 20.0;
        canvas.plain(20.0, canvas.height, Style { fill: theme.quiet, ..NOTE }, &line);
    }
    let widest = curves.iter().map(|curve| NOTE.width(&curve.name)).fold(0.0, f64::max);
    let high = if of == EvaluatedAs::Share { 220.0 } else { 300.0 };
    let (left, right, top) = (72.0, PAGE - 32.0 - widest, canvas.height + 28.0);
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let last = points().map(|point| point.0).fold(1.0, f64::max);
    let marks = match of {
        EvaluatedAs::Share => vec![0.0, 0.25, 0.5, 0.75, 1.0],
        EvaluatedAs::Loss => {
            let range = points().fold((f64::MAX, f64::MIN), |(low, high), p| (low.min(p.1), high.max(p.1)));
            ticks(range.0, range.1, 5)
        }
    };
    let (low, most) = (marks[0], marks[marks.len() - 1]);
    let place =
        |(step, value): (f64, f64)| (left + (right - left) * step / last, top + high * (most - value) / (most - low));
    let quiet = |anchor| Style { anchor, fill: theme.quiet, ..NOTE };
    for (&mark, text) in marks.iter().zip(tick_texts(&marks)) {
        let y = place((0.0, mark)).1;
        let text = if of == EvaluatedAs::Share { format!("{} %", 100.0 * mark) } else { text };
        canvas.line((left, y), (right, y), theme.others[0], if mark == low { 1.5 } else { 0.6 }, "");
        canvas.plain(left - 8.0, y + 5.0, quiet(Anchor::End), &text);
    }
    for step in ticks(0.0, last, 8).into_iter().filter(|step| *step <= last && step.fract() == 0.0) {
        canvas.plain(place((step, low)).0, top + high + 20.0, quiet(Anchor::Middle), &tick_text(step));
    }
    canvas.plain(right, top + high + 40.0, quiet(Anchor::End), "step");
    let colors = [theme.ours[1], theme.others[1], theme.ours[0]];
    // Names of curves that end alike are placed one below another, and none below the axis.
    let end = |curve: &EvaluationCurve| curve.points.last().map_or((right, top), |&point| place(point));
    let mut order: Vec<&EvaluationCurve> = curves.iter().collect();
    order.sort_by(|a, b| end(a).1.total_cmp(&end(b).1));
    let mut ys: Vec<f64> = order.iter().map(|curve| end(curve).1 + 5.0).collect();
    for n in 1..ys.len() {
        ys[n] = ys[n].max(ys[n - 1] + LINE);
    }
    let mut limit = top + high;
    for y in ys.iter_mut().rev() {
        *y = y.min(limit);
        limit = *y - LINE;
    }
    for (curve, y) in order.into_iter().zip(ys) {
        let color = colors[curve.kind % colors.len()];
        let placed: Vec<_> = curve.points.iter().map(|&point| place(point)).collect();
        canvas.curve(&placed, color, "", &curve.name);
        placed.iter().for_each(|&point| canvas.dot(point, color));
        canvas.plain(end(curve).0 + 10.0, y, Style { fill: color, bold: true, ..NOTE }, &curve.name);
    }
    canvas.height = top + high + 54.0;
    canvas.finish(&format!("{title}. {subtitle}"))
}
