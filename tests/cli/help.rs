//! The help of the binaries, what they print for shells and manuals, and how lines look on a terminal and off it.
use crate::common::runs::*;
use crate::common::terminal::on_a_terminal;
use clap::CommandFactory;
use flatshard::run::settings::args::Cli;
use std::fs;
use std::path::Path;
use std::process::Command;

fn stdout(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}
fn name(program: &str) -> &str {
    Path::new(program).file_name().unwrap().to_str().unwrap()
}
fn flags() -> Vec<String> {
    let command = Cli::command();
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    shown.filter_map(|arg| Some(arg.get_long()?.to_string())).collect()
}
/// Words of a text that begin with dashes, without these and without `[no-]`.
fn named(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| c.is_whitespace() || "`,;:".contains(c));
    words.filter_map(|word| word.strip_prefix("--")).map(|word| word.trim_start_matches("[no-]")).collect()
}
/// Without the bytes that move the cursor and switch colors.
fn plain(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |text, part| {
        text + part.split_once(|c: char| c.is_ascii_alphabetic()).map_or("", |(_, rest)| rest)
    })
}

#[test]
fn help_fits_a_screen_and_a_search_finds_every_flag() {
    for program in [FSDP, DDP] {
        let mut command = Command::new(program);
        command.arg("--help").env("TERM", "xterm").env_remove("NO_COLOR");
        let colored = on_a_terminal(command);
        let screen = plain(&colored).replace('\r', "");
        assert!(colored.contains("\x1b[1m"), "headings are bold: {colored}");
        assert!(screen.lines().count() <= 40, "{} lines: {screen}", screen.lines().count());
        assert!(screen.lines().all(|line| line.chars().count() <= 100), "{screen}");
        for part in
            ["--dataset <PATH|NAME>...", "[default: 0.001]", "[possible values: fp32, bf16, fp16, fp8]", "--help-all"]
        {
            assert!(screen.contains(part), "no {part}: {screen}");
        }
        let text = stdout(program, &["--help"]);
        assert_eq!((text.contains('\x1b'), text == stdout(program, &["-h"])), (false, true));
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let found = named(&text);
        for flag in flags() {
            assert!(found.contains(&flag.as_str()), "--{flag} is not in --help");
        }
        assert!(text.contains("--eps 1e-8") && text.contains("--[no-]shuffle on"), "{text}");
        let all = stdout(program, &["--help-all"]);
        let examples = all.find("\nExamples:").expect("examples");
        assert!(all[examples..].contains(name(program)) && all.rfind("\nGenerate:").is_some_and(|at| at < examples));
    }
}

/// In their order and in one directory: each may read what those before it have left.
#[test]
fn the_examples_of_the_help_work() {
    let dir = Dir::new();
    fs::write(dir.path("text.txt"), "A unit is gathered, used and dropped again. ".repeat(400)).unwrap();
    let help = stdout(FSDP, &["--help"]);
    let examples = help.split_once("Examples:\n").unwrap().1.lines().take_while(|line| line.starts_with("  run_fsdp"));
    let mut ran = 0;
    for line in examples {
        let line = line.split_once('#').unwrap().0.trim();
        let quoted: Vec<&str> = line.split('"').collect();
        let mut args: Vec<&str> = quoted[0].split_whitespace().skip(1).collect();
        args.extend(quoted.get(1));
        let trains = !args.contains(&"--generate");
        let shapes = trains && !args.contains(&"--pretrain");
        let more = |on: bool, words: &'static str| words.split(' ').filter(move |_| on);
        args.extend(more(trains, "--dataset text.txt --max-steps 2 --max-len 32 --batch-size 1 --sample-tokens 4"));
        args.extend(more(shapes, "--embed-dim 32 --num-layers 2"));
        args.extend(more(!trains, "--max-new-tokens 4"));
        let mut command = Command::new(FSDP);
        let out = command.args(&args).current_dir(dir.0.path()).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        ran += 1;
    }
    assert_eq!(ran, 5, "{help}");
}

