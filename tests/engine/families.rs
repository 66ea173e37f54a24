//! Every model family compared with Hugging Face transformers: logits, loss, all gradients and greedy tokens of tiny
//! models whose windows, softcaps and rotary scalings matter, on one rank and on three, which divides no size.
//! Documents are packed here, and went through transformers one by one. In bf16, errors relative to fp32 are as small
//! as those of transformers. The files are made by `tests/golden/families.py`.

use crate::common;
use crate::common::golden_tensors::Tensors;
use crate::common::plain_store::{Docs, Plain, Told, device, distance, groups};
use crate::common::{SGD, ddp, fsdp, ranks, sharded, whole};
use flatshard::base::{DType, Result};
use flatshard::ckpt::hf;
use flatshard::data::MicroBatch;
use flatshard::engine::{Engine, EngineOptions, Sampling, Step, Strategy};
use flatshard::nn::{Checkpointing, Decoder, Minimized, Scaling, Spec, WorkspaceOptions};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const CASES: &[&str] = &[
    "llama3",
    "llama_linear",
    "llama_dynamic",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "seed_oss",
    "hunyuan",
    "exaone4",
    "phi3",
    "glm",
    "glm4",
    "ernie4_5",
    "cohere2",
    "starcoder2",
    // Not in transformers 4.57 alike, or added later.
    "gemma",
    "cohere",
    "helium",
    "stablelm",
    "stablelm_parallel",
    "cwm",
    "hyperclovax",
    "granitemoehybrid",
    "youtu",
    "minicpm3",
    "gemma4",
    "gemma4_shared",
    "gemma4_inputs",
    "arcee",
    "jais2",
    "lfm2",
    "lfm3",
    "vaultgemma",
    "nemotron",
    "olmo",
    "olmo3_long",
    "exaone4_long",
    // `tests/golden/towers.py`
    "ministral",
    "ministral3",
    "vl_gemma3",
    "vl_mistral3",
    "vl_qwen2",
    "vl_qwen3",
    "vl_glm4v",
    "vl_qwen3_5",
    // `families.py` again: transformers 4 does not have it.
    "qwen3_5",
    "olmo_hybrid",
    "apertus",
    "gemma4_experts",
    "granitemoehybrid_mamba",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "falcon_h1_normed",
    "nanochat",
    "granite_swa",
    "falcon",
    "falcon_new",
    "falcon_serial",
    "gptj",
    "olmo_clipped",
    "phi_normed",
    "stablelm_normed",
    "persimmon",
    "cohere_normed",
    "opt",
    "biogpt",
    "codegen",
    "gpt_bigcode",
    "gpt_bigcode_heads",
    "gpt_neo",
    "gemma4_unified",
    "exaone",
    "phi",
    "gpt_neox",
    "gpt_neox_serial",
];
/// Those of `families.py`, which also has files of transformers 4.
const FOUR: usize = 23;

/// Measured: logits 6e-7, gradients at most 3e-6 of their norm.
const TOLERANCE: f64 = 1e-5;

/// Whether transformers has this tensor as a buffer, without a gradient.
fn is_buffer(name: &str) -> bool {
    ["layer_scalar", "act_fn.beta", "act_fn.eps"].iter().any(|end| name.ends_with(end))
}

/// The results of transformers.
struct Golden {
    name: &'static str,
    spec: Spec,
    loss: f64,
    lengths: Vec<usize>,
    tensors: Tensors,
    /// The error of its own bf16 relative to fp32: loss, logits, each gradient. Null with experts, of which bf16 may
    /// choose others.
    bf16_errors: Value,
}

