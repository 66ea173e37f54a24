//! The pages of docs/: each opens with a command, and the commands in blocks marked `sh run` work as they are printed,
//! in tiny sizes, one after the other in one directory for each page.
use crate::common::runs::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const TINY: &str = "--max-steps 12 --max-len 128 --batch-size 1 --sample-tokens 4";
const SHAPES: &str = "--embed-dim 32 --num-layers 2 --num-heads 4";

fn pages() -> Vec<PathBuf> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let mut pages: Vec<PathBuf> = fs::read_dir(docs).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|e| e == "md"));
    pages.sort();
    pages
}

/// The commands of a page's blocks with this mark, a line each.
fn commands(page: &str, mark: &str) -> Vec<String> {
    let blocks = page.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix(mark)?.strip_prefix('\n'));
    let lines = blocks.flat_map(|block| block.replace("\\\n", " ").lines().map(String::from).collect::<Vec<_>>());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

/// In one block of a page: what its commands read.
fn furnish(dir: &Path) {
    fs::create_dir(dir.join("notes")).unwrap();
    fs::write(dir.join("notes/one.txt"), "A unit is gathered, used and dropped again. ".repeat(400)).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]}"#;
    fs::write(dir.join("chats.jsonl"), format!("{chat}\n").repeat(100)).unwrap();
    symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs"), dir.join("configs")).unwrap();
    let model = "run_fsdp --nproc-per-node 1 --dataset synthetic --no-eval --vocab-size 320 --save-hf qwen";
    run(dir, &format!("{model} {TINY} {SHAPES}"));
}

/// As a shell splits it, quotes understood.
fn words(line: &str) -> Vec<String> {
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

/// The printed command and what makes it small.
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
