//! Buffers and borrowed views of them. Never computes, and never frees memory that a view or a collective still uses.
use flatshard_base::{DType, Elem, Error, Result};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// Who may dereference a buffer's pointer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    Host,
    /// The host, and a device that can address it there ([`super::Device::alloc_host`]): offloaded buffers.
    Mapped,
    /// Only a GPU: the host copies with [`super::Device::upload`] and [`super::Device::download`].
    Device,
}

/// Typed memory of a device or of a group's arena. `owner` frees it when the last reference is dropped.
#[derive(Clone)]
pub(crate) struct Raw {
    ptr: NonNull<u8>,
    dtype: DType,
    len: usize,
    place: Place,
    owner: Arc<dyn Send + Sync>,
}

pub struct Buf(Raw);

// SAFETY: a `Raw` is memory with an owner that is Send + Sync. Access goes through views, which borrow the `Buf`.
unsafe impl Send for Raw {}
unsafe impl Sync for Raw {}

impl Buf {
    /// # Safety
    /// `ptr` is aligned for `dtype` and valid for reads and writes of `len` elements as long as `owner` lives, by whom
    /// `place` says. Any other access to that memory (another rank's mapping of a shared arena) is ordered by the
    /// group's protocol.
    pub unsafe fn from_raw(
        ptr: NonNull<u8>,
        dtype: DType,
        len: usize,
        place: Place,
        owner: Arc<dyn Send + Sync>,
    ) -> Buf {
        Buf(Raw { ptr, dtype, len, place, owner })
    }
    pub fn len(&self) -> usize {
        self.0.len
    }
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }
    pub fn bytes(&self) -> usize {
        self.0.len * self.0.dtype.size()
    }
    pub fn view(&self) -> View<'_> {
        View { raw: &self.0, dtype: self.0.dtype, start: 0, len: self.0.len }
    }
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { raw: &self.0, dtype: self.0.dtype, start: 0, len: self.0.len, exclusive: PhantomData }
    }
}

/// A read-only range of a [`Buf`].
#[derive(Clone, Copy)]
pub struct View<'a> {
    raw: &'a Raw,
    /// The buffer's, or bytes.
    dtype: DType,
    start: usize,
    len: usize,
}

/// An exclusive range of a [`Buf`].
pub struct ViewMut<'a> {
    raw: &'a Raw,
    dtype: DType,
    start: usize,
    len: usize,
    exclusive: PhantomData<&'a mut u8>,
}

fn check<T: Elem>(op: &'static str, dtype: DType) -> Result<()> {
    if T::DTYPE == dtype {
        return Ok(());
    }
    Err(Error::op(op, format!("needs {}, got {dtype}", T::DTYPE)))
}
fn reachable(op: &'static str, place: Place) -> Result<()> {
    match place {
        Place::Host | Place::Mapped => Ok(()),
        Place::Device => Err(Error::op(op, "the host cannot access GPU memory: download it")),
    }
}
fn fits(op: &'static str, name: &str, have: (DType, usize), need: (DType, usize)) -> Result<()> {
    if have.0 != need.0 {
        return Err(Error::op(op, format!("{name} is {}, needs {}", have.0, need.0)));
    }
    if have.1 != need.1 {
        return Err(Error::op(op, format!("{name} holds {} elements, needs {}", have.1, need.1)));
    }
    Ok(())
}
/// Panics if out of range, like slices of the standard library.
fn within(range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "view {range:?} of a buffer of {len} elements");
}

