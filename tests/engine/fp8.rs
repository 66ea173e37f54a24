//! Products in FP8: the casts are PyTorch's, every store trains with the same bits, the loss is near bf16's, and what
//! is excluded stays in bf16. `tests/golden/fp8.py` writes the goldens; `src/nn/linear/tests.rs` compares a layer with
//! them.
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::fp8::Fp8;
use flatshard::base::{CATEGORIES, Category, DType};
use flatshard::comm::MeshSizes;
use flatshard::comm::recorder::{Entry, Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Checkpointing, Decoder, Lora, Spec, Tuning};
use flatshard::store::{Offload, ShardedOptions, Wrap};
use half::bf16;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const FORMATS: [(Fp8, &str, f32); 2] = [(Fp8::E4m3, "e4m3", 448.0), (Fp8::E5m2, "e5m2", 57344.0)];

fn tuning(exclude: &[&str]) -> Tuning {
    Tuning { fp8: Some(exclude.iter().map(|p| p.to_string()).collect()), ..Tuning::default() }
}
fn in_fp8(spec: &Spec, strategy: Arc<dyn Strategy>) -> EngineOptions {
    EngineOptions { tuning: tuning(&[]), ..options(spec, strategy, ADAMW) }
}
/// Rows and columns of several blocks, none whole.
fn wide() -> Spec {
    Spec { dim: 132, heads: 6, kv_heads: 3, head_dim: 22, ff: 150, layers: 3, ..llama() }
}

/// Every bf16, and the f32 next to each at which the code changes. The script checks that there are no other changes.
#[test]
fn casts_are_pytorchs() {
    let file = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/fp8.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&file).unwrap();
    for (format, name, _) in FORMATS {
        let data = |what: &str| golden.tensor(&format!("{name}:{what}")).unwrap().data().to_vec();
        let first: Vec<i64> = data("first").as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        let values: Vec<f32> = data("values").as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!((first.len(), values.len()), (128, 256));
        for (code, (a, b)) in format.values().iter().zip(&values).enumerate() {
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{name} {code}: {a}, PyTorch {b}");
        }
        let expected = |bits: u32| (0..128).rev().find(|&code| (0..=bits as i64).contains(&first[code])).unwrap() as u8;
        let near = first.iter().filter(|&&bits| bits >= 0).flat_map(|&at| [at - 1, at, at + 1]);
        let ties = near.filter_map(|bits| u32::try_from(bits).ok());
        for bits in (0..0x8000u32).map(|bits| bits << 16).chain(ties) {
            let (code, x) = (expected(bits), f32::from_bits(bits));
            assert_eq!(format.encode(x), code, "{name} of {x:e}");
            assert_eq!(format.encode(f32::from_bits(bits | 1 << 31)), code | 128, "{name} of -{x:e}");
        }
    }
}

/// For every magnitude of bf16, the scale is the least power of two, values fill the format, and any code times any
/// scale is a bf16.
#[test]
fn scales_are_the_least_that_fit() {
    for (format, name, most) in FORMATS {
        let mut seen = Vec::new();
        for bits in 0..0x7f80u32 {
            let (x, scale) = (f32::from_bits(bits << 16), format.scale(bits << 16));
            assert_eq!(scale.to_bits() & 0x7f_ffff, 0, "{name} of {x:e}: {scale:e}");
            assert!(x / scale <= most && (x / scale > most / 2.0 || scale == 2f32.powi(-110)), "{name} of {x:e}");
            if seen.last() != Some(&scale) {
                seen.push(scale);
            }
        }
        for scale in seen {
            let finite = format.values().iter().map(|value| value * scale).filter(|x| x.is_finite());
            finite
                .for_each(|x| assert!(x == bf16::from_f32(x).to_f32() && (x == 0.0 || x.is_normal()), "{name} {x:e}"));
        }
        for magnitude in [f32::INFINITY, f32::NAN] {
            assert!(format.scale(magnitude.to_bits()) == f32::INFINITY);
        }
    }
}

