//! Muon: the update of a block's matrices is the momentum, orthogonalized. Each matrix has one owner, which receives
//! its parts, iterates and sends back parts of the result, so every strategy gets the same bits. Never updates a tensor
//! that is not a matrix of a block: those are AdamW's.
//!
//! ```text
//! all_to_all   there 0   there 1      there 2, back 0   there 3, back 1   ...
//! compute      momentum  iterate 0    iterate 1         iterate 2         ...   weights
//! ```
//!
//! Momentum is sharded as AdamW's first moment, in units of 1 / (1 - mu) of PyTorch's: m = mu m + g, and the input of
//! the iteration is g + mu m, whose direction is that of PyTorch's (1 - mu) g + mu buf.
//!
//! Bytes per rank besides moments, for the largest matrix M, its shorter side squared Q, and the elements W of a
//! round's matrices that one rank holds (see [Note: rounds] in `owners`): 16 M + 12 W + 8 Q in f32, otherwise 2 M more.
use super::newton_schulz::NewtonSchulz;
use super::owners::{self, MuonMatrix, MuonRound};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Collective, CommUse, Mesh, Tag, Ticket};
use crate::device::ops::{ClipScale, CopyColumns, Sgd, SgdScalars, SumSquares};
use crate::device::{Buf, Device, LIMBS, View};
use crate::nn::{Layout, ROOT, Segment, is_adapter};
use crate::store::{Shard, Store};
use std::ops::Range;
use std::sync::Arc;

/// Rounds in flight: one on its way to the owners, one with them, one on its way back.
const SLOTS: usize = 3;

/// Whether Muon updates the tensor, a segment of layer `layer`.
pub(super) fn updates(layer: usize, segment: &Segment) -> bool {
    layer != ROOT && segment.trainable && segment.shape.len() == 2 && !is_adapter(segment)
}

/// Names of all tensors that Muon updates.
pub(super) fn names(layouts: &[Layout]) -> Vec<String> {
    let segments = layouts.iter().enumerate().flat_map(|(layer, l)| l.segments.iter().map(move |s| (layer, s)));
    segments.filter(|(layer, s)| updates(*layer, s)).map(|(_, s)| s.name.clone()).collect()
}

#[derive(Default)]
struct MuonTickets {
    there: Option<Ticket>,
    back: Option<Ticket>,
}

struct MuonSlot {
    /// The matrix that this rank owns.
    matrix: Buf,
    /// This rank's elements of all matrices of the round.
    pieces: Buf,
    tickets: MuonTickets,
}

pub(super) struct Muon {
    group: Arc<dyn Collective>,
    matrices: Vec<MuonMatrix>,
    rounds: Vec<MuonRound>,
    slots: Vec<MuonSlot>,
    /// As long as a slot's matrix.
    other: Buf,
    iteration: NewtonSchulz,
    /// f32: the iteration's constants, then 1.
    constants: Buf,
    /// f64 (LIMBS), and f32 (2): 1 if the step's scale is finite.
    acc: Buf,
    guard: Buf,
}

impl Muon {
    /// `matrices`: all that Muon updates, in the store's order.
    pub fn new(
        dev: &dyn Device,
        mesh: &Mesh,
        mut matrices: Vec<MuonMatrix>,
        (momentum, steps): (f32, usize),
        dtype: DType,
    ) -> Result<Muon> {
        if matrices.is_empty() {
            return Err(Error::input(
                "`optimizer: muon` updates the matrices of blocks, and none of them is trained (they are frozen, or \
                 only adapters are trained); use `optimizer: adamw`",
            ));
        }
        matrices.sort_by_key(|matrix| std::cmp::Reverse(matrix.cost())); // stable
        let (rounds, [pieces, largest, square]) = owners::rounds(&matrices, &mesh.sizes, mesh.rank());
        let group = mesh.world.clone();
        let _for = dev.meter().purpose("muon");
        let communicated = |len| group.alloc(DType::F32, len, CommUse::Reduced, Category::Optimizer);
        let slot = || {
            Ok(MuonSlot { matrix: communicated(largest)?, pieces: communicated(pieces)?, tickets: Default::default() })
        };
        let fixed = NewtonSchulz::constants(momentum);
        let mut constants = dev.alloc(DType::F32, fixed.len() + 1, Category::Optimizer)?;
        let all: Vec<f32> = fixed.into_iter().chain([1.0]).collect();
        dev.upload(bytemuck::cast_slice(&all), constants.view_mut())?;
        Ok(Muon {
            slots: (0..SLOTS.min(rounds.len())).map(|_| slot()).collect::<Result<_>>()?,
            other: dev.alloc(DType::F32, largest, Category::Optimizer)?,
            iteration: NewtonSchulz::new(dev, steps, dtype, largest, square)?,
            constants,
            acc: dev.alloc(DType::F64, LIMBS, Category::Optimizer)?,
            guard: dev.alloc(DType::F32, 2, Category::Optimizer)?,
            group,
            matrices,
            rounds,
        })
    }

