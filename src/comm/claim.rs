//! One process per rank of a job: the first holds the rank as long as it lives, and a second one is refused with the
//! first one's process id. Never affects jobs with different job ids, ports or world sizes.
//!
//! Two jobs started with the same variables are indistinguishable, so their ranks could mix. A claim is a listening
//! socket in the abstract namespace (man 7 unix): the kernel gives a name to one process, frees it however that process
//! ends, and reports its pid to whoever connects.
use super::env::RankEnv;
use crate::base::{Error, Result};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long a rank that is exiting may keep its claim.
const GRACE: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(20);

/// Held as long as the process is its rank.
pub struct Claim {
    _name: Option<OwnedFd>,
}

impl Claim {
    /// Fails with an input error if another process of this user holds the rank.
    pub fn of(env: &RankEnv) -> Result<Claim> {
        let since = Instant::now();
        loop {
            match taken(env) {
                Ok(name) => return Ok(Claim { _name: Some(name) }),
                Err(Errno::ADDRINUSE) if since.elapsed() < GRACE => std::thread::sleep(AGAIN),
                Err(Errno::ADDRINUSE) => {
                    let RankEnv { rank, world, master_port, host, .. } = env;
                    return match holder(env) {
                        // Any user can take a name; a stranger holding it proves nothing.
                        Some((_, false)) => Ok(Claim { _name: None }),
                        holder => Err(Error::input(format!(
                            "{} on {host} is already rank {rank} of {world} with MASTER_PORT={master_port}: this job was started \
                             twice, or another job uses the same port; give each job its own MASTER_PORT",
                            holder.map_or("another process".into(), |(pid, _)| format!("process {pid}"))
                        ))),
                    };
                }
                // Without abstract sockets there is no protection.
                Err(_) => return Ok(Claim { _name: None }),
            }
        }
    }
}

fn name(env: &RankEnv) -> rustix::io::Result<SocketAddrUnix> {
    let uid = rustix::process::getuid().as_raw();
    let RankEnv { run_id, master_addr, master_port, world, host, rank, .. } = env;
    let job = format!("{run_id} {master_addr} {master_port} {world} {host}");
    SocketAddrUnix::new_abstract_name(
        format!("flatshard-{uid}-{:016x}-{rank}", xxhash_rust::xxh3::xxh3_64(job.as_bytes())).as_bytes(),
    )
}
fn socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}
fn taken(env: &RankEnv) -> rustix::io::Result<OwnedFd> {
    let socket = socket()?;
    bind(&socket, &name(env)?)?;
    listen(&socket, 1)?;
    Ok(socket)
}
/// The process that holds the name, and whether it belongs to this user.
fn holder(env: &RankEnv) -> Option<(i32, bool)> {
    let socket = socket().ok()?;
    connect(&socket, &name(env).ok()?).ok()?;
    let peer = socket_peercred(&socket).ok()?;
    Some((peer.pid.as_raw_nonzero().get(), peer.uid == rustix::process::getuid()))
}

#[cfg(test)]
mod tests {
    use super::super::env::here;
    use super::*;

    #[test]
    fn a_rank_is_one_process_while_it_lives() {
        let port = std::process::id() as u16;
        let first = Claim::of(&here(1, 3, port)).unwrap();
        // Other ranks and other jobs.
        let others = [here(0, 3, port), here(1, 4, port), RankEnv { run_id: "another".into(), ..here(1, 3, port) }];
        let others = others.map(|env| Claim::of(&env).unwrap());
        let e = Claim::of(&here(1, 3, port)).err().unwrap();
        let says = format!("process {} on here is already rank 1 of 3 with MASTER_PORT={port}", std::process::id());
        assert!(e.exit_status() == 2 && e.to_string().contains(&says), "{e}");
        drop((first, others));
        Claim::of(&here(1, 3, port)).unwrap();
    }
}
