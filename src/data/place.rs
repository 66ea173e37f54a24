//! The position of a row or token in its file, for error messages. Never reads the file.
use super::fields::token_id;
use crate::base::{Error, Result};
use std::path::Path;

/// Where a token was read.
pub(super) enum TokenPlace<'a> {
    /// Line number, from 1.
    Line(&'a Path, u64),
    /// Row of a Parquet file or JSON array, from 0.
    Row(&'a Path, u64),
    /// Element of a token array, from 0.
    Index(&'a Path, u64),
}

impl std::fmt::Display for TokenPlace<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            TokenPlace::Line(path, n) => write!(f, "{}: line {n}", path.display()),
            TokenPlace::Row(path, n) => write!(f, "{}: row {n} (from 0)", path.display()),
            TokenPlace::Index(path, i) => write!(f, "{}: element {i}", path.display()),
        }
    }
}

impl TokenPlace<'_> {
    pub fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::input(format!("{self} {what}"))
    }
    /// `value` as a token id, checked to be in `0..bound`.
    pub fn id(&self, value: Option<i64>, bound: usize) -> Result<u32> {
        match value {
            Some(id) => token_id(id, bound).map_err(|fault| self.error(fault)),
            None => Err(self.error("is not a token id: it is 2^63 or more")),
        }
    }
}
