//! `watch RUN.jsonl...`: serves the page of `analyze` to a browser while runs train. Reads metrics files, half-written
//! ones too; never writes one.
use crate::curve::{Curve, METRICS};
use crate::page::{self, ShownRun, TraceLink};
use crate::serve::{Guard, PageReply, PageRequest, serve};
use crate::summary::RunRow;
use crate::tail::Tail;
use crate::verdict::Verdict;
use crate::{job, text_log};
use flatshard::base::{Error, Result, hex};
use flatshard::comm::secret::random;
use flatshard::run::watch::progress::duration;
use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Serve a live page of runs: loss curves, speed, memory and traces, while they train
///
/// Prints the page's address and serves until Ctrl-C. To watch a run of another machine from here, forward the port:
/// ssh -L 8321:127.0.0.1:8321 HOST
#[derive(clap::Args)]
pub struct WatchArgs {
    /// Metrics files (--metrics-path of a run), directories of a run, or directories of runs; may appear later
    #[arg(required = true, value_name = "RUN.jsonl")]
    runs: Vec<PathBuf>,
    /// Address to listen on. Any other than the loopback's needs the token in the printed URL
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    bind: IpAddr,
    /// TCP port; 0: any free one
    #[arg(long, default_value_t = 8321, value_name = "PORT")]
    port: u16,
    /// The run that the others are compared with [default: the first that has a step]
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// First steps of each run that are not timed
    #[arg(long, default_value_t = 2, value_name = "N")]
    warmup: usize,
}

/// A run whose file stays the same for longer is marked.
const SILENT: Duration = Duration::from_secs(60);
/// The least time between two reads of the files, however many pages are open.
const FRESH: Duration = Duration::from_millis(200);
/// Per run: the latest.
const MOST_TRACES: usize = 4;

pub fn main(args: &WatchArgs) -> Result<Verdict> {
    let at = (args.bind, args.port);
    let busy = |e| Error::input(format!("--bind {} --port {}: {e}; --port 0 takes any free port", at.0, at.1));
    let listener = TcpListener::bind(at).map_err(busy)?;
    let port = listener.local_addr().map_err(busy)?.port();
    let mut signals = job::stop_signals()?;
    let guard = Guard { token: if args.bind.is_loopback() { None } else { Some(secret()?) } };
    for path in args.runs.iter().filter(|path| !path.exists()) {
        eprintln!("note: {} does not exist yet", path.display());
    }
    let host = match args.bind {
        any if any.is_unspecified() => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        IpAddr::V6(address) => format!("[{address}]"),
        address => address.to_string(),
    };
    let query = guard.token.as_ref().map_or(String::new(), |token| format!("?token={token}"));
    println!("http://{host}:{port}/{query}");
    let watched = Mutex::new(WatchList::new(args));
    // This thread ends with the process.
    std::thread::spawn(move || {
        serve(&listener, guard, move |request| {
            // A panic in another answer left at worst an old state, which the next refresh replaces.
            watched.lock().unwrap_or_else(PoisonError::into_inner).answer(request)
        })
    });
    Ok(Verdict::Stopped(signals.forever().next().unwrap_or(signal_hook::consts::SIGINT)))
}

/// 128 random bits, in hex.
fn secret() -> Result<String> {
    let bytes: [u8; 16] = random().map_err(|e| Error::op("random bytes for the token", e.to_string()))?;
    Ok(hex(&bytes))
}

struct WatchList {
    paths: Vec<PathBuf>,
    baseline: Option<String>,
    warmup: usize,
    /// In the order in which they appeared: a page knows a run by its index.
    runs: Vec<WatchedRun>,
    /// Part of each version, so that a page left open by an earlier server gets everything anew.
    started: u128,
    refreshed: Option<Instant>,
}

