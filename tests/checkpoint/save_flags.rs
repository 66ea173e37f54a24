//! Whole runs with the flags for saving: async, sharded files, a directory locked by one run, exports, and generated
//! text.

use crate::common::runs::{unlaunched, wait_until};
use flatshard::ckpt::state;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

use crate::common::binaries::FSDP;

fn command(args: &[&str]) -> Command {
    let mut command = unlaunched(FSDP);
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}
/// A model with steps of a few milliseconds, on a task without files.
fn training<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let tiny = "--dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --batch-size 4 \
    --log-every 1 \
                --lr 0.01 --no-eval --no-sample";
    tiny.split_whitespace().chain(more.iter().copied()).collect()
}
#[track_caller]
fn good(args: &[&str]) -> Output {
    let out = command(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    out
}
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let out = command(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{args:?}: {}\n{stderr}", out.status);
    parts.iter().for_each(|part| assert!(stderr.contains(part), "{args:?}: no {part:?} in {stderr}"));
}
struct Dir(TempDir);
impl Dir {
    fn new() -> Dir {
        Dir(TempDir::new().unwrap())
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn arg(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_string()
    }
}
/// Every file below `dir` by its relative path.
fn tree(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap().map(|e| e.unwrap()) {
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            found.extend(tree(&entry.path()).into_iter().map(|(below, bytes)| (format!("{name}/{below}"), bytes)));
        } else {
            let content = fs::read(entry.path()).unwrap();
            // Run ids differ.
            let content = if name == state::FILE { state::without_id(&content) } else { content };
            found.insert(name, content);
        }
    }
    found
}
fn events(path: &Path, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    lines.filter(|e| e["event"] == name).collect()
}
/// Killed when dropped.
struct Running(Child);
impl Running {
    fn start(args: &[&str]) -> Running {
        Running(command(args).spawn().unwrap())
    }
    #[track_caller]
    fn until(&mut self, what: &str, done: impl Fn() -> bool) {
        wait_until(what, || {
            assert!(self.0.try_wait().unwrap().is_none(), "{what}");
            done()
        });
    }
}
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn async_saves_change_neither_losses_nor_checkpoints() {
    let dir = Dir::new();
    for (name, flag) in [("behind", "--async-save"), ("between", "--no-async-save")] {
        let (ckpt, metrics) = (dir.arg(name), dir.arg(&format!("{name}.jsonl")));
        let more = ["--max-steps", "13", "--save-every", "3", "--ckpt-dir", &ckpt, "--metrics-path", &metrics, flag];
        good(&training(&more));
        let saved: Vec<u64> =
            events(Path::new(&metrics), "checkpoint").iter().map(|e| e["step"].as_u64().unwrap()).collect();
        assert_eq!(saved, [3, 6, 9, 12, 13], "{name}: one event for each, in order");
    }
    let losses = |name: &str| -> Vec<String> {
        let steps = events(&dir.path(&format!("{name}.jsonl")), "step");
        steps.iter().map(|e| format!("{} {} {}", e["step"], e["loss"], e["grad_norm"])).collect()
    };
    assert_eq!(losses("behind"), losses("between"));
    let (behind, between) = (tree(&dir.path("behind")), tree(&dir.path("between")));
    assert!(behind.keys().eq(between.keys()), "{:?}\n{:?}", behind.keys(), between.keys());
    for (name, bytes) in &behind {
        assert!(*bytes == between[name], "{name} differs");
    }
    // Planned before it is allocated: a copy of what a rank owns.
    let planned = |name: &str| {
        let run = events(&dir.path(&format!("{name}.jsonl")), "run").remove(0);
        run["planned_bytes"]["other"].as_u64().unwrap()
    };
    let params = events(&dir.path("behind.jsonl"), "run")[0]["params"].as_u64().unwrap();
    assert_eq!(planned("behind") - planned("between"), params * 12 / 2);
}

#[test]
fn a_signal_waits_for_an_async_save() {
    let dir = Dir::new();
    let (ckpt, metrics) = (dir.arg("ckpt"), dir.arg("m"));
    let more = [
        "--max-steps",
        "1000000",
        "--save-every",
        "2",
        "--keep",
        "2",
        "--async-save",
        "--ckpt-dir",
        &ckpt,
        "--metrics-path",
        &metrics,
    ];
    let mut run = Running::start(&training(&more));
    run.until("some checkpoints", || events(&dir.path("m"), "checkpoint").len() > 3);
    rustix::process::kill_process(rustix::process::Pid::from_child(&run.0), rustix::process::Signal::TERM).unwrap();
    assert_eq!(run.0.wait().unwrap().code(), Some(143));
    let last = events(&dir.path("m"), "step").len();
    let names: Vec<String> =
        fs::read_dir(&ckpt).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.contains(&format!("step-{last:08}")) && !names.iter().any(|n| n.starts_with('.')), "{names:?}");
    assert_eq!(names.len(), 3, "two checkpoints are kept: {names:?}");
}