impl Golden {
    fn read(name: &'static str) -> Golden {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families").join(name);
        let values: Value = serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap()).unwrap();
        let lengths: Vec<usize> =
            values["lengths"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let mut spec = hf::parse(values["config"].to_string().as_bytes()).unwrap();
        spec.dropout = 0.0;
        if let Some(Scaling::Dynamic { .. }) = spec.rope.as_ref().map(|rope| &rope.scaling) {
            spec.max_len = lengths[0]; // transformers derives its base from the longest sequence
        }
        let tensors = Tensors::read(&path.with_extension("safetensors"));
        let (loss, bf16_errors) = (values["loss"].as_f64().unwrap(), values["bf16_errors"].clone());
        Golden { name, spec, loss, lengths, tensors, bf16_errors }
    }
    fn weight(&self, name: &str) -> &[f32] {
        &self.tensors.floats[&format!("weight.{name}")]
    }
    fn unsigned(&self, name: &str) -> Vec<u32> {
        self.tensors.integers[name].iter().map(|&t| t as u32).collect()
    }
    fn loss_tokens(&self) -> u64 {
        self.tensors.integers["targets"].iter().filter(|&&t| t != -100).count() as u64
    }
    /// Whether the gradient is 0 but for rounding: without rotary positions, a bias of keys adds the same to all scores
    /// of a query.
    fn is_rounding(&self, name: &str) -> bool {
        self.spec.rope.is_none() && name.ends_with("k_proj.bias")
    }
    /// Every tensor's gradient within the tolerance.
    fn check_grads(&self, grads: &BTreeMap<String, Vec<f32>>, what: &str) {
        let theirs = self.tensors.floats.keys().filter(|name| name.starts_with("grad."));
        let ours = grads.keys().filter(|name| !is_buffer(name));
        assert_eq!(theirs.count(), ours.count(), "{}: tensors", self.name);
        for (name, grad) in grads {
            let Some(want) = self.tensors.floats.get(&format!("grad.{name}")) else { continue };
            if self.is_rounding(name) {
                let most = grad.iter().chain(want).fold(0.0, |most: f32, x| most.max(x.abs()));
                assert!(most < 1e-6, "{} {what}: gradient of {name}: {most:.1e}", self.name);
                continue;
            }
            let error = distance(grad, want);
            // Of decays: terms of either sign along a document. transformers' own float32 is off by 2.4e-5, 1.5e-5 and
            // 1e-5 from its float64; in OLMo hybrid by up to 1.1e-4, and by up to 2e-5 in other gradients.
            let decays = ["A_log", "dt_bias", "in_proj_a.weight", "a_proj.weight"];
            let factor = match (self.name, decays.iter().any(|end| name.ends_with(&format!("linear_attn.{end}")))) {
                ("olmo_hybrid", true) => 10.0,
                ("olmo_hybrid", false) | (_, true) => 2.0,
                (_, false) => 1.0,
            };
            let most = factor * TOLERANCE;
            assert!(error < most, "{} {what}: gradient of {name}: {error:.1e}", self.name);
        }
    }
    /// The documents of one rank of `world`, packed.
    fn batch(&self, rank: usize, world: usize) -> MicroBatch {
        let (tokens, targets) = (self.unsigned("tokens"), &self.tensors.integers["targets"]);
        let mut batch = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
        let mut start = 0;
        for (i, &n) in self.lengths.iter().enumerate() {
            if i % world == rank {
                batch.tokens.extend(&tokens[start..start + n]);
                batch.targets.extend(&targets[start..start + n]);
                batch.positions.extend(0..n as u32);
                batch.cu_seqlens.push(batch.tokens.len() as u32);
            }
            start += n;
        }
        batch
    }
}

