//! How lines look on a terminal: bold labels, dim names, colored warnings and errors. Never changes what they say, nor
//! anything that a file or a pipe gets.
use crate::comm::env;
use clap::builder::styling::{AnsiColor, Style};
use std::io::{IsTerminal, stderr};

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();
pub const WARNING: Style = AnsiColor::Yellow.on_default().bold();
pub const ERROR: Style = AnsiColor::Red.on_default().bold();
/// Names in front of a value, as in `loss 2.341`.
const NAMES: [&str; 9] = ["loss", "grad_norm", "lr", "mem", "eta", "step", "perplexity", "tokens", "best"];

/// Whether text on `stream` has colors.
pub fn is_on(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && env::wants_color()
}

/// Whether lines on stderr have colors.
pub fn on_stderr() -> bool {
    is_on(&stderr())
}

/// `text` in the style of an error, if stderr has colors.
pub fn error(text: &str) -> String {
    if on_stderr() { paint(ERROR, text) } else { text.into() }
}

pub fn paint(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

/// A line of fields with two spaces between them, the first of which is its label.
pub fn fields(line: &str) -> String {
    let Some((label, rest)) = line.split_once("  ").filter(|(label, _)| !label.is_empty()) else {
        return line.to_string();
    };
    let field = |text: &str| match text.split_once(' ').filter(|(name, _)| NAMES.contains(name)) {
        Some((name, value)) => format!("{} {value}", paint(DIM, name)),
        None => text.to_string(),
    };
    format!("{}  {}", paint(BOLD, label), rest.split("  ").map(field).collect::<Vec<_>>().join("  "))
}

#[cfg(test)]
mod tests {
    use super::fields;

    #[test]
    fn labels_are_bold_and_names_dim() {
        let (bold, dim, end) = ("\x1b[1m", "\x1b[2m", "\x1b[0m");
        let step = format!("{bold}step 1/2{end}  {dim}loss{end} 2.3  15 tok/s  {dim}mem{end} 0.1 GiB");
        assert_eq!(fields("step 1/2  loss 2.3  15 tok/s  mem 0.1 GiB"), step);
        assert_eq!(fields("model    llama, 2 layers"), format!("{bold}model{end}    llama, 2 layers"));
        assert_eq!(fields("         go on"), "         go on");
        assert_eq!(fields("a note"), "a note");
    }
}
