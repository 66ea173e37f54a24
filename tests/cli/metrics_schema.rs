//! docs/metrics.schema.json against the metrics of real runs: each kind of event appears here and is valid, each key of
//! the schema appears, no other does, and docs/watching.md is made from it.
use crate::common::runs::*;
use crate::common::simcuda;
use crate::common::sparse_model;
use rustix::process::Signal;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

fn schema() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.schema.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Where `value` breaks `rules`, a part of `schema`. Our own check, because the crates that do it switch on features of
/// common dependencies, which `cargo test` would then compile again. scripts/watch_check.py asks a validator from PyPI.
fn errors(schema: &Value, rules: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut errors = Vec::new();
    let mut within = |rules: &Value, value: &Value, key: &str| {
        errors.extend(self::errors(schema, rules, value, &format!("{at}.{key}")));
        true
    };
    let is = |kind: &Value| match kind.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("no type {other}"),
    };
    let (object, array) = (value.as_object(), value.as_array());
    let known = |key: &String| rules["properties"].get(key).is_some();
    let prefix = rules["prefixItems"].as_array().map_or(0, Vec::len);
    let mut broken = Vec::new();
    for (keyword, rule) in rules.as_object().unwrap() {
        let list = || rule.as_array().unwrap();
        let fine = match keyword.as_str() {
            "$schema" | "$defs" | "title" | "description" => true,
            "$ref" => within(resolved(schema, rules), value, ""),
            "oneOf" => list().iter().filter(|one| self::errors(schema, one, value, at).is_empty()).count() == 1,
            "const" => value == rule,
            "enum" => list().contains(value),
            "type" => rule.as_array().map_or_else(|| is(rule), |types| types.iter().any(is)),
            "required" => object.is_none_or(|o| list().iter().all(|key| o.contains_key(key.as_str().unwrap()))),
            "additionalProperties" => *rule == json!(false) && object.is_none_or(|o| o.keys().all(known)),
            "properties" => {
                let present =
                    rule.as_object().unwrap().iter().filter_map(|(key, rules)| Some((key, rules, value.get(key)?)));
                present.fold(true, |fine, (key, rules, value)| within(rules, value, key) && fine)
            }
            "prefixItems" => list().iter().zip(array.unwrap()).all(|(rules, value)| within(rules, value, "[]")),
            "items" if *rule == json!(false) => array.is_none_or(|all| all.len() <= prefix),
            "items" => array.into_iter().flatten().skip(prefix).all(|value| within(rule, value, "[]")),
            "minItems" => array.is_none_or(|all| all.len() as u64 >= rule.as_u64().unwrap()),
            "maxItems" => array.is_none_or(|all| all.len() as u64 <= rule.as_u64().unwrap()),
            "minimum" => value.as_f64().is_none_or(|x| x >= rule.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|x| x <= rule.as_f64().unwrap()),
            other => panic!("{other} is not checked here: add it"),
        };
        if !fine {
            broken.push(format!("{at}: {value} against {keyword} {rule}"));
        }
    }
    errors.extend(broken);
    errors
}
fn is_valid(schema: &Value, event: &Value) -> bool {
    errors(schema, schema, event, "").is_empty()
}

/// What [`Lines::check`] has seen.
#[derive(Default)]
struct Lines {
    /// Keys by event.
    keys: BTreeMap<String, BTreeSet<String>>,
    examples: BTreeMap<String, Value>,
}

impl Lines {
    /// Every line of a file is valid.
    #[track_caller]
    fn check(&mut self, schema: &Value, path: &Path) {
        for line in fs::read_to_string(path).unwrap().lines() {
            let event: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
            let kind = event["event"].as_str().unwrap().to_string();
            let errors = errors(schema, &schema["$defs"][&kind], &event, &kind);
            assert!(errors.is_empty() && is_valid(schema, &event), "{errors:#?} in {line}");
            self.keys.entry(kind.clone()).or_default().extend(event.as_object().unwrap().keys().cloned());
            self.examples.insert(kind, event);
        }
    }
}

