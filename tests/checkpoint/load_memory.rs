//! Loading holds what the store has allocated and less than one tensor in addition. In its own process, so that the
//! process's peak memory is this test's.

use crate::common::alone::alone;
use crate::common::*;
use flatshard::base::{DType, Result};
use flatshard::ckpt::{Checkpointer, Dtype};
use flatshard::comm::{Axis, Tag};
use flatshard::engine::Strategy;
use flatshard::nn::{Decoder, Spec};
use flatshard::optim::Moments;
use flatshard::store::{ShardedOptions, Store};
use std::fs;
use std::path::Path;

/// (resident, peak resident) bytes.
fn resident() -> (usize, usize) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| -> usize {
        let line = status.lines().find(|l| l.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    };
    (field("VmRSS:"), field("VmHWM:"))
}

/// About 90 MB of weights in bf16, of which the token table is 32 MB.
fn spec() -> Spec {
    Spec { vocab: 32_000, dim: 512, layers: 4, heads: 8, kv_heads: 8, head_dim: 64, ff: 1408, max_len: 16, ..llama() }
}

fn load(rank: &Rank, strategy: &dyn Strategy, dir: &Path) -> Result<Box<dyn Store>> {
    let layouts = Decoder::new(spec())?.layouts().to_vec();
    let mut store = strategy.store(rank.device.clone(), &rank.mesh, &layouts)?;
    let mut ckpt = Checkpointer::new(rank.device.clone(), &rank.mesh, &spec(), &layouts, Moments::NONE)?;
    ckpt.load_model(dir, &mut *store)?;
    Ok(store)
}

#[test]
fn loading_holds_the_shards_and_less_than_one_tensor() {
    if !alone(module_path!(), "loading_holds_the_shards_and_less_than_one_tensor") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    let bf16 = fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() });
    ranks(1, |rank| {
        let layouts = Decoder::new(spec())?.layouts().to_vec();
        let mut store = bf16.store(rank.device.clone(), &rank.mesh, &layouts)?;
        flatshard::store::initialize(&mut *store, 1, &*rank.device)?;
        let mut ckpt =
            Checkpointer::new(rank.device, &rank.mesh, &spec(), &layouts, Moments::NONE)?.with_files_of(20_000_000);
        ckpt.save_hf(&model, Dtype::BF16, &mut *store)
    });
    assert!(model.join("model.safetensors.index.json").exists());
    let params: usize = Decoder::new(spec()).unwrap().layouts().iter().map(|l| l.params()).sum();
    let largest = spec().vocab * spec().dim * 2; // its size in the file
    for world in [1, 2] {
        let grown = ranks(world, |rank| {
            fs::write("/proc/self/clear_refs", "5").unwrap(); // reset VmHWM
            let before = resident().0;
            rank.mesh.group(Axis::World).barrier(Tag::new("from here", 0))?;
            let _held = load(&rank, &*bf16, &model)?;
            // All at once, even on a busy machine.
            rank.mesh.group(Axis::World).barrier(Tag::new("all hold theirs", 0))?;
            Ok((resident().1 - before, rank.meter.total()))
        });
        // All ranks share this process, and memory is in place as soon as it is allocated.
        let stores: usize = grown.iter().map(|(_, bytes)| bytes).sum();
        let grown = grown.into_iter().map(|(grown, _)| grown).max().unwrap();
        let shards = params * (4 + 2); // master weights and their bf16 copies
        assert!(grown > shards * 9 / 10, "{grown} bytes is less than the weights, {shards}: the meter is broken");
        assert!(
            grown < stores + largest,
            "{world} ranks: loading took {grown} bytes, {} above the stores; the largest tensor has {largest}",
            grown as isize - stores as isize
        );
    }
}
