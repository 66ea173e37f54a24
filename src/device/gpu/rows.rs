//! What launches over rows share: threads for a row, memory between two launches, sums over rows, and the check of indices that
//! kernels follow. Never waits for the GPU, unless its driver has done everything when a call returns.
use super::{Arg, GpuDevice, Kernel, Shape};
use crate::base::{Error, Result};
use crate::device::{Buf, IGNORE, View, ViewMut};

/// Elements of a row that a thread takes at most: `ITEMS` of `kernels/row.ptx`.
const ITEMS: usize = 16;
/// 4-byte words between two launches, for each multiprocessor: the sums of 512 threads of [`ITEMS`] columns, twice.
const WORDS: usize = 2 * 512 * ITEMS;
/// That of the smallest GPU.
const LEAST_WORDS: usize = 16 * WORDS;

/// Rows of `width` elements in `len`.
pub fn rows(op: &'static str, name: &str, len: usize, width: usize) -> Result<usize> {
    match len.checked_div(width) {
        Some(rows) if rows * width == len => Ok(rows),
        _ => Err(Error::op(op, format!("{name} holds {len} elements, not whole rows of {width}"))),
    }
}

/// A CTA for a row, whole warps of at most `most` threads.
pub fn threads(op: &'static str, columns: usize, most: usize) -> Result<u32> {
    let threads = columns.div_ceil(ITEMS).next_multiple_of(32).max(32);
    match threads <= most {
        true => Ok(threads as u32),
        false => {
            let what = format!("rows of {columns} elements: this kernel takes at most {}", most * ITEMS);
            Err(Error::op(op, what))
        }
    }
}

/// How many elements [`words`] gives.
pub fn word_count(multiprocessors: u32) -> usize {
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

impl GpuDevice {
    /// CTAs of so many threads that give each multiprocessor `resident` threads, but no more than there is work.
    pub fn resident(&self, parts: usize, threads: u32, resident: u32) -> u32 {
        let most = self.driver.multiprocessors() * (resident / threads).max(1);
        parts.min(most as usize) as u32
    }
    /// A launch of so many CTAs of so many threads.
    pub fn line(&self, variant: &'static str, entry: &'static str, at: (u32, u32), args: &mut [Arg]) -> Result<()> {
        self.driver.launch(Kernel { variant, entry }, Shape::line(at.0, at.1), args)
    }
    /// `y` f32 `+=` the sum of the rows of `x`, which are 4-byte words that hold f32.
    pub fn sum_rows(&self, x: View, y: ViewMut) -> Result<()> {
        let (rows, columns) = (x.len() / y.len(), y.len());
        let args = &mut [Arg::In(x), Arg::InOut(y), Arg::U32(rows as u32), Arg::U32(columns as u32)];
        self.line("sum_rows", "sum_rows", (columns.div_ceil(32) as u32, 1024), args)
    }
    /// Has the GPU look for indices from `limit` on (other than [`IGNORE`], where that may stand there): kernels that are given
    /// `follows` of `faults` do nothing once one was found. A GPU that has done everything says so at once, others at the
    /// next download.
    pub fn check(&self, follows: Follows, indices: View, limit: usize, faults: &mut Faults) -> Result<()> {
        const ENTRY: &str = "check";
        faults.limits[follows as usize] = limit;
        let n = indices.len();
        if limit == 0 && n > 0 {
            let (op, what) = Follows::NAMES[follows as usize];
            return Err(Error::op(op, format!("{n} {what}s and nothing that they could be of")));
        }
        // Where none may stand outside, the one to pass is one that is inside.
        let pass = if Follows::NAMES[follows as usize].1 == "target" { IGNORE as u32 } else { 0 };
        let fault = faults.of_mut(follows);
        let args =
            &mut [Arg::In(indices), Arg::InOut(fault), Arg::U32(n as u32), Arg::U32(limit as u32), Arg::U32(pass)];
        self.line(ENTRY, ENTRY, (self.resident(n.div_ceil(1024), 1024, 2048), 1024), args)?;
        if self.driver.waits() { self.raise(faults) } else { Ok(()) }
    }
    /// The first fault that was found, if there is one; it is then forgotten.
    pub fn raise(&self, faults: &mut Faults) -> Result<()> {
        self.raise_with(faults, &mut [])
    }
    /// The same, downloaded with `parts`.
    pub fn raise_with(&self, faults: &mut Faults, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        if faults.limits == [0; Follows::COUNT] {
            return self.driver.download(parts);
        }
        let mut found = [0; 8 * Follows::COUNT];
        let mut all: Vec<(View, &mut [u8])> = vec![(faults.found.view(), &mut found)];
        all.extend(parts.iter_mut().map(|(src, dst)| (*src, &mut **dst)));
        self.driver.download(&mut all)?;
        let Some(at) = found.as_chunks().0.iter().position(|f| *f != [0; 8]) else { return Ok(()) };
        self.driver.zero(faults.found.view_mut())?;
        let fault = u64::from_ne_bytes(found.as_chunks().0[at]);
        let (index, row, limit) = (fault as u32, !((fault >> 32) as u32), faults.limits[at]);
        let (op, what) = Follows::NAMES[at];
        let what = match what {
            "target" => format!("target {} at row {row} is neither {IGNORE} nor in 0..{limit}", index as i32),
            what => format!("{what} {index} at row {row} is outside the table of {limit} rows"),
        };
        Err(Error::op(op, what))
    }
}

/// Who follows indices.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    Embed,
    EmbedBackward,
    Rope,
    QkNormRope,
    QkNormRopeBackward,
    CrossEntropy,
    CrossEntropyPart,
    CrossEntropyFinish,
}

impl Follows {
    const COUNT: usize = 8;
    /// Operation and index, as errors name them.
    const NAMES: [(&str, &str); Follows::COUNT] = [
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
pub struct Faults {
    found: Buf,
    /// What the last indices had to be below, 0 as long as there were none.
    limits: [usize; Follows::COUNT],
}

impl Faults {
    /// Words of [`Faults::new`]'s buffer.
    pub const WORDS: usize = 2 * Follows::COUNT;

    pub fn new(found: Buf) -> Faults {
        Faults { found, limits: [0; Follows::COUNT] }
    }
    pub fn of(&self, follows: Follows) -> View<'_> {
        let at = 2 * follows as usize;
        self.found.view().slice(at..at + 2)
    }
    fn of_mut(&mut self, follows: Follows) -> ViewMut<'_> {
        let at = 2 * follows as usize;
        self.found.view_mut().slice(at..at + 2)
    }
}