    /// Updates all matrices. `states`: per unit, with the momentum first. `update`: on the device, the SGD constants of
    /// each kind of update, `stride` elements apart. If `scale` is not finite, nothing changes.
    pub fn step(
        &mut self,
        dev: &dyn Device,
        store: &mut dyn Store,
        states: &mut [Vec<Buf>],
        (update, stride): (View, usize),
        scale: View,
    ) -> Result<()> {
        dev.zero(self.acc.view_mut())?;
        dev.sum_squares(SumSquares { x: scale.slice(0..1), acc: self.acc.view_mut() })?;
        let (acc, unscale) = (self.acc.view(), self.constants.view().slice(7..8));
        dev.clip_scale(ClipScale { acc, max_norm: 0.0, unscale, out: self.guard.view_mut() })?;
        self.send(dev, store, states, scale, 0)?;
        for round in 0..self.rounds.len() {
            if round + 1 < self.rounds.len() {
                self.send(dev, store, states, scale, round + 1)?;
            }
            self.iterate(dev, round)?;
            if round > 0 {
                self.apply(dev, store, (update, stride), round - 1)?;
            }
        }
        self.apply(dev, store, (update, stride), self.rounds.len() - 1)?;
        let backs = self.slots.iter_mut().filter_map(|slot| slot.tickets.back.take());
        backs.into_iter().try_for_each(|ticket| self.group.wait_sent(ticket))
    }

    /// Updates the momentum of a round's matrices and starts their way to the owners.
    fn send(
        &mut self,
        dev: &dyn Device,
        store: &mut dyn Store,
        states: &mut [Vec<Buf>],
        scale: View,
        round: usize,
    ) -> Result<()> {
        let (Muon { group, matrices, rounds, slots, constants, .. }, number) = (self, round);
        let (round, slot) = (&rounds[round], round % SLOTS);
        let MuonSlot { matrix, pieces, tickets } = &mut slots[slot];
        if let Some(ticket) = tickets.back.take() {
            group.wait_sent(ticket)?;
        }
        let (moment, add) = (constants.view().slice(0..3), constants.view().slice(3..6));
        each_piece(store, matrices, round, &mut |shard, _, own, piece| {
            let Some(grad) = &shard.grad else { return Ok(()) };
            let g = grad.as_view().slice(own.clone());
            let m = states[shard.unit].first_mut().map(|m| m.view_mut().slice(own));
            dev.zero(pieces.view_mut().slice(piece.clone()))?;
            dev.sgd(Sgd { h: moment, scale, g, m, p: pieces.view_mut().slice(piece.clone()), out: None })?;
            dev.sgd(Sgd { h: add, scale, g, m: None, p: pieces.view_mut().slice(piece), out: None })
        })?;
        let [sends, recvs] = &round.there;
        let tag = Tag::new("muon there", number);
        tickets.there = Some(group.all_to_all(tag, pieces.view(), sends, matrix.view_mut(), recvs)?);
        Ok(())
    }

