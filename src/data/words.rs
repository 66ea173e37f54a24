//! Words of token files as ids and targets, whatever their width. Never knows files or rows.
use crate::device::IGNORE;

/// TokenWords of a [`super::cache::TokenFile`].
#[derive(Clone, Copy, Debug)]
pub enum TokenWords<'a> {
    U16(&'a [u16]),
    U32(&'a [u32]),
}

impl<'a> TokenWords<'a> {
    /// The first `n`.
    pub fn first(self, n: usize) -> TokenWords<'a> {
        self.slice(0..n)
    }
    /// Those of the first `n` that follow the very first.
    pub fn after_first(self, n: usize) -> TokenWords<'a> {
        self.slice(1..n.max(1))
    }
    fn slice(self, range: std::ops::Range<usize>) -> TokenWords<'a> {
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
    /// Both are as long as `self`.
    pub fn ids(&self, out: &mut [u32]) {
        match self {
            TokenWords::U16(w) => out.iter_mut().zip(*w).for_each(|(o, &w)| *o = w as u32),
            TokenWords::U32(w) => out.copy_from_slice(w),
        }
    }
    /// Targets: ids, or [`IGNORE`] for the largest word, which is no id. As long as `self`.
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
