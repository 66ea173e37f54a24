//! Every sharding option has an observable effect: in the order of collectives, in bytes, or in what is computed.
//!
//! | option | effect | tested in |
//! | --- | --- | --- |
//! | backward prefetch PRE, POST, NONE; forward prefetch | order | `collectives.rs` |
//! | limit_all_gathers | all-gathers in flight, slots | here |
//! | max_live | counted collectives; slots; bytes received | `collectives.rs`; here |
//! | SHARD_GRAD_OP, sync_each_batch, auto-wrap | counted collectives; slots | `collectives.rs`; here |
//! | activation checkpointing, full and selective | bytes saved, products and attention recomputed | here |
//! | cpu-offload: optimizer, gradients, parameters | bytes on device and host, copies and their order | here |
//! | use_orig_params | one update per unit, decay of norms, refusal of mixed units | here |
//!
//! None of them changes a bit of the result: `parity.rs`, `stores.rs`, and here for offloading.

use crate::common::counting_gpu::{Counted, Counts};
use crate::common::probe::Watched;
use crate::common::runs::unlaunched;
use crate::common::stores::{by_tensor, reference, staged, zero};
use crate::common::*;
use flatshard::base::CATEGORIES;
use flatshard::base::{Category, DType};
use flatshard::comm::mesh::MeshSizes;
use flatshard::comm::recorder::{Entry, Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::ops::AdamWScalars;
use flatshard::device::{ALIGN, Device, LIMBS};
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Checkpointing, Spec, Tuning};
use flatshard::optim::Rule;
use flatshard::store::{Offload, ReferenceOptions, ReplicatedOptions, ShardedOptions, Stage, Wrap, ZeroOptions};
use serde_json::Value;
use std::process::Command;
use std::sync::Arc;

const MODES: [Offload; 3] = [Offload::Optimizer, Offload::Gradients, Offload::Parameters];

fn bytes(options: &EngineOptions, world: usize, category: Category) -> usize {
    let planned = options.bytes(&MeshSizes::sharded(world), 0).unwrap();
    planned.into_iter().find(|p| p.0 == category).unwrap().1
}

/// What rank 0 of 2 starts, uses and waits for in the second of two steps.
fn entries(spec: &Spec, sharded: ShardedOptions) -> Vec<Entry> {
    let mut all = ranks(2, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let watched = Arc::new(Watched::noting(fsdp(sharded.clone()), &log));
        let mut engine = Engine::new(rank.device, &mesh, &options(spec, watched, SGD))?;
        for number in 1..=2 {
            log.clear();
            step(&mut engine, &[batch(spec, number, 0, rank.rank)], number)?;
        }
        Ok(log.entries())
    });
    all.swap_remove(0)
}

#[test]
fn without_a_limit_gathers_run_three_units_ahead_in_four_slots() {
    let spec = Spec { layers: 6, ..llama() };
    let limited = |limit_all_gathers| ShardedOptions { limit_all_gathers, ..sharded() };
    let in_flight = |entries: &[Entry]| {
        let mut now = 0i32;
        let count = entries.iter().filter(|e| e.tag.what == "gather").map(|e| {
            now += match e.seam {
                Some(Seam::Wait) => -1,
                Some(Seam::AllGather) => 1,
                _ => 0,
            };
            now
        });
        count.max().unwrap()
    };
    let (two, four) = (entries(&spec, limited(true)), entries(&spec, limited(false)));
    assert_eq!((in_flight(&two), in_flight(&four)), (2, 4));
    let shown: Vec<String> = four
        .iter()
        .filter(|e| matches!(e.seam, None | Some(Seam::AllGather)) && ["gather", "use"].contains(&e.tag.what))
        .map(|e| format!("{}{}", e.tag.what, e.tag.unit))
        .collect();
    assert_eq!(
        shown.join(" "),
        "gather0 gather1 gather2 gather3 use0 gather4 use1 gather5 use2 gather6 use3 use4 use5 use6 use0 \
         use6 gather2 use5 gather1 use4 use3 use2 use1"
    );
    let slots = |limit| bytes(&options(&spec, fsdp(limited(limit)), SGD), 2, Category::Slots);
    let block = 4 * 6144; // f32, of which each rank of a host counts half
    assert_eq!(slots(false) - slots(true), 2 * block / 2);
}

