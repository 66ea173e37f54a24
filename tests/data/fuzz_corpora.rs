//! Replays the fuzz targets' inputs and findings from `fuzz/corpus`, without a nightly compiler.
#[path = "../../fuzz/targets.rs"]
mod targets;

use std::path::Path;

fn replay(name: &str, target: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(files.len() > 3, "{} holds {} files", dir.display(), files.len());
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        if let Err(panic) = std::panic::catch_unwind(|| target(&bytes)) {
            eprintln!("{}", file.display());
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn headers() {
    replay("header", targets::header);
}
#[test]
fn gguf_files() {
    replay("gguf", targets::gguf);
}
#[test]
fn indices() {
    replay("index", targets::index);
}
#[test]
fn configs() {
    replay("config", targets::config);
}
#[test]
fn rows() {
    replay("jsonl", targets::jsonl);
}
#[test]
fn tokenizers() {
    replay("tokenizer", targets::tokenizer);
}
#[test]
fn templates() {
    replay("template", targets::template);
}
#[test]
fn configurations() {
    replay("yaml", targets::yaml);
}
#[test]
fn configurations_of_deepspeed() {
    replay("deepspeed", targets::deepspeed);
}
#[test]
fn greetings_and_tables() {
    replay("rendezvous", targets::rendezvous);
}
#[test]
fn frames() {
    replay("frame", targets::frame);
}
