//! Ranks that share the experts of a mixture: every mesh of four and eight ranks compared with one rank on the same
//! samples, forward bit for bit; routing so skewed that rows take several rounds; experts without rows; and
//! checkpoints, which show nothing of the mesh, and of which a rank reads its own experts only.
use crate::common::stores::*;
use crate::common::*;
use crate::meshes::{ACCUM, LEN, Part, assert_close, run, shapes, stores};
use flatshard::base::{DType, Result};
use flatshard::ckpt::{Checkpointer, Dtype, inspect_model};
use flatshard::comm::MeshSizes;
use flatshard::comm::recorder::{Entry, Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Arch, Checkpointing, Experts, Lora, SpImpl, Spec, Tuning};
use flatshard::optim::{Moments, Rule};
use flatshard::store::{Offload, ShardedOptions, Stage};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Every mesh whose ranks share seven experts, which do not divide evenly. Eight ranks need more of them
/// ([`eight_ranks_share_nine_experts`]).
pub fn meshes(world: usize) -> Vec<MeshSizes> {
    let shared = |sizes: MeshSizes| {
        let divides = move |ep: &usize| sizes.dp_shard.is_multiple_of(*ep);
        (2..=7).filter(divides).map(move |ep| MeshSizes { ep, ..sizes })
    };
    factorizations(world).into_iter().flat_map(shared).collect()
}

fn spec() -> Spec {
    let [.., sparse] = shapes();
    sparse
}
fn options(strategy: &Arc<dyn Strategy>, rule: Rule) -> EngineOptions {
    crate::meshes::options(&spec(), strategy, rule)
}

fn check(world: usize, rule: Rule) {
    let mut stores = stores();
    if matches!(rule, Rule::Muon { .. }) {
        // Over uneven parts of tp, the reference store does not know what the others own.
        stores.retain(|strategy| !strategy.name().contains("reference"));
    }
    let ddp = stores.pop().unwrap();
    let offloaded = [Offload::Optimizer, Offload::Gradients, Offload::Parameters]
        .map(|offload| fsdp(ShardedOptions { grad_accum: ACCUM, offload, ..sharded() }));
    // Those first, because four ranks have fewer meshes than there are stores.
    let mut turns = offloaded.iter().chain(&stores).cycle();
    let mut impls = [SpImpl::Ulysses, SpImpl::Ring].into_iter().cycle();
    let start = Part { from: None, to: 2, save: None };
    let one = run(MeshSizes::sharded(1), &options(&ddp, rule), start);
    for sizes in meshes(world) {
        for checkpoint in [Checkpointing::Off, Checkpointing::Selective, Checkpointing::Full] {
            let strategy = turns.next().unwrap();
            let sp_impl = if sizes.sp > 1 { impls.next().unwrap() } else { SpImpl::Ring };
            let sequence_parallel = sizes.tp > 1 && checkpoint == Checkpointing::Full;
            let options = EngineOptions { checkpoint, sequence_parallel, sp_impl, ..options(strategy, rule) };
            let what = format!("{} on {sizes:?}, {checkpoint:?}, {sp_impl:?}", strategy.name());
            assert_close(&one, &run(sizes, &options, start), &what);
        }
    }
}

/// One store of each kind on one mesh, compared with one rank.
fn check_mesh(spec: &Spec, sizes: MeshSizes, sp_impl: SpImpl) {
    let start = Part { from: None, to: 2, save: None };
    let one = run(MeshSizes::sharded(1), &crate::meshes::options(spec, &ddp(DType::F32), SGD), start);
    let [sharded, zero, reference] = [
        fsdp(ShardedOptions { grad_accum: ACCUM, ..sharded() }),
        zero(staged(Stage::Three, DType::F32)),
        reference(by_tensor(DType::F32, ACCUM)),
    ];
    for (strategy, checkpoint) in
        [(sharded, Checkpointing::Off), (zero, Checkpointing::Selective), (reference, Checkpointing::Full)]
    {
        let options = EngineOptions { checkpoint, sp_impl, ..crate::meshes::options(spec, &strategy, SGD) };
        let what = format!("{} on {sizes:?}, {checkpoint:?}, {sp_impl:?}", strategy.name());
        assert_close(&one, &run(sizes, &options, start), &what);
    }
}

#[test]
fn every_mesh_of_four_that_shares_experts_equals_one_rank() {
    check(4, SGD);
}

#[test]
fn every_mesh_of_four_that_shares_experts_equals_one_rank_with_muon() {
    check(4, MUON);
}

#[test]
fn every_mesh_of_eight_that_shares_experts_equals_one_rank() {
    check(8, SGD);
}