#[test]
fn every_store_is_bitwise_equal_in_fp8() {
    for spec in [wide(), Spec { dropout: 0.0, ..gpt() }, Spec { heads: 8, kv_heads: 4, ..qwen2() }, sparse()] {
        let run = |strategy| outcome(3, &in_fp8(&spec, strategy), 3, 1);
        let expected = run(ddp(DType::Bf16));
        let plain = outcome(3, &options(&spec, ddp(DType::Bf16), ADAMW), 3, 1);
        let (weights, losses) = distance(&expected, &plain);
        assert!(weights > 0.0 && losses > 0.0 && losses < 0.1, "{:?}: {losses} from bf16", spec.arch);
        for strategy in every(DType::Bf16) {
            let name = strategy.name();
            assert_same_bits(&run(strategy), &expected, &format!("{:?} {name}", spec.arch));
        }
    }
    // Gathered in 8 bits from masters or from copies of them; and several blocks in a unit, with the root or without.
    let options = || ShardedOptions { dtype: DType::Bf16, ..sharded() };
    let offloads = [Offload::Optimizer, Offload::Gradients, Offload::Parameters];
    let offloaded = offloads.map(|offload| ShardedOptions { offload, ..options() });
    let wrapped = [Wrap::None, Wrap::Size(100_000)].map(|wrap| ShardedOptions { wrap, ..options() });
    let reduced = ShardedOptions { reduce_dtype: DType::F32, masters: DType::F32, reshard: false, ..options() };
    let expected = outcome(2, &in_fp8(&wide(), ddp(DType::Bf16)), 3, 1);
    for one in [offloaded.to_vec(), wrapped.to_vec(), vec![reduced]].concat() {
        let what = format!("{one:?}");
        assert_same_bits(&outcome(2, &in_fp8(&wide(), fsdp(one)), 3, 1), &expected, &what);
    }
    // Several micro-batches; and Muon, which exchanges what each rank has of a matrix.
    let muon = |strategy| EngineOptions { rule: MUON, ..in_fp8(&wide(), strategy) };
    let expected = [outcome(2, &in_fp8(&wide(), ddp(DType::Bf16)), 2, 2), outcome(2, &muon(ddp(DType::Bf16)), 2, 1)];
    for (twice, once) in at_once(DType::Bf16, 2).into_iter().zip(at_once(DType::Bf16, 1)) {
        assert_same_bits(&outcome(2, &in_fp8(&wide(), twice), 2, 2), &expected[0], "two micro-batches");
        assert_same_bits(&outcome(2, &muon(once), 2, 1), &expected[1], "muon");
    }
    // Where a unit is the whole model; and the parts of two ranks of tp, cut again.
    let whole = fsdp(ShardedOptions { wrap: Wrap::None, ..options() });
    assert_same_bits(&outcome(2, &muon(whole), 2, 1), &expected[1], "muon on one unit");
    let spec = Spec { heads: 4, kv_heads: 2, head_dim: 34, ..wide() };
    let run = |sizes, strategy| outcome_on(sizes, &in_fp8(&spec, strategy), 3, 1);
    let sizes = MeshSizes { tp: 2, ..MeshSizes::sharded(2) };
    assert_same_bits(&run(sizes, fsdp(options())), &run(sizes, ddp(DType::Bf16)), "shards of tp");
    // Two replicas sum gradients in another order than one.
    let sizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };
    let run = |strategy| outcome_on(sizes, &in_fp8(&wide(), strategy), 3, 1);
    let mut sharding = kinds(DType::Bf16).into_iter().filter(|s| s.name() != "ddp");
    let expected = sharding.next().map(run).unwrap();
    sharding.for_each(|strategy| assert_same_bits(&run(strategy), &expected, "two replicas"));
}

/// Recomputed operands are rounded alike; a token's scales do not depend on its micro-batch.
#[test]
fn results_do_not_depend_on_recomputation_or_micro_batches() {
    let spec = wide();
    let all = in_fp8(&spec, ddp(DType::Bf16));
    let expected = outcome(2, &all, 3, 1);
    for checkpoint in [Checkpointing::Full, Checkpointing::Selective] {
        let again = EngineOptions { checkpoint, ..all.clone() };
        assert_same_bits(&outcome(2, &again, 3, 1), &expected, "recomputed");
    }
    let [first, second] = [0, 1].map(|micro| batch(&spec, 1, micro, 0));
    let losses = ranks(1, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &all)?;
        let apart = [&first, &second].map(|one| engine.evaluate(std::slice::from_ref(one)));
        let apart = apart.into_iter().map(|r| r.map(|(sum, _)| sum)).sum::<Result<f64, _>>()?;
        Ok((apart, engine.evaluate(&[joined(&first, &second)])?.0))
    });
    let (apart, together) = losses[0];
    assert!((apart / together - 1.0).abs() < 1e-6, "{apart} one by one, {together} together");
}

