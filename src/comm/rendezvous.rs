//! How the ranks of a job find rank 0 over TCP. Never knows what they then exchange: the id of the NCCL world
//! (`nccl::rendezvous`), or the addresses of CPU ranks (`hosts::tcp`).
//!
//! [Note: which port] torchrun's agent listens on MASTER_PORT itself, so that port is taken. Rank 0 takes the first
//! free one of the [`PORTS`] ports above it, and the others try each of them in turn until one answers as rank 0 of
//! this job (`comm::handshake`), which a stranger's server or another job's rank 0 cannot. Our own launcher passes port
//! 0; the ports are then derived from the launcher's process. The same mechanism serves one host and many, with any
//! launcher.
//!
//! [Note: interfaces] Ranks listen only where they need to be reached: rank 0 at the addresses of MASTER_ADDR, every
//! other rank at its end of the connection to rank 0. They listen on all interfaces if MASTER_ADDR is not the address
//! of an interface (it belongs to a service, or is translated on the way), or if it leads back to this host although
//! ranks are on others (a host's own name in its /etc/hosts).
use super::door::{Arrival, Door};
use super::env::RankEnv;
use super::handshake::By;
use crate::base::{Error, Result};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Number of ports that rank 0 may listen on.
pub const PORTS: u16 = 16;
const RETRY: Duration = Duration::from_millis(20);
/// The right rank 0 answers at once; a stranger may never answer.
const ANSWER: Duration = Duration::from_secs(2);
/// Time limit for name resolution. Some clusters create names only as hosts start.
const NAMES: Duration = Duration::from_secs(30);

/// The first port that rank 0 tries.
fn first_port(env: &RankEnv) -> u16 {
    match (env.master_port, env.parent_pid) {
        (0, Some(pid)) => 20_000 + (pid % 2_500) as u16 * PORTS,
        (0, None) => 29_501,
        (port, _) => port.saturating_add(1).min(u16::MAX - PORTS),
    }
}

/// Listens at those of `ips` that belong to this host, all on one port (0: any). See [Note: interfaces].
pub fn listen(env: &RankEnv, ips: &[IpAddr], port: u16) -> std::io::Result<Vec<TcpListener>> {
    let named = env.master_addr == "localhost" || env.master_addr.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    let astray = env.world > env.local_world && !named && ips.iter().all(IpAddr::is_loopback);
    let mut tries = 0..PORTS;
    loop {
        let mut listeners: Vec<TcpListener> = Vec::new();
        let bound = ips.iter().filter(|_| !astray).try_for_each(|&ip| {
            let port = listeners.first().map_or(Ok(port), |first| first.local_addr().map(|at| at.port()))?;
            match TcpListener::bind(SocketAddr::new(ip, port)) {
                Ok(listener) => listeners.push(listener),
                Err(e) if is_not_here(&e) => {}
                Err(e) => return Err(e),
            }
            Ok(())
        });
        match bound {
            Ok(()) if listeners.is_empty() => return everywhere(port).map(|listener| vec![listener]),
            Ok(()) => return Ok(listeners),
            // The port that the system chose for one address may be taken at another.
            Err(e) if port == 0 && !listeners.is_empty() && e.kind() == ErrorKind::AddrInUse => {
                tries.next().ok_or(e)?;
            }
            Err(e) => return Err(e),
        }
    }
}

/// Whether no interface of this host has the address, or the host lacks its address family.
fn is_not_here(e: &std::io::Error) -> bool {
    e.kind() == ErrorKind::AddrNotAvailable || e.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
}
/// An IPv6 socket accepts IPv4 too, unless the host disables that.
fn everywhere(port: u16) -> std::io::Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// Rank 0: admits every other rank and answers each with `with`, in order of arrival. A rank for which `with` fails may
/// reconnect. Returns when all have joined. `what` is for messages: "NCCL rendezvous". `record`: bytes that each rank
/// sends.
pub fn serve(
    env: &RankEnv,
    deadline: Instant,
    what: &'static str,
    record: usize,
    with: &mut dyn FnMut(Arrival) -> std::io::Result<()>,
) -> Result<()> {
    if env.world == 1 {
        return Ok(());
    }
    let failed = |e: std::io::Error| Error::Run(format!("rank 0: {what}: {e}"));
    let addresses = resolve(env, deadline)?; // a name unknown on rank 0's own host would not work for others
    let first = first_port(env);
    let listeners = (first..first + PORTS).find_map(|port| listen(env, &addresses, port).ok()).ok_or_else(|| {
        let last = first + PORTS - 1;
        Error::input(format!(
            "rank 0 on {}: no free port in {first} to {last} for the {what}; set a different MASTER_PORT",
            env.host
        ))
    })?;
    let mut door = Door::new(listeners, what, record).map_err(failed)?;
    let mut here = vec![false; env.world];
    here[0] = true;
    while here.contains(&false) {
        if Instant::now() > deadline {
            let missing: Vec<String> = (0..env.world).filter(|&r| !here[r]).map(|r| r.to_string()).collect();
            return Err(Error::Run(format!(
                "rank 0: rank{} {} of {} did not join the {what} at {} (port {}): were all ranks started, with the same \
                 MASTER_ADDR and MASTER_PORT?{}",
                if missing.len() == 1 { "" } else { "s" },
                missing.join(", "),
                env.world,
                env.master_addr,
                door.port(),
                door.strangers().map_or(String::new(), |strangers| format!(" {strangers}")),
            )));
        }
        door.wait(RETRY);
        for arrival in door.answer(env) {
            let rank = arrival.rank;
            // A rank that gave up and reconnects is not this rank's failure.
            here[rank] |= with(arrival).is_ok();
        }
    }
    Ok(())
}