/// One rank has two experts, the others one.
#[test]
fn eight_ranks_share_nine_experts() {
    let experts = Experts { count: 9, ..spec().experts.unwrap() };
    let spec = Spec { experts: Some(experts), ..spec() };
    check_mesh(&spec, MeshSizes { ep: 8, ..MeshSizes::sharded(8) }, SpImpl::Ring);
}

/// Three heads are too few for four ranks of a sequence: two groups of two exchange heads, and form a ring.
#[test]
fn a_ring_of_ulysses_groups_shares_experts() {
    let spec = Spec { heads: 3, kv_heads: 3, ..spec() };
    check_mesh(&spec, MeshSizes { sp: 4, ep: 2, ..MeshSizes::sharded(2) }, SpImpl::Ulysses);
}

/// Sinks and biases of experts; latents and experts in groups; experts next to attention; weighted inputs; choices one
/// after the other: on ranks that share sequences by heads and by tokens, columns, and experts.
#[test]
fn experts_of_other_families_on_ranks_equal_one_rank() {
    let sizes = Spec { heads: 4, kv_heads: 4, layers: 2, ..spec() };
    let experts = sizes.experts.clone().map(|e| Experts { averaged: true, ..e });
    let cohere = Spec { arch: Arch::Cohere2Moe, parallel: true, layer_norm: true, experts, ..sizes.clone() };
    for spec in [gpt_oss(sizes.clone()), llama4(sizes.clone()), phimoe(sizes.clone()), deepseek(sizes), cohere] {
        check_mesh(&spec, MeshSizes { sp: 2, ep: 2, ..MeshSizes::sharded(2) }, SpImpl::Ring);
        check_mesh(&spec, MeshSizes { sp: 2, tp: 2, ep: 2, ..MeshSizes::sharded(2) }, SpImpl::Ulysses);
    }
}

/// A dense layer next to experts, which the block goes on after: with inputs of layers, and columns and experts shared.
#[test]
fn experts_next_to_a_dense_layer_on_ranks_equal_one_rank() {
    let spec = Spec { heads: 4, kv_heads: 4, max_len: LEN, ..gemma4_experts() };
    check_mesh(&spec, MeshSizes { sp: 2, ep: 2, ..MeshSizes::sharded(2) }, SpImpl::Ring);
    check_mesh(&spec, MeshSizes { tp: 2, ep: 2, ..MeshSizes::sharded(4) }, SpImpl::Ring);
}

/// Rows do not mix, so a loss does not depend on where its rows were multiplied; and with one rank per expert shard,
/// stores differ in nothing.
#[test]
fn sharing_experts_changes_no_bit_of_the_forward_pass() {
    let strategy: Arc<dyn Strategy> = fsdp(ShardedOptions { grad_accum: ACCUM, ..sharded() });
    let start = Part { from: None, to: 1, save: None };
    let loss = |sizes| run(sizes, &options(&strategy, SGD), start).steps[0].0;
    let alone = loss(MeshSizes::sharded(4));
    for ep in [2, 4] {
        assert_eq!(alone, loss(MeshSizes { ep, ..MeshSizes::sharded(4) }), "ep {ep}");
    }
    // The stores among each other, in backward too.
    let sizes = MeshSizes { ep: 2, ..MeshSizes::sharded(4) };
    for stores in [at_once(DType::F32, ACCUM), by_batch(DType::F32, ACCUM)] {
        let mut outcomes =
            stores.iter().map(|strategy| (strategy.name(), run(sizes, &options(strategy, ADAMW), start)));
        let (_, first) = outcomes.next().unwrap();
        outcomes.for_each(|(name, outcome)| assert_same_bits(&first, &outcome, name));
    }
}

/// Zeroes the routers: equal probabilities choose the first experts.
fn choose_the_first_experts(engine: &mut Engine) -> Result<()> {
    let (store, _) = engine.state();
    store.for_each_shard(&mut |mut shard| {
        for segment in shard.layout.segments.iter().filter(|s| s.name.ends_with("mlp.gate.weight")) {
            if let Some(owned) = shard.owned(segment.range()) {
                shard.master.reborrow().slice(owned).host::<f32>("test")?.fill(0.0);
            }
        }
        Ok(())
    })?;
    store.weights_changed()
}

