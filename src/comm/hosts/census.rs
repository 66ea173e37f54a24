//! Counts the ranks of each host when the launcher does not: every rank sends rank 0 its host name and learns who
//! shares it. Never used if LOCAL_WORLD_SIZE, or another launcher's equivalent, is set.
use super::roster::{RankPlace, Roster};
use super::tcp;
use crate::base::{Error, Result};
use crate::comm::env::{RankEnv, UNKNOWN};
use std::time::Duration;

/// Returns `env` with its position on its host, after all ranks have joined.
pub fn place(env: &RankEnv, timeout: Duration) -> Result<RankEnv> {
    if env.local_world != UNKNOWN {
        return Ok(env.clone());
    }
    let found = tcp::places(env, timeout)?;
    if found.iter().any(|place| place.local_world != UNKNOWN) {
        Roster::new(&found)?; // names the rank where it is set
    }
    let places = placed(&found)?;
    Roster::new(&places)?;
    let RankPlace { local_rank, local_world, .. } = places[env.rank];
    Ok(RankEnv { local_rank, local_world, ..env.clone() })
}

/// Derives positions from host names. They must agree with what ranks know already.
fn placed(found: &[RankPlace]) -> Result<Vec<RankPlace>> {
    let on = |host: &str, ranks: &[RankPlace]| ranks.iter().filter(|place| place.host == host).count();
    let place = |(rank, place): (usize, &RankPlace)| {
        let RankPlace { host, local_rank: given, .. } = place;
        let (local_rank, local_world) = (on(host, &found[..rank]), on(host, found));
        match *given != UNKNOWN && *given != local_rank {
            true => Err(Error::input(format!(
                "rank {rank} on {host} has LOCAL_RANK={given}, but {local_rank} of the {local_world} ranks on a host of this name \
                 precede it: set LOCAL_WORLD_SIZE (ranks on this host) for each rank"
            ))),
            false => Ok(RankPlace { host: host.clone(), local_rank, local_world }),
        }
    };
    found.iter().enumerate().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(of: &[(&str, usize)]) -> Result<Vec<(usize, usize)>> {
        let place =
            |&(host, local_rank): &(&str, usize)| RankPlace { host: host.into(), local_rank, local_world: UNKNOWN };
        let found: Vec<RankPlace> = of.iter().map(place).collect();
        Ok(placed(&found)?.iter().map(|place| (place.local_rank, place.local_world)).collect())
    }

    #[test]
    fn names_of_hosts_say_which_ranks_are_together() {
        let all = [(0, 2), (1, 2), (0, 1)];
        assert_eq!(ranks(&[("a", UNKNOWN), ("a", UNKNOWN), ("b", UNKNOWN)]).unwrap(), all);
        assert_eq!(ranks(&[("a", 0), ("a", UNKNOWN), ("b", 0)]).unwrap(), all);
        // Containers with the same host name.
        let e = ranks(&[("a", 0), ("a", 0)]).unwrap_err();
        let says = "rank 1 on a has LOCAL_RANK=0, but 1 of the 2 ranks on a host of this name precede it";
        assert!(e.exit_status() == 2 && e.to_string().contains(says), "{e}");
    }
}