#[test]
fn slots_follow_from_sharding_and_wrapping() {
    let spec = Spec { layers: 6, ..llama() };
    let slots = |sharded: ShardedOptions, ranks| bytes(&options(&spec, fsdp(sharded), SGD), ranks, Category::Slots);
    let (block, root) = (4 * 6144, 4 * (2 * 1280 + 512)); // 61 x 20 twice, 20
    let accumulating = ShardedOptions { grad_accum: 2, ..sharded() };
    for (sharded, weights, grads) in [
        (sharded(), 2, 2),
        (ShardedOptions { max_live: 20_000, ..sharded() }, 3, 2),
        (ShardedOptions { reshard: false, ..sharded() }, 6, 2), // SHARD_GRAD_OP
        (accumulating.clone(), 2, 6),
        (ShardedOptions { sync_each_batch: true, ..accumulating }, 2, 2),
        (ShardedOptions { wrap: Wrap::Size(8000), ..sharded() }, 4, 4), // units of two blocks
        (ShardedOptions { wrap: Wrap::None, ..sharded() }, 6, 6),
    ] {
        let shared = (weights * block + root) / 2;
        assert_eq!(slots(sharded.clone(), 2), shared + grads * block + root, "{sharded:?}");
        assert_eq!(slots(sharded.clone(), 1), 0, "a rank alone: {sharded:?}");
    }
}

/// Counts of a step on a simulated GPU after a warm-up step, and the bytes the rank held in host memory.
fn counted(options: &EngineOptions) -> (Counts, usize) {
    let driver = Arc::new(Counted::default());
    let device = |_: usize, meter| Ok(Arc::new(GpuDevice::new(driver.clone(), meter)?) as Arc<dyn Device>);
    let host = ranks_on(1, device, |rank| {
        let meter = rank.meter.clone();
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        step(&mut engine, &[batch(&options.spec, 1, 0, 0)], 1)?;
        driver.take();
        step(&mut engine, &[batch(&options.spec, 2, 0, 0)], 2)?;
        Ok(meter.live(Category::Host))
    });
    (driver.take(), host[0])
}

#[test]
fn checkpointing_trades_bytes_for_products_and_attention() {
    for spec in [llama(), gemma3()] {
        let of = |checkpoint| EngineOptions { checkpoint, ..options(&spec, fsdp(sharded()), SGD) };
        let modes = [Checkpointing::Off, Checkpointing::Selective, Checkpointing::Full];
        let [off, selective, full] = modes.map(|checkpoint| bytes(&of(checkpoint), 1, Category::Saved));
        let (tokens, layers, inner) = (4 * ROW, spec.layers, spec.heads * spec.head_dim);
        let outputs = 4 * tokens * (inner + spec.heads);
        assert_eq!(selective - full, (layers - 1) * outputs, "attention's outputs of all blocks, where one is there");
        let post = if spec.post_norms { 2 * spec.dim } else { 0 };
        let rest = 4 * tokens * (spec.qkv() + spec.dim + 2 * spec.ff + post);
        assert_eq!(off - selective, (layers - 1) * rest, "all else, of all blocks but one");
        // For every second block: what one of them keeps is still there when backward reaches it.
        let second = [Checkpointing::SelectiveEvery(2), Checkpointing::FullEvery(2)];
        let [some_selective, some_full] = second.map(|checkpoint| bytes(&of(checkpoint), 1, Category::Saved));
        let others = layers / 2 - 1;
        assert!(others > 0);
        assert_eq!([off - some_selective, off - some_full], [others * rest, others * (rest + outputs)]);

        let [off, selective, full] = modes.map(|checkpoint| counted(&of(checkpoint)).0);
        let again = (2 * ROW) as u64 * Checkpointing::Full.products_again(&spec);
        assert!(again > off.flops / 8);
        assert_eq!((selective.flops - off.flops, full.flops - off.flops), (again, again));
        let attention = |counts: &Counts| counts.launched("forward");
        assert_eq!([&off, &selective, &full].map(attention), [layers, layers, 2 * layers - 1]);
        let [some_selective, some_full] = second.map(|checkpoint| counted(&of(checkpoint)).0);
        let again = (2 * ROW) as u64 * second[1].products_again(&spec);
        assert_eq!([&some_selective, &some_full].map(|counts| counts.flops - off.flops), [again, again]);
        assert_eq!([&some_selective, &some_full].map(attention), [layers, layers + others]);
    }
}

