//! The model compared with itself: gradients with finite differences, and what must change neither bits nor sums:
//! checkpointing, micro-batches, logit chunks, packing, workspace size.
mod differences;

use crate::common::plain_store::{Call, Docs, Plain, Told, device, distance, groups};
use crate::common::worlds::as_gemma4;
use flatshard::base::{Category, DType, Error};
use flatshard::comm::{Mesh, MeshSizes};
use flatshard::device::Device;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::ops::{DeltaShape, StateRule};
use flatshard::engine::PlannedRank;
use flatshard::nn::{
    Activation, Arch, Checkpointing, Decoder, DeltaForm, DeltaNet, Groups, Minimized, Pass, ROOT, Recurrence, Rotary,
    Spec, Tuning, Workspace, WorkspaceOptions,
};
use std::sync::Arc;

/// Odd sizes, grouped queries, documents of several lengths, one of them a single token.
const LENGTHS: [usize; 4] = [13, 1, 8, 5];
const TOKENS: usize = 27;
const LOSS_SCALE: f32 = 0.25;
const DROPOUT_KEY: u64 = 99;

fn llama() -> Spec {
    Spec {
        arch: Arch::Llama,
        vocab: 37,
        dim: 24,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 10,
        ff: 28,
        max_len: 16,
        norm_eps: 1e-5,
        tied: false,
        dropout: 0.0,
        ..Spec::default()
    }
}
fn gpt() -> Spec {
    Spec {
        arch: Arch::Gpt,
        rope: None,
        activation: Activation::Gelu,
        heads: 3,
        kv_heads: 3,
        head_dim: 8,
        tied: true,
        ..llama()
    }
}

/// Biases everywhere, and a window on the second layer only.
fn qwen2() -> Spec {
    let (qkv_bias, out_bias, mlp_bias) = (true, true, true);
    Spec { arch: Arch::Qwen2, qkv_bias, out_bias, mlp_bias, window: 5, windowed: vec![false, true], ..llama() }
}
/// Norms of heads; wide heads.
fn qwen3() -> Spec {
    Spec { arch: Arch::Qwen3, qk_norm: true, tied: true, ..llama() }
}
fn gemma2() -> Spec {
    Spec {
        arch: Arch::Gemma2,
        activation: Activation::GeGlu,
        window: 4,
        windowed: vec![true, false],
        query_scalar: Some(6.0),
        score_cap: 1.5,
        logit_cap: 3.0,
        post_norms: true,
        norm_from_one: true,
        scaled_embedding: true,
        tied: true,
        ..llama()
    }
}
fn gemma3() -> Spec {
    Spec {
        arch: Arch::Gemma3,
        qk_norm: true,
        local_rope: Some(Rotary::new(50.0)),
        score_cap: 0.0,
        logit_cap: 0.0,
        ..gemma2()
    }
}
fn gemma4() -> Spec {
    Spec { layers: 4, score_scale: Some(0.5), ..as_gemma4(gemma3()) }
}
/// A gated delta net, then attention with an output gate and a part of each head rotated. The epsilon is large for the
/// finite differences: where a document starts, the net's outputs are small.
fn qwen35() -> Spec {
    let rule = StateRule::Delta { doubled: false };
    let shape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 6, rule };
    Spec {
        arch: Arch::Qwen35,
        norm_eps: 1e-2,
        qk_norm: true,
        norm_from_one: true,
        output_gate: true,
        rotary_dim: Some(6),
        recurrence: Some(Recurrence::Delta(DeltaNet { shape, taps: 4, form: DeltaForm::Joined })),
        recurrent: vec![true, false],
        ..llama()
    }
}
/// A gated short convolution, then attention.
fn lfm2() -> Spec {
    Spec {
        arch: Arch::Lfm2,
        qk_norm: true,
        recurrence: Some(Recurrence::Conv { channels: llama().dim, taps: 3 }),
        recurrent: vec![true, false],
        ..llama()
    }
}
/// One of each.
fn families() -> [Spec; 9] {
    [llama(), gpt(), qwen2(), qwen3(), gemma2(), gemma3(), gemma4(), qwen35(), lfm2()]
}

