//! Driver calls as values, to be executed later or compared with new calls. Never decides when.
use super::args::{Arg, Kernel, LaunchShape, Map, ScaledGemm, Swizzle};
use super::guest::{Asked, Guest};
use crate::ops::{Coded, Epilogue, Gemm, GemmShape, GemmThen};
use crate::{Buf, View, ViewMut};
use flatshard_base::fp8::Fp8;
use flatshard_base::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Maximum operands per call.
const OPERANDS: usize = 32;

/// Calls in order, with their operands by value, whose memory they keep alive.
#[derive(Default)]
pub struct Calls {
    calls: Vec<Call>,
    operands: Vec<Operand>,
    guests: usize,
    /// Hash of everything above.
    hash: u64,
}

#[derive(PartialEq)]
enum Call {
    Launch(Kernel, LaunchShape, Range<usize>),
    /// A, B and C.
    Gemm(GemmShape, Range<usize>),
    /// The product's operands, then two for the epilogue.
    GemmThen(GemmShape, EpilogueKind, Range<usize>),
    /// A and B with their scales, C, then two for the epilogue.
    ScaledGemm(GemmShape, Fp8, EpilogueKind, Range<usize>),
    /// From, to.
    Copy(Range<usize>),
    Zero(Range<usize>),
    Guest(GuestRef, Asked, Range<usize>),
}

/// An [`Epilogue`] without its operands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EpilogueKind {
    Sum,
    Gelu,
    GeluBackward,
}

/// An epilogue's operands.
fn hold_epilogue(then: &Epilogue) -> (EpilogueKind, [Operand; 2]) {
    let maybe = |view: &Option<View>| view.map_or(Operand::Null, hold);
    match then {
        Epilogue::Sum { bias, residual } => (EpilogueKind::Sum, [maybe(bias), maybe(residual)]),
        Epilogue::Gelu { bias, z } => (EpilogueKind::Gelu, [maybe(bias), hold_mut(z, Operand::Out)]),
        Epilogue::GeluBackward { z, product } => {
            (EpilogueKind::GeluBackward, [hold(*z), hold_mut(product, Operand::InOut)])
        }
    }
}
impl EpilogueKind {
    fn of<'a>(self, first: &'a Operand, second: &'a mut Operand) -> Epilogue<'a> {
        match self {
            EpilogueKind::Sum => Epilogue::Sum { bias: first.maybe(), residual: second.maybe() },
            EpilogueKind::Gelu => Epilogue::Gelu { bias: first.maybe(), z: second.view_mut() },
            EpilogueKind::GeluBackward => Epilogue::GeluBackward { z: first.view(), product: second.view_mut() },
        }
    }
}

