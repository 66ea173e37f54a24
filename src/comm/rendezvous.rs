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
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Numbers that rank 0 may listen on.
pub const PORTS: u16 = 16;
const MAGIC: &[u8; 8] = b"flatshrd";
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// An answer from the right rank 0 comes at once; a stranger may never answer.
const ANSWER: Duration = Duration::from_secs(2);
/// A name that is not known by then never will be. Some clusters make names as hosts come.
const NAMES: Duration = Duration::from_secs(30);
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
    resolve(env, deadline)?; // others cannot reach it by a name that its own host does not know
    let first = first_port(env);
    let listener = (first..first + PORTS).find_map(|port| bind(env, port).ok()).ok_or_else(|| {
        let last = first + PORTS - 1;
        Error::input(format!(
            "rank 0 on {}: no free port among {first} to {last} for the {what}; set another MASTER_PORT",
            env.host
        ))
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
                sleep(LOOK_AGAIN);
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
    let since = Instant::now();
    let first = first_port(env);
    let mut seen = Seen::default();
    loop {
        let addresses = resolve(env, deadline)?;
        for at in (first..first + PORTS).flat_map(|port| addresses.iter().map(move |&ip| SocketAddr::new(ip, port))) {
            // At least one knock, however short the time is.
            let left = deadline.saturating_duration_since(Instant::now());
            match TcpStream::connect_timeout(&at, left.clamp(LOOK_AGAIN, ANSWER)) {
                Ok(stream) => match greet(stream, env).and_then(&mut *with) {
                    Ok(met) => return Ok(met),
                    Err(_) => seen.stranger = Some(at),
                },
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => seen.refused = Some(at),
                Err(e) => seen.nothing = Some((at, e.to_string())),
            }
            if Instant::now() > deadline {
                return Err(Error::Run(format!(
                    "rank {} on {}: the {what} needs rank 0 of {}, and it did not answer at {}, ports {first} to {}, within \
                     {:.1?}: {seen}",
                    env.rank,
                    env.host,
                    env.world,
                    env.master_addr,
                    first + PORTS - 1,
                    since.elapsed(),
                )));
            }
        }
        sleep(LOOK_AGAIN);
    }
}

/// What knocking found, of each kind the last.
#[derive(Default)]
struct Seen {
    refused: Option<SocketAddr>,
    stranger: Option<SocketAddr>,
    nothing: Option<(SocketAddr, String)>,
}
impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        if let Some((at, e)) = &self.nothing {
            return write!(
                f,
                "{at} cannot be reached ({e}): is MASTER_ADDR rank 0's host, and its firewall open between the hosts?"
            );
        }
        if let Some(at) = self.stranger {
            let why = "is MASTER_PORT the same for all ranks, and not that of another job?";
            return write!(f, "who listens at {at} is not rank 0 of this job: {why}");
        }
        let why = "was rank 0 started, on that host, with the same MASTER_PORT?";
        write!(f, "nobody listens there (connection refused): {why}")
    }
}

/// The addresses of MASTER_ADDR; an input error for a name that nobody knows.
fn resolve(env: &RankEnv, deadline: Instant) -> Result<Vec<IpAddr>> {
    let host = env.master_addr.as_str();
    if host.is_empty() {
        return Err(Error::input(format!(
            "rank {} on {}: MASTER_ADDR is not set, and the {} ranks are on several hosts: set it to the name or address of \
             rank 0's host, which the others can reach (mpirun -x MASTER_ADDR=node1 ...)",
            env.rank, env.host, env.world
        )));
    }
    let since = Instant::now();
    loop {
        match (host, 0).to_socket_addrs() {
            Ok(found) => return Ok(found.map(|at| at.ip()).collect()),
            Err(e) if since.elapsed() > NAMES || Instant::now() > deadline => {
                return Err(Error::input(format!(
                    "rank {} on {}: MASTER_ADDR={host} is no name that this host knows ({e}): set it to the name or address \
                     of rank 0's host",
                    env.rank, env.host
                )));
            }
            Err(_) => sleep(LOOK_AGAIN),
        }
    }
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
    use crate::comm::env::here as env;

    /// What becomes of rank `rank` of 3 with this address and port, in at most so long.
    fn asked(rank: usize, addr: &str, port: u16, ms: u64) -> Error {
        let env = RankEnv { master_addr: addr.into(), ..env(rank, 3, port) };
        let deadline = Instant::now() + Duration::from_millis(ms);
        match rank {
            0 => serve(&env, deadline, "test", &mut |_, _| Ok(())).unwrap_err(),
            _ => ask(&env, deadline, "test", &mut |_| Ok(())).unwrap_err(),
        }
    }

    #[test]
    fn an_address_that_is_none_is_bad_input_on_all_ranks() {
        for rank in [0, 2] {
            let (unset, unknown) = (asked(rank, "", 29400, 100), asked(rank, "no-such-host.invalid", 29400, 100));
            assert_eq!((unset.exit_status(), unknown.exit_status()), (2, 2));
            let (unset, unknown) = (unset.to_string(), unknown.to_string());
            assert!(unset.contains(&format!("rank {rank} on here: MASTER_ADDR is not set")), "{unset}");
            assert!(unknown.contains("MASTER_ADDR=no-such-host.invalid is no name"), "{unknown}");
        }
    }

    #[test]
    fn who_gets_no_answer_says_where_it_knocked_and_what_to_check() {
        // A port that was just given back, and some after it: nobody listens.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().min(u16::MAX - 100);
        let since = Instant::now();
        let e = asked(1, "127.0.0.1", port, 200);
        let (first, last) = (port + 1, port + PORTS);
        let range = format!("rank 0 of 3, and it did not answer at 127.0.0.1, ports {first} to {last}, within");
        assert_eq!(e.exit_status(), 1);
        assert!(e.to_string().contains(&range) && e.to_string().contains("was rank 0 started"), "{e}");
        assert!(since.elapsed() < Duration::from_secs(10));
        // Packets that vanish tell more than ports that are refused: a firewall may refuse some and drop the others.
        let at = SocketAddr::from(([10, 77, 0, 1], 29_501));
        let seen = Seen { refused: Some(at), nothing: Some((at, "timed out".into())), stranger: None }.to_string();
        assert!(seen.contains("10.77.0.1:29501 cannot be reached (timed out): is MASTER_ADDR rank 0's host"), "{seen}");
    }

    #[test]
    fn strangers_at_the_ports_are_told_apart_from_nobody() {
        let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = stranger.local_addr().unwrap().port();
        let hangs_up = std::thread::spawn(move || {
            let _ = stranger.accept(); // and is gone
        });
        let e = asked(1, "127.0.0.1", port - 1, 300).to_string();
        assert!(e.contains(&format!("who listens at 127.0.0.1:{port} is not rank 0 of this job")), "{e}");
        hangs_up.join().unwrap();
    }

    #[test]
    fn a_port_range_that_is_taken_is_bad_input() {
        // Where a run of 16 numbers is free.
        let mut base = 21_000;
        let taken: Vec<TcpListener> = loop {
            let all = (base..base + PORTS).map_while(|port| TcpListener::bind(("127.0.0.1", port)).ok());
            let all: Vec<_> = all.collect();
            if all.len() == PORTS as usize {
                break all;
            }
            base += PORTS;
        };
        let e = asked(0, "127.0.0.1", base - 1, 5000);
        assert_eq!(e.exit_status(), 2);
        let range = format!("no free port among {base} to {}", base + PORTS - 1);
        assert!(e.to_string().contains(&range) && e.to_string().contains("MASTER_PORT"), "{e}");
        drop(taken);
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
