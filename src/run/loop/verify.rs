//! `--verify-every`: checks that replicas are bitwise equal, which detects a processor or memory that fails silently.
//! Compares master weights, their copies in the compute dtype and optimizer states: with DDP over all ranks, with
//! HYBRID_SHARD over dp_replicate, and over tp the tensors that tp does not shard. Never repairs anything.
//!
//! Ranks exchange one hash per unit, or two with tp. State that only one rank holds (FULL_SHARD, ZeRO's shards) cannot
//! be compared, and a fault in a gradient before the reduction reaches all ranks alike.
use crate::base::{Error, Result};
use crate::comm::exchange::{Exchange, texts};
use crate::comm::mesh::{Mesh, MeshSizes};
use crate::comm::{Axis, Collective};
use crate::device::{Device, View};
use crate::nn::Segment;
use crate::optim::Optimizer;
use crate::run::r#loop::same::named;
use crate::store::Store;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Bytes downloaded and hashed at a time.
const CHUNK: usize = 1 << 20;

pub struct Verify {
    every: u64,
    dev: Arc<dyn Device>,
    world: Arc<dyn Collective>,
    exchange: Exchange,
    /// Groups of ranks with the same shards, and groups with the same tensors that tp does not shard.
    replicas: Vec<Vec<usize>>,
    uncut: Vec<Vec<usize>>,
    /// The first tensor of each unit.
    units: Vec<String>,
    /// The last step that passed.
    good: Option<u64>,
    chunk: Vec<u8>,
}

impl Verify {
    /// Collective.
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, store: &mut dyn Store, every: u64) -> Result<Verify> {
        let mut units = vec![String::new(); store.units()];
        store.for_each_shard(&mut |shard| {
            let first = shard.layout.segments.first().map_or("", |segment| &segment.name);
            if units[shard.unit].is_empty() {
                units[shard.unit] = first.into();
            }
            Ok(())
        })?;
        let (replicas, uncut) = copies(&mesh.sizes, store.replicated());
        let exchange = Exchange::new(&*dev, mesh.group(Axis::World).clone(), "verify", 2 * units.len())?;
        Ok(Verify {
            every,
            dev,
            world: mesh.group(Axis::World).clone(),
            exchange,
            replicas,
            uncut,
            units,
            good: None,
            chunk: Vec::new(),
        })
    }

    /// Checks after `step`, if it is due. Returns an error on all ranks if replicas differ.
    pub fn after(&mut self, step: u64, store: &mut dyn Store, optimizer: &mut Optimizer) -> Result<()> {
        let copies = self.replicas.iter().chain(&self.uncut).any(|ranks| ranks.len() > 1);
        if !copies || !step.is_multiple_of(self.every) {
            return Ok(());
        }
        let words = self.hashes(store, optimizer)?;
        let all = self.exchange.gather(&*self.dev, &words)?;
        let of_rank: Vec<&[u64]> = all.chunks_exact(words.len()).collect();
        let units = self.units.len();
        let found = (0..units).find_map(|unit| {
            // Larger groups first: with more than two copies, the majority is right.
            let replicas = self.replicas.iter().map(|ranks| (ranks, unit));
            let uncut = self.uncut.iter().map(|ranks| (ranks, units + unit));
            let differ = |(ranks, word): (&Vec<usize>, usize)| odd(ranks, |rank| of_rank[rank][word]);
            uncut.chain(replicas).find_map(differ).map(|odd| (unit, odd))
        });
        let Some((unit, odd)) = found else {
            self.good = Some(step);
            return Ok(());
        };
        let host = rustix::system::uname();
        let hosts = texts(&*self.dev, &self.world, "verify", &host.nodename().to_string_lossy())?;
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        let (unit, others) = (format!("unit {unit} (from {} on)", self.units[unit]), named(&odd.others, &hosts));
        let what = match odd.is_minority {
            true => format!("{} differs from {others} in {unit}", named(&odd.ranks, &hosts)),
            false => format!(
                "{} differs from {others} in {unit}, and there is no majority to tell which is right",
                named(&odd.ranks, &hosts)
            ),
        };
        let good = self.good.map_or("saved before this run".into(), |step| format!("of step {step} or earlier"));
        Err(Error::Run(format!(
            "verify: {what}: replicas must be bitwise equal. Memory or a processor failed silently: remove that host, \
            and resume \
             from a checkpoint {good}"
        )))
    }

    /// A hash of each whole unit, then a hash of each unit's tensors that tp does not shard.
    fn hashes(&mut self, store: &mut dyn Store, optimizer: &mut Optimizer) -> Result<Vec<u64>> {
        self.dev.synchronize()?; // offloaded state is read in host memory
        let (dev, chunk, units) = (&*self.dev, &mut self.chunk, self.units.len());
        let mut words = vec![0u64; 2 * units];
        store.for_each_shard(&mut |shard| {
            let (mut whole, mut uncut) = (Xxh3::new(), Xxh3::new());
            let own = shard.layout.segments.iter().filter(|s| !s.tp.is_cut());
            let own: Vec<Range<usize>> = own.filter_map(|s: &Segment| shard.owned(s.range())).collect();
            let mut hash = |view: View| -> Result<()> {
                update(dev, view, chunk, &mut whole)?;
                own.iter().try_for_each(|range| update(dev, view.slice(range.clone()), chunk, &mut uncut))
            };
            hash(shard.master.as_view())?;
            shard.param.as_ref().map_or(Ok(()), |param| hash(param.as_view()))?;
            if shard.grad.is_some() {
                let mut states = optimizer.states(shard.part());
                states.try_for_each(|state| update(dev, state.as_view(), chunk, &mut whole))?;
                drop(states);
                for range in own {
                    let mut states = optimizer.state(shard.part(), range);
                    states.try_for_each(|(_, state)| {
                        state.views().try_for_each(|view| update(dev, view, chunk, &mut uncut))
                    })?;
                }
            }
            for (word, hash) in [(shard.unit, whole), (units + shard.unit, uncut)] {
                // A partly frozen unit has two shards.
                words[word] = words[word].rotate_left(1) ^ hash.digest();
            }
            Ok(())
        })?;
        Ok(words)
    }
}

