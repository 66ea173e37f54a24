//! The steps of an operation. A step never blocks: it does what the peers' states allow now and returns whether
//! anything changed.
use super::hub::Hub;
use super::op::{OpStep, ShmOp};
use super::record::Phase;
use crate::base::Result;
use crate::comm::seam::Seam;

impl ShmOp {
    /// Whether all ranks have released what the gather will overwrite.
    fn free(&self, hub: &Hub) -> bool {
        self.into.as_ref().is_none_or(|(buffer, content)| hub.vacant(buffer, *content))
    }

    /// Takes as many steps as possible.
    pub fn advance(&mut self, hub: &Hub) -> Result<bool> {
        let before = self.step;
        loop {
            let step = self.step;
            let moved = self.take_step(hub)?;
            if self.step == step {
                return Ok(moved || step != before);
            }
        }
    }

    fn take_step(&mut self, hub: &Hub) -> Result<bool> {
        let step = self.step;
        match step {
            OpStep::Write if self.free(hub) => {
                // SAFETY: `dst` is this rank's shard of the gathered buffer: all ranks have released it and only this
                // one writes it. `src` is the shard, of the same length. They cannot overlap, being two borrows.
                unsafe { std::ptr::copy_nonoverlapping(self.src, self.dst, self.bytes()) };
                hub.publish(self.seq, Phase::Ready);
                self.step = OpStep::Collect;
            }
            OpStep::Collect if self.met(hub, Phase::Ready)? => {
                self.complete = true;
                if self.released
                    && let Some((buffer, content)) = &self.into
                {
                    buffer.release(*content);
                }
                self.retire(hub);
            }
            OpStep::Reduce if self.met(hub, Phase::Ready)? => {
                if self.kind == Seam::ReduceScatter {
                    // SAFETY: peers' inputs do not change until this rank is `Done`; `dst` is the lent shard.
                    unsafe { self.fold(hub).run(self.dst, self.sources, hub.size(), self.desc.len as usize) };
                    self.complete = true;
                    hub.publish(self.seq, Phase::Done);
                    self.step = OpStep::Drain;
                } else {
                    self.reduce_slice(hub);
                    hub.publish(self.seq, Phase::Reduced);
                    self.step = OpStep::Copy;
                }
            }
            OpStep::Copy if self.met(hub, Phase::Reduced)? => {
                for peer in (0..hub.size()).filter(|&r| r != hub.me) {
                    let (at, bytes) = self.slice(hub, peer);
                    // SAFETY: the peer has finished writing its slice, and has read this rank's copy of it (it reduced
                    // it), so nobody else touches either until this rank is `Done`.
                    unsafe { std::ptr::copy_nonoverlapping(self.sources.of(peer).add(at), self.dst.add(at), bytes) };
                }
                hub.publish(self.seq, Phase::Done);
                self.step = OpStep::Drain;
            }
            OpStep::Mail => {
                let moved = self.rounds(hub)?;
                let known = self.kind != Seam::AllToAll || self.rounds.is_some();
                if known && self.wrote == self.rounds_out(hub) && self.read == self.rounds_in(hub) {
                    self.complete = true;
                    hub.publish(self.seq, Phase::Done);
                    self.step = OpStep::Drain;
                }
                return Ok(moved);
            }
            OpStep::Drain if self.met(hub, Phase::Done)? => {
                // Only now is an all-reduced buffer the caller's again: peers were still copying from it.
                self.complete = true;
                self.retire(hub);
            }
            OpStep::Meet if self.met(hub, Phase::Ready)? => {
                self.complete = true;
                self.retire(hub);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// All-reduce: rank `r`'s slice as (byte offset, bytes). Slices are whole cache lines and equal except the last
    /// ones.
    fn slice(&self, hub: &Hub, r: usize) -> (usize, usize) {
        let per = self.bytes().div_ceil(hub.size()).next_multiple_of(64);
        let (start, end) = ((r * per).min(self.bytes()), ((r + 1) * per).min(self.bytes()));
        (start, end - start)
    }
    fn reduce_slice(&mut self, hub: &Hub) {
        let (at, bytes) = self.slice(hub, hub.me);
        if hub.size() > 1 {
            // SAFETY: peers read nothing of this slice before this rank has published `Reduced`, and leave their copies
            // of it alone until they have seen that; `dst` is the lent buffer.
            let len = bytes / self.dtype.size();
            unsafe { self.fold(hub).run(self.dst.add(at), self.sources.offset(at), hub.size(), len) };
        }
    }
}