/// All tokens choose the first experts, which one rank has: rows wait for their round, and results stay.
#[test]
fn skewed_routing_takes_more_rounds_and_loses_nothing() {
    let train = |sizes: MeshSizes, checkpoint, moe_overlap| {
        // No more tokens than there are, so that the buffers are as small as they get.
        let options = EngineOptions { checkpoint, moe_overlap, tokens: 2 * ROW, ..options(&fsdp(sharded()), SGD) };
        let spec = options.spec.clone();
        let results = mesh_ranks(sizes, |rank| {
            let log = Log::default();
            let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
            let mut engine = Engine::new(rank.device, &mesh, &options)?;
            choose_the_first_experts(&mut engine)?;
            let batch = batch(&spec, 1, 0, mesh.rank());
            let reports = vec![step(&mut engine, &[batch], 1)?];
            let sent = |e: &&Entry| e.seam == Some(Seam::AllToAll) && e.tag.what == "dispatch";
            let exchanges = log.entries().iter().filter(sent).count();
            Ok(((reports, fragments(&mut engine)?), exchanges))
        });
        let (results, exchanges): (Vec<_>, Vec<_>) = results.into_iter().unzip();
        assert!(exchanges.iter().all(|&n| n == exchanges[0]), "ranks took different rounds: {exchanges:?}");
        (gathered(&spec, results), exchanges[0])
    };
    let (one, none) = train(MeshSizes::sharded(4), Checkpointing::Off, false);
    assert_eq!(none, 0);
    // Of 72 rows of a rank, up to 90 are held at once: 144 in two rounds, or 192 in three.
    for (ep, rounds) in [(2, 2), (4, 3)] {
        for checkpoint in [Checkpointing::Off, Checkpointing::Full] {
            let (many, exchanges) = train(MeshSizes { ep, ..MeshSizes::sharded(4) }, checkpoint, false);
            // In forward and in backward.
            assert_eq!(exchanges, 2 * spec().sparse_blocks() * rounds, "ep {ep}");
            assert_close(&one, &many, &format!("ep {ep}, {checkpoint:?}"));
            let (halves, twice) = train(MeshSizes { ep, ..MeshSizes::sharded(4) }, checkpoint, true);
            assert_eq!(twice, 2 * exchanges, "ep {ep}");
            assert_same_bits(&many, &halves, &format!("ep {ep}, {checkpoint:?}, in halves"));
        }
    }
}

/// Of seven experts, three get all rows. The gradient of the others is zero, so AdamW only decays them.
#[test]
fn experts_without_rows_decay_and_nothing_else() {
    let spec = spec();
    let Rule::AdamW { weight_decay, .. } = ADAMW else { unreachable!() };
    let (lr, top_k) = (0.01f32, 3); // of the first step, and of the model
    let keep = (1.0 - lr as f64 * weight_decay as f64) as f32; // rounded once, as PyTorch does
    for ep in [1, 2] {
        let options = EngineOptions { tokens: 2 * ROW, ..options(&fsdp(sharded()), ADAMW) };
        let weights = mesh_ranks(MeshSizes { ep, ..MeshSizes::sharded(4) }, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            choose_the_first_experts(&mut engine)?;
            let before = fragments(&mut engine)?;
            step(&mut engine, &[batch(&spec, 1, 0, rank.mesh.rank())], 1)?;
            Ok((before, fragments(&mut engine)?))
        });
        let (before, after): (Vec<_>, Vec<_>) = weights.into_iter().unzip();
        let (before, after) = (whole(&spec, &before), whole(&spec, &after));
        let mut matrices = 0;
        for (name, weights) in &before {
            let Some((_, rest)) = name.split_once(".experts.") else { continue };
            let expert: usize = rest.split('.').next().unwrap().parse().unwrap();
            let decayed = |(before, after): (&f32, &f32)| (before * keep).to_bits() == after.to_bits();
            let only = weights.iter().zip(&after[name]).all(decayed);
            assert_eq!(only, expert >= top_k, "ep {ep}: {name}");
            matrices += 1;
        }
        assert_eq!(matrices, 3 * 7 * spec.sparse_blocks());
    }
}

/// Frozen experts, frozen routers and adapters: what the rest learns does not depend on who has the experts.
#[test]
fn frozen_parts_stay_and_the_rest_learns_alike() {
    let lora = Lora { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["q_proj".into(), "o_proj".into()] };
    let freeze = |pattern: &str| Tuning { freeze: vec![pattern.into()], ..Tuning::default() };
    let all_but_experts = "embed|norm|attn|lm_head|mlp.gate|shared|mlp.up|mlp.down";
    for tuning in [
        freeze("experts[.]"),
        freeze("mlp.gate[.]"),
        freeze(all_but_experts),
        Tuning { lora: Some(lora), ..Tuning::default() },
    ] {
        for strategy in [fsdp(sharded()), by_batch(DType::F32, 1).remove(1)] {
            let options = EngineOptions { tuning: tuning.clone(), ..options(&strategy, ADAMW) };
            let reports = |sizes| {
                let all = mesh_ranks(sizes, |rank| {
                    let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                    train(&mut engine, &options.spec, 3, 1)
                });
                all[0].iter().map(|r| [r.loss, r.grad_norm as f64]).collect::<Vec<_>>()
            };
            let (one, shared) = (MeshSizes::sharded(4), MeshSizes { ep: 2, ..MeshSizes::sharded(4) });
            for (a, b) in reports(one).into_iter().zip(reports(shared)) {
                let near = (a[0] / b[0] - 1.0).abs() < 2e-6 && (a[1] / b[1] - 1.0).abs() < 1e-5;
                assert!(near, "{tuning:?}, {}: {a:?} and {b:?}", strategy.name());
            }
        }
    }
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}

