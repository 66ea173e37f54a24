//! The best checkpoint and early stopping, from outside: runs learn to count up and are evaluated on counting down, so
//! that their evaluation loss falls and rises again. Expected results are computed from the losses in the metrics file.
use crate::common::runs::{children, events, send, unlaunched, wait_until};
use flatshard::ckpt::state;
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

use crate::common::binaries::{DDP, FSDP};

struct Job(TempDir);

impl Job {
    /// Rows that count up, and eight held-out rows that count down.
    fn new(rows: usize) -> Job {
        let dir = tempfile::tempdir().unwrap();
        let row = |r: usize| (0..12).map(|i| if r + 8 < rows { r + i } else { r + 20 - i } % 16).collect::<Vec<_>>();
        let text: String = (0..rows).map(|r| format!("{{\"input_ids\": {:?}}}\n", row(r))).collect();
        fs::write(dir.path().join("t.jsonl"), text).unwrap();
        Job(dir)
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn command(&self, program: &str, args: &str) -> Command {
        let mut command = unlaunched(program);
        let tiny = "--dataset t.jsonl --embed-dim 32 --num-layers 1 --num-heads 2 --max-len 16 --no-sample --seed 3 \
                    --train-batch-size 24 --lr 0.02 --lr-scheduler constant --warmup-steps 0 --weight-decay 0";
        command.args(tiny.split_whitespace()).args(args.split_whitespace());
        command.current_dir(self.0.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
    /// Its output so far.
    #[track_caller]
    fn run(&self, program: &str, args: &str) -> String {
        let Output { status, stderr, .. } = self.command(program, args).output().unwrap();
        let text = String::from_utf8_lossy(&stderr).into_owned();
        assert!(status.success(), "{args}: {status}\n{text}");
        text
    }
    #[track_caller]
    fn fails(&self, args: &str, status: i32, says: &str) {
        let out = self.command(FSDP, args).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(status) && text.contains(says), "{args}: {}\n{text}", out.status);
    }
    /// The checkpoint that the file `pointer` of `dir` names.
    fn named(&self, dir: &str, pointer: &str) -> PathBuf {
        let name = fs::read_to_string(self.path(dir).join(pointer)).unwrap();
        self.path(dir).join(name.strip_suffix('\n').unwrap())
    }
}

fn listed(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
/// Every file below `dir` except traces; the state without the run id.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).filter(|p| !p.ends_with("comm_traces")) {
        match path.is_dir() {
            true => {
                found.extend(tree(&path).into_iter().map(|(p, b)| (Path::new(path.file_name().unwrap()).join(p), b)))
            }
            false => {
                let content = fs::read(&path).unwrap();
                let content = if path.ends_with(state::FILE) { state::without_id(&content) } else { content };
                found.insert(path.file_name().unwrap().into(), content);
            }
        }
    }
    found
}
#[track_caller]
fn same(a: &Path, b: &Path) {
    let (a, b) = (tree(a), tree(b));
    assert!(a.keys().eq(b.keys()), "{:?}\n{:?}", a.keys(), b.keys());
    a.iter().for_each(|(name, bytes)| assert!(*bytes == b[name], "{name:?} differs"));
}
/// Step and loss of each evaluation.
fn evaluations(metrics: &Path) -> Vec<(u64, f64)> {
    let evals = events(metrics, "eval");
    evals.iter().map(|e| (e["step"].as_u64().unwrap(), e["loss"].as_f64().unwrap())).collect()
}
/// Step and loss of the best one.
fn best(evaluations: &[(u64, f64)]) -> (u64, f64) {
    let lower = |a: (u64, f64), b: &(u64, f64)| if b.1 < a.1 { *b } else { a };
    evaluations.iter().fold((0, f64::INFINITY), lower)
}
fn kept(checkpoint: &Path) -> Value {
    serde_json::from_slice::<Value>(&fs::read(checkpoint.join(state::FILE)).unwrap()).unwrap()["evaluations"].take()
}

const SAVES: &str = "--save-on-best --eval-every 2 --save-every 5 --keep 1 --max-steps 24";

#[test]
fn the_best_checkpoint_is_kept_and_named_and_can_be_resumed() {
    let job = Job::new(100);
    for (dir, flag) in [("ck", "--no-async-save"), ("behind", "--async-save")] {
        job.run(FSDP, &format!("{SAVES} {flag} --ckpt-dir {dir} --metrics-path {dir}.jsonl"));
    }
    let (metrics, mut lowest) = (job.path("ck.jsonl"), f64::INFINITY);
    let (step, loss) = best(&evaluations(&metrics));
    assert!(step > 2 && step < 20, "it overfits: {:?}", evaluations(&metrics));
    for event in events(&metrics, "eval") {
        let loss = event["loss"].as_f64().unwrap();
        assert_eq!(event["best"], loss < lowest, "{event}");
        lowest = lowest.min(loss);
    }
    let name = format!("step-{step:08}");
    assert_eq!(listed(&job.path("ck")), ["best", "latest", &name, "step-00000024"]);
    assert_eq!(job.named("ck", "best"), job.path("ck").join(&name));
    let says = kept(&job.path("ck/step-00000024"));
    let since = (24 - step) / 2;
    assert_eq!(
        (&says["best_step"], says["best_loss"].as_f64(), &says["since_best"], &says["step"]),
        (&step.into(), Some(loss), &since.into(), &24.into())
    );
    let saves = events(&metrics, "checkpoint");
    let save = saves.iter().find(|e| e["step"] == step).unwrap();
    assert_eq!((save["eval_loss"].as_f64(), &save["best"]), (Some(loss), &true.into()));
    let last = saves.last().unwrap();
    assert_eq!(
        (last["eval_loss"].as_f64(), &last["best"]),
        (Some(evaluations(&metrics).last().unwrap().1), &false.into())
    );
    // Checkpoints saved for other reasons have no evaluation.
    let odd = saves.iter().find(|e| e["step"] == 5).unwrap();
    assert!(odd["best"].is_null() && odd["eval_loss"].is_null(), "{odd}");
    same(&job.path("ck"), &job.path("behind"));

    // Exported without training: the loss is that of the best step.
    for from in ["best", "ck/best"] {
        let args = format!("--ckpt-dir ck --resume {from} --max-steps 1 --save-hf hf --metrics-path b.jsonl");
        job.run(FSDP, &args);
        assert_eq!(evaluations(&job.path("b.jsonl")).last(), Some(&(step, loss)));
        assert!(events(&job.path("b.jsonl"), "step").is_empty() && job.path("hf/model.safetensors").exists());
    }
    // A run that ends with loading it exports the same.
    let text = job.run(FSDP, &format!("{SAVES} --load-best --ckpt-dir loads --save-hf loaded"));
    let lower = "the model before training had a better evaluation loss than any step: ";
    assert!(!text.contains(lower), "{text}");
    let weights = |dir: &str| fs::read(job.path(dir).join("model.safetensors")).unwrap();
    assert!(weights("loaded") == weights("hf") && weights("loaded") != weights("loads/step-00000024"));
    // A run that only makes its model worse says so.
    let worse = "--pretrain loaded --dataset t.jsonl --max-len 16 --batch-size 4 --warmup-steps 0 --no-sample --lr 3 \
                 --max-steps 4 --eval-every 2 --save-on-best --load-best --ckpt-dir worse";
    let mut command = unlaunched(FSDP);
    let ended = command.current_dir(job.path("")).args(worse.split_whitespace()).output().unwrap();
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && text.contains(lower), "{text}");
    let says = kept(&job.named("worse", "latest"));
    assert!(says["before"].as_f64() < says["best_loss"].as_f64(), "{says}");
    let texts = ["--resume best", &format!("--resume ck/{name}")].map(|from| {
        let text =
            job.command(FSDP, &format!("--ckpt-dir ck --generate ab --max-new-tokens 8 {from}")).output().unwrap();
        (text.status.success(), text.stdout)
    });
    assert!(texts[0].0 && texts[0] == texts[1], "{texts:?}");
    // A run without --save-on-best does not remove the best checkpoint.
    job.run(FSDP, "--ckpt-dir ck --resume auto --keep 1 --max-steps 26 --save-every 1");
    assert_eq!(listed(&job.path("ck")), ["best", "latest", &name, "step-00000026"]);
}

