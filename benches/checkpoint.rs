//! Seconds and GB/s of saving and loading a checkpoint: 105.8 M parameters with AdamW state, 1.27 GB, on 2 ranks.
//!
//!     cargo bench --bench checkpoint [-- DIR]
//!
//! DIR (default: the system's temporary directory) decides what is measured: a disk, or memory under /dev/shm. For
//! comparison, one thread also writes, syncs and reads the same number of bytes in 1 MiB chunks.
use flatshard::base::{DType, Error, Meter, Result};
use flatshard::ckpt::{Checkpointer, TrainerState};
use flatshard::comm::mesh::{Mesh, MeshSizes};
use flatshard::comm::shm;
use flatshard::device::{Device, cpu::CpuDevice};
use flatshard::engine::Strategy;
use flatshard::nn::{Decoder, Spec};
use flatshard::optim::{Optimizer, Rule};
use flatshard::store::{ShardedOptions, initialize};
use serde_json::Map;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

const RANKS: usize = 2;
const ROUNDS: usize = 3;

fn spec() -> Spec {
    Spec {
        vocab: 32_000,
        dim: 768,
        layers: 6,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        ff: 3072,
        max_len: 256,
        norm_eps: 1e-5,
        tied: false,
        dropout: 0.0,
        ..Spec::default()
    }
}

fn state(step: u64) -> TrainerState {
    TrainerState {
        step,
        samples_consumed: 0,
        trained_tokens: 0,
        optimizer_steps: 0,
        seed: 0,
        rng: String::new(),
        optimizer: Map::new(),
        schedule: Map::new(),
        scaler: None,
        world: RANKS,
        strategy: "fsdp".into(),
        precision: "fp32".into(),
        data: Map::new(),
        evaluations: None,
        rollouts: None,
        run: None,
    }
}

/// Seconds of saving and loading, and bytes.
fn rank(mesh: Mesh, meter: Meter, dir: &Path) -> Result<Vec<(f64, f64, u64)>> {
    let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(meter));
    let decoder = Decoder::new(spec())?;
    let options = ShardedOptions::default();
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, moments: DType::F32 };
    let mut store = options.store(dev.clone(), &mesh, decoder.layouts())?;
    initialize(&mut *store, 1, &*dev)?;
    let mut optimizer = Optimizer::new(&*dev, &mesh, decoder.layouts(), &mut *store, rule, 1)?;
    // First-touch page faults are the system's cost, not ours.
    store.for_each_shard(&mut |shard| optimizer.states(shard.part()).try_for_each(|state| dev.zero(state)))?;
    let mut ckpt = Checkpointer::new(dev, &mesh, &spec(), decoder.layouts(), rule.state())?;
    (1..=ROUNDS as u64)
        .map(|step| {
            let saved = ckpt.save(dir, 1, &mut *store, &mut optimizer, &state(step))?;
            let started = Instant::now();
            ckpt.load(&saved.path, &mut *store, &mut optimizer)?;
            Ok((saved.seconds, started.elapsed().as_secs_f64(), saved.bytes))
        })
        .collect()
}

/// The same bytes through one file and one thread.
fn plain(path: &Path, bytes: u64) -> std::io::Result<(f64, f64)> {
    let mut chunk = vec![7u8; 1 << 20];
    let started = Instant::now();
    let mut file = File::create(path)?;
    for _ in 0..bytes >> 20 {
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    let written = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut chunk)? > 0 {}
    Ok((written, started.elapsed().as_secs_f64()))
}

fn main() -> Result<()> {
    let parent = std::env::args().skip(1).find(|a| !a.starts_with('-')).map_or(std::env::temp_dir(), PathBuf::from);
    let dir = tempfile::tempdir_in(&parent).map_err(|e| Error::io("make a directory in", &parent, e))?;
    let meters = vec![Meter::default(); RANKS];
    let meshes = shm::threads(MeshSizes::sharded(RANKS), &meters)?;
    let results: Vec<Result<_>> = std::thread::scope(|scope| {
        let start = |(mesh, meter)| scope.spawn(|| rank(mesh, meter, dir.path()));
        let threads: Vec<_> = meshes.into_iter().zip(meters).map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
    });
    for result in results.into_iter().take(1) {
        for (save, load, bytes) in result? {
            let path = dir.path().join("plain");
            let (write, read) = plain(&path, bytes).map_err(|e| Error::io("write", &path, e))?;
            let rate = |seconds: f64| format!("{seconds:.2} s, {:.2} GB/s", bytes as f64 / 1e9 / seconds);
            println!("{:.2} GB: save {}; load {}", bytes as f64 / 1e9, rate(save), rate(load));
            println!("    one plain file: write {}; read {}", rate(write), rate(read));
        }
    }
    Ok(())
}