fn options(checkpoint: Checkpointing) -> WorkspaceOptions {
    WorkspaceOptions { tokens: TOKENS, dtype: DType::F32, checkpoint, train: true }
}

fn directions(dev: &dyn Device, decoder: &Decoder) -> Told {
    Told::dropping(dev, decoder, LOSS_SCALE, DROPOUT_KEY)
}

/// A decoder with weights, a workspace and documents on its own device.
struct Model {
    dev: CpuDevice,
    decoder: Decoder,
    store: Plain,
    ws: Workspace,
    docs: Docs,
    told: Told,
}
impl Model {
    fn new(spec: Spec, options: WorkspaceOptions) -> Model {
        Model::tuned(spec, &Tuning::default(), options)
    }
    fn tuned(spec: Spec, tuning: &Tuning, options: WorkspaceOptions) -> Model {
        let (dev, decoder) = (device(), Decoder::tuned(spec, tuning).unwrap());
        let store = Plain::random(&dev, &decoder, options.dtype, 0.25);
        let ws = decoder.workspace(&dev, &groups(), &options).unwrap();
        let docs = Docs::random(&dev, 3, decoder.spec().vocab, &LENGTHS, 5);
        let told = directions(&dev, &decoder);
        Model { dev, decoder, store, ws, docs, told }
    }
    /// Accumulates gradients; returns the summed loss of this micro-batch.
    fn train(&mut self) -> f64 {
        let Model { dev, decoder, store, ws, docs, told } = self;
        decoder.train(dev, store, &docs.batch(), ws, &told.micro(), Minimized::Tokens).unwrap();
        ws.take_loss(dev).unwrap()
    }
    fn evaluate(&mut self) -> f64 {
        let Model { dev, decoder, store, ws, docs, .. } = self;
        decoder.evaluate(dev, store, &docs.batch(), ws, None).unwrap();
        ws.take_loss(dev).unwrap()
    }
}

/// Bitwise equal losses and gradients, with dropout, in both dtypes.
#[test]
fn checkpointing_changes_no_bit() {
    for dtype in [DType::F32, DType::Bf16] {
        let twice = |spec: Spec| {
            let (windowed, recurrent) = (spec.windowed.repeat(2), spec.recurrent.repeat(2));
            Spec { layers: 2 * spec.layers, windowed, recurrent, ..spec }
        };
        for spec in families().map(|spec| Spec { dropout: 0.2, ..twice(spec) }) {
            let model = |checkpoint| Model::new(spec.clone(), WorkspaceOptions { dtype, ..options(checkpoint) });
            let mut kept = model(Checkpointing::Off);
            let every = |n| [Checkpointing::SelectiveEvery(n), Checkpointing::FullEvery(n)];
            for checkpoint in [[Checkpointing::Selective, Checkpointing::Full], every(2)].concat() {
                let mut again = model(checkpoint);
                for _ in 0..2 {
                    let loss = kept.train();
                    assert_eq!(loss.to_bits(), again.train().to_bits(), "{checkpoint:?} in {dtype}");
                }
                assert!(
                    kept.store.all_grads() == again.store.all_grads(),
                    "{checkpoint:?}: gradients differ in {dtype}"
                );
                let saved = [&again, &kept].map(|m| m.dev.meter().live(Category::Saved));
                assert!(saved[0] < saved[1], "{checkpoint:?} saves no memory: {saved:?}");
                kept.store.zero_grads(&kept.dev);
            }
        }
    }
}