/// Killed at any time; when the best checkpoint is not named yet; and when `best` cannot be written.
#[test]
fn a_killed_run_ends_with_the_same_best() {
    let job = Job::new(100);
    let steps = SAVES.replace("24", "150");
    job.run(FSDP, &format!("{steps} --ckpt-dir quiet --metrics-path quiet.jsonl"));
    let quiet = job.path("quiet");
    let name = job.named("quiet", "best").file_name().unwrap().to_owned();

    let killed = format!("{steps} --ckpt-dir killed --resume auto --metrics-path killed.jsonl");
    let mut run = job.command(FSDP, &killed).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait_until("it has saved", || events(&job.path("killed.jsonl"), "checkpoint").len() > 5);
    children(run.id()).into_iter().chain([run.id()]).for_each(|pid| send(Signal::KILL, pid));
    run.wait().unwrap();
    job.run(FSDP, &killed);
    same(&quiet, &job.path("killed"));

    // As if killed right after its first checkpoint: nothing names it.
    let first = evaluations(&job.path("quiet.jsonl"))[0].0;
    job.run(FSDP, &format!("{steps} --ckpt-dir unnamed --max-steps {first}"));
    ["best", "latest"].iter().for_each(|file| fs::remove_file(job.path("unnamed").join(file)).unwrap());
    job.run(FSDP, &format!("{steps} --ckpt-dir unnamed --max-steps {first} --resume auto"));
    assert_eq!(job.named("unnamed", "best"), job.path(&format!("unnamed/step-{first:08}")));

    // A directory in place of the pointer file.
    fs::create_dir_all(job.path("blocked/best")).unwrap();
    let blocked = format!("{steps} --ckpt-dir blocked --resume auto");
    job.fails(&blocked, 1, "blocked/best: Is a directory");
    assert_eq!(listed(&job.path("blocked")).iter().filter(|name| name.starts_with("step-")).count(), 1);
    fs::remove_dir(job.path("blocked/best")).unwrap();
    job.run(FSDP, &blocked);
    same(&quiet.join(&name), &job.path("blocked").join(&name));
    assert_eq!(job.named("blocked", "best"), job.path("blocked").join(&name));
}

