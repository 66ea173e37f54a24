//! Runs on several simulated hosts under attack from the network: strangers are not admitted and delay nobody, and text
//! from them and from hostile peers is escaped before it reaches a terminal.
use super::*;
use crate::common::network::*;
use flatshard::comm::env::RankEnv;
use flatshard::comm::handshake::{By, greet};
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const SECRET: &str = "0123456789abcdef-of-this-test";
/// Prints no lines of steps: they would fill the pipe that nothing reads yet within two seconds.
const ENDLESS: [&str; 5] = ["--max-steps", "1000000", "--no-sample", "--log-level", "warn"];

/// One rank on each host, with these variables and at most 256 descriptors each.
struct Spread {
    ranks: Vec<Run>,
    agent: Agent,
}
impl Spread {
    fn start(hosts: usize, addr: &str, vars: &[(&str, &str)], args: &[&str]) -> Spread {
        let agent = Agent::new();
        let start = |rank: usize| {
            let run = command(FSDP, args);
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "ulimit -n 256; exec \"$0\" \"$@\"", FSDP]).args(run.get_args());
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            launched_on(&mut command, [rank, hosts], [0, 1], agent.port);
            command.env("MASTER_ADDR", addr).env("TORCHELASTIC_RUN_ID", "attacked");
            command.env("FLATSHARD_HOST_ID", format!("host{rank}")).env_remove("FLATSHARD_JOB_SECRET");
            Run(command.envs(vars.iter().copied()).spawn().unwrap())
        };
        Spread { ranks: (0..hosts).map(start).collect(), agent }
    }
    /// Waits until it has trained three steps.
    #[track_caller]
    fn trains(&mut self, metrics: &std::path::Path) {
        wait_for_steps(3, metrics, &mut self.ranks);
    }
    /// Where its ranks listen, once they train.
    fn doors(&self) -> Vec<SocketAddr> {
        self.ranks.iter().flat_map(|run| listening(run.pid())).collect()
    }
    /// What a stranger knows of the job: everything but the secret.
    fn env(&self, rank: usize, secret: Option<&str>) -> RankEnv {
        let number = |name: &str| match name {
            "RANK" => Some(rank.to_string()),
            "WORLD_SIZE" => Some(self.ranks.len().to_string()),
            "LOCAL_RANK" => Some("0".into()),
            "LOCAL_WORLD_SIZE" => Some("1".into()),
            "MASTER_ADDR" => Some("127.0.0.1".into()),
            "MASTER_PORT" => Some(self.agent.port.to_string()),
            "TORCHELASTIC_RUN_ID" => Some("attacked".into()),
            "FLATSHARD_JOB_SECRET" => secret.map(str::to_string),
            _ => None,
        };
        RankEnv::read(&number).unwrap().unwrap()
    }
    fn end(self) -> Vec<Ended> {
        let threads: Vec<_> = self.ranks.into_iter().map(|run| std::thread::spawn(|| run.end())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }
}

/// Training continues.
fn goes_on(metrics: &std::path::Path) {
    let before = steps(metrics);
    wait_until("it trains on", || steps(metrics) > before + 2);
}

#[test]
fn slow_strangers_at_all_ports_delay_neither_steps_nor_the_detection_of_a_dead_rank() {
    let dir = Dir::new();
    let metrics = dir.arg("m");
    let args = [&ENDLESS[..], &["--metrics-path", &metrics]].concat();
    let mut job = Spread::start(3, "127.0.0.1", &[("FLATSHARD_JOB_SECRET", SECRET)], &args);
    job.trains(&dir.path("m"));
    let doors = job.doors();
    assert_eq!(doors.len(), 3, "{doors:?}"); // one each: the rendezvous is over
    let _attack = Attack::slow(doors, 8, Duration::from_secs(1));
    goes_on(&dir.path("m"));
    send(Signal::KILL, job.ranks[2].pid());
    // Some 20 ms; one stranger at a time used to take up to 22 s.
    let ended = time::within(time::scaled(8_000), || job.end());
    for e in &ended[..2] {
        assert_eq!(e.status.code(), Some(1), "{}", e.stderr);
        assert!(e.stderr.contains("rank 2 on host2: connection closed"), "{}", e.stderr);
    }
}