impl fmt::Display for Verify {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let copies = |groups: &[Vec<usize>]| groups.iter().map(Vec::len).max().unwrap_or(1);
        write!(f, "verify   ")?;
        match (copies(&self.replicas), copies(&self.uncut)) {
            (1, 1) => write!(f, "nothing: no parameter is replicated"),
            (1, n) => write!(f, "every {} steps, {n} copies of tensors that tp does not shard", self.every),
            (n, _) => write!(f, "every {} steps, {n} replicas", self.every),
        }
    }
}

fn update(dev: &dyn Device, view: View, chunk: &mut Vec<u8>, hash: &mut Xxh3) -> Result<()> {
    if let Ok(bytes) = view.host_bytes("verify") {
        hash.update(bytes);
        return Ok(());
    }
    let step = CHUNK / view.dtype().size();
    for at in (0..view.len()).step_by(step) {
        let part = view.slice(at..view.len().min(at + step));
        chunk.resize(part.bytes(), 0);
        dev.download(part, chunk)?;
        hash.update(chunk);
    }
    Ok(())
}

/// Groups of ranks with the same shards and, with tp, groups with the same tensors that tp does not shard.
fn copies(sizes: &MeshSizes, replicated: bool) -> (Vec<Vec<usize>>, Vec<Vec<usize>>) {
    let along = |rank: usize, tp: bool| -> Vec<usize> {
        let at = sizes.coords(rank);
        let same = |&other: &usize| {
            let other = sizes.coords(other);
            (replicated || (other.dp_shard, other.sp) == (at.dp_shard, at.sp)) && (tp || other.tp == at.tp)
        };
        (0..sizes.world()).filter(same).collect()
    };
    let groups = |tp: bool| {
        let mut groups: Vec<Vec<usize>> = (0..sizes.world()).map(|rank| along(rank, tp)).collect();
        groups.sort();
        groups.dedup();
        groups
    };
    (groups(false), if sizes.tp > 1 { groups(true) } else { Vec::new() })
}

/// Ranks that differ from the largest group.
#[derive(Debug, PartialEq)]
struct Odd {
    ranks: Vec<usize>,
    others: Vec<usize>,
    /// More than half of all ranks agree: the others are wrong.
    is_minority: bool,
}

/// None if all of `ranks` agree.
fn odd(ranks: &[usize], of: impl Fn(usize) -> u64) -> Option<Odd> {
    let like = |rank: usize| ranks.iter().filter(|&&other| of(other) == of(rank)).count();
    let first = ranks.iter().copied().rev().max_by_key(|&rank| like(rank))?; // the lowest rank on a tie
    let (others, odd): (Vec<usize>, Vec<usize>) = ranks.iter().partition(|&&rank| of(rank) == of(first));
    let is_minority = 2 * others.len() > ranks.len();
    (!odd.is_empty()).then_some(Odd { ranks: odd, others, is_minority })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_majority_is_right_and_a_tie_is_undecided() {
        let found = |values: &[u64]| odd(&(0..values.len()).collect::<Vec<_>>(), |rank| values[rank]);
        assert_eq!(found(&[7, 7, 7]), None);
        assert_eq!(found(&[7]), None);
        assert_eq!(found(&[7, 8, 7]), Some(Odd { ranks: vec![1], others: vec![0, 2], is_minority: true }));
        assert_eq!(found(&[7, 8]), Some(Odd { ranks: vec![1], others: vec![0], is_minority: false }));
        assert_eq!(found(&[7, 8, 8, 7]), Some(Odd { ranks: vec![1, 2], others: vec![0, 3], is_minority: false }));
        assert_eq!(found(&[9, 8, 8, 7, 8]), Some(Odd { ranks: vec![0, 3], others: vec![1, 2, 4], is_minority: true }));
    }

    #[test]
    fn copies_are_along_the_axes_that_do_not_shard() {
        let sizes = |dp_replicate, dp_shard, sp, tp| MeshSizes { dp_replicate, dp_shard, sp, tp, ep: 1 };
        assert_eq!(copies(&sizes(3, 1, 1, 1), true), (vec![vec![0, 1, 2]], vec![]));
        assert_eq!(copies(&sizes(1, 3, 1, 1), false), (vec![vec![0], vec![1], vec![2]], vec![]));
        assert_eq!(copies(&sizes(2, 2, 1, 1), false), (vec![vec![0, 2], vec![1, 3]], vec![]));
        assert_eq!(copies(&sizes(2, 1, 1, 2), true), (vec![vec![0, 2], vec![1, 3]], vec![vec![0, 1, 2, 3]]));
        assert_eq!(copies(&sizes(1, 1, 2, 2), false).1, vec![vec![0, 1], vec![2, 3]]);
        assert_eq!(copies(&sizes(1, 1, 2, 1), true).0, vec![vec![0, 1]]);
    }
}