#[test]
fn completions_and_man_pages_name_their_binary() {
    for program in [FSDP, DDP] {
        let name = name(program);
        for (shell, says) in [("bash", format!("complete -F _{name}")), ("zsh", format!("#compdef {name}"))] {
            let script = stdout(program, &["--completions", shell]);
            assert!(script.contains(&says) && script.contains("--no-shuffle"), "{shell}: {script}");
            assert!(script.contains("--sharding") && script.contains("HYBRID_SHARD"), "{shell}: {script}");
        }
        for shell in ["fish", "powershell", "elvish"] {
            assert!(stdout(program, &["--completions", shell]).contains("max-steps"), "{shell}");
        }
        let page = stdout(program, &["--man"]).replace('\\', "");
        for part in [&format!(".TH {name} 1"), ".SH EXAMPLES", "--[no-]shuffle", "[default: 0.001]"] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
    let refused = Command::new(FSDP).args(["--completions", "csh"]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text.contains("--completions csh: it must be one of bash, elvish, fish, powershell, zsh"), "{text}");
}

/// On the command line and in a file, the names that there are, and the one that was meant.
#[test]
fn a_wrong_value_names_the_allowed_ones() {
    let dir = Dir::new();
    let file = dir.path("c.yaml");
    let refused = |args: &[&str]| {
        let ended = Run::start(FSDP, args).end();
        assert_eq!((ended.status.code(), ended.stderr.lines().count()), (Some(2), 1), "{args:?}: {}", ended.stderr);
        ended.stderr
    };
    let names = "one of constant, linear, cosine, cosine_with_min_lr. Did you mean cosine?";
    let cases = [
        ("--lr-scheduler cosin", "optim: {lr_scheduler: cosin}", "lr_scheduler is cosin", names),
        (
            "--sharding FULLSHARD",
            "fsdp: {sharding: FULLSHARD}",
            "sharding is FULLSHARD",
            "SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD. Did you mean FULL_SHARD?",
        ),
        ("--arch bert", "model: {arch: bert}", "arch is bert", "one of llama, gpt\n"),
        (
            "--cpu-offload gradient",
            "fsdp: {cpu_offload: gradient}",
            "cpu_offload is gradient",
            "parameters, gradients, optimizer. Did you mean gradients?",
        ),
        ("--shuffle=maybe", "data: {shuffle: maybe}", "shuffle is maybe", "one of true, false\n"),
        ("--lr fast", "optim: {lr: fast}", "lr is \"fast\"", "a number"),
        ("--batch-size 2.5", "batch: {batch_size: 2.5}", "batch_size is 2.5", "a whole number, 0 or more"),
        ("--save-every never", "checkpoint: {save_every: never}", "save_every is \"never\"", "or epoch"),
    ];
    for (flag, text, at, says) in cases {
        let words: Vec<&str> = flag.split(' ').collect();
        let (typed, flag) = (refused(&words), words[0].split('=').next().unwrap());
        assert!(typed.contains(flag) && typed.contains(says), "{words:?}: {typed}");
        fs::write(&file, text).unwrap();
        let said = refused(&["--config", file.to_str().unwrap()]);
        assert!(said.contains(&format!("c.yaml: {}.{at}", text.split(':').next().unwrap())), "{said}");
        assert!(said.contains(says), "{text}: {said}");
    }
    assert!(refused(&["--device"]).contains("--device has no value: it takes one of auto, cpu, cuda, sim"));
}

#[test]
fn a_header_fits_a_screen() {
    let dir = Dir::new();
    let (ckpt, rich) =
        (dir.arg("ckpt"), "--no-sample --no-eval --grad-accum 2 --activation-checkpoint --precision fp16");
    let run = |more: &[&str]| {
        let args: Vec<&str> = rich.split(' ').chain(["--ckpt-dir", &ckpt]).chain(more.iter().copied()).collect();
        good(FSDP, &args).stderr
    };
    run(&["--max-steps", "1"]);
    let more = ["--resume", "auto", "--seed", "7", "--warmup-steps", "20", "--cpu-offload"];
    let labels =
        ["model", "ranks", "engine", "dtypes", "batch", "optim", "memory", "data", "warmup", "offload", "resume"];
    let labels = labels.map(|label| format!("{label:<9}"));
    // Off a terminal its lines are whole.
    let text = run(&[&more[..], &["--max-steps", "3"]].concat());
    for label in &labels {
        assert_eq!(text.lines().filter(|line| line.starts_with(label)).count(), 1, "{label}: {text}");
    }
    let args: Vec<&str> = rich.split(' ').chain(["--ckpt-dir", &ckpt, "--max-steps", "4"]).chain(more).collect();
    let shown = plain(&on_a_terminal(command(FSDP, &args)));
    let is_header =
        |line: &&str| labels.iter().any(|label| line.starts_with(label)) || line.starts_with(&" ".repeat(9));
    let lines = shown.lines().map(|line| line.trim_end_matches('\r')).filter(|line| !line.starts_with("warning: "));
    let header: Vec<&str> = lines.skip_while(|line| !is_header(line)).take_while(is_header).collect();
    assert!(header.len() <= 24 && header.iter().all(|line| line.chars().count() <= 100), "{shown}");
    for label in &labels {
        assert_eq!(header.iter().filter(|line| line.starts_with(label)).count(), 1, "{label}: {shown}");
    }
    assert!(text.contains("\nstep 2/3  loss ") && text.contains(" tok/s  mem 0."), "{text}");
}

/// Colors where people read: on a terminal that has them, unless they say that they want none.
#[test]
fn colors_are_for_terminals() {
    let run = |term: &str, no_color: &str| {
        let mut command = command(FSDP, &["--max-steps", "2", "--no-sample", "--log-every", "1"]);
        command.env("TERM", term).env("NO_COLOR", no_color);
        on_a_terminal(command)
    };
    let colored = run("xterm", "");
    for part in ["\x1b[1mmodel\x1b[0m    llama of", "\x1b[1meval\x1b[0m  \x1b[2mstep\x1b[0m 2", "step 2/2"] {
        assert!(colored.contains(part), "no {part:?}: {colored:?}");
    }
    for (term, no_color) in [("xterm", "1"), ("dumb", "")] {
        let text = run(term, no_color);
        // What moves the cursor ends in other letters than `m`.
        let is_color =
            |part: &str| part.find(|c: char| c.is_ascii_alphabetic()).is_some_and(|at| part[at..].starts_with('m'));
        assert!(!text.split("\x1b[").skip(1).any(is_color), "{text:?}");
        assert!(plain(&text).contains("eval  step 2  loss "), "{text:?}");
    }
    let mut refused = Command::new(FSDP);
    refused.args(["--lr", "fast"]).env("TERM", "xterm").env_remove("NO_COLOR");
    assert!(on_a_terminal(refused).starts_with("\x1b[1m\x1b[31merror: \x1b[0m"));
    assert!(!good(FSDP, &["--max-steps", "1"]).stderr.contains('\x1b'));
}
