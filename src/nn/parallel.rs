//! How the work inside a layer is split over the ranks of tp (heads, columns, vocabulary) and of sp (tokens): as plain data
//! for plans, and as groups for what runs. Never communicates.
mod cut;
pub mod plan;
mod region;

pub use cut::Cuts;

use crate::comm::{Axis, Collective, Mesh, solo::Solo};
use crate::device::Device;
use std::ops::Range;
use std::sync::Arc;

/// One of `of` parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice {
    pub index: usize,
    pub of: usize,
}

impl Slice {
    pub const WHOLE: Slice = Slice { index: 0, of: 1 };
    /// This part of `n` things in a row; the last parts may have fewer than the first, or none.
    pub fn range(&self, n: usize) -> Range<usize> {
        let each = n.div_ceil(self.of);
        (self.index * each).min(n)..((self.index + 1) * each).min(n)
    }
    /// This part of `n` things in a row, where no two parts differ by more than one: the first may have one more than the last.
    pub fn share(&self, n: usize) -> Range<usize> {
        let first = |index: usize| index * (n / self.of) + index.min(n % self.of);
        first(self.index)..first(self.index + 1)
    }
    /// The most that any part has of `n` things.
    pub fn most(&self, n: usize) -> usize {
        n.div_ceil(self.of)
    }
}

/// How keys and values reach the queries of the other ranks of sp.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RingImpl {
    /// Block by block around the ring, under the attention over the block before (Liu et al. 2023).
    #[default]
    Ring,
    /// All at once, before the attention.
    AllGather,
}

/// One rank's part of the work inside a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    pub tp: Slice,
    pub sp: Slice,
    /// Norms and residuals are split over tp along the tokens (Korthikanti et al. 2022).
    pub sequence_parallel: bool,
    /// What the ranks of tp have parts of.
    pub cuts: Cuts,
    pub ring: RingImpl,
}

impl Split {
    /// Everything on one rank.
    pub const NONE: Split =
        Split { tp: Slice::WHOLE, sp: Slice::WHOLE, sequence_parallel: false, cuts: Cuts::ALL, ring: RingImpl::Ring };
}

/// The groups that layers communicate in.
#[derive(Clone)]
pub struct Groups {
    pub tp: Arc<dyn Collective>,
    pub sp: Arc<dyn Collective>,
}

impl Groups {
    pub fn of(mesh: &Mesh) -> Groups {
        Groups { tp: mesh.tp.clone(), sp: mesh.sp.clone() }
    }
    /// For [`Split::NONE`].
    pub fn solo(dev: &Arc<dyn Device>) -> Groups {
        let group = |axis| Arc::new(Solo::new(dev.clone(), axis, 0));
        Groups { tp: group(Axis::Tp), sp: group(Axis::Sp) }
    }
}