/// Ranks of tp and sp divide rows and columns, and a rank's blocks are those of its part.
#[test]
fn other_meshes_are_as_near_to_bf16() {
    for sizes in [(1, 2), (2, 1)].map(|(sp, tp)| MeshSizes { sp, tp, ..MeshSizes::sharded(1) }) {
        let run = |options: &EngineOptions| {
            let reports = mesh_ranks(sizes, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
                train(&mut engine, &options.spec, 3, 1)
            });
            reports[0].iter().map(|report| report.loss).collect::<Vec<_>>()
        };
        let spec = Spec { heads: 4, kv_heads: 2, head_dim: 34, ..wide() };
        let (found, plain) = (run(&in_fp8(&spec, ddp(DType::Bf16))), run(&options(&spec, ddp(DType::Bf16), ADAMW)));
        for (a, b) in found.iter().zip(&plain) {
            assert!(a != b && (a - b).abs() < 0.1, "{sizes:?}: {found:?} and {plain:?}");
        }
    }
}

fn marked(spec: &Spec, exclude: &[&str]) -> Vec<String> {
    let decoder = Decoder::tuned(spec.clone(), &tuning(exclude)).unwrap();
    let segments = decoder.layouts().iter().flat_map(|l| &l.segments);
    segments.filter(|s| s.fp8).map(|s| s.name.clone()).collect()
}

#[test]
fn first_and_last_block_and_what_is_excluded_stay_in_bf16() {
    let names = |modules: &[&str], layer: usize| -> Vec<String> {
        modules.iter().map(|module| format!("model.layers.{layer}.{module}.weight")).collect()
    };
    let attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    let all: Vec<String> = [1, 2].iter().flat_map(|&i| [names(&attention, i), names(&mlp, i)].concat()).collect();
    assert_eq!(marked(&llama(), &[]), all);
    assert_eq!(marked(&llama(), &[r"layers\.1\."]), all[7..]);
    assert_eq!(marked(&llama(), &["mlp", r"\.2\."]), names(&attention, 1));
    // Of a sparse block, the shared expert, but neither router nor experts.
    let shared = ["gate_proj", "up_proj", "down_proj"].map(|m| format!("mlp.shared_expert.{m}"));
    let shared: Vec<&str> = shared.iter().map(String::as_str).collect();
    let expected = [names(&attention, 1), names(&mlp, 1), names(&attention, 2), names(&shared, 2)].concat();
    assert_eq!(marked(&sparse(), &[]), expected);
    // What is excluded is not rounded: without the other matrices of the block, that is all that differs.
    let run = |exclude: &[&str]| {
        let spec = Spec { layers: 3, ..llama() };
        outcome(1, &EngineOptions { tuning: tuning(exclude), ..options(&spec, ddp(DType::Bf16), ADAMW) }, 2, 1)
    };
    let all = run(&[]);
    for module in attention.into_iter().chain(mlp) {
        assert_ne!(run(&[module]).steps, all.steps, "{module}");
    }
}

#[test]
fn what_cannot_be_in_fp8_is_refused() {
    let refused = |spec: Spec, tuning: Tuning| Decoder::tuned(spec, &tuning).err().unwrap().to_string();
    let unknown = refused(llama(), tuning(&["embed_tokens"]));
    assert!(unknown.contains(r#""embed_tokens" matches no matrix"#) && unknown.contains("layers.1."), "{unknown}");
    assert!(refused(llama(), tuning(&["("])).contains("unclosed group"));
    assert!(refused(llama(), tuning(&["proj"])).contains("no matrix is computed with in FP8"));
    let two = refused(Spec { layers: 2, ..llama() }, tuning(&[]));
    assert!(two.contains("2 blocks have none, because the first and the last stay in bf16"), "{two}");
    let lora = Some(Lora { rank: 2, alpha: 2.0, dropout: 0.0, targets: vec!["q_proj".into()] });
    assert!(refused(llama(), Tuning { lora, load_in_4bit: true, ..tuning(&[]) }).contains("4 bits"));
    let wrong = in_fp8(&llama(), ddp(DType::F32)).bytes(&MeshSizes::sharded(1), 0).err().unwrap().to_string();
    assert!(wrong.contains("bf16") && wrong.contains("f32"), "{wrong}");
}

/// Scratch is planned, and adapters of frozen matrices in FP8 are trained.
#[test]
fn what_is_held_is_planned() {
    let lora = Lora { rank: 2, alpha: 2.0, dropout: 0.1, targets: vec!["q_proj".into(), "down_proj".into()] };
    for lora in [None, Some(lora)] {
        let all = in_fp8(&wide(), fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() }));
        let all = EngineOptions { tuning: Tuning { lora, ..all.tuning.clone() }, ..all };
        let planned = all.bytes(&MeshSizes::sharded(2), 0).unwrap();
        let plain = EngineOptions { tuning: Tuning { fp8: None, ..all.tuning.clone() }, ..all.clone() };
        let without = plain.bytes(&MeshSizes::sharded(2), 0).unwrap();
        let more = |category| {
            let of = |all: &[(Category, usize)]| all.iter().find(|p| p.0 == category).unwrap().1 as isize;
            of(&planned) - of(&without)
        };
        // Bytes and bf16 of the largest weight; of rows of 150, one of bf16; scales of rows, with two blocks each, and
        // of 2 x 2 blocks, twice, once in rows of 4.
        let (weight, rows) = (132 * 150, 4 * ROW * 150);
        let scratch = weight.max(rows) + 4 * (2 * 4 * ROW + 2 * 2 + 2 * 4) + 2 * rows + 2 * weight;
        assert_eq!(more(Category::Scratch), scratch as isize);
        if all.tuning.lora.is_some() {
            // Frozen matrices are gathered in bf16.
            assert!([Category::Params, Category::Grads, Category::Slots].map(more) == [0; 3]);
        }
        ranks(2, |rank| {
            let meter = rank.meter.clone();
            let mut engine = Engine::new(rank.device, &rank.mesh, &all)?;
            train(&mut engine, &all.spec, 2, 1)?;
            for (i, &(category, name)) in CATEGORIES.iter().enumerate() {
                assert_eq!(meter.live(category), planned[i].1, "{name}");
            }
            Ok(())
        });
    }
}

