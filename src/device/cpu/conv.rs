//! Short causal convolutions, by channels, and output gates, by elements. Never reads a row of another document.
use super::attention::documents;
use super::sequences::CpuSequences;
use super::simd::sigmoid;
use super::tile::Shared;
use crate::ops::{ConvKind, MAX_TAPS, ShortConv, ShortConvBackward, SigmoidGate, SigmoidGateBackward};
use flatshard_base::{Elem, Result, dtype::Float};
use std::ops::Range;

/// Channels that are convolved together; threads start at multiples of it.
pub const CHANNELS: usize = 64;

/// Numbers of the channels of a group.
type ChannelRow = [f32; CHANNELS];

/// The filters of channels from `first` on, tap by tap.
#[inline(always)]
fn filters<T: Float>(w: &[T], taps: usize, first: usize, channels: usize) -> [ChannelRow; MAX_TAPS] {
    let mut by_tap = [[0.0; CHANNELS]; MAX_TAPS];
    for c in 0..channels {
        for (tap, lane) in by_tap.iter_mut().enumerate().take(taps) {
            lane[c] = w[(first + c) * taps + tap].to_f32();
        }
    }
    by_tap
}

/// The biases of channels from `first` on.
#[inline(always)]
fn biases<T: Float>(bias: Option<&[T]>, first: usize, channels: usize) -> ChannelRow {
    let mut row = [0.0; CHANNELS];
    let all = bias.map_or(&[][..], |bias| &bias[first..][..channels]);
    row.iter_mut().zip(all).for_each(|(to, from)| *to = from.to_f32());
    row
}

#[inline(always)]
fn add_product<T: Float>(sums: &mut ChannelRow, w: &ChannelRow, x: &[T]) {
    for ((sum, w), x) in sums.iter_mut().zip(w).zip(x) {
        *sum = w.mul_add(x.to_f32(), *sum);
    }
}

/// The input's rows, of N channels or of three parts of that width: b, c and u.
struct ConvRows<'a, T, const GATED: bool> {
    x: &'a [T],
    channels: usize,
}

impl<T: Float, const GATED: bool> ConvRows<'_, T, GATED> {
    /// Channels of a part of a row.
    #[inline(always)]
    fn part(&self, row: usize, part: usize, (first, own): (usize, usize)) -> &[T] {
        let parts = if GATED { ConvKind::Gated.parts() } else { 1 };
        &self.x[(row * parts + part) * self.channels + first..][..own]
    }
    /// Adds what the filter of a tap multiplies in a row, times the filter. Products are rounded as a carried row is.
    #[inline(always)]
    fn add_product(&self, sums: &mut ChannelRow, w: &ChannelRow, row: usize, at: (usize, usize)) {
        if !GATED {
            return add_product(sums, w, self.part(row, 0, at));
        }
        let factors = self.part(row, 0, at).iter().zip(self.part(row, 2, at));
        for ((sum, w), (b, u)) in sums.iter_mut().zip(w).zip(factors) {
            *sum = w.mul_add(product(*b, *u).to_f32(), *sum);
        }
    }
    /// Copies what filters multiply in a row.
    #[inline(always)]
    fn copy_to(&self, to: &mut [T], row: usize, at: (usize, usize)) {
        if !GATED {
            return to.copy_from_slice(self.part(row, 0, at));
        }
        for ((to, b), u) in to.iter_mut().zip(self.part(row, 0, at)).zip(self.part(row, 2, at)) {
            *to = product(*b, *u);
        }
    }
}

#[inline(always)]
fn product<T: Float>(b: T, u: T) -> T {
    T::from_f32(b.to_f32() * u.to_f32())
}

/// A checked pass, for any division by channels.
pub trait ByChannels: Sync {
    fn channels(&self) -> usize;
    /// Bytes of the input.
    fn bytes(&self) -> usize;
    /// # Safety
    /// No other call at the same time has one of these channels.
    unsafe fn run(&self, channels: Range<usize>);
}

/// A forward pass.
pub struct ConvForward<'a, T, const GATED: bool> {
    channels: usize,
    taps: usize,
    along: CpuSequences<'a, T>,
    x: ConvRows<'a, T, GATED>,
    w: &'a [T],
    bias: Option<&'a [T]>,
    y: Shared<'a, T>,
}

