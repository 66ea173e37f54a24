//! Frozen matrices in 4 bits: their bytes are bitsandbytes' on every mesh, and training is that of the same values in
//! full. `tests/golden/nf4.py` writes the goldens.

use crate::common::stores::*;
use crate::common::*;
use flatshard::base::nf4::{BLOCK, Nf4Scales, Nf4Shape, encode, magnitude};
use flatshard::base::{CATEGORIES, Category, DType, Meter, Result};
use flatshard::ckpt::{Checkpointer, hf};
use flatshard::comm::{Axis, MeshSizes};
use flatshard::device::Device;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::ops::{Expand, Nf4Matrix};
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Checkpointing, Decoder, Lora, Segment, Spec, Storage, Tuning};
use flatshard::optim::Moments;
use flatshard::store::flat::Flat;
use flatshard::store::{Offload, ShardedOptions, Wrap, assign};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

const HYBRID: MeshSizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };

/// The matrices of its blocks have the goldens' shapes; those of the feed-forward branch have two groups of scales.
fn spec() -> Spec {
    Spec { dim: 64, heads: 4, kv_heads: 2, head_dim: 16, ff: 288, layers: 3, ..llama() }
}
fn tuning(targets: &[&str], load_in_4bit: bool) -> Tuning {
    let targets = targets.iter().map(|t| t.to_string()).collect();
    Tuning { lora: Some(Lora { rank: 4, alpha: 6.0, dropout: 0.2, targets }), load_in_4bit, ..Tuning::default() }
}
fn packed(strategy: Arc<dyn Strategy>) -> EngineOptions {
    EngineOptions { tuning: tuning(&["q_proj", "down_proj"], true), ..options(&spec(), strategy, ADAMW) }
}

/// As in `tests/golden/nf4.py`.
fn value(i: usize, salt: u32) -> f32 {
    let u = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(salt.wrapping_mul(40503));
    let u = (u ^ u >> 15).wrapping_mul(0x2c1b_3ac5);
    let u = u ^ u >> 12;
    let (x, block) = (((u >> 8) as f32 - 8_388_608.0) * 2f32.powi(-24), i / BLOCK);
    if block == 5 { 0.0 } else { x * ((16 + block * 7 % 13) as f32 * 2f32.powi(-8)) }
}

struct GoldenMatrix {
    rows: usize,
    columns: usize,
    salt: u32,
    bytes: Vec<u8>,
    values: Vec<f32>,
    /// Expanded to f32 and bf16, as bytes.
    expanded: Option<[Vec<u8>; 2]>,
}

impl GoldenMatrix {
    fn mean(&self) -> f32 {
        let at = Nf4Shape::new(self.values.len()).mean();
        f32::from_le_bytes(self.bytes[at].try_into().unwrap())
    }
    fn magnitudes(&self) -> Vec<f32> {
        self.values.chunks(BLOCK).map(magnitude).collect()
    }
}

fn goldens() -> Vec<GoldenMatrix> {
    let file = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nf4.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let data = |name: &str| tensors.tensor(name).ok().map(|view| view.data().to_vec());
    let names = tensors.names().into_iter().filter(|name| name.matches(':').count() == 1);
    let golden = |name: &str| {
        let mut numbers = name.split(['x', ':']).map(|n| n.parse::<usize>().unwrap());
        let [rows, columns, salt] = std::array::from_fn(|_| numbers.next().unwrap());
        let expanded = data(&format!("{name}:float32")).zip(data(&format!("{name}:bfloat16"))).map(|(a, b)| [a, b]);
        let values = (0..rows * columns).map(|i| value(i, salt as u32)).collect();
        GoldenMatrix { rows, columns, salt: salt as u32, bytes: data(name).unwrap(), values, expanded }
    };
    let goldens: Vec<_> = names.map(golden).collect();
    assert_eq!((goldens.len(), goldens.iter().filter(|g| g.expanded.is_some()).count()), (8, 2));
    goldens
}