impl<'a> View<'a> {
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
    /// Panics if the range is not within the view.
    pub fn slice(&self, range: Range<usize>) -> View<'a> {
        within(&range, self.len);
        View { start: self.start + range.start, len: range.len(), ..*self }
    }
    /// `[0, at)` and `[at, len)`.
    pub fn split_at(&self, at: usize) -> [View<'a>; 2] {
        [self.slice(0..at), self.slice(at..self.len)]
    }
    pub fn place(&self) -> Place {
        self.raw.place
    }
    /// The address of the first element, as an integer, for alignment checks.
    pub fn address(&self) -> usize {
        self.as_ptr() as usize
    }
    /// Pointer to the first element; [`View::place`] says who may dereference it.
    pub fn as_ptr(&self) -> *const u8 {
        self.raw.ptr.as_ptr().wrapping_add(self.start * self.dtype.size())
    }
    /// Fails, naming the operand, unless it holds `len` elements of `dtype`.
    pub fn fits(&self, op: &'static str, name: &str, dtype: DType, len: usize) -> Result<()> {
        fits(op, name, (self.dtype(), self.len), (dtype, len))
    }
    /// The elements, if the host can read the memory. `op` names the caller in the error.
    pub fn host<T: Elem>(&self, op: &'static str) -> Result<&'a [T]> {
        check::<T>(op, self.dtype())?;
        reachable(op, self.raw.place)?;
        // SAFETY: valid and aligned by `Buf::from_raw`; borrowed for 'a.
        Ok(unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len) })
    }
    /// The bytes of any dtype, if the host can read them.
    pub fn host_bytes(&self, op: &'static str) -> Result<&'a [u8]> {
        reachable(op, self.raw.place)?;
        // SAFETY: as in `host`; any bits are a valid byte.
        Ok(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes()) })
    }
    /// The range as a separate buffer, which keeps the memory alive.
    ///
    /// # Safety
    /// As long as it lives, nobody writes to the range while it is read, or accesses it while it is written.
    pub(super) unsafe fn alias(&self) -> Buf {
        let mut raw = self.raw.clone();
        // SAFETY: within the buffer, as views are by construction.
        raw.ptr = unsafe { raw.ptr.add(self.start * self.dtype.size()) };
        (raw.dtype, raw.len) = (self.dtype, self.len);
        Buf(raw)
    }
    /// What keeps the memory alive, e.g. while a collective is in flight.
    pub fn keep(&self) -> Arc<dyn Send + Sync> {
        self.raw.owner.clone()
    }
}

impl<'a> ViewMut<'a> {
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
    /// The same range with a shorter lifetime.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { raw: self.raw, dtype: self.dtype, start: self.start, len: self.len, exclusive: PhantomData }
    }
    pub fn as_view(&self) -> View<'_> {
        View { raw: self.raw, dtype: self.dtype, start: self.start, len: self.len }
    }
    /// Panics if the range is not within the view.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a> {
        within(&range, self.len);
        ViewMut {
            raw: self.raw,
            dtype: self.dtype,
            start: self.start + range.start,
            len: range.len(),
            exclusive: PhantomData,
        }
    }
    /// The same memory as bytes: scratch that holds something else for a while.
    pub fn as_u8(self) -> ViewMut<'a> {
        let size = self.dtype.size();
        let (start, len) = (self.start * size, self.len * size);
        ViewMut { raw: self.raw, dtype: DType::U8, start, len, exclusive: PhantomData }
    }
    /// Two disjoint views: `[0, at)` and `[at, len)`.
    pub fn split_at(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        within(&(0..at), self.len);
        let part = |start, len| ViewMut { raw: self.raw, dtype: self.dtype, start, len, exclusive: PhantomData };
        (part(self.start, at), part(self.start + at, self.len - at))
    }
    /// A range of it, for one of several threads. Panics if the range is not within the view.
    ///
    /// # Safety
    /// While it lives, nobody accesses its elements through another view.
    pub(super) unsafe fn part(&self, range: Range<usize>) -> ViewMut<'a> {
        within(&range, self.len);
        ViewMut {
            raw: self.raw,
            dtype: self.dtype,
            start: self.start + range.start,
            len: range.len(),
            exclusive: PhantomData,
        }
    }
    pub fn place(&self) -> Place {
        self.raw.place
    }
    /// The address of the first element, as an integer, for alignment checks.
    pub fn address(&self) -> usize {
        self.as_view().as_ptr() as usize
    }
    /// Pointer to the first element; [`ViewMut::place`] says who may dereference it.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.raw.ptr.as_ptr().wrapping_add(self.start * self.dtype.size())
    }
    /// Fails, naming the operand, unless it holds `len` elements of `dtype`.
    pub fn fits(&self, op: &'static str, name: &str, dtype: DType, len: usize) -> Result<()> {
        fits(op, name, (self.dtype(), self.len), (dtype, len))
    }
    /// The elements, if the host can write the memory.
    pub fn host<T: Elem>(mut self, op: &'static str) -> Result<&'a mut [T]> {
        check::<T>(op, self.dtype())?;
        reachable(op, self.raw.place)?;
        // SAFETY: valid and aligned by `Buf::from_raw`; exclusive for 'a.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), self.len) })
    }
    /// The bytes of any dtype, if the host can write them.
    pub fn host_bytes_mut(mut self, op: &'static str) -> Result<&'a mut [u8]> {
        reachable(op, self.raw.place)?;
        // SAFETY: as in `host`; any bits are valid for every dtype.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.bytes()) })
    }
    pub fn keep(&self) -> Arc<dyn Send + Sync> {
        self.raw.owner.clone()
    }
}
