//! The model compared with PyTorch and Hugging Face transformers: loss, logits, all gradients and ten training steps of
//! two tiny models. The files are made by `tests/golden/make.py`.
mod init;
mod muon;
mod training;

use crate::common::golden_tensors::Tensors;
use crate::common::plain_store::{Docs, Plain, Told, device, distance, groups};
use crate::common::{fsdp, options, ranks, sharded};
use flatshard::base::{DType, Result};
use flatshard::data::MicroBatch;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::{Device, IGNORE};
use flatshard::engine::{Engine, EngineOptions, Step};
use flatshard::nn::{Activation, Arch, Checkpointing, Decoder, Minimized, Spec, Workspace, WorkspaceOptions};
use flatshard::optim::Rule;
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;

fn spec(arch: Arch) -> Spec {
    let llama = Spec {
        arch,
        vocab: 47,
        dim: 36,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 10,
        ff: 44,
        max_len: 24,
        norm_eps: 1e-5,
        tied: false,
        dropout: 0.0,
        ..Spec::default()
    };
    match arch {
        Arch::Gpt => {
            Spec { heads: 3, kv_heads: 3, head_dim: 12, tied: true, rope: None, activation: Activation::Gelu, ..llama }
        }
        _ => llama,
    }
}

/// The results of PyTorch.
struct Golden {
    values: Value,
    /// Weights (from bf16) and gradients by name, and the logits.
    tensors: HashMap<String, Vec<f32>>,
    /// Two batches of documents with these lengths, and the first one's targets.
    tokens: Vec<u32>,
    targets: Vec<i32>,
    lengths: Vec<usize>,
}

impl Golden {
    fn read(arch: Arch) -> Golden {
        let name = if arch == Arch::Llama { "llama" } else { "gpt" };
        let path = |extension| format!("{}/tests/golden/{name}.{extension}", env!("CARGO_MANIFEST_DIR"));
        let values: Value = serde_json::from_slice(&std::fs::read(path("json")).unwrap()).unwrap();
        let Tensors { floats: tensors, integers } = Tensors::read(path("safetensors").as_ref());
        Golden {
            tokens: integers["tokens"].iter().map(|&t| t as u32).collect(),
            targets: integers["targets"].clone(),
            lengths: values["lengths"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect(),
            values,
            tensors,
        }
    }
    fn number(&self, name: &str) -> f64 {
        self.values[name].as_f64().unwrap()
    }
    fn numbers(&self, name: &str) -> Vec<f64> {
        self.values[name].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
    }
    /// Some documents of batch `b`; each token's target is the next one of its document.
    fn micro_batch(&self, b: usize, documents: Range<usize>) -> MicroBatch {
        let ends: Vec<usize> = (0..=self.lengths.len()).map(|i| self.lengths[..i].iter().sum()).collect();
        let (first, n) = (ends[documents.start], ends[self.lengths.len()]);
        let own = first..ends[documents.end];
        let token = |i: usize| self.tokens[b * n + i];
        let target = |i: usize| if ends.contains(&(i + 1)) { IGNORE } else { token(i + 1) as i32 };
        MicroBatch {
            tokens: own.clone().map(token).collect(),
            targets: own.map(target).collect(),
            positions: self.lengths[documents.clone()].iter().flat_map(|&len| 0..len as u32).collect(),
            cu_seqlens: ends[documents.start..=documents.end].iter().map(|end| (end - first) as u32).collect(),
            ..MicroBatch::default()
        }
    }
    fn micro(&self, dev: &dyn Device, tokens: &[u32], targets: &[i32], scale: f32) -> (Docs, Told) {
        let count = targets.iter().filter(|&&t| t != -100).count();
        let told = Told::new(dev, scale * (1.0 / count as f32));
        (Docs::new(dev, tokens, targets, &self.lengths), told)
    }
}

/// PyTorch's model in this engine.
struct Model {
    golden: Golden,
    dev: CpuDevice,
    decoder: Decoder,
    store: Plain,
    ws: Workspace,
}

impl Model {
    fn new(arch: Arch, dtype: DType) -> Model {
        let (golden, dev) = (Golden::read(arch), device());
        let decoder = Decoder::new(spec(arch)).unwrap();
        let store = Plain::new(&dev, &decoder, dtype, |segment, i| {
            let weight = &golden.tensors[&format!("weight.{}", segment.name)];
            assert_eq!(weight.len(), segment.len(), "{}", segment.name);
            weight[i]
        });
        let weights = golden.tensors.keys().filter(|name| name.starts_with("weight.")).count();
        assert_eq!(weights, store.segments().count(), "a tensor of PyTorch's has no segment");
        let tokens = golden.lengths.iter().sum();
        let ws = decoder
            .workspace(
                &dev,
                &groups(),
                &WorkspaceOptions { tokens, dtype, checkpoint: Checkpointing::Off, train: true },
            )
            .unwrap();
        Model { golden, dev, decoder, store, ws }
    }