#[test]
fn a_checkpoint_directory_belongs_to_one_run_at_a_time() {
    let dir = Dir::new();
    let ckpt = dir.arg("ckpt");
    let more = ["--max-steps", "1000000", "--save-every", "2", "--keep", "2", "--ckpt-dir", &ckpt];
    let mut run = Running::start(&training(&more));
    run.until("a checkpoint", || dir.path("ckpt/latest").exists());
    let again = ["--max-steps", "1000000", "--ckpt-dir", &ckpt, "--resume", "auto"];
    refused(&training(&again), &["--ckpt-dir", &ckpt, "another run is using it"]);
    drop(run); // killed, which releases the lock
    let newest = fs::read_to_string(dir.path("ckpt/latest")).unwrap();
    let step: u64 = newest.trim().trim_start_matches("step-").parse().unwrap();
    let to = (step + 1).to_string();
    good(&training(&["--max-steps", &to, "--ckpt-dir", &ckpt, "--resume", "auto"]));
}

#[test]
fn file_size_limits_and_generation_from_sharded_files() {
    let dir = Dir::new();
    let (ckpt, hf, text) = (dir.arg("ckpt"), dir.arg("hf"), dir.arg("text.txt"));
    fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(300)).unwrap();
    let model =
        "--embed-dim 64 --num-layers 2 --num-heads 2 --max-len 64 --batch-size 4 --lr 0.01 --no-eval --no-sample";
    let more = [
        "--dataset",
        &text,
        "--max-steps",
        "60",
        "--ckpt-dir",
        &ckpt,
        "--save-hf",
        &hf,
        "--max-shard-size",
        "100KB",
        "--save-dtype",
        "bf16",
    ];
    let args: Vec<&str> = model.split(' ').chain(more).collect();
    let out = command(&args).env("FLATSHARD_CACHE_DIR", dir.path("cache")).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    for (place, stem) in [("hf", "model"), ("ckpt/step-00000060", "model"), ("ckpt/step-00000060", "optimizer")] {
        let index = fs::read(dir.path(place).join(format!("{stem}.safetensors.index.json"))).unwrap();
        let index: Value = serde_json::from_slice(&index).unwrap();
        for file in index["weight_map"].as_object().unwrap().values() {
            let path = dir.path(place).join(file.as_str().unwrap());
            assert!(fs::metadata(&path).unwrap().len() < 110_000, "{}", path.display());
        }
    }

    let write = |from: [&str; 2], more: &[&str]| {
        let args = [&["--generate", "the quick brown", "--max-new-tokens", "16"], &from[..], more].concat();
        String::from_utf8(good(&args).stdout).unwrap()
    };
    let (checkpoint, export) = (["--ckpt-dir", ckpt.as_str()], ["--pretrain", hf.as_str()]);
    let greedy = write(checkpoint, &["--temperature", "0", "--nproc-per-node", "1"]);
    assert_eq!(greedy, " fox jumps over \n");
    for from in [checkpoint, ["--pretrain", &ckpt], ["--resume", &ckpt], export] {
        assert_eq!(write(from, &["--temperature", "0", "--nproc-per-node", "3"]), greedy, "{from:?}");
    }
    let hot = |seed: &str| write(export, &["--temperature", "3", "--top-p", "0.99", "--top-k", "60", "--seed", seed]);
    assert!(hot("1") == hot("1") && hot("1") != hot("2"));
    assert_eq!(write(export, &["--temperature", "3", "--top-k", "1"]), greedy);

    // Text that cannot be written is an error; a closed pipe is not.
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let out = command(&["--generate", "the", "--pretrain", &hf]).stdout(full).output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(1) && text.contains("write standard output: No space left"), "{text}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = command(&["--generate", "the", "--pretrain", &hf]).stdout(writer).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));

    let bad = |more: &[&str], parts: &[&str]| refused(&[&["--generate", "a"], more].concat(), parts);
    bad(&[], &["--generate needs a model", "--pretrain DIR"]);
    bad(&["--pretrain", &dir.arg("none")], &["no such file or directory"]);
    bad(&["--ckpt-dir", &dir.arg("none")], &["none", "neither a checkpoint"]);
    bad(&["--pretrain", &hf, "--top-p", "1.5"], &["top_p is 1.5", "at most 1"]);
    bad(&["--pretrain", &hf, "--temperature", "-1"], &["temperature is -1"]);
    refused(&["--generate", &"a".repeat(64), "--pretrain", &hf], &["64 tokens", "max_positions is 64"]);
    refused(&["--generate", "", "--pretrain", &hf], &["the prompt is empty"]);
    for size in ["0", "5 apples", "-1GB", "1e9", "99999999999GB"] {
        refused(&training(&[&format!("--max-shard-size={size}")]), &["max_shard_size", size, "10GB"]);
    }
}