/// Whole matrices, given bitsandbytes' mean. Our own is that of the exact sum; that of half of the goldens is not.
#[test]
fn codes_and_scales_are_those_of_bitsandbytes() {
    let mut exact = 0;
    for golden in goldens() {
        let (magnitudes, shape) = (golden.magnitudes(), Nf4Shape::new(golden.values.len()));
        let mean = Nf4Scales::new(&magnitudes).mean;
        assert!(mean.to_bits().abs_diff(golden.mean().to_bits()) <= 2, "{mean} and {}", golden.mean());
        exact += (mean == golden.mean()) as usize;
        let scales = Nf4Scales::with_mean(&magnitudes, golden.mean());
        let mut bytes = vec![0; shape.codes().end];
        for (i, (block, to)) in golden.values.chunks(BLOCK).zip(bytes.chunks_mut(BLOCK / 2)).enumerate() {
            encode(block, magnitudes[i], to);
        }
        bytes.extend((0..magnitudes.len()).map(|block| scales.code(block)));
        bytes.resize(shape.factors().start, 0);
        bytes.extend(scales.factors.iter().chain([&scales.mean]).flat_map(|x| x.to_le_bytes()));
        let what = format!("{}x{}, salt {}", golden.rows, golden.columns, golden.salt);
        assert_eq!(bytes.iter().zip(&golden.bytes).position(|(a, b)| a != b), None, "{what}");
        assert_eq!(bytes.len(), golden.bytes.len());
    }
    assert_eq!(exact, 4);
}

fn uploaded(dev: &dyn Device, bytes: &[u8]) -> flatshard::device::Buf {
    let mut buf = dev.alloc(DType::U8, bytes.len(), Category::Other).unwrap();
    dev.upload(bytes, buf.view_mut()).unwrap();
    buf
}

/// Any part of a matrix, in each dtype, is what bitsandbytes expands it to.
#[test]
fn values_are_those_of_bitsandbytes() {
    let dev = CpuDevice::new(Meter::default());
    for golden in goldens() {
        let Some(expanded) = &golden.expanded else { continue };
        let (buf, shape) = (uploaded(&dev, &golden.bytes), Nf4Shape::new(golden.values.len()));
        let from = Nf4Matrix { bytes: buf.view(), shape, width: golden.columns };
        for (dtype, expected) in [DType::F32, DType::Bf16].into_iter().zip(expanded) {
            for (rows, columns) in [(0..golden.rows, 0..golden.columns), (3..9, 10..50), (31..32, 62..64), (4..4, 0..2)]
            {
                let mut y = dev.alloc(dtype, rows.len() * columns.len(), Category::Other).unwrap();
                let op = Expand { from, rows: rows.clone(), columns: columns.clone(), y: y.view_mut() };
                dev.expand(op).unwrap();
                let mut found = vec![0; y.bytes()];
                dev.download(y.view(), &mut found).unwrap();
                let row = |r: usize| (r * golden.columns + columns.start) * dtype.size();
                let wanted = rows.flat_map(|r| &expected[row(r)..row(r) + columns.len() * dtype.size()]);
                assert!(found.iter().eq(wanted), "{dtype} columns {columns:?}");
            }
        }
    }
}

