//! How the ranks of a job learn the id of their NCCL world: rank 0 makes it and gives it to every other rank over TCP.
//! Never touches a GPU.
//!
//! [Note: which port] torchrun's agent holds MASTER_PORT itself, so that number cannot be listened on. Rank 0 takes the
//! first free one of the [`PORTS`] numbers above it, and the others knock at each of them in turn until one answers with
//! the job's own word: a stranger's server, or another job's rank 0, does not know it. Our own launcher gives no port
//! (0); then the numbers follow from the launcher's process. One mechanism serves one host and many, whoever launched.
use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Bytes of an `ncclUniqueId`.
pub const ID: usize = 128;
/// Numbers that rank 0 may listen on.
pub const PORTS: u16 = 16;
const MAGIC: &[u8; 8] = b"flatshrd";
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// An answer from the right rank 0 comes at once; a stranger may never answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Rank 0's id on every rank. `make` is called on rank 0 only. Returns when this rank has it and, on rank 0, when all have.
pub fn exchange(env: &RankEnv, timeout: Duration, make: impl FnOnce() -> Result<[u8; ID]>) -> Result<[u8; ID]> {
    let deadline = Instant::now() + timeout;
    match env.rank {
        0 => {
            let id = make()?;
            give(env, deadline, &id)?;
            Ok(id)
        }
        _ => ask(env, deadline),
    }
}

/// The first number that rank 0 tries.
fn first_port(env: &RankEnv) -> u16 {
    match (env.master_port, env.parent_pid) {
        (0, Some(pid)) => 20_000 + (pid % 2_500) as u16 * PORTS,
        (0, None) => 29_501,
        (port, _) => port.saturating_add(1).min(u16::MAX - PORTS),
    }
}

/// A word that only ranks of this job know, so that jobs whose ports are neighbours do not mix.
fn job(env: &RankEnv) -> u64 {
    let text = format!("{} {} {} {} {:?}", env.run_id, env.master_addr, env.master_port, env.world, env.parent_pid);
    xxhash_rust::xxh3::xxh3_64(text.as_bytes())
}

fn listen(env: &RankEnv) -> Result<TcpListener> {
    let local = matches!(env.master_addr.as_str(), "localhost" | "127.0.0.1" | "::1");
    let first = first_port(env);
    for port in first..first + PORTS {
        let at = |ip| SocketAddr::new(ip, port);
        let bound = match local {
            true => TcpListener::bind(at(IpAddr::V4(Ipv4Addr::LOCALHOST))),
            // Serves IPv4 too, unless the host says otherwise.
            false => TcpListener::bind(at(IpAddr::V6(Ipv6Addr::UNSPECIFIED)))
                .or_else(|_| TcpListener::bind(at(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))),
        };
        if let Ok(listener) = bound {
            return Ok(listener);
        }
    }
    Err(Error::Run(format!(
        "rank 0: no free port among {first} to {} for the NCCL rendezvous; set another MASTER_PORT",
        first + PORTS - 1
    )))
}

/// Rank 0: answers every rank once, in the order in which they come.
fn give(env: &RankEnv, deadline: Instant, id: &[u8; ID]) -> Result<()> {
    if env.world == 1 {
        return Ok(());
    }
    let failed = |e: std::io::Error| Error::Run(format!("rank 0: NCCL rendezvous: {e}"));
    let listener = listen(env)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let mut here = vec![false; env.world];
    here[0] = true;
    while here.contains(&false) {
        match listener.accept() {
            // A stranger, or a rank that gave up and comes again: not this rank's failure.
            Ok((stream, _)) => {
                if let Ok(rank) = answer(stream, env, id) {
                    here[rank] = true;
                }
            }
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                ) =>
            {
                if Instant::now() > deadline {
                    let missing: Vec<String> = (0..env.world).filter(|&r| !here[r]).map(|r| r.to_string()).collect();
                    return Err(Error::Run(format!(
                        "rank 0: rank{} {} of {} did not come to the NCCL rendezvous at {} (port {}): were all ranks \
                         started, with the same MASTER_ADDR and MASTER_PORT?",
                        if missing.len() == 1 { "" } else { "s" },
                        missing.join(", "),
                        env.world,
                        env.master_addr,
                        listener.local_addr().map_or(0, |a| a.port()),
                    )));
                }
                std::thread::sleep(LOOK_AGAIN);
            }
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(())
}

/// What both sides say first: magic, job, rank.
fn greeting(env: &RankEnv) -> [u8; 20] {
    let mut words = [0; 20];
    words[..8].copy_from_slice(MAGIC);
    words[8..16].copy_from_slice(&job(env).to_le_bytes());
    words[16..].copy_from_slice(&(env.rank as u32).to_le_bytes());
    words
}

fn answer(mut stream: TcpStream, env: &RankEnv, id: &[u8; ID]) -> std::io::Result<usize> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    let (mut theirs, mine) = ([0; 20], greeting(env));
    stream.read_exact(&mut theirs)?;
    let rank = u32::from_le_bytes([theirs[16], theirs[17], theirs[18], theirs[19]]) as usize;
    if theirs[..16] != mine[..16] || rank == 0 || rank >= env.world {
        return Err(ErrorKind::InvalidData.into());
    }
    stream.write_all(&mine)?;
    stream.write_all(id)?;
    let mut thanks = [0];
    stream.read_exact(&mut thanks)?;
    Ok(rank)
}

