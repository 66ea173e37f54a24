//! The words of a token file as ids and targets, u16 or u32. Never knows files or rows.
use crate::device::IGNORE;

/// A slice of words of a [`super::cache::TokenFile`].
#[derive(Clone, Copy, Debug)]
pub enum TokenWords<'a> {
    U16(&'a [u16]),
    U32(&'a [u32]),
}

impl<'a> TokenWords<'a> {
    /// The first `n` words.
    pub fn first(self, n: usize) -> TokenWords<'a> {
        self.slice(0..n)
    }
    /// The last `n` words.
    pub fn last(self, n: usize) -> TokenWords<'a> {
        self.slice(self.len() - n..self.len())
    }
    /// Words `1..n`.
    pub fn after_first(self, n: usize) -> TokenWords<'a> {
        self.slice(1..n.max(1))
    }
    pub fn slice(self, range: std::ops::Range<usize>) -> TokenWords<'a> {
        match self {
            TokenWords::U16(w) => TokenWords::U16(&w[range]),
            TokenWords::U32(w) => TokenWords::U32(&w[range]),
        }
    }
    pub fn len(&self) -> usize {
        match self {
            TokenWords::U16(w) => w.len(),
            TokenWords::U32(w) => w.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Index of the first word that is a target.
    pub fn first_target(self) -> Option<usize> {
        match self {
            TokenWords::U16(w) => w.iter().position(|&w| w != u16::MAX),
            TokenWords::U32(w) => w.iter().position(|&w| w != u32::MAX),
        }
    }
    /// `out` is as long as `self`.
    pub fn ids(&self, out: &mut [u32]) {
        match self {
            TokenWords::U16(w) => out.iter_mut().zip(*w).for_each(|(o, &w)| *o = w as u32),
            TokenWords::U32(w) => out.copy_from_slice(w),
        }
    }
    /// Writes targets: ids, or [`IGNORE`] for the largest word, which is never an id. `out` is as long as `self`.
    pub fn targets(&self, out: &mut [i32]) {
        match self {
            TokenWords::U16(w) => {
                out.iter_mut().zip(*w).for_each(|(o, &w)| *o = if w == u16::MAX { IGNORE } else { w as i32 })
            }
            TokenWords::U32(w) => {
                out.iter_mut().zip(*w).for_each(|(o, &w)| *o = if w == u32::MAX { IGNORE } else { w as i32 })
            }
        }
    }
}

/// Ids that hold a number: its bytes, which every vocabulary's words have room for.
pub(super) const NUMBER: usize = size_of::<f32>();
pub(super) type NumberWords = [u32; NUMBER];

/// The number that such ids hold.
pub(super) fn number(ids: NumberWords) -> f32 {
    f32::from_le_bytes(ids.map(|id| id as u8))
}
