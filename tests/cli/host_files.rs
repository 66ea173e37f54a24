//! The files of examples/hosts: shells parse them, YAML is YAML, every run_fsdp command in them is a plan for as many
//! ranks as the file starts, and ranks.sh starts and stops ranks. Never talks to Slurm or Kubernetes:
//! scripts/hosts_check.sh runs the Slurm files in a cluster of test hosts.
use super::docs::{furnish, words};
use crate::common::runs::*;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/hosts").join(name)
}

/// What a shell file starts: the words from run_fsdp to the end of its command.
fn shell_command(text: &str) -> Vec<String> {
    let code: String = text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    let code = code.replace("\\\n", " ");
    let line = code.lines().find_map(|line| line.split_once("run_fsdp ")).expect("run_fsdp").1;
    words(line)
}

/// The containers anywhere in a manifest.
fn containers(value: &Value) -> Vec<&Value> {
    match value {
        Value::Object(map) => map
            .iter()
            .flat_map(|(key, value)| match value.as_array() {
                Some(list) if key == "containers" => list.iter().collect(),
                _ => containers(value),
            })
            .collect(),
        Value::Array(list) => list.iter().flat_map(containers).collect(),
        _ => Vec::new(),
    }
}
fn texts(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_string()).collect()
}
fn variable<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    container["env"].as_array().unwrap().iter().find(|variable| variable["name"] == name)?["value"].as_str()
}

/// Plans the command as rank 0 of its job.
fn plans(dir: &Path, name: &str, words: &[String], hosts: usize, per_host: usize) {
    let ranks = (hosts * per_host).to_string();
    let mut command = Command::new(FSDP);
    command
        .args(words)
        .args(["--batch-size", "1", "--max-len", "128", "--device", "cpu", "--print-config"])
        .current_dir(dir);
    command.env("RANK", "0").env("WORLD_SIZE", &ranks).env("MASTER_ADDR", "localhost");
    command.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", per_host.to_string());
    let out = command.output().unwrap();
    assert!(out.status.success(), "{name}: {words:?}: {}", String::from_utf8_lossy(&out.stderr));
    let plan: Value = serde_saphyr::from_str(&String::from_utf8(out.stdout).unwrap()).unwrap();
    assert_eq!(plan["plan"]["world_size"].to_string(), ranks, "{name}");
    assert_eq!(plan["checkpoint"]["resume"], "auto", "{name}: a restarted job goes on from its checkpoint");
}

#[test]
fn every_command_is_a_plan() {
    let dir = Dir::new();
    furnish(dir.0.path());
    for (name, hosts, per_host) in [("torchrun.sh", 2, 8), ("slurm.sbatch", 2, 8), ("slurm-het.sbatch", 3, 4)] {
        let text = fs::read_to_string(file(name)).unwrap();
        let secret = text.contains("FLATSHARD_JOB_SECRET");
        assert!(secret && text.starts_with("#!/usr/bin/env bash\n# "), "{name}");
        plans(dir.0.path(), name, &shell_command(&text), hosts, per_host);
    }
    for (name, kind, hosts) in [("jobset.yaml", "JobSet", 2), ("pytorchjob.yaml", "PyTorchJob", 4)] {
        let manifest: Value = serde_saphyr::from_str(&fs::read_to_string(file(name)).unwrap()).unwrap();
        assert_eq!(manifest["kind"], kind);
        for container in containers(&manifest) {
            let command = [texts(&container["command"]), texts(&container["args"])].concat();
            let program = command.iter().position(|word| word == "run_fsdp").expect("run_fsdp");
            let gpus = container["resources"]["limits"]["nvidia.com/gpu"].as_u64().unwrap() as usize;
            if program > 0 {
                assert_eq!(command[..program], ["bash", "ranks.sh"], "{name}");
                assert_eq!(variable(container, "NPROC"), Some(&*gpus.to_string()), "{name}");
                assert_eq!(variable(container, "NNODES"), Some(&*hosts.to_string()), "{name}");
            }
            plans(dir.0.path(), name, &command[program + 1..], hosts, gpus);
        }
    }
    // Kubernetes knows what the files say twice.
    let jobset: Value = serde_saphyr::from_str(&fs::read_to_string(file("jobset.yaml")).unwrap()).unwrap();
    let job = &jobset["spec"]["replicatedJobs"][0];
    let first = format!("{}-{}-0-0.{0}", jobset["metadata"]["name"].as_str().unwrap(), job["name"].as_str().unwrap());
    assert_eq!(variable(containers(&jobset)[0], "MASTER_ADDR"), Some(&*first));
    assert_eq!(job["template"]["spec"]["completions"], 2);
}

#[test]
fn shells_parse_all_scripts() {
    let mut scripts = 0;
    for entry in fs::read_dir(file("")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "sh" || e == "sbatch") {
            let out = Command::new("bash").arg("-n").arg(&path).output().unwrap();
            assert!(out.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&out.stderr));
            scripts += 1;
        }
    }
    assert_eq!(scripts, 5);
}

/// A started job of one host: ranks of `run_fsdp` below ranks.sh.
fn ranks(dir: &Dir, agent: &Agent, args: &[&str]) -> Run {
    let tiny = command(FSDP, args);
    let mut script = Command::new("bash");
    script.arg(file("ranks.sh")).arg(FSDP).args(tiny.get_args()).current_dir(dir.0.path());
    script.env("NODE_RANK", "0").env("NNODES", "1").env("NPROC", "2").env("MASTER_ADDR", "127.0.0.1");
    script.env("MASTER_PORT", agent.port.to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Run(script.spawn().unwrap())
}

#[test]
fn ranks_of_the_script_save_when_it_is_stopped_and_it_passes_their_status_on() {
    let (dir, agent) = (Dir::new(), Agent::new());
    let run = ranks(
        &dir,
        &agent,
        &["--max-steps", "1000000", "--time-limit", "60", "--metrics-path", "m.jsonl", "--ckpt-dir", "c"],
    );
    wait_until("the run trains", || steps(&dir.path("m.jsonl")) > 3);
    send(Signal::TERM, run.pid());
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(143), "{}", ended.stderr);
    assert!(dir.path("c/latest").exists(), "{}", ended.stderr);
    let refused = ranks(&dir, &agent, &["--embed-dim", "63"]).end();
    assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
    let done = ranks(&dir, &agent, &["--max-steps", "2", "--no-sample"]).end();
    assert_eq!(done.status.code(), Some(0), "{}", done.stderr);
}