#[test]
fn every_line_of_a_metrics_file_is_as_the_schema_says() {
    let (dir, schema) = (Dir::new(), schema());
    let mut lines = Lines::default();
    let rows: String = (0..60).map(|i| json!({"input_ids": [i, i + 1, i + 2, i + 3]}).to_string() + "\n").collect();
    fs::write(dir.path("a.jsonl"), rows).unwrap();
    fs::write(dir.path("b.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(60)).unwrap();
    let (a, b, metrics, ckpt) = (dir.arg("a.jsonl:0.7"), dir.arg("b.txt:0.3"), dir.arg("m.jsonl"), dir.arg("ckpt"));
    let path = dir.path("m.jsonl");
    let shared = ["--dataset", &a, &b, "--no-sample", "--metrics-path", &metrics, "--ckpt-dir", &ckpt, "--save-every"];
    let start = |args: &[&str]| {
        let mut command = command(FSDP, &[&shared[..], args].concat());
        Run(command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).spawn().unwrap())
    };
    // A mixture, evaluations, checkpoints, a trace; fp16, whose first gradients overflow: null.
    let fp16 = ["--precision", "fp16", "--initial-scale-power", "24"];
    let traces = dir.arg("traces");
    let first = ["2", "--max-steps", "8", "--eval-every", "2", "--save-on-best", "--profile-steps", "2:3"];
    fs::write(dir.path("prompts.jsonl"), "{\"prompt\": \"The quick\"}\n").unwrap();
    let prompts = dir.arg("prompts.jsonl");
    let sampled = ["--sample-prompts", &prompts, "--max-new-tokens", "4"];
    let ended = start(&[&first[..], &["--trace-folder", &traces], &sampled, &fp16].concat()).end();
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(events(&path, "step")[0]["grad_norm"].is_null(), "{}", ended.stderr);
    // The newest checkpoint is damaged; then a rank is killed.
    let newest = dir.path("ckpt/step-00000008/model.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&newest, bytes).unwrap();
    let more = ["2", "--max-steps", "100", "--resume", "auto", "--max-restarts", "1", "--no-eval"];
    let run = start(&[&more[..], &["--precision", "fp16"]].concat());
    wait_until("a checkpoint of its own", || events(&path, "checkpoint").iter().any(|e| e["step"].as_u64() > Some(10)));
    send(Signal::KILL, run.ranks(2)[1]);
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    lines.check(&schema, &path);
    // Preferences.
    let pair = |i: usize| {
        json!({"prompt_input_ids": [i], "chosen_input_ids": [1, 2], "rejected_input_ids": [3],
            "completion_input_ids": [4, i], "label": i.is_multiple_of(3)})
    };
    fs::write(dir.path("pairs.jsonl"), (0..60).map(|i| pair(i).to_string() + "\n").collect::<String>()).unwrap();
    for objective in ["dpo", "rm", "kto"] {
        let (pairs, metrics) = (dir.arg("pairs.jsonl"), dir.arg(objective));
        let run = ["--dataset", &pairs, "--objective", objective, "--max-steps", "1", "--metrics-path", &metrics];
        let ended = Run::start(FSDP, &[&run[..], &["--eval-dataset", &pairs]].concat()).end();
        assert!(ended.status.success(), "{}", ended.stderr);
        lines.check(&schema, &dir.path(objective));
    }
    let sample = |id: usize| json!({"ids": [id], "logprobs": [-1.0], "reward": id});
    let group = json!({"prompt_ids": [1], "samples": [sample(1), sample(2)]});
    fs::write(dir.path("rollouts.jsonl"), format!("{group}\n").repeat(60)).unwrap();
    let mut grpo = std::process::Command::new(FSDP);
    grpo.args(["--rollouts", "rollouts.jsonl", "--objective", "grpo", "--beta", "0.1", "--max-steps", "1"]);
    grpo.args(["--embed-dim", "16", "--num-layers", "1", "--num-heads", "2", "--max-len", "8"]);
    grpo.args(["--nproc-per-node", "1", "--metrics-path", "grpo"]).current_dir(dir.path(""));
    let output = grpo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    lines.check(&schema, &dir.path("grpo"));
    // Samples and rewards.
    let mut sampling = std::process::Command::new(FSDP);
    sampling.args("--objective grpo --reward json --dataset prompts.jsonl --eval-dataset prompts.jsonl --max-steps 1 --batch-size 1".split(' '));
    sampling.args("--embed-dim 16 --num-layers 1 --num-heads 2 --max-len 16 --max-new-tokens 2".split(' '));
    sampling
        .args("--nproc-per-node 1 --metrics-path sampling --ckpt-dir sampled --save-on-best".split(' '))
        .current_dir(dir.path(""));
    let output = sampling.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    lines.check(&schema, &dir.path("sampling"));
    // Experts.
    sparse_model::write("qwen2_moe", &dir.path("experts"));
    fs::write(dir.path("ids.jsonl"), "{\"input_ids\": [1, 2, 3, 4]}\n".repeat(60)).unwrap();
    let mut experts = std::process::Command::new(FSDP);
    experts.args(["--pretrain", "experts", "--dataset", "ids.jsonl", "--max-steps", "1", "--max-len", "8"]);
    experts.args(["--nproc-per-node", "2", "--ep-size", "2"]).current_dir(dir.path(""));
    experts.args(["--no-sample", "--metrics-path", "experts.jsonl"]);
    let output = experts.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    lines.check(&schema, &dir.path("experts.jsonl"));
    // A teacher of samples.
    fs::write(dir.path("prompts.jsonl"), "{\"prompt_ids\": [1, 2]}\n".repeat(4)).unwrap();
    let mut student = std::process::Command::new(FSDP);
    let on_policy = "--pretrain experts --teacher experts --on-policy --dataset prompts.jsonl --max-new-tokens 2 --max-len 8 \
                     --batch-size 1 --max-steps 1 --nproc-per-node 1 --metrics-path student.jsonl";
    let output = student.args(on_policy.split_whitespace()).current_dir(dir.path("")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    lines.check(&schema, &dir.path("student.jsonl"));
    // A run that fails.
    let failed = dir.arg("failed.jsonl");
    let bad = ["--loss-scale", "1e30", "--precision", "fp16", "--max-bad-steps", "1", "--max-steps", "8"];
    let ended = Run::start(FSDP, &[&bad[..], &["--no-sample", "--metrics-path", &failed]].concat()).end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    lines.check(&schema, &dir.path("failed.jsonl"));
    // A GPU, with what NVML reports.
    let mut gpu = simcuda::run(FSDP, "arch=80");
    let tiny = "--device cuda --nproc-per-node 1 --dataset synthetic --embed-dim 32 --num-layers 1 --num-heads 2 \
                --vocab-size 64 --max-len 16 --batch-size 1 --max-steps 1 --warmup-steps 0 --no-eval --no-sample";
    gpu.args(tiny.split_whitespace()).arg("--metrics-path").arg(dir.path("gpu.jsonl"));
    let output = gpu.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    lines.check(&schema, &dir.path("gpu.jsonl"));
    assert!(lines.examples["step"]["gpu"].is_object(), "{}", lines.examples["step"]);

    // Nothing in the schema is made up.
    let kinds = schema["oneOf"].as_array().unwrap().iter().map(|kind| kind["$ref"].as_str().unwrap());
    let names = |kind: &str| schema["$defs"][kind]["properties"].as_object().unwrap().keys().cloned().collect();
    let described: BTreeMap<String, BTreeSet<String>> =
        kinds.map(|kind| kind.trim_start_matches("#/$defs/")).map(|kind| (kind.to_string(), names(kind))).collect();
    assert_eq!(lines.keys, described);

    // What is not as the schema says, it refuses.
    let step = &lines.examples["step"];
    assert!(is_valid(&schema, step));
    type Plant<'a> = (&'a str, &'a dyn Fn(&mut Map<String, Value>));
    let planted: [Plant; 5] = [
        ("an unknown key", &|e| drop(e.insert("los".into(), json!(1.0)))),
        ("a key less", &|e| drop(e.shift_remove("loss"))),
        ("text for a number", &|e| e["loss"] = json!("NaN")),
        ("an unknown event", &|e| e["event"] = json!("stepp")),
        ("an unknown key below", &|e| drop(e["gpu"].as_object_mut().unwrap().insert("fan".into(), json!(1)))),
    ];
    for (what, plant) in planted {
        let mut event = step.clone();
        plant(event.as_object_mut().unwrap());
        assert!(!is_valid(&schema, &event), "{what}");
    }
    let mut run = lines.examples["run"].clone();
    run["schema"] = json!(1);
    assert!(!is_valid(&schema, &run), "another version");
}

/// Curves of TensorBoard and W&B are numbers of the file.
#[test]
fn scalars_are_keys_of_the_schema() {
    let schema = schema();
    for row in include_str!("../../src/run/watch/scalars.tsv").lines().filter(|row| !row.starts_with('#')) {
        let [event, number, ..] = row.split_whitespace().collect::<Vec<_>>()[..] else { panic!("{row}") };
        let of = |at: &Value, key: &str| resolved(&schema, at)["properties"][key].clone();
        let found = number.split('.').fold(schema["$defs"][event].clone(), |at, key| of(&at, key));
        assert!(!found.is_null(), "{event} has no {number}");
    }
}

fn resolved<'s>(schema: &'s Value, at: &'s Value) -> &'s Value {
    match at["$ref"].as_str() {
        Some(name) => &schema["$defs"][name.trim_start_matches("#/$defs/")],
        None => at,
    }
}

/// Rows of a table: the key, its type, what it is. Keys of an object within follow it; those of an object that stands
/// in several places follow it once.
fn rows(schema: &Value, at: &Value, prefix: &str, known: &mut BTreeSet<String>, out: &mut String) {
    for (key, place) in at["properties"].as_object().into_iter().flatten().filter(|(key, _)| *key != "event") {
        let value = resolved(schema, place);
        let is = match (&value["type"], &value["const"], &value["enum"]) {
            (Value::String(one), ..) => one.clone(),
            (Value::Array(types), ..) => types.iter().map(|t| t.as_str().unwrap()).collect::<Vec<_>>().join(" or "),
            (_, Value::Null, several) => {
                several.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(" or ")
            }
            (_, one, _) => one.to_string(),
        };
        let (name, what) = (format!("{prefix}{key}"), value["description"].as_str().unwrap());
        *out += &format!("| `{name}` | {is} | {what} |\n");
        if place["$ref"].as_str().is_none_or(|place| known.insert(place.into())) {
            rows(schema, value, &format!("{name}."), known, out);
            rows(schema, &value["items"], &format!("{name}[]."), known, out);
        }
    }
}

const BEGIN: &str = "<!-- made from metrics.schema.json -->\n";
const END: &str = "<!-- end of what is made -->\n";

#[test]
fn the_page_is_made_from_the_schema() {
    let schema = schema();
    let (mut tables, mut known) = (String::new(), BTreeSet::new());
    for kind in schema["oneOf"].as_array().unwrap() {
        let event = resolved(&schema, kind);
        let (name, what) = (&event["properties"]["event"]["const"], event["description"].as_str().unwrap());
        tables += &format!(
            "\n### `{}`\n\n{what}\n\n| key | type | what it is |\n| --- | --- | --- |\n",
            name.as_str().unwrap()
        );
        rows(&schema, event, "", &mut known, &mut tables);
    }
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/watching.md")).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the mark is in docs/watching.md");
    let (made, after) = rest.split_once(END).expect("the end mark is in docs/watching.md");
    let expected = format!("{}\n", tables);
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("watching.md");
    fs::write(&to, format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
    assert!(
        made == expected,
        "docs/watching.md is not what docs/metrics.schema.json gives: copy {} over it",
        to.display()
    );
}
