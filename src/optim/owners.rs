//! Which matrices Muon updates, which rank orthogonalizes which, and where its parts are: arithmetic on the segment
//! table. Never communicates.
//!
//! [Note: rounds] The matrices, most expensive first, are dealt in *rounds* of one matrix per rank of the world. So the
//! owners of a round have about equal work, and each holds one whole matrix at a time. An owner receives the matrix
//! from the ranks of its own replica, and sends the result to all ranks that hold a part of it, in every replica.
//!
//! With ep, the matrices of experts come last, and are dealt among the ranks that have these experts: their parts stay
//! within `expert_fsdp`, and where a rank has whole experts, on the rank. A rank does not know where the shards of
//! other ranks' experts begin, and need not: there are as many rounds as the ranks with most experts need.
//!
//! An owner lays the parts of tp one after another: `(tp, R, C / tp)` where columns are cut, which it rearranges to
//! `(R, C)`; otherwise that is the matrix. Within such a part the shards of fsdp follow each other.
use crate::comm::MeshSizes;
use crate::comm::mesh::Coords;
use crate::nn::{Layout, ROOT, Segment, Slice, Tp, is_adapter};
use crate::store::PartId;
use std::collections::HashSet;
use std::ops::Range;

/// Whether Muon updates the tensor, a segment of layer `layer`.
pub(super) fn updates(layer: usize, segment: &Segment) -> bool {
    layer != ROOT && segment.is_trained() && segment.shape.len() == 2 && !is_adapter(segment)
}

/// Names of all tensors that Muon updates.
pub(super) fn names(layouts: &[Layout]) -> HashSet<String> {
    let segments = layouts.iter().enumerate().flat_map(|(layer, l)| l.segments.iter().map(move |s| (layer, s)));
    segments.filter(|(layer, s)| updates(*layer, s)).map(|(_, s)| s.name.clone()).collect()
}

/// A matrix that Muon updates, as this rank knows it.
pub(super) struct MuonMatrix {
    pub part: PartId,
    pub segment: Segment,
    /// Rows and columns of the whole matrix.
    pub shape: (usize, usize),
    /// Elements of the unit's shards, each of which starts at a multiple of this; `None` if every rank has the unit.
    pub shard: Option<usize>,
    /// The constants of its update.
    pub kind: usize,
}

impl MuonMatrix {
    pub fn new(part: PartId, segment: &Segment, shard: Option<usize>, kind: usize) -> MuonMatrix {
        let whole = segment.global_shape();
        MuonMatrix { part, segment: segment.clone(), shape: (whole[0], whole[1..].iter().product()), shard, kind }
    }
    pub fn elements(&self) -> usize {
        self.shape.0 * self.shape.1
    }
    /// In proportion to the FLOPs of an iteration.
    pub fn cost(&self) -> usize {
        let (rows, columns) = self.shape;
        let (short, long) = (rows.min(columns), rows.max(columns));
        short * short * (2 * long + short)
    }
    /// Widths of the parts of tp where columns are cut.
    pub fn columns(&self) -> Option<impl Iterator<Item = Range<usize>> + use<>> {
        let Tp::Cut { dim: 1, over, whole } = self.segment.tp else { return None };
        Some((0..over.of).map(move |index| Slice { index, ..over }.share(whole)))
    }
    /// Elements of the matrix, as its owner lays it out, before and in the part of rank `tp`. Of a matrix that is
    /// several below each other, a rank's rows follow each other: their order only changes the order of the result's.
    fn part(&self, tp: usize) -> Range<usize> {
        let each = |dim| if dim == 1 { self.shape.0 } else { self.shape.1.max(1) };
        match self.segment.tp {
            Tp::Cut { dim, over, whole } => {
                let share = Slice { index: tp, ..over }.share(whole);
                share.start * each(dim)..share.end * each(dim)
            }
            Tp::Parts { over, rows } => {
                let of = |index| rows.map(|n| Slice { index, ..over }.share(n).len()).iter().sum::<usize>();
                let before: usize = (0..tp).map(of).sum();
                before * each(0)..(before + of(tp)) * each(0)
            }
            Tp::Same | Tp::Summed => 0..self.elements(),
        }
    }
    /// The elements that a rank holds, within its part of tp.
    pub fn held(&self, sizes: &MeshSizes, at: &Coords) -> Range<usize> {
        let len = self.part(at.tp).len();
        let Some(shard) = self.shard else { return 0..len };
        if !self.is_with(sizes, at) {
            return 0..0;
        }
        let index = if self.segment.ep.is_some() { at.dp_shard / sizes.ep } else { at.dp_shard };
        let start = (index * sizes.sp + at.sp) * shard;
        let within = |x: usize| x.saturating_sub(self.segment.start).min(len);
        within(start)..within(start + shard)
    }
    /// Whether the rank has the tensor, or a shard of it.
    fn is_with(&self, sizes: &MeshSizes, at: &Coords) -> bool {
        self.segment.ep.is_none_or(|ep| ep == sizes.ep_index(at))
    }
    /// Where they are in the matrix as its owner lays it out.
    fn place(&self, sizes: &MeshSizes, at: &Coords) -> Range<usize> {
        let (part, held) = (self.part(at.tp), self.held(sizes, at));
        part.start + held.start..part.start + held.end
    }
    /// Whether the rank at `from` sends its part to the owner at `to`.
    fn sends(&self, from: &Coords, to: &Coords) -> bool {
        let fsdp = self.shard.is_some() || (from.dp_shard, from.sp) == (to.dp_shard, to.sp);
        from.dp_replicate == to.dp_replicate && fsdp && (self.segment.tp.is_cut() || from.tp == to.tp)
    }
}