#[test]
fn thousands_of_connections_exhaust_no_descriptors_and_do_not_affect_the_run() {
    let dir = Dir::new();
    let metrics = dir.arg("m");
    let args = [&ENDLESS[..], &["--metrics-path", &metrics]].concat();
    let mut job = Spread::start(2, "127.0.0.1", &[("FLATSHARD_JOB_SECRET", SECRET)], &args);
    job.trains(&dir.path("m"));
    let doors = job.doors();
    let before: Vec<usize> = job.ranks.iter().map(|run| descriptors(run.pid())).collect();
    let word = old_greeting("torchrun attacked 0", "127.0.0.1", job.agent.port, 2, 1);
    let (mut open, mut most) = (Vec::new(), 0);
    for i in 0..2000 {
        // As many as this process may have open itself; the oldest of them are closed.
        if open.len() > 400 {
            drop(open.drain(..200));
        }
        let at = doors[i % doors.len()];
        let Ok(mut stream) = TcpStream::connect_timeout(&at, Duration::from_secs(1)) else { continue };
        if i % 3 > 0 {
            let _ = stream.write_all(&[&word[..], &(i as u16).to_le_bytes()].concat()); // silent, or as a rank was once
        }
        open.push(stream);
        if i % 50 == 0 {
            let now = job.ranks.iter().zip(&before).map(|(run, before)| descriptors(run.pid()).saturating_sub(*before));
            most = most.max(now.max().unwrap());
        }
    }
    goes_on(&dir.path("m"));
    assert!(most <= 66, "{most} descriptors more than before");
    // A stranger who knows everything but the secret is not admitted either.
    let rank_0 = *listening(job.ranks[0].pid()).first().unwrap();
    for secret in [None, Some("another job's own secret")] {
        assert!(calls(rank_0, &job.env(1, secret), 7).is_err());
    }
    calls(rank_0, &job.env(1, Some(SECRET)), 7).unwrap();
    goes_on(&dir.path("m"));
    send(Signal::TERM, job.ranks[0].pid());
    for e in job.end() {
        assert_eq!(e.status.code(), Some(143), "{}", e.stderr);
    }
}

/// A rank's call for a channel.
fn calls(at: SocketAddr, env: &RankEnv, channel: u16) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(at)?;
    let by = By { stream: &stream, until: Instant::now() + Duration::from_secs(5), go_on: &|| true };
    greet(by, env, "channel", 0, &channel.to_le_bytes(), &mut [])?;
    Ok(stream)
}

/// Without a secret a stranger can pass for a rank; there is an end to what it can hold, though, and rank 0 says so
/// once.
#[test]
fn without_a_secret_there_is_one_warning_and_impostors_hold_few_connections() {
    let dir = Dir::new();
    let metrics = dir.arg("m");
    let args = [&ENDLESS[..], &["--metrics-path", &metrics]].concat();
    let mut job = Spread::start(2, "127.0.0.1", &[], &args);
    job.trains(&dir.path("m"));
    let at = listening(job.ranks[0].pid())[0];
    let held: Vec<TcpStream> = (100..200).filter_map(|channel| calls(at, &job.env(1, None), channel).ok()).collect();
    assert!((1..=16).contains(&held.len()), "{}", held.len());
    goes_on(&dir.path("m"));
    send(Signal::TERM, job.ranks[0].pid());
    let said: Vec<String> = job.end().into_iter().map(|e| e.stderr).collect();
    let warned =
        |text: &str| text.matches("no job secret: anyone who can reach this job's ports can impersonate").count();
    assert_eq!([warned(&said[0]), warned(&said[1])], [1, 0], "{said:?}");
}

#[test]
fn a_secret_is_shown_nowhere() {
    let dir = Dir::new();
    let file = dir.path("secret");
    fs::write(&file, SECRET).unwrap();
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let flags = ["--job-secret-file", file.to_str().unwrap()];
    let paths = ["m", "ckpt", "log", "traces"].map(|name| dir.arg(name));
    let [metrics, ckpt, log, traces] = &paths;
    let args = ["--max-steps", "1000000", "--no-sample", "--log-level", "debug", "--metrics-path", metrics];
    let args = [&args[..], &["--ckpt-dir", ckpt, "--log-file", log, "--save-traces-folder", traces], &flags].concat();
    // One rank has it from the environment: it is the same.
    let mut job = Spread::start(2, "127.0.0.1", &[], &args);
    job.trains(&dir.path("m"));
    for run in &job.ranks {
        let cmdline = fs::read(format!("/proc/{}/cmdline", run.pid())).unwrap();
        assert!(!String::from_utf8_lossy(&cmdline).contains(SECRET));
    }
    send(Signal::TERM, job.ranks[0].pid());
    let ended = job.end();
    fs::remove_file(&file).unwrap();
    for e in &ended {
        assert_eq!(e.status.code(), Some(143), "{}", e.stderr);
        assert!(
            !e.stderr.contains(SECRET) && !e.stdout.contains(SECRET) && !e.stderr.contains("no job secret"),
            "{}",
            e.stderr
        );
    }
    let found = std::process::Command::new("grep").args(["-rlF", SECRET]).arg(dir.0.path()).output().unwrap();
    assert_eq!(found.status.code(), Some(1), "{}", String::from_utf8_lossy(&found.stdout));
    fs::write(&file, SECRET).unwrap();
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let printed = good(FSDP, &[&flags[..], &["--print-config"]].concat());
    assert!(printed.stdout.contains("job_secret_file") && !printed.stdout.contains(SECRET));
}

