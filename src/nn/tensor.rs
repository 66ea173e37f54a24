//! Row buffers. A table is a struct over `T`: with [`TensorShape`] it lists what is needed, with [`Tensor`] it holds
//! the buffers. So the plan and the allocation cannot diverge. Never grows.
use super::split::Groups;
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse};
use crate::device::ops::BackwardOf;
use crate::device::{Buf, Device, View, ViewMut};
use std::ops::Range;

/// `rows` of `width` elements.
#[derive(Clone, Copy, Debug)]
pub struct TensorShape {
    pub(super) category: Category,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) width: usize,
    /// Elements that a row takes in memory if more than `width`, which then differs between ranks: all ranks of a group
    /// allocate the same.
    pub(super) reserved: usize,
    /// For buffers that a group communicates: which group, and how.
    pub(super) through: Option<(Axis, CommUse)>,
    /// For the device's scratch in either backward over `rows` rows of `dtype`: the device determines its size.
    pub(super) scratch_of: [Option<BackwardOf>; 2],
}

pub struct Tensor {
    buf: Buf,
    width: usize,
}

impl TensorShape {
    pub(super) fn new(category: Category, dtype: DType, rows: usize, width: usize) -> TensorShape {
        TensorShape { category, dtype, rows, width, reserved: width, through: None, scratch_of: [None; 2] }
    }
    /// Marks the buffer as communicated by the group of `axis`.
    pub(super) fn through(self, axis: Axis, usage: CommUse) -> TensorShape {
        TensorShape { through: Some((axis, usage)), ..self }
    }
    /// Sets the largest width on any rank of the group.
    pub(super) fn reserve(self, widest: usize) -> TensorShape {
        TensorShape { reserved: widest, ..self }
    }
    pub(super) fn allocate(&self, name: &'static str, dev: &dyn Device, groups: &Groups) -> Result<Tensor> {
        let _for = dev.meter().purpose(name);
        if self.scratch_of.iter().any(Option::is_some) {
            let needed = self.scratch_of.iter().flatten().map(|of| dev.backward_scratch(of, self.dtype, self.rows));
            let len = needed.max().unwrap_or(0);
            return Ok(Tensor { buf: dev.alloc(DType::F32, len, self.category)?, width: 1 });
        }
        let (len, width) = (self.rows * self.reserved, self.width);
        let buf = match self.through {
            Some((axis, usage)) if len > 0 => {
                let group = match axis {
                    Axis::Tp => &groups.tp,
                    Axis::Loss => &groups.loss,
                    Axis::Ep => &groups.ep,
                    _ => &groups.sp,
                };
                group.alloc(self.dtype, len, usage, self.category)?
            }
            _ => dev.alloc(self.dtype, len, self.category)?,
        };
        Ok(Tensor { buf, width })
    }
}

impl Tensor {
    /// The first `n` rows.
    pub fn rows(&self, n: usize) -> View<'_> {
        self.buf.view().slice(0..n * self.width)
    }
    pub fn rows_mut(&mut self, n: usize) -> ViewMut<'_> {
        self.buf.view_mut().slice(0..n * self.width)
    }
    pub fn all(&self) -> View<'_> {
        self.buf.view()
    }
    pub fn all_mut(&mut self) -> ViewMut<'_> {
        self.buf.view_mut()
    }
    pub fn band(&self, rows: &Range<usize>) -> View<'_> {
        self.buf.view().slice(rows.start * self.width..rows.end * self.width)
    }
    pub fn band_mut(&mut self, rows: &Range<usize>) -> ViewMut<'_> {
        self.buf.view_mut().slice(rows.start * self.width..rows.end * self.width)
    }
    /// Copies `rows` rows to where they do not overlap.
    pub fn copy_rows(&mut self, dev: &dyn Device, [from, to]: [usize; 2], rows: usize) -> Result<()> {
        self.copy_within(dev, [from * self.width, to * self.width], rows * self.width)
    }
    /// The same with elements.
    pub fn copy_within(&mut self, dev: &dyn Device, [from, to]: [usize; 2], len: usize) -> Result<()> {
        let (low, high) = (from.min(to), from.max(to));
        let (before, after) = self.all_mut().split_at(high);
        let (before, after) = (before.slice(low..low + len), after.slice(0..len));
        match from < to {
            true => dev.copy(before.as_view(), after),
            false => dev.copy(after.as_view(), before),
        }
    }
    /// Makes rows `width` wide, of a buffer that blocks with rows of several widths share. An empty one stays so.
    pub fn fit(&mut self, width: usize) {
        if !self.buf.is_empty() {
            self.width = width;
        }
    }
    pub fn bytes(&self) -> usize {
        self.buf.bytes()
    }
    pub fn len(&self) -> usize {
        self.buf.len()
    }
    pub fn width(&self) -> usize {
        self.width
    }
    pub fn dtype(&self) -> DType {
        self.buf.dtype()
    }
    /// Rows allocated.
    pub fn capacity(&self) -> usize {
        self.buf.len() / self.width.max(1)
    }
}

/// Defines a struct of such fields and nested tables, with a map over them by name.
macro_rules! table {
    ($(#[$about:meta])* pub struct $name:ident {
        $($(#[$what:meta])* $field:ident,)*
        $(; $($(#[$whose:meta])* $inner:ident: $table:ident,)*)?
    }) => {
        $(#[$about])*
        pub struct $name<T = Tensor> { $($(#[$what])* pub $field: T,)* $($($(#[$whose])* pub $inner: $table<T>,)*)? }
        impl<T> $name<T> {
            pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<$name<U>> {
                Ok($name { $($field: f(stringify!($field), &self.$field)?,)* $($($inner: self.$inner.map(f)?,)*)? })
            }
        }
    };
}
pub(super) use table;
