//! One rank's view of a group over several hosts, used by its worker thread: where ranks are, messages to the same
//! column of other hosts, meetings with the ranks of this host. Never reads or writes an operand.
//!
//! [Note: columns] The group's ranks are numbered host by host, n on each: rank `h * n + c` is in *column* c of host h.
//! Between hosts a rank communicates only within its column (except for `send_recv`), so every rank of a host carries
//! its share of the traffic, and each byte crosses once per host.
use super::link::Link;
use super::wire::{Channel, Fault, Move};
use crate::base::{Category, DType, Error, Result};
use crate::comm::operands::CheckedCall;
use crate::comm::seam::Seam;
use crate::comm::shm::{self, Desc};
use crate::comm::{Axis, Collective, CommUse, Tag, Waiting};
use crate::device::Buf;
use crate::device::cpu::sum::Sources;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bytes per rank of the stage, for operands that the host's other ranks cannot access in place.
const STAGE: usize = 1 << 20;
/// After a connection closed, how long to wait for a message that says which rank failed first.
const VERDICT: Duration = Duration::from_secs(1);

/// Where the ranks of a group are.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub axis: Axis,
    /// World ranks, in group order.
    pub ranks: Vec<usize>,
    /// This rank's index among them.
    pub me: usize,
    pub hosts: usize,
    /// Ranks per host.
    pub columns: usize,
}

impl Places {
    /// Fails with an input error unless ranks are numbered host by host, with the same number on each. `host` maps a
    /// world rank to its host.
    pub fn new(axis: Axis, ranks: Vec<usize>, me: usize, host: impl Fn(usize) -> usize) -> Result<Places> {
        let me_at = ranks.iter().position(|&r| r == me);
        let me_at = me_at.ok_or_else(|| Error::op("group", format!("rank {me} is not in {ranks:?}")))?;
        let runs: Vec<&[usize]> = ranks.chunk_by(|&a, &b| host(a) == host(b)).collect();
        let (hosts, columns) = (runs.len(), runs.first().map_or(0, |run| run.len()));
        let uneven = runs.iter().find(|run| run.len() != columns);
        let again = (1..hosts).find(|&i| runs[..i].iter().any(|run| host(run[0]) == host(runs[i][0])));
        if uneven.is_some() || again.is_some() {
            return Err(Error::input(format!(
                "the {} group of ranks {ranks:?} is spread unevenly over hosts ({runs:?}): choose mesh sizes that \
                 divide, or are multiples of, the ranks per host",
                axis.name()
            )));
        }
        Ok(Places { axis, me: me_at, hosts, columns, ranks })
    }
    pub fn size(&self) -> usize {
        self.ranks.len()
    }
    pub fn host(&self) -> usize {
        self.me / self.columns
    }
    pub fn column(&self) -> usize {
        self.me % self.columns
    }
    /// The column of a group rank, if it is on this host.
    pub fn here(&self, rank: usize) -> Option<usize> {
        (rank / self.columns == self.host()).then_some(rank % self.columns)
    }
    /// The group rank on another host in this rank's column.
    pub fn across(&self, host: usize) -> usize {
        host * self.columns + self.column()
    }
    /// Pairs of hosts to send to and receive from: each other host once, so that all links are busy all the time.
    pub fn rounds(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (here, n) = (self.host(), self.hosts);
        (1..n).map(move |k| ((here + k) % n, (here + n - k) % n))
    }
}

pub(super) struct Post {
    pub places: Places,
    /// This host's ranks of the group, in column order. Used only by the worker, or while it is idle.
    pub local: Arc<shm::ShmGroup>,
    /// None if this rank is alone on its host.
    stage: Option<Buf>,
    channel: Box<dyn Channel>,
    pub link: Arc<Link>,
    waiting: Arc<Waiting>,
    /// Bytes sent to other hosts.
    pub crossed: Arc<AtomicU64>,
    /// Operations so far, for messages.
    pub count: u64,
}

