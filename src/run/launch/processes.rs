//! The built-in launcher: creates the shared-memory arena, starts one child per rank (the same executable), sends each
//! its [`RankJob`] and monitors them. No rank outlives it: the kernel kills each with its parent ([`follow_parent`]).
//! Never trains.
use super::job::RankJob;
use crate::base::{Error, Result};
use crate::comm::secret::Secret;
use crate::comm::shm::{Arena, ShmWatch};
use crate::comm::{env, nccl};
use crate::run::plan::ranks::RankPlan;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time for the other ranks to exit on their own after the first failure, and again after SIGTERM.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Lines of a rank's stderr that are kept for its failure message.
const TAIL: usize = 30;
/// How a panic begins, and how many of its lines, or of the last ones, are shown.
const PANIC: &str = "thread '";
const SAID: usize = 3;
/// An empty pipe is looked at this often, to see whether its rank has ended.
const IDLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Prefix of the line with a rank's error; the parent prints it, so the forwarded output leaves it out.
pub const FAILED: &str = "error: ";

/// Ignores SIGXFSZ, so that exceeding the file-size limit (ulimit -f) fails the write with an error that names the
/// file, instead of killing the process silently.
pub fn pass_over_file_sizes() -> Result<()> {
    let unused = Arc::new(AtomicBool::new(false));
    let registered = signal_hook::flag::register(SIGXFSZ, unused);
    registered.map(drop).map_err(|e| Error::Run(format!("signal handlers: {e}")))
}

/// Catches these signals. SIGHUP stays ignored if it is, as nohup has it.
pub fn catch(signals: &[i32]) -> Result<Signals> {
    let caught = signals.iter().filter(|&&signal| signal != SIGHUP || !hangups_are_ignored());
    Signals::new(caught).map_err(|e| Error::Run(format!("signal handlers: {e}")))
}

/// Whether this process was started with SIGHUP ignored, by /proc/self/status.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}

/// The ranks to start, and how to monitor them.
pub struct Launch<'a> {
    /// Ranks on this host.
    pub nproc: usize,
    pub ranks_per_gpu: usize,
    pub job: &'a RankJob,
    /// Interval at which ranks and signals are polled.
    pub poll: Duration,
    /// Forwarded to the ranks, which stop after the current step.
    pub signals: &'a [i32],
    /// When to send the ranks SIGTERM.
    pub deadline: Option<Instant>,
}

impl<'a> Launch<'a> {
    /// A launch of ranks that are started once and end by themselves, soon enough to look for that often.
    pub fn once(ranks: &RankPlan, job: &'a RankJob, signals: &'a [i32]) -> Launch<'a> {
        let RankPlan { nproc, ranks_per_gpu, .. } = *ranks;
        Launch { nproc, ranks_per_gpu, job, poll: Duration::from_millis(10), signals, deadline: None }
    }
}

/// In a child: makes it die with its parent, however that ends. `parent` is the process that started this one.
pub fn follow_parent(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|e| Error::Run(format!("prctl(PDEATHSIG): {e}")))?;
    // If the parent died before the call above, this process already has another parent.
    match getppid().is_some_and(|pid| pid.as_raw_nonzero().get() as u32 == parent) {
        true => Ok(()),
        false => Err(Error::Run("the launching process has exited".into())),
    }
}

struct RankProcess {
    child: Child,
    status: Option<ExitStatus>,
    /// The last lines of its stderr; empty if it writes to the terminal directly.
    tail: Arc<Mutex<VecDeque<String>>>,
    printers: Vec<JoinHandle<()>>,
    /// Set once it has ended, for the printers.
    ended: Arc<AtomicBool>,
}

/// Starts the ranks and returns when all have exited. The error is that of the first rank that failed.
pub fn run(launch: &Launch) -> Result<()> {
    let (nproc, mut deadline) = (launch.nproc, launch.deadline);
    let mut signals = catch(launch.signals)?;
    let arena = Arc::new(Arena::create(nproc)?);
    let watch = ShmWatch::new(arena.clone())?;
    let secret = Secret::make()?;
    let mut ranks = Ranks { ranks: Vec::new(), first_failed: None };
    for rank in 0..nproc {
        ranks.ranks.push(start(rank, launch, &arena, &secret)?);
    }
    let mut stopping = None;
    let mut failed_at: Option<Instant> = None;
    while ranks.running() {
        let late = deadline.take_if(|deadline| Instant::now() > *deadline).map(|_| SIGTERM);
        for signal in signals.pending().chain(late) {
            // The first signal is forwarded, and ranks stop after this step; a second one kills them.
            match stopping.replace(signal) {
                None => ranks.signal(Signal::from_named_raw(signal).unwrap_or(Signal::TERM)),
                Some(_) => ranks.signal(Signal::KILL),
            }
        }
        if let Some(rank) = ranks.reap()? {
            watch.abort(rank);
            failed_at = Some(Instant::now());
        }
        match failed_at.map(|at| at.elapsed()) {
            Some(since) if since > 2 * PATIENCE => ranks.signal(Signal::KILL),
            Some(since) if since > PATIENCE => ranks.signal(Signal::TERM),
            _ => {}
        }
        std::thread::sleep(launch.poll);
    }
    ranks.verdict(watch.failed(), stopping)
}

