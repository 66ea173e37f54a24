//! Dropout of adapters: which elements the masks drop, that ranks of a ring draw the masks of a single rank, and that
//! only training uses them.
use crate::common::plain_store::{Docs, Plain, Told, device, groups};
use crate::common::*;
use flatshard::base::DType;
use flatshard::base::rng::{Rng, philox};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::engine::{Engine, EngineOptions};
use flatshard::nn::{Checkpointing, Decoder, Lora, Minimized, Spec, Tuning, WorkspaceOptions};

fn tuning(rank: usize, dropout: f32, targets: &[&str]) -> Tuning {
    let targets = targets.iter().map(|t| t.to_string()).collect();
    Tuning { lora: Some(Lora { rank, alpha: rank as f32, dropout, targets }), ..Tuning::default() }
}

/// With A the identity and B zero, column c of B's gradient is proportional to channel c of the adapter's input; with a
/// loss at a single token it comes from that token alone. So masks are visible element by element.
#[test]
fn masks_depend_on_token_channel_and_module() {
    let spec = Spec { layers: 1, dim: 16, heads: 2, kv_heads: 2, head_dim: 8, ff: 16, ..llama() };
    let (p, key, lengths, inputs) = (0.4, 77, [4, 3], 16);
    // Summed gradients of B by module, with the loss at `token`.
    let grads = |dropout: f32, token: usize| {
        let (dev, tuning) = (device(), tuning(inputs, dropout, &["o_proj", "down_proj"]));
        let decoder = Decoder::tuned(spec.clone(), &tuning).unwrap();
        let mut store = Plain::new(&dev, &decoder, DType::F32, |segment, i| match &segment.name {
            name if name.contains("lora_A") => f32::from(i / inputs == i % inputs),
            name if name.contains("lora_B") => 0.0,
            name => 0.3 * Rng::named(7, name).normal(i as u64),
        });
        let options = WorkspaceOptions { tokens: 7, dtype: DType::F32, checkpoint: Checkpointing::Off, train: true };
        let mut ws = decoder.workspace(&dev, &groups(), &options).unwrap();
        let tokens: Vec<u32> = (1..8).collect();
        let targets: Vec<i32> = (0..7).map(|i| if i == token { 3 } else { -100 }).collect();
        let docs = Docs::new(&dev, &tokens, &targets, &lengths);
        let told = Told::dropping(&dev, &decoder, 1.0, key);
        decoder.train(&dev, &mut store, &docs.batch(), &mut ws, &told.micro(), Minimized::Tokens).unwrap();
        let of_b = store.segments().filter(|(_, s)| s.name.contains("lora_B"));
        of_b.map(|(layer, s)| (s.name.clone(), store.grad(layer, s).to_vec())).collect::<Vec<_>>()
    };
    let mut kept = 0;
    for token in 0..7 {
        for ((name, all), (_, some)) in grads(0.0, token).into_iter().zip(grads(p, token)) {
            let module = Rng::named(key, name.strip_suffix(".lora_B.weight").unwrap()).key();
            for (i, (all, some)) in all.iter().zip(&some).enumerate() {
                let channel = i % inputs;
                let word = philox(module, [channel as u32 / 4, 0, token as u32, 0])[channel % 4];
                let keep = word as f64 >= p as f64 * 4_294_967_296.0;
                let expected = if keep { all / (1.0 - p) } else { 0.0 };
                assert!((some - expected).abs() <= 1e-5 * all.abs(), "{name} token {token} channel {channel}");
                kept += usize::from(keep && *all != 0.0);
            }
        }
    }
    assert!(kept > 7 * 2 * inputs * inputs / 3, "{kept} elements: nothing is tested");
}

#[test]
fn only_training_applies_dropout() {
    let options = |dropout| {
        let tuning = tuning(4, dropout, &["all-linear"]);
        EngineOptions { tuning, ..options(&llama(), fsdp(sharded()), SGD) }
    };
    let losses = |dropout: f32| {
        let mut losses = ranks(2, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options(dropout))?;
            let dev = engine.device().clone();
            // Adapters that are not zero.
            let (store, _) = engine.state();
            store.for_each_shard(&mut |mut shard| {
                let mut values = vec![0f32; shard.master.len()];
                dev.download(shard.master.as_view(), bytemuck::cast_slice_mut(&mut values))?;
                let normal = Rng::new(5, rank.rank as u64);
                values.iter_mut().enumerate().for_each(|(i, x)| *x += 0.1 * normal.normal(i as u64));
                dev.upload(bytemuck::cast_slice(&values), shard.master.reborrow())
            })?;
            store.weights_changed()?;
            let micro = batch(&llama(), 1, 0, rank.rank);
            let evaluated = engine.evaluate(std::slice::from_ref(&micro))?.0;
            Ok((evaluated, step(&mut engine, &[micro], 1)?.loss))
        });
        losses.swap_remove(0)
    };
    let (without, with) = (losses(0.0), losses(0.5));
    assert_eq!(without.0.to_bits(), with.0.to_bits(), "an evaluation drops");
    assert!((without.1 - with.1).abs() > 1e-3 * without.1, "training drops nothing: {} and {}", without.1, with.1);
}

/// Ranks of sp share the tokens of a micro-batch: each draws its tokens' rows of the full mask.
#[test]
fn ring_ranks_draw_the_masks_of_a_single_rank() {
    let spec = Spec { max_len: 40, ..llama() };
    let options = EngineOptions {
        tuning: tuning(4, 0.3, &["q_proj", "down_proj"]),
        checkpoint: Checkpointing::Full,
        ..options(&spec, fsdp(sharded()), SGD)
    };
    let norms = |dp_shard, sp| {
        let sizes = MeshSizes { dp_replicate: 1, dp_shard, sp, tp: 1, ep: 1 };
        let norms = mesh_ranks(sizes, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let report =
                |number| step(&mut engine, &[batch(&spec, number, 0, rank.mesh.group(Axis::Dp).rank())], number);
            (1..=3).map(report).collect::<flatshard::base::Result<Vec<_>>>()
        });
        norms[0].iter().map(|report| f64::from(report.grad_norm)).collect::<Vec<_>>()
    };
    for (dp, sp) in [(1, 2), (2, 2), (1, 3)] {
        for (one, ring) in norms(dp, 1).iter().zip(norms(dp, sp)) {
            assert!((one - ring).abs() < 2e-5 * one, "norm {one} on one rank, {ring} on {sp}");
        }
    }
}