impl Post {
    pub fn new(link: Arc<Link>, places: Places, waiting: Arc<Waiting>) -> Result<Post> {
        let seats = (0..places.columns).map(|c| link.seat(places.ranks[places.host() * places.columns + c])).collect();
        let local = link.local.group_for(places.axis, seats, waiting.clone())?;
        let channel = link.wire.channel(places.axis as u16)?;
        let stage = match places.columns {
            1 => None,
            _ => Some(local.alloc(DType::U8, STAGE, CommUse::Reduced, Category::Other)?),
        };
        Ok(Post { places, local, stage, channel, link, waiting, crossed: Arc::default(), count: 0 })
    }
    pub fn call(&self, op: &'static str, tag: Tag) -> CheckedCall<'_> {
        call(&self.places, op, tag)
    }
    /// The stages of all ranks of the host, and the size of each.
    pub fn stages(&mut self) -> (Sources, usize) {
        let start = self.stage.as_mut().map_or(std::ptr::null_mut(), |stage| stage.view_mut().as_mut_ptr());
        let found = self.local.find(start, STAGE);
        (found.map_or(Sources::new(start, 0), |(found, ..)| found.sources), STAGE)
    }

    /// See [`Channel::exchange`]; peers are group ranks.
    pub fn exchange<const N: usize>(&mut self, kind: Seam, tag: Tag, mut moves: [Move; N]) -> Result<()> {
        for m in &mut moves {
            m.peer = self.places.ranks[m.peer];
            if let super::wire::Bytes::Send(bytes) = &m.bytes {
                self.crossed.fetch_add(bytes.len() as u64, Relaxed);
            }
        }
        let (link, waiting) = (&self.link, &self.waiting);
        let go_on = || link.local.failed().is_none() && !waiting.is_late(link.local.timeout());
        self.channel.exchange(&mut moves, &go_on).map_err(|fault| self.call(kind.name(), tag).error(self.why(fault)))
    }
    fn why(&self, fault: Fault) -> String {
        let link = &self.link;
        match fault {
            Fault::Lost(lost) => {
                let since = Instant::now();
                while link.local.failed().is_none() && since.elapsed() < VERDICT {
                    std::thread::sleep(Duration::from_millis(5));
                }
                link.local.failed().map_or_else(|| link.blame(&lost), |rank| link.describe(rank))
            }
            Fault::GaveUp { peer } => match link.local.failed() {
                Some(rank) => link.describe(rank),
                None => {
                    let timeout = link.local.timeout();
                    format!("no answer within {timeout:?} from {}", link.wire.roster().name(peer))
                }
            },
        }
    }

    /// Returns when all ranks of the group have reached this operation. Fails if they called different ones.
    pub fn agree(&mut self, kind: Seam, tag: Tag, desc: &Desc) -> Result<()> {
        for (to, from) in self.places.rounds() {
            let mut theirs = *desc;
            let (to, from) = (self.places.across(to), self.places.across(from));
            let moves =
                [Move::send(to, bytemuck::bytes_of(desc)), Move::recv(from, bytemuck::bytes_of_mut(&mut theirs))];
            self.exchange(kind, tag, moves)?;
            self.compare(kind, tag, desc, &theirs, from)?;
        }
        self.meet(kind, tag, desc)
    }
    /// Checks that a rank of another host called the same operation.
    pub fn compare(&self, kind: Seam, tag: Tag, mine: &Desc, theirs: &Desc, peer: usize) -> Result<()> {
        match Desc::agrees(mine, self.places.me, theirs, peer) {
            true => Ok(()),
            false => {
                let [me, peer] = [self.places.me, peer].map(|r| self.places.ranks[r]);
                let what =
                    format!("operation {} differs: rank {me} called {mine}, rank {peer} called {theirs}", self.count);
                Err(self.call(kind.name(), tag).error(what))
            }
        }
    }
    /// Returns when all ranks of this host have arrived.
    pub fn meet(&self, kind: Seam, tag: Tag, desc: &Desc) -> Result<()> {
        self.explain(self.local.meet(kind, tag, *desc))
    }
    /// Adds what is known about a failed rank to the error of a local step.
    pub fn explain<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|e| match (e, self.link.local.failed()) {
            (Error::Comm { rank, op, group, unit, .. }, Some(failed)) => {
                Error::Comm { rank, op, group, unit, what: self.link.describe(failed) }
            }
            (e, _) => e,
        })
    }
}

/// The call, for its error messages.
pub(super) fn call(places: &Places, op: &'static str, tag: Tag) -> CheckedCall<'static> {
    CheckedCall { rank: places.ranks[places.me], op, group: places.axis.name(), size: places.size(), tag }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_lie_host_by_host_equally_many_on_each() {
        let places = |ranks: &[usize]| Places::new(Axis::Fsdp, ranks.to_vec(), ranks[0], |rank| rank / 4);
        let at = places(&[4, 5, 8, 9, 0, 1]).unwrap();
        assert_eq!((at.hosts, at.columns, at.host(), at.column()), (3, 2, 0, 0));
        assert_eq!((at.here(1), at.here(2), at.across(2)), (Some(1), None, 4));
        assert_eq!(at.rounds().collect::<Vec<_>>(), [(1, 2), (2, 1)]);
        let refused = |ranks: &[usize]| {
            let error = places(ranks).unwrap_err();
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains("the fsdp group of ranks"), "{error}");
        };
        refused(&[0, 1, 2, 3, 4, 5]); // unevenly spread
        refused(&[0, 4, 1, 5]); // not host by host
    }
}
