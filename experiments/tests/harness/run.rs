//! `experiments run` from outside, with mock training binaries: what is written, what is run again and what is not, and
//! that a failure stays a failure.
use super::common::{calls, experiments, experiments_with, pretenders, script};
use crate::time::wait_until;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

fn status(dir: &Path, name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(dir.join("out").join(name).join("status.json")).unwrap()).unwrap()
}

#[test]
fn without_execute_configurations_are_written_and_commands_printed() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "");
    let ended = experiments(
        dir.path(),
        &[
            "run",
            "--bin-dir",
            "bin",
            "--experiment_dir",
            "out",
            "--steps",
            "7",
            "--python",
            "bin/none",
            "--",
            "--seed",
            "3",
        ],
    );
    assert_eq!(ended.code, 0, "{}", ended.err);
    assert!(ended.err.starts_with("note: fsdp_official skipped: cannot start bin/none"), "{}", ended.err);
    assert_eq!(ended.err.lines().count(), 2, "{}", ended.err);
    let names = "ddp_fp32 fsdp_manual_bf16 fsdp_reference fsdp_reference_ac fsdp_manual_no_limit \
    fsdp_manual_backward_post \
                 fsdp_manual_no_prefetch fsdp_manual_shard_grad_op fsdp_manual_hybrid_shard zero1 zero2 zero3 tp2 ring2 tp2_ring2 moe moe_ep2";
    for name in names.split_whitespace() {
        let path = dir.path().join("out").join(name).join("config.yaml");
        let config: Value = serde_saphyr::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(config["run"]["max_steps"], 7, "{name}");
        let line = ended.out.lines().find(|l| l.contains(&format!("/{name}/config.yaml"))).unwrap();
        let program = if name.starts_with("ddp") { "bin/run_ddp" } else { "bin/run_fsdp" };
        assert!(line.contains(program) && line.ends_with("--seed 3"), "{line}");
    }
    assert_eq!(calls(dir.path()), 0);
    let read = |name: &str| fs::read_to_string(dir.path().join("out").join(name).join("config.yaml")).unwrap();
    let parsed = |name: &str| serde_saphyr::from_str::<Value>(&read(name)).unwrap();
    assert_eq!(parsed("tp2_ring2")["parallel"]["tp_size"], 2);
    assert_eq!(parsed("zero3")["fsdp"]["zero_stage"], 3);
    // As wide as the MLP of the others: 704.
    assert_eq!(
        (&parsed("moe")["model"]["num_experts"], &parsed("moe")["model"]["ff_hidden_dim"]),
        (&8.into(), &352.into())
    );
    let shared = parsed("moe_ep2");
    assert_eq!((&shared["model"], &shared["parallel"]["ep_size"]), (&parsed("moe")["model"], &2.into()));
    // The same number of sequences per step on any mesh: 4 ranks with 2, or one group of 4 ranks with 8.
    assert_eq!(parsed("ddp_fp32")["batch"]["batch_size"], 2);
    assert_eq!(parsed("tp2_ring2")["batch"]["batch_size"], 8);
}

#[test]
fn a_failure_does_not_stop_the_set_and_only_it_is_repeated() {
    let dir = TempDir::new().unwrap();
    // Like a build without tensor parallelism.
    pretenders(
        dir.path(),
        "if grep -q tp_size \"$2\"; then echo noise; echo 'error: --tp-size 2 needs more' >&2; exit 2; fi",
    );
    let run = ["run", "--bin-dir", "bin", "--output-dir", "out", "--execute", "--only", "ddp_fp32,tp2,zero*"];
    let first = experiments(dir.path(), &run);
    assert_eq!(first.code, 1, "{}{}", first.out, first.err);
    assert!(first.out.contains("failed: exit status 2: --tp-size 2 needs more"), "{}", first.out);
    assert!(first.out.contains("4 done, 1 failed"), "{}", first.out);
    assert_eq!(calls(dir.path()), 5);
    assert_eq!(status(dir.path(), "tp2")["ended"], "failed");
    assert_eq!(status(dir.path(), "zero3")["ended"], "done");
    assert!(fs::read_to_string(dir.path().join("out/tp2/log.txt")).unwrap().contains("noise"));

    // The feature becomes available.
    pretenders(dir.path(), "");
    let second = experiments(dir.path(), &run);
    assert_eq!(second.code, 0, "{}{}", second.out, second.err);
    assert_eq!(second.out.matches("already done").count(), 4, "{}", second.out);
    assert_eq!(calls(dir.path()), 6);
    assert_eq!(status(dir.path(), "tp2")["ended"], "done");
    assert_eq!(experiments(dir.path(), &run).code, 0);
    assert_eq!(calls(dir.path()), 6);
}

