//! A training run and its processes: starts it, restarts it with `--resume auto`, finds and signals its ranks. Never
//! decides what happens to it.
use super::follow::Follow;
use flatshard::base::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// A training run, and how it is started.
pub struct Training {
    /// Program and flags.
    pub command: Vec<String>,
    pub log: PathBuf,
    child: Option<Child>,
    pub follow: Follow,
    /// How often it was started.
    pub starts: u32,
    /// Processes that were seen to belong to it and have not been seen dead.
    seen: Vec<Process>,
}

/// One process, immune to reuse of its pid.
pub struct Process {
    pub pid: u32,
    id: Pid,
    fd: OwnedFd,
}

impl Process {
    /// The child `pid` of `parent`; None if it is gone.
    fn child_of(parent: u32, pid: u32) -> Option<Process> {
        let id = Pid::from_raw(pid as i32)?;
        let fd = pidfd_open(id, PidfdFlags::empty()).ok()?;
        // Open the descriptor first: if the pid had been reused, the parent would differ.
        (parent_of(pid)? == parent).then_some(Process { pid, id, fd })
    }
    pub fn id(&self) -> Pid {
        self.id
    }
    /// The process may just have exited.
    pub fn send(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.fd, signal);
    }
    /// The descriptor becomes readable when the process ends (man pidfd_open).
    pub fn is_dead(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

impl Training {
    pub fn new(command: Vec<String>, metrics: PathBuf, log: PathBuf) -> Training {
        let follow = Follow::new(metrics, log.clone());
        Training { command, log, child: None, follow, starts: 0, seen: Vec::new() }
    }

    /// Starts the run; its output is appended to the log.
    pub fn start(&mut self) -> Result<()> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log);
        let log = log.map_err(|e| Error::io("open", &self.log, e))?;
        let again = log.try_clone().map_err(|e| Error::io("open", &self.log, e))?;
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null()).stdout(log).stderr(again);
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
            command.env_remove(variable);
        }
        let child = command.spawn().map_err(|e| Error::io("start", &self.command[0], e))?;
        let pid = child.id();
        self.child = Some(child);
        self.starts += 1;
        self.seen.extend(Process::child_of(std::process::id(), pid));
        Ok(())
    }

    /// The launcher's exit status, reported once.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let Some(child) = &mut self.child else { return Ok(None) };
        let status = child.try_wait().map_err(|e| Error::io("wait for", &self.command[0], e))?;
        if status.is_some() {
            self.child = None;
        }
        Ok(status)
    }
    pub fn send_launcher(&self, signal: Signal) {
        if let Some(launcher) = self.child.as_ref().and_then(|c| self.seen.iter().find(|p| p.pid == c.id())) {
            launcher.send(signal);
        }
    }

    /// The living ranks in rank order, once all are running.
    pub fn all_ranks(&mut self) -> Option<Vec<Process>> {
        let launcher = self.child.as_ref()?.id();
        let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).ok()?;
        let of_rank = |pid: u32| Some((place_of(pid)?, Process::child_of(launcher, pid)?));
        let mut ranks: Vec<_> = children.split_whitespace().filter_map(|pid| of_rank(pid.parse().ok()?)).collect();
        ranks.retain(|(_, process)| !process.is_dead());
        ranks.sort_by_key(|(place, _)| *place);
        for (_, process) in &ranks {
            if !self.seen.iter().any(|p| p.pid == process.pid) {
                self.seen.extend(Process::child_of(launcher, process.pid));
            }
        }
        let all = ranks.iter().map(|((rank, _), _)| *rank).eq(0..ranks.first()?.0.1);
        all.then(|| ranks.into_iter().map(|(_, process)| process).collect())
    }

    /// Processes of earlier starts that are still alive.
    pub fn alive(&mut self) -> Vec<u32> {
        self.seen.retain(|process| !process.is_dead());
        self.seen.iter().map(|process| process.pid).collect()
    }
}

impl Drop for Training {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Its ranks die with it.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Processes with `path` among their arguments.
pub fn using(path: &Path) -> Vec<u32> {
    let path = path.as_os_str().as_encoded_bytes();
    let uses = |pid: &u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|&b| b == 0).any(|argument| argument == path)
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(uses).collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // State and parent follow the name, which may hold spaces and ends with the last parenthesis (man proc_pid_stat).
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Rank and world size, from its environment.
fn place_of(pid: u32) -> Option<(usize, usize)> {
    let environ = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let number = |name: &str| {
        let value = environ.split(|&b| b == 0).find_map(|v| v.strip_prefix(name.as_bytes()))?;
        std::str::from_utf8(value).ok()?.parse().ok()
    };
    Some((number("RANK=")?, number("WORLD_SIZE=")?))
}
