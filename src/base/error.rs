//! The one error type. Every variant carries what a user needs to act: the operation, the rank or path, the values.
//! Never prints or exits: the binaries map an error to an exit status with [`Error::exit_status`].
use super::quote::message;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Bad flags, config, data or checkpoint, found before anything starts or is overwritten. Exit status 2. The text
    /// names the value and the remedy.
    #[error("{}", message(.0))]
    Input(String),
    /// A checkpoint is damaged or incomplete. Exit status 2, unless the run resumes from an older one.
    #[error("{}", message(.0))]
    Damaged(String),
    /// An operation was called with lengths, dtypes or values that do not match: a bug in the program.
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
    /// The run failed, as its ranks have agreed: no collective is to blame. Exit status 1.
    #[error("{0}")]
    Agreed(String),
    /// Bad input that another process of the job reports. Exit status 2.
    #[error("another process of the job reports what is wrong")]
    Reported,
    /// Stopped by a signal, after saving if a checkpoint directory is set. Exit status 128 + n.
    #[error("stopped by signal {0}")]
    Signal(i32),
}

impl Error {
    /// 2 for bad input, 128 + n after signal n, 1 for a failure at run time.
    pub fn exit_status(&self) -> u8 {
        match self {
            Error::Input(_) | Error::Damaged(_) | Error::Reported => 2,
            Error::Signal(n) => (128 + n) as u8,
            _ => 1,
        }
    }
    pub fn input(what: impl Into<String>) -> Error {
        Error::Input(what.into())
    }
    /// Bad input in the file at `path`.
    pub fn in_file(path: &Path, what: impl std::fmt::Display) -> Error {
        Error::Input(format!("{}: {what}", path.display()))
    }
    /// Marks bad input as damage to a checkpoint's files.
    pub fn damaged(self) -> Error {
        match self {
            Error::Input(what) => Error::Damaged(what),
            other => other,
        }
    }
    /// Before anything starts, a file that cannot be read counts as bad input.
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
