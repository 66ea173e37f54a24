//! No accepted flag is silently without effect. Every flag has rows in idle_flags.tsv: runs with and without it that
//! differ, or a note or error that it has no effect. These rows also cover every row of idle.tsv.
use crate::common::runs::{DDP, Dir, FSDP, unlaunched};
use crate::common::sparse_model;
use clap::CommandFactory;
use flatshard::run::settings::args::Cli;
use flatshard::run::settings::idle;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Rows of idle.tsv that need a terminal, an external launcher with all its ranks, or a GPU.
const NOT_TRIED: [&str; 3] = [
    "on a terminal the progress bar replaces these lines",
    "an external launcher monitors the ranks",
    "--precision is not fp32",
];

const TINY: &str = "--device cpu --embed-dim 16 --num-layers 1 --num-heads 2 --max-len 16 --batch-size 2 --max-steps 2 \
                    --nproc-per-node 1 --log-every 1 --warmup-steps 0 --lr 0.01 --metrics-path m.jsonl";

/// A row: the flags of a run, the additional flags of a second one, and the expected difference.
struct Recipe {
    flag: &'static str,
    program: &'static str,
    base: Vec<&'static str>,
    more: Vec<&'static str>,
    kind: &'static str,
    text: &'static str,
}

fn recipes() -> Vec<Recipe> {
    let table = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/idle_flags.tsv")).unwrap().leak();
    let rows = table.lines().filter(|line| !line.starts_with('#'));
    let recipe = |line: &'static str| {
        let [flag, base, more, differs] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("four columns: {line}")
        };
        let (program, base) = base.split_once(' ').unwrap_or((base, ""));
        let (kind, text) = differs.split_once(' ').unwrap_or((differs, ""));
        let words = |text: &'static str| text.split(' ').filter(|word| !word.is_empty()).collect();
        Recipe {
            flag,
            program: if program == "ddp" { DDP } else { FSDP },
            base: words(base),
            more: words(more),
            kind,
            text,
        }
    };
    rows.map(recipe).collect()
}

struct Ran {
    dir: PathBuf,
    code: Option<i32>,
    stdout: String,
    stderr: String,
    time: Duration,
}

impl Ran {
    fn new(program: &str, inputs: &Path, dir: PathBuf, words: &[&str]) -> Ran {
        fs::create_dir_all(&dir).unwrap();
        let has = |flag: &str| words.contains(&flag);
        let trains = !["--generate", "--chat", "--lora-merge", "--export"].into_iter().any(has);
        let tiny: Vec<&str> = TINY.split(' ').collect();
        // A model directory has its own shapes; what trains nothing would say of the other flags that they are idle.
        let keep = |flag: &&str| match *flag {
            "--device" | "--nproc-per-node" => true,
            "--warmup-steps" => trains && !has("--warmup-ratio"),
            "--embed-dim" | "--num-layers" | "--num-heads" => trains && !has("--pretrain"),
            _ => trains,
        };
        let kept = tiny.chunks(2).filter(|pair| keep(&pair[0])).flatten();
        let synthetic = ["--dataset", "synthetic"]
            .into_iter()
            .filter(|_| trains && !has("--dataset") && !has("grpo") && !has("IN/two.json"));
        let mut command = unlaunched(program);
        let inputs = format!("{}/", inputs.display());
        command.args(kept).args(synthetic).args(words.iter().map(|word| word.replace("IN/", &inputs)));
        command.env("FLATSHARD_CACHE_DIR", dir.join("tokens")).current_dir(&dir).stdin(Stdio::null());
        let started = Instant::now();
        let out = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&out.stdout), text(&out.stderr));
        Ran { dir, code: out.status.code(), stdout, stderr, time: Instant::now() - started }
    }

    /// Lines about settings without effect.
    fn notes(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| line.contains(" no effect here")).collect()
    }
    /// Values derived from the settings, not the settings.
    fn plan(&self) -> &str {
        self.stdout.find("\nplan:").map_or("", |at| &self.stdout[at..])
    }
    /// Events without times and settings.
    fn metrics(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.join("m.jsonl")).unwrap_or_default();
        let timed = ["seconds", "per_sec", "time", "mfu", "sol", "limits", "mem_", "path"];
        let event = |line: &str| {
            let mut event: Value = serde_json::from_str(line).unwrap();
            for (key, value) in event.as_object_mut().unwrap() {
                if key == "config" || key == "planned_bytes" {
                    *value = Value::Null;
                } else if key.ends_with("_s") || timed.iter().any(|part| key.contains(part)) {
                    *value = json!(!value.is_null());
                }
            }
            event
        };
        text.lines().map(event).collect()
    }
    /// What rank 0 called in step 2, in its order.
    fn trace(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.join("traces/steps-2-2-rank-0.json")).unwrap_or("{}".into());
        let tree: Value = serde_json::from_str(&text).unwrap();
        let mut calls: Vec<(f64, &str)> = tree["traceEvents"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|e| e["ph"] == "X")
            .map(|e| (e["ts"].as_f64().unwrap(), e["name"].as_str().unwrap()))
            .collect();
        calls.sort_by(|a, b| a.0.total_cmp(&b.0));
        let kept = ["start ", "wait ", "forward ", "backward "]; // short calls of the store are not written
        calls
            .into_iter()
            .filter(|(_, name)| kept.iter().any(|k| name.starts_with(k)))
            .map(|(_, name)| name.to_string())
            .collect()
    }
    fn entries(&self, name: &str) -> usize {
        fs::read_dir(self.dir.join(name)).map_or(0, |entries| entries.count())
    }
}

