//! The model against PyTorch and Hugging Face transformers: loss, logits, every gradient and ten training steps of two
//! tiny models. `tests/golden/make.py` made the files.
#[path = "common/plain.rs"]
mod plain;
#[path = "common/tensors.rs"]
mod tensors;

use flatshard::base::{Category, DType};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::{AdamW, Buf, Device, LIMBS};
use flatshard::nn::{Activation, Arch, Checkpointing, Decoder, Spec, Workspace, WorkspaceOptions};
use plain::{Docs, Plain, Told, device, distance, groups};
use serde_json::Value;
use std::collections::HashMap;
use tensors::Tensors;

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

/// What PyTorch said.
struct Golden {
    values: Value,
    /// Weights (from bf16) and gradients by name, and the logits.
    tensors: HashMap<String, Vec<f32>>,
    /// Two batches of documents of `lengths`, and the first one's targets.
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
    /// Batch `b`, each token's target the next one of its document.
    fn batch(&self, dev: &dyn Device, b: usize) -> (Docs, Told) {
        let n: usize = self.lengths.iter().sum();
        let tokens = &self.tokens[b * n..(b + 1) * n];
        let ends: Vec<usize> = self
            .lengths
            .iter()
            .scan(0, |end, &n| {
                *end += n;
                Some(*end)
            })
            .collect();
        let target = |i: usize| if ends.contains(&(i + 1)) { -100 } else { tokens[i + 1] as i32 };
        self.micro(dev, tokens, &(0..n).map(target).collect::<Vec<_>>(), 1.0)
    }
    fn micro(&self, dev: &dyn Device, tokens: &[u32], targets: &[i32], scale: f32) -> (Docs, Told) {
        let count = targets.iter().filter(|&&t| t != -100).count();
        let told = Told::new(dev, scale * (1.0 / count as f32));
        (Docs::new(dev, tokens, targets, &self.lengths), told)
    }
}

/// PyTorch's model here.
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

    /// Relative errors of loss and logits, and of each gradient by name, of a loss that is multiplied by `scale`.
    fn errors(&mut self, scale: f32) -> (f64, f64, Vec<(String, f64)>) {
        let Model { golden, dev, decoder, store, ws } = self;
        let n = golden.targets.len();
        let (docs, told) = golden.micro(dev, &golden.tokens[..n], &golden.targets, scale);
        decoder.train(dev, store, &docs.batch(), ws, &told.micro()).unwrap();
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

/// Measured: loss 2e-8, logits 4e-7, gradients 8e-7 at most. The bounds leave room for another order of summation.
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

/// In bf16 (fp16, with a scaled loss) we may be as far from PyTorch's fp32 as PyTorch's own is, twice for logits and three
/// times for gradients: the rule of flash-attention's tests, in place of hand-picked tolerances. (The loss is a mean whose
/// errors cancel by luck: it is held to the logits' bound.) `least`: nothing that is computed in so few bits is nearer.
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
fn bf16_is_as_near_as_pytorchs() {
    for arch in [Arch::Llama, Arch::Gpt] {
        narrow_is_near(arch, DType::Bf16, "bf16_errors", 1.0, 1e-4);
    }
}
#[test]
fn fp16_is_as_near_as_pytorchs() {
    for arch in [Arch::Llama, Arch::Gpt] {
        narrow_is_near(arch, DType::F16, "fp16_errors", 65536.0, 1e-5);
    }
}

fn alloc_with(dev: &dyn Device, values: &[f32]) -> Buf {
    let mut buf = dev.alloc(DType::F32, values.len(), Category::Optimizer).unwrap();
    dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
    buf
}

/// Ten losses and gradient norms of AdamW with clipping and with weight decay by the segment table. Measured: losses
/// 3e-6, norms 2e-5 at most. (Adam makes full steps of what is only rounding: the bias of GPT's keys, whose true
/// gradient is zero.)
fn training_agrees(arch: Arch) {
    let Model { golden, dev, decoder, mut store, mut ws } = Model::new(arch, DType::F32);
    let alloc = |dtype, len| dev.alloc(dtype, len, Category::Optimizer).unwrap();
    let like = |bufs: &[Buf]| -> Vec<Buf> { bufs.iter().map(|b| alloc(DType::F32, b.len())).collect() };
    let (mut m, mut v) = (like(&store.master), like(&store.master));
    let one = alloc_with(&dev, &[1.0]);
    let (mut limbs, mut scale) = (alloc(DType::F64, LIMBS), alloc(DType::F32, 2));
    let batches = [golden.batch(&dev, 0), golden.batch(&dev, 1)];
    let betas = golden.numbers("betas");

    let (losses, norms) = (golden.numbers("losses"), golden.numbers("norms"));
    let (mut clipped, mut worst) = (0, (0f64, 0f64));
    for step in 1..=losses.len() {
        store.zero_grads(&dev);
        let (docs, told) = &batches[(step - 1) % 2];
        decoder.train(&dev, &mut store, &docs.batch(), &mut ws, &told.micro()).unwrap();
        let loss = ws.take_loss(&dev).unwrap() * told.loss_scale as f64;

        dev.zero(limbs.view_mut()).unwrap();
        store.grads.iter().for_each(|g| dev.sum_squares(g.view(), limbs.view_mut()).unwrap());
        dev.clip_scale(limbs.view(), golden.number("max_norm") as f32, one.view(), scale.view_mut()).unwrap();
        let norm = scale.view().host::<f32>("norm").unwrap()[1] as f64;
        clipped += (norm > golden.number("max_norm")) as usize;
        for (layer, layout) in store.layouts.iter().enumerate() {
            for segment in &layout.segments {
                let h = AdamW {
                    lr: golden.number("lr") as f32,
                    beta1: betas[0] as f32,
                    beta2: betas[1] as f32,
                    eps: golden.number("eps") as f32,
                    weight_decay: if segment.decay { golden.number("weight_decay") as f32 } else { 0.0 },
                    step: step as u64,
                };
                let range = segment.range();
                let (m, v) = (m[layer].view_mut().slice(range.clone()), v[layer].view_mut().slice(range.clone()));
                let (g, p) =
                    (store.grads[layer].view().slice(range.clone()), store.master[layer].view_mut().slice(range));
                let h = alloc_with(&dev, bytemuck::cast_slice(&[h.scalars()]));
                dev.adamw(h.view(), scale.view(), g, m, v, p, None).unwrap();
            }
        }
        store.publish(&dev);

        let (want_loss, want_norm) = (losses[step - 1], norms[step - 1]);
        println!("step {step}: loss {loss:.6} ({want_loss:.6}), norm {norm:.6} ({want_norm:.6})");
        worst = (worst.0.max((loss / want_loss - 1.0).abs()), worst.1.max((norm / want_norm - 1.0).abs()));
    }
    assert!(worst.0 < 1e-5, "losses: relative error {:.1e}", worst.0);
    assert!(worst.1 < 1e-4, "gradient norms: relative error {:.1e}", worst.1);
    assert!(clipped > 0 && clipped < losses.len(), "{clipped} steps were clipped: both kinds are to be tested");
}
#[test]
fn llama_trains_like_pytorch() {
    training_agrees(Arch::Llama);
}
#[test]
fn gpt_trains_like_pytorch() {
    training_agrees(Arch::Gpt);
}