fn start(rank: usize, launch: &Launch, arena: &Arena, secret: &Secret) -> Result<RankProcess> {
    let &Launch { nproc: world, ranks_per_gpu, job, .. } = launch;
    let failed = |e| Error::Run(format!("cannot start rank {rank}: {e}"));
    let exe = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(exe);
    // Its own process group: Ctrl-C at the terminal reaches only the parent, which forwards it once. The arguments are
    // only for `ps`: a rank reads its job instead.
    command.args(std::env::args_os().skip(1)).process_group(0);
    let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)];
    command.envs(numbers.map(|(name, n)| (name, n.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "0");
    command.env(env::ARENA_FD, arena.fd().to_string()).env(env::PARENT_PID, std::process::id().to_string());
    command.env(env::JOB_SECRET, secret.reveal());
    if ranks_per_gpu > 1 {
        command.envs(nccl::shared_gpu(rank));
    }
    // Rank 0 may draw a progress bar; all other lines go through this process, so that none are interleaved.
    let bar = rank == 0 && std::io::stderr().is_terminal();
    let stdout = if rank == 0 { Stdio::inherit() } else { Stdio::piped() };
    command.stdin(Stdio::piped()).stdout(stdout).stderr(if bar { Stdio::inherit() } else { Stdio::piped() });
    let mut child = command.spawn().map_err(failed)?;
    if let Some(to) = child.stdin.take() {
        job.send(to)?;
    }
    let (tail, ended) = (Arc::new(Mutex::new(VecDeque::new())), Arc::new(AtomicBool::new(false)));
    let mut printers = Vec::new();
    let prefix = if rank == 0 { String::new() } else { format!("[rank {rank}] ") };
    if let Some(out) = child.stdout.take() {
        let (prefix, ended) = (prefix.clone(), ended.clone());
        printers.push(std::thread::spawn(move || {
            lines(out, &ended, |line| print(&mut std::io::stdout().lock(), &prefix, line));
        }));
    }
    if let Some(err) = child.stderr.take() {
        let (tail, ended) = (tail.clone(), ended.clone());
        printers.push(std::thread::spawn(move || {
            lines(err, &ended, |line| {
                remember(&mut tail.lock().unwrap_or_else(PoisonError::into_inner), line);
                if !line.starts_with(FAILED) {
                    print(&mut std::io::stderr().lock(), &prefix, line);
                }
            });
        }));
    }
    Ok(RankProcess { child, status: None, tail, printers, ended })
}

/// What a rank writes, up to its end: a program that it has started may hold the other end of the pipe for as long as
/// it likes.
struct RankOutput<'a, R> {
    pipe: R,
    ended: &'a AtomicBool,
}

impl<R: Read + AsFd> Read for RankOutput<'_, R> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        loop {
            let was_ended = self.ended.load(Ordering::Acquire); // before the look, so that its last words are seen
            match poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&IDLE)) {
                Ok(0) if was_ended => return Ok(0),
                Ok(0) | Err(Errno::INTR) => {}
                _ => return self.pipe.read(to),
            }
        }
    }
}

/// Calls `f` with each line, without its newline; the last line may lack one.
fn lines(pipe: impl Read + AsFd, ended: &AtomicBool, mut f: impl FnMut(&str)) {
    let mut from = BufReader::new(RankOutput { pipe, ended });
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        f(String::from_utf8_lossy(&line).trim_end_matches('\n'));
        line.clear();
    }
}

/// One write per line. A missing reader is not a failure.
fn print(to: &mut impl Write, prefix: &str, line: &str) {
    let _ = to.write_all(format!("{prefix}{line}\n").as_bytes());
}

struct Ranks {
    ranks: Vec<RankProcess>,
    first_failed: Option<usize>,
}