/// The runs without the flag, by program and arguments: many rows share one.
type Baselines = BTreeMap<(&'static str, Vec<&'static str>), OnceLock<Ran>>;

impl Recipe {
    /// Program and arguments of both runs.
    fn base(&self) -> (&'static str, Vec<&'static str>) {
        let extra: &[&str] = match self.kind {
            "plan" => &["--print-config"],
            "trace" => &["--profile-steps", "2:2", "--trace-folder", "traces"],
            _ => &[],
        };
        (self.program, self.base.iter().chain(extra).copied().collect())
    }
    /// What is wrong, or the lines about settings without effect.
    fn try_out(&self, inputs: &Path, [own, shared]: [&Path; 2], baselines: &Baselines) -> Result<Vec<String>, String> {
        let key = self.base();
        let (program, base) = &key;
        let with = Ran::new(program, inputs, own.into(), &[&base[..], &self.more].concat());
        let said = || with.notes().into_iter().map(str::to_string).collect::<Vec<_>>();
        let holds = |holds: bool| match holds {
            true => Ok(said()),
            false => Err(format!("status {:?}: {}{}", with.code, with.stderr, with.stdout)),
        };
        match self.kind {
            "says" => return holds(with.code == Some(0) && with.notes().iter().any(|line| line.contains(self.text))),
            "refused" => {
                let one = with.stderr.lines().count() == 1 && with.stdout.is_empty();
                return holds(with.code == Some(2) && one && with.stderr.contains(self.text));
            }
            "ends" => return holds(with.code != Some(0) && with.stderr.contains(self.text)),
            "slower" => return holds(with.time >= Duration::from_secs_f64(self.text.parse().unwrap())),
            _ => {}
        }
        let without = baselines[&key].get_or_init(|| Ran::new(program, inputs, shared.into(), base));
        if let Some(line) = with.notes().iter().find(|line| !without.notes().contains(line)) {
            return Err(format!("said: {line}"));
        }
        let (absent, name) = self.text.strip_prefix('!').map_or((false, self.text), |name| (true, name));
        let is = |ran: &Ran| ran.dir.join(name).exists();
        let bytes = |ran: &Ran| fs::read(ran.dir.join(name)).unwrap_or_default();
        holds(match self.kind {
            "more" => with.stderr.contains(self.text) && !without.stderr.contains(self.text),
            "less" => !with.stderr.contains(self.text) && without.stderr.contains(self.text),
            "files" => is(&with) != absent && is(without) == absent,
            "bytes" => !bytes(&with).is_empty() && bytes(&with) != bytes(without),
            "entries" => with.entries(name) != without.entries(name),
            _ if with.code != Some(0) => false,
            "metrics" => !with.metrics().is_empty() && with.metrics() != without.metrics(),
            "trace" => !with.trace().is_empty() && with.trace() != without.trace(),
            "plan" => !with.plan().is_empty() && with.plan() != without.plan(),
            "stdout" => with.stdout != without.stdout,
            kind => return Err(format!("{kind} is no kind of difference")),
        })
    }
}