/// A second micro-batch adds to the gradients of the first, in every tensor.
#[test]
fn gradients_of_micro_batches_add_up() {
    for spec in families() {
        let mut model = Model::new(spec.clone(), options(Checkpointing::Full));
        let mut grads_of = |docs: &[Docs]| {
            model.store.zero_grads(&model.dev);
            for docs in docs {
                let Model { dev, decoder, store, ws, told, .. } = &mut model;
                decoder.train(dev, store, &docs.batch(), ws, &told.micro(), Minimized::Tokens).unwrap();
            }
            let grads: Vec<_> = model
                .store
                .segments()
                .filter(|(_, s)| s.is_trained())
                .map(|(layer, s)| (s.name.clone(), model.store.grad(layer, s).to_vec()))
                .collect();
            (grads, model.ws.take_loss(&model.dev).unwrap())
        };
        let docs = |seed| Docs::random(&device(), seed, spec.vocab, &LENGTHS, 0);
        let (a, loss_a) = grads_of(&[docs(1)]);
        let (b, loss_b) = grads_of(&[docs(2)]);
        let (both, loss) = grads_of(&[docs(1), docs(2)]);
        assert!(((loss_a + loss_b) / loss - 1.0).abs() < 1e-12, "{loss_a} + {loss_b} is not {loss}");
        for ((a, b), both) in a.iter().zip(&b).zip(&both) {
            let sum: Vec<f32> = a.1.iter().zip(&b.1).map(|(a, b)| a + b).collect();
            assert!(distance(&both.1, &sum) < 1e-5, "{}: {:.1e}", a.0, distance(&both.1, &sum));
            assert!(distance(&b.1, &sum) > 0.1, "{}: the first micro-batch adds nothing", a.0);
        }
    }
}

/// With a vocabulary of 66,000 a logit chunk holds 256 rows: three chunks at once equal three micro-batches of one.
#[test]
fn logit_chunks_add_up() {
    let spec = Spec { vocab: 66_000, dim: 8, layers: 1, heads: 2, kv_heads: 1, head_dim: 4, ff: 8, ..llama() };
    let lengths = [16; 44];
    let tokens = lengths.iter().sum();
    let run = |parts: usize| {
        let (dev, decoder) = (device(), Decoder::new(spec.clone()).unwrap());
        let mut store = Plain::random(&dev, &decoder, DType::F32, 0.25);
        let mut ws =
            decoder.workspace(&dev, &groups(), &WorkspaceOptions { tokens, ..options(Checkpointing::Off) }).unwrap();
        let all = Docs::random(&dev, 1, spec.vocab, &lengths, 7);
        let all = all.batch();
        let (ids, targets) = (all.tokens.host::<u32>("test").unwrap(), all.targets.host::<i32>("test").unwrap());
        for part in 0..parts {
            let (docs, n) = (lengths.len() / parts, tokens / parts);
            let range = part * n..(part + 1) * n;
            let docs = Docs::new(&dev, &ids[range.clone()], &targets[range], &lengths[..docs]);
            decoder
                .train(&dev, &mut store, &docs.batch(), &mut ws, &directions(&dev, &decoder).micro(), Minimized::Tokens)
                .unwrap();
        }
        let scratch = dev.meter().live(Category::Scratch);
        assert!(scratch < 100 << 20, "{scratch} bytes: 704 rows of logits alone would be 186 MB");
        (ws.take_loss(&dev).unwrap(), store.all_grads())
    };
    let ((loss, grads), (loss4, grads4)) = (run(1), run(4));
    assert!((loss / loss4 - 1.0).abs() < 1e-7, "{loss} in chunks, {loss4} in micro-batches");
    assert!(distance(&grads, &grads4) < 1e-5, "{:.1e}", distance(&grads, &grads4));
}