impl<'a, T: Float + Elem, const GATED: bool> ConvForward<'a, T, GATED> {
    pub fn new(op: ShortConv<'a>) -> Result<ConvForward<'a, T, GATED>> {
        const OP: &str = ShortConv::OP;
        let (n, channels) = op.check()?;
        Ok(ConvForward {
            channels,
            taps: op.taps,
            along: CpuSequences::new(OP, op.along, n)?,
            x: ConvRows { x: op.x.host(OP)?, channels },
            w: op.w.host(OP)?,
            bias: op.bias.map(|bias| bias.host(OP)).transpose()?,
            y: Shared::new(op.y.host(OP)?),
        })
    }
}

impl<T: Float + Elem, const GATED: bool> ByChannels for ConvForward<'_, T, GATED> {
    fn channels(&self) -> usize {
        self.channels
    }
    fn bytes(&self) -> usize {
        size_of_val(self.x.x)
    }
    #[inline(always)]
    unsafe fn run(&self, channels: Range<usize>) {
        let (all, before) = (self.channels, self.taps - 1);
        for first in channels.clone().step_by(CHANNELS) {
            let own = CHANNELS.min(channels.end - first);
            let (w, group) = (filters(self.w, self.taps, first, own), (first, own));
            let bias = biases(self.bias, first, own);
            for of in self.along.iter() {
                let carry = |at: usize| {
                    let memory = self.along.memory().filter(|_| at < before)?;
                    // SAFETY: only this call has these channels.
                    Some(unsafe { memory.range((of.slot * before + at) * all + first, own) })
                };
                for (i, row) in of.rows.clone().enumerate() {
                    let mut sums = bias;
                    // Taps from the first on that meet a row of the sequence.
                    let skipped = before.saturating_sub(of.past + i);
                    for (w, at) in w[skipped..self.taps].iter().zip(i + skipped..) {
                        match carry(at) {
                            Some(x) => add_product(&mut sums, w, x),
                            None => self.x.add_product(&mut sums, w, of.rows.start + at - before, group),
                        }
                    }
                    // SAFETY: as above.
                    let y = unsafe { self.y.range(row * all + first, own) };
                    if GATED {
                        for ((y, x), c) in y.iter_mut().zip(&sums).zip(self.x.part(row, 1, group)) {
                            *y = T::from_f32(c.to_f32() * x);
                        }
                        continue;
                    }
                    for (y, x) in y.iter_mut().zip(&sums) {
                        *y = T::from_f32(x * sigmoid(*x).0);
                    }
                }
                for kept in 0..before {
                    let from = of.rows.len() + kept; // counted from the first carried row
                    let Some(to) = carry(kept) else { break };
                    match carry(from) {
                        Some(x) => to.copy_from_slice(x),
                        None => self.x.copy_to(to, of.rows.start + from - before, group),
                    }
                }
            }
        }
    }
}

/// A backward pass.
pub struct ConvBackward<'a, T, const GATED: bool> {
    channels: usize,
    taps: usize,
    documents: &'a [[u32; 2]],
    x: ConvRows<'a, T, GATED>,
    w: &'a [T],
    bias: Option<&'a [T]>,
    dy: &'a [T],
    dx: Shared<'a, T>,
    dw: Option<Shared<'a, f32>>,
    dbias: Option<Shared<'a, f32>>,
}

impl<'a, T: Float + Elem, const GATED: bool> ConvBackward<'a, T, GATED> {
    pub fn new(op: ShortConvBackward<'a>) -> Result<ConvBackward<'a, T, GATED>> {
        const OP: &str = ShortConvBackward::OP;
        let (n, channels) = op.check()?;
        Ok(ConvBackward {
            channels,
            taps: op.taps,
            documents: documents(OP, op.documents, n)?,
            x: ConvRows { x: op.x.host(OP)?, channels },
            w: op.w.host(OP)?,
            bias: op.bias.map(|bias| bias.host(OP)).transpose()?,
            dy: op.dy.host(OP)?,
            dx: Shared::new(op.dx.host(OP)?),
            dw: op.dw.map(|dw| dw.host(OP)).transpose()?.map(Shared::new),
            dbias: op.dbias.map(|dbias| dbias.host(OP)).transpose()?.map(Shared::new),
        })
    }
}

impl<T: Float + Elem, const GATED: bool> ByChannels for ConvBackward<'_, T, GATED> {
    fn channels(&self) -> usize {
        self.channels
    }
    fn bytes(&self) -> usize {
        size_of_val(self.x.x)
    }
    #[inline(always)]
    unsafe fn run(&self, channels: Range<usize>) {
        for first in channels.clone().step_by(CHANNELS) {
            let own = CHANNELS.min(channels.end - first);
            let w = filters(self.w, self.taps, first, own);
            let mut row = 0;
            while row < self.documents.len() {
                let end = self.documents[row][1] as usize;
                // SAFETY: upheld by the caller.
                unsafe { self.document(row..end, (first, own), &w) };
                row = end;
            }
        }
    }
}