/// A guest, compared by identity.
struct GuestRef(Arc<dyn Guest>);
impl PartialEq for GuestRef {
    fn eq(&self, other: &GuestRef) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

/// An [`Arg`] that keeps its memory alive.
enum Operand {
    In(Buf),
    InOut(Buf),
    Out(Buf),
    Null,
    U32(u32),
    U64(u64),
    F32(f32),
    Map { of: Buf, sizes: [u64; 3], strides: [u64; 2], tile: [u32; 3], swizzle: Swizzle },
}

fn hold(view: View) -> Operand {
    // SAFETY: operands are used when the calls are executed, in the order of the calls. As with a stream, nobody else
    // may access the operands of a pending call. They are held longer only for comparison.
    Operand::In(unsafe { view.alias() })
}
fn hold_mut(view: &ViewMut, of: impl FnOnce(Buf) -> Operand) -> Operand {
    // SAFETY: as above.
    of(unsafe { view.as_view().alias() })
}
fn hold_arg(arg: &Arg) -> Operand {
    match arg {
        Arg::In(view) => hold(*view),
        Arg::InOut(view) => hold_mut(view, Operand::InOut),
        Arg::Out(view) => hold_mut(view, Operand::Out),
        Arg::Null => Operand::Null,
        Arg::U32(x) => Operand::U32(*x),
        Arg::U64(x) => Operand::U64(*x),
        Arg::F32(x) => Operand::F32(*x),
        Arg::Map(Map { of, sizes, strides, tile, swizzle }) => {
            // SAFETY: as in `hold`.
            let of = unsafe { of.alias() };
            Operand::Map { of, sizes: *sizes, strides: *strides, tile: *tile, swizzle: *swizzle }
        }
    }
}
/// Whether both are the same memory with the same element type.
fn same(a: &Buf, b: &Buf) -> bool {
    let of = |buf: &Buf| (buf.view().address(), buf.len(), buf.dtype());
    of(a) == of(b)
}

impl PartialEq for Operand {
    fn eq(&self, other: &Operand) -> bool {
        use Operand::*;
        match (self, other) {
            (In(a), In(b)) | (InOut(a), InOut(b)) | (Out(a), Out(b)) => same(a, b),
            (Null, Null) => true,
            (U32(a), U32(b)) => a == b,
            (U64(a), U64(b)) => a == b,
            (F32(a), F32(b)) => a.to_bits() == b.to_bits(),
            (
                Map { of: a, sizes, strides, tile, swizzle },
                Map { of: b, sizes: sizes_b, strides: strides_b, tile: tile_b, swizzle: swizzle_b },
            ) => same(a, b) && (sizes, strides, tile, swizzle) == (sizes_b, strides_b, tile_b, swizzle_b),
            _ => false,
        }
    }
}

impl Operand {
    /// Contributes to the hash: equal operands return equal words.
    fn word(&self) -> u64 {
        match self {
            Operand::In(buf) | Operand::InOut(buf) | Operand::Out(buf) | Operand::Map { of: buf, .. } => {
                buf.view().address() as u64 ^ (buf.len() as u64).rotate_left(40)
            }
            Operand::Null => 0,
            Operand::U32(x) => u64::from(*x),
            Operand::U64(x) => *x,
            Operand::F32(x) => u64::from(x.to_bits()),
        }
    }
    fn view(&self) -> View<'_> {
        match self {
            Operand::In(buf) | Operand::InOut(buf) | Operand::Out(buf) | Operand::Map { of: buf, .. } => buf.view(),
            _ => unreachable!("copies and products have only memory operands"),
        }
    }
    fn view_mut(&mut self) -> ViewMut<'_> {
        match self {
            Operand::InOut(buf) | Operand::Out(buf) => buf.view_mut(),
            _ => unreachable!("outputs of copies and products are held as such"),
        }
    }
    fn maybe(&self) -> Option<View<'_>> {
        if matches!(self, Operand::Null) { None } else { Some(self.view()) }
    }
    fn arg(&mut self) -> Arg<'_> {
        match self {
            Operand::In(buf) => Arg::In(buf.view()),
            Operand::InOut(buf) => Arg::InOut(buf.view_mut()),
            Operand::Out(buf) => Arg::Out(buf.view_mut()),
            Operand::Null => Arg::Null,
            Operand::U32(x) => Arg::U32(*x),
            Operand::U64(x) => Arg::U64(*x),
            Operand::F32(x) => Arg::F32(*x),
            Operand::Map { of, sizes, strides, tile, swizzle } => {
                Arg::Map(Map { of: of.view(), sizes: *sizes, strides: *strides, tile: *tile, swizzle: *swizzle })
            }
        }
    }
}

impl PartialEq for Calls {
    fn eq(&self, other: &Calls) -> bool {
        (self.hash, &self.calls, &self.operands) == (other.hash, &other.calls, &other.operands)
    }
}