/// A Hugging Face directory whose matrices are those of the goldens with the exact mean. Returns their bytes by shape.
fn model(dir: &Path) -> BTreeMap<Vec<usize>, Vec<u8>> {
    let is_exact = |golden: &GoldenMatrix| Nf4Scales::new(&golden.magnitudes()).mean == golden.mean();
    let goldens: Vec<_> = goldens().into_iter().filter(is_exact).collect();
    let layouts = spec().layouts();
    let segments = || layouts.iter().flat_map(|l| &l.segments);
    let values = |s: &Segment| match goldens.iter().find(|g| s.shape == [g.rows, g.columns]) {
        Some(golden) if s.name.contains(".layers.") => golden.values.clone(),
        _ => (0..s.len()).map(|i| 0.5 + value(i, 9)).collect(),
    };
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = segments()
        .map(|s| (s.name.clone(), s.shape.clone(), values(s).iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let views =
        data.iter().map(|(name, shape, data)| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    fs::write(dir.join("config.json"), hf::config(&spec())).unwrap();
    goldens.into_iter().map(|g| (vec![g.rows, g.columns], g.bytes)).collect()
}

/// The bytes of this rank's packed shards: segment, first byte, bytes.
fn bytes_of(engine: &mut Engine) -> Result<Vec<(Segment, usize, Vec<u8>)>> {
    let (dev, mut found) = (engine.device().clone(), Vec::new());
    engine.state().0.for_each_packed(&mut |shard| {
        let mut bytes = vec![0; shard.bytes.len()];
        dev.download(shard.bytes.as_view(), &mut bytes)?;
        for segment in &shard.layout.segments {
            let range = segment.bytes();
            let (from, to) = (range.start.max(shard.start), range.end.min(shard.start + bytes.len()));
            if from < to {
                let part = bytes[from - shard.start..to - shard.start].to_vec();
                found.push((segment.clone(), from - segment.start, part));
            }
        }
        Ok(())
    })?;
    Ok(found)
}

/// The values of a whole segment.
fn expanded(dev: &dyn Device, segment: &Segment, bytes: &[u8]) -> Result<Vec<f32>> {
    let (rows, width, shape) = (segment.shape[0], segment.shape[1], segment.packing());
    let (buf, mut y) = (uploaded(dev, bytes), dev.alloc(DType::F32, rows * width, Category::Other)?);
    let from = Nf4Matrix { bytes: buf.view(), shape, width };
    dev.expand(Expand { from, rows: 0..rows, columns: 0..width, y: y.view_mut() })?;
    let mut values = vec![0f32; rows * width];
    dev.download(y.view(), bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

fn loaded(rank: Rank, options: &EngineOptions, dir: &Path) -> Result<Engine> {
    let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
    let layouts = engine.decoder().layouts();
    let mut ckpt = Checkpointer::new(rank.device, &rank.mesh, &options.spec, layouts, Moments::NONE)?;
    ckpt.load_model(dir, engine.state().0)?;
    Ok(engine)
}

/// Whatever a rank holds, it holds bitsandbytes' bytes, and all ranks together hold all of them.
#[test]
fn shards_of_a_loaded_model_are_bitsandbytes_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let golden = model(dir.path());
    for strategy in kinds(DType::F32) {
        for sizes in [MeshSizes::sharded(1), MeshSizes::sharded(3), HYBRID] {
            let what = format!("{} on {sizes:?}", strategy.name());
            let held = mesh_ranks(sizes, |rank| bytes_of(&mut loaded(rank, &packed(strategy.clone()), dir.path())?));
            let mut seen: BTreeMap<String, Vec<bool>> = BTreeMap::new();
            for (segment, at, bytes) in held.into_iter().flatten() {
                let expected = &golden[&segment.shape];
                assert_eq!(segment.bytes().len(), expected.len(), "{what}");
                assert!(expected[at..at + bytes.len()] == bytes, "{what}: {} from byte {at} on", segment.name);
                let seen = seen.entry(segment.name).or_insert_with(|| vec![false; expected.len()]);
                seen[at..at + bytes.len()].fill(true);
            }
            assert_eq!(seen.len(), 7 * spec().layers, "{what}");
            assert!(seen.values().flatten().all(|seen| *seen), "{what}");
        }
    }
}

/// Losses, norms and adapters after three steps.
type Trained = (Vec<(u64, u32)>, Vec<(String, Vec<u32>)>);

fn trained(engine: &mut Engine, spec: &Spec) -> Result<Trained> {
    let steps = train(engine, spec, 3, 1)?.iter().map(|r| (r.loss.to_bits(), r.grad_norm.to_bits())).collect();
    let adapters = fragments(engine)?.into_iter().filter(|(name, ..)| name.contains("lora_"));
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    Ok((steps, adapters.map(|(name, _, values)| (name, bits(values))).collect()))
}

/// An engine whose frozen matrices have, in full, the values of those in 4 bits.
#[test]
fn training_is_that_of_the_expanded_values() {
    for (dtype, checkpoint) in [(DType::F32, Checkpointing::Off), (DType::Bf16, Checkpointing::Full)] {
        for (targets, tolerance) in [(&["all-linear"][..], 0.0), (&["q_proj", "down_proj"], 2e-2)] {
            let options = |load_in_4bit| EngineOptions {
                tuning: tuning(targets, load_in_4bit),
                checkpoint,
                ..options(&spec(), ddp(dtype), ADAMW)
            };
            let (in_4bit, in_full) = ranks(1, |rank| {
                let dev = rank.device.clone();
                let mut engine = Engine::new(dev.clone(), &rank.mesh, &options(true))?;
                let mut values: BTreeMap<String, Vec<f32>> = BTreeMap::new();
                for (segment, _, bytes) in bytes_of(&mut engine)? {
                    let expanded = expanded(&*dev, &segment, &bytes)?;
                    values.insert(segment.name, expanded);
                }
                let in_4bit = trained(&mut engine, &spec())?;
                let mut engine = Engine::new(dev.clone(), &rank.mesh, &options(false))?;
                let mut replaced = 0;
                let (store, _) = engine.state();
                store.for_each_shard(&mut |mut shard| {
                    for segment in &shard.layout.segments {
                        let Some(values) = values.get(&segment.name) else { continue };
                        assign(&*dev, values, &mut Vec::new(), shard.master.reborrow().slice(segment.range()))?;
                        replaced += 1;
                    }
                    Ok(())
                })?;
                assert_eq!(replaced, 7 * spec().layers);
                store.weights_changed()?;
                Ok((in_4bit, trained(&mut engine, &spec())?))
            })
            .remove(0);
            if tolerance == 0.0 {
                assert!(in_4bit == in_full, "{dtype} {:?} and {:?}", in_4bit.0, in_full.0);
                continue;
            }
            // Matrices without an adapter have no fused residual in 4 bits.
            for (a, b) in in_4bit.0.iter().zip(&in_full.0) {
                let [(l, n), (m, o)] = [a, b].map(|s| (f64::from_bits(s.0), f32::from_bits(s.1)));
                let limit = if dtype == DType::F32 { 1e-5 } else { tolerance };
                assert!((l - m).abs() < limit * m && (n - o).abs() < limit as f32 * o, "{dtype}: {l} {n} and {m} {o}");
            }
        }
    }
}

#[test]
fn every_store_is_bitwise_equal_in_4_bits() {
    for dtype in [DType::F32, DType::Bf16] {
        let run = |strategy: Arc<dyn Strategy>, sizes| {
            let options = packed(strategy);
            let results = mesh_ranks(sizes, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                let steps = train(&mut engine, &options.spec, 3, 1)?;
                let adapters = fragments(&mut engine)?.into_iter().filter(|(name, ..)| name.contains("lora_"));
                Ok((steps, adapters.collect::<Fragments>()))
            });
            let steps = results[0].0.clone();
            let mut whole: BTreeMap<(String, usize), u32> = BTreeMap::new();
            for (name, start, values) in results.into_iter().flat_map(|r| r.1) {
                for (i, x) in values.into_iter().enumerate() {
                    let held = *whole.entry((name.clone(), start + i)).or_insert(x.to_bits());
                    assert_eq!(held, x.to_bits(), "ranks disagree on {name}");
                }
            }
            (steps, whole)
        };
        let expected = run(ddp(dtype), MeshSizes::sharded(3));
        for strategy in every(dtype) {
            let name = strategy.name();
            assert!(run(strategy, MeshSizes::sharded(3)) == expected, "{name} {dtype}");
        }
        // Two replicas sum gradients in another order than one.
        let sharding = || kinds(dtype).into_iter().filter(|s| s.name() != "ddp");
        let expected = sharding().next().map(|strategy| run(strategy, HYBRID)).unwrap();
        for strategy in sharding().skip(1) {
            let name = strategy.name();
            assert!(run(strategy, HYBRID) == expected, "{name} {dtype} of two replicas");
        }
        for (a, b) in expected.0.iter().zip(&run(ddp(dtype), MeshSizes::sharded(4)).0) {
            assert!((a.loss - b.loss).abs() < 1e-2 * b.loss, "{dtype} of two replicas: {a:?} and {b:?}");
        }
    }
}

/// Ranks of tp hold the values of the whole matrices; one of them has two groups of scales.
#[test]
fn parts_of_tp_have_the_values_of_the_whole() {
    let spec = Spec { heads: 8, ff: 512, ..spec() };
    let options = |strategy: Arc<dyn Strategy>| EngineOptions {
        tuning: tuning(&["q_proj", "down_proj"], true),
        ..options(&spec, strategy, ADAMW)
    };
    let run = |sizes: MeshSizes| {
        mesh_ranks(sizes, |rank| {
            let (dev, options) = (rank.device.clone(), options(ddp(DType::F32)));
            let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
            let values = |(segment, _, bytes): (Segment, usize, Vec<u8>)| {
                let values = expanded(&*dev, &segment, &bytes)?;
                Ok((segment, values))
            };
            let values = bytes_of(&mut engine)?.into_iter().map(values).collect::<Result<Vec<_>>>()?;
            Ok((train(&mut engine, &spec, 2, 1)?, values))
        })
    };
    let (steps, whole) = run(MeshSizes::sharded(1)).remove(0);
    let whole: BTreeMap<String, Vec<f32>> = whole.into_iter().map(|(segment, values)| (segment.name, values)).collect();
    let mut cut = 0;
    for (near, parts) in run(MeshSizes { tp: 2, ..MeshSizes::sharded(1) }) {
        for (segment, values) in parts {
            cut += (values.len() < whole[&segment.name].len()) as usize;
            for (part, place) in segment.stretches(0..values.len()) {
                let expected = &whole[&segment.name][place..place + part.len()];
                assert!(values[part.clone()] == *expected, "{} {part:?}", segment.name);
            }
        }
        for (a, b) in near.iter().zip(&steps) {
            assert!((a.loss - b.loss).abs() < 1e-4 * b.loss, "{near:?} and {steps:?}");
        }
    }
    assert_eq!(cut, 2 * 7 * spec.layers);
    let odd = EngineOptions { spec: self::spec(), ..options(ddp(DType::F32)) };
    let refused = odd.bytes(&MeshSizes { tp: 2, ..MeshSizes::sharded(1) }, 0).err().unwrap().to_string();
    assert!(refused.contains("o_proj") && refused.contains("divided over tp"), "{refused}");
}

/// A matrix of n elements is gathered as n / 2 + n / 64 bytes and a few numbers: what a rank receives in an evaluation,
/// and what it holds.
#[test]
fn bytes_gathered_and_held_are_those_of_4_bits() {
    for (strategy, resharded) in [(true, true), (false, false)] {
        let sharded = ShardedOptions { dtype: DType::Bf16, reshard: strategy, ..sharded() };
        for offload in [Offload::Nothing, Offload::Parameters] {
            let options = packed(fsdp(ShardedOptions { offload, ..sharded.clone() }));
            let planned = options.bytes(&MeshSizes::sharded(3), 0).unwrap();
            let received = ranks(3, |rank| {
                let (meter, group) = (rank.meter.clone(), rank.mesh.group(Axis::Fsdp).clone());
                let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                let before = group.stats().bytes;
                engine.evaluate(&[batch(&spec(), 1, 0, rank.rank)])?;
                let received = group.stats().bytes - before;
                train(&mut engine, &spec(), 2, 1)?;
                for (i, &(category, name)) in CATEGORIES.iter().enumerate() {
                    assert_eq!(meter.live(category), planned[i].1, "{name} {offload:?}");
                }
                Ok(received as usize)
            });
            let decoder = Decoder::tuned(spec(), &options.tuning).unwrap();
            let flat = Flat::new(decoder.layouts(), Wrap::Transformer, 3);
            let size = |storage| if storage == Storage::Nf4 { 1 } else { 2 };
            let parts = || flat.units.iter().flat_map(|unit| &unit.parts);
            let gathered: usize = parts().map(|p| 2 * p.shard * size(p.storage)).sum();
            assert_eq!(received, [gathered; 3], "resharded: {resharded}");
            let block: usize = [64 * 64 * 2, 32 * 64 * 2, 3 * 288 * 64].iter().sum();
            let packed: Vec<usize> = parts().filter(|p| p.storage == Storage::Nf4).map(|p| p.layout.packed).collect();
            let groups = [1, 1, 1, 1, 2, 2, 2].iter().sum::<usize>();
            let bytes = block / 2 + block / BLOCK + 4 * (groups + 7);
            assert_eq!(packed.len(), spec().layers);
            assert!(packed.iter().all(|&n| (bytes..bytes + 7 * 256).contains(&n)), "{packed:?} and {bytes}");
        }
    }
}

#[test]
fn what_cannot_be_in_4_bits_is_refused() {
    let refused = |spec: Spec, tuning: Tuning| Decoder::tuned(spec, &tuning).err().unwrap().to_string();
    let full = Tuning { load_in_4bit: true, ..Tuning::default() };
    assert!(refused(spec(), full).contains("LoRA"));
    let odd = refused(Spec { ff: 33, dim: 20, ..spec() }, tuning(&["q_proj"], true));
    assert!(odd.contains("up_proj") || odd.contains("gate_proj") || odd.contains("down_proj"), "{odd}");
    assert!(refused(sparse(), tuning(&["q_proj"], true)).contains("experts"));
}