#[test]
fn an_interrupted_run_is_repeated_from_the_start() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "");
    fs::create_dir_all(dir.path().join("out/ddp_fp32")).unwrap();
    fs::write(dir.path().join("out/ddp_fp32/metrics.jsonl"), "{\"event\":\"step\",\"step\":9,\"loss\":1}\n").unwrap();
    let ended =
        experiments(dir.path(), &["run", "--bin-dir", "bin", "--output-dir", "out", "--execute", "--only", "ddp_fp32"]);
    assert_eq!((ended.code, calls(dir.path())), (0, 1));
    let metrics = fs::read_to_string(dir.path().join("out/ddp_fp32/metrics.jsonl")).unwrap();
    assert!(!metrics.contains("\"step\":9"), "{metrics}");
}

#[test]
fn results_of_other_settings_are_neither_reused_nor_overwritten() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "");
    let run = |more: &[&str]| {
        let base = ["run", "--bin-dir", "bin", "--output-dir", "out", "--execute", "--only", "ddp_fp32", "zero1"];
        experiments(dir.path(), &[&base[..], more].concat())
    };
    assert_eq!(run(&["--steps", "3"]).code, 0);
    for more in [&["--steps", "4"][..], &["--steps", "3", "--", "--seed", "1"]] {
        let ended = run(more);
        assert_eq!(ended.code, 2, "{}", ended.out);
        assert!(ended.err.contains("ddp_fp32") && ended.err.contains("other settings"), "{}", ended.err);
    }
    assert_eq!(calls(dir.path()), 2);
}

#[test]
fn rounds_are_interleaved() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "");
    let ended = experiments(
        dir.path(),
        &["run", "--bin-dir", "bin", "--output-dir", "out", "--execute", "--only", "ddp_fp32,zero1", "--repeat", "2"],
    );
    assert_eq!(ended.code, 0, "{}", ended.err);
    let called = fs::read_to_string(dir.path().join("calls")).unwrap();
    let order: Vec<&str> = called.lines().map(|l| l.split('/').rev().nth(1).unwrap()).collect();
    assert_eq!(order, ["ddp_fp32", "zero1", "ddp_fp32@2", "zero1@2"]);
}

#[test]
fn a_run_past_its_timeout_is_stopped_and_named() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "exec sleep 600");
    let ended = experiments(
        dir.path(),
        &["run", "--bin-dir", "bin", "--output-dir", "out", "--execute", "--only", "ddp_fp32", "--timeout", "0.2"],
    );
    assert_eq!(ended.code, 1);
    assert!(ended.out.contains("took longer than 0.2 s"), "{}", ended.out);
}

#[test]
fn launchers_get_the_number_of_ranks() {
    let dir = TempDir::new().unwrap();
    let bin = pretenders(dir.path(), "");
    // A mock torchrun that prints how it was called, and starts its program once.
    let start = format!(
        "echo \"$*\" > {}\nwhile [ \"$1\" != --no_python ]; do shift; done\nshift\nexec \"$@\"",
        dir.path().join("torchrun-args").display()
    );
    script(&bin, "torchrun", &start);
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let base = ["run", "--bin-dir", "bin", "--only", "zero2"];
    let torchrun = |launcher: &str, nproc: &[&str], output: &str| {
        let args = ["--launcher", launcher, "--output-dir", output, "--execute"];
        let ended = experiments_with(dir.path(), &[&base[..], &args, nproc].concat(), &[("PATH", &path)]);
        assert_eq!(ended.code, 0, "{}{}", ended.out, ended.err);
        let config = fs::read_to_string(dir.path().join(output).join("zero2/config.yaml")).unwrap();
        (fs::read_to_string(dir.path().join("torchrun-args")).unwrap(), config, ended.err)
    };
    let eight = ["--nproc-per-node", "8"];
    let (words, config, _) = torchrun("torchrun", &eight, "out");
    assert!(words.starts_with("--standalone --nproc_per_node 8 --no_python "), "{words}");
    assert!(config.contains("nproc_per_node: 8"), "{config}");
    // A command line sets the number of ranks, so the configuration does not.
    let (words, config, note) = torchrun("torchrun --nproc_per_node 2 --log_dir 'a b'", &eight, "line");
    assert!(words.starts_with("--nproc_per_node 2 --log_dir a b --no_python "), "{words}");
    assert!(!config.contains("nproc_per_node: "), "{config}");
    assert!(note.contains("--nproc-per-node 8 (NUM_GPUS) has no effect here"), "{note}");
    let (words, _, note) = torchrun("./bin/torchrun --nproc_per_node {nproc} --no_python", &eight, "filled");
    assert!(words.starts_with("--nproc_per_node 8 --no_python ") && note.is_empty(), "{words}{note}");
    assert_eq!(calls(dir.path()), 3);

    let srun = [&base[..], &eight, &["--launcher", "srun", "--output-dir", "other", "--nnodes", "2"]].concat();
    let ended = experiments(dir.path(), &srun);
    assert_eq!(ended.code, 0, "{}", ended.err);
    assert!(ended.out.starts_with("srun --nodes 2 --ntasks-per-node 8 --kill-on-bad-exit=1 "), "{}", ended.out);
    let config = fs::read_to_string(dir.path().join("other/zero2/config.yaml")).unwrap();
    assert!(config.contains("num_nodes: 2"), "{config}");
}

