//! Work that one process of a host does for all ranks there, before they have a group: local rank 0 does it, and the
//! others wait for its result. Never crosses hosts.
//!
//! The way is a socket in the abstract namespace (man 7 unix), as for claims: the kernel frees its name with the
//! process, and tells whose process answers.
use super::env::RankEnv;
use crate::base::{Error, Result};
use rustix::net::sockopt::socket_peercred;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(20);
/// How long local rank 0 stays after a failure, for ranks that ask late.
const LATE: Duration = Duration::from_secs(5);

/// The result of `work`, which runs in local rank 0. If it fails, the others get [`Error::Reported`]. They wait as long
/// as it takes, but at most `limit` for its process to start. `what` tells calls of one run apart.
pub fn once_per_host<T: Serialize + DeserializeOwned>(
    env: &RankEnv,
    what: &str,
    limit: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match env.local_rank {
        _ if env.local_world < 2 => work(),
        0 => give(env, what, work),
        _ => receive(env, what, limit),
    }
}

fn address(env: &RankEnv, what: &str) -> std::io::Result<SocketAddr> {
    let uid = rustix::process::getuid().as_raw();
    let RankEnv { run_id, master_addr, master_port, world, host, .. } = env;
    let job = format!("{run_id} {master_addr} {master_port} {world} {host}");
    let name = format!("flatshard-{uid}-{:016x}-{what}", xxhash_rust::xxh3::xxh3_64(job.as_bytes()));
    SocketAddr::from_abstract_name(name.as_bytes())
}

fn give<T: Serialize>(env: &RankEnv, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let failed = |e: std::io::Error| Error::input(format!("local rank 0 cannot answer the host's other ranks: {e}"));
    let listener = address(env, what).and_then(|address| UnixListener::bind_addr(&address)).map_err(failed)?;
    let others = env.local_world - 1;
    let result = work();
    let text = serde_json::to_vec(&result.as_ref().ok()).map_err(|e| Error::op("handover", e.to_string()))?;
    if result.is_ok() {
        spawn(move || answer(&listener, others, &text, None));
    } else {
        answer(&listener, others, &text, Some(Instant::now() + LATE));
    }
    result
}

/// Answers so many ranks. Errors are theirs: each notices that it has no answer.
fn answer(listener: &UnixListener, others: usize, text: &[u8], until: Option<Instant>) {
    let _ = listener.set_nonblocking(until.is_some());
    let mut left = others;
    while left > 0 && until.is_none_or(|until| Instant::now() < until) {
        match listener.accept() {
            Ok((mut stream, _)) => {
                let _ = stream.set_nonblocking(false);
                left -= usize::from(is_own(&stream) && stream.write_all(text).is_ok());
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => sleep(POLL),
            Err(_) => return,
        }
    }
}

fn receive<T: DeserializeOwned>(env: &RankEnv, what: &str, limit: Duration) -> Result<T> {
    let since = Instant::now();
    let mut stream = loop {
        match address(env, what).and_then(|address| UnixStream::connect_addr(&address)) {
            Ok(stream) if is_own(&stream) => break stream,
            _ if since.elapsed() < limit => sleep(POLL),
            _ => {
                return Err(Error::input(format!(
                    "local rank 0 of {} has not started within {:.0} s; see its own message",
                    env.host,
                    limit.as_secs_f64()
                )));
            }
        }
    };
    let mut text = Vec::new();
    let read = stream.read_to_end(&mut text);
    match serde_json::from_slice::<Option<T>>(&text) {
        Ok(Some(value)) if read.is_ok() => Ok(value),
        Ok(None) => Err(Error::Reported),
        _ => Err(Error::input(format!("local rank 0 of {} has ended; see its own message", env.host))),
    }
}

/// Any user can take a name; only an answer of this user counts.
fn is_own(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|peer| peer.uid == rustix::process::getuid())
}

#[cfg(test)]
mod tests {
    use super::super::env::here;
    use super::*;

    #[test]
    fn one_rank_works_and_all_have_its_result_or_none() {
        for (port, fails) in [(17, false), (18, true)] {
            let work = |rank: usize| {
                once_per_host(&here(rank, 3, port), "test", Duration::from_secs(60), || match (rank, fails) {
                    (0, true) => Err(Error::input("no such model")),
                    _ => Ok(format!("by {rank}")),
                })
            };
            let ranks = std::thread::scope(|scope| {
                let ranks = [0, 1, 2].map(|rank| scope.spawn(move || work(rank)));
                ranks.map(|rank| rank.join().unwrap())
            });
            for (rank, result) in ranks.into_iter().enumerate() {
                match (result, fails) {
                    (Ok(by), false) => assert_eq!(by, "by 0"),
                    (Err(Error::Input(_)), true) => assert_eq!(rank, 0),
                    (Err(Error::Reported), true) => assert_ne!(rank, 0),
                    (other, _) => panic!("rank {rank}: {other:?}"),
                }
            }
        }
    }
}