/// Evaluation gives the training loss without dropout, bit for bit, on its own workspace (with less memory) and on the
/// training one, and touches no gradient. The next token's logits are those the loss is computed from.
#[test]
fn evaluation_agrees_with_training() {
    for spec in families() {
        let mut model = Model::new(spec.clone(), options(Checkpointing::Off));
        let loss = model.train();
        let grads = model.store.all_grads();
        assert_eq!(model.evaluate().to_bits(), loss.to_bits());
        assert!(model.store.all_grads() == grads, "evaluation changes gradients");

        let mut small = Model::new(spec.clone(), WorkspaceOptions { train: false, ..options(Checkpointing::Off) });
        assert_eq!(small.evaluate().to_bits(), loss.to_bits());
        assert!(small.dev.meter().total() < model.dev.meter().total());

        let mut sum = 0.0;
        let mut logits = vec![0f32; spec.vocab];
        let Model { dev, decoder, store, ws, docs, .. } = &mut small;
        for (row, &target) in docs.targets().iter().enumerate().filter(|(_, t)| **t != -100) {
            decoder.next_token_logits(dev, store, &docs.batch(), ws, row, &mut logits).unwrap();
            let total: f64 = logits.iter().map(|&l| (l as f64).exp()).sum();
            sum += total.ln() - logits[target as usize] as f64;
        }
        assert!((sum / loss - 1.0).abs() < 1e-6, "{sum} from logits, {loss} from the loss");

        // Dropout applies to training only.
        let mut dropped = Model::new(Spec { dropout: 0.5, ..spec }, options(Checkpointing::Off));
        assert_eq!(dropped.evaluate().to_bits(), loss.to_bits());
        assert!((dropped.train() - loss).abs() > 1e-3 * loss, "dropout does nothing");
    }
}

/// A document's loss depends neither on the documents packed next to it nor on the size of the workspace.
#[test]
fn documents_are_independent() {
    for spec in families() {
        let mut packed = Model::new(spec.clone(), options(Checkpointing::Off));
        let loss = packed.train();
        let mut alone = Model::new(spec, WorkspaceOptions { tokens: 40, ..options(Checkpointing::Off) });
        let batch = packed.docs.batch();
        let (ids, targets) = (batch.tokens.host::<u32>("test").unwrap(), batch.targets.host::<i32>("test").unwrap());
        let mut start = 0;
        for n in LENGTHS {
            let range = start..start + n;
            let docs = Docs::new(&alone.dev, &ids[range.clone()], &targets[range], &[n]);
            let Model { dev, decoder, store, ws, told, .. } = &mut alone;
            decoder.train(dev, store, &docs.batch(), ws, &told.micro(), Minimized::Tokens).unwrap();
            start += n;
        }
        let sum = alone.ws.take_loss(&alone.dev).unwrap();
        assert!((sum / loss - 1.0).abs() < 1e-6, "{sum} one by one, {loss} packed");
        let distance = distance(&packed.store.all_grads(), &alone.store.all_grads());
        assert!(distance < 1e-5, "gradients differ by {distance:.1e}");
    }
}

/// The calls of a training pass and of an evaluation pass, in the order stores rely on.
#[test]
fn the_store_is_called_in_order() {
    use Call::*;
    let mut model = Model::new(llama(), options(Checkpointing::Full));
    model.train();
    let (f, b) = (Pass::Forward, Pass::Backward);
    let mut want = vec![Acquire(ROOT, f), Acquire(1, f), Release(1, f), Acquire(2, f), Release(2, f), Acquire(ROOT, f)];
    want.push(Grads(ROOT));
    for layer in [2, 1] {
        want.extend([Acquire(layer, b), Grads(layer), Ready(layer), Release(layer, b)]);
    }
    want.extend([Grads(ROOT), Ready(ROOT), Release(ROOT, b)]);
    assert_eq!(std::mem::take(&mut model.store.calls), want);

    model.evaluate();
    let e = Pass::Evaluate;
    let want = [
        Acquire(ROOT, e),
        Acquire(1, e),
        Release(1, e),
        Acquire(2, e),
        Release(2, e),
        Acquire(ROOT, e),
        Release(ROOT, e),
    ];
    assert_eq!(model.store.calls, want);
}