#[test]
fn bad_input_is_refused_before_anything_runs() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "");
    fs::write(dir.path().join("list.yaml"), "- a\n- b\n").unwrap();
    fs::write(dir.path().join("taken"), "").unwrap();
    let cases: [(&[&str], &str); 16] = [
        (&["--only", "zero4"], "--only zero4: no such run"),
        (&["--skip", "*"], "select no runs"),
        (&["--only", "torch_*"], "--peers"),
        (&["--steps", "0"], "--steps is 0"),
        (&["--repeat", "0"], "--repeat is 0"),
        (&["--nproc-per-node", "0"], "--nproc-per-node is 0"),
        (&["--timeout", "nan"], "--timeout is NaN"),
        (&["--nnodes", "2"], "--launcher torchrun, srun or mpirun"),
        (&["--launcher", "no-such --nproc_per_node 2"], "no-such is not in PATH"),
        (&["--launcher", "bin/no-such -n 2"], "bin/no-such is not executable"),
        (&["--launcher", "torchrun 'a"], "missing closing quote"),
        (&["--launcher", ""], "is empty"),
        (&["--launcher-args", "--x"], "--launcher-args has no effect here"),
        (&["--config", "list.yaml"], "list.yaml: it has no sections"),
        (&["--config", "no-such.yaml"], "no-such.yaml"),
        (&["--output-dir", "taken/below"], "taken/below"),
    ];
    for (more, says) in cases {
        let ended = experiments(dir.path(), &[&["run", "--bin-dir", "bin", "--execute"], more].concat());
        assert_eq!(ended.code, 2, "{more:?}: {}{}", ended.out, ended.err);
        assert!(ended.err.contains(says), "{more:?}: {}", ended.err);
    }
    let ended = experiments(dir.path(), &["run", "--bin-dir", "nowhere"]);
    assert_eq!(ended.code, 2);
    assert!(ended.err.contains("--bin-dir nowhere"), "{}", ended.err);
    let ended = experiments_with(
        dir.path(),
        &["run", "--bin-dir", "bin", "--execute", "--launcher", "srun"],
        &[("PATH", "/nowhere")],
    );
    assert_eq!(ended.code, 2);
    assert!(ended.err.contains("srun is not in PATH"), "{}", ended.err);
    assert_eq!(calls(dir.path()), 0);
}

#[test]
fn a_stopped_harness_stops_its_run() {
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "echo $$ > pid; exec sleep 600");
    let mut command = Command::new(crate::EXPERIMENTS);
    command.args(["run", "--bin-dir", "bin", "--output-dir", "out", "--execute", "--only", "ddp_fp32"]);
    let mut harness = command.current_dir(dir.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = || fs::read_to_string(dir.path().join("pid")).ok().and_then(|pid| pid.trim().parse::<i32>().ok());
    wait_until("the run starts", || pid().is_some());
    kill_process(Pid::from_child(&harness), Signal::TERM).unwrap();
    assert_eq!(harness.wait().unwrap().code(), Some(128 + 15));
    // The harness has waited for it: the process is gone, and nothing looks like a result to a later call.
    assert!(test_kill_process(Pid::from_raw(pid().unwrap()).unwrap()).is_err());
    assert!(!dir.path().join("out/ddp_fp32/status.json").exists());
}
