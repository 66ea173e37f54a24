//! The result of a subcommand. Never prints.

/// The verdict of a subcommand that did what it was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Good,
    Bad,
    /// By a signal, as it is meant to end: status 128 + n, without a message.
    Stopped(i32),
}
