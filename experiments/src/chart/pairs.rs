//! Bars of contenders, one for each variant, in stacked panels: small enough for the first screen of a page, and
//! readable on a phone. Light or dark. Never computes a value.
use super::*;

/// Paper and ink; then bar colors, for the first variant and the last.
pub struct Theme {
    pub(super) paper: &'static str,
    pub(super) ink: &'static str,
    pub(super) quiet: &'static str,
    pub(super) ours: [&'static str; 2],
    pub(super) others: [&'static str; 2],
}

pub const LIGHT: Theme = Theme {
    paper: "#ffffff",
    ink: "#1f2933",
    quiet: "#59636e",
    ours: ["#93b4f5", "#2563eb"],
    others: ["#cfd6de", "#94a3b8"],
};
/// The paper is GitHub's.
pub const DARK: Theme = Theme {
    paper: "#0d1117",
    ink: "#e6edf3",
    quiet: "#9198a1",
    ours: ["#2a4f9e", "#60a5fa"],
    others: ["#3d4752", "#7d8b9b"],
};

/// One bar: a value, the least and most measured, and its text.
pub struct PairBar {
    pub value: f64,
    pub range: (f64, f64),
    pub text: String,
}

pub struct Contender {
    pub name: String,
    pub ours: bool,
    /// One for each variant, in the same order everywhere.
    pub bars: Vec<PairBar>,
}

pub struct PairPanel {
    pub title: String,
    pub contenders: Vec<Contender>,
}

pub struct PairChart {
    pub title: String,
    pub subtitle: String,
    pub panels: Vec<PairPanel>,
}

const EDGE: f64 = 20.0;
const PAGE: f64 = 640.0;
const THICK: f64 = 15.0;
const NOTE: Style = Style { size: 14.0, ..SMALL };

impl PairChart {
    pub fn svg(&self, theme: &Theme) -> String {
        let mut canvas = Canvas { body: String::new(), width: PAGE, height: 36.0, paper: theme.paper };
        canvas.plain(EDGE, canvas.height, Style { size: 21.0, fill: theme.ink, ..TITLE }, &self.title);
        for line in wrapped_in(NOTE, &self.subtitle, PAGE - 2.0 * EDGE) {
            canvas.height += 20.0;
            canvas.plain(EDGE, canvas.height, Style { fill: theme.quiet, ..NOTE }, &line);
        }
        for panel in &self.panels {
            canvas.height += 38.0;
            let heading = Style { size: 16.0, bold: true, fill: theme.ink, ..PLAIN };
            canvas.plain(EDGE, canvas.height, heading, &panel.title);
            canvas.height += 10.0;
            panel.draw(&mut canvas, theme);
        }
        canvas.height += 12.0;
        canvas.finish(&format!("{}. {}", self.title, self.subtitle))
    }
}

impl PairPanel {
    fn draw(&self, canvas: &mut Canvas, theme: &Theme) {
        let label = |ours| Style { size: 15.0, bold: ours, anchor: Anchor::End, fill: theme.ink };
        let bars = || self.contenders.iter().flat_map(|c| &c.bars);
        let widest = |widths: &mut dyn Iterator<Item = f64>| widths.fold(0.0, f64::max);
        let left = EDGE + widest(&mut self.contenders.iter().map(|c| label(c.ours).width(&c.name))) + 10.0;
        let right = PAGE - EDGE - widest(&mut bars().map(|bar| NOTE.width(&bar.text))) - 10.0;
        let longest = widest(&mut bars().map(|bar| bar.value.max(bar.range.1)));
        let scale = (right - left) / if longest > 0.0 { longest } else { 1.0 };
        // No bar has the color of a contender that failed at the last variant.
        let variants = self.contenders.iter().map(|c| c.bars.len()).max().unwrap_or(0);
        for contender in &self.contenders {
            let high = contender.bars.len() as f64 * (THICK + 2.0);
            let style = label(contender.ours);
            canvas.plain(left - 10.0, canvas.height + high / 2.0 + 5.0, style, &contender.name);
            let colors = if contender.ours { theme.ours } else { theme.others };
            for (n, bar) in contender.bars.iter().enumerate() {
                let hint = format!("{}: {}", contender.name, bar.text);
                let color = colors[usize::from(n + 1 == variants)];
                canvas.rect((left, canvas.height), (bar.value * scale, THICK), color, &hint);
                let (low, most) = (left + bar.range.0 * scale, left + bar.range.1 * scale);
                let middle = canvas.height + THICK / 2.0;
                if most > low {
                    canvas.line((low, middle), (most, middle), theme.ink, 1.2, "");
                }
                let end = (left + bar.value * scale).max(most);
                let fill = if contender.ours { theme.ink } else { theme.quiet };
                canvas.plain(end + 8.0, middle + 5.0, Style { fill, ..NOTE }, &bar.text);
                canvas.height += THICK + 2.0;
            }
            canvas.height += 9.0;
        }
    }
}
