//! Runs of the binaries as processes: start, follow by metrics, signal, kill. Never asserts what a test is about.
pub use super::agent::Agent;
pub use super::programs::{LAUNCHED, unlaunched};
pub use super::time::{self, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use tempfile::TempDir;

pub use super::binaries::{DDP, FSDP};

/// A rank of a world on one host as torchrun starts it; its agent listens on the port.
pub fn launched(command: &mut Command, rank: usize, world: usize, port: u16) -> &mut Command {
    launched_on(command, [rank, world], [rank, world], port)
}
/// A rank of a world, and its place among those of its host.
pub fn launched_on(command: &mut Command, place: [usize; 2], local: [usize; 2], port: u16) -> &mut Command {
    let numbers = [place, local].concat();
    command.envs(LAUNCHED.into_iter().zip(numbers.iter().map(usize::to_string)));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string())
}
/// A model of some milliseconds a step, on a task without files.
pub fn command(program: &str, args: &[&str]) -> Command {
    let mut command = unlaunched(program);
    if !args.contains(&"--dataset") {
        command.args(["--dataset", "synthetic"]);
    }
    let tiny = "--embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --batch-size 4 --log-every 1 \
                --warmup-steps 2 --lr 0.01";
    command.args(tiny.split(' ')).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}
/// A started run; killed when dropped.
pub struct Run(pub Child);

impl Run {
    pub fn start(program: &str, args: &[&str]) -> Run {
        Run(command(program, args).spawn().unwrap())
    }
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
    pub fn end(mut self) -> Ended {
        // Read while it runs: a full pipe would hold it up.
        let read = |mut pipe: Box<dyn Read + Send>| {
            std::thread::spawn(move || {
                let mut text = String::new();
                pipe.read_to_string(&mut text).map(|_| text).unwrap()
            })
        };
        let pipes = [read(Box::new(self.0.stdout.take().unwrap())), read(Box::new(self.0.stderr.take().unwrap()))];
        wait_until("the run ends", || self.0.try_wait().unwrap().is_some());
        let [stdout, stderr] = pipes.map(|text| text.join().unwrap());
        Ended { status: self.0.wait().unwrap(), stdout, stderr }
    }
    /// Process of each rank, in rank order.
    pub fn ranks(&self, n: usize) -> Vec<u32> {
        let mut ranks = Vec::new();
        wait_until("all ranks have started", || {
            ranks = (0..n)
                .filter_map(|rank| children(self.pid()).into_iter().find(|&p| rank_of(p) == Some(rank)))
                .collect();
            ranks.len() == n
        });
        ranks
    }
}
impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a run has taken `n` steps. Fails with what its processes printed, at once if one has ended.
#[track_caller]
pub fn wait_for_steps(n: usize, metrics: &Path, processes: &mut Vec<Run>) {
    time::done_in_time(|| steps(metrics) >= n || processes.iter().any(|run| dead(run.pid())));
    if steps(metrics) < n {
        processes.iter_mut().for_each(|run| run.0.kill().unwrap());
        let ended: Vec<_> = processes.drain(..).map(Run::end).collect();
        let printed: Vec<_> = ended.iter().map(|e| format!("{}: {}{}", e.status, e.stdout, e.stderr)).collect();
        panic!("no {n} steps:\n{}", printed.join("\n"));
    }
}

pub fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|p| p.parse().unwrap()).collect()
}
pub fn rank_of(pid: u32) -> Option<usize> {
    let environ = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let rank = environ.split(|&b| b == 0).find_map(|v| v.strip_prefix(b"RANK="))?;
    std::str::from_utf8(rank).ok()?.parse().ok()
}
/// Exited, or a zombie.
pub fn dead(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.rsplit(") ").next().unwrap().starts_with(['Z', 'X'])
}
pub fn send(signal: Signal, pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}
/// To those of them that have not ended.
pub fn send_all(signal: Signal, pids: &[u32]) {
    for &pid in pids {
        let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
    }
}
/// Asserts success, with the whole output in the message.
#[track_caller]
pub fn good(program: &str, args: &[&str]) -> Ended {
    let ended = Run::start(program, args).end();
    assert!(ended.status.success(), "{args:?}: {}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
    ended
}
pub fn events(path: &Path, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    // An incomplete last line is ignored.
    let lines = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    lines.filter(|e| e["event"] == name).collect()
}
pub fn steps(path: &Path) -> usize {
    events(path, "step").len()
}
/// Step, loss and gradient norm as written; the last ones of a repeated step.
pub fn losses(path: &Path) -> Vec<(u64, String, String)> {
    let mut out: Vec<(u64, String, String)> = Vec::new();
    for e in events(path, "step") {
        let step = e["step"].as_u64().unwrap();
        out.retain(|(s, ..)| *s != step);
        out.push((step, e["loss"].to_string(), e["grad_norm"].to_string()));
    }
    out.sort();
    out
}
/// A directory for one test, and paths in it as arguments.
pub struct Dir(pub TempDir);
impl Dir {
    pub fn new() -> Dir {
        Dir(TempDir::new().unwrap())
    }
    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }
    pub fn arg(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_string()
    }
}
