//! Recovery: damaged checkpoints are skipped with a warning if an older one is intact; leftovers of interrupted saves
//! are removed; a refused write names the file.
use crate::common::runs::*;
use flatshard::ckpt::state;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

const STEPS: [&str; 6] = ["--max-steps", "8", "--save-every", "2", "--lr-scheduler", "constant"];

/// Its name, and how the damage is done.
type Damage = (&'static str, fn(&Path));

fn flip(path: &Path, from_end: usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - from_end;
    bytes[at] ^= 4;
    fs::write(path, bytes).unwrap();
}

/// In tensors, which ranks read; in a small file and in a header, which are read before; half a checkpoint.
#[test]
fn a_damaged_checkpoint_is_skipped_with_a_warning_and_the_run_ends_bitwise_equal() {
    let dir = Dir::new();
    let (quiet, other) = (dir.arg("quiet.jsonl"), dir.arg("other"));
    good(FSDP, &[&STEPS[..], &["--metrics-path", &quiet, "--ckpt-dir", &other]].concat());
    let kinds: [Damage; 4] = [
        ("was changed after it was saved", |c| flip(&c.join("optimizer.safetensors"), 1000)),
        ("config.json: was changed", |c| flip(&c.join("config.json"), 20)),
        ("header", |c| {
            let mut bytes = fs::read(c.join("model.safetensors")).unwrap();
            bytes[8] ^= 8;
            fs::write(c.join("model.safetensors"), bytes).unwrap();
        }),
        ("not a complete checkpoint", |c| fs::remove_file(c.join("trainer_state.json")).unwrap()),
    ];
    for (n, (said, damage)) in kinds.into_iter().enumerate() {
        let (ckpt, metrics) = (dir.arg(&format!("ckpt{n}")), dir.arg(&format!("m{n}.jsonl")));
        let run = [&STEPS[..], &["--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--resume", "auto"]].concat();
        good(FSDP, &run);
        let step = |step: u64| Path::new(&ckpt).join(format!("step-{step:08}"));
        damage(&step(8));
        damage(&step(6));
        let ended = good(FSDP, &run);
        let warning = ended.stderr.lines().find(|l| l.starts_with("warning: damaged checkpoint: ")).unwrap_or_default();
        assert!(warning.contains("step-00000008") && warning.contains(said), "{said}: {}", ended.stderr);
        assert!(ended.stderr.contains(&format!("warning: resuming from {}, step 4", step(4).display())), "{said}");
        let path = dir.path(&format!("m{n}.jsonl"));
        assert_eq!(events(&path, "run")[1]["resumed_from_step"], 4, "{said}");
        assert_eq!(events(&path, "damaged").len(), 2, "{said}");
        assert_eq!(losses(&path), losses(&dir.path("quiet.jsonl")), "{said}");
        for file in ["model.safetensors", "optimizer.safetensors", "trainer_state.json"] {
            let [a, b] = [step(8), dir.path("other/step-00000008")].map(|dir| fs::read(dir.join(file)).unwrap());
            // Run ids differ.
            let equal = if file == state::FILE { state::without_id(&a) == state::without_id(&b) } else { a == b };
            assert!(equal, "{file} differs");
        }
        // A checkpoint named explicitly is not replaced by another.
        damage(&step(8));
        let named = ["--max-steps", "10", "--resume", &step(8).display().to_string()];
        let ended = Run::start(FSDP, &named).end();
        assert_eq!(ended.status.code(), Some(2), "{said}: {}", ended.stderr);
        assert!(ended.stderr.contains("step-00000008"), "{said}: {}", ended.stderr);
        // And no fresh run starts where checkpoints exist.
        [2, 4, 6].into_iter().for_each(|n| damage(&step(n)));
        let ended = Run::start(FSDP, &run).end();
        assert_eq!(ended.status.code(), Some(2), "{said}: {}", ended.stderr);
        for n in [2, 4, 6, 8] {
            assert!(ended.stderr.contains(&format!("step-{n:08}")), "{said}: {}", ended.stderr);
        }
    }
}

/// A wrong flag is not damage: no older checkpoint is tried.
#[test]
fn a_checkpoint_of_another_model_is_refused_not_skipped() {
    let dir = Dir::new();
    let ckpt = dir.arg("ckpt");
    let run = [&STEPS[..], &["--ckpt-dir", &ckpt, "--resume", "auto"]].concat();
    good(FSDP, &run);
    let ended = Run::start(FSDP, &[&run[..], &["--optimizer", "sgd"]].concat()).end();
    assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("step-00000008") && !ended.stderr.contains("step-00000006"), "{}", ended.stderr);
}

#[test]
fn interrupted_saves_are_removed_at_a_restart() {
    let dir = Dir::new();
    let (metrics, ckpt) = (dir.arg("m.jsonl"), dir.arg("ckpt"));
    let flags = ["--max-steps", "1000000", "--max-restarts", "1", "--metrics-path", &metrics, "--ckpt-dir", &ckpt];
    let run = Run::start(FSDP, &flags);
    let path = dir.path("m.jsonl");
    wait_until("it trains", || steps(&path) > 0);
    let left =
        [".tmp-step-00000100-00000000000000ff", ".tmp-step-00000004-pruned"].map(|name| dir.path("ckpt").join(name));
    left.iter().for_each(|left| fs::create_dir_all(left.join("inside")).unwrap());
    send(Signal::KILL, run.ranks(2)[1]);
    wait_until("it goes on", || events(&path, "run").len() == 2 && !events(&path, "step").is_empty());
    assert!(
        left.iter().all(|left| !left.exists()),
        "{:?}",
        fs::read_dir(dir.path("ckpt")).unwrap().collect::<Vec<_>>()
    );
}

/// By default the system kills a process, without a message, that exceeds the file-size limit (`ulimit -f`).
#[test]
fn a_file_size_limit_is_an_error_with_a_remedy() {
    let run = command(FSDP, &["--max-steps", "2"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 200; exec \"$@\"", "sh"]).arg(run.get_program()).args(run.get_args());
    let ended = Run(limited.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()).end();
    assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("error: the file-size limit blocks") && ended.stderr.contains("ulimit -f unlimited"));
}

/// A limit that is imposed during a run, as a quota may be: the rank names the file it could not write, and with
/// restarts the run continues once there is room.
#[test]
fn a_refused_write_names_the_file_and_is_retried() {
    let dir = Dir::new();
    let (quiet, metrics, ckpt) = (dir.arg("quiet.jsonl"), dir.arg("m.jsonl"), dir.arg("ckpt"));
    let flags = [&["--lr-scheduler", "constant", "--max-steps"], &["30"][..]].concat();
    good(FSDP, &[&flags[..], &["--metrics-path", &quiet]].concat());
    let more = ["--save-every", "5", "--max-restarts", "1", "--metrics-path", &metrics, "--ckpt-dir", &ckpt];
    let run = Run::start(FSDP, &[&flags[..], &more].concat());
    let path = dir.path("m.jsonl");
    wait_until("it trains", || steps(&path) > 0);
    let limit = Rlimit { current: Some(4096), maximum: None };
    prlimit(Pid::from_raw(run.ranks(2)[1] as i32), Resource::Fsize, limit).unwrap();
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    let message = events(&path, "restart")[0]["message"].to_string();
    assert!(message.contains("rank 1 failed") && message.contains(".safetensors: File too large"), "{message}");
    assert_eq!(losses(&path), losses(&dir.path("quiet.jsonl")));
}
