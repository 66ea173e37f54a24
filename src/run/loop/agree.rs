//! The vote of all ranks before a step, in one small all_reduce that starts one step ahead. Never trains.
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommUse, Mesh, Reduce, Tag};
use crate::device::{Buf, Device, View};
use crate::run::watch::HeldBytes;
use std::sync::Arc;

/// One rank's vote, or the result over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Vote {
    /// Loss tokens of this step's micro-batches, summed over data-parallel ranks.
    pub tokens: u64,
    /// A stop signal: that of the lowest rank that received one.
    pub stop: Option<i32>,
    /// The maximum over ranks, of each value.
    pub bytes: HeldBytes,
    /// All ranks have written their part of the async checkpoint.
    pub saved: bool,
    /// Hash of the collectives started so far ([`crate::comm::flight`]), which must be the same on all ranks.
    pub schedule: u64,
}

/// Words of each rank in the sum.
const RANK_WORDS: usize = 4;

/// Layout, in f64: tokens, number of ranks that have saved, then for each rank its signal (0: none), its schedule and
/// its bytes. Every rank fills its own words and leaves zeros in the others', so one sum gathers them. The sum is
/// exact: all numbers are far below 2^53.
pub struct Agreement {
    group: Arc<dyn Collective>,
    /// Ranks of sp and tp hold the same micro-batch: the first of them counts its tokens.
    counts: bool,
    buf: Buf,
    host: Vec<f64>,
    mine: Vote,
    /// The result for the next step, if it was requested ahead.
    ahead: Option<Vote>,
}

impl Agreement {
    pub fn new(mesh: &Mesh) -> Result<Agreement> {
        let group = mesh.group(Axis::World).clone();
        let len = 2 + RANK_WORDS * group.size();
        let buf = group.alloc(DType::F64, len, CommUse::Reduced, Category::Other)?;
        let counts = mesh.coords.sp == 0 && mesh.coords.tp == 0;
        Ok(Agreement { group, counts, buf, host: vec![0.0; len], mine: Vote::default(), ahead: None })
    }

    /// The result for the current step. It was requested during the previous step; the first step requests it now, with
    /// `mine`. Collective.
    pub fn next(&mut self, device: &dyn Device, mine: impl FnOnce() -> Vote) -> Result<Vote> {
        if let Some(vote) = self.ahead.take() {
            return Ok(vote);
        }
        self.start(device, mine())?;
        let (from, to) = self.answer();
        device.download(from, to)?;
        self.settled()
    }

    /// Starts the vote on the step after the one that the device works on. Collective. The caller downloads
    /// [`Agreement::answer`] with its next synchronization, and then calls [`Agreement::settle`].
    pub fn start(&mut self, device: &dyn Device, mine: Vote) -> Result<()> {
        self.mine = mine;
        self.host.fill(0.0);
        self.host[0] = if self.counts { mine.tokens as f64 } else { 0.0 };
        self.host[1] = f64::from(mine.saved);
        let at = 2 + RANK_WORDS * self.group.rank();
        self.host[at] = mine.stop.unwrap_or(0) as f64;
        self.host[at + 1] = (mine.schedule >> 11) as f64; // the 53 bits that are exact
        self.host[at + 2] = mine.bytes.now as f64;
        self.host[at + 3] = mine.bytes.peak as f64;
        device.upload(bytemuck::cast_slice(&self.host), self.buf.view_mut())?;
        let ticket = self.group.all_reduce(Tag::new("agreement", 0), self.buf.view_mut(), Reduce::Sum)?;
        self.group.wait(ticket)
    }
    /// Source and destination of the download.
    pub fn answer(&mut self) -> (View<'_>, &mut [u8]) {
        (self.buf.view(), bytemuck::cast_slice_mut(&mut self.host))
    }
    /// The answer is downloaded: [`Agreement::next`] returns it.
    pub fn settle(&mut self) -> Result<()> {
        self.ahead = Some(self.settled()?);
        Ok(())
    }
    /// The save that the vote reports has already been published.
    pub fn forget_save(&mut self) {
        self.ahead.iter_mut().for_each(|vote| vote.saved = false);
    }

    fn settled(&self) -> Result<Vote> {
        let ranks = self.host[2..].chunks_exact(RANK_WORDS);
        if let Some(other) = ranks.clone().position(|rank| rank[1] != self.host[3]) {
            return Err(Error::Run(format!(
                "rank {other} started different collectives than rank 0: the ranks run different programs, or made \
                 different decisions in the previous step"
            )));
        }
        let largest = |word: usize| ranks.clone().map(|rank| rank[word] as u64).max().unwrap_or(0);
        Ok(Vote {
            tokens: self.host[0] as u64,
            saved: self.host[1] as usize == self.group.size(),
            stop: ranks.clone().map(|r| r[0] as i32).find(|&signal| signal != 0),
            schedule: self.mine.schedule,
            bytes: HeldBytes { now: largest(2), peak: largest(3) },
        })
    }
}