/// Every store, plain and with `offload`.
fn stores(dtype: DType, offload: Offload) -> Vec<Arc<dyn Strategy>> {
    let mut all = vec![fsdp(ShardedOptions { dtype, offload, grad_accum: 2, ..sharded() })];
    all.push(reference(ReferenceOptions { offload, ..by_tensor(dtype, 2) }));
    for stage in [Stage::One, Stage::Two, Stage::Three] {
        all.push(zero(ZeroOptions { offload, ..staged(stage, dtype) }));
    }
    if offload <= Offload::Optimizer {
        all.push(Arc::new(ReplicatedOptions { dtype, bucket_bytes: 30_000, offload, ..ReplicatedOptions::default() }));
    }
    all
}

#[test]
fn offloading_changes_no_bit() {
    for (dtype, rule) in [(DType::F32, ADAMW), (DType::Bf16, ADAMW), (DType::Bf16, SGD)] {
        let run = |strategy| outcome(2, &options(&llama(), strategy, rule), 3, 2);
        let mut expected: Vec<_> = stores(dtype, Offload::Nothing).into_iter().map(|s| (s.name(), run(s))).collect();
        for offload in MODES {
            let offloaded = stores(dtype, offload);
            expected.truncate(offloaded.len());
            for ((name, expected), strategy) in expected.iter().zip(offloaded) {
                assert_eq!(*name, strategy.name());
                assert_same_bits(expected, &run(strategy), &format!("{name}, {offload:?} offloaded, {dtype} {rule:?}"));
            }
        }
    }
}

/// HYBRID_SHARD all-reduces offloaded shards over replicas too.
#[test]
fn offloading_changes_no_bit_with_replicas() {
    let mesh = MeshSizes { dp_replicate: 2, ..MeshSizes::sharded(2) };
    let run =
        |offload| outcome_on(mesh, &options(&llama(), fsdp(ShardedOptions { offload, ..sharded() }), ADAMW), 2, 1);
    let expected = run(Offload::Nothing);
    for offload in MODES {
        assert_same_bits(&expected, &run(offload), &format!("{offload:?} offloaded, two replicas of two shards"));
    }
}

#[test]
fn offloaded_bytes_are_in_host_memory() {
    let spec = Spec { dim: 64, ff: 192, layers: 8, heads: 4, kv_heads: 4, head_dim: 16, ..llama() };
    let n = 2;
    let of = |dtype, offload| options(&spec, fsdp(ShardedOptions { dtype, offload, ..sharded() }), ADAMW);
    let held = |options: &EngineOptions, category| bytes(options, n, category);
    // AdamW's moments take 8 bytes for each element a rank owns.
    let owned = held(&of(DType::Bf16, Offload::Nothing), Category::Optimizer) / 8;
    for (dtype, size) in [(DType::Bf16, 2), (DType::F32, 4)] {
        let copy = if dtype == DType::F32 { 0 } else { size };
        for (offload, [params, grads, optimizer, host]) in [
            (Offload::Nothing, [4 + copy, 4, 8, 0]),
            (Offload::Optimizer, [size, 4, 0, 12]),
            (Offload::Gradients, [size, 0, 0, 16]),
            (Offload::Parameters, [0, 0, 0, 16 + copy]),
        ] {
            let options = of(dtype, offload);
            let names = [Category::Params, Category::Grads, Category::Optimizer].map(|c| held(&options, c) / owned);
            assert_eq!(names, [params, grads, optimizer], "{dtype} {offload:?}");
            let staged = match offload {
                Offload::Nothing => 0,
                _ => {
                    let chunk = owned.div_ceil(8).next_multiple_of(ALIGN).clamp(ALIGN, 1 << 18);
                    let grads = if offload < Offload::Gradients { 4 } else { 0 };
                    let weights = if offload < Offload::Parameters { size } else { 0 };
                    2 * chunk * (grads + weights) + 4 * (1 + 2 * AdamWScalars::LEN)
                }
            };
            let norm = if offload >= Offload::Gradients { 8 * LIMBS } else { 0 };
            assert_eq!(held(&options, Category::Host), host * owned + staged + norm, "{dtype} {offload:?}");
            // The rest is on the device, whatever is offloaded.
            let none = of(dtype, Offload::Nothing);
            for (category, _) in &CATEGORIES[3..7] {
                assert_eq!(held(&options, *category), held(&none, *category), "{category:?}");
            }
        }
    }
}

