//! Preference learning from the command line: the shipped examples learn, pairs are read in all their forms and never
//! split, packing changes nothing, and bad pairs are refused with one message.
use crate::common::runs::{Dir, FSDP, events, unlaunched};
use crate::common::*;
use flatshard::base::Result;
use flatshard::data::{
    Cache, DataOptions, Dataset, Format, LabelKeys, Loader, MicroBatch, PairKeys, Preferences, SampleKind, StepData,
    Tokenizer,
};
use flatshard::device::IGNORE;
use flatshard::engine::{Dpo, Engine, EngineOptions, Kto, Objective, ReferenceModel, Rm, Step};
use flatshard::store::{ShardedOptions, initialize};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

fn run(args: &[&str]) -> Output {
    let mut command = unlaunched(FSDP);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args).output().unwrap()
}
fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Held-out pairs are told apart, in seconds.
#[test]
fn the_shipped_example_learns_the_preference() {
    let dir = Dir::new();
    let ended = run(&["--config", "configs/dpo.yaml", "--eval-every", "epoch", "--metrics-path", &dir.arg("m.jsonl")]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let (steps, evaluations) = (events(&dir.path("m.jsonl"), "step"), events(&dir.path("m.jsonl"), "eval"));
    let number = |event: &Value, key: &str| event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"));
    // The policy starts as the reference: no pair is preferred, and the loss is log 2.
    assert!((number(&steps[0], "loss") - 2f64.ln()).abs() < 1e-6, "{}", steps[0]);
    assert_eq!([number(&steps[0], "reward_chosen"), number(&steps[0], "reward_accuracy")], [0.0, 0.0]);
    let last = evaluations.last().unwrap();
    assert_eq!(number(last, "pairs"), 64.0);
    assert!(number(last, "reward_accuracy") > 0.9, "{last}");
    let [margin, chosen, rejected] = ["margin", "chosen", "rejected"].map(|of| number(last, &format!("reward_{of}")));
    assert!(margin > 1.0 && margin == chosen - rejected, "{last}");
    assert!(number(last, "reward_chosen") > number(last, "reward_rejected"), "{last}");
}

/// The reward model too; what it saves starts the next run where this one ended. The files stay in target/tmp, where
/// `tests/golden/preference.py check` compares its scores with transformers'.
#[test]
fn the_shipped_reward_model_learns_and_is_saved() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("preference");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let path = |name: &str| dir.join(name).display().to_string();
    let ended =
        run(&["--config", "configs/rm.yaml", "--metrics-path", &path("m.jsonl"), "--save-hf", &path("shipped")]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let evaluations = events(&dir.join("m.jsonl"), "eval");
    let number = |event: &Value, key: &str| event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"));
    let last = evaluations.last().unwrap();
    assert!(number(last, "accuracy") > 0.9, "{last}");
    // From the directory, on token ids: the first evaluation is the last one's.
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let rows = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/pairs_eval.jsonl")).unwrap();
    let tokens = rows.lines().map(|row| {
        let row: Value = serde_json::from_str(row).unwrap();
        let [prompt, chosen, rejected] = ["prompt", "chosen", "rejected"].map(|key| ids(row[key].as_str().unwrap()));
        let [chosen, rejected] = [chosen, rejected].map(|answer| [answer, vec![256]].concat());
        json!({"prompt_input_ids": prompt, "chosen_input_ids": chosen, "rejected_input_ids": rejected}).to_string()
            + "\n"
    });
    std::fs::write(path("pairs.jsonl"), tokens.collect::<String>()).unwrap();
    let more = "--objective rm --max-len 192 --max-steps 1 --warmup-steps 0 --lr 0 --batch-size 4 --nproc-per-node 2";
    let (pairs, metrics) = (path("pairs.jsonl"), path("metrics.jsonl"));
    let (from, to) = (path("shipped"), path("reward"));
    let files = ["--pretrain", &from, "--dataset", &pairs, "--eval-dataset", &pairs, "--metrics-path", &metrics];
    let args: Vec<&str> = more.split_whitespace().chain(files).chain(["--save-hf", &to]).collect();
    let ended = run(&args);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let again = events(&dir.join("metrics.jsonl"), "eval");
    for key in ["reward_chosen", "reward_rejected", "loss"] {
        let (a, b) = (number(last, key), number(&again[0], key));
        assert!((a - b).abs() < 1e-6 * a.abs().max(1.0), "{key}: {a} and {b}");
    }
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("reward/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!(config["id2label"], json!({"0": "LABEL_0"}));
    // Adapters of it, with the head, for the same check.
    let adapter = path("adapter");
    let files =
        ["--pretrain", &from, "--dataset", &pairs, "--eval-dataset", &pairs, "--metrics-path", &path("adapter.jsonl")];
    let tuned = "--objective rm --max-len 192 --max-steps 2 --warmup-steps 0 --lr 0.01 --batch-size 4 --nproc-per-node 2 \
                 --lora-rank 2";
    let ended = run(&tuned.split_whitespace().chain(files).chain(["--save-adapter", &adapter]).collect::<Vec<_>>());
    assert!(ended.status.success(), "{}", stderr(&ended));
    let written: Value =
        serde_json::from_slice(&std::fs::read(dir.join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&written["task_type"], &written["modules_to_save"]), (&json!("SEQ_CLS"), &json!(["score"])));
    let merged = path("merged");
    let ended = run(&["--pretrain", &from, "--lora-merge", &adapter, "--save-hf", &merged]);
    assert!(ended.status.code() == Some(2) && stderr(&ended).lines().count() == 1, "{}", stderr(&ended));
    let ended = run(&["--pretrain", &from, "--lora-merge", &adapter, "--save-hf", &merged, "--objective", "rm"]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let metrics = path("merged.jsonl");
    let files = ["--pretrain", &merged, "--dataset", &pairs, "--eval-dataset", &pairs, "--metrics-path", &metrics];
    let ended = run(&more.split_whitespace().chain(files).collect::<Vec<_>>());
    assert!(ended.status.success(), "{}", stderr(&ended));
    let losses =
        ["adapter.jsonl", "merged.jsonl"].map(|name| number(events(&dir.join(name), "eval").last().unwrap(), "loss"));
    assert!((losses[0] - losses[1]).abs() < 1e-5, "{losses:?}");
    // Other runs refuse its head, and a head of several labels is refused.
    let refused = |args: &[&str], says: &str| {
        let ended = run(args);
        let said = stderr(&ended);
        assert!(ended.status.code() == Some(2) && said.contains(says) && said.lines().count() == 1, "{args:?}: {said}");
    };
    refused(&["--pretrain", &to, "--dataset", &pairs, "--objective", "dpo", "--max-len", "192"], "is a reward model");
    refused(&["--pretrain", &to, "--generate", "a"], "is a reward model");
    let mut three = config.clone();
    three["id2label"] = json!({"0": "a", "1": "b", "2": "c"});
    std::fs::write(dir.join("shipped/config.json"), three.to_string()).unwrap();
    refused(&["--pretrain", &from, "--dataset", &pairs, "--objective", "rm", "--max-len", "192"], "3 labels");
    std::fs::write(dir.join("shipped/config.json"), config.to_string()).unwrap();
}

/// The same three pairs as text, as messages, as whole conversations and as tokens give the same run.
#[test]
fn every_form_of_a_pair_is_read() {
    let dir = Dir::new();
    let texts = [("ab", "cd", "e"), ("a", "bcd", "b"), ("abc", "d", "dd")];
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let answer = |text: &str| [ids(text), vec![256]].concat(); // the end of text
    let write = |name: &str, row: &dyn Fn(&str, &str, &str) -> Value| {
        let rows: Vec<String> = texts.iter().map(|(p, c, r)| row(p, c, r).to_string() + "\n").collect();
        std::fs::write(dir.path(name), rows.concat().repeat(4)).unwrap();
    };
    write("text.jsonl", &|p, c, r| json!({"prompt": p, "chosen": c, "rejected": r}));
    write(
        "tokens.jsonl",
        &|p, c, r| json!({"prompt_input_ids": ids(p), "chosen_input_ids": answer(c), "rejected_input_ids": answer(r)}),
    );
    write(
        "messages.jsonl",
        &|p, c, r| json!({"prompt": [turn("user", p)], "chosen": [turn("assistant", c)], "rejected": turn("assistant", r)}),
    );
    write("whole.jsonl", &|p, c, r| {
        let whole = |answer| json!([turn("user", p), turn("assistant", answer)]);
        json!({"prompt": p, "chosen": whole(c), "rejected": whole(r)})
    });
    write("sharegpt.jsonl", &|p, c, r| {
        let turn = |who: &str, text: &str| json!({"from": who, "value": text});
        json!({"question": [turn("human", p)], "good": turn("gpt", c), "bad": turn("gpt", r)})
    });
    // OpenAI's, ms-swift's, and the ids of TRL's tokenized data sets.
    write("openai.jsonl", &|p, c, r| {
        let said = |answer| json!([turn("assistant", answer)]);
        json!({"input": {"messages": [turn("user", p)]}, "preferred_output": said(c), "non_preferred_output": said(r)})
    });
    write(
        "response.jsonl",
        &|p, c, r| json!({"messages": [turn("user", p), turn("assistant", c)], "rejected_response": r}),
    );
    write("rejected.jsonl", &|p, c, r| {
        let whole = |answer| json!([turn("user", p), turn("assistant", answer)]);
        json!({"messages": whole(c), "rejected_messages": whole(r)})
    });
    write("trl.jsonl", &|p, c, r| json!({"prompt_ids": ids(p), "chosen_ids": answer(c), "rejected_ids": answer(r)}));
    let losses = |name: &str, more: &[&str]| {
        let (data, metrics) = (dir.arg(name), dir.arg(&format!("{name}.metrics")));
        let tiny = "--objective dpo --tokenizer bytes --vocab-size 320 --embed-dim 16 --num-layers 1 --num-heads 2 \
                    --nproc-per-node 1 --max-len 16 --batch-size 4 --max-steps 3 --lr 0.1 --warmup-steps 0 --no-shuffle";
        let args: Vec<&str> = tiny.split_whitespace().chain(["--dataset", &data, "--metrics-path", &metrics]).collect();
        let ended = run(&[&args[..], more].concat());
        assert!(ended.status.success(), "{name}: {}", stderr(&ended));
        let steps = events(&dir.path(&format!("{name}.metrics")), "step");
        steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    // The template adds nothing, so that all forms are the same text.
    let plain = ["--tokenizer-chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"];
    let keys = ["--prompt-key", "question", "--chosen-key", "good", "--rejected-key", "bad"];
    let text = losses("text.jsonl", &[]);
    assert!(text[2] < text[0], "{text:?}");
    for (name, more) in [
        ("tokens.jsonl", &[][..]),
        ("trl.jsonl", &[]),
        ("openai.jsonl", &plain),
        ("response.jsonl", &plain),
        ("rejected.jsonl", &plain),
        ("messages.jsonl", &plain),
        ("whole.jsonl", &plain),
        ("sharegpt.jsonl", &[&keys[..], &plain].concat()),
    ] {
        assert_eq!(losses(name, more), text, "{name}");
    }
}

#[test]
fn bad_pairs_are_refused_with_one_message() {
    let dir = Dir::new();
    let tiny =
        "--objective dpo --embed-dim 16 --num-layers 1 --num-heads 2 --nproc-per-node 1 --max-len 64 --batch-size 1";
    let refused = |name: &str, row: Value, says: &[&str]| {
        std::fs::write(dir.path(name), format!("{row}\n").repeat(4)).unwrap();
        let data = dir.arg(name);
        let args: Vec<&str> = tiny.split_whitespace().chain(["--dataset", &data]).collect();
        let ended = run(&args);
        let said = stderr(&ended);
        assert_eq!((ended.status.code(), said.lines().count()), (Some(2), 1), "{row}: {said}");
        says.iter().for_each(|text| assert!(said.contains(text), "{row}: {text} is not in {said}"));
    };
    let pair =
        |prompt: &str, chosen: &str, rejected: &str| json!({"prompt": prompt, "chosen": chosen, "rejected": rejected});
    refused("empty.jsonl", pair("a", "", "b"), &["line 1", "empty answer", "`chosen`"]);
    refused("silent.jsonl", pair("a", "b", ""), &["line 1", "empty answer", "`rejected`"]);
    refused("mute.jsonl", pair("", "b", "c"), &["line 1", "empty prompt"]);
    refused("equal.jsonl", pair("a", "b", "b"), &["line 1", "equal answers"]);
    refused("missing.jsonl", json!({"prompt": "a", "chosen": "b"}), &["line 1", "no `rejected`", "prompt, chosen"]);
    refused("long.jsonl", pair("a", "b", &"c".repeat(80)), &["max_len 64", "Increase"]);
    refused("number.jsonl", json!({"prompt": "a", "chosen": 1, "rejected": "b"}), &["a number as chosen"]);
    let ids = |chosen: &[u32]| json!({"prompt_input_ids": [1], "chosen_input_ids": chosen, "rejected_input_ids": [3]});
    refused("none.jsonl", ids(&[]), &["no tokens in `chosen_input_ids`"]);
    refused("same.jsonl", ids(&[3]), &["equal answers"]);
    refused("foreign.jsonl", ids(&[5000]), &["token id 5000", "vocab_size"]);
    let talk = |first: &str| {
        let turn = |role: &str, text: &str| json!({"role": role, "content": text});
        json!([turn("user", first), turn("assistant", first)])
    };
    refused(
        "bare.jsonl",
        json!({"preferred_output": talk("a"), "non_preferred_output": talk("b")}),
        &["object as `input`"],
    );
    refused("ids.jsonl", json!({"chosen_ids": [1, 2], "rejected_ids": [1, 3]}), &["no `prompt_input_ids`"]);
    refused("two.jsonl", json!({"chosen": talk("a"), "rejected": talk("b")}), &["line 1", "different conversations"]);
}

const LEN: usize = 12;

fn data_options(dir: &Path, name: &str, preferences: Preferences) -> DataOptions {
    DataOptions {
        paths: vec![dir.join(name)],
        tokenizer: Tokenizer::Bytes,
        format: Format { preferences: Some(preferences), ..Format::default() },
        vocab: 257,
        max_len: LEN,
        max_samples: None,
        seed: 1,
        cache: Cache::at(dir.join("cache")),
        cargo_home: None,
    }
}

/// `n` pairs or labeled answers of unequal lengths, and one that does not fit.
fn judged(n: usize, labeled: bool) -> (tempfile::TempDir, Arc<Dataset>) {
    let row = |i: usize| {
        let text = |from: usize, len: usize| {
            (0..len).map(|k| (b'a' + ((from + 3 * k) % 26) as u8) as char).collect::<String>()
        };
        let (prompt, chosen, rejected) = (text(i, 1 + i % 4), text(i + 1, 1 + i % 6), text(i + 2, 1 + i * i % 5));
        let pair = json!({"prompt": prompt, "chosen": chosen, "rejected": rejected});
        let answer = json!({"prompt": prompt, "completion": chosen, "label": !i.is_multiple_of(3)});
        if labeled { answer } else { pair }.to_string() + "\n"
    };
    let long = "b".repeat(LEN);
    let long = json!({"prompt": "a", "chosen": long, "rejected": "c", "completion": long, "label": true}).to_string();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("p.jsonl"), (0..n).map(row).collect::<String>() + &long).unwrap();
    let labels = || Preferences::Labels(LabelKeys::default());
    let preferences = if labeled { labels() } else { Preferences::Pairs(PairKeys::default()) };
    let data = Arc::new(Dataset::open(&data_options(dir.path(), "p.jsonl", preferences)).unwrap());
    (dir, data)
}
fn pairs(n: usize) -> (tempfile::TempDir, Arc<Dataset>) {
    judged(n, false)
}

fn loader(data: &Arc<Dataset>, grad_accum: usize, rank: (usize, usize), packing: bool) -> Loader {
    super::sft::loader(data, 1, grad_accum, rank, packing)
}

/// Sequences of an epoch, each of one pair or of several packed ones.
fn packs(data: &Arc<Dataset>, packing: bool) -> usize {
    let mut loader = loader(data, 1, (0, 1), packing);
    let rows = loader.rows_per_epoch();
    loader.steps_until(rows, u64::MAX) as usize
}

/// One epoch as one step, every pair once.
fn epoch(data: &Arc<Dataset>, score: bool, world: usize, packing: bool, spoil: bool) -> Outcome {
    let spec = flatshard::nn::Spec { vocab: 257, max_len: 2 * LEN, score, ..llama() };
    let grad_accum = packs(data, packing) / world;
    let objective = match data.kind() {
        SampleKind::Labeled => Objective::Kto(Kto { beta: 0.5, desirable_weight: 1.5, undesirable_weight: 0.5 }),
        _ if score => Objective::Rm(Rm),
        _ => Objective::Dpo(Dpo { beta: 0.5, label_smoothing: 0.0, ipo: false, nll_coef: 0.1 }),
    };
    let plain = options(&spec, fsdp(ShardedOptions { grad_accum, ..sharded() }), SGD);
    let reference = if score { ReferenceModel::Base } else { ReferenceModel::Frozen(spec.clone().into()) };
    let options = EngineOptions { objective, reference, grad_clip: 0.0, ..plain };
    let results = ranks(world, |rank| {
        let (mut loader, mut step) = (loader(data, grad_accum, (rank.rank, world), packing), StepData::default());
        loader.next(&mut step);
        assert_eq!(step.samples, data.rows());
        if spoil {
            step.batches.iter_mut().for_each(as_one_pair);
        }
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
        if let Some((_, store)) = engine.reference() {
            initialize(store, 77, &*rank.device)?; // another model, so that the rewards are not zero
        }
        let report = engine.train_step(&step.batches, &Step { number: 1, lr: 0.1, tokens: step.samples })?;
        Ok((vec![report], fragments(&mut engine)?)) as Result<_>
    });
    gathered(&spec, results)
}

/// The documents of a pack see each other.
fn as_one_pair(batch: &mut MicroBatch) {
    if batch.mismatched.is_some() {
        batch.cu_seqlens = [0, batch.tokens.len() as u32].to_vec();
        batch.positions = (0..batch.tokens.len() as u32).collect();
    } else if batch.cu_seqlens.len() > 3 {
        let pairs = batch.cu_seqlens.len() / 2 * 2;
        batch.cu_seqlens = [0, batch.cu_seqlens[pairs / 2], batch.tokens.len() as u32].to_vec();
        batch.positions = (0..batch.tokens.len() as u32).collect();
    }
}

#[test]
fn packed_answers_train_as_each_alone() {
    for (labeled, score) in [(false, false), (true, false), (false, true)] {
        packed_train_as_each_alone(labeled, score);
    }
}

fn packed_train_as_each_alone(labeled: bool, score: bool) {
    let even = |data: &Arc<Dataset>| [false, true].iter().all(|&packing| packs(data, packing).is_multiple_of(2));
    let (_dir, data) = (20..90).map(|n| judged(n, labeled)).find(|(_, data)| even(data)).unwrap();
    assert_eq!(data.report().dropped, [0, 0, 0, 1]);
    let dropped = if labeled { "1 row dropped" } else { "1 pair dropped" };
    assert!(data.report().to_string().contains(dropped), "{}", data.report());
    assert!(packs(&data, true) < data.rows() as usize, "packs hold several rows");
    let alone = epoch(&data, score, 1, false, false);
    for (world, packing) in [(1, true), (2, true), (2, false)] {
        let (weights, loss) = distance(&alone, &epoch(&data, score, world, packing, false));
        let what = format!("labeled {labeled}, score {score}, packing {packing}, {world} ranks");
        assert!(weights < 1e-6 && loss < 1e-6, "{what}: weights differ by {weights}, losses by {loss}");
    }
    // The test detects sequences that attend to each other.
    let (weights, loss) = distance(&alone, &epoch(&data, score, 1, true, true));
    assert!(weights > 1e-4 && loss > 1e-3, "weights differ by {weights}, losses by {loss}");
}

/// A pair is two documents of one micro-batch, and only answers have targets.
#[test]
fn a_pair_is_never_split() {
    let (_dir, data) = pairs(30);
    let (mut loader, mut step) = (loader(&data, 5, (0, 2), true), StepData::default());
    loader.next(&mut step);
    for batch in &step.batches {
        assert!(batch.tokens.len() <= 2 * LEN && batch.cu_seqlens.len() % 2 == 1, "{batch:?}");
        for pair in batch.cu_seqlens.windows(3).step_by(2) {
            let own = |a: u32, b: u32| (&batch.tokens[a as usize..b as usize], &batch.targets[a as usize..b as usize]);
            let sequences = [own(pair[0], pair[1]), own(pair[1], pair[2])];
            let prompts = sequences.map(|(tokens, targets)| {
                let asked = targets.iter().position(|&t| t != IGNORE).unwrap() + 1;
                let answer: Vec<i32> = tokens[asked..].iter().map(|&t| t as i32).chain([IGNORE]).collect();
                assert_eq!(targets[asked - 1..], answer[..]);
                assert_eq!(tokens.last(), Some(&256));
                &tokens[..asked]
            });
            assert_eq!(prompts[0], prompts[1]);
        }
    }
}

/// A reward model reads the margin of a row that has one without a flag, as TRL does; DPO names the column instead.
#[test]
fn margins_of_scored_pairs_are_read_without_a_flag() {
    let dir = tempfile::tempdir().unwrap();
    let row = |margin: &str| format!("{{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"{margin}}}\n");
    let rows = [row(", \"margin\": 1.5"), row(", \"margin\": null"), row("")];
    std::fs::write(dir.path().join("m.jsonl"), rows.concat()).unwrap();
    let open = |scored| {
        let keys = Preferences::Pairs(PairKeys { scored, ..PairKeys::default() });
        Arc::new(Dataset::open(&data_options(dir.path(), "m.jsonl", keys)).unwrap())
    };
    let data = open(true);
    assert!(!data.report().to_string().contains("not read"), "{}", data.report());
    let (mut loader, mut step) = (loader(&data, 3, (0, 1), false), StepData::default());
    loader.next(&mut step);
    let margins: Vec<f32> = step.batches.iter().flat_map(|batch| batch.numbers.clone()).collect();
    assert_eq!(margins, [1.5, 0.0, 0.0]);
    assert!(open(false).report().to_string().contains("not read: `margin` in 1 row"), "{}", open(false).report());
    std::fs::write(dir.path().join("m.jsonl"), row(", \"margin\": \"much\"")).unwrap();
    let keys = Preferences::Pairs(PairKeys { scored: true, ..PairKeys::default() });
    let error = Dataset::open(&data_options(dir.path(), "m.jsonl", keys)).map(drop).unwrap_err().to_string();
    assert!(error.contains("has \"much\" as margin; a number is expected"), "{error}");
}

/// Margins come with their pairs, bit for bit.
#[test]
fn margins_are_read() {
    let margin = |i: usize| 0.37 * i as f64 - 2.0;
    let row = |i: usize| json!({"prompt": "a", "chosen": "b".repeat(1 + i % 5), "rejected": "c", "gap": margin(i)});
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<String> = (0..20).map(|i| row(i).to_string() + "\n").collect();
    std::fs::write(dir.path().join("m.jsonl"), rows.concat()).unwrap();
    let keys = Preferences::Pairs(PairKeys { margin: Some("gap".into()), ..PairKeys::default() });
    let data = Arc::new(Dataset::open(&data_options(dir.path(), "m.jsonl", keys)).unwrap());
    let (mut loader, mut step) = (loader(&data, 10, (1, 2), false), StepData::default());
    loader.next(&mut step);
    for (micro, batch) in step.batches.iter().enumerate() {
        let i = 2 * micro + 1;
        assert_eq!(batch.numbers, [margin(i) as f32]);
        assert_eq!(batch.tokens.len(), 1 + (1 + i % 5) + 1 + 3, "the margin is no token");
    }
}

/// A run that stopped and resumed reports the bits of one that never stopped: its reference is still the model that it
/// started from. On another mesh too, within rounding.
#[test]
fn a_resumed_run_is_bitwise_the_same() {
    let dir = Dir::new();
    let (model, judge) = (dir.arg("model"), dir.arg("judge"));
    let tiny =
        "--max-len 192 --batch-size 2 --nproc-per-node 2 --lr-scheduler constant --warmup-steps 0 --lr 0.01 --no-eval";
    let shape = "--tokenizer bytes --embed-dim 16 --num-layers 1 --num-heads 2";
    let pairs = ["--dataset", "configs/pairs.jsonl"];
    let start = |name: &str, more: &[&str]| {
        let metrics = dir.arg(name);
        let args: Vec<&str> = tiny.split_whitespace().chain(["--metrics-path", &metrics]).collect();
        let ended = run(&[&args[..], more].concat());
        assert!(ended.status.success(), "{more:?}: {}", stderr(&ended));
        let numbers = |step: &Value| {
            ["step", "loss", "grad_norm", "reward_chosen"].map(|key| step[key].as_f64().unwrap().to_bits())
        };
        events(&dir.path(name), "step").iter().map(numbers).collect::<Vec<_>>()
    };
    let shape: Vec<&str> = shape.split_whitespace().collect();
    let made = run(&[
        &tiny.split_whitespace().collect::<Vec<_>>()[..],
        &pairs,
        &shape,
        &["--objective", "rm", "--max-steps", "1", "--save-hf", &judge],
    ]
    .concat());
    assert!(made.status.success(), "{}", stderr(&made));
    assert!(!stderr(&made).contains("generates"), "a reward model generates nothing: {}", stderr(&made));
    let other =
        ["--dataset", "synthetic", "--no-eval", "--max-steps", "1", "--nproc-per-node", "1", "--max-len", "192"];
    let made = run(&[&other[..], &shape[2..], &["--vocab-size", "320", "--save-hf", &model]].concat());
    assert!(made.status.success(), "{}", stderr(&made));
    let cases: [(&str, &[&str]); 6] = [
        ("scratch", &[&shape[..], &pairs, &["--objective", "dpo"]].concat()),
        ("pretrained", &[&pairs[..], &["--objective", "dpo", "--pretrain", &model]].concat()),
        ("adapters", &[&pairs[..], &["--objective", "dpo", "--pretrain", &model, "--lora-rank", "2"]].concat()),
        ("reward", &[&pairs[..], &["--objective", "rm", "--pretrain", &model]].concat()),
        ("reward adapters", &[&pairs[..], &["--objective", "rm", "--pretrain", &model, "--lora-rank", "2"]].concat()),
        ("kto", &["--objective", "kto", "--pretrain", &model, "--dataset", "configs/labels.jsonl"]),
    ];
    for (name, kind) in cases {
        let ckpt = dir.arg(&format!("{name}.ckpt"));
        let straight = start(&format!("{name}.straight"), &[kind, &["--max-steps", "4"]].concat());
        let stopped = [kind, &["--max-steps", "2", "--ckpt-dir", &ckpt]].concat();
        assert_eq!(start(&format!("{name}.first"), &stopped), straight[..2], "{name}");
        let resumed = [kind, &["--max-steps", "4", "--ckpt-dir", &ckpt, "--resume", "auto"]].concat();
        assert_eq!(start(&format!("{name}.second"), &resumed), straight[2..], "{name}");
    }
    // What is learned may change, and the run says so.
    let ckpt = dir.arg("pretrained.ckpt");
    let dpo = [&tiny.split_whitespace().collect::<Vec<_>>()[..], &pairs, &["--objective", "dpo", "--pretrain", &model]];
    let on = ["--max-steps", "5", "--ckpt-dir", &ckpt, "--resume", "auto", "--beta", "0.3"];
    let more =
        ["--dropout", "0.1", "--no-decay", "norm", "--min-lr-ratio", "0.5", "--lr-scheduler", "cosine_with_min_lr"];
    let resumed = run(&[&dpo.concat()[..], &on, &more].concat());
    let said = stderr(&resumed);
    for (key, now) in [("beta", "0.3"), ("dropout", "0.1"), ("no_decay", "[\"norm\"]"), ("min_lr_ratio", "0.5")] {
        let line = format!("data.settings.{key}: absent in the checkpoint, {now} now");
        assert!(said.contains(&line), "{line}: {said}");
    }
    let judged = run(&[&dpo.concat()[..], &["--max-steps", "5", "--ref-pretrain", &judge]].concat());
    let said = stderr(&judged);
    assert!(judged.status.code() == Some(2) && said.contains("is a reward model, which has no logits"), "{said}");
}

/// Each prompt comes with the answer of another row, always the same one: in any order of rows, on any rank. What does
/// not fit is truncated.
#[test]
fn mismatched_answers_are_those_of_other_rows() {
    let (_dir, data) = judged(30, true);
    let rows = data.rows() as usize;
    // By tokens of the prompt and answer, the tokens of the mismatched answer.
    let found = |packing: bool, (rank, of): (usize, usize)| {
        let (mut loader, mut step) =
            (loader(&data, packs(&data, packing) / of, (rank, of), packing), StepData::default());
        loader.next(&mut step);
        let mut found = Vec::new();
        for batch in &step.batches {
            let mismatched = batch.mismatched.as_ref().unwrap();
            assert!(mismatched.tokens.len() <= LEN && batch.tokens.len() <= LEN, "{batch:?}");
            assert_eq!(batch.cu_seqlens.len(), mismatched.cu_seqlens.len());
            let documents = |batch: &MicroBatch| {
                let split = |d: &[u32]| {
                    let range = d[0] as usize..d[1] as usize;
                    let asked = batch.targets[range.clone()].iter().position(|&t| t != IGNORE).unwrap() + 1;
                    let (prompt, answer) = batch.tokens[range].split_at(asked);
                    (prompt.to_vec(), answer.to_vec())
                };
                batch.cu_seqlens.windows(2).map(split).collect::<Vec<_>>()
            };
            for (own, other) in documents(batch).into_iter().zip(documents(mismatched)) {
                assert_eq!(own.0, other.0, "the prompt");
                found.push((own, other.1));
            }
        }
        found.sort();
        found
    };
    let alone = found(false, (0, 1));
    assert_eq!(alone.len(), rows);
    let own: Vec<_> = alone.iter().map(|((_, answer), _)| answer.clone()).collect();
    for ((prompt, answer), other) in &alone {
        let whole = own.iter().any(|a| a == other);
        assert!(whole || prompt.len() + other.len() == LEN && own.iter().any(|a| a.starts_with(other)), "{other:?}");
        assert!(other != answer || own.iter().filter(|a| *a == answer).count() > 1, "its own answer: {answer:?}");
    }
    assert_eq!(found(true, (0, 1)), alone);
    let mut halves = [found(false, (0, 2)), found(false, (1, 2))].concat();
    halves.sort();
    assert!(halves.iter().all(|pair| alone.contains(pair)) && halves.len() >= rows - 1);
}