    /// Orthogonalizes the matrix that this rank owns, if any, and starts the way back of all results.
    fn iterate(&mut self, dev: &dyn Device, number: usize) -> Result<()> {
        let Muon { group, matrices, rounds, slots, other, iteration, constants, .. } = self;
        let round = &rounds[number];
        let MuonSlot { matrix, pieces, tickets } = &mut slots[number % SLOTS];
        let there = tickets.there.take();
        there.map_or(Ok(()), |ticket| group.wait(ticket))?;
        if let Some(own) = matrices[round.first..].get(group.rank()).filter(|_| group.rank() < round.pieces.len()) {
            let ((rows, columns), n) = (own.shape, own.elements());
            let rearranges = own.columns().is_some();
            if rearranges {
                shift_columns(dev, own, matrix, other, true)?;
            }
            let (x, y) = if rearranges { (&mut *other, &mut *matrix) } else { (&mut *matrix, &mut *other) };
            iteration.run(dev, constants.view(), (rows, columns), x, y)?;
            // As match_rms_adamw.
            let factor = 0.2 * (rows.max(columns) as f64).sqrt();
            dev.scale(factor as f32, x.view_mut().slice(0..n))?;
            if rearranges {
                shift_columns(dev, own, other, matrix, false)?;
            }
        }
        // What was sent has arrived, so that the pieces may be overwritten.
        there.map_or(Ok(()), |ticket| group.wait_sent(ticket))?;
        let [sends, recvs] = &round.back;
        let tag = Tag::new("muon back", number);
        tickets.back = Some(group.all_to_all(tag, matrix.view(), sends, pieces.view_mut(), recvs)?);
        Ok(())
    }

    /// Updates the weights of a round's matrices with the results.
    fn apply(
        &mut self,
        dev: &dyn Device,
        store: &mut dyn Store,
        (update, stride): (View, usize),
        round: usize,
    ) -> Result<()> {
        let Muon { group, matrices, rounds, slots, guard, .. } = self;
        let MuonSlot { pieces, tickets, .. } = &slots[round % SLOTS];
        tickets.back.map_or(Ok(()), |ticket| group.wait(ticket))?;
        each_piece(store, matrices, &rounds[round], &mut |shard, matrix, own, piece| {
            let first = (matrix.kind + 1) * stride - SgdScalars::LEN;
            let (h, scale) = (update.slice(first..first + SgdScalars::LEN), guard.view().slice(0..1));
            let p = shard.master.reborrow().slice(own.clone());
            let out = shard.param.as_mut().map(|out| out.reborrow().slice(own));
            dev.sgd(Sgd { h, scale, g: pieces.view().slice(piece), m: None, p, out })
        })
    }
}

/// Moves a matrix between the layout of an owner, the parts of tp one after another, and rows.
fn shift_columns(dev: &dyn Device, matrix: &MuonMatrix, from: &Buf, to: &mut Buf, to_rows: bool) -> Result<()> {
    let (rows, columns) = matrix.shape;
    for part in matrix.columns().into_iter().flatten() {
        let (start, width) = (rows * part.start, part.len());
        let packed = start..start + rows * width;
        let (src_row, dst_row) = if to_rows { (width, columns) } else { (columns, width) };
        let strided = part.start..rows * columns;
        let (src, dst) = if to_rows { (packed, strided) } else { (strided, packed) };
        let (src, dst) = (from.view().slice(src), to.view_mut().slice(dst));
        dev.copy_columns(CopyColumns { rows, width, src_row, dst_row, src, dst })?;
    }
    Ok(())
}

/// The shard, the matrix, this rank's elements of it in the shard, and in the round's buffer.
type OnPiece<'a> = dyn FnMut(&mut Shard, &MuonMatrix, Range<usize>, Range<usize>) -> Result<()> + 'a;

/// Visits this rank's elements of the round's matrices.
fn each_piece(store: &mut dyn Store, matrices: &[MuonMatrix], round: &MuonRound, f: &mut OnPiece) -> Result<()> {
    store.for_each_shard(&mut |mut shard| {
        if shard.grad.is_none() {
            return Ok(());
        }
        let unit = shard.unit;
        for (matrix, piece) in matrices[round.first..].iter().zip(&round.pieces).filter(|(m, _)| m.unit == unit) {
            if let Some(own) = shard.owned(matrix.segment.range()) {
                f(&mut shard, matrix, own, piece.clone())?;
            }
        }
        Ok(())
    })
}
