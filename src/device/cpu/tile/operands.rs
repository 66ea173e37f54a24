//! What a group's queries attend to, and the memory that its results go to. Never computes scores.
use super::super::gemm::panels::TokenRows;
use crate::ops::AttentionShape;
use flatshard_base::dtype::Float;
use std::marker::PhantomData;
use std::ops::Range;

/// Which keys a query attends to. Both bounds of both ranges never decrease.
pub enum Mask<'a> {
    /// Tokens up to itself, limited to the last `window`, for the last `len` tokens of a text, which `past` precede.
    Causal { past: usize, len: usize, window: usize },
    /// The same ones, for all queries.
    Same(Range<usize>),
    /// A range for each query and each key, of this number of queries and keys.
    Ranges { of_queries: &'a [[u32; 2]], of_keys: &'a [[u32; 2]], queries: usize, keys: usize },
}

impl Mask<'_> {
    #[inline(always)]
    pub(super) fn keys(&self, query: usize) -> Range<usize> {
        match *self {
            Mask::Causal { past, window, .. } => (past + query + 1).saturating_sub(window)..past + query + 1,
            Mask::Same(ref keys) => keys.clone(),
            Mask::Ranges { of_queries, keys, .. } => within(of_queries[query], keys),
        }
    }
    #[inline(always)]
    pub(super) fn queries(&self, key: usize) -> Range<usize> {
        match *self {
            Mask::Causal { past, len, window } => {
                key.saturating_sub(past)..len.min(key.saturating_add(window).saturating_sub(past))
            }
            Mask::Same(_) => 0..1,
            Mask::Ranges { of_keys, queries, .. } => within(of_keys[key], queries),
        }
    }
}
#[inline(always)]
fn within([start, end]: [u32; 2], limit: usize) -> Range<usize> {
    (start as usize).min(limit)..(end as usize).min(limit)
}

/// Memory that threads write apart from each other.
pub struct Shared<'a, T> {
    at: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}
// SAFETY: elements are accessed only through `range`, whose callers keep apart.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(of: &'a mut [T]) -> Shared<'a, T> {
        Shared { at: of.as_mut_ptr(), len: of.len(), owner: PhantomData }
    }
    /// # Safety
    /// No other range that is in use overlaps.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the caller keeps ranges apart
    pub unsafe fn range(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at + len <= self.len, "within the memory");
        // SAFETY: within the slice that is borrowed for 'a; exclusive by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(at), len) }
    }
}

/// What happens to a finished row.
pub enum To<'a, T> {
    Assign(&'a Shared<'a, T>),
    AssignF32(&'a Shared<'a, f32>),
    AddF32(&'a Shared<'a, f32>),
}

/// Where rows of one head go: the first to `at`, others `row` apart.
pub struct HeadRows<'a, T> {
    pub to: To<'a, T>,
    pub at: usize,
    pub row: usize,
}

impl<T: Float> HeadRows<'_, T> {
    /// # Safety
    /// Nothing else accesses the row, of the head `g` places on.
    #[inline(always)]
    pub(super) unsafe fn write(&self, g: usize, i: usize, x: &[f32]) {
        let at = self.at + i * self.row + g * x.len();
        // SAFETY: upheld by the caller.
        unsafe {
            match self.to {
                To::Assign(to) => to.range(at, x.len()).iter_mut().zip(x).for_each(|(to, x)| *to = T::from_f32(*x)),
                To::AssignF32(to) => to.range(at, x.len()).copy_from_slice(x),
                To::AddF32(to) => to.range(at, x.len()).iter_mut().zip(x).for_each(|(to, x)| *to += x),
            }
        }
    }
}

/// What forward reads and writes. Tokens are those of the group's first head.
pub struct Group<'a, T> {
    pub shape: &'a AttentionShape,
    pub queries: TokenRows<'a, T>,
    pub keys: TokenRows<'a, T>,
    pub values: TokenRows<'a, T>,
    pub mask: Mask<'a>,
    /// 0 where a query attends to nothing.
    pub out: HeadRows<'a, T>,
    /// The log of the sum of exp(scores): -inf where a query attends to nothing. Of a head from `lse_at` on, and
    /// `apart` from one head to the next.
    pub lse: &'a Shared<'a, f32>,
    pub lse_at: usize,
    pub apart: usize,
}