impl<T: Float + Elem, const GATED: bool> ConvBackward<'_, T, GATED> {
    /// A row's input gradient is complete once the `taps - 1` rows after it were seen: until then its sum is in a ring.
    #[inline(always)]
    unsafe fn document(&self, rows: Range<usize>, group: (usize, usize), w: &[ChannelRow; MAX_TAPS]) {
        let (all, taps, (first, own)) = (self.channels, self.taps, group);
        let mut ring = [[0.0; CHANNELS]; MAX_TAPS];
        let mut dw = [[0.0; CHANNELS]; MAX_TAPS];
        let (bias, mut dbias) = (biases(self.bias, first, own), [0.0; CHANNELS]);
        // SAFETY: only this call has these channels.
        let dx = |row: usize, part: usize| unsafe {
            let parts = if GATED { ConvKind::Gated.parts() } else { 1 };
            self.dx.range((row * parts + part) * all + first, own)
        };
        for row in rows.start..rows.end + taps - 1 {
            if row < rows.end {
                let skipped = (taps - 1).saturating_sub(row - rows.start);
                let mut d = bias;
                for (w, at) in w[skipped..taps].iter().zip(row + 1 + skipped - taps..) {
                    self.x.add_product(&mut d, w, at, group);
                }
                let dy = &self.dy[row * all + first..][..own];
                if GATED {
                    let c = self.x.part(row, 1, group);
                    for (((d, dy), c), dc) in d.iter_mut().zip(dy).zip(c).zip(dx(row, 1)) {
                        *dc = T::from_f32(dy.to_f32() * *d);
                        *d = dy.to_f32() * c.to_f32();
                    }
                } else {
                    for (d, dy) in d.iter_mut().zip(dy) {
                        let (s, rest) = sigmoid(*d);
                        *d = dy.to_f32() * (*d * s).mul_add(rest, s);
                    }
                    dbias.iter_mut().zip(&d).for_each(|(sum, d)| *sum += d);
                }
                ring[row % taps] = [0.0; CHANNELS];
                for tap in skipped..taps {
                    let at = row + 1 + tap - taps;
                    self.x.add_product(&mut dw[tap], &d, at, group);
                    add_product(&mut ring[at % taps], &w[tap], &d);
                }
            }
            if row + 1 < rows.start + taps {
                continue;
            }
            let done = row + 1 - taps;
            let sums = &ring[done % taps];
            if GATED {
                let (b, u) = (self.x.part(done, 0, group), self.x.part(done, 2, group));
                for (((sum, b), u), (db, du)) in sums.iter().zip(b).zip(u).zip(dx(done, 0).iter_mut().zip(dx(done, 2)))
                {
                    *db = T::from_f32(u.to_f32() * sum);
                    *du = T::from_f32(b.to_f32() * sum);
                }
                continue;
            }
            for (dx, sum) in dx(done, 0).iter_mut().zip(sums) {
                *dx = T::from_f32(*sum);
            }
        }
        if let Some(grad) = &self.dbias {
            // SAFETY: as above.
            let grad = unsafe { grad.range(first, own) };
            grad.iter_mut().zip(&dbias).for_each(|(grad, d)| *grad += d);
        }
        let Some(grad) = &self.dw else { return };
        // SAFETY: as above.
        let grad = unsafe { grad.range(first * taps, own * taps) };
        for (c, grad) in grad.chunks_exact_mut(taps).enumerate() {
            grad.iter_mut().zip(&dw).for_each(|(grad, dw)| *grad += dw[c]);
        }
    }
}

#[inline(always)]
pub fn sigmoid_gate<T: Float>(op: SigmoidGate) -> Result<()> {
    const OP: &str = SigmoidGate::OP;
    op.check()?;
    let (gate, x, y) = (op.gate.host::<T>(OP)?, op.x.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for ((gate, x), y) in gate.iter().zip(x).zip(y) {
        *y = T::from_f32(sigmoid(gate.to_f32()).0 * x.to_f32());
    }
    Ok(())
}

#[inline(always)]
pub fn sigmoid_gate_backward<T: Float>(op: SigmoidGateBackward) -> Result<()> {
    const OP: &str = SigmoidGateBackward::OP;
    op.check()?;
    let (gate, x) = (op.gate.host::<T>(OP)?, op.x.host::<T>(OP)?);
    let (dy, dgate) = (op.dy.host::<T>(OP)?, op.dgate.host::<T>(OP)?);
    for (((gate, x), dy), dgate) in gate.iter().zip(x).zip(dy).zip(dgate) {
        let ((s, rest), d) = (sigmoid(gate.to_f32()), dy.to_f32());
        *dgate = T::from_f32(d * x.to_f32() * s * rest);
        *dy = T::from_f32(d * s);
    }
    Ok(())
}