/// A third-party model, or one of another run, is not lost when a path is reused.
#[test]
fn an_export_replaces_only_its_own_runs_model_unless_overwriting() {
    let dir = Dir::new();
    let (base, other, link, ckpt) = (dir.arg("base"), dir.arg("other"), dir.arg("link"), dir.arg("ckpt"));
    let train = |more: &[&str]| training(&[&["--max-steps", "2"], more].concat()).join(" ");
    let ok = |more: &[&str]| drop(good(&train(more).split(' ').collect::<Vec<_>>()));
    let no = |more: &[&str], parts: &[&str]| refused(&train(more).split(' ').collect::<Vec<_>>(), parts);
    ok(&["--save-hf", &base]);
    std::os::unix::fs::symlink(&base, &link).unwrap();
    let whole = tree(&dir.path("base"));

    // Never the model the run starts from, by any path, even with --overwrite.
    for (from, to) in [(&base, &base), (&base, &link), (&link, &base)] {
        let args = ["--pretrain", from, "--save-hf", to, "--ckpt-dir", &ckpt];
        let says = ["--save-hf", to, "is the directory of --pretrain", "never overwritten"];
        no(&args, &says);
        no(&[&args[..], &["--overwrite"]].concat(), &says);
    }
    no(&["--ckpt-dir", &ckpt, "--save-hf", &ckpt], &["is the directory of --ckpt-dir"]);
    let dangling = dir.arg("dangling");
    std::os::unix::fs::symlink(dir.path("nowhere"), &dangling).unwrap();
    no(&["--save-hf", &dangling], &["dangling", "is a link to what does not exist"]);
    // A model of another run; of a third party.
    fs::create_dir(&other).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(dir.path("base").join(name), dir.path("other").join(name)).unwrap();
    }
    for to in [&base, &other] {
        no(
            &["--save-hf", to, "--ckpt-dir", &ckpt],
            &[to, "contains a model that this run did not write", "--overwrite"],
        );
    }
    assert!(tree(&dir.path("base")) == whole && !dir.path("ckpt").exists());
    ok(&["--save-hf", &other, "--overwrite", "--seed", "1"]);
    assert!(fs::read(dir.path("other/model.safetensors")).unwrap() != whole["model.safetensors"]);
    // Only a model can be replaced.
    fs::write(dir.path("other/notes.txt"), "mine").unwrap();
    no(&["--save-hf", &other, "--overwrite"], &["contains notes.txt", "never overwritten"]);
    no(&["--overwrite"], &["--overwrite has no effect", "--save-hf"]);

    // The same run, resumed.
    let (out, run) = (dir.arg("out"), dir.arg("run"));
    let export = || fs::read(dir.path("out/model.safetensors")).unwrap();
    ok(&["--ckpt-dir", &run, "--save-hf", &out]);
    let first = export();
    ok(&["--ckpt-dir", &run, "--save-hf", &out, "--resume", "auto", "--max-steps", "4"]);
    assert!(export() != first, "the longer run's model is another");
    no(&["--ckpt-dir", &ckpt, "--save-hf", &out], &["did not write"]);
}
