//! `scripts/gpu_check.sh` itself, with stand-ins for the programs that need a GPU: passed, failed and skipped parts are
//! distinguished, a failure fails the whole, and the numbers of all parts end up in one document. Also with its real
//! programs on a mock driver: a rehearsal.

use crate::common::deep;
use crate::common::programs::write_program;
use crate::common::simcuda;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn program(dir: &Path, name: &str, body: &str) {
    write_program(&dir.join(name), format!("#!/usr/bin/env bash\n{body}\n"));
}

/// The check with these scripts in place of `gpu_check` and `conformance`; its output and its document.
fn check(gpu_check: &str, conformance: &str) -> (Output, Option<Value>) {
    let dir = tempfile::tempdir().unwrap();
    program(dir.path(), "gpu_check", gpu_check);
    program(dir.path(), "conformance", conformance);
    program(dir.path(), "run_fsdp", "echo trained");
    let out = dir.path().join("out");
    let mut command = Command::new("bash");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu_check.sh")).arg(&out);
    let output = command.env("BUILD", dir.path()).env("QUICK", "1").output().unwrap();
    let document = fs::read_to_string(out.join("gpu_check.json")).ok();
    let mut files: Vec<_> = fs::read_dir(&out).unwrap().map(|file| file.unwrap().file_name()).collect();
    files.sort();
    assert!(document.is_none() || files == ["gpu_check.json", "gpu_check_logs.tar.gz"], "{files:?}");
    (output, document.map(|text| serde_json::from_str(&text).unwrap()))
}
fn part<'a>(document: &'a Value, name: &str) -> &'a Value {
    document["parts"].as_array().unwrap().iter().find(|p| p["part"] == name).unwrap()
}

const GOOD: &str = r#"case $1 in parity) echo '{"steps": 6}' ;; *) echo "{\"part\": \"$1\"}" ;; esac"#;

#[test]
fn all_parts_passing_is_a_success_and_numbers_are_kept() {
    let (output, document) = check(GOOD, "true");
    let document = document.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(part(&document, "parity_fp32")["result"]["steps"], 6);
    assert_eq!(part(&document, "layouts")["result"]["part"], "layouts");
    assert_eq!(part(&document, "nccl")["status"], "passed");
    assert_eq!(document["simulated"], false);
}

/// What a failed part measured is what tells why; the machine that is lent brings back few files.
#[test]
fn a_failed_part_keeps_its_report_and_logs_are_in_one_archive() {
    let body =
        format!("[ $1 = layouts ] && {{ echo '{{\"box\": false}}'; echo 'box: 3 words differ' >&2; exit 1; }}\n{GOOD}");
    let (output, document) = check(&body, "true");
    assert_eq!(output.status.code(), Some(1));
    let document = document.unwrap();
    assert_eq!(part(&document, "layouts")["result"]["box"], false);
    assert_eq!(part(&document, "layouts")["note"], "box: 3 words differ");
}

#[test]
fn a_failure_fails_the_whole_with_its_reason_and_the_rest_still_runs() {
    let body = format!(
        "[ $1 = kernels ] && {{ echo 'adamw \"spills\" | registers' >&2; exit 1; }}\n[ $1 = attention ] && exit 3\n{GOOD}"
    );
    let (output, document) = check(&body, "echo 'test gemm ... FAILED'; exit 101");
    let document = document.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(part(&document, "kernels")["status"], "FAILED");
    assert!(part(&document, "kernels")["note"].as_str().unwrap().contains("spills"));
    assert_eq!(part(&document, "conformance")["note"], "test gemm ... FAILED");
    assert_eq!(part(&document, "attention")["status"], "skipped");
    assert_eq!(part(&document, "parity_two_ranks")["status"], "passed");
}

#[test]
fn without_a_gpu_nothing_is_checked() {
    let (output, document) = check("echo 'no GPU here' >&2; exit 3", "true");
    assert_eq!(
        (output.status.code(), part(&document.unwrap(), "machine")["status"].as_str()),
        (Some(3), Some("skipped"))
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("no GPU here"));
}