#[test]
fn another_mesh_resumes_the_best_bit_for_bit() {
    let job = Job::new(100);
    job.run(FSDP, &format!("{SAVES} --ckpt-dir ck --metrics-path m.jsonl"));
    let (step, loss) = best(&evaluations(&job.path("m.jsonl")));
    let meshes = ["--nproc-per-node 3", "--tp-size 2", "--nproc-per-node 4 --ring-attn-size 2"];
    for (i, mesh) in meshes.into_iter().enumerate() {
        let last = 26 + 2 * i as u64;
        let more = SAVES.replace("24", &last.to_string());
        job.run(FSDP, &format!("{more} --ckpt-dir ck --resume auto --metrics-path m.jsonl {mesh}"));
        let says = kept(&job.named("ck", "latest"));
        let found = (&says["best_step"], says["best_loss"].as_f64(), &says["since_best"]);
        assert_eq!(found, (&step.into(), Some(loss), &((last - step) / 2).into()), "{mesh}");
        assert_eq!(listed(&job.path("ck")), ["best", "latest", &format!("step-{step:08}"), &format!("step-{last:08}")]);
    }
    // In another directory there is no best checkpoint, and losses over other rows are not comparable.
    let from = format!("{} --resume ck/latest --ckpt-dir", SAVES.replace("24", "34"));
    let text = job.run(FSDP, &format!("{from} other --metrics-path o.jsonl"));
    assert!(text.contains(&format!("other has no checkpoint of the best one, at step {step}")), "{text}");
    assert_eq!(
        job.named("other", "best"),
        job.path(&format!("other/step-{:08}", best(&evaluations(&job.path("o.jsonl"))).0))
    );
    let text = job.run(FSDP, &format!("{from} rows --max-samples 90"));
    assert!(text.contains("earlier evaluations do not count: they used other rows"), "{text}");
}

/// The first step after which `patience` consecutive evaluations were not lower than the minimum before.
fn expected_stop(evaluations: &[(u64, f64)], patience: usize) -> Option<u64> {
    let (mut lowest, mut since) = (f64::INFINITY, 0);
    evaluations.iter().find_map(|&(step, loss)| {
        since = if loss < lowest { 0 } else { since + 1 };
        lowest = lowest.min(loss);
        (since == patience).then_some(step)
    })
}