    /// Relative errors of loss and logits, and of each gradient by name, with the loss multiplied by `scale`.
    fn errors(&mut self, scale: f32) -> (f64, f64, Vec<(String, f64)>) {
        let Model { golden, dev, decoder, store, ws } = self;
        let n = golden.targets.len();
        let (docs, told) = golden.micro(dev, &golden.tokens[..n], &golden.targets, scale);
        decoder.train(dev, store, &docs.batch(), ws, &told.micro(), Minimized::Tokens).unwrap();
        let loss = ws.take_loss(dev).unwrap() * (told.loss_scale / scale) as f64 / golden.number("loss") - 1.0;
        let grads = store.segments().map(|(layer, segment)| {
            let want = &golden.tensors[&format!("grad.{}", segment.name)];
            let unscaled: Vec<f32> = store.grad(layer, segment).iter().map(|g| g / scale).collect();
            (segment.name.clone(), distance(&unscaled, want))
        });
        let grads = grads.collect();
        let mut logits = vec![0f32; n * decoder.spec().vocab];
        for (row, logits) in logits.chunks_exact_mut(decoder.spec().vocab).enumerate() {
            decoder.next_token_logits(dev, store, &docs.batch(), ws, row, logits).unwrap();
        }
        (loss.abs(), distance(&logits, &golden.tensors["logits"]), grads)
    }
}

/// Measured: loss 2e-8, logits 4e-7, gradients at most 8e-7. The bounds leave room for another order of summation.
fn fp32_agrees(arch: Arch) {
    let (loss, logits, grads) = Model::new(arch, DType::F32).errors(1.0);
    let worst = grads.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    println!("loss {loss:.1e}, logits {logits:.1e}, worst gradient {:.1e} ({})", worst.1, worst.0);
    assert!(loss < 1e-6, "loss: {loss:.1e}");
    assert!(logits < 1e-5, "logits: {logits:.1e}");
    assert!(worst.1 < 1e-5, "gradient of {}: {:.1e}", worst.0, worst.1);
}
#[test]
fn llama_fp32_agrees_with_pytorch() {
    fp32_agrees(Arch::Llama);
}
#[test]
fn gpt_fp32_agrees_with_pytorch() {
    fp32_agrees(Arch::Gpt);
}

/// In bf16 (fp16, with a scaled loss) our error relative to PyTorch's fp32 may be twice PyTorch's own for logits and
/// three times for gradients: the rule of flash-attention's tests, instead of hand-picked tolerances. (The loss is a
/// mean whose errors may cancel, so it has the logits' bound.) `least` is the smallest error of anything computed in
/// that precision.
fn narrow_is_near(arch: Arch, dtype: DType, errors: &str, scale: f32, least: f64) {
    let mut model = Model::new(arch, dtype);
    let (loss, logits, grads) = model.errors(scale);
    let torch = &model.golden.values[errors];
    let torch_logits = torch["logits"].as_f64().unwrap();
    println!("loss {loss:.1e}, logits {logits:.1e} (PyTorch {torch_logits:.1e})");
    assert!(loss < 2.0 * torch_logits, "loss: {loss:.1e}");
    assert!(logits < 2.0 * torch_logits, "logits: {logits:.1e}, PyTorch {torch_logits:.1e}");
    let mut ratios = Vec::new();
    for (name, error) in &grads {
        let torch = torch["grads"][name].as_f64().unwrap();
        assert!(*error < 3.0 * torch, "{name}: {error:.1e}, PyTorch {torch:.1e}");
        assert!(*error > least, "{name}: {error:.1e} is too good for {dtype}: does it run in f32?");
        ratios.push(error / torch);
    }
    println!("gradients: error over PyTorch's: mean {:.2}", ratios.iter().sum::<f64>() / ratios.len() as f64);
}
#[test]
fn bf16_is_as_accurate_as_in_pytorch() {
    for arch in [Arch::Llama, Arch::Gpt] {
        narrow_is_near(arch, DType::Bf16, "bf16_errors", 1.0, 1e-4);
    }
}
#[test]
fn fp16_is_as_accurate_as_in_pytorch() {
    for arch in [Arch::Llama, Arch::Gpt] {
        narrow_is_near(arch, DType::F16, "fp16_errors", 65536.0, 1e-5);
    }
}

/// Ten losses and gradient norms of two ranks' engines: AdamW with clipping, and weight decay by the segment table.
/// Measured: losses at most 3e-6, norms 2e-5. (Adam takes full steps even for pure rounding noise: the bias of GPT's
/// keys, whose true gradient is zero.)
fn training_agrees(arch: Arch) {
    let golden = Golden::read(arch);
    let (losses, norms) = (golden.numbers("losses"), golden.numbers("norms"));
    let [beta1, beta2] = [0, 1].map(|i| golden.numbers("betas")[i] as f32);
    let [eps, weight_decay, max_norm] = ["eps", "weight_decay", "max_norm"].map(|name| golden.number(name) as f32);
    let rule = Rule::AdamW { beta1, beta2, eps, weight_decay, moments: DType::F32 };
    let options = EngineOptions { grad_clip: max_norm, ..options(&spec(arch), fsdp(sharded()), rule) };
    let reports = ranks(2, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
        fill(&mut engine, &golden)?;
        let steps = (1..=losses.len()).map(|number| {
            // Each rank has two of four documents.
            let batch = golden.micro_batch((number - 1) % 2, 2 * rank.rank..2 * rank.rank + 2);
            let tokens = engine.global_count(batch.loss_tokens())?;
            let step = Step { number: number as u64, lr: golden.number("lr") as f32, tokens };
            engine.train_step(&[batch], &step)
        });
        steps.collect::<Result<Vec<_>>>()
    });
    let (mut clipped, mut worst) = (0, (0f64, 0f64));
    for (step, (report, (want_loss, want_norm))) in reports[0].iter().zip(losses.iter().zip(&norms)).enumerate() {
        let (loss, norm) = (report.loss, report.grad_norm as f64);
        println!("step {}: loss {loss:.6} ({want_loss:.6}), norm {norm:.6} ({want_norm:.6})", step + 1);
        worst = (worst.0.max((loss / want_loss - 1.0).abs()), worst.1.max((norm / want_norm - 1.0).abs()));
        clipped += (report.grad_norm > max_norm) as usize;
    }
    assert!(worst.0 < 1e-5, "losses: relative error {:.1e}", worst.0);
    assert!(worst.1 < 1e-4, "gradient norms: relative error {:.1e}", worst.1);
    assert!(clipped > 0 && clipped < losses.len(), "{clipped} steps were clipped: both kinds are to be tested");
}

/// The part of PyTorch's weights that this rank owns.
fn fill(engine: &mut Engine, golden: &Golden) -> Result<()> {
    let dev = engine.device().clone();
    let store = engine.state().0;
    store.for_each_shard(&mut |mut shard| {
        let mut values = vec![0f32; shard.master.len()];
        for segment in &shard.layout.segments {
            let weight = &golden.tensors[&format!("weight.{}", segment.name)];
            assert_eq!(weight.len(), segment.len(), "{}", segment.name);
            for (i, at) in segment.range().enumerate().filter(|(_, at)| *at >= shard.start) {
                values.get_mut(at - shard.start).into_iter().for_each(|value| *value = weight[i]);
            }
        }
        dev.upload(bytemuck::cast_slice(&values), shard.master.reborrow())?;
        shard.param.map_or(Ok(()), |param| dev.copy(shard.master.as_view(), param))
    })?;
    store.weights_changed()
}

#[test]
fn llama_trains_like_pytorch() {
    training_agrees(Arch::Llama);
}
#[test]
fn gpt_trains_like_pytorch() {
    training_agrees(Arch::Gpt);
}