/// Our own launcher's ranks are on one host, and still have a secret: each start another one, in the environment alone.
#[test]
fn the_built_in_launcher_generates_a_secret() {
    let dir = Dir::new();
    let secret_of = |pid: u32| {
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap();
        let found = environ.split(|&b| b == 0).find_map(|v| v.strip_prefix(b"FLATSHARD_JOB_SECRET="));
        String::from_utf8(found.unwrap().to_vec()).unwrap()
    };
    let start = |name: &str| {
        let run = Run::start(FSDP, &[&ENDLESS[..], &["--metrics-path", &dir.arg(name)]].concat());
        let ranks = run.ranks(2);
        wait_until("a step", || steps(&dir.path(name)) >= 1);
        let secrets = [0, 1].map(|i| secret_of(ranks[i]));
        assert_eq!(secrets[0], secrets[1]);
        assert!(secrets[0].len() == 64 && secrets[0].bytes().all(|b| b.is_ascii_hexdigit()));
        let cmdline = fs::read(format!("/proc/{}/cmdline", ranks[0])).unwrap();
        assert!(!String::from_utf8_lossy(&cmdline).contains(&secrets[0]));
        secrets[0].clone()
    };
    assert_ne!(start("a"), start("b"));
}

/// MASTER_ADDR's interface, and that from which a rank reaches it: no other.
#[test]
fn ranks_listen_only_on_the_interface_of_master_addr() {
    let dir = Dir::new();
    let metrics = dir.arg("m");
    let args = [&ENDLESS[..], &["--metrics-path", &metrics]].concat();
    let mut job = Spread::start(3, "127.0.0.2", &[("FLATSHARD_JOB_SECRET", SECRET)], &args);
    job.trains(&dir.path("m"));
    let at = |rank: usize| -> Vec<IpAddr> { listening(job.ranks[rank].pid()).iter().map(SocketAddr::ip).collect() };
    let [two, one] = ["127.0.0.2", "127.0.0.1"].map(|ip| ip.parse::<IpAddr>().unwrap());
    assert_eq!(at(0), [two]);
    assert!([1, 2].iter().all(|&rank| at(rank) == [one] || at(rank) == [two]), "{:?}", [at(1), at(2)]);
}

#[test]
fn localhost_works_with_ipv4_and_ipv6() {
    for addr in ["localhost", "::1"] {
        if addr == "::1" && TcpListener::bind("[::1]:0").is_err() {
            println!("no IPv6 on this machine");
            continue;
        }
        let job = Spread::start(3, addr, &[("FLATSHARD_JOB_SECRET", SECRET)], &["--max-steps", "2", "--no-sample"]);
        for e in job.end() {
            assert!(e.status.success(), "{addr}: {}", e.stderr);
        }
    }
}

/// A host name with terminal escape sequences.
#[test]
fn a_peers_host_name_is_escaped_in_messages() {
    let dir = Dir::new();
    let metrics = dir.arg("m");
    let args = [&ENDLESS[..], &["--metrics-path", &metrics]].concat();
    let mut job = Spread::start(2, "127.0.0.1", &[("FLATSHARD_HOST_ID", "\x1b[2J\x1b]0;owned\x07x")], &args);
    // Both ranks have that name: they would share memory, were they numbered so.
    job.trains(&dir.path("m"));
    send(Signal::KILL, job.ranks[1].pid());
    let ended = job.end();
    let said = &ended[0].stderr;
    assert!(said.contains("rank 1 on \\u{1b}[2J\\u{1b}]0;owned\\u{7}x: connection closed"), "{said:?}");
    assert!(!said.contains(['\x1b', '\x07']), "{said:?}");
}