/// A chunk's gradient is downloaded while the previous chunk is updated, whose weights are uploaded afterwards; what is
/// already in host memory is not copied.
#[test]
fn copies_of_a_chunk_run_while_another_is_updated() {
    for (offload, downs) in [(Offload::Optimizer, true), (Offload::Gradients, false), (Offload::Parameters, false)] {
        for dtype in [DType::F32, DType::Bf16] {
            let options = options(&llama(), fsdp(ShardedOptions { dtype, offload, ..sharded() }), ADAMW);
            let (counts, host) = counted(&options);
            assert_eq!(host, bytes(&options, 1, Category::Host));
            assert_eq!(counts.launched("adamw"), 0, "no update is the device's");
            let copies = &counts.copies;
            match (offload, downs) {
                (Offload::Parameters, _) => assert!(copies.is_empty(), "{copies:?}"),
                (_, false) => assert!(copies.len() >= 8 && copies.iter().all(|c| *c == "up"), "{copies:?}"),
                (_, true) => {
                    let chunks = copies.iter().filter(|c| **c == "down").count();
                    let mut expected = vec!["down"];
                    (1..chunks).for_each(|_| expected.extend(["down", "up"]));
                    expected.push("up");
                    assert!(chunks >= 8);
                    assert_eq!(*copies, expected);
                }
            }
        }
    }
}

/// Only the rounding of the update differs. SGD, because AdamW moves a weight by the learning rate whatever the sign of
/// a near-zero gradient.
#[test]
fn an_offloaded_gpu_step_equals_one_without_offloading() {
    let run = |offload| {
        let options = options(&llama(), fsdp(ShardedOptions { offload, ..sharded() }), SGD);
        let device =
            |_: usize, meter| Ok(Arc::new(GpuDevice::new(Arc::new(Counted::default()), meter)?) as Arc<dyn Device>);
        let results = ranks_on(2, device, |rank| {
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            Ok((train(&mut engine, &options.spec, 2, 1)?, fragments(&mut engine)?))
        });
        gathered(&options.spec, results)
    };
    let expected = run(Offload::Nothing);
    for offload in MODES {
        let (weights, losses) = distance(&expected, &run(offload));
        assert!(weights < 1e-6 && losses < 1e-6, "{offload:?}: weights differ by {weights}, losses by {losses}");
    }
}

#[test]
fn without_use_orig_params_the_optimizer_sees_one_tensor_per_unit() {
    let of = |uniform, rule| {
        let tuning = Tuning { uniform, ..Tuning::default() };
        EngineOptions { tuning, ..options(&llama(), fsdp(sharded()), rule) }
    };
    // Root and four blocks, each split into runs where decay changes from tensor to tensor.
    let updates = |uniform| counted(&of(uniform, ADAMW)).0.launched("adamw");
    assert_eq!(updates(true), 5);
    assert_eq!(updates(false), 3 + 4 * 4);
    // Decay applies to norms too, which start at 1: it takes an extra lr * decay of them.
    let norm = |uniform, weight_decay| {
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, moments: DType::F32 };
        let outcome = outcome(1, &of(uniform, rule), 1, 1);
        f32::from_bits(outcome.weights["model.norm.weight"][0])
    };
    assert_eq!(norm(false, 0.5), norm(false, 0.0));
    assert!((norm(true, 0.0) - norm(true, 0.5) - 0.01 * 0.5).abs() < 1e-6);
}

