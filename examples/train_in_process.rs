//! Trains a small Llama with FSDP on two ranks (threads of this process): no flags, no files, no launcher.
//!
//! ```sh
//! cargo run --release --example train_in_process
//! ```
use flatshard::base::Result;
use flatshard::comm::{Axis, MeshSizes, run_ranks};
use flatshard::data::MicroBatch;
use flatshard::device::cpu::CpuDevice;
use flatshard::engine::{Engine, EngineOptions, Step};
use flatshard::nn::Spec;
use std::sync::Arc;

const STEPS: u64 = 60;
const ROWS: usize = 4;
const ROW: usize = 32;

/// One rank's endless data: rows that count up in steps of 1 to 7 from a random start, modulo the vocabulary.
fn micro_batches(rank: usize, vocab: u32) -> impl Iterator<Item = MicroBatch> {
    (rank as u32..).step_by(2).map(move |n| {
        let row = |i: u32| (0..ROW as u32).map(|at| (n * 13 + i * 29 + at * (1 + (n + i) % 7)) % vocab).collect();
        let rows: Vec<Vec<u32>> = (0..ROWS as u32).map(row).collect();
        MicroBatch::from_rows(rows.iter().map(Vec::as_slice))
    })
}

fn main() -> Result<()> {
    let spec = Spec {
        vocab: 64,
        dim: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ff: 176,
        max_len: ROW,
        ..Spec::default()
    };
    println!("{} parameters, 2 ranks", spec.params());
    let options = EngineOptions { spec, tokens: ROWS * ROW, ..EngineOptions::default() };

    // Every rank runs this with its own groups; all of them get the same losses.
    let losses = run_ranks(MeshSizes::sharded(2), |mesh, meter| {
        let mut engine = Engine::new(Arc::new(CpuDevice::new(meter)), &mesh, &options)?;
        let mut losses = Vec::new();
        for (number, batch) in (1..=STEPS).zip(micro_batches(mesh.group(Axis::Dp).rank(), options.spec.vocab as u32)) {
            let tokens = engine.global_count(batch.loss_tokens())?;
            let report = engine.train_step(&[batch], &Step { number, lr: 3e-3, tokens })?;
            if mesh.rank() == 0 && number % 10 == 0 {
                println!("step {number:2}  loss {:.4}  grad_norm {:.4}", report.loss, report.grad_norm);
            }
            losses.push(report.loss);
        }
        Ok(losses)
    })?;
    assert_eq!(losses[0], losses[1]);
    Ok(())
}
