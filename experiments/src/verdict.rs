//! How a subcommand ends.

/// The verdict of a subcommand that ran to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Good,
    Bad,
}