/// What rank 0 receives in a step, by operation, and in all.
fn received(sizes: MeshSizes, options: &EngineOptions) -> (Vec<Entry>, u64) {
    let mut all = mesh_ranks(sizes, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let mut engine = Engine::new(rank.device, &mesh, options)?;
        train(&mut engine, &options.spec, 1, 1)?;
        log.clear();
        let before = mesh.stats().bytes;
        train(&mut engine, &options.spec, 1, 1)?;
        let entries = log.entries().into_iter().filter(|e| e.bytes > 0);
        Ok((entries.collect::<Vec<_>>(), mesh.stats().bytes - before))
    });
    all.swap_remove(0)
}

/// Of the matrices in FP8 a byte is gathered where bf16 has two, and 4 bytes per block of 128 x 128 are reduced once.
#[test]
fn gathers_of_matrices_in_fp8_move_half_the_bytes() {
    // Blocks 1 and 2 of 4 are in FP8. No tensor is padded, and shards end within blocks.
    let spec = Spec { dim: 256, heads: 4, kv_heads: 2, head_dim: 64, ff: 384, layers: 4, ..llama() };
    let matrices = [(256, 256), (128, 256), (128, 256), (256, 256), (384, 256), (384, 256), (256, 384)];
    let in_fp8_elements = 2 * matrices.map(|(rows, columns)| rows * columns).iter().sum::<usize>();
    let scales =
        2 * 4 * matrices.map(|(rows, columns): (usize, usize)| rows / 128 * columns / 128).iter().sum::<usize>();
    let hybrid = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };
    let sharding = |s: &Arc<dyn Strategy>| !["ddp", "fsdp_reference"].contains(&s.name());
    for (sizes, strategies) in [(MeshSizes::sharded(2), at_once(DType::Bf16, 1)), (hybrid, kinds(DType::Bf16))] {
        for strategy in strategies.into_iter().filter(sharding) {
            let plain = EngineOptions { tuning: Tuning::default(), ..in_fp8(&spec, strategy.clone()) };
            let ((halved, less), (whole, bytes)) = (received(sizes, &in_fp8(&spec, strategy)), received(sizes, &plain));
            // Operations and bytes of a unit's gathers.
            let gathers = |entries: &[Entry]| {
                let mut units = BTreeMap::<usize, (usize, usize)>::new();
                for entry in entries.iter().filter(|e| e.seam == Some(Seam::AllGather) && e.tag.what == "gather") {
                    let (n, bytes) = units.entry(entry.tag.unit).or_default();
                    (*n, *bytes) = (*n + 1, *bytes + entry.bytes);
                }
                units
            };
            let (halved_gathers, whole_gathers, mut elements, mut saved) = (gathers(&halved), gathers(&whole), 0, 0);
            for (unit, (n, bytes)) in whole_gathers {
                let (parts, left) = halved_gathers[&unit];
                elements += (bytes - left) / n;
                saved += bytes - left;
                assert_eq!(parts, if left < bytes { 2 * n } else { n }, "a gather of each part");
            }
            assert_eq!(elements, in_fp8_elements, "{}", plain.strategy.name());
            let all: Vec<usize> = halved.iter().filter(|e| e.tag.what == "scales").map(|e| e.bytes).collect();
            assert_eq!(all, [scales]);
            // Of two ranks, each receives half of a gather, and both halves of an all-reduce.
            assert_eq!(bytes - less, (saved / 2 - scales) as u64, "{}", plain.strategy.name());
        }
    }
}
