//! Groups for planning one rank of a world that does not exist: they allocate addresses and count buffers as real
//! groups do. Never communicates: collectives move nothing and have always finished.
use super::{Axis, Collective, CommStats, CommUse, Member, Reduce, Tag, Ticket};
use crate::base::meter::Lease;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::{Buf, View, ViewMut, unbacked};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The membership of one rank.
pub struct UnbackedMember {
    meter: Meter,
    rank: usize,
    ranks: usize,
    sharing: usize,
    stage: usize,
    /// What each set of several ranks holds, however many axes it has.
    stages: Mutex<BTreeMap<Vec<usize>, Lease>>,
}

impl UnbackedMember {
    /// `sharing`: adjacent ranks that share gathered buffers, those of a host; 1 on GPUs. `stage`: bytes that a rank
    /// holds for each set of ranks that it exchanges data with.
    pub fn new(meter: &Meter, (rank, ranks): (usize, usize), sharing: usize, stage: usize) -> UnbackedMember {
        UnbackedMember { meter: meter.clone(), rank, ranks, sharing, stage, stages: Mutex::default() }
    }
}

impl Member for UnbackedMember {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.ranks
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        let rank = ranks.iter().position(|&r| r == self.rank);
        let rank = rank.ok_or_else(|| Error::op("group", format!("rank {} is not in {ranks:?}", self.rank)))?;
        // If hosts hold unequal parts of a group, the smallest, which gives the largest count.
        let parts = ranks.chunk_by(|a, b| a / self.sharing == b / self.sharing).map(<[usize]>::len);
        let sharing = parts.min().unwrap_or(1);
        if self.stage > 0 && ranks.len() > 1 {
            let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
            let stage = || self.meter.lease(Category::Other, self.stage);
            stages.entry(ranks.clone()).or_insert_with(stage);
        }
        Ok(Arc::new(UnbackedGroup { meter: self.meter.clone(), rank, size: ranks.len(), axis, sharing }))
    }
    fn set_timeout(&self, _: Duration) {}
    fn abort(&self) {}
    fn failed(&self) -> Option<usize> {
        None
    }
}

struct UnbackedGroup {
    meter: Meter,
    rank: usize,
    size: usize,
    axis: Axis,
    /// Ranks that share gathered buffers.
    sharing: usize,
}

impl Collective for UnbackedGroup {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn axis(&self) -> Axis {
        self.axis
    }
    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf> {
        let bytes = usage.counted(len * dtype.size(), self.sharing);
        unbacked::alloc(dtype, len, self.meter.lease_of(category, dtype, len, bytes))
    }
    fn all_gather(&self, _: Tag, _: View, _: ViewMut) -> Result<Ticket> {
        Ok(Ticket(0))
    }
    fn reduce_scatter(&self, _: Tag, _: ViewMut, _: ViewMut, _: bool) -> Result<Ticket> {
        Ok(Ticket(0))
    }
    fn all_reduce(&self, _: Tag, _: ViewMut, _: Reduce) -> Result<Ticket> {
        Ok(Ticket(0))
    }
    fn broadcast(&self, _: Tag, _: ViewMut, _: usize) -> Result<Ticket> {
        Ok(Ticket(0))
    }
    fn send_recv(&self, _: Tag, _: usize, _: View, _: usize, _: ViewMut) -> Result<Ticket> {
        Ok(Ticket(0))
    }
    fn all_to_all(&self, _: Tag, _: View, _: &[Range<usize>], _: ViewMut, _: &[Range<usize>]) -> Result<Ticket> {
        Ok(Ticket(0))
    }
    fn barrier(&self, _: Tag) -> Result<()> {
        Ok(())
    }
    fn wait(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn release(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn wait_sent(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::MeshSizes;

    #[test]
    fn what_is_gathered_counts_once_for_the_ranks_that_share_it() {
        let mesh = MeshSizes { dp_replicate: 2, dp_shard: 4, sp: 1, tp: 2, ep: 1 };
        // Ranks 0, 2, 4, 6 along fsdp, on hosts of 16, 4 and 1 ranks.
        for (axis, sharing, part) in [(Axis::Fsdp, 16, 4), (Axis::Fsdp, 4, 2), (Axis::Fsdp, 1, 1), (Axis::Tp, 4, 2)] {
            let meter = Meter::default();
            let member = UnbackedMember::new(&meter, (0, 16), sharing, 0);
            let group = member.group(axis, mesh.group(axis, 0)).unwrap();
            let alloc = |usage| group.alloc(DType::F32, 1 << 10, usage, Category::Slots).unwrap();
            let gathered = alloc(CommUse::Gathered);
            assert_eq!(meter.live(Category::Slots), (4 << 10) / part, "{axis:?} {sharing}");
            let _reduced = alloc(CommUse::Reduced);
            drop(gathered);
            assert_eq!(meter.live(Category::Slots), 4 << 10);
        }
    }

    #[test]
    fn each_set_of_several_ranks_has_one_stage() {
        let meter = Meter::default();
        let member = UnbackedMember::new(&meter, (0, 4), 1, 100);
        let sets = [vec![0], vec![0, 1], vec![0, 1, 2, 3], vec![0, 1]];
        let _groups = sets.map(|ranks| member.group(Axis::Fsdp, ranks).unwrap());
        assert_eq!(meter.live(Category::Other), 200);
    }
}
