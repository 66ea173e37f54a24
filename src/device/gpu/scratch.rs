//! Scratch memory of launches: limbs of sums, words passed from one launch to the next, faults found in indices, and
//! the tables of 8-bit blocks. Never launches.
use crate::{Buf, LIMBS, View, ViewMut};
use flatshard_base::dynamic8::{SIGNED, UNSIGNED};
use flatshard_base::{DType, Error, Result};

/// Maximum CTAs per multiprocessor for launches over elements or rows: enough to fill it, with several elements per
/// thread.
pub const CTAS: u32 = 8;
/// Maximum elements of a row per thread: `ITEMS` of `kernels/row.ptx`.
pub const ITEMS: usize = 16;
/// 4-byte words between two launches, per multiprocessor: the sums of 512 threads of [`ITEMS`] columns, twice.
const WORDS: usize = 2 * 512 * ITEMS;
/// For the smallest GPU.
const LEAST_WORDS: usize = 16 * WORDS;

/// Scratch memory of launches, allocated once with the device.
pub struct LaunchScratch {
    /// Each CTA's limbs of the sum of squares.
    pub limbs: Buf,
    /// Data from one launch to the next, as 4-byte words; see [`words`].
    pub words: Buf,
    pub faults: IndexFaults,
    /// How many tiles CTAs of a launch have drawn: 0 between launches.
    pub drawn: Buf,
    /// See [`tables`].
    pub tables: Buf,
}

/// What `kernels/adamw_blocks.ptx` reads: signed and unsigned fractions, then their bounds.
pub fn tables() -> Vec<f32> {
    let maps = || [&*SIGNED, &*UNSIGNED].into_iter();
    let bounds = maps().flat_map(|map| map.bounds.into_iter().chain([f32::INFINITY]));
    maps().flat_map(|map| map.values).chain(bounds).collect()
}
/// Elements of [`tables`].
const TABLES: usize = 4 * 256;

/// Sizes of the buffers of [`LaunchScratch`], in order: for allocation and planning.
pub fn buffers(multiprocessors: u32) -> [(DType, usize); 5] {
    let words = (DType::U32, word_count(multiprocessors));
    [
        (DType::F64, limbs(multiprocessors)),
        words,
        (DType::U32, IndexFaults::WORDS),
        (DType::U32, 1),
        (DType::F32, TABLES),
    ]
}

/// Limbs that all CTAs together pass to the second launch.
fn limbs(multiprocessors: u32) -> usize {
    (CTAS * multiprocessors) as usize * LIMBS
}

/// How many words [`words`] can return.
fn word_count(multiprocessors: u32) -> usize {
    (multiprocessors as usize * WORDS).max(LEAST_WORDS)
}

/// The first `n` words, which one launch writes and the next reads. Only the kernels define their meaning.
pub fn words<'a>(op: &'static str, all: &'a mut Buf, n: usize) -> Result<ViewMut<'a>> {
    let have = all.len();
    match n <= have {
        true => Ok(all.view_mut().slice(0..n)),
        false => Err(Error::op(op, format!("needs {n} words between its launches, but this GPU's scratch has {have}"))),
    }
}

/// The operations whose kernels use indices.
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
    DistillPart,
    DistillFinish,
}

impl Indexed {
    pub const COUNT: usize = 10;
    /// Names of operation and index in errors.
    pub const NAMES: [(&str, &str); Indexed::COUNT] = [
        ("embed", "token"),
        ("embed_backward", "token"),
        ("rope", "position"),
        ("qk_norm_rope", "position"),
        ("qk_norm_rope_backward", "position"),
        ("cross_entropy", "target"),
        ("cross_entropy_part", "target"),
        ("cross_entropy_finish", "target"),
        ("distill_part", "target"),
        ("distill_finish", "target"),
    ];
}

/// Faults found by `kernels/check.ptx`: two words on the GPU per operation that uses indices.
pub struct IndexFaults {
    pub found: Buf,
    /// Limit of each operation's last indices, 0 if there were none.
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