struct WatchedRun {
    name: String,
    tail: Tail,
    /// The generation of the file that `curve` was read from.
    generation: u64,
    curve: Curve,
    row: Option<RunRow>,
    /// Lines that are not events: of another program, or cut off.
    unreadable: usize,
    /// Why the file cannot be read.
    fault: Option<String>,
    version: u64,
    traces: BTreeMap<PathBuf, TraceLink>,
}

impl WatchList {
    fn new(args: &WatchArgs) -> WatchList {
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_millis());
        let (paths, baseline) = (args.runs.clone(), args.baseline.clone());
        WatchList { paths, baseline, warmup: args.warmup, runs: vec![], started, refreshed: None }
    }

    fn answer(&mut self, request: &PageRequest) -> PageReply {
        self.refresh();
        match request.path.split('/').skip(1).collect::<Vec<_>>()[..] {
            [""] => PageReply::of("text/html; charset=utf-8", page::html(&self.view(""), true)),
            ["data"] => {
                let mut view = self.view(request.value("have"));
                view["live"] = true.into();
                PageReply::of("application/json", view.to_string())
            }
            ["trace", run, file] => self.trace(run, file).unwrap_or_else(missing),
            _ => missing(),
        }
    }

    fn refresh(&mut self) {
        if self.refreshed.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        self.refreshed = Some(Instant::now());
        for path in self.paths.iter().flat_map(|path| files(path)) {
            if self.runs.iter().all(|run| run.tail.path() != path) {
                let name = name(&path);
                let taken = self.runs.iter().any(|run| run.name == name);
                self.runs.push(WatchedRun::new(if taken { path.display().to_string() } else { name }, path));
            }
        }
        for run in &mut self.runs {
            run.refresh(self.warmup);
        }
    }

    /// `have`: the versions that the page has, in the order of the runs.
    fn view(&self, have: &str) -> serde_json::Value {
        let rows = || self.runs.iter().filter_map(|run| run.row.as_ref());
        let named = self.baseline.as_ref().and_then(|name| rows().find(|row| row.name == *name));
        let mut have = have.split(',');
        let shown: Vec<ShownRun> = self
            .runs
            .iter()
            .enumerate()
            .map(|(n, run)| {
                let version = format!("{:x}.{}", self.started, run.version);
                let known = have.next() == Some(&version);
                let (status, badge) = run.state();
                let message = run.fault.as_deref().or(run.curve.error.as_deref()).unwrap_or(match status {
                    "waiting" => "no step yet",
                    _ => "",
                });
                let traces = if known { vec![] } else { run.links(n) };
                ShownRun { name: &run.name, row: run.row.as_ref(), status, badge, message, traces, version, known }
            })
            .collect();
        page::view("Training runs", &shown, named.or(rows().next()), self.warmup)
    }

    /// Serves only files that a run named and that are traces.
    fn trace(&self, run: &str, file: &str) -> Option<PageReply> {
        let run = self.runs.get(run.parse::<usize>().ok()?)?;
        let (path, _) = run.traces.iter().nth(file.parse().ok()?).filter(|(_, link)| link.is_drawn())?;
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Some(PageReply { file: name, ..PageReply::of("application/json", fs::read(path).ok()?) })
    }
}

fn missing() -> PageReply {
    PageReply::refused("404 Not Found", "There is no such page.")
}

/// Metrics files at a path: the file itself, the one of a run's directory, or those of a directory of runs.
fn files(path: &Path) -> Vec<PathBuf> {
    let own = path.join(METRICS);
    match path.is_dir() {
        false => vec![path.to_path_buf()],
        true if own.is_file() => vec![own],
        true => {
            let entries = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
            let inside = |entry: PathBuf| match entry.is_dir() {
                true => Some(entry.join(METRICS)).filter(|file| file.is_file()),
                false => Some(entry).filter(|file| file.extension().is_some_and(|e| e == "jsonl")),
            };
            let mut found: Vec<PathBuf> = entries.filter_map(inside).collect();
            found.sort();
            found
        }
    }
}

