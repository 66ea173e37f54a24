//! How the ranks of a job find rank 0 over TCP, whatever they then tell it. Never knows what they say: NCCL's ranks learn the id
//! of their world (`nccl::rendezvous`), CPU ranks where all of them are (`hosts::tcp`).
//!
//! [Note: which port] torchrun's agent holds MASTER_PORT itself, so that number cannot be listened on. Rank 0 takes the
//! first free one of the [`PORTS`] numbers above it, and the others knock at each of them in turn until one answers with
//! the job's own word: a stranger's server, or another job's rank 0, does not know it. Our own launcher gives no port
//! (0); then the numbers follow from the launcher's process. One mechanism serves one host and many, whoever launched.
use super::env::RankEnv;
use crate::base::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Numbers that rank 0 may listen on.
pub const PORTS: u16 = 16;
const MAGIC: &[u8; 8] = b"flatshrd";
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// An answer from the right rank 0 comes at once; a stranger may never answer.
const ANSWER: Duration = Duration::from_secs(2);
/// Bytes of a [`greeting`].
pub const GREETING: usize = 20;

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

/// Listens where ranks of this job can reach it; port 0 is any.
pub fn bind(env: &RankEnv, port: u16) -> std::io::Result<TcpListener> {
    let at = |ip| SocketAddr::new(ip, port);
    match matches!(env.master_addr.as_str(), "localhost" | "127.0.0.1" | "::1") {
        true => TcpListener::bind(at(IpAddr::V4(Ipv4Addr::LOCALHOST))),
        // Serves IPv4 too, unless the host says otherwise.
        false => TcpListener::bind(at(IpAddr::V6(Ipv6Addr::UNSPECIFIED)))
            .or_else(|_| TcpListener::bind(at(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))),
    }
}

/// What both sides say first: magic, job, rank.
pub fn greeting(env: &RankEnv) -> [u8; GREETING] {
    let mut words = [0; GREETING];
    words[..8].copy_from_slice(MAGIC);
    words[8..16].copy_from_slice(&job(env).to_le_bytes());
    words[16..].copy_from_slice(&(env.rank as u32).to_le_bytes());
    words
}
/// Who greets so; `None` for a stranger, or a rank of another job.
pub fn greeted(env: &RankEnv, theirs: &[u8; GREETING]) -> Option<usize> {
    let rank = u32::from_le_bytes([theirs[16], theirs[17], theirs[18], theirs[19]]) as usize;
    (theirs[..16] == greeting(env)[..16] && rank < env.world).then_some(rank)
}

/// Bounds what a single read or write of the stream may take.
fn hurried(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))
}

/// Rank 0: greets every other rank and hands its stream to `with`, in the order in which they come. One that `with` fails for may
/// come again. Returns when all were there. `what` is for messages: "NCCL rendezvous".
pub fn serve(
    env: &RankEnv,
    deadline: Instant,
    what: &str,
    with: &mut dyn FnMut(usize, TcpStream) -> std::io::Result<()>,
) -> Result<()> {
    if env.world == 1 {
        return Ok(());
    }
    let failed = |e: std::io::Error| Error::Run(format!("rank 0: {what}: {e}"));
    let first = first_port(env);
    let listener = (first..first + PORTS).find_map(|port| bind(env, port).ok()).ok_or_else(|| {
        let last = first + PORTS - 1;
        Error::Run(format!("rank 0: no free port among {first} to {last} for the {what}; set another MASTER_PORT"))
    })?;
    listener.set_nonblocking(true).map_err(failed)?;
    let mut here = vec![false; env.world];
    here[0] = true;
    while here.contains(&false) {
        match listener.accept() {
            // A stranger, or a rank that gave up and comes again: not this rank's failure.
            Ok((stream, _)) => {
                if let Ok((rank, stream)) = answer(stream, env)
                    && with(rank, stream).is_ok()
                {
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
                        "rank 0: rank{} {} of {} did not come to the {what} at {} (port {}): were all ranks started, with \
                         the same MASTER_ADDR and MASTER_PORT?",
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

fn answer(mut stream: TcpStream, env: &RankEnv) -> std::io::Result<(usize, TcpStream)> {
    hurried(&stream)?;
    let mut theirs = [0; GREETING];
    stream.read_exact(&mut theirs)?;
    let rank = greeted(env, &theirs).filter(|&rank| rank > 0).ok_or(ErrorKind::InvalidData)?;
    stream.write_all(&greeting(env))?;
    Ok((rank, stream))
}

/// Any other rank: knocks until rank 0 greets, and returns what `with` makes of the stream; where that fails, knocks again.
pub fn ask<T>(
    env: &RankEnv,
    deadline: Instant,
    what: &str,
    with: &mut dyn FnMut(TcpStream) -> std::io::Result<T>,
) -> Result<T> {
    let first = first_port(env);
    let mut last = String::from("no answer");
    loop {
        for port in first..first + PORTS {
            match knock(env, port).and_then(&mut *with) {
                Ok(met) => return Ok(met),
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => {}
                Err(e) => last = e.to_string(),
            }
        }
        if Instant::now() > deadline {
            return Err(Error::Run(format!(
                "rank {}: rank 0 of {} did not answer at {}, ports {first} to {} ({last}): the {what} needs the same \
                 MASTER_ADDR and MASTER_PORT on all ranks, and a way through the firewall",
                env.rank,
                env.world,
                env.master_addr,
                first + PORTS - 1
            )));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn knock(env: &RankEnv, port: u16) -> std::io::Result<TcpStream> {
    let mut last = ErrorKind::NotFound.into();
    for at in (env.master_addr.as_str(), port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&at, ANSWER).and_then(|stream| greet(stream, env)) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn greet(mut stream: TcpStream, env: &RankEnv) -> std::io::Result<TcpStream> {
    hurried(&stream)?;
    let mut theirs = [0; GREETING];
    stream.write_all(&greeting(env))?;
    stream.read_exact(&mut theirs)?;
    match greeted(env, &theirs) {
        Some(0) => Ok(stream),
        _ => Err(ErrorKind::InvalidData.into()),
    }
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
            mpi: false,
        }
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
