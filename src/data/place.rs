//! Where a row or a token was read, for messages. Never reads.
use super::fields::token_id;
use crate::base::{Error, Result};
use std::path::Path;

/// Where a token was read, for messages that name it.
pub(super) enum TokenPlace<'a> {
    /// Counted from 1.
    Line(&'a Path, u64),
    /// Counted from 0, of Parquet or of a JSON array.
    Row(&'a Path, u64),
    /// Counted from 0.
    Index(&'a Path, u64),
}

impl TokenPlace<'_> {
    pub fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::input(match self {
            TokenPlace::Line(path, n) => format!("{}: line {n} {what}", path.display()),
            TokenPlace::Row(path, n) => format!("{}: row {n} (from 0) {what}", path.display()),
            TokenPlace::Index(path, i) => format!("{}: element {i} {what}", path.display()),
        })
    }
    /// `value` as a token id, which is in `0..bound`.
    pub fn id(&self, value: Option<i64>, bound: usize) -> Result<u32> {
        match value {
            Some(id) => token_id(id, bound).map_err(|fault| self.error(fault)),
            None => Err(self.error("is no token id: it is above 2^63")),
        }
    }
}
