//! The documents or sequences of an operation that runs along them, on the CPU. Never computes.
use super::attention::documents;
use super::tile::Shared;
use crate::ops::{PagedRows, RowSequences};
use flatshard_base::{Elem, Result};
use std::ops::Range;

/// Checked rows, and what sequences go on from.
pub enum CpuSequences<'a, M> {
    Documents(&'a [[u32; 2]]),
    Carried { runs: &'a [PagedRows<'a>], memory: Shared<'a, M> },
}

/// One of them.
#[derive(Clone)]
pub struct RowSequence {
    pub rows: Range<usize>,
    /// Rows before these.
    pub past: usize,
    pub slot: usize,
}

impl<'a, M: Elem> CpuSequences<'a, M> {
    /// `along` has been checked for `n` rows.
    pub fn new(op: &'static str, along: RowSequences<'a>, n: usize) -> Result<CpuSequences<'a, M>> {
        Ok(match along {
            RowSequences::Whole(of) => CpuSequences::Documents(documents(op, of, n)?),
            RowSequences::Carried { runs, memory, .. } => {
                CpuSequences::Carried { runs, memory: Shared::new(memory.host(op)?) }
            }
        })
    }
    pub fn iter(&self) -> impl Iterator<Item = RowSequence> {
        let mut next = 0; // of rows, or of runs
        std::iter::from_fn(move || match self {
            CpuSequences::Documents(documents) => {
                let rows = next..documents.get(next)?[1] as usize;
                next = rows.end;
                Some(RowSequence { rows, past: 0, slot: 0 })
            }
            CpuSequences::Carried { runs, .. } => {
                let run = runs.get(next)?;
                next += 1;
                Some(RowSequence { rows: run.first..run.first + run.rows, past: run.past, slot: run.slot })
            }
        })
    }
    /// None of documents.
    pub fn memory(&self) -> Option<&Shared<'a, M>> {
        match self {
            CpuSequences::Documents(_) => None,
            CpuSequences::Carried { memory, .. } => Some(memory),
        }
    }
}
