//! Which rank is on which host. Never communicates: wires exchange [`RankPlace`]s and build the roster from them.
use crate::base::{Error, Result, printable};
use crate::comm::env::{RankEnv, UNKNOWN};

/// Bytes of a [`RankPlace`] on the wire.
pub const PLACE: usize = 72;
const NAME: usize = 64;

/// A rank's own record; local numbers may be [`UNKNOWN`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankPlace {
    /// The host's name, sanitized for messages.
    pub host: String,
    pub local_rank: usize,
    pub local_world: usize,
}

impl RankPlace {
    pub fn of(env: &RankEnv) -> RankPlace {
        RankPlace { host: env.host.clone(), local_rank: env.local_rank, local_world: env.local_world }
    }
    /// Truncates a longer name.
    pub fn to_bytes(&self) -> [u8; PLACE] {
        let mut bytes = [0; PLACE];
        let name = &self.host.as_bytes()[..self.host.len().min(NAME)];
        bytes[..name.len()].copy_from_slice(name);
        bytes[NAME..NAME + 4].copy_from_slice(&(self.local_rank as u32).to_le_bytes());
        bytes[NAME + 4..].copy_from_slice(&(self.local_world as u32).to_le_bytes());
        bytes
    }
    pub fn from_bytes(bytes: &[u8; PLACE]) -> RankPlace {
        let name = bytes[..NAME].split(|&b| b == 0).next().unwrap_or_default();
        let number = |at: usize| match u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) {
            u32::MAX => UNKNOWN,
            n => n as usize,
        };
        let host = printable(&String::from_utf8_lossy(name), NAME);
        RankPlace { host, local_rank: number(NAME), local_world: number(NAME + 4) }
    }
}

/// The places of all ranks, in rank order: host by host, the same number on each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Roster {
    hosts: Vec<String>,
    per_host: usize,
}

impl Roster {
    /// Fails with an input error unless ranks are numbered host by host.
    pub fn new(places: &[RankPlace]) -> Result<Roster> {
        let unknown = |unknown: bool| places.iter().position(|place| (place.local_world == UNKNOWN) == unknown);
        if let (Some(without), Some(with)) = (unknown(true), unknown(false)) {
            return Err(Error::input(format!(
                "LOCAL_WORLD_SIZE is set for rank {with} but not for rank {without}: set it for all ranks or for none"
            )));
        }
        let per_host = places.first().map_or(1, |place| place.local_world).max(1);
        for (rank, place) in places.iter().enumerate() {
            if place.local_world != per_host {
                return Err(Error::input(format!(
                    "rank 0's host ({}) runs {per_host} ranks, rank {rank}'s ({}) {}: start the same number on each host",
                    places[0].host, place.host, place.local_world
                )));
            }
            let first = &places[rank - rank % per_host];
            if place.local_rank != rank % per_host || place.host != first.host {
                return Err(Error::input(format!(
                    "rank {rank} is local rank {} on {}: ranks must be numbered host by host, {per_host} on each (mpirun \
                     --map-by slot, srun --distribution block)",
                    place.local_rank, place.host
                )));
            }
        }
        if !places.len().is_multiple_of(per_host) {
            return Err(Error::input(format!(
                "{} ranks, {per_host} on each host: some hosts have too few ranks",
                places.len()
            )));
        }
        Ok(Roster { hosts: places.iter().step_by(per_host).map(|place| place.host.clone()).collect(), per_host })
    }
    pub fn ranks(&self) -> usize {
        self.hosts.len() * self.per_host
    }
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }
    pub fn per_host(&self) -> usize {
        self.per_host
    }
    /// Index of a rank's host.
    pub fn host(&self, rank: usize) -> usize {
        rank / self.per_host
    }
    /// "rank 2 on node7".
    pub fn name(&self, rank: usize) -> String {
        format!("rank {rank} on {}", self.hosts.get(self.host(rank)).map_or("an unknown host", String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(of: &[(&str, usize, usize)]) -> Vec<RankPlace> {
        of.iter()
            .map(|&(host, local_rank, local_world)| RankPlace { host: host.into(), local_rank, local_world })
            .collect()
    }

    #[test]
    fn ranks_lie_host_by_host() {
        let roster = Roster::new(&places(&[("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)])).unwrap();
        assert_eq!((roster.ranks(), roster.hosts(), roster.per_host(), roster.host(2)), (4, 2, 2, 1));
        assert_eq!(roster.name(3), "rank 3 on b");
        let refused = |of: &[(&str, usize, usize)], says: &str| {
            let error = Roster::new(&places(of)).unwrap_err();
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains(says), "{error}");
        };
        refused(&[("a", 0, 2), ("b", 0, 2), ("a", 1, 2), ("b", 1, 2)], "rank 1 is local rank 0 on b");
        refused(&[("a", 0, 2), ("a", 1, 2), ("b", 0, 1)], "rank 2's (b) 1");
        refused(&[("a", 0, 2), ("a", 1, 2), ("b", 0, 2)], "some hosts have too few ranks");
    }

    #[test]
    fn a_place_survives_the_wire() {
        let place = RankPlace { host: "node-7.cluster".into(), local_rank: 3, local_world: 8 };
        assert_eq!(RankPlace::from_bytes(&place.to_bytes()), place);
        let long = RankPlace { host: "x".repeat(100), ..place };
        assert_eq!(RankPlace::from_bytes(&long.to_bytes()).host.len(), NAME);
    }
}