/// Output of `run_fsdp` in a run of four steps, with `more` arguments, and its metrics.
fn events(more: &str) -> (String, Vec<Value>) {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let tiny = "--nproc-per-node 2 --dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 16 \
                --batch-size 2 --grad-accum 2 --max-steps 4 --warmup-steps 1 --lr 0.02 --no-eval";
    let mut command = binary();
    command.args(tiny.split_whitespace()).args(more.split_whitespace()).arg("--metrics-path").arg(&metrics);
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{more}: {text}");
    let lines = std::fs::read_to_string(&metrics).unwrap();
    (text, lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect())
}
/// The same output, the losses and the planned bytes.
fn run(more: &str) -> (String, Vec<f64>, Value) {
    let (text, events) = events(more);
    let losses = events.iter().filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect();
    (text, losses, events[0]["planned_bytes"].clone())
}
fn binary() -> Command {
    unlaunched(crate::common::binaries::FSDP)
}

#[test]
fn run_fsdp_offloads_what_is_configured() {
    let (_, expected, none) = run("--device sim --precision bf16");
    assert_eq!(none["host"], 0);
    let bytes = |planned: &Value, name: &str| planned[name].as_u64().unwrap();
    let mut total = bytes(&none, "total");
    for mode in ["optimizer", "gradients", ""] {
        let (said, losses, planned) = run(&format!("--device sim --precision bf16 --cpu-offload {mode}"));
        for (a, b) in expected.iter().zip(&losses) {
            assert!((a - b).abs() < 1e-3 * a, "{mode}: {expected:?} and {losses:?}");
        }
        assert!(said.contains("in host memory") && bytes(&planned, "host") > 0, "{said}");
        assert_eq!(bytes(&planned, "optimizer"), 0);
        assert!(bytes(&planned, "total") < total, "{mode} takes less of the device than the mode before");
        total = bytes(&planned, "total");
    }
    // A configuration for GPUs also runs on a laptop, where there is nothing to offload.
    let (_, expected, planned) = run("--device cpu");
    let (said, losses, same) =
        run("--device cpu --cpu-offload --activation-checkpoint selective --no-limit-all-gathers");
    assert_eq!((expected, &planned["params"]), (losses, &same["params"]));
    assert!(said.contains("no effect: CPU ranks") && same["host"] == 0, "{said}");
    assert!(bytes(&same, "saved") < bytes(&planned, "saved") && bytes(&same, "slots") >= bytes(&planned, "slots"));
}

#[test]
fn live_parameters_save_all_gathers_and_change_no_bit() {
    let of = |more: &str| {
        let (said, events) = events(&format!("--device cpu --num-layers 4 --ff-hidden-dim 192 {more}"));
        let steps = || events.iter().filter(|e| e["event"] == "step");
        let bytes = steps().next_back().unwrap()["comm_bytes"].as_u64().unwrap();
        (said, steps().map(|e| (e["loss"].to_string(), e["grad_norm"].to_string())).collect::<Vec<_>>(), bytes)
    };
    let (_, two_slots, most) = of("");
    let (said, all_live, least) = of("--max-live-parameters 10000000");
    assert!(said.contains("up to 10,000,000 parameters unsharded"), "{said}");
    // Of four blocks in two micro-batches, forward gathers 4 and 2, and backward 2 and 2. A rank receives half of each.
    let block = 4 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 256);
    assert_eq!(most - least, (10 - 4) * block / 2);
    let (_, grad_op, same) = of("--sharding SHARD_GRAD_OP");
    assert_eq!((&two_slots, &two_slots, same), (&all_live, &grad_op, least));
    let (said, within, same) = of("--memory-budget 1GB");
    assert!(said.contains("parameters unsharded, which fit in 1GB per rank"), "{said}");
    assert_eq!((&two_slots, same), (&within, least));
}

