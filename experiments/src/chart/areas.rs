//! Stacked areas over time, in panels. Values hold until the next one. Never sums what is to be compared.
use super::*;

pub struct Area {
    pub name: &'static str,
    pub color: &'static str,
    /// One for each of [`AreaPanel::times`].
    pub values: Vec<f64>,
}

pub struct AreaPanel {
    pub title: String,
    pub times: Vec<f64>,
    /// Where the last values end.
    pub end: f64,
    /// From the lowest to the highest.
    pub areas: Vec<Area>,
    /// What begins when: written above, where there is room.
    pub marks: Vec<(f64, String)>,
    /// The unit of the time.
    pub unit: &'static str,
    pub height: f64,
}

pub struct Areas {
    pub title: String,
    pub subtitle: String,
    pub panels: Vec<AreaPanel>,
}

impl Areas {
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, &self.subtitle);
        for panel in &self.panels {
            panel.draw(&mut canvas);
        }
        canvas.finish(&format!("{}. {}", self.title, self.subtitle))
    }
}

impl AreaPanel {
    fn draw(&self, canvas: &mut Canvas) {
        canvas.text(20.0, canvas.height + 6.0, Style { fill: INK, bold: true, ..SMALL }, &self.title);
        canvas.height += 28.0;
        let legend: Vec<_> = self.areas.iter().rev().map(|area| (area.color, area.name)).collect();
        canvas.legend(&legend);
        let (left, right, top) = (84.0, WIDTH - 24.0, canvas.height + 10.0);
        let bottom = top + self.height;
        let sum = |i: usize| self.areas.iter().map(|area| area.values[i]).sum::<f64>();
        let marks = ticks(0.0, (0..self.times.len()).map(sum).fold(0.0, f64::max), 5);
        let most = marks[marks.len() - 1];
        let start = self.times.first().copied().unwrap_or(0.0);
        let across = |t: f64| left + (right - left) * (t - start) / (self.end - start).max(f64::MIN_POSITIVE);
        let place = |value: f64| bottom - self.height * value / most;
        for (&mark, text) in marks.iter().zip(tick_texts(&marks)) {
            canvas.line((left, place(mark)), (right, place(mark)), GRID, 1.0, "");
            canvas.text(left - 8.0, place(mark) + 4.0, SMALL.anchored(Anchor::End), &text);
        }
        let mut below = vec![0.0; self.times.len()];
        for area in &self.areas {
            let above: Vec<f64> = below.iter().zip(&area.values).map(|(low, value)| low + value).collect();
            let edge = |level: &[f64]| -> Vec<(f64, f64)> {
                let ends = self.times[1..].iter().copied().chain([self.end]);
                let steps = self.times.iter().zip(ends).zip(level);
                steps.flat_map(|((&from, to), &y)| [(across(from), place(y)), (across(to), place(y))]).collect()
            };
            let (mut outline, mut back) = (edge(&above), edge(&below));
            back.reverse();
            outline.append(&mut back);
            canvas.area(&outline, area.color, area.name);
            below = above;
        }
        let mut free = left;
        for (at, what) in &self.marks {
            let x = across(*at);
            let width = SMALL.width(what);
            if x >= free && x + width < right + 8.0 {
                canvas.line((x, top - 8.0), (x, bottom), QUIET, 0.7, "2 3");
                canvas.text(x + 3.0, top - 4.0, SMALL, what);
                free = x + width + 10.0;
            }
        }
        for tick in ticks(start, self.end, 8).into_iter().filter(|t| *t >= start && *t <= self.end) {
            canvas.line((across(tick), bottom), (across(tick), bottom + 5.0), QUIET, 1.0, "");
            canvas.text(across(tick), bottom + 19.0, SMALL.anchored(Anchor::Middle), &tick_text(tick));
        }
        canvas.line((left, bottom), (right, bottom), QUIET, 1.0, "");
        canvas.text(right, bottom + 34.0, SMALL.anchored(Anchor::End), self.unit);
        canvas.height = bottom + 56.0;
    }
}
