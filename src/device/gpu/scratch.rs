//! Memory that launches use among themselves: limbs of sums, words from a first launch to a second, and what kernels
//! found wrong with indices. Never launches.
use crate::base::{DType, Error, Result};
use crate::device::{Buf, LIMBS, View, ViewMut};

/// CTAs of a launch over elements or rows for each multiprocessor, at most: enough to fill it, each with several
/// elements a thread.
pub const CTAS: u32 = 8;
/// Elements of a row that a thread takes at most: `ITEMS` of `kernels/row.ptx`.
pub const ITEMS: usize = 16;
/// 4-byte words between two launches, for each multiprocessor: the sums of 512 threads of [`ITEMS`] columns, twice.
const WORDS: usize = 2 * 512 * ITEMS;
/// That of the smallest GPU.
const LEAST_WORDS: usize = 16 * WORDS;

/// Memory that launches use among themselves; taken once, when the device is made.
pub struct LaunchScratch {
    /// Each CTA's limbs of the sum of squares.
    pub limbs: Buf,
    /// What a first launch leaves for a second, as 4-byte words; see [`words`].
    pub words: Buf,
    pub faults: IndexFaults,
}

/// Of the buffers of [`LaunchScratch`] in its order: what is allocated, and what a plan counts.
pub fn buffers(multiprocessors: u32) -> [(DType, usize); 3] {
    [(DType::F64, limbs(multiprocessors)), (DType::U32, word_count(multiprocessors)), (DType::U32, IndexFaults::WORDS)]
}

/// Limbs that all CTAs together leave for the second launch.
fn limbs(multiprocessors: u32) -> usize {
    (CTAS * multiprocessors) as usize * LIMBS
}

/// How many elements [`words`] gives.
fn word_count(multiprocessors: u32) -> usize {
    (multiprocessors as usize * WORDS).max(LEAST_WORDS)
}

/// The first `n` words that a launch leaves for the next one. Whatever they are, they are told apart by kernels alone.
pub fn words<'a>(op: &'static str, all: &'a mut Buf, n: usize) -> Result<ViewMut<'a>> {
    let have = all.len();
    match n <= have {
        true => Ok(all.view_mut().slice(0..n)),
        false => Err(Error::op(op, format!("needs {n} words between its launches, this GPU has {have} for that"))),
    }
}

/// The operations whose kernels follow indices.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Indexed {
    Embed,
    EmbedBackward,
    Rope,
    QkNormRope,
    QkNormRopeBackward,
    CrossEntropy,
    CrossEntropyPart,
    CrossEntropyFinish,
}

impl Indexed {
    pub const COUNT: usize = 8;
    /// Operation and index, as errors name them.
    pub const NAMES: [(&str, &str); Indexed::COUNT] = [
        ("embed", "token"),
        ("embed_backward", "token"),
        ("rope", "position"),
        ("qk_norm_rope", "position"),
        ("qk_norm_rope_backward", "position"),
        ("cross_entropy", "target"),
        ("cross_entropy_part", "target"),
        ("cross_entropy_finish", "target"),
    ];
}

/// What `kernels/check.ptx` has found: two words for each that follows indices, on the GPU.
pub struct IndexFaults {
    pub found: Buf,
    /// What the last indices had to be below, 0 as long as there were none.
    pub limits: [usize; Indexed::COUNT],
}

impl IndexFaults {
    /// Words of [`IndexFaults::new`]'s buffer.
    pub const WORDS: usize = 2 * Indexed::COUNT;

    pub fn new(found: Buf) -> IndexFaults {
        IndexFaults { found, limits: [0; Indexed::COUNT] }
    }
    pub fn of(&self, follows: Indexed) -> View<'_> {
        let at = 2 * follows as usize;
        self.found.view().slice(at..at + 2)
    }
    pub fn of_mut(&mut self, follows: Indexed) -> ViewMut<'_> {
        let at = 2 * follows as usize;
        self.found.view_mut().slice(at..at + 2)
    }
}
