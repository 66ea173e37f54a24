//! Multi-host jobs whose ranks cannot rendezvous: every rank exits soon with one message that says what to change.
//! Hosts are simulated, ranks are processes.

use crate::common::runs::*;
use std::net::TcpListener;
use std::time::Duration;

/// Rank `rank` of two, each on its own host.
fn rank(rank: usize, job: &str, addr: &str, port: u16, args: &[&str]) -> Run {
    let mut command = command(FSDP, &[&["--max-steps", "2", "--no-sample", "--no-eval"], args].concat());
    launched_on(&mut command, [rank, 2], [0, 1], port);
    command.env("FLATSHARD_HOST_ID", format!("host{rank}")).env("TORCHELASTIC_RUN_ID", job);
    match addr {
        "" => command.env_remove("MASTER_ADDR"),
        addr => command.env("MASTER_ADDR", addr),
    };
    Run(command.spawn().unwrap())
}
#[track_caller]
fn ends(run: Run, status: i32, says: &[&str]) {
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(status), "{}", ended.stderr);
    let errors: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == 1 && says.iter().all(|words| errors[0].contains(words)), "{says:?}: {}", ended.stderr);
}

#[test]
fn an_invalid_address_ends_all_ranks_with_status_2() {
    let agent = Agent::new();
    let port = agent.port;
    let cases = [
        ("", "MASTER_ADDR is not set, but the 2 ranks are on several hosts"),
        ("no..such..host", "MASTER_ADDR=no..such..host cannot be resolved"),
        ("node1:29500", "MASTER_ADDR=node1:29500 is neither a host name nor an address"),
    ];
    for (addr, says) in cases {
        let ranks = [0, 1].map(|r| rank(r, "job", addr, port, &["--init-timeout", "1"]));
        for (r, run) in ranks.into_iter().enumerate() {
            let who = format!("rank {r} on host{r}");
            ends(run, 2, &[says, if addr.contains(':') { "" } else { &who }]);
        }
    }
}

/// Before anything else, and without printing it.
#[test]
fn an_invalid_job_secret_is_bad_input() {
    let agent = Agent::new();
    let port = agent.port;
    let dir = Dir::new();
    let file = dir.arg("secret");
    let refused = |var: &str, args: &[&str], says: &[&str]| {
        let mut command = command(FSDP, &[&["--max-steps", "2"], args].concat());
        launched_on(&mut command, [0, 2], [0, 1], port).env("FLATSHARD_JOB_SECRET", var);
        time::in_time(|| ends(Run(command.spawn().unwrap()), 2, says)); // does not wait for the other
    };
    refused(
        "a short one",
        &[],
        &["FLATSHARD_JOB_SECRET has 11 bytes: a job secret needs 16 to 4096", "openssl rand -hex 32"],
    );
    let flag = ["--job-secret-file", &file];
    refused("", &flag, &["the job secret's file", "No such file"]);
    std::fs::write(&file, "a secret that everybody may read").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    refused("", &flag, &["is accessible to every user (mode 644): run chmod 600 on it"]);
    refused("", &["--job-secret-file", "/dev/zero"], &["/dev/zero: it is a device, not a regular file"]);
}

#[test]
fn a_failed_rendezvous_names_the_address_and_the_missing_rank() {
    let agent = Agent::new();
    let port = agent.port;
    // A loopback address of its own: at 127.0.0.1, ranks of other tests may listen on the ports above.
    let at = "127.0.79.1";
    let first = rank(0, "job", at, port, &["--init-timeout", "1"]);
    ends(first, 1, &["rank 1 of 2 did not join the rendezvous of hosts at 127.0.79.1", "MASTER_PORT"]);
    let second = rank(1, "job", at, port, &["--init-timeout", "1"]);
    let ports = format!("ports {} to {}", port + 1, port + 16);
    ends(second, 1, &["rank 1 on host1", "needs rank 0 of 2", at, &ports, "was rank 0 started"]);
}

#[test]
fn ranks_of_another_job_are_rejected_without_effect() {
    let agent = Agent::new();
    let port = agent.port;
    let other = rank(1, "another job", "127.0.0.1", port, &["--init-timeout", "3"]);
    std::thread::sleep(Duration::from_millis(100)); // it knocks before there is a rank 0
    let first = rank(0, "job", "127.0.0.1", port, &["--init-timeout", "30"]);
    let status = other.end();
    assert_eq!(status.status.code(), Some(1));
    assert!(status.stderr.contains("is not rank 0 of this job"), "{}", status.stderr);
    let second = rank(1, "job", "127.0.0.1", port, &["--init-timeout", "30"]);
    for run in [first, second] {
        let ended = run.end();
        assert!(ended.status.success(), "{}", ended.stderr);
    }
}

#[test]
fn no_free_port_is_bad_input() {
    // A range of 16 free ports, other than the library test's.
    let mut base = 23_000;
    let _taken: Vec<TcpListener> = loop {
        let held: Vec<_> = (base..base + 16).map_while(|port| TcpListener::bind(("127.0.0.1", port)).ok()).collect();
        if held.len() == 16 {
            break held;
        }
        base += 16;
    };
    let first = rank(0, "job", "127.0.0.1", base - 1, &["--init-timeout", "20"]);
    ends(first, 2, &[&format!("no free port in {base} to {}", base + 15), "a different MASTER_PORT"]);
}

#[test]
fn a_mesh_that_does_not_fit_the_world_is_refused_before_the_rendezvous() {
    // Rank 0 alone: it does not wait for the other.
    let agent = Agent::new();
    let port = agent.port;
    for (flags, says) in [
        (["--tp-size", "3"], "3"),
        (["--ring-attn-size", "4"], "4"),
        (["--nproc-per-node", "2"], "the launcher started 1 ranks on this host"),
        (["--num-nodes", "3"], "ranks on 2 hosts"),
    ] {
        ends(rank(0, "job", "127.0.0.1", port, &flags), 2, &[says, "2"]);
    }
}