impl Calls {
    pub fn len(&self) -> usize {
        self.calls.len()
    }
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }
    /// Equal call lists have equal hashes.
    pub fn hash(&self) -> u64 {
        self.hash
    }
    /// Drops all calls and their memory, but keeps the capacity.
    pub fn clear(&mut self) {
        self.calls.clear();
        self.operands.clear();
        (self.guests, self.hash) = (0, 0);
    }

    pub fn launch(&mut self, kernel: Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        if args.len() > OPERANDS {
            return Err(Error::op(kernel.entry, format!("{} arguments, at most {OPERANDS}", args.len())));
        }
        let place = self.place();
        self.operands.extend(args.iter().map(hold_arg));
        let name = kernel.variant.as_ptr() as u64 ^ (kernel.entry.as_ptr() as u64).rotate_left(32);
        self.push(place, [name, u64::from(shape.grid[0])], |args| Call::Launch(kernel, shape, args));
        Ok(())
    }
    pub fn gemm(&mut self, op: &Gemm) {
        let Gemm { shape, a, b, c } = op;
        let place = self.place();
        self.operands.extend([hold(*a), hold(*b), hold_mut(c, Operand::InOut)]);
        let words = [(shape.m as u64) << 32 | shape.n as u64, shape.k as u64];
        self.push(place, words, |args| Call::Gemm(*shape, args));
    }
    pub fn gemm_then(&mut self, op: &GemmThen) {
        let GemmThen { shape, a, b, c, then } = op;
        let (follows, operands) = hold_epilogue(then);
        let place = self.place();
        self.operands.extend([hold(*a), hold(*b), hold_mut(c, Operand::InOut)].into_iter().chain(operands));
        let words = [(shape.m as u64) << 32 | shape.n as u64, (shape.k as u64) << 2 | follows as u64];
        self.push(place, words, |args| Call::GemmThen(*shape, follows, args));
    }
    pub fn scaled_gemm(&mut self, op: &ScaledGemm) {
        let ScaledGemm { shape, format, a, b, c, then } = op;
        let ((follows, operands), place) = (hold_epilogue(then), self.place());
        let inputs = [a.bytes, a.scales, b.bytes, b.scales].map(hold);
        self.operands.extend(inputs.into_iter().chain([hold_mut(c, Operand::InOut)]).chain(operands));
        let words = [(shape.m as u64) << 32 | shape.n as u64, (shape.k as u64) << 2 | follows as u64];
        self.push(place, words, |args| Call::ScaledGemm(*shape, *format, follows, args));
    }
    pub fn copy(&mut self, src: View, dst: ViewMut) {
        let place = self.place();
        self.operands.extend([hold(src), hold_mut(&dst, Operand::Out)]);
        self.push(place, [1, 0], Call::Copy);
    }
    pub fn zero(&mut self, x: ViewMut) {
        let place = self.place();
        self.operands.push(hold_mut(&x, Operand::Out));
        self.push(place, [2, 0], Call::Zero);
    }
    pub fn guest(&mut self, guest: &Arc<dyn Guest>, asked: Asked, operands: &[Arg]) {
        let place = self.place();
        self.operands.extend(operands.iter().map(hold_arg));
        let [what, a, b] = asked.map(u64::from);
        self.push(place, [what << 32 | a, b], |args| Call::Guest(GuestRef(guest.clone()), asked, args));
        self.guests += 1;
    }
    /// Number of guest calls.
    pub fn of_guests(&self) -> usize {
        self.guests
    }
    /// The distinct guests with calls in this list.
    pub fn guests(&self) -> Vec<Arc<dyn Guest>> {
        let mut guests: Vec<Arc<dyn Guest>> = Vec::new();
        for call in &self.calls {
            if let Call::Guest(guest, ..) = call
                && !guests.iter().any(|known| Arc::ptr_eq(known, &guest.0))
            {
                guests.push(guest.0.clone());
            }
        }
        guests
    }

    fn place(&self) -> usize {
        self.operands.len()
    }
    fn push(&mut self, place: usize, words: [u64; 2], call: impl FnOnce(Range<usize>) -> Call) {
        let operands = self.operands[place..].iter().map(Operand::word);
        let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        self.hash = words.into_iter().chain(operands).fold(self.hash.wrapping_add(1), mix);
        self.calls.push(call(place..self.operands.len()));
    }

    /// Passes each call in order to `enqueue`, with operands as the driver takes them.
    pub fn each(&mut self, mut enqueue: impl FnMut(Enqueued) -> Result<()>) -> Result<()> {
        let Calls { calls, operands, .. } = self;
        calls.iter().try_for_each(|call| match call {
            Call::Launch(kernel, shape, range) => {
                with_args(&mut operands[range.clone()], |args| enqueue(Enqueued::Launch(*kernel, *shape, args)))
            }
            Call::Gemm(shape, range) => {
                let [a, b, c] = &mut operands[range.clone()] else { unreachable!("three operands") };
                enqueue(Enqueued::Gemm(Gemm { shape: *shape, a: a.view(), b: b.view(), c: c.view_mut() }))
            }
            Call::GemmThen(shape, follows, range) => {
                let [a, b, c, first, second] = &mut operands[range.clone()] else { unreachable!("five operands") };
                let then = follows.of(first, second);
                let (shape, a, b, c) = (*shape, a.view(), b.view(), c.view_mut());
                enqueue(Enqueued::GemmThen(GemmThen { shape, a, b, c, then }))
            }
            Call::ScaledGemm(shape, format, follows, range) => {
                let [a, of_a, b, of_b, c, first, second] = &mut operands[range.clone()] else {
                    unreachable!("seven operands")
                };
                let (then, c) = (follows.of(first, second), c.view_mut());
                let [a, b] = [(a, of_a), (b, of_b)].map(|(x, of)| Coded { bytes: x.view(), scales: of.view() });
                enqueue(Enqueued::ScaledGemm(ScaledGemm { shape: *shape, format: *format, a, b, c, then }))
            }
            Call::Copy(range) => {
                let [src, dst] = &mut operands[range.clone()] else { unreachable!("two operands") };
                enqueue(Enqueued::Copy(src.view(), dst.view_mut()))
            }
            Call::Zero(range) => enqueue(Enqueued::Zero(operands[range.start].view_mut())),
            Call::Guest(guest, asked, range) => {
                with_args(&mut operands[range.clone()], |args| enqueue(Enqueued::Guest(guest.0.clone(), *asked, args)))
            }
        })
    }
}

/// A call as it was made.
pub enum Enqueued<'a> {
    Launch(Kernel, LaunchShape, &'a mut [Arg<'a>]),
    Gemm(Gemm<'a>),
    GemmThen(GemmThen<'a>),
    ScaledGemm(ScaledGemm<'a>),
    Copy(View<'a>, ViewMut<'a>),
    Zero(ViewMut<'a>),
    Guest(Arc<dyn Guest>, Asked, &'a mut [Arg<'a>]),
}

fn with_args(operands: &mut [Operand], call: impl for<'a> FnOnce(&'a mut [Arg<'a>]) -> Result<()>) -> Result<()> {
    let mut args: [Arg; OPERANDS] = std::array::from_fn(|_| Arg::Null);
    let count = operands.len();
    args.iter_mut().zip(operands).for_each(|(arg, operand)| *arg = operand.arg());
    call(&mut args[..count])
}
