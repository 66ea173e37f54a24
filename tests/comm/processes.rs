//! Real processes: this test binary starts itself again as the ranks.
use super::*;
use crate::common::agent::Agent;
use flatshard::comm::env::{ARENA_FD, RankEnv};
use flatshard::comm::shm::{Arena, ShmOptions, ShmWorld};
use flatshard::comm::{Axis, Reduce};
use std::process::{Child, Command, Stdio};

/// The role of a started process.
const ROLE: &str = "FLATSHARD_TEST_ROLE";

/// Not a test: the code of the started processes. Run by hand, it only prints that.
#[test]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else {
        println!("runs as a process of the other tests only");
        return;
    };
    let env = RankEnv::from_env().unwrap().unwrap();
    let options = ShmOptions { timeout: Duration::from_secs(600) };
    let member = match ShmWorld::join(&env, Meter::default(), &options) {
        Ok(member) => member,
        Err(e) => {
            println!("JOIN {e}");
            std::process::exit(e.exit_status() as i32);
        }
    };
    let mesh = Mesh::new(member, MeshSizes::sharded(env.world)).unwrap();
    let (g, me, n) = (&**mesh.group(Axis::Fsdp), env.rank, env.world);
    // The sum of the ranks' process ids identifies the job: rank processes print it, the test compares.
    let mut ids = g.alloc(DType::F64, 1, CommUse::Reduced, Category::Other).unwrap();
    fill(&mut ids, |_| std::process::id() as f64);
    let t = g.all_reduce(T, ids.view_mut(), Reduce::Sum).unwrap();
    g.wait(t).unwrap();
    let mut full = g.alloc(DType::F32, 50_000 * n, CommUse::Gathered, Category::Other).unwrap();
    let mut shard = plain(DType::F32, 50_000);
    fill(&mut shard, |i| (me * 50_000 + i) as f32);
    let t = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
    g.wait(t).unwrap();
    expect(&full, |i| i as f32);
    println!("IDS {}", host::<f64>(&ids)[0]);
    if role == "fail" {
        if me == 1 {
            std::thread::sleep(Duration::from_millis(500)); // the others are in the barrier by now
            mesh.member.abort();
            std::process::exit(3);
        }
        println!("ERROR {}", error(g.barrier(T)));
        return;
    }
    g.barrier(T).unwrap();
}

fn rank(role: &str, rank: usize, world: usize, vars: &[(&str, String)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["processes::rank_process", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
    command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", world.to_string());
    command.envs(vars.iter().map(|(name, value)| (*name, value.as_str())));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
/// The processes' output; all must succeed.
fn outputs(children: Vec<Child>) -> Vec<String> {
    let mut texts = vec![];
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        texts.push(text);
    }
    texts
}
fn line<'a>(text: &'a str, start: &str) -> &'a str {
    let found = text.lines().find_map(|l| l.split_once(start));
    found.unwrap_or_else(|| panic!("no {start} in: {text}")).1.trim()
}
fn ids(children: &[Child]) -> String {
    children.iter().map(|c| c.id() as f64).sum::<f64>().to_string()
}
/// The port names the job: it is not used, but must differ between jobs.
fn port(agent: &Agent) -> [(&'static str, String); 1] {
    [("MASTER_PORT", agent.port.to_string())]
}

#[test]
fn ranks_of_an_external_launcher_meet_and_two_jobs_do_not() {
    let agents = [Agent::new(), Agent::new()];
    let start = |agent| (0..3).rev().map(|r| rank("run", r, 3, &port(agent))).collect();
    let jobs: Vec<Vec<Child>> = agents.iter().map(start).collect();
    for job in jobs {
        let expected = ids(&job);
        for text in outputs(job) {
            assert_eq!(line(&text, "IDS "), expected);
        }
    }
}

#[test]
fn the_stale_file_of_a_dead_job_is_ignored() {
    let agent = Agent::new();
    let vars = port(&agent);
    // A job whose rank 0 is killed while it waits for rank 1 leaves its file behind.
    let mut dead = rank("run", 0, 2, &vars);
    std::thread::sleep(Duration::from_millis(300));
    dead.kill().unwrap();
    dead.wait().unwrap();
    let late = rank("run", 1, 2, &vars);
    std::thread::sleep(Duration::from_millis(200));
    let job = vec![rank("run", 0, 2, &vars), late];
    let expected = ids(&job);
    for text in outputs(job) {
        assert_eq!(line(&text, "IDS "), expected);
    }
}

#[test]
fn ranks_of_our_launcher_inherit_the_arena() {
    let arena = Arena::create(2).unwrap();
    let vars = [(ARENA_FD, arena.fd().to_string())];
    let job: Vec<Child> = (0..2).map(|r| rank("run", r, 2, &vars)).collect();
    let expected = ids(&job);
    for text in outputs(job) {
        assert_eq!(line(&text, "IDS "), expected);
    }
}

#[test]
fn a_failing_process_ends_the_others_at_once() {
    let arena = Arena::create(3).unwrap();
    let vars = [(ARENA_FD, arena.fd().to_string())];
    let mut job: Vec<Child> = (0..3).map(|r| rank("fail", r, 3, &vars)).collect();
    assert_eq!(job.remove(1).wait().unwrap().code(), Some(3));
    for text in in_time(|| outputs(job)) {
        assert!(line(&text, "ERROR ").ends_with("rank 1 failed"), "{text}");
    }
}

#[test]
fn a_duplicate_rank_is_refused() {
    let arena = Arena::create(2).unwrap();
    let vars = [(ARENA_FD, arena.fd().to_string())];
    let mut first = rank("run", 0, 2, &vars);
    std::thread::sleep(Duration::from_millis(200));
    let output = rank("run", 0, 2, &vars).wait_with_output().unwrap();
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(line(&text, "JOIN ").contains("two processes claim to be rank 0"), "{text}");
}

#[test]
fn several_hosts_are_refused_with_the_reason() {
    let vars = [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
    let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    let env = RankEnv::read(&get).unwrap().unwrap();
    let e = ShmWorld::join(&env, Meter::default(), &ShmOptions::default()).map(|_| ()).unwrap_err();
    assert_eq!(e.exit_status(), 2);
    assert!(e.to_string().contains("2 of 4 ranks are on this host"), "{e}");
}