#[test]
fn a_memory_budget_keeps_as_many_units_as_fit() {
    let plan = |more: &str| {
        let shape = "--device cpu --nproc-per-node 2 --dataset synthetic --embed-dim 64 --num-layers 8 --num-heads 2 \
                     --ff-hidden-dim 192 --max-len 16 --batch-size 2 --print-config";
        binary().args(shape.split_whitespace()).args(more.split_whitespace()).output().unwrap()
    };
    let bytes_and_live = |more: &str| {
        let out = plan(more);
        assert!(out.status.success(), "{more}: {}", String::from_utf8_lossy(&out.stderr));
        let config: Value = serde_saphyr::from_str(&String::from_utf8(out.stdout).unwrap()).unwrap();
        let plan = &config["plan"];
        (plan["planned_bytes"]["total"].as_u64().unwrap(), plan["max_live_parameters"].as_u64())
    };
    let (least, none) = bytes_and_live("");
    assert_eq!(none, None);
    // Norms take 256 elements. Both ranks share the f32 slots, so a unit adds half of its bytes to each.
    let block = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 256;
    let unit = 4 * block / 2;
    for more in 0..8 {
        for spare in [0, unit - 1] {
            let budget = least + more * unit + spare;
            let (total, live) = bytes_and_live(&format!("--memory-budget {budget}"));
            assert_eq!(total, least + more.min(6) * unit, "{budget}"); // two of eight are unsharded anyway
            assert_eq!(live.is_some(), more > 0, "{budget}");
            let Some(live) = live else { continue };
            assert_eq!(bytes_and_live(&format!("--max-live-parameters {live}")).0, total);
            let (above, _) = bytes_and_live(&format!("--max-live-parameters {}", live + block));
            assert!(above > budget || more >= 6, "{budget}: {live} parameters, although one unit more fits");
        }
    }
    // An explicit number wins, and where nothing rotates the budget is a check only.
    for other in ["--max-live-parameters 1", "--sharding SHARD_GRAD_OP", "--fsdp-impl reference"] {
        assert_eq!(bytes_and_live(&format!("{other} --memory-budget 1GB")), (bytes_and_live(other).0, None), "{other}");
    }
    for budget in [least - 1, 1] {
        let out = plan(&format!("--memory-budget {budget}"));
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && text.contains(&format!("needs {least} bytes")), "{text}");
    }
}

#[test]
fn contradicting_options_are_refused_with_the_reason() {
    for (args, parts) in [
        ("--sharding NO_SHARD --backward-prefetch BACKWARD_POST", ["backward-prefetch", "nothing is gathered"]),
        ("--sharding NO_SHARD --no-limit-all-gathers", ["limit-all-gathers", "nothing is gathered"]),
        ("--sharding NO_SHARD --auto-wrap none", ["auto-wrap", "buckets"]),
        ("--sharding NO_SHARD --sync-each-batch --grad-accum 2", ["sync-each-batch", "save no memory"]),
        ("--auto-wrap none --no-limit-all-gathers", ["limit-all-gathers", "one unit"]),
        (
            "--no-forward-prefetch --backward-prefetch NONE --no-limit-all-gathers",
            ["limit-all-gathers", "nothing is prefetched"],
        ),
        ("--sharding NO_SHARD --cpu-offload", ["cpu-offload", "--cpu-offload optimizer"]),
        ("--no-use-orig-params --no-decay embed", ["use-orig-params", "another weight decay"]),
        ("--no-use-orig-params --freeze up_proj", ["use-orig-params", "is frozen"]),
        (
            "--no-use-orig-params --lr-scale up_proj=0.5",
            ["use-orig-params", "the learning rate is scaled by both 1 and 0.5"],
        ),
        ("--cpu-offload everything", ["everything", "gradients"]),
        ("--activation-checkpoint some", ["some", "selective"]),
    ] {
        let out = binary().args(["--device", "cpu", "--dataset", "synthetic"]).args(args.split(' ')).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args}: {text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{args}: {text}");
    }
    // Freezing whole units, and consistent options, are accepted.
    for args in ["--no-use-orig-params --freeze layers\\.0\\.", "--sharding NO_SHARD --cpu-offload optimizer"] {
        let print = ["--device", "cpu", "--dataset", "synthetic", "--print-config"];
        let out = binary().args(print).args(args.split(' ')).output().unwrap();
        assert!(out.status.success(), "{args}: {}", String::from_utf8_lossy(&out.stderr));
    }
}