/// The directory's name if the file's own says nothing.
fn name(path: &Path) -> String {
    let last = |part: Option<&std::ffi::OsStr>| part.map(|part| part.to_string_lossy().into_owned());
    let dir = || last(std::path::absolute(path).ok()?.parent()?.file_name());
    let named = if path.file_name().is_some_and(|name| name == METRICS) { dir() } else { last(path.file_stem()) };
    named.unwrap_or_else(|| path.display().to_string())
}

impl WatchedRun {
    fn new(name: String, path: PathBuf) -> WatchedRun {
        WatchedRun {
            name,
            generation: 0,
            curve: Curve { path: path.clone(), ..Curve::default() },
            tail: Tail::new(path),
            row: None,
            unreadable: 0,
            fault: None,
            version: 0,
            traces: BTreeMap::new(),
        }
    }

    fn refresh(&mut self, warmup: usize) {
        let lines = match self.tail.lines() {
            Ok(lines) => lines,
            Err(e) => return self.fault = Some(e.to_string()),
        };
        self.fault = None;
        if self.generation != self.tail.generation() {
            self.generation = self.tail.generation();
            self.curve = Curve { path: self.tail.path().to_path_buf(), ..Curve::default() };
            (self.unreadable, self.version) = (0, self.version + 1);
        }
        if lines.is_empty() {
            return;
        }
        for line in lines.iter().filter(|line| !line.trim().is_empty()) {
            self.unreadable += usize::from(self.curve.feed(line).is_err());
        }
        // Another program's log, with steps and losses in its lines.
        if self.curve.header.world_size.is_none() && self.unreadable > 0 {
            for (step, loss) in text_log::losses(&lines.join("\n")) {
                let loss = Some(loss).filter(|loss| loss.is_finite());
                self.curve.steps.insert(step, crate::curve::StepMetrics { step, loss, ..Default::default() });
            }
        }
        let row = || RunRow::of(self.name.clone(), vec![self.curve.clone()], warmup);
        self.row = (!self.curve.steps.is_empty()).then(row);
        let paths = self.row.as_ref().map_or(vec![], page::traces);
        for path in paths.into_iter().rev().take(MOST_TRACES) {
            let link = || TraceLink::of(&path, String::new());
            self.traces.entry(path.clone()).or_insert_with(link);
        }
        self.version += 1;
    }

    fn links(&self, run: usize) -> Vec<TraceLink> {
        let drawn = self.traces.values().enumerate().filter(|(_, link)| link.is_drawn());
        drawn.map(|(n, link)| link.at(format!("trace/{run}/{n}"))).collect()
    }

    /// Its status, and the text shown after its name.
    fn state(&self) -> (&'static str, String) {
        let done = self.curve.last();
        let silent = || {
            let changed = self.tail.path().metadata().and_then(|m| m.modified()).ok()?;
            changed.elapsed().ok().filter(|silent| *silent > SILENT)
        };
        let silence =
            silent().map_or(String::new(), |time| format!(", no new line for {}", duration(time.as_secs_f64())));
        if let Some(message) = &self.curve.error {
            return ("failed", format!("failed after step {done}: {message}"));
        }
        if self.row.is_none() {
            return ("waiting", format!("waiting{silence}"));
        }
        if self.curve.ended {
            return ("done", format!("done, {done} step{}", if done == 1 { "" } else { "s" }));
        }
        let of = self.curve.header.config["run"]["max_steps"].as_u64().filter(|&of| of >= done);
        let left = of.zip(self.row.as_ref().and_then(|row| row.step_time_s));
        let left = left
            .filter(|_| silence.is_empty())
            .map(|(of, time)| format!(", {} left", duration((of - done) as f64 * time)));
        let of = of.map_or(String::new(), |of| format!(" of {of}"));
        ("running", format!("step {done}{of}{}{silence}", left.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_runs() {
        assert_eq!(
            (name(Path::new("a/b/metrics.jsonl")), name(Path::new("x/run1.jsonl"))),
            ("b".into(), "run1".into())
        );
    }
}