/// A checkpoint that another mesh loads and saves again is the same, byte for byte, whether its ranks share experts or
/// each have all; and training goes on from it.
#[test]
fn checkpoints_show_nothing_of_the_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let strategies = stores();
    let options = |i: usize| options(&strategies[i % (strategies.len() - 1)], SGD);
    let eight = [(2, 2, 1, 2, 2), (1, 4, 2, 1, 4), (1, 2, 2, 2, 1)];
    let eight = eight.map(|(dp_replicate, dp_shard, sp, tp, ep)| MeshSizes { dp_replicate, dp_shard, sp, tp, ep });
    let meshes = [meshes(4), factorizations(4), eight.to_vec()].concat();
    let first = dir.path().join("first");
    let one = run(MeshSizes::sharded(1), &options(0), Part { from: None, to: 4, save: None });
    let rest = Outcome { steps: one.steps[2..].to_vec(), ..one };
    run(meshes[0], &options(0), Part { from: None, to: 2, save: Some(&first) });
    let expected = files(&first.join("step-00000002"));
    assert!(expected.len() > 3, "{:?}", expected.keys());
    for (i, &sizes) in meshes.iter().enumerate() {
        let again = dir.path().join(format!("{i}"));
        run(sizes, &options(3 * i), Part { from: Some((&first, 2)), to: 2, save: Some(&again) });
        let found = files(&again.join("step-00000002"));
        let differing: Vec<_> = expected.iter().filter(|(name, bytes)| found.get(*name) != Some(bytes)).collect();
        assert!(differing.is_empty(), "{sizes:?}: {:?}", differing.iter().map(|(name, _)| name).collect::<Vec<_>>());
        let other = meshes[(i + 1) % meshes.len()];
        let gone_on = run(other, &options(3 * i + 1), Part { from: Some((&again, 2)), to: 4, save: None });
        assert_close(&rest, &gone_on, &format!("saved on {sizes:?}, gone on on {other:?}"));
    }
}

/// Bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let counters = fs::read_to_string("/proc/thread-self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// Of a model of 128 experts a rank reads the bytes of its shards and the headers, and no other expert.
#[test]
fn a_rank_reads_its_own_experts_only() {
    let experts = Experts { count: 128, ..spec().experts.unwrap() };
    let spec = Spec { experts: Some(experts), ..spec() };
    let options = EngineOptions { spec: spec.clone(), ..options(&fsdp(sharded()), SGD) };
    let (dir, moments) = (tempfile::tempdir().unwrap(), Moments::NONE);
    let model = dir.path().join("model");
    let written = ranks(1, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
        let layouts = engine.decoder().layouts().to_vec();
        let mut ckpt = Checkpointer::new(rank.device, &rank.mesh, &spec, &layouts, moments)?;
        ckpt.save_hf(&model, Dtype::F32, engine.state().0)?;
        fragments(&mut engine)
    });
    // With other initial weights, so that all of them have to be read.
    let options = EngineOptions { seed: options.seed + 1, ..options };
    for ep in [2, 8] {
        let read = mesh_ranks(MeshSizes { ep, ..MeshSizes::sharded(8) }, |rank| {
            let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
            let layouts = engine.decoder().layouts().to_vec();
            let mut ckpt = Checkpointer::new(rank.device, &rank.mesh, &spec, &layouts, moments)?;
            let start = bytes_read();
            inspect_model(&model, &spec, &layouts)?; // the config and the headers
            let inspected = bytes_read();
            ckpt.load_model(&model, engine.state().0)?;
            let tensors = bytes_read() - inspected - (inspected - start);
            let own = fragments(&mut engine)?;
            let bytes: usize = own.iter().map(|(.., values)| 4 * values.len()).sum();
            // The counters themselves are read too: some digits more each time.
            assert!(tensors.abs_diff(bytes as u64) < 64, "ep {ep}: {tensors} bytes read of {bytes}");
            Ok(own)
        });
        assert_eq!(whole(&spec, &read), whole(&spec, &written), "ep {ep}");
    }
}

/// Every rank would have all experts.
#[test]
fn what_cannot_share_experts_is_refused() {
    let sizes = MeshSizes { ep: 2, ..MeshSizes::sharded(4) };
    let refused = options(&ddp(DType::F32), SGD).bytes(&sizes, 0).unwrap_err();
    assert!(refused.exit_status() == 2 && refused.to_string().contains("ep 2 with replicated parameters"), "{refused}");
}