/// A workspace holds exactly the planned bytes, and steps allocate nothing.
#[test]
fn memory_matches_the_plan() {
    for spec in families().into_iter().chain([Spec { dropout: 0.1, ..gpt() }]) {
        for (checkpoint, train, dtype) in [
            (Checkpointing::Off, true, DType::F32),
            (Checkpointing::Full, true, DType::Bf16),
            (Checkpointing::Selective, true, DType::Bf16),
            (Checkpointing::SelectiveEvery(2), true, DType::Bf16),
            (Checkpointing::FullEvery(3), true, DType::F32),
            (Checkpointing::Off, true, DType::Bf16),
            (Checkpointing::Selective, false, DType::F32),
        ] {
            let (dev, decoder) = (device(), Decoder::new(spec.clone()).unwrap());
            let options = WorkspaceOptions { tokens: TOKENS, dtype, checkpoint, train };
            let mut ws = decoder.workspace(&dev, &groups(), &options).unwrap();
            let alone = PlannedRank { mesh: MeshSizes::sharded(1), rank: 0, sharing: 1, stage: 0, gpu: false };
            let build = |dev: Arc<dyn Device>, mesh: &Mesh| decoder.workspace(&*dev, &Groups::of(mesh), &options);
            let planned = alone.bytes(build).unwrap();
            assert_eq!(planned.iter().filter(|(_, bytes)| *bytes > 0).count(), 3, "{planned:?}");
            for (category, bytes) in &planned {
                assert_eq!(dev.meter().live(*category), *bytes, "{category:?}");
            }
            assert_eq!(dev.meter().total(), planned.iter().map(|(_, bytes)| bytes).sum::<usize>());
            if !train {
                continue;
            }
            let mut store = Plain::random(&dev, &decoder, dtype, 0.25);
            let docs = Docs::random(&dev, 3, spec.vocab, &LENGTHS, 0);
            let told = directions(&dev, &decoder);
            let mut step =
                || decoder.train(&dev, &mut store, &docs.batch(), &mut ws, &told.micro(), Minimized::Tokens).unwrap();
            step();
            let after_one = dev.meter().allocations();
            step();
            assert_eq!(dev.meter().allocations(), after_one);
        }
    }
}

#[test]
fn oversized_batches_are_refused() {
    let mut model = Model::new(llama(), WorkspaceOptions { train: false, ..options(Checkpointing::Off) });
    let Model { dev, decoder, store, ws, docs, told } = &mut model;
    let error = decoder.train(dev, store, &docs.batch(), ws, &told.micro(), Minimized::Tokens).unwrap_err();
    assert!(matches!(&error, Error::Op { what, .. } if what.contains("without backward buffers")), "{error}");
    let long = Docs::random(dev, 3, 37, &[TOKENS + 1], 0);
    let error = decoder.evaluate(dev, store, &long.batch(), ws, None).unwrap_err().to_string();
    assert!(error.contains("28 tokens") && error.contains("27 tokens"), "{error}");
    assert!(Decoder::new(Spec { kv_heads: 3, ..llama() }).is_err());
}

/// Published parameter counts: GPT-2 small has 124,439,808; Llama-2-7B has 6,738,415,616.
#[test]
fn parameters_are_counted() {
    let gpt2 = Spec {
        vocab: 50257,
        dim: 768,
        layers: 12,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        ff: 3072,
        max_len: 1024,
        ..gpt()
    };
    assert_eq!(gpt2.params(), 124_439_808);
    let llama2 =
        Spec { vocab: 32000, dim: 4096, layers: 32, heads: 32, kv_heads: 32, head_dim: 128, ff: 11008, ..llama() };
    assert_eq!(llama2.params(), 6_738_415_616);
    // 6 P + 12 * layers * width * seq
    assert_eq!(llama2.flops_per_token(2048), 6 * 6_738_415_616 + 12 * 32 * 4096 * 2048);
    // Half of the layers attend to 512 tokens.
    let windowed = Spec { window: 512, windowed: (0..32).map(|i| i % 2 == 0).collect(), ..llama2 };
    assert_eq!(windowed.flops_per_token(2048), 6 * 6_738_415_616 + 12 * 16 * 4096 * (2048 + 512));
    // Qwen3-0.6B has 596,049,920, Gemma-3-1B 999,885,952 (as published in safetensors).
    let qwen3 =
        Spec { vocab: 151_936, dim: 1024, layers: 28, heads: 16, kv_heads: 8, head_dim: 128, ff: 3072, ..qwen3() };
    assert_eq!(qwen3.params(), 596_049_920);
    let gemma3 =
        Spec { vocab: 262_144, dim: 1152, layers: 26, heads: 4, kv_heads: 1, head_dim: 256, ff: 6912, ..gemma3() };
    assert_eq!(gemma3.params(), 999_885_952);
}