/// Mean loss, logits and gradients of the packed documents on one rank.
fn computed(golden: &Golden, dtype: DType, checkpoint: Checkpointing) -> (f64, Vec<f32>, BTreeMap<String, Vec<f32>>) {
    let (dev, decoder) = (device(), Decoder::new(golden.spec.clone()).unwrap());
    let mut store = Plain::new(&dev, &decoder, dtype, |segment, i| {
        assert_eq!(golden.weight(&segment.name).len(), segment.len(), "{}", segment.name);
        golden.weight(&segment.name)[i]
    });
    let (tokens, n) = (golden.unsigned("tokens"), golden.lengths.iter().sum());
    let docs =
        Docs::new(&dev, &tokens, &golden.tensors.integers["targets"], &golden.lengths).turned(&dev, &golden.spec);
    let options = WorkspaceOptions { tokens: n, dtype, checkpoint, train: true };
    let mut ws = decoder.workspace(&dev, &groups(), &options).unwrap();
    let told = Told::new(&dev, 1.0 / golden.loss_tokens() as f32);
    store.zero_grads(&dev);
    decoder.train(&dev, &mut store, &docs.batch(), &mut ws, &told.micro(), Minimized::Tokens).unwrap();
    let loss = ws.take_loss(&dev).unwrap() / golden.loss_tokens() as f64;
    let grads = store.segments().map(|(layer, s)| (s.name.clone(), store.grad(layer, s).to_vec())).collect();

    let mut logits = vec![0f32; n * golden.spec.vocab];
    for (row, logits) in logits.chunks_exact_mut(golden.spec.vocab).enumerate() {
        decoder.next_token_logits(&dev, &mut store, &docs.batch(), &mut ws, row, logits).unwrap();
    }
    (loss, logits, grads)
}

#[test]
fn logits_loss_and_gradients_match_transformers() {
    for golden in CASES.iter().map(|name| Golden::read(name)) {
        for checkpoint in [Checkpointing::Off, Checkpointing::Selective, Checkpointing::Full] {
            let (loss, logits, grads) = computed(&golden, DType::F32, checkpoint);
            assert!((loss / golden.loss - 1.0).abs() < 1e-6, "{}: loss {loss}, theirs {}", golden.name, golden.loss);
            golden.check_grads(&grads, "on one rank");
            let error = distance(&logits, &golden.tensors.floats["logits"]);
            assert!(error < TOLERANCE, "{}: logits: {error:.1e}", golden.name);
        }
    }
}

/// The rule of flash-attention's tests, as in tests/engine/golden.rs: at most twice PyTorch's own bf16 error relative
/// to fp32 in logits, three times in gradients. The loss, whose errors may cancel, has the logits' bound. `LEAST` is
/// the smallest error of anything computed in bf16.
#[test]
fn bf16_is_as_accurate_as_in_transformers() {
    const LEAST: f64 = 1e-4;
    let goldens = CASES.iter().map(|name| Golden::read(name));
    for golden in goldens.filter(|golden| !golden.bf16_errors.is_null()) {
        let (name, (loss, logits, grads)) = (golden.name, computed(&golden, DType::Bf16, Checkpointing::Off));
        let theirs = golden.bf16_errors["logits"].as_f64().unwrap();
        let (loss, logits) = ((loss / golden.loss - 1.0).abs(), distance(&logits, &golden.tensors.floats["logits"]));
        println!("{name}: loss {loss:.1e}, logits {logits:.1e} (transformers {theirs:.1e})");
        assert!(loss < 2.0 * theirs, "{name}: loss: {loss:.1e}");
        assert!(LEAST < logits && logits < 2.0 * theirs, "{name}: logits: {logits:.1e}, transformers {theirs:.1e}");
        for (tensor, grad) in grads.iter().filter(|(name, _)| !is_buffer(name) && !golden.is_rounding(name)) {
            let error = distance(grad, &golden.tensors.floats[&format!("grad.{tensor}")]);
            let theirs = golden.bf16_errors["grads"][tensor].as_f64().unwrap();
            assert!(error < 3.0 * theirs, "{name}: gradient of {tensor}: {error:.1e}, transformers {theirs:.1e}");
            assert!(error > LEAST, "{name}: gradient of {tensor}: {error:.1e} is too good for bf16");
        }
    }
}

/// An engine with transformers' weights.
fn engine(rank: common::Rank, golden: &Golden, strategy: Arc<dyn Strategy>) -> Result<Engine> {
    let tokens = golden.lengths.iter().sum();
    let options = EngineOptions { grad_clip: 0.0, tokens, ..common::options(&golden.spec, strategy, SGD) };
    let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
    let (store, _) = engine.state();
    store.for_each_shard(&mut |mut shard| {
        let mut values = vec![0f32; shard.layout.len];
        for segment in &shard.layout.segments {
            values[segment.range()].copy_from_slice(golden.weight(&segment.name));
        }
        values.resize(values.len().max(shard.start + shard.master.len()), 0.0);
        let owned = &values[shard.start..shard.start + shard.master.len()];
        rank.device.upload(bytemuck::cast_slice(owned), shard.master.reborrow())
    })?;
    store.weights_changed()?;
    Ok(engine)
}

