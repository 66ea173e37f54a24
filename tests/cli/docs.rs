//! The pages of docs/: each opens with a command, and the commands in blocks marked `sh run` work as printed, with tiny
//! sizes, one after the other in one directory per page.
use crate::common::runs::*;
use flatshard::run::HelpPage;
use flatshard::run::settings::args::{self, Cli};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const TINY: &str = "--max-steps 12 --max-len 128 --batch-size 1 --sample-tokens 4";
const SHAPES: &str = "--embed-dim 32 --num-layers 2 --num-heads 4";

fn pages() -> Vec<PathBuf> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let mut pages: Vec<PathBuf> = fs::read_dir(docs).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|e| e == "md") && !path.ends_with("SUMMARY.md"));
    pages.sort();
    pages
}

/// The commands of a page's blocks with this mark, one per line.
fn commands(page: &str, mark: &str) -> Vec<String> {
    let blocks = page.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix(mark)?.strip_prefix('\n'));
    let lines = blocks.flat_map(|block| block.replace("\\\n", " ").lines().map(String::from).collect::<Vec<_>>());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

/// The files that a page's commands read, in one block.
pub fn furnish(dir: &Path) {
    fs::create_dir(dir.join("notes")).unwrap();
    fs::write(dir.join("notes/one.txt"), "A unit is gathered, used and dropped again. ".repeat(400)).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]}"#;
    fs::write(dir.join("chats.jsonl"), format!("{chat}\n").repeat(100)).unwrap();
    let pair = r#"{"prompt": "why? ", "chosen": "because.", "rejected": "so."}"#;
    fs::write(dir.join("pairs.jsonl"), format!("{pair}\n").repeat(100)).unwrap();
    let sample = |reward: f64| format!(r#"{{"ids": [98, 99], "logprobs": [-5.5, -5.5], "reward": {reward}}}"#);
    let group = format!(r#"{{"prompt_ids": [97], "samples": [{}, {}]}}"#, sample(0.0), sample(1.0));
    fs::write(dir.join("rollouts.jsonl"), format!("{group}\n").repeat(100)).unwrap();
    symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs"), dir.join("configs")).unwrap();
    let model = "run_fsdp --nproc-per-node 1 --dataset synthetic --no-eval --vocab-size 320 --save-hf";
    run(dir, &format!("{model} qwen {TINY} {SHAPES}"));
    run(dir, &format!("{model} gpt2 --arch gpt {TINY} {SHAPES}"));
    let auto = r#""train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}"#;
    fs::write(dir.join("ds_config.json"), format!(r#"{{"zero_optimization": {{"stage": 2}}, {auto}}}"#)).unwrap();
}

/// Splits a line as a shell does, with quotes.
pub fn words(line: &str) -> Vec<String> {
    let quoted = line.split('"').enumerate();
    let split = |(i, text): (usize, &str)| match i % 2 {
        0 => text.split_whitespace().map(String::from).collect(),
        _ => vec![text.to_string()],
    };
    quoted.flat_map(split).collect()
}

fn run(dir: &Path, line: &str) {
    let words = words(line);
    let program = Path::new(FSDP).with_file_name(&words[0]);
    let out = Command::new(&program).args(&words[1..]).current_dir(dir).output();
    let out = out.unwrap_or_else(|e| panic!("{}: {e}; cargo test --workspace builds it", program.display()));
    assert!(out.status.success(), "{line}: {}\n{}", out.status, String::from_utf8_lossy(&out.stderr));
}

/// The printed command with flags that make it small.
fn tiny(line: &str) -> String {
    let has = |flag: &str| line.contains(flag);
    match () {
        () if line.starts_with("experiments") || has("--print-config") || has("--help") => line.into(),
        () if has("--generate") => format!("{line} --max-new-tokens 4"),
        () if has("--pretrain") || has("--config") => format!("{line} {TINY}"),
        () => format!("{line} {TINY} {SHAPES}{}", if has("--dataset") { "" } else { " --dataset notes/" }),
    }
}

#[test]
fn every_page_opens_with_a_command() {
    for path in pages() {
        let page = fs::read_to_string(&path).unwrap();
        let top = page.split("\n## ").next().unwrap();
        let commands: usize = ["sh", "sh run"].iter().map(|mark| commands(top, mark).len()).sum();
        assert!(page.starts_with("# ") && commands > 0, "{} does not open with a command", path.display());
    }
}

/// Those that only a cluster, cargo or another program can run, too: their flags are flags, and their files are here.
#[test]
fn every_printed_command_is_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut parsed = 0;
    for path in pages().into_iter().chain([root.join("README.md")]) {
        let page = fs::read_to_string(&path).unwrap();
        for line in [commands(&page, "sh"), commands(&page, "sh run")].concat() {
            let line = line.split(" #").next().unwrap().split(" > ").next().unwrap();
            let here =
                |word: &&str| ["scripts/", "examples/", "experiments/", "configs/"].iter().any(|d| word.starts_with(d));
            for file in line.split_whitespace().filter(here) {
                assert!(root.join(file).exists(), "{}: {line}: no {file}", path.display());
            }
            let Some((_, flags)) = line.split_once("run_fsdp ").filter(|_| !line.contains("--help")) else { continue };
            let read = args::parse::<Cli>(&HelpPage::training("run_fsdp", ""), words(flags));
            assert!(read.is_ok(), "{}: {line}: {}", path.display(), read.err().unwrap());
            parsed += 1;
        }
    }
    assert!(parsed >= 40, "{parsed} commands: is the test still reading the pages?");
}

#[test]
fn the_site_has_every_page() {
    let summary = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/SUMMARY.md")).unwrap();
    for path in pages() {
        let link = format!("]({})", path.file_name().unwrap().to_str().unwrap());
        assert!(summary.contains(&link), "docs/SUMMARY.md lacks {link}");
    }
}

#[test]
fn the_printed_commands_work() {
    let mut ran = 0;
    for path in pages() {
        let commands = commands(&fs::read_to_string(&path).unwrap(), "sh run");
        if commands.is_empty() {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        furnish(dir.path());
        for line in &commands {
            run(dir.path(), &tiny(line));
            ran += 1;
        }
    }
    assert!(ran >= 15, "{ran} commands: is the test still reading the pages?");
}

#[test]
fn the_plan_on_the_page_of_memory_is_what_its_command_prints() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/memory.md")).unwrap();
    let shown = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let out = Command::new(FSDP).args(&words(&commands(&page, "sh run")[0])[1..]).output().unwrap();
    let printed = String::from_utf8(out.stdout).unwrap();
    assert!(shown.contains("params:") && printed.contains(shown), "docs/memory.md shows\n{shown}of\n{printed}");
}
