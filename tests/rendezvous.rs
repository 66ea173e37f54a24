//! How GPU ranks find each other, with real processes: this test binary starts itself again as the ranks. No GPU is needed:
//! the id is rank 0's own word here instead of NCCL's.
#[path = "common/agent.rs"]
mod agent;

use agent::Agent;
use flatshard::base::Error;
use flatshard::comm::env::RankEnv;
use flatshard::comm::nccl::rendezvous::{ID, exchange};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const ROLE: &str = "FLATSHARD_TEST_ROLE";

/// Not a test of its own: what the started processes run. Started by hand it does nothing but say so.
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
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["rank_process", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, seconds.to_string()).env("TORCHELASTIC_RUN_ID", format!("job {port}"));
    command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", port.to_string());
    for (name, n) in [("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)] {
        command.env(name, n.to_string());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
fn said(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|l| l.find("ID ").or(l.find("ERROR ")).map(|at| l[at..].to_string()));
    line.unwrap_or_else(|| panic!("neither an id nor an error: {text}"))
}

#[test]
fn processes_under_an_agent_that_holds_the_port_all_get_rank_0s_id() {
    let agent = Agent::new();
    let port = agent.port;
    let mut ranks: Vec<Child> = (1..3).map(|r| rank(r, 3, port, 30.0)).collect();
    std::thread::sleep(Duration::from_millis(200)); // they knock before there is a rank 0
    ranks.insert(0, rank(0, 3, port, 30.0));
    let expected = format!("ID {}", ranks[0].id());
    for child in ranks {
        assert_eq!(said(child), expected);
    }
}

#[test]
fn a_rank_that_never_comes_is_named_within_the_timeout() {
    let agent = Agent::new();
    let port = agent.port;
    let ranks = [rank(0, 3, port, 3.0), rank(2, 3, port, 3.0)];
    let [first, third] = ranks.map(said);
    assert!(first.contains("rank 1 of 3 did not come to the NCCL rendezvous"), "{first}");
    assert!(third.starts_with("ID "), "{third}");
}