fn ask(env: &RankEnv, deadline: Instant) -> Result<[u8; ID]> {
    let first = first_port(env);
    let mut last = String::from("no answer");
    loop {
        for port in first..first + PORTS {
            match knock(env, port) {
                Ok(id) => return Ok(id),
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => {}
                Err(e) => last = e.to_string(),
            }
        }
        if Instant::now() > deadline {
            return Err(Error::Run(format!(
                "rank {}: rank 0 of {} did not answer at {}, ports {first} to {} ({last}): the NCCL rendezvous needs the \
                 same MASTER_ADDR and MASTER_PORT on all ranks, and a way through the firewall",
                env.rank,
                env.world,
                env.master_addr,
                first + PORTS - 1
            )));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn knock(env: &RankEnv, port: u16) -> std::io::Result<[u8; ID]> {
    let mut last = ErrorKind::NotFound.into();
    for at in (env.master_addr.as_str(), port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&at, ANSWER).and_then(|stream| receive(stream, env)) {
            Ok(id) => return Ok(id),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn receive(mut stream: TcpStream, env: &RankEnv) -> std::io::Result<[u8; ID]> {
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    let (mut theirs, mine) = ([0; 20], greeting(env));
    stream.write_all(&mine)?;
    stream.read_exact(&mut theirs)?;
    // Rank 0 of this job: the same words, and rank 0.
    if theirs[..16] != mine[..16] || theirs[16..] != [0; 4] {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut id = [0; ID];
    stream.read_exact(&mut id)?;
    stream.write_all(&[1])?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(rank: usize, world: usize, port: u16) -> RankEnv {
        RankEnv {
            rank,
            world,
            local_rank: rank,
            local_world: world,
            host: "here".into(),
            master_addr: "127.0.0.1".into(),
            master_port: port,
            run_id: format!("test {}", std::process::id()),
            arena_fd: None,
            parent_pid: None,
            restart: None,
        }
    }
    fn id() -> [u8; ID] {
        std::array::from_fn(|i| i as u8)
    }
    /// A port whose successors are likely free: the system just gave it out.
    fn port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().min(u16::MAX - 100)
    }

    #[test]
    fn all_ranks_learn_the_id_though_the_agent_holds_the_port_and_a_stranger_the_next() {
        let agent = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = agent.local_addr().unwrap().port();
        let stranger = TcpListener::bind(("127.0.0.1", port + 1)); // never accepts: knocks there time out
        let timeout = Duration::from_secs(30);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..4)
                .rev() // rank 0 comes last
                .map(|rank| {
                    let made = move || if rank == 0 { Ok(id()) } else { panic!("only rank 0 makes the id") };
                    scope.spawn(move || exchange(&env(rank, 4, port), timeout, made).unwrap())
                })
                .collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), id());
            }
        });
        drop((agent, stranger));
    }

    #[test]
    fn who_is_missing_is_named_on_both_sides() {
        let timeout = Duration::from_millis(300);
        let text = exchange(&env(0, 3, port()), timeout, || Ok(id())).unwrap_err().to_string();
        assert!(text.contains("ranks 1, 2 of 3 did not come") && text.contains("MASTER_PORT"), "{text}");
        let text = exchange(&env(2, 3, port()), timeout, || Ok(id())).unwrap_err().to_string();
        assert!(text.contains("rank 2: rank 0 of 3 did not answer at 127.0.0.1"), "{text}");
    }

    #[test]
    fn ranks_of_another_job_are_not_served() {
        let port = port();
        let (ours, theirs) = (env(0, 2, port), RankEnv { run_id: "another".into(), ..env(1, 2, port) });
        let timeout = Duration::from_secs(1);
        std::thread::scope(|scope| {
            let server = scope.spawn(|| exchange(&ours, timeout, || Ok(id())));
            assert!(exchange(&theirs, timeout, || Ok(id())).is_err());
            assert!(server.join().unwrap().unwrap_err().to_string().contains("rank 1 of 2 did not come"));
        });
    }

    #[test]
    fn ports_stay_in_range_and_the_launchers_jobs_do_not_overlap() {
        assert_eq!(first_port(&env(0, 2, 29400)), 29401);
        assert!(first_port(&env(0, 2, u16::MAX)).checked_add(PORTS).is_some());
        let ours = |pid| first_port(&RankEnv { parent_pid: Some(pid), ..env(0, 2, 0) });
        assert!(ours(4_000_000).checked_add(PORTS).is_some());
        assert!(ours(100).abs_diff(ours(101)) >= PORTS);
    }
}
