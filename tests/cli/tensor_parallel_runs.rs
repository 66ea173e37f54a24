//! Tensor parallelism from outside: runs sharded over tp match other runs, and their checkpoints load on any mesh.

use crate::common::runs::{Dir, FSDP, Run, events, good};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A vocabulary and widths that no mesh divides evenly.
const SHAPE: [&str; 12] = [
    "--num-heads",
    "4",
    "--num-kv-heads",
    "2",
    "--vocab-size",
    "321",
    "--ff-hidden-dim",
    "171",
    "--precision",
    "fp32",
    "--max-steps",
    "8",
];

/// Loss and gradient norm of each step.
fn curve(path: &Path) -> Vec<[f64; 2]> {
    events(path, "step").iter().map(|e| ["loss", "grad_norm"].map(|key| e[key].as_f64().unwrap())).collect()
}
fn run(more: &[&str]) {
    good(FSDP, &[&SHAPE, more].concat());
}
#[track_caller]
fn close(a: &[[f64; 2]], b: &[[f64; 2]], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let near = |k: usize| (a[k] / b[k] - 1.0).abs() < 2e-4;
        assert!(near(0) && near(1), "{what}: step {}: {a:?} and {b:?}", i + 1);
    }
}

#[test]
fn a_tp_run_matches_others_and_resumes_without_tp() {
    let dir = Dir::new();
    let [alone, cut, on, ckpt] = ["alone.jsonl", "cut.jsonl", "on.jsonl", "ckpt"].map(|name| dir.arg(name));
    run(&["--nproc-per-node", "2", "--metrics-path", &alone]);
    let expected = curve(&dir.path("alone.jsonl"));
    assert_eq!(expected.len(), 8);
    let over = ["--nproc-per-node", "4", "--tp-size", "2", "--metrics-path"];
    run(&[&over[..], &[&cut, "--ckpt-dir", &ckpt, "--save-every", "4"]].concat());
    close(&curve(&dir.path("cut.jsonl")), &expected, "over tp");
    // Resumed from the middle without tp.
    let middle = dir.path("ckpt").join("step-00000004");
    run(&["--nproc-per-node", "2", "--resume", middle.to_str().unwrap(), "--metrics-path", &on]);
    close(&curve(&dir.path("on.jsonl")), &expected[4..], "resumed without tp");
    // And the reverse, with sequence parallelism.
    let on = dir.arg("back.jsonl");
    let back = ["--sequence-parallel", "--resume", middle.to_str().unwrap()];
    run(&[&over[..], &[&on], &back].concat());
    close(&curve(&dir.path("back.jsonl")), &expected[4..], "resumed with sequence parallelism");
    // The checkpoint does not depend on the mesh that wrote it.
    let bytes = |name: &str| fs::read(dir.path(name).join("model.safetensors")).unwrap();
    let meshes = [("1", "1"), ("2", "2"), ("4", "4")];
    for (ranks, tp) in meshes {
        let (export, from) =
            (dir.arg(&format!("export-{tp}")), ["--resume", middle.to_str().unwrap(), "--max-steps", "4"]);
        run(&[&from[..], &["--save-hf", &export, "--nproc-per-node", ranks, "--tp-size", tp]].concat());
        assert!(bytes(&format!("export-{tp}")) == bytes("export-1"), "the model of a run over tp {tp} is another");
    }
    // A run from there starts with it.
    let starts = meshes.map(|(ranks, tp)| {
        let (model, metrics) = (dir.arg("export-2"), dir.arg(&format!("from-{tp}.jsonl")));
        let mesh = ["--nproc-per-node", ranks, "--tp-size", tp, "--metrics-path", &metrics];
        run(&[&["--pretrain", &model, "--max-steps", "2"], &mesh[..]].concat());
        curve(&dir.path(&format!("from-{tp}.jsonl")))
    });
    starts.iter().for_each(|start| close(start, &starts[0], "from the exported model"));
}

#[test]
fn invalid_tp_sizes_are_refused_before_anything_starts() {
    let refused = |more: &[&str]| {
        let ended = Run::start(FSDP, &[&["--nproc-per-node", "4"], more].concat()).end();
        assert_eq!(ended.status.code(), Some(2), "{more:?}: {}{}", ended.stdout, ended.stderr);
        ended.stderr
    };
    for (args, what) in [
        (&["--tp-size", "4"][..], "num_heads 2 is not divisible by tp-size 4"),
        (&["--tp-size", "2", "--ff-hidden-dim", "1"], "ff_hidden_dim 1 < tp-size 2"),
        (&["--tp-size", "2", "--arch", "gpt"], "arch gpt"),
        (&["--use-hf-tp-plan"], "--use-hf-tp-plan has no effect here: --tp-size is 1"),
        (&["--sequence-parallel"], "--sequence-parallel has no effect here: --tp-size is 1"),
        (&["--tp-size", "3"], "tp 3"),
    ] {
        let said = refused(args);
        assert!(said.contains(what), "{args:?}: {said}");
    }
}

#[test]
fn the_tp_plan_of_a_model_directory_is_followed_or_refused() {
    let dir = Dir::new();
    let (model, alone, cut) = (dir.arg("model"), dir.arg("alone.jsonl"), dir.arg("cut.jsonl"));
    run(&["--nproc-per-node", "1", "--save-hf", &model]);
    let config = dir.path("model").join("config.json");
    let mut map: serde_json::Map<String, Value> = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let from = ["--pretrain", &model, "--max-steps", "3", "--precision", "fp32", "--metrics-path"];
    run(&[&from[..], &[&alone, "--nproc-per-node", "1"]].concat());
    let over = ["--nproc-per-node", "2", "--tp-size", "2", "--use-hf-tp-plan"];
    // transformers' own, which leaves the embedding whole; one that leaves the feed-forward branches whole; one that is
    // wrong.
    let attention = json!({
        "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
    });
    let wrong = json!({"layers.*.mlp.down_proj": "rowwise"});
    for (plan, refused) in [(Value::Null, None), (attention, None), (wrong, Some("gate_proj before it is not colwise"))]
    {
        map.insert("base_model_tp_plan".into(), plan.clone());
        fs::write(&config, serde_json::to_string(&map).unwrap()).unwrap();
        fs::remove_file(&cut).ok();
        let args = [&from[..], &[&cut], &over].concat();
        match refused {
            None => {
                run(&args);
                close(&curve(&dir.path("cut.jsonl")), &curve(&dir.path("alone.jsonl")), &plan.to_string());
            }
            Some(why) => {
                let ended = Run::start(FSDP, &[&SHAPE[..], &args].concat()).end();
                assert!(ended.status.code() == Some(2) && ended.stderr.contains(why), "{}", ended.stderr);
            }
        }
    }
}