impl Ranks {
    fn running(&self) -> bool {
        self.ranks.iter().any(|r| r.status.is_none())
    }
    /// Signals all ranks that still run.
    fn signal(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|r| r.status.is_none()) {
            if let Some(pid) = Pid::from_raw(rank.child.id() as i32) {
                let _ = kill_process(pid, signal); // it may have exited meanwhile
            }
        }
    }
    /// Collects the status of ranks that have exited. Returns the first that failed, once.
    fn reap(&mut self) -> Result<Option<usize>> {
        let before = self.first_failed;
        for (rank, r) in self.ranks.iter_mut().enumerate().filter(|(_, r)| r.status.is_none()) {
            r.status = r.child.try_wait().map_err(|e| Error::Run(format!("cannot wait for rank {rank}: {e}")))?;
            let Some(status) = r.status else { continue };
            // A killed rank is a better cause than an error, which may only follow from a peer's death.
            let worse = status.signal().is_some() && before.is_none();
            let failed = !status.success() && stopped_by(status).is_none();
            if failed && (self.first_failed.is_none() || worse) {
                self.first_failed = Some(rank);
            }
        }
        Ok(if before.is_none() { self.first_failed } else { None })
    }
    /// `aborted`: the first rank that aborted its peers; `stopping`: the signal that asked this run to stop.
    fn verdict(&mut self, aborted: Option<usize>, stopping: Option<i32>) -> Result<()> {
        self.ranks.iter().for_each(|rank| rank.ended.store(true, Ordering::Release));
        for printer in self.ranks.iter_mut().flat_map(|r| r.printers.drain(..)) {
            let _ = printer.join(); // a panic there loses lines, not the run
        }
        let Some(seen) = self.first_failed else {
            let stopped = self.ranks.iter().find_map(|r| stopped_by(r.status?));
            return stopped.map_or(Ok(()), |signal| Err(Error::Signal(signal)));
        };
        let errors: Vec<String> =
            self.ranks.iter().map(|r| last_error(&r.tail.lock().unwrap_or_else(PoisonError::into_inner))).collect();
        let killed = self.ranks[seen].status.is_some_and(|s| s.signal().is_some());
        if let (true, Some(signal)) = (killed, stopping) {
            return Err(Error::Signal(signal)); // it arrived before that rank's handler was set, or twice
        }
        let first = if killed { seen } else { aborted.unwrap_or(seen) };
        let rank = blamed(&errors[first]).filter(|&r| errors.get(r).is_some_and(|e| !e.is_empty())).unwrap_or(first);
        let text = errors[rank].clone();
        let status = self.ranks[rank].status.unwrap_or_default();
        if let Some(signal) = status.signal() {
            let oom = if signal == 9 { " (the kernel does this when memory runs out)" } else { "" };
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
            let after = if text.is_empty() { String::new() } else { format!("; its last output: {text}") };
            return Err(Error::Run(format!("rank {rank} was killed by signal {signal}, {name}{oom}{after}")));
        }
        Err(match status.code() {
            Some(2) => Error::Input(text),
            code => {
                let text = if text.is_empty() { "see its output above".to_string() } else { text };
                Error::Run(format!("rank {rank} failed with exit status {}: {text}", code.unwrap_or(1)))
            }
        })
    }
}

impl Drop for Ranks {
    /// Kills ranks that still run because the parent itself failed.
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for rank in &mut self.ranks {
            let _ = rank.child.wait();
        }
    }
}

/// The signal that a rank stopped for in an orderly way: exit status 128 + n.
fn stopped_by(status: ExitStatus) -> Option<i32> {
    status.code().filter(|code| (129..=159).contains(code)).map(|code| code - 128)
}

/// The rank whose failure an error only reports: "rank 1 failed", "rank 1 could not ...".
fn blamed(error: &str) -> Option<usize> {
    error.match_indices("rank ").find_map(|(at, _)| {
        let (number, rest) = error[at + 5..].split_once(' ')?;
        (rest.starts_with("failed") || rest.starts_with("could not")).then(|| number.parse().ok()).flatten()
    })
}

/// Adds a line to the last ones. A panic's first lines stay, however long a backtrace follows.
fn remember(tail: &mut VecDeque<String>, line: &str) {
    if line.starts_with(PANIC) {
        tail.clear();
    }
    if tail.len() == TAIL {
        let panicked = tail.front().is_some_and(|first| first.starts_with(PANIC));
        tail.remove(if panicked { SAID } else { 0 });
    }
    tail.push_back(line.to_string());
}

/// The error line of a rank, or its panic, or its last lines.
fn last_error(tail: &VecDeque<String>) -> String {
    if let Some(line) = tail.iter().rev().find_map(|l| l.strip_prefix(FAILED)) {
        return line.to_string();
    }
    let panic = tail.iter().rposition(|l| l.starts_with(PANIC)).unwrap_or(tail.len().saturating_sub(SAID));
    let words: Vec<&str> = tail
        .iter()
        .skip(panic)
        .take(SAID)
        .map(|l| l.trim())
        .filter(|l| !l.is_empty() && *l != "stack backtrace:")
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_backtrace_hides_neither_a_panic_nor_what_follows() {
        let mut tail = VecDeque::new();
        let lines = ["step 1", "thread 'main' (7) panicked at a.rs:1:2:", "index out of range", "stack backtrace:"];
        lines.iter().for_each(|line| remember(&mut tail, line));
        (0..100).for_each(|i| remember(&mut tail, &format!("  {i}: call_once")));
        assert_eq!(last_error(&tail), "thread 'main' (7) panicked at a.rs:1:2: index out of range");
        remember(&mut tail, "error: no room");
        assert_eq!((last_error(&tail).as_str(), tail.len()), ("no room", TAIL));
    }
}
