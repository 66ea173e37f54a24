//! Rows of spans over a common time axis, in titled groups. Never decides what is drawn.
use super::*;

pub struct GanttSpan {
    pub from: f64,
    pub to: f64,
    pub color: &'static str,
    /// Drawn where there is room for it.
    pub text: String,
    /// Shown by a browser that points at it.
    pub hint: String,
}

pub struct GanttRow {
    pub label: String,
    /// Later ones are drawn over earlier ones.
    pub spans: Vec<GanttSpan>,
}

pub struct GanttGroup {
    pub title: String,
    pub rows: Vec<GanttRow>,
}

pub struct Gantt {
    pub title: String,
    pub subtitle: String,
    pub legend: Vec<(&'static str, &'static str)>,
    /// What is drawn of the axis, and what its numbers are.
    pub from: f64,
    pub to: f64,
    pub unit: &'static str,
    pub groups: Vec<GanttGroup>,
}

const ROW: f64 = 22.0;
const THICK: f64 = 17.0;
const INSIDE: Style = Style { size: 10.0, anchor: Anchor::Middle, bold: false, fill: "#ffffff" };
/// Narrower ones are drawn this wide: an unseen wait is no wait that was not there.
const NARROWEST: f64 = 0.4;

/// The sizes of a thumbnail: its width, a row, and what is between groups.
const SMALL_PAGE: f64 = 480.0;
const SMALL_ROW: f64 = 9.0;
const SMALL_GAP: f64 = 5.0;

impl Gantt {
    /// Without words, on no paper: for a page of either color.
    pub fn thumbnail(&self) -> String {
        let across = |t: f64| SMALL_PAGE * (t - self.from) / (self.to - self.from).max(f64::MIN_POSITIVE);
        let halves = |x: f64| (2.0 * x.clamp(0.0, SMALL_PAGE)).round() / 2.0;
        let (mut body, mut y) = (String::new(), 0.0);
        for group in &self.groups {
            for row in &group.rows {
                // A trace has many more spans than a thumbnail has dots: what would not be seen is not drawn.
                let mut last = (-1.0, "");
                for span in &row.spans {
                    let (from, to) = (halves(across(span.from)), halves(across(span.to)));
                    if to <= last.0 && span.color == last.1 {
                        continue;
                    }
                    last = (to.max(from + 0.5), span.color);
                    let (width, high, color) = (last.0 - from, SMALL_ROW - 2.0, span.color);
                    // Writing to a String does not fail.
                    let _ = write!(body, "<rect x='{from}' y='{y}' width='{width}' height='{high}' fill='{color}'/>");
                }
                y += SMALL_ROW;
            }
            y += SMALL_GAP;
        }
        format!(
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {SMALL_PAGE} {}'>{body}</svg>",
            (y - SMALL_GAP).max(1.0)
        )
    }

    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, &self.subtitle);
        let labels = self.groups.iter().flat_map(|group| &group.rows).map(|row| SMALL.width(&row.label));
        let (left, right) = (20.0 + labels.fold(0.0, f64::max) + 10.0, WIDTH - 24.0);
        let across = |t: f64| left + (right - left) * (t - self.from) / (self.to - self.from).max(f64::MIN_POSITIVE);

        canvas.legend(&self.legend);
        let top = canvas.height;
        let rows: usize = self.groups.iter().map(|group| group.rows.len()).sum();
        let bottom = top + ROW * rows as f64 + 32.0 * self.groups.len() as f64;
        let inside = |t: &f64| *t >= self.from && *t <= self.to;
        for tick in ticks(self.from, self.to, 10).into_iter().filter(inside) {
            canvas.line((across(tick), top - 6.0), (across(tick), bottom), GRID, 1.0, "");
            canvas.text(across(tick), bottom + 16.0, SMALL.anchored(Anchor::Middle), &tick_text(tick));
        }
        for group in &self.groups {
            for line in wrapped(&group.title, WIDTH - 40.0) {
                canvas.text(20.0, canvas.height + 6.0, Style { fill: INK, bold: true, ..SMALL }, &line);
            }
            canvas.height += 18.0;
            for row in &group.rows {
                let y = canvas.height;
                canvas.text(left - 10.0, y + THICK / 2.0 + 4.0, SMALL.anchored(Anchor::End), &row.label);
                for span in &row.spans {
                    let (from, to) = (across(span.from.max(self.from)), across(span.to.min(self.to)));
                    canvas.rect((from, y), ((to - from).max(NARROWEST), THICK), span.color, &span.hint);
                    if to - from > 4.0 {
                        canvas.line((to, y), (to, y + THICK), "#ffffff", 0.7, ""); // neighbors of one color
                    }
                }
                for span in &row.spans {
                    let (from, to) = (across(span.from.max(self.from)), across(span.to.min(self.to)));
                    // All of it, or else its number.
                    let texts = [&span.text[..], span.text.rsplit(' ').next().unwrap_or_default()];
                    if let Some(text) = texts.into_iter().find(|text| INSIDE.width(text) + 4.0 <= to - from) {
                        canvas.plain((from + to) / 2.0, y + THICK / 2.0 + 3.5, INSIDE, text);
                    }
                }
                canvas.height += ROW;
            }
            canvas.height += 14.0;
        }
        canvas.line((left, bottom), (right, bottom), QUIET, 1.0, "");
        canvas.text(right, bottom + 32.0, SMALL.anchored(Anchor::End), self.unit);
        canvas.height = bottom + 44.0;
        canvas.finish(&format!("{}. {}", self.title, self.subtitle))
    }
}
