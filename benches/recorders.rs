//! The overhead of recording: nanoseconds per collective (start and wait) without recorders, with the flight recorder,
//! and with a timeline off and on; of a step event and of reading memory use; and whole steps on 2 ranks, interleaved.
//!
//!     cargo bench --bench recorders [-- ROUNDS]
//!
//! Prints JSON. Steps are far shorter here than in practice, so a recorder's share of them is an upper bound. Paired
//! steps are meaningful only on a quiet machine.
#[path = "../tests/common/worlds.rs"]
#[allow(dead_code)] // only a part is used here
mod worlds;

use flatshard::base::timeline::Timeline;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::comm::flight::Flight;
use flatshard::comm::{Axis, CommUse, Mesh, MeshSizes, Reduce, Tag, shm, timed};
use flatshard::device::cpu::CpuDevice;
use flatshard::engine::{Engine, EngineOptions, Step};
use flatshard::nn::Spec;
use flatshard::run::plan::memory;
use flatshard::run::watch::metrics::Event;
use flatshard::run::watch::metrics::Metrics;
use flatshard::run::watch::metrics::Sink;
use flatshard::run::watch::metrics::StepRecord;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;
use worlds::{ADAMW, fsdp, options, ranks, rows_of, sharded};

/// Operations per measurement.
const OPS: usize = 20_000;
/// Tokens per row, rows per micro-batch.
const SHAPE: (usize, usize) = (256, 4);

/// What records a mesh's calls.
const WATCHERS: [&str; 4] =
    ["bare", "flight recorder", "flight recorder, timeline off", "flight recorder, timeline on"];

/// The mesh with the recorders of `watcher`.
fn watched(mesh: Mesh, watcher: usize) -> (Mesh, Timeline) {
    let timeline = if watcher >= 2 { Timeline::with_room(1 << 16) } else { Timeline::default() };
    timeline.switch(watcher == 3);
    let mesh = if watcher >= 1 { Flight::default().watch(mesh) } else { mesh };
    (if watcher >= 2 { timed::watch(mesh, &timeline) } else { mesh }, timeline)
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// Nanoseconds of an all-reduce of one number in a group of one rank, including its wait.
fn of_an_op(watcher: usize) -> Result<f64> {
    let mesh = shm::threads(MeshSizes::sharded(1), &[Meter::default()])?.remove(0);
    let (mesh, timeline) = watched(mesh, watcher);
    let mut buf = mesh.group(Axis::World).alloc(DType::F64, 1, CommUse::Reduced, Category::Other)?;
    let (mut times, mut spans) = (vec![], vec![]);
    for _ in 0..9 {
        let start = Instant::now();
        for i in 0..OPS {
            let ticket = mesh.group(Axis::World).all_reduce(Tag::new("bench", i), buf.view_mut(), Reduce::Sum)?;
            mesh.group(Axis::World).wait(ticket)?;
        }
        times.push(start.elapsed().as_nanos() as f64 / OPS as f64);
        timeline.drain(&mut spans);
        spans.clear();
    }
    Ok(median(times))
}

fn spec() -> Spec {
    let small = worlds::llama();
    Spec { vocab: 512, dim: 192, layers: 4, heads: 4, kv_heads: 4, head_dim: 48, ff: 512, max_len: SHAPE.0, ..small }
}
/// Seconds per step with each set of recorders, interleaved in each round; and operations per step.
fn of_a_step(rounds: usize) -> (Vec<Vec<f64>>, u64) {
    let options = EngineOptions { tokens: SHAPE.0 * SHAPE.1, ..options(&spec(), fsdp(sharded()), ADAMW) };
    let mut told = ranks(2, |rank| {
        let batches = [rows_of(SHAPE, rank.rank)];
        let mut engines = Vec::new();
        for watcher in 0..WATCHERS.len() {
            let (mesh, timeline) = watched(rank.mesh.clone(), watcher);
            let mut engine = Engine::new(Arc::new(CpuDevice::new(Meter::default())), &mesh, &options)?;
            engine.on_timeline(timeline.clone());
            engines.push((engine, timeline));
        }
        let (mut seconds, mut ops, mut spans) = (vec![vec![]; engines.len()], 0, vec![]);
        for number in 1..=rounds as u64 {
            for offset in 0..engines.len() {
                // Start with another one each round.
                let which = (offset + number as usize) % engines.len();
                let (engine, timeline) = &mut engines[which];
                let tokens = engine.global_count(batches[0].loss_tokens())?;
                let (before, start) = (rank.mesh.stats().ops, Instant::now());
                engine.train_step(&batches, &Step { number, lr: 1e-3, tokens })?;
                seconds[which].push(start.elapsed().as_secs_f64());
                ops = rank.mesh.stats().ops - before;
                timeline.drain(&mut spans);
                spans.clear();
            }
        }
        Ok((seconds, ops))
    });
    told.swap_remove(0)
}

/// Nanoseconds of writing a step event and of reading memory use.
fn of_telemetry() -> Result<[f64; 2]> {
    let dir = tempfile::tempdir().map_err(|e| flatshard::base::Error::io("make", "a directory", e))?;
    let mut metrics = Metrics::open(&dir.path().join("m.jsonl"), false)?;
    let record = StepRecord { step: 1, ..StepRecord::default() };
    let each = |n: usize, f: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..n {
            f()?;
        }
        Ok(start.elapsed().as_nanos() as f64 / n as f64)
    };
    let written = each(2000, &mut || metrics.event(&Event::Step(&record)))?;
    let touched = vec![1u8; 1 << 30];
    let held = each(50, &mut || {
        std::hint::black_box(memory::held());
        Ok(())
    })?;
    drop(touched);
    Ok([written, held])
}

fn main() -> Result<()> {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(400);
    let mut ops = [0.0; WATCHERS.len()];
    for (watcher, ns) in ops.iter_mut().enumerate() {
        *ns = of_an_op(watcher)?;
    }
    let (seconds, of_a_step) = of_a_step(rounds);
    let [written, held] = of_telemetry()?;
    let bare = median(seconds[0].clone());
    let rows: Vec<_> = (0..WATCHERS.len())
        .map(|w| {
            let ratios = seconds[w].iter().zip(&seconds[0]).map(|(with, without)| with / without - 1.0);
            let added = ops[w] - ops[0];
            json!({
                "watcher": WATCHERS[w],
                "ns_of_an_op": ops[w].round(),
                "ns_added": added.round(),
                "percent_of_a_step_by_ops": 100.0 * added * of_a_step as f64 / (1e9 * bare),
                "step_ms": 1e3 * median(seconds[w].clone()),
                "percent_of_a_step_paired": 100.0 * median(ratios.collect()),
            })
        })
        .collect();
    let result = json!({
        "ranks": 2,
        "rounds": rounds,
        "ops_of_a_step": of_a_step,
        "watchers": rows,
        "metrics_line_ns": written.round(),
        "memory_held_ns_with_1_gib": held.round(),
    });
    println!("{result:#}");
    Ok(())
}
