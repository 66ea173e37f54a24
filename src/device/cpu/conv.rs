//! Short causal convolutions, by channels, and output gates, by elements. Never reads a row of another document.
use super::attention::documents;
use super::sequences::CpuSequences;
use super::simd::sigmoid;
use super::tile::Shared;
use crate::ops::{MAX_TAPS, ShortConv, ShortConvBackward, SigmoidGate, SigmoidGateBackward};
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

#[inline(always)]
fn add_product<T: Float>(sums: &mut ChannelRow, w: &ChannelRow, x: &[T]) {
    for ((sum, w), x) in sums.iter_mut().zip(w).zip(x) {
        *sum = w.mul_add(x.to_f32(), *sum);
    }
}

/// A checked forward pass, for any division by channels.
pub struct ConvForward<'a, T> {
    pub channels: usize,
    taps: usize,
    along: CpuSequences<'a, T>,
    x: &'a [T],
    w: &'a [T],
    y: Shared<'a, T>,
}

impl<'a, T: Float + Elem> ConvForward<'a, T> {
    pub fn new(op: ShortConv<'a>) -> Result<ConvForward<'a, T>> {
        const OP: &str = ShortConv::OP;
        let (n, channels) = op.check()?;
        Ok(ConvForward {
            channels,
            taps: op.taps,
            along: CpuSequences::new(OP, op.along, n)?,
            x: op.x.host(OP)?,
            w: op.w.host(OP)?,
            y: Shared::new(op.y.host(OP)?),
        })
    }
    /// # Safety
    /// No other call at the same time has one of these channels.
    #[inline(always)]
    pub unsafe fn run(&self, channels: Range<usize>) {
        let (all, before) = (self.channels, self.taps - 1);
        for first in channels.clone().step_by(CHANNELS) {
            let own = CHANNELS.min(channels.end - first);
            let w = filters(self.w, self.taps, first, own);
            for of in self.along.iter() {
                let carry = |at: usize| {
                    let memory = self.along.memory().filter(|_| at < before)?;
                    // SAFETY: only this call has these channels.
                    Some(unsafe { memory.range((of.slot * before + at) * all + first, own) })
                };
                for (i, row) in of.rows.clone().enumerate() {
                    let mut sums = [0.0; CHANNELS];
                    // Taps from the first on that meet a row of the sequence.
                    let skipped = before.saturating_sub(of.past + i);
                    for (w, at) in w[skipped..self.taps].iter().zip(i + skipped..) {
                        match carry(at) {
                            Some(x) => add_product(&mut sums, w, x),
                            None => {
                                add_product(&mut sums, w, &self.x[(of.rows.start + at - before) * all + first..][..own])
                            }
                        }
                    }
                    // SAFETY: as above.
                    let y = unsafe { self.y.range(row * all + first, own) };
                    for (y, x) in y.iter_mut().zip(&sums) {
                        *y = T::from_f32(x * sigmoid(*x).0);
                    }
                }
                for kept in 0..before {
                    let from = of.rows.len() + kept; // counted from the first carried row
                    let Some(to) = carry(kept) else { break };
                    match carry(from) {
                        Some(x) => to.copy_from_slice(x),
                        None => to.copy_from_slice(&self.x[(of.rows.start + from - before) * all + first..][..own]),
                    }
                }
            }
        }
    }
}

/// A checked backward pass, for any division by channels.
pub struct ConvBackward<'a, T> {
    pub channels: usize,
    taps: usize,
    documents: &'a [[u32; 2]],
    x: &'a [T],
    w: &'a [T],
    dy: &'a [T],
    dx: Shared<'a, T>,
    dw: Option<Shared<'a, f32>>,
}

impl<'a, T: Float + Elem> ConvBackward<'a, T> {
    pub fn new(op: ShortConvBackward<'a>) -> Result<ConvBackward<'a, T>> {
        const OP: &str = ShortConvBackward::OP;
        let (n, channels) = op.check()?;
        Ok(ConvBackward {
            channels,
            taps: op.taps,
            documents: documents(OP, op.documents, n)?,
            x: op.x.host(OP)?,
            w: op.w.host(OP)?,
            dy: op.dy.host(OP)?,
            dx: Shared::new(op.dx.host(OP)?),
            dw: op.dw.map(|dw| dw.host(OP)).transpose()?.map(Shared::new),
        })
    }
    /// # Safety
    /// No other call at the same time has one of these channels.
    #[inline(always)]
    pub unsafe fn run(&self, channels: Range<usize>) {
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
    /// A row's input gradient is complete once the `taps - 1` rows after it were seen: until then its sum is in a ring.
    #[inline(always)]
    unsafe fn document(&self, rows: Range<usize>, (first, own): (usize, usize), w: &[ChannelRow; MAX_TAPS]) {
        let (all, taps) = (self.channels, self.taps);
        let mut ring = [[0.0; CHANNELS]; MAX_TAPS];
        let mut dw = [[0.0; CHANNELS]; MAX_TAPS];
        let x = |row: usize| &self.x[row * all + first..][..own];
        for row in rows.start..rows.end + taps - 1 {
            if row < rows.end {
                let skipped = (taps - 1).saturating_sub(row - rows.start);
                let mut d = [0.0; CHANNELS];
                for (w, at) in w[skipped..taps].iter().zip(row + 1 + skipped - taps..) {
                    add_product(&mut d, w, x(at));
                }
                for (d, dy) in d.iter_mut().zip(&self.dy[row * all + first..][..own]) {
                    let (s, rest) = sigmoid(*d);
                    *d = dy.to_f32() * (*d * s).mul_add(rest, s);
                }
                ring[row % taps] = [0.0; CHANNELS];
                for tap in skipped..taps {
                    let at = row + 1 + tap - taps;
                    add_product(&mut dw[tap], &d, x(at));
                    add_product(&mut ring[at % taps], &w[tap], &d);
                }
            }
            if row + 1 >= rows.start + taps {
                let done = row + 1 - taps;
                // SAFETY: only this call has these channels.
                let dx = unsafe { self.dx.range(done * all + first, own) };
                for (dx, sum) in dx.iter_mut().zip(&ring[done % taps]) {
                    *dx = T::from_f32(*sum);
                }
            }
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
