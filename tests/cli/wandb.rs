//! `--wandb-project` with a stand-in for the wandb package that records its calls. `scripts/watch_check.sh` uses the
//! real one.

use crate::common::runs::*;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

const PACKAGE: &str = r#"
import json, os
def tell(**what):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps(what) + "\n")
class Config:
    def update(self, values, allow_val_change=False):
        tell(call="config", values=values)
class Summary:
    def __setitem__(self, name, value):
        tell(call="summary", name=name, value=value)
class Run:
    config, summary = Config(), Summary()
    def log(self, values, step):
        tell(call="log", step=step, values=values)
    def finish(self, exit_code):
        tell(call="finish", exit_code=exit_code)
def init(**arguments):
    tell(call="init", arguments=arguments, mode=os.environ.get("WANDB_MODE"))
    if "REFUSES" in os.environ:
        raise RuntimeError("No API key configured.\nMore.")
    run = Run()
    run.id = arguments.get("id", "made-up")
    return run
"#;

/// A directory with the stand-in package and its recorded calls.
struct Client(Dir);
impl Client {
    /// `None` on a machine without Python.
    fn new() -> Option<Client> {
        if Command::new("python3").arg("--version").output().is_err() {
            println!("skipped: there is no python3");
            return None;
        }
        let dir = Dir::new();
        fs::write(dir.path("wandb.py"), PACKAGE).unwrap();
        fs::create_dir(dir.path("runs")).unwrap();
        Some(Client(dir))
    }
    fn command(&self, args: &[&str]) -> Command {
        let few = ["--no-eval", "--no-sample", "--wandb-project", "ours"];
        let mut command = command(FSDP, &[&few, args].concat());
        command.current_dir(self.0.path("runs")).env("PYTHONPATH", self.0.path("")).env("CALLS", self.0.path("calls"));
        for name in ["WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID"] {
            command.env_remove(name);
        }
        command
    }
    fn start(&self, args: &[&str]) -> Run {
        Run(self.command(args).spawn().unwrap())
    }
    fn calls(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.0.path("calls")).unwrap_or_default();
        let calls = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        calls.filter(|call| call["call"] == name).collect()
    }
    fn logged(&self) -> Vec<u64> {
        self.calls("log").iter().map(|call| call["step"].as_u64().unwrap()).collect()
    }
    /// W&B was not called, and the run left no files.
    #[track_caller]
    fn nothing_began(&self, ended: Ended, says: &str) {
        assert!(ended.status.code() == Some(2) && ended.stderr.contains(says), "{}: {}", ended.status, ended.stderr);
        let left: Vec<_> = fs::read_dir(self.0.path("runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.iter().all(|path| path.is_dir() && fs::read_dir(path).unwrap().count() == 0), "{left:?}");
    }
}

#[test]
fn a_run_is_logged_and_resumes_as_the_same_run() {
    let Some(client) = Client::new() else { return };
    let args =
        ["--ckpt-dir", "ckpt", "--wandb-name", "first", "--wandb-tags", "a", "b", "--lr", "0.005", "--max-steps"];
    let first = client.command(&[&args[..], &["3"]].concat()).env("WANDB_MODE", "offline").output().unwrap();
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let init = &client.calls("init")[0];
    let arguments = json!({"project": "ours", "name": "first", "tags": ["a", "b"]});
    assert_eq!((&init["arguments"], &init["mode"]), (&arguments, &json!("offline")));
    let config = &client.calls("config")[0]["values"];
    assert_eq!((&config["optim"]["lr"], &config["run_event"]["world_size"]), (&json!(0.005), &json!(2)));
    let steps = events(&client.0.path("runs/ckpt/metrics.jsonl"), "step");
    let logs: Vec<Value> =
        client.calls("log").into_iter().filter(|call| call["values"].get("train/loss").is_some()).collect();
    assert_eq!((steps.len(), logs.len()), (3, 3));
    for (step, log) in steps.iter().zip(&logs) {
        assert_eq!((&log["step"], &log["values"]["train/loss"]), (&step["step"], &step["loss"]));
    }
    assert_eq!(client.calls("finish"), [json!({"call": "finish", "exit_code": 0})]);
    // Resumed with the id that W&B generated, without the steps that are already in the file.
    fs::remove_file(client.0.path("calls")).unwrap();
    assert!(client.start(&[&args[..], &["5", "--resume", "auto"]].concat()).end().status.success());
    let init = &client.calls("init")[0]["arguments"];
    assert_eq!((&init["id"], &init["resume"]), (&json!("made-up"), &json!("allow")));
    assert_eq!((client.logged().first(), client.logged().last()), (Some(&4), Some(&5)));
    assert_eq!(client.calls("finish").len(), 1);
}

#[test]
fn a_failed_run_a_stopped_one_and_a_killed_one_are_marked() {
    let Some(client) = Client::new() else { return };
    let endless = ["--max-steps", "1000000", "--log-level", "error", "--metrics-path", "m.jsonl"];
    let ends = |what: &str, run: Run, code: i64| {
        wait_until(&format!("{what}: W&B's run is finished"), || !client.calls("finish").is_empty());
        assert_eq!(client.calls("finish")[0]["exit_code"], code, "{what}");
        drop(run);
        fs::remove_file(client.0.path("calls")).unwrap();
    };
    let diverging = ["--lr", "1e30", "--warmup-steps", "0", "--max-bad-steps", "1", "--max-steps", "9"];
    let run = client.start(&diverging);
    wait_until("it fails", || !client.calls("summary").is_empty());
    let error = client.calls("summary")[0]["value"].as_str().unwrap().to_string();
    assert!(error.contains("non-finite"), "{error}");
    ends("failed", run, 1);
    for (what, signal, code) in [("stopped", Signal::TERM, 143), ("killed", Signal::KILL, 1)] {
        let run = client.start(&endless);
        wait_until("3 steps", || client.logged().len() >= 3);
        send(signal, run.pid());
        ends(what, run, code);
    }
    // Nothing from an earlier run's file, which was moved away, is logged again.
    let restarted = client.start(&["--max-steps", "2", "--metrics-path", "m.jsonl"]).end();
    assert!(restarted.status.success(), "{}", restarted.stderr);
    assert_eq!(client.logged(), [1, 2]);
}

#[test]
fn missing_packages_are_reported_before_anything_starts() {
    let Some(client) = Client::new() else { return };
    let refuses = client.command(&["--max-steps", "1"]).env("REFUSES", "1").spawn().unwrap();
    client.nothing_began(
        Run(refuses).end(),
        "--wandb-project ours: W&B refused the run: No API key configured. Run `wandb login`, or keep the run",
    );
    let nowhere = client.command(&["--max-steps", "1"]).env("PATH", client.0.path("")).spawn().unwrap();
    client.nothing_began(Run(nowhere).end(), "--wandb-project ours: python3 is not in PATH");
    fs::write(client.0.path("wandb.py"), "raise ImportError(\"No module named 'wandb'\")").unwrap();
    let missing =
        "python3 cannot import W&B's package (No module named 'wandb'). Run `pip install wandb`, or remove the flag";
    client.nothing_began(client.start(&["--max-steps", "1"]).end(), missing);
    // A directory that W&B itself creates is not a package.
    fs::remove_file(client.0.path("wandb.py")).unwrap();
    fs::create_dir(client.0.path("wandb")).unwrap();
    client.nothing_began(client.start(&["--max-steps", "1"]).end(), "Run `pip install wandb`");
    client.nothing_began(
        client.start(&["--max-steps", "1", "--metrics-path", "/dev/null"]).end(),
        "--metrics-path /dev/null: --wandb-project reads the metrics from a regular file",
    );
}

#[test]
fn flags_without_a_project_are_refused_and_a_disabled_one_needs_no_package() {
    for (flag, value) in [("--wandb-tags", "a"), ("--wandb-mode", "offline"), ("--wandb-dir", "d")] {
        let ended = Run::start(FSDP, &["--max-steps", "1", flag, value]).end();
        let says = "no effect here: nothing is logged to W&B; remove it, or use --wandb-project NAME";
        assert!(ended.status.code() == Some(2) && ended.stderr.contains(says), "{}", ended.stderr);
    }
    let args = ["--max-steps", "1", "--no-eval", "--no-sample", "--wandb-project", "p", "--wandb-mode", "disabled"];
    assert!(good(FSDP, &args).stderr.contains("--wandb-mode disabled: nothing is logged to W&B"));
}

#[test]
fn with_an_external_launcher_rank_0_logs() {
    let Some(client) = Client::new() else { return };
    let agent = Agent::new();
    let ranks = [0, 1].map(|r| {
        let mut command = client.command(&["--max-steps", "2"]);
        Run(launched(&mut command, r, 2, agent.port).spawn().unwrap())
    });
    for run in ranks {
        let ended = run.end();
        assert!(ended.status.success(), "{}", ended.stderr);
    }
    assert_eq!((client.calls("init").len(), client.logged(), client.calls("finish").len()), (1, vec![1, 2], 1));
}
