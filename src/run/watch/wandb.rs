//! `--wandb-project`: W&B's own package logs the run from its metrics file, in a separate process that runs
//! `scripts/wandb_follow.py`. It starts before the ranks, so that a missing package or login is an error before
//! training. Never delays or fails the run after that.
//!
//! Its standard input carries the job first and the run's exit status last. End of file without a status means that the
//! process that started it was killed, and the run failed.
use super::log::RunLog;
use super::scalars;
use crate::base::{Error, Result, printable};
use crate::run::plan::Plan;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::Metadata;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SCRIPT: &str = include_str!("../../../scripts/wandb_follow.py");
/// Without the current directory in the package path: W&B keeps its files in a directory named wandb.
const BOOT: &str = "import json, sys; sys.path[:] = filter(None, sys.path); job = json.loads(sys.stdin.readline()); \
                    space = {'__name__': 'wandb_follow', '__file__': 'scripts/wandb_follow.py'}; \
                    exec(compile(job['script'], 'wandb_follow.py', 'exec'), space); sys.exit(space['serve'](job))";
/// W&B gives up after 90 s without its server.
const START: Duration = Duration::from_secs(150);
/// After the run: what is not sent by then stays in W&B's local files.
const FINISH: Duration = Duration::from_secs(60);
/// Name of the file next to the checkpoints that holds the id of the run in W&B.
const RUN_ID: &str = "wandb-run-id";
const LATER: &str = "remove the flag and log the run later with scripts/wandb_follow.py";

pub struct Follower {
    child: Child,
    line: ChildStdin,
    /// The command that logs the run again if this process fails.
    remedy: String,
}

/// Its answer before the run starts.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum FollowerAnswer {
    /// The run's id.
    Ready(String),
    /// The package cannot be imported.
    Missing(String),
    /// W&B refuses the run.
    Refused(String),
}

impl Follower {
    /// None without a project. Returns when W&B accepts the run; an input error if it does not.
    pub fn start(plan: &Plan, log: &RunLog) -> Result<Option<Follower>> {
        let (wandb, metrics) = (&plan.settings.wandb, &plan.settings.run.metrics_path);
        let (Some(project), Some(metrics)) = (wandb.project(), metrics) else { return Ok(None) };
        let refused = |what: String| Error::input(format!("--wandb-project {project}: {what}"));
        let mut command = Command::new("python3");
        // Its own process group: a Ctrl-C at the terminal is for the run, which it outlives.
        command.args(["-c", BOOT]).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|e| match e.kind() {
            ErrorKind::NotFound => refused(format!(
                "python3 is not in PATH, and W&B's own package runs in it. Install Python and its package wandb, or {LATER}"
            )),
            _ => refused(format!("python3 does not start: {e}")),
        })?;
        let (Some(mut line), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::op("wandb", "no pipes"));
        };
        // One that ends at once says why on its standard error, and has no answer.
        let _ = writeln!(line, "{}", job(plan, project));
        let (tell, answer) = mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = BufReader::new(answers).read_line(&mut text);
            tell.send(text)
        });
        let remedy = format!("python3 scripts/wandb_follow.py {} --project {project}", metrics.display());
        let mut follower = Follower { child, line, remedy };
        let answer = answer.recv_timeout(START).map(|text| serde_json::from_str(&text));
        let shown = |text: &str| printable(text.lines().next().unwrap_or_default().trim_end_matches('.'), 300);
        let what = match answer {
            Ok(Ok(FollowerAnswer::Ready(id))) => {
                log.info(format_args!("W&B: run {} of project {project}", shown(&id)));
                return Ok(Some(follower));
            }
            Ok(Ok(FollowerAnswer::Missing(why))) => {
                format!("python3 cannot import W&B's package ({}). Run `pip install wandb`, or {LATER}", shown(&why))
            }
            Ok(Ok(FollowerAnswer::Refused(why))) => format!(
                "W&B refused the run: {}. Run `wandb login`, or keep the run for later with --wandb-mode offline",
                shown(&why)
            ),
            Ok(Err(_)) => {
                format!("python3 ended before W&B accepted the run. Try `python3 -c 'import wandb'`, or {LATER}")
            }
            Err(_) => format!(
                "W&B did not answer within {} s. Keep the run for later with --wandb-mode offline",
                START.as_secs()
            ),
        };
        follower.kill();
        Err(refused(what))
    }

    /// The run has ended. Returns when W&B has all of it, or after `FINISH`.
    pub fn end(self, result: &Result<()>, log: &RunLog) {
        let Follower { mut child, mut line, remedy } = self;
        let code = result.as_ref().map_or_else(Error::exit_status, |()| 0);
        let _ = writeln!(line, "{code}"); // one that is gone is seen below
        drop(line);
        let deadline = Instant::now() + FINISH;
        let what = loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return,
                Ok(Some(status)) => break format!("the process that sends the run failed ({status})"),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                Ok(None) => break format!("not everything was sent within {} s", FINISH.as_secs()),
                Err(e) => break e.to_string(),
            }
        };
        log.warn(format_args!("W&B: {what}. Send W&B's own files with `wandb sync`, or log the run again: {remedy}"));
        let _ = child.kill();
        let _ = child.wait();
    }

    fn kill(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

/// Input of the script's `serve`.
fn job(plan: &Plan, project: &str) -> Value {
    let s = &plan.settings;
    let (w, metrics) = (&s.wandb, s.run.metrics_path.as_deref());
    let there = metrics.and_then(|path| path.metadata().ok()).filter(|there| there.len() > 0);
    // The same question as that of [`super::metrics::Metrics::open`]: an earlier run's file makes room for a new one.
    let resumed = plan.resume.as_ref().is_some_and(|resume| resume.state.step > 0);
    let goes_on = resumed || s.run.after.is_some();
    let stage = s.run.stage.as_deref();
    let name = w.wandb_name.as_deref().map(|name| stage.map_or(name.into(), |stage| format!("{name}-{stage}")));
    json!({
        "script": SCRIPT,
        "table": scalars::TABLE,
        "metrics": metrics,
        "skip": there.as_ref().filter(|_| goes_on).map_or(0, Metadata::len),
        "earlier": there.as_ref().filter(|_| !goes_on).map(MetadataExt::ino),
        "run_id": s.checkpoint.ckpt_dir.as_ref().map(|dir| dir.join(RUN_ID)),
        "resumed": resumed,
        "init": {
            "project": project,
            "entity": w.wandb_entity,
            "name": name,
            "group": w.wandb_group,
            "tags": w.wandb_tags,
            "mode": w.wandb_mode,
            "dir": w.wandb_dir,
            "job_type": stage,
        },
    })
}