/// What one rank does in a round.
pub(super) struct MuonRound {
    /// Index of the first matrix of the round, as this rank knows it.
    pub first: usize,
    /// Index of the matrix that this rank owns.
    pub own: Option<usize>,
    /// Per matrix, where this rank's elements of it are in the round's buffer.
    pub pieces: Vec<Range<usize>>,
    /// Parts to the owners, and from the ranks that have this rank's matrix.
    pub there: [Vec<Range<usize>>; 2],
    /// Parts of the result, to all ranks, and from the owners.
    pub back: [Vec<Range<usize>>; 2],
}

/// All rounds of a rank, and the lengths of the buffers, which are the same on all ranks: for the pieces of a round,
/// for the largest matrix, and for the largest product of a matrix with itself.
pub(super) struct MuonPlan {
    /// In the order of the rounds; of experts, those that this rank has.
    pub matrices: Vec<MuonMatrix>,
    pub rounds: Vec<MuonRound>,
    pub lengths: [usize; 3],
}

impl MuonPlan {
    /// `matrices`: those of all ranks.
    pub fn new(mut matrices: Vec<MuonMatrix>, sizes: &MeshSizes, rank: usize) -> MuonPlan {
        let largest = matrices.iter().map(MuonMatrix::elements).max().unwrap_or(0);
        let short = |matrix: &MuonMatrix| matrix.shape.0.min(matrix.shape.1);
        let square = matrices.iter().map(short).max().unwrap_or(0).pow(2);
        // An expert's count is that of its largest part of tp.
        let of_expert = matrices.iter().filter(|m| m.segment.ep.is_some()).map(|m| m.part(0).len()).max().unwrap_or(0);
        let experts = |ep| matrices.iter().filter(|m| m.segment.ep == Some(ep)).count();
        let most_experts = (0..sizes.ep).map(experts).max().unwrap_or(0);

        let world: Vec<(usize, Coords)> = (0..sizes.world()).map(|r| (r, sizes.coords(r))).collect();
        let me = world[rank].1;
        let near: Vec<usize> =
            world.iter().filter(|(_, at)| sizes.ep_index(at) == sizes.ep_index(&me)).map(|&(r, _)| r).collect();
        matrices.retain(|matrix| matrix.is_with(sizes, &me));
        matrices.sort_by_key(|matrix| (matrix.segment.ep.is_some(), std::cmp::Reverse(matrix.cost()))); // stable
        let shared = matrices.partition_point(|matrix| matrix.segment.ep.is_none());
        let all: Vec<usize> = (0..world.len()).collect();
        let (mut rounds, mut most) = (Vec::new(), of_expert * near.len().min(most_experts));
        for dealt in matrices[..shared].chunks(all.len()) {
            let held =
                |(_, at): &(usize, Coords)| dealt.iter().map(|matrix| matrix.held(sizes, at).len()).sum::<usize>();
            most = world.iter().map(held).fold(most, usize::max);
        }
        for first in (0..shared).step_by(all.len()) {
            rounds.push(round(&matrices[..shared], first, &all, sizes, (&me, rank)));
        }
        for first in (0..most_experts).step_by(near.len()) {
            rounds.push(round(&matrices, shared + first, &near, sizes, (&me, rank)));
        }
        MuonPlan { matrices, rounds, lengths: [most, largest, square] }
    }
}

/// The round of `matrices` from `first` on, one for each of the ranks `owners`.
fn round(
    matrices: &[MuonMatrix],
    first: usize,
    owners: &[usize],
    sizes: &MeshSizes,
    (me, rank): (&Coords, usize),
) -> MuonRound {
    let world: Vec<Coords> = (0..sizes.world()).map(|r| sizes.coords(r)).collect();
    let dealt = matrices.get(first..(first + owners.len()).min(matrices.len())).unwrap_or_default();
    let mut pieces = Vec::with_capacity(dealt.len());
    for matrix in dealt {
        let start = pieces.last().map_or(0, |last: &Range<usize>| last.end);
        pieces.push(start..start + matrix.held(sizes, me).len());
    }
    // The matrix of an owner.
    let of = |owner: usize| owners.iter().position(|&r| r == owner).filter(|&i| i < dealt.len());
    let piece = |owner: usize| of(owner).map_or(0..0, |i| pieces[i].clone());
    let to = |(owner, at): (usize, &Coords)| match of(owner).filter(|&i| dealt[i].sends(me, at)) {
        Some(_) => piece(owner),
        None => 0..0,
    };
    let own = of(rank);
    let place = |at: &Coords| own.map_or(0..0, |i| dealt[i].place(sizes, at));
    let from = |at: &Coords| if own.is_some_and(|i| dealt[i].sends(at, me)) { place(at) } else { 0..0 };
    MuonRound {
        first,
        own: own.map(|i| first + i),
        there: [world.iter().enumerate().map(to).collect(), world.iter().map(from).collect()],
        back: [world.iter().map(place).collect(), (0..world.len()).map(piece).collect()],
        pieces,
    }
}