/// Other ranks: try the ports until `greets`, which greets rank 0 within its time limit, succeeds, and return its
/// result.
pub fn ask<T>(
    env: &RankEnv,
    deadline: Instant,
    what: &str,
    greets: &mut dyn FnMut(&TcpStream, Instant) -> std::io::Result<T>,
) -> Result<T> {
    let since = Instant::now();
    let first = first_port(env);
    let mut seen = Seen::default();
    loop {
        let addresses = resolve(env, deadline)?;
        for at in (first..first + PORTS).flat_map(|port| addresses.iter().map(move |&ip| SocketAddr::new(ip, port))) {
            // At least one attempt, however short the time is.
            let patience = deadline.saturating_duration_since(Instant::now()).clamp(RETRY, ANSWER);
            let until = Instant::now() + patience;
            match TcpStream::connect_timeout(&at, patience) {
                Ok(stream) => match greets(&stream, until) {
                    Ok(met) => return Ok(met),
                    Err(_) => seen.stranger = Some(at),
                },
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => seen.refused = Some(at),
                Err(e) => seen.nothing = Some((at, e.to_string())),
            }
            if Instant::now() > deadline {
                return Err(Error::Run(format!(
                    "rank {} on {}: the {what} needs rank 0 of {}, which did not answer at {}, ports {first} to {}, within \
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
        sleep(RETRY);
    }
}

/// The stream with deadline `until`.
pub fn by(stream: &TcpStream, until: Instant) -> By<'_> {
    By { stream, until, go_on: &|| true }
}

/// What the attempts found, the last of each kind.
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
                "{at} cannot be reached ({e}): is MASTER_ADDR rank 0's host, and is its firewall open between the hosts?"
            );
        }
        if let Some(at) = self.stranger {
            let why = "are MASTER_PORT and the job secret the same for all ranks, and not another job's?";
            return write!(f, "the listener at {at} is not rank 0 of this job: {why}");
        }
        let why = "was rank 0 started, on that host, with the same MASTER_PORT?";
        write!(f, "nothing listens there (connection refused): {why}")
    }
}

