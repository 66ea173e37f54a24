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
//! Matrices are exchanged in the dtype of the iteration: f32 if the run computes in it, else bf16, as in PyTorch.
//!
//! Bytes per rank besides moments, for the largest matrix M, its shorter side squared Q, and the elements W of a
//! round's matrices that one rank holds (see [Note: rounds] in `owners`): 16 M + 16 W + 8 Q in f32; in bf16 8 M + 6 W +
//! 6 Q, and 4 of the larger of M and W.
use super::moments::States;
use super::newton_schulz::NewtonSchulz;
use super::owners::{MuonMatrix, MuonPlan, MuonRound};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommUse, Mesh, Tag, Ticket};
use crate::device::ops::{ClipScale, CopyColumns, Sgd, SgdScalars, SumSquares};
use crate::device::{Buf, Device, LIMBS, View};
use crate::store::{PartId, Shard, Store};
use std::ops::Range;
use std::sync::Arc;

/// Rounds in flight: one on its way to the owners, one with them, one on its way back.
const SLOTS: usize = 3;

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
    /// A buffer as long as a slot's matrix.
    other: Buf,
    /// f32, for this rank's elements of a round, and where matrices are not f32, for one of them.
    wide: Buf,
    iteration: NewtonSchulz,
    /// f32: the iteration's constants.
    constants: Buf,
    /// f64 (LIMBS), and f32 (2): 1 if the step's scale is finite.
    acc: Buf,
    guard: Buf,
}

impl Muon {
    /// `matrices`: all that Muon updates, in the store's order, and experts' of other ranks.
    pub fn new(
        dev: &dyn Device,
        mesh: &Mesh,
        matrices: Vec<MuonMatrix>,
        (momentum, steps): (f32, usize),
        dtype: DType,
    ) -> Result<Muon> {
        if matrices.is_empty() {
            return Err(Error::input(
                "`optimizer: muon` updates the matrices of blocks, and none of them is trained (they are frozen, or \
                 only adapters are trained); use `optimizer: adamw`",
            ));
        }
        let MuonPlan { matrices, rounds, lengths } = MuonPlan::new(matrices, &mesh.sizes, mesh.rank());
        let [pieces, largest, square] = lengths;
        let group = mesh.group(Axis::World).clone();
        let _for = dev.meter().purpose("muon");
        let dtype = if dtype == DType::F32 { DType::F32 } else { DType::Bf16 };
        let communicated = |len| group.alloc(dtype, len, CommUse::Reduced, Category::Optimizer);
        let slot = || {
            Ok(MuonSlot { matrix: communicated(largest)?, pieces: communicated(pieces)?, tickets: Default::default() })
        };
        let fixed = NewtonSchulz::constants(momentum);
        let mut constants = dev.alloc(DType::F32, fixed.len(), Category::Optimizer)?;
        dev.upload(bytemuck::cast_slice(&fixed), constants.view_mut())?;
        let wide = if dtype == DType::F32 { pieces } else { pieces.max(largest) };
        Ok(Muon {
            slots: (0..SLOTS.min(rounds.len())).map(|_| slot()).collect::<Result<_>>()?,
            other: dev.alloc(dtype, largest, Category::Optimizer)?,
            wide: dev.alloc(DType::F32, wide, Category::Optimizer)?,
            iteration: NewtonSchulz::new(dev, steps, dtype, square)?,
            constants,
            acc: dev.alloc(DType::F64, LIMBS, Category::Optimizer)?,
            guard: dev.alloc(DType::F32, 2, Category::Optimizer)?,
            group,
            matrices,
            rounds,
        })
    }

    /// Updates all matrices. `states`: per unit, with the momentum of the whole shard first. `update`: on the device,
    /// the SGD constants of each kind of update, `stride` elements apart. If `scale` is not finite, nothing changes.
    pub fn step(
        &mut self,
        dev: &dyn Device,
        store: &mut dyn Store,
        states: &mut [States],
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
        states: &mut [States],
        scale: View,
        round: usize,
    ) -> Result<()> {
        let (Muon { group, matrices, rounds, slots, wide, constants, .. }, number) = (self, round);
        let (round, slot) = (&rounds[round], round % SLOTS);
        let MuonSlot { matrix, pieces, tickets } = &mut slots[slot];
        if let Some(ticket) = tickets.back.take() {
            group.wait_sent(ticket)?;
        }
        let (moment, add) = (constants.view().slice(0..3), constants.view().slice(3..6));
        each_piece(store, matrices, round, &mut |shard, matrix, own, piece| {
            let Some(grad) = &shard.grad else { return Ok(()) };
            for part in parts(dev, own.len()) {
                let (own, piece) = (from(&own, &part), from(&piece, &part));
                let g = grad.as_view().slice(own.clone());
                let PartId { unit, buffer } = matrix.part;
                let m = states[unit][buffer].bufs.first_mut().map(|m| m.values.view_mut().slice(own));
                let (mut p, out) = (wide.view_mut().slice(0..part.len()), Some(pieces.view_mut().slice(piece)));
                dev.zero(p.reborrow())?;
                dev.sgd(Sgd { h: moment, scale, g, m, p: p.reborrow(), out: None })?;
                dev.sgd(Sgd { h: add, scale, g, m: None, p, out })?;
            }
            Ok(())
        })?;
        let [sends, recvs] = &round.there;
        let tag = Tag::new("muon there", number);
        tickets.there = Some(group.all_to_all(tag, pieces.view(), sends, matrix.view_mut(), recvs)?);
        Ok(())
    }