#[test]
fn patience_stops_a_run_on_any_mesh_and_survives_restarts() {
    let job = Job::new(100);
    let flags = "--eval-every 2 --patience 3 --max-steps 300 --save-hf hf";
    let meshes = [
        (FSDP, "--nproc-per-node 1"),
        (FSDP, "--nproc-per-node 4 --tp-size 2"),
        (FSDP, "--nproc-per-node 2 --ring-attn-size 2"),
        (DDP, "--nproc-per-node 2"),
    ];
    for (i, (program, mesh)) in meshes.into_iter().enumerate() {
        let run = format!("{flags} {mesh} --ckpt-dir ck{i} --metrics-path m{i}.jsonl --overwrite");
        let text = job.run(program, &run);
        let metrics = job.path(&format!("m{i}.jsonl"));
        let (evals, (end, steps)) = (evaluations(&metrics), (events(&metrics, "end"), events(&metrics, "step")));
        let stop = evals.last().unwrap().0;
        assert_eq!(expected_stop(&evals, 3), Some(stop), "{mesh}: {evals:?}");
        assert_eq!((steps.len() as u64, stop % 2), (stop, 0), "{mesh}");
        assert_eq!((&end[0]["steps"], &end[0]["stopped"]), (&stop.into(), &"patience".into()), "{mesh}");
        let (best_step, loss) = best(&evals);
        let says = format!(
            "stopped after step {stop}: --patience 3, and none of the last 3 evaluations had a loss below {loss:.4} of step {best_step}"
        );
        assert_eq!(text.matches(&says).count(), 1, "{mesh}: {text}");
        assert!(job.path("hf/model.safetensors").exists());
        assert_eq!(job.named(&format!("ck{i}"), "latest"), job.path(&format!("ck{i}/step-{stop:08}")));
        assert!(!job.path(&format!("ck{i}/best")).exists());
        if i > 0 {
            continue;
        }
        // A stopped run stays stopped.
        let again = job.run(program, &format!("{run} --resume auto"));
        assert!(
            again.contains("nothing is left to train: --patience stopped this run; raise it to continue"),
            "{again}"
        );
        assert_eq!(events(&metrics, "step").len() as u64, stop);
        // With a larger patience it continues.
        let larger = run.replace("--patience 3", "--patience 6");
        job.run(program, &format!("{larger} --resume auto"));
        let mut evals = evaluations(&metrics);
        evals.dedup_by_key(|e| e.0); // the last one was repeated
        assert_eq!(expected_stop(&evals, 6), Some(evals.last().unwrap().0), "{evals:?}");
        assert_eq!(events(&metrics, "step").len() as u64, evals.last().unwrap().0);
    }
}

#[test]
fn settings_without_comparable_losses_or_checkpoints_are_refused() {
    let job = Job::new(100);
    for (args, says) in [
        ("--save-on-best", "--save-on-best needs a checkpoint directory: add --ckpt-dir DIR"),
        ("--save-on-best --no-eval --ckpt-dir ck", "--no-eval is set"),
        ("--load-best", "--load-best needs the checkpoint with the lowest evaluation loss: add --save-on-best"),
        (
            "--load-best --save-on-best --ckpt-dir ck",
            "--load-best compares evaluations during the run: add --eval-every STEPS",
        ),
        ("--patience 2", "--patience 2 compares evaluations during the run: add --eval-every STEPS"),
        ("--patience 0 --eval-every 2", "patience is 0"),
        ("--resume best --ckpt-dir ck", "ck/best: no such file; it is written with --save-on-best"),
    ] {
        job.fails(&format!("--max-steps 2 {args}"), 2, says);
    }
    let few = Job::new(70);
    for flag in ["--save-on-best --ckpt-dir ck", "--patience 1 --eval-every 1"] {
        few.fails(&format!("--max-steps 2 {flag}"), 2, "this data set has no held-out rows");
    }
    assert!(!job.path("ck").exists() && !few.path("ck").exists());
}

#[test]
fn each_stage_and_adapter_has_its_own_best() {
    let job = Job::new(100);
    let stages = "training_stages:\n  a: {run: {patience: 2, eval_every: 2, max_steps: 300}, optim: {lr: 0.05}}\n  \
                  b: {run: {max_steps: 4}, optim: {lr: 0.0001}}\n";
    fs::write(job.path("s.yaml"), stages).unwrap();
    let run = "--config s.yaml --ckpt-dir ck --save-on-best --metrics-path m.jsonl";
    job.run(FSDP, &run.replace(" --save-on-best", " --save-on-best --resume auto"));
    let ends = events(&job.path("m.jsonl"), "end");
    assert_eq!((&ends[0]["stopped"], &ends[1]["stopped"]), (&"patience".into(), &Value::Null));
    for stage in ["ck/a", "ck/b"] {
        assert!(job.named(stage, "best").join("model.safetensors").exists());
    }
    // A stopped stage is done: only the next one is evaluated again.
    job.run(FSDP, &format!("{run} --resume auto"));
    assert_eq!(events(&job.path("m.jsonl"), "run").len(), 3);

    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pretrained/llama");
    let lora = format!("{SAVES} --load-best --ckpt-dir lora --lora-rank 4 --lr 0.3 --save-adapter adapter");
    let mut command = Command::new(FSDP);
    command.current_dir(job.0.path()).arg("--pretrain").arg(base).args(lora.split_whitespace());
    let rest = "--dataset t.jsonl --max-len 16 --batch-size 2 --lr-scheduler constant --warmup-steps 0 --no-sample";
    let out = command.args(rest.split_whitespace()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let weights = |dir: PathBuf| fs::read(dir.join("adapter_model.safetensors")).unwrap();
    let (best, newest) = (weights(job.named("lora", "best")), weights(job.named("lora", "latest")));
    assert!(best != newest && best == weights(job.path("adapter")));
    assert!(kept(&job.named("lora", "latest"))["best_saved"] == true);
}