/// The distinct addresses of MASTER_ADDR. An unknown name is an input error.
pub fn resolve(env: &RankEnv, deadline: Instant) -> Result<Vec<IpAddr>> {
    let host = env.master_addr.as_str();
    if host.is_empty() {
        return Err(Error::input(format!(
            "rank {} on {}: MASTER_ADDR is not set, but the {} ranks are on several hosts: set it to the name or address of \
             rank 0's host, as the others can reach it (mpirun -x MASTER_ADDR=node1 ...)",
            env.rank, env.host, env.world
        )));
    }
    let since = Instant::now();
    loop {
        match (host, 0).to_socket_addrs() {
            Ok(found) => {
                let mut ips: Vec<IpAddr> = Vec::new();
                found.map(|at| at.ip()).for_each(|ip| {
                    if !ips.contains(&ip) {
                        ips.push(ip)
                    }
                });
                return Ok(ips);
            }
            Err(e) if since.elapsed() > NAMES || Instant::now() > deadline => {
                return Err(Error::input(format!(
                    "rank {} on {}: MASTER_ADDR={host} cannot be resolved ({e}): set it to the name or address \
                     of rank 0's host",
                    env.rank, env.host
                )));
            }
            Err(_) => sleep(RETRY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::handshake::greet;
    use super::*;
    use crate::comm::env::here as env;

    /// The error of rank `rank` of 3 with this address and port, within `ms`.
    fn asked(rank: usize, addr: &str, port: u16, ms: u64) -> Error {
        let env = RankEnv { master_addr: addr.into(), ..env(rank, 3, port) };
        let deadline = Instant::now() + Duration::from_millis(ms);
        match rank {
            0 => serve(&env, deadline, "test", 0, &mut |_| Ok(())).unwrap_err(),
            _ => ask(&env, deadline, "test", &mut |stream, until| {
                greet(by(stream, until), &env, "test", 0, &[], &mut [])
            })
            .unwrap_err(),
        }
    }

    /// The first 16 consecutive free ports from `base` on, held: below those that the system assigns (from 32768), at
    /// which other tests listen. Each test has its own `base`.
    fn ports(mut base: u16) -> Vec<TcpListener> {
        loop {
            let held = (base..base + PORTS).map_while(|port| TcpListener::bind(("127.0.0.1", port)).ok());
            let held: Vec<_> = held.collect();
            if held.len() == PORTS as usize {
                return held;
            }
            base += PORTS;
        }
    }

    fn port(listener: &TcpListener) -> u16 {
        listener.local_addr().unwrap().port()
    }

    #[test]
    fn an_address_that_is_none_is_bad_input_on_all_ranks() {
        for rank in [0, 2] {
            let (unset, unknown) = (asked(rank, "", 29400, 100), asked(rank, "no-such-host.invalid", 29400, 100));
            assert_eq!((unset.exit_status(), unknown.exit_status()), (2, 2));
            let (unset, unknown) = (unset.to_string(), unknown.to_string());
            assert!(unset.contains(&format!("rank {rank} on here: MASTER_ADDR is not set")), "{unset}");
            assert!(unknown.contains("MASTER_ADDR=no-such-host.invalid cannot be resolved"), "{unknown}");
        }
    }

    #[test]
    fn an_unanswered_rank_lists_the_ports_and_what_to_check() {
        let port = port(&ports(25_000)[0]) - 1; // freed at once: nothing listens
        let since = Instant::now();
        let e = asked(1, "127.0.0.1", port, 200);
        let (first, last) = (port + 1, port + PORTS);
        let range = format!("rank 0 of 3, which did not answer at 127.0.0.1, ports {first} to {last}, within");
        assert_eq!(e.exit_status(), 1);
        assert!(e.to_string().contains(&range) && e.to_string().contains("was rank 0 started"), "{e}");
        assert!(since.elapsed() < Duration::from_secs(10));
        // Dropped packets are more informative than refused ports: a firewall may refuse some and drop the others.
        let at = SocketAddr::from(([10, 77, 0, 1], 29_501));
        let seen = Seen { refused: Some(at), nothing: Some((at, "timed out".into())), stranger: None }.to_string();
        assert!(seen.contains("10.77.0.1:29501 cannot be reached (timed out): is MASTER_ADDR rank 0's host"), "{seen}");
    }

    #[test]
    fn strangers_at_the_ports_are_distinguished_from_no_listener() {
        let stranger = ports(27_000).swap_remove(0); // nothing listens at the others
        let port = port(&stranger);
        let hangs_up = std::thread::spawn(move || {
            let _ = stranger.accept(); // and is gone
        });
        let e = asked(1, "127.0.0.1", port - 1, 300).to_string();
        assert!(e.contains(&format!("the listener at 127.0.0.1:{port} is not rank 0 of this job")), "{e}");
        hangs_up.join().unwrap();
    }

    #[test]
    fn a_port_range_that_is_taken_is_bad_input() {
        let taken = ports(21_000);
        let base = port(&taken[0]);
        let e = asked(0, "127.0.0.1", base - 1, 5000);
        assert_eq!(e.exit_status(), 2);
        let range = format!("no free port in {base} to {}", base + PORTS - 1);
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

    #[test]
    fn ranks_listen_at_the_addresses_that_they_are_meant_to_be_reached_at() {
        let at = |env: &RankEnv, ips: &[&str]| -> Vec<String> {
            let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            let listeners = listen(env, &ips, 0).unwrap();
            let at: Vec<SocketAddr> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
            assert!(at.iter().all(|a| a.port() == at[0].port()), "{at:?}");
            at.iter().map(|a| a.ip().to_string()).collect()
        };
        let name = |name: &str| RankEnv { master_addr: name.into(), ..env(0, 4, 0) };
        let several = |name: &str| RankEnv { master_addr: name.into(), local_world: 2, ..env(0, 4, 0) };
        assert_eq!(at(&name("localhost"), &["127.0.0.1"]), ["127.0.0.1"]);
        assert_eq!(at(&several("127.0.0.2"), &["127.0.0.2"]), ["127.0.0.2"]);
        assert_eq!(at(&several("localhost"), &["127.0.0.1", "127.0.0.3"]), ["127.0.0.1", "127.0.0.3"]);
        // 192.0.2.0/24 is unassigned (RFC 5737).
        assert_eq!(at(&several("node1"), &["192.0.2.7", "127.0.0.2", "10.255.255.1"]).len(), 1);
        if TcpListener::bind("[::1]:0").is_ok() {
            assert_eq!(at(&name("localhost"), &["::1", "127.0.0.1"]), ["::1", "127.0.0.1"]);
        }
        // A host's own name in its /etc/hosts: other hosts could not reach it there, but ranks on the same host can.
        let all = at(&several("node1"), &["127.0.1.1"]);
        assert!(all == ["::"] || all == ["0.0.0.0"], "{all:?}");
        assert_eq!(at(&name("node1"), &["127.0.1.1"]), ["127.0.1.1"]);
        let all = at(&several("service"), &["192.0.2.7"]);
        assert!(all == ["::"] || all == ["0.0.0.0"], "{all:?}");
    }
}