/// Writes the input files of the recipes.
fn inputs(dir: &Dir) -> PathBuf {
    let path = dir.path("in");
    fs::create_dir(&path).unwrap();
    let write = |name: &str, text: &str| fs::write(path.join(name), text).unwrap();
    let rows = |row: &dyn Fn(usize) -> Value| (0..300).map(|i| format!("{}\n", row(i))).collect::<String>();
    let pairs = rows(&|i| json!({"q": "q".repeat(1 + i % 7), "a": "abc"[..1 + i % 3]}));
    let message = |role: &str, content: String| json!({"role": role, "content": content});
    write("text.txt", &"Some text to train on, and a bit more of it. ".repeat(40));
    write("more.txt", &"Other text to train on, and less of it. ".repeat(30));
    write("rows.jsonl", &pairs);
    write("bad.jsonl", &format!("{pairs}{{\"q\": 1}}\n"));
    write("text.jsonl", &rows(&|i| json!({"text": format!("some words {}", "x".repeat(i % 5))})));
    write("lines.jsonl", &rows(&|i| json!({"q": format!("ask {i}"), "a": format!("say {i}\n")})));
    write("ids.jsonl", &rows(&|i| json!({"input_ids": [1, 2, 3, 4 + i % 9]})));
    let pair = |i: usize| {
        let (prompt, other) = ("p".repeat(1 + i % 3), "o".repeat(1 + i % 2));
        json!({"prompt": prompt, "other": other, "chosen": "ab", "rejected": "ba", "third": "bb", "gap": i % 3,
            "good": i.is_multiple_of(2), "fine": i.is_multiple_of(5)})
    };
    write("pairs.jsonl", &rows(&pair));
    let both = |i: usize| {
        let mut row = pair(i);
        row["input_ids"] = json!([1, 2, 3]);
        row
    };
    write("both.jsonl", &rows(&both));
    let sampled = |i: usize| {
        let sample = |j: usize| {
            let ids: Vec<usize> = (0..2 + j).map(|k| 97 + (7 * i + 3 * j + k) % 20).collect();
            let logprobs: Vec<f64> = ids.iter().map(|id| -5.2 - (id % 5) as f64 / 4.0).collect();
            json!({"ids": ids, "logprobs": logprobs, "reward": i * j % 3})
        };
        json!({"prompt_ids": [65 + i % 20], "samples": [sample(0), sample(1), sample(2)]})
    };
    write("rollouts.jsonl", &rows(&sampled));
    write("others.jsonl", &rows(&|i| sampled(i + 1)));
    write("texts.jsonl", &rows(&|i| json!({"text": format!("a {i}")})));
    write("prompts.jsonl", &rows(&|i| json!({"prompt": format!("a {i}"), "answer": i})));
    write(
        "chat.jsonl",
        &rows(&|i| {
            let (user, answer) = (|n| message("user", "u".repeat(n)), |text: &str| message("assistant", text.into()));
            json!({"messages": [user(1 + i % 5), answer("a"), user(1), answer("bc")]})
        }),
    );
    let several = |i: usize| {
        let turns = [message("user", "u".repeat(1 + i % 5)), message("assistant", "ab".into())];
        json!({"messages": turns, "prompt": "p", "completion": "c".repeat(1 + i % 3)})
    };
    write("several.jsonl", &rows(&several));
    write("chat.jinja", "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}");
    write("other.jinja", "{% for m in messages %}{{ m.role[0] }}>{{ m.content }};{% endfor %}");
    write("lr.yaml", "optim: {weight_decay: 0.5}\n");
    write(
        "named.yaml",
        "model_configs: {wide: {ff_hidden_dim: 48}}\ndistributed_examples: {replicas: {strategy: ddp}}\n",
    );
    write("stages.yaml", "training_stages: [{name: first}, {name: second, optim: {optimizer: sgd}}]\n");
    let two = ["text.txt", "more.txt"].map(|name| path.join(name).display().to_string());
    let stage = |name: &str, data: &str| json!({"name": name, "data": {"dataset": data}});
    write("two.json", &json!({"training_stages": [stage("first", &two[0]), stage("second", &two[1])]}).to_string());
    write("ds.json", r#"{"zero_optimization": {"stage": 2}}"#);
    write("secret", "0123456789abcdef0123456789abcdef");
    fs::set_permissions(path.join("secret"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::create_dir(path.join("words")).unwrap();
    let words: serde_json::Map<String, Value> = ["[UNK]", "Some", "text", "to", "train", "on"]
        .iter()
        .enumerate()
        .map(|(i, w)| (w.to_string(), i.into()))
        .collect();
    let model = json!({"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"});
    let tokenizer =
        json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model});
    write("words/tokenizer.json", &tokenizer.to_string());
    write("words/tokenizer_config.json", r#"{"eos_token": "[UNK]"}"#);
    sparse_model::write("mixtral", &path.join("experts"));
    for (i, words) in
        ["--save-hf IN/model", "--save-hf IN/exported", "--ckpt-dir IN/ck --max-steps 1"].iter().enumerate()
    {
        prepare(&path, dir.path(&format!("prepare-{i}")), words);
    }
    prepare(&path, dir.path("prepare-adapter"), "--pretrain IN/model --lora-rank 2 --save-adapter IN/adapter");
    path
}
fn prepare(inputs: &Path, dir: PathBuf, words: &str) {
    let ran = Ran::new(FSDP, inputs, dir, &words.split(' ').collect::<Vec<_>>());
    assert_eq!(ran.code, Some(0), "{words}: {}", ran.stderr);
}

#[test]
fn every_flag_has_an_effect_or_reports_that_it_has_none() {
    let recipes = recipes();
    let flags: BTreeSet<String> =
        Cli::command().get_arguments().filter_map(|a| a.get_long().map(str::to_string)).collect();
    let differs = |recipe: &&Recipe| !["says", "refused"].contains(&recipe.kind);
    for flag in &flags {
        let of: Vec<&Recipe> = recipes.iter().filter(|recipe| recipe.flag == flag).collect();
        assert!(!of.is_empty(), "--{flag} has no row in idle_flags.tsv: what does it change?");
        assert!(
            of.iter().any(differs) || ONLY_SAID.contains(&flag.as_str()),
            "--{flag} has no row in idle_flags.tsv with a run that differs"
        );
    }
    recipes.iter().for_each(|r| assert!(flags.contains(r.flag), "--{} is no flag", r.flag));

    let dir = Dir::new();
    let inputs = inputs(&dir);
    let baselines: Baselines = recipes.iter().map(|recipe| (recipe.base(), OnceLock::new())).collect();
    let (next, said, wrong) = (AtomicUsize::new(0), Mutex::new(String::new()), Mutex::new(Vec::new()));
    let work = || {
        while let Some((i, recipe)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, recipes.get(i)?)))
        {
            let [own, shared] = ["with", "without"].map(|name| dir.path(&format!("{name}-{i}")));
            match recipe.try_out(&inputs, [&own, &shared], &baselines) {
                Ok(lines) => said.lock().unwrap().extend(lines.into_iter().chain(["\n".to_string()])),
                Err(what) => {
                    let (base, more) = (recipe.base.join(" "), recipe.more.join(" "));
                    let differs = format!("{} {}", recipe.kind, recipe.text);
                    wrong.lock().unwrap().push(format!("--{}: {base} | {more}: not {differs}: {what}", recipe.flag));
                }
            }
            let _ = fs::remove_dir_all(own);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(work);
        }
    });
    let (said, wrong) = (said.into_inner().unwrap(), wrong.into_inner().unwrap());
    assert!(wrong.is_empty(), "{} of {} rows do not hold:\n{}", wrong.len(), recipes.len(), wrong.join("\n"));
    for row in idle::rows().filter(|row| !NOT_TRIED.contains(&row.because)) {
        let (what, because) = (row.settings.join(", "), row.because);
        assert!(said.contains(because), "no row of idle_flags.tsv has {what} without effect: {because}");
    }
}

/// A check, and flags whose effect needs a signal, several hosts, a GPU, a launcher, a hub or the wandb package: other
/// tests cover these.
const ONLY_SAID: [&str; 19] = [
    "special-tokens",
    "split",
    "eval-split",
    "tune",
    "nccl-max-ctas",
    "nccl-windows",
    "signals",
    "local-rank",
    "num-nodes",
    "comm",
    "job-secret-file",
    "ranks-per-gpu",
    "tf32",
    "wandb-project",
    "wandb-entity",
    "wandb-name",
    "wandb-group",
    "wandb-tags",
    "wandb-dir",
];
