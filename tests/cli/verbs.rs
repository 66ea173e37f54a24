//! `flatshard VERB` and what its verbs are made of: `--chat` and `--export`. That a verb is the command line it stands
//! for is shown by what both print. Never tests what training does.
use crate::common::binaries::FLATSHARD;
use crate::common::runs::{Dir, FSDP, unlaunched};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};

const TINY: &str = "--device cpu --nproc-per-node 1 --embed-dim 16 --num-layers 2 --num-heads 2 --ff-hidden-dim 16 --max-len 64 \
                    --max-positions 1024 --batch-size 1 --no-eval --no-sample";

fn ran(program: &str, dir: &Path, args: &str, input: &str) -> Output {
    let mut command = unlaunched(program);
    command.args(args.split_whitespace()).current_dir(dir).env("FLATSHARD_CACHE_DIR", dir.join("cache"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}
#[track_caller]
fn stdout(program: &str, dir: &Path, args: &str, input: &str) -> String {
    let out = ran(program, dir, args, input);
    assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}
#[track_caller]
fn refused(program: &str, dir: &Path, args: &str, says: &[&str]) {
    let out = ran(program, dir, args, "");
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{args}: {text}");
    says.iter().for_each(|part| assert!(text.contains(part), "{args}: no {part:?} in {text}"));
}

/// A directory with a model `m` of bytes and rows of a conversation.
fn work() -> Dir {
    let dir = Dir::new();
    stdout(FSDP, dir.0.path(), &format!("{TINY} --dataset synthetic --max-steps 2 --lr 0.1 --save-hf m"), "");
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    fs::write(dir.path("chats.jsonl"), format!("{row}\n").repeat(40)).unwrap();
    let pair = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#;
    fs::write(dir.path("pairs.jsonl"), format!("{pair}\n").repeat(40)).unwrap();
    dir
}

#[test]
fn verbs_stand_for_command_lines() {
    let dir = work();
    for (verb, line) in [
        (
            "sft m chats.jsonl --lr 1e-3 --print-config",
            "--pretrain m --dataset chats.jsonl --objective sft --lr 1e-3 --print-config",
        ),
        ("plan m chats.jsonl --objective sft", "--pretrain m --dataset chats.jsonl --objective sft --print-config"),
        ("dpo m pairs.jsonl --print-config", "--pretrain m --dataset pairs.jsonl --objective dpo --print-config"),
        ("samples m chats.jsonl", "--pretrain m --dataset chats.jsonl --print-samples 5"),
        (
            "generate m abc --max-new-tokens 4 --temperature 0",
            "--pretrain m --generate abc --max-new-tokens 4 --temperature 0",
        ),
    ] {
        let found = stdout(FLATSHARD, dir.0.path(), verb, "");
        assert!(!found.is_empty());
        assert_eq!(found, stdout(FSDP, dir.0.path(), line, ""), "{verb}");
    }
    assert!(stdout(FLATSHARD, dir.0.path(), "--help", "").contains("flatshard chat tuned"));
    assert!(stdout(FLATSHARD, dir.0.path(), "sft --help", "").contains("--save-hf"));
    refused(FLATSHARD, dir.0.path(), "tune m chats.jsonl", &["tune", "sft"]);
    refused(FLATSHARD, dir.0.path(), "sft m", &["needs DATA", "flatshard sft MODEL DATA..."]);
    refused(FSDP, dir.0.path(), "sft m chats.jsonl", &["sft is a verb", "flatshard sft MODEL DATA..."]);
    // Ranks that it starts are started by it.
    stdout(
        FLATSHARD,
        dir.0.path(),
        "sft m chats.jsonl --nproc-per-node 2 --max-steps 1 --no-sample --save-hf tuned",
        "",
    );
    assert!(dir.path("tuned/model.safetensors").exists());
}

/// Lines are messages, answers follow from the whole conversation, and commands change it. The template is the number
/// of messages, and the model knows the letter after each digit.
#[test]
fn a_conversation_has_a_history() {
    let dir = work();
    fs::write(dir.path("digits.txt"), "1b2c3d4e".repeat(600)).unwrap();
    let train = format!("{TINY} --dataset digits.txt --max-steps 60 --lr 0.02 --batch-size 4 --save-hf digits");
    stdout(FSDP, dir.0.path(), &train, "");
    fs::write(dir.path("count.jinja"), "{{ messages | length }}").unwrap();
    let chat = "chat digits --temperature 0 --max-new-tokens 1 --tokenizer-chat-template count.jinja";
    let ask = |input: &str, more: &str| stdout(FLATSHARD, dir.0.path(), &format!("{chat} {more}"), input);
    assert_eq!(ask("first\n\nsecond\n", ""), "b\nd\n");
    assert_eq!(ask("first\n/reset\nfirst\n", ""), "b\nb\n");
    assert_eq!(ask("first\nsecond\n/reset\nfirst\n/quit\nnever\n", "--system-prompt terse"), "c\ne\nc\n");
    assert_eq!(ask("first\n/system terse\nfirst\n/system\nfirst", ""), "b\nc\nb\n");
    let out = ran(FLATSHARD, dir.0.path(), "chat m --max-new-tokens 2", "/what\n/help\n");
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(text.contains("/what is not a command") && text.contains("/reset"), "{text}");
    refused(FLATSHARD, dir.0.path(), "chat m --nproc-per-node 2", &["--chat on 2 ranks", "one process"]);
}

/// On a terminal, the signal of Ctrl-C stops an answer, and at the prompt it ends the program.
#[test]
fn ctrl_c_stops_an_answer() {
    let dir = work();
    fs::write(dir.path("a.txt"), "a".repeat(4000)).unwrap();
    // An answer is longer than what a terminal holds, so it cannot end before its reader has seen the beginning.
    let train = format!("{TINY} --max-positions 200000 --dataset a.txt --max-steps 20 --lr 0.05 --save-hf talker");
    stdout(FSDP, dir.0.path(), &train, "");
    let (mut screen, terminal) = crate::common::terminal::open();
    let mut keys = screen.try_clone().unwrap();
    let mut command = unlaunched(FLATSHARD);
    // What the model knows is an a after some others.
    command.args("chat talker --temperature 0 --max-new-tokens 1000000 --tokenizer-chat-template".split(' '));
    command.arg("{{ messages[-1].content }}").current_dir(dir.0.path());
    command.stdin(terminal.try_clone().unwrap()).stdout(terminal.try_clone().unwrap()).stderr(terminal);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut seen = String::new();
    let mut until = |text: &str| {
        let mut bytes = [0; 4096];
        while !seen.contains(text) {
            let fds = &mut [PollFd::new(&screen, PollFlags::IN)];
            let ready = poll(fds, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
            assert!(ready > 0, "a minute without {text:?} in {seen}");
            let n = screen.read(&mut bytes).unwrap_or(0);
            assert!(n > 0, "no {text:?} in {seen}");
            seen.push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
        seen.drain(..seen.find(text).unwrap() + text.len());
    };
    let interrupt = || kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    until("> ");
    keys.write_all(b"aaaaaaaa\n").unwrap();
    until("aaaaaaaaaaaaaaaa");
    interrupt();
    until("stopped]");
    until("> ");
    interrupt();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_model_is_written_in_other_forms() {
    let dir = work();
    stdout(
        FLATSHARD,
        dir.0.path(),
        "export m --save-hf half --save-dtype bf16 --save-gguf m.gguf --nproc-per-node 2",
        "",
    );
    stdout(FLATSHARD, dir.0.path(), "export m.gguf --save-hf back --save-dtype bf16", "");
    let [half, back] = ["half", "back"].map(|name| fs::read(dir.path(name).join("model.safetensors")).unwrap());
    assert!(half.len() < fs::read(dir.path("m/model.safetensors")).unwrap().len());
    assert_eq!(half.len(), back.len());
    let saves = format!("{TINY} --dataset synthetic --max-steps 2 --ckpt-dir run --save-every 1 --keep 2");
    stdout(FSDP, dir.0.path(), &saves, "");
    stdout(FLATSHARD, dir.0.path(), "export run --save-hf newest", "");
    stdout(FLATSHARD, dir.0.path(), "export run/step-00000002 --save-hf second", "");
    let [newest, second] = ["newest", "second"].map(|name| fs::read(dir.path(name).join("model.safetensors")).unwrap());
    assert!(newest == second);
    refused(FLATSHARD, dir.0.path(), "export m", &["--export needs a model and a place", "--save-hf DIR"]);
    refused(FLATSHARD, dir.0.path(), "export m --save-hf m", &["never overwritten"]);
    let adapted = "sft m chats.jsonl --lora-rank 2 --max-steps 1 --no-sample --nproc-per-node 1 --save-adapter adapter";
    stdout(FLATSHARD, dir.0.path(), adapted, "");
    // The adapter names its model.
    stdout(FLATSHARD, dir.0.path(), "merge adapter --save-hf merged", "");
    stdout(FLATSHARD, dir.0.path(), "merge adapter m --save-hf again", "");
    let [merged, again] = ["merged", "again"].map(|name| fs::read(dir.path(name).join("model.safetensors")).unwrap());
    assert!(merged == again);
}