    /// Orthogonalizes the matrix that this rank owns, if any, and starts the way back of all results.
    fn iterate(&mut self, dev: &dyn Device, number: usize) -> Result<()> {
        let Muon { group, matrices, rounds, slots, other, wide, iteration, constants, .. } = self;
        let round = &rounds[number];
        let MuonSlot { matrix, pieces, tickets } = &mut slots[number % SLOTS];
        let there = tickets.there.take();
        there.map_or(Ok(()), |ticket| group.wait(ticket))?;
        if let Some(own) = round.own.map(|own| &matrices[own]) {
            let ((rows, columns), n) = (own.shape, own.elements());
            let rearranges = own.columns().is_some();
            if rearranges {
                shift_columns(dev, own, matrix, other, true)?;
            }
            let pair = if rearranges { [&mut *other, &mut *matrix] } else { [&mut *matrix, &mut *other] };
            // The factor of `match_rms_adamw`.
            let factor = (0.2 * (rows.max(columns) as f64).sqrt()) as f32;
            let moved = iteration.run(dev, constants.view(), (rows, columns, factor), pair, wide)?;
            if rearranges {
                if moved {
                    dev.copy(matrix.view().slice(0..n), other.view_mut().slice(0..n))?;
                }
                shift_columns(dev, own, other, matrix, false)?;
            } else if moved {
                dev.copy(other.view().slice(0..n), matrix.view_mut().slice(0..n))?;
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
        let Muon { group, matrices, rounds, slots, wide, guard, .. } = self;
        let MuonSlot { pieces, tickets, .. } = &slots[round % SLOTS];
        tickets.back.map_or(Ok(()), |ticket| group.wait(ticket))?;
        each_piece(store, matrices, &rounds[round], &mut |shard, matrix, own, piece| {
            let first = (matrix.kind + 1) * stride - SgdScalars::LEN;
            let (h, scale) = (update.slice(first..first + SgdScalars::LEN), guard.view().slice(0..1));
            for part in parts(dev, own.len()) {
                let (own, piece) = (from(&own, &part), from(&piece, &part));
                let p = shard.master.reborrow().slice(own.clone());
                let out = shard.param.as_mut().map(|out| out.reborrow().slice(own));
                let mut g = pieces.view().slice(piece);
                if g.dtype() != DType::F32 {
                    dev.copy(g, wide.view_mut().slice(0..g.len()))?;
                    g = wide.view().slice(0..g.len());
                }
                dev.sgd(Sgd { h, scale, g, m: None, p, out })?;
            }
            Ok(())
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

/// Ranges of `len` elements that several passes visit one after another: on the CPU as many as stay in L2.
fn parts(dev: &dyn Device, len: usize) -> impl Iterator<Item = Range<usize>> {
    const CACHED: usize = 1 << 16;
    let step = if dev.launches_kernels() { len.max(1) } else { CACHED };
    (0..len).step_by(step).map(move |at| at..len.min(at + step))
}
/// `part` of the elements of `range`.
fn from(range: &Range<usize>, part: &Range<usize>) -> Range<usize> {
    range.start + part.start..range.start + part.end
}

/// The shard, the matrix, this rank's elements of it in the shard, and in the round's buffer.
type OnPiece<'a> = dyn FnMut(&mut Shard, &MuonMatrix, Range<usize>, Range<usize>) -> Result<()> + 'a;

/// Visits this rank's elements of the round's matrices.
fn each_piece(store: &mut dyn Store, matrices: &[MuonMatrix], round: &MuonRound, f: &mut OnPiece) -> Result<()> {
    store.for_each_shard(&mut |mut shard| {
        if shard.grad.is_none() {
            return Ok(());
        }
        let part = shard.part();
        let dealt = matrices.iter().skip(round.first).zip(&round.pieces);
        for (matrix, piece) in dealt.filter(|(matrix, _)| matrix.part == part) {
            if let Some(own) = shard.owned(matrix.segment.range()) {
                f(&mut shard, matrix, own, piece.clone())?;
            }
        }
        Ok(())
    })
}
