//! The rendezvous of GPU ranks, with real processes: this test binary starts itself again as the ranks. Needs no GPU:
//! the exchanged id is a made-up one instead of NCCL's. Strangers that connect to the same ports are not served.

use crate::common::agent::Agent;
use crate::common::network::*;
use crate::common::runs::launched;
use crate::common::time;
use flatshard::base::Error;
use flatshard::comm::door::Door;
use flatshard::comm::env::RankEnv;
use flatshard::comm::frame::Header;
use flatshard::comm::handshake::{By, greet};
use flatshard::comm::hosts::messages::{RECORD, REFUSAL, TABLE};
use flatshard::comm::hosts::tcp::Tcp;
use flatshard::comm::nccl::rendezvous::{ID, exchange};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "FLATSHARD_TEST_ROLE";

/// Not a test: the code of the started processes. Run by hand, it only prints that.
#[test]
fn rank_process() {
    let Ok(seconds) = std::env::var(ROLE) else {
        println!("runs as a process of the other tests only");
        return;
    };
    let env = RankEnv::from_env().unwrap().unwrap();
    let timeout = Duration::from_secs_f64(seconds.parse().unwrap());
    let word = std::process::id().to_le_bytes();
    let make = || Ok::<_, Error>(std::array::from_fn::<u8, ID, _>(|i| word[i % 4]));
    match exchange(&env, timeout, make) {
        Ok(id) => println!("ID {}", u32::from_le_bytes([id[0], id[1], id[2], id[3]])),
        Err(e) => println!("ERROR {e}"),
    }
}

/// As torchrun starts it: MASTER_PORT is held by the agent.
fn rank(rank: usize, world: usize, port: u16, seconds: f64) -> Child {
    secretly(None, rank, world, port, seconds)
}
fn secretly(secret: Option<&str>, rank: usize, world: usize, port: u16, seconds: f64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["rendezvous::rank_process", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, seconds.to_string()).env("TORCHELASTIC_RUN_ID", format!("job {port}"));
    launched(&mut command, rank, world, port).env("MASTER_ADDR", "localhost");
    command.env_remove("FLATSHARD_JOB_SECRET").envs(secret.map(|secret| ("FLATSHARD_JOB_SECRET", secret)));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
fn stdout_of(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|l| l.find("ID ").or(l.find("ERROR ")).map(|at| l[at..].to_string()));
    line.unwrap_or_else(|| panic!("neither an id nor an error: {text}"))
}

#[test]
fn ranks_under_an_agent_that_holds_the_port_get_rank_0s_id() {
    let agent = Agent::new();
    let port = agent.port;
    let mut ranks: Vec<Child> = (1..3).map(|r| rank(r, 3, port, 30.0)).collect();
    std::thread::sleep(Duration::from_millis(200)); // they knock before there is a rank 0
    ranks.insert(0, rank(0, 3, port, 30.0));
    let expected = format!("ID {}", ranks[0].id());
    for child in ranks {
        assert_eq!(stdout_of(child), expected);
    }
}

#[test]
fn a_rank_that_never_comes_is_named_within_the_timeout() {
    let agent = Agent::new();
    let port = agent.port;
    let ranks = [rank(0, 3, port, 3.0), rank(2, 3, port, 3.0)];
    let [first, third] = ranks.map(stdout_of);
    assert!(first.contains("rank 1 of 3 did not join the NCCL rendezvous"), "{first}");
    assert!(third.starts_with("ID "), "{third}");
}

const SECRET: &str = "0123456789abcdef-of-this-test";

/// A job as its ranks and strangers see it.
fn env(secret: Option<&str>, rank: usize, world: usize, port: u16) -> RankEnv {
    let get = |name: &str| match name {
        "RANK" | "LOCAL_RANK" => Some(rank.to_string()),
        "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some(world.to_string()),
        "MASTER_ADDR" => Some("localhost".into()),
        "MASTER_PORT" => Some(port.to_string()),
        "TORCHELASTIC_RUN_ID" => Some(format!("job {port}")),
        "FLATSHARD_JOB_SECRET" => secret.map(str::to_string),
        _ => None,
    };
    RankEnv::read(&get).unwrap().unwrap()
}
/// Where rank 0 waits for the others.
fn doors(rank_0: &Child) -> Vec<SocketAddr> {
    time::wait_until("rank 0 listens", || !listening(rank_0.id()).is_empty());
    listening(rank_0.id())
}

#[test]
fn silent_strangers_do_not_delay_the_timeout() {
    let agent = Agent::new();
    let port = agent.port;
    let first = rank(0, 2, port, 2.0);
    let _attack = Attack::silent(doors(&first), Duration::from_millis(100));
    // Serving one at a time would take 2 s each, in which 20 more connect.
    let said = time::within(time::scaled(20_000), || stdout_of(first));
    assert!(said.contains("rank 1 of 2 did not join the NCCL rendezvous"), "{said}");
}

