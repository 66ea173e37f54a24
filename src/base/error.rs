//! The one error type. Every variant carries what a user needs to act: the operation, the rank or path, the values.
//! Never prints and never exits: the binaries map an error to an exit status by [`Error::exit_status`].
use super::quote::message;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Bad flags, config, data or checkpoint: found before anything starts or is overwritten. Exit status 2.
    /// The text names the value and the remedy.
    #[error("{}", message(.0))]
    Input(String),
    /// A checkpoint is not what was written, or parts of it are missing. Exit status 2, where no older one is gone on
    /// from.
    #[error("{}", message(.0))]
    Damaged(String),
    /// An operation was handed lengths, dtypes or values that do not fit it: a fault of the program.
    #[error("{op}: {what}")]
    Op { op: &'static str, what: String },
    /// A collective failed or timed out. `what` names the missing ranks, or both sizes.
    #[error("rank {rank}: {op} on {group} ({unit}): {what}")]
    Comm { rank: usize, op: &'static str, group: String, unit: String, what: String },
    /// A file operation failed while running (a full disk, a permission). Exit status 1.
    #[error("{op} {}: {source}", path.display())]
    Io { op: &'static str, path: PathBuf, source: std::io::Error },
    /// The run failed: the message names rank, step and operation. Exit status 1.
    #[error("{0}")]
    Run(String),
    /// Ended by a signal, after saving where a checkpoint directory was given. Exit status 128 + n.
    #[error("stopped by signal {0}")]
    Signal(i32),
}

impl Error {
    /// 2 for bad input, 128 + n after signal n, 1 for everything that failed while running.
    pub fn exit_status(&self) -> u8 {
        match self {
            Error::Input(_) | Error::Damaged(_) => 2,
            Error::Signal(n) => (128 + n) as u8,
            _ => 1,
        }
    }
    pub fn input(what: impl Into<String>) -> Error {
        Error::Input(what.into())
    }
    /// Bad input: what is wrong with a file of the user's.
    pub fn in_file(path: &Path, what: impl std::fmt::Display) -> Error {
        Error::Input(format!("{}: {what}", path.display()))
    }
    /// Bad input that is the fault of a checkpoint's files.
    pub fn damaged(self) -> Error {
        match self {
            Error::Input(what) => Error::Damaged(what),
            other => other,
        }
    }
    /// Of what fails before anything starts: a file that cannot be read is bad input then.
    pub fn before_start(self) -> Error {
        match self {
            Error::Io { .. } => Error::Input(self.to_string()),
            other => other,
        }
    }
    pub fn op(op: &'static str, what: impl Into<String>) -> Error {
        Error::Op { op, what: what.into() }
    }
    pub fn io(op: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Error {
        Error::Io { op, path: path.as_ref().to_path_buf(), source }
    }
}