/// The parts of the reduced gradient that a rank owns, like [`common::fragments`] for the weights.
fn gradient_fragments(engine: &mut Engine) -> Result<common::Fragments> {
    let (dev, mut fragments) = (engine.device().clone(), Vec::new());
    engine.state().0.for_each_shard(&mut |shard| {
        let mut values = vec![0f32; shard.master.len()];
        if let Some(grad) = shard.grad {
            dev.download(grad.as_view(), bytemuck::cast_slice_mut(&mut values))?;
        }
        let owned = shard.start..shard.start + values.len();
        for segment in &shard.layout.segments {
            let (from, to) = (segment.start.max(owned.start), segment.range().end.min(owned.end));
            if from < to {
                let part = values[from - owned.start..to - owned.start].to_vec();
                fragments.push((segment.name.clone(), from - segment.start, part));
            }
        }
        Ok(())
    })?;
    Ok(fragments)
}

#[test]
fn three_ranks_have_the_same_gradients_and_greedy_tokens() {
    for golden in CASES.iter().map(|name| Golden::read(name)) {
        for (world, strategy) in [(1, fsdp(sharded())), (3, fsdp(sharded())), (3, ddp(DType::F32))] {
            let results = ranks(world, |rank| {
                let index = rank.rank;
                let mut engine = engine(rank, &golden, strategy.clone())?;
                let (prompt, greedy) = (golden.unsigned("prompt"), golden.unsigned("greedy"));
                let said =
                    engine.generate(&prompt, greedy.len(), &Sampling { temperature: 0.0, ..Sampling::default() })?;
                assert_eq!(said, greedy, "{} on {world} ranks: greedy tokens", golden.name);
                let step = Step { number: 1, lr: 0.0, tokens: golden.loss_tokens() };
                let report = engine.train_step(&[golden.batch(index, world)], &step)?;
                Ok((report.loss, gradient_fragments(&mut engine)?))
            });
            let (losses, fragments): (Vec<f64>, Vec<_>) = results.into_iter().unzip();
            assert!((losses[0] / golden.loss - 1.0).abs() < 1e-6, "{}: loss {}", golden.name, losses[0]);
            golden.check_grads(&whole(&golden.spec, &fragments), &format!("on {world} ranks"));
        }
    }
}

/// Files of transformers 4.57 (`rope_theta`, `rope_scaling`, `rope_local_base_freq`) and of 5 (`rope_parameters`) give
/// the same model.
#[test]
fn files_of_transformers_4_and_5_read_the_same() {
    for golden in CASES[..FOUR].iter().map(|name| Golden::read(name)) {
        let path = format!("{}/tests/golden/families/{}.4.json", env!("CARGO_MANIFEST_DIR"), golden.name);
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("\"transformers_version\": \"4.") && !text.contains("rope_parameters"), "{text}");
        let spec = Spec { max_len: golden.spec.max_len, dropout: 0.0, ..hf::parse(text.as_bytes()).unwrap() };
        assert_eq!(spec, golden.spec, "{}", golden.name);
    }
}

/// The config we write is read back as the same model. The files stay in target/tmp/families, where `families.py check`
/// loads them into transformers.
#[test]
fn configurations_round_trip() {
    for golden in CASES.iter().map(|name| Golden::read(name)) {
        let (spec, text) = (&golden.spec, hf::config(&golden.spec));
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("families").join(golden.name);
        std::fs::create_dir_all(&to).unwrap();
        std::fs::write(to.join(hf::FILE), &text).unwrap();
        // With dynamic scaling the file keeps the model's own length.
        let read = Spec { max_len: spec.max_len, ..hf::parse(text.as_bytes()).unwrap() };
        assert_eq!(read, *spec, "{}", golden.name);
    }
}