#[test]
fn strangers_that_send_a_byte_per_second_do_not_block_ranks() {
    let agent = Agent::new();
    let port = agent.port;
    let first = secretly(Some(SECRET), 0, 3, port, 60.0);
    let _attack = Attack::slow(doors(&first), 8, Duration::from_secs(1));
    std::thread::sleep(Duration::from_millis(300)); // they are first
    let expected = format!("ID {}", first.id());
    let others = [1, 2].map(|r| secretly(Some(SECRET), r, 3, port, 60.0));
    let all = others.into_iter().chain([first]);
    let said: Vec<String> = time::within(time::scaled(15_000), || all.map(stdout_of).collect());
    assert!(said.iter().all(|said| *said == expected), "{said:?}");
}

#[test]
fn a_stranger_without_the_secret_learns_nothing() {
    let agent = Agent::new();
    let port = agent.port;
    let first = secretly(Some(SECRET), 0, 2, port, 60.0);
    let at = doors(&first)[0];
    // The greeting of the protocol without a secret.
    let mut stranger = TcpStream::connect(at).unwrap();
    stranger.write_all(&old_greeting(&format!("torchrun job {port} 0"), "localhost", port, 2, 1)).unwrap();
    // The current greeting, with another secret and with none.
    for secret in [None, Some("another job's own secret")] {
        let (stream, mut id) = (TcpStream::connect(at).unwrap(), [0; ID]);
        let by = By { stream: &stream, until: Instant::now() + Duration::from_secs(20), go_on: &|| true };
        assert!(greet(by, &env(secret, 1, 2, port), "NCCL rendezvous", 0, &[], &mut id).is_err());
        assert_eq!(id, [0; ID]);
    }
    let (told, ended) = heard(&stranger, Duration::from_secs(20));
    assert!(ended && told.len() <= 40, "{} bytes", told.len()); // a nonce
    // Rank 1 is still awaited, and let in.
    let (second, expected) = (secretly(Some(SECRET), 1, 2, port, 60.0), format!("ID {}", first.id()));
    assert_eq!([stdout_of(first), stdout_of(second)], [expected.clone(), expected]);
}

#[test]
fn ranks_with_different_secrets_report_it() {
    let agent = Agent::new();
    let port = agent.port;
    let ranks =
        [(0, SECRET), (1, "another job's own secret")].map(|(r, secret)| secretly(Some(secret), r, 2, port, 3.0));
    let [first, second] = ranks.map(stdout_of);
    assert!(
        first.contains("rank 1 of 2 did not join") && first.contains("is the job secret the same on all ranks?"),
        "{first}"
    );
    assert!(second.contains("is not rank 0 of this job: are MASTER_PORT and the job secret the same"), "{second}");
}

/// Rank 0 is hostile, or there is no secret and a stranger impersonates it.
#[test]
fn an_answer_of_invalid_length_is_refused_before_it_is_allocated() {
    let wild = b"\x1b[2Jyou lose\x07";
    let said = |header: Header, body: &'static [u8]| -> String {
        let agent = Agent::new();
        let port = agent.port;
        let listener = (1..=16).find_map(|i| TcpListener::bind(("127.0.0.1", port + i)).ok()).unwrap();
        let mut door = Door::new(vec![listener], "rendezvous of hosts", RECORD).unwrap();
        let [mine, theirs] = [0, 1].map(|r| RankEnv { local_world: 1, ..env(None, r, 2, port) });
        std::thread::scope(|scope| {
            let joins = scope.spawn(move || Tcp::join(&theirs, Duration::from_secs(20)).err().unwrap().to_string());
            let mut arrival = None;
            time::wait_until("it connects", || {
                door.wait(Duration::from_millis(20));
                arrival = door.answer(&mine).pop();
                arrival.is_some()
            });
            let mut stream = arrival.unwrap().admit(&[]).unwrap();
            stream.write_all(&header.with(body)).unwrap();
            joins.join().unwrap() // while the stream is open: nothing more comes
        })
    };
    for (kind, sequence, len) in
        [(TABLE, 0, 1 << 60), (TABLE, 0, u64::MAX), (REFUSAL, 0, 1 << 30), (9, 0, 4), (TABLE, 5, 4)]
    {
        let text = said(Header { kind, sequence, len }, b"");
        assert!(text.contains(&format!("message {sequence} of kind {kind} with {len} bytes")), "{text}");
    }
    let text = said(Header { kind: REFUSAL, sequence: 0, len: wild.len() as u64 }, wild);
    assert_eq!(text, "\\u{1b}[2Jyou lose\\u{7}");
}