/// The order of what must be known first; and a run without time left, or one that is cut off, has what it measured.
#[test]
fn parts_run_in_order_and_share_the_time_and_a_run_that_is_cut_off_keeps_its_results() {
    let (output, document) = check(GOOD, "true");
    assert!(output.status.success());
    let document = document.unwrap();
    let names: Vec<&str> = document["parts"].as_array().unwrap().iter().map(|p| p["part"].as_str().unwrap()).collect();
    let order = ["machine", "kernels", "layouts", "attention", "parity_bf16", "conformance", "parity_fp32"];
    assert_eq!(names[..order.len()], order);
    assert_eq!(names[names.len() - 2..], ["memcheck", "racecheck"]);

    let dir = tempfile::tempdir().unwrap();
    let run = |seconds: &str, gpu_check: &str, parts: &str| {
        program(dir.path(), "gpu_check", gpu_check);
        program(dir.path(), "gpu_check_before", gpu_check);
        program(dir.path(), "run_fsdp", "echo trained");
        let mut command = Command::new("bash");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu_check.sh")).arg(dir.path().join("out"));
        command.env("BUILD", dir.path()).env("SECONDS_IN_ALL", seconds).env("PARTS", parts);
        command
    };
    let read = || -> Value {
        let text = fs::read_to_string(dir.path().join("out/gpu_check.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    // The second part takes longer than what is left; the third has none, and no part is silently missing.
    let slow = r#"echo "{\"part\": \"$1\"}"; [ $1 != kernels ] || exec sleep 60"#;
    let output = run("12", slow, "kernels layouts").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let document = read();
    assert!(part(&document, "kernels")["note"].as_str().unwrap().contains("took longer than "), "{document}");
    assert_eq!(part(&document, "kernels")["result"]["part"], "kernels");
    assert_eq!(part(&document, "layouts")["note"], "the time of the whole check is used up");
    // Killed in the second part of three, after the first one's document.
    fs::remove_file(dir.path().join("out/gpu_check.json")).unwrap();
    let mut child = run("600", slow, "kernels layouts").spawn().unwrap();
    while !dir.path().join("out/gpu_check.json").exists() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(part(&read(), "machine")["status"], "passed");
}

/// The real programs on a mock driver, with small models. The result is not presented as a GPU's.
#[test]
fn on_a_mock_driver_it_is_reported_as_a_rehearsal() {
    let dir = tempfile::tempdir().unwrap();
    for (name, program) in
        [("run_fsdp", crate::common::binaries::FSDP), ("gpu_check", crate::common::binaries::GPU_CHECK)]
    {
        std::os::unix::fs::symlink(program, dir.path().join(name)).unwrap();
    }
    // In place of an earlier build, what today's has measured: this tests the script and its table. And a sanitizer
    // that finds nothing.
    program(dir.path(), "gpu_check_before", "cat rates.json");
    program(dir.path(), "compute-sanitizer", "shift 4; \"$@\" && echo '========= ERROR SUMMARY: 0 errors'");
    // A newer cuBLASLt elsewhere, as PyTorch installs it: its own copy of the library, which no driver initializes.
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::copy(simcuda::libraries().join("libcublasLt.so"), elsewhere.join("libcublasLt.so.13")).unwrap();
    let libraries = format!("{}:{}", simcuda::libraries().display(), elsewhere.display());
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    let out = dir.path().join("out");
    let small = "--embed-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --ff-hidden-dim 64 --vocab-size 64 \
    --max-len 32 \
                 --batch-size 1 --max-steps 3 --warmup-steps 1";
    let mut command = Command::new("bash");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu_check.sh")).arg(&out);
    let parts = "kernels layouts attention racecheck rates rates_before step_1b step_1b_compile parity_bf16 \
                 parity_compile nccl ipc families";
    command.env("BUILD", dir.path()).env("SMALL", small).env("ONE_BILLION", format!("{small} --nproc-per-node 1"));
    let models = deep::first(1, ["qwen3", "gpt_oss", "nemotron"]).collect::<Vec<_>>().join(" ");
    command.env("FAMILIES", format!("--models {models} --jobs lora --at-once 2"));
    command.env("PARTS", parts).env("PATH", path).env("PATIENCE", "20"); // emulated, beside other tests
    command.env("LD_LIBRARY_PATH", libraries).env("FLATSHARD_SIMCUDA", "arch=90,seed=2");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("SIMULATED: a rehearsal"), "{said}");
    let document: Value = serde_json::from_str(&fs::read_to_string(out.join("gpu_check.json")).unwrap()).unwrap();
    assert_eq!(document["simulated"], true);
    assert_eq!(part(&document, "machine")["result"]["gpus"][0]["name"], "Simulated GPU");
    for name in parts.split_whitespace() {
        assert_eq!(part(&document, name)["status"], "passed", "{name}: {document:#}");
    }
    let rates = &part(&document, "rates")["result"];
    for row in
        ["backward causal 128 x 8192, 32 kv", "backward causal 128 x 8192, 8 kv", "forward causal 128 x 2048, 32 kv"]
    {
        assert!(rates[format!("attention {row} heads")]["tflops"].as_f64().is_some(), "{row}: {rates}");
    }
    assert_eq!(part(&document, "attention")["result"]["256 grouped, window"]["repeats"], true);
    assert!(said.contains("with the kernels before"), "{said}");
}
