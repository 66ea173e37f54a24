//! Groups for planning one rank of a world that does not exist: they allocate addresses and count buffers as real
//! groups do. Never communicates: collectives move nothing and have always finished.
use super::{Axis, Collective, CommStats, CommUse, Member, Reduce, Tag, Ticket};
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::{Buf, View, ViewMut, unbacked};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The membership of one rank.
pub struct UnbackedMember {
    pub meter: Meter,
    pub rank: usize,
    pub ranks: usize,
    /// Adjacent ranks that share gathered buffers: those of a host. 1 on GPUs.
    pub sharing: usize,
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
            let member = UnbackedMember { meter: meter.clone(), rank: 0, ranks: 16, sharing };
            let group = member.group(axis, mesh.group(axis, 0)).unwrap();
            let alloc = |usage| group.alloc(DType::F32, 1 << 10, usage, Category::Slots).unwrap();
            let gathered = alloc(CommUse::Gathered);
            assert_eq!(meter.live(Category::Slots), (4 << 10) / part, "{axis:?} {sharing}");
            let _reduced = alloc(CommUse::Reduced);
            drop(gathered);
            assert_eq!(meter.live(Category::Slots), 4 << 10);
        }
    }
}
