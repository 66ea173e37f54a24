//! Rows that travel to their experts in halves (`moe_overlap`): the same bits as without, whatever arrives when; the
//! order of what is sent and awaited; and how much of a slow wire's time a rank waits.
use crate::common::*;
use crate::expert_parallel::meshes;
use crate::meshes::{ACCUM, Part, run, shapes, stores};
use flatshard::base::{Category, DType};
use flatshard::comm::delayed::Delayed;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, Collective, MeshSizes};
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Checkpointing, Lora, Spec, Tuning};
use flatshard::optim::Rule;
use flatshard::store::ShardedOptions;
use std::sync::Arc;
use std::time::Duration;

fn spec() -> Spec {
    let [.., sparse] = shapes();
    sparse
}
fn options(strategy: &Arc<dyn Strategy>, rule: Rule) -> EngineOptions {
    crate::meshes::options(&spec(), strategy, rule)
}
/// Without and with overlap.
fn both(options: EngineOptions) -> [EngineOptions; 2] {
    [false, true].map(|moe_overlap| EngineOptions { moe_overlap, ..options.clone() })
}

#[test]
fn halves_change_no_bit_on_any_mesh() {
    let mut sharded = stores();
    sharded.pop();
    let mut turns = sharded.iter().cycle();
    let start = Part { from: None, to: 2, save: None };
    for sizes in meshes(4) {
        for checkpoint in [Checkpointing::Off, Checkpointing::Selective, Checkpointing::Full] {
            let strategy = turns.next().unwrap();
            let [whole, halves] = both(EngineOptions { checkpoint, ..options(strategy, ADAMW) });
            let what = format!("{} on {sizes:?}, {checkpoint:?}", strategy.name());
            assert_same_bits(&run(sizes, &whole, start), &run(sizes, &halves, start), &what);
        }
    }
}

/// In bf16; with adapters, whose buffers both halves use; and with frozen experts.
#[test]
fn halves_change_no_bit_of_other_models() {
    let targets = ["gate_proj", "up_proj", "down_proj", "q_proj"].map(String::from).to_vec();
    let lora = Lora { rank: 3, alpha: 6.0, dropout: 0.0, targets };
    let frozen = Tuning { freeze: vec!["experts[.]".into()], ..Tuning::default() };
    let start = Part { from: None, to: 3, save: None };
    for (dtype, tuning) in [
        (DType::Bf16, Tuning::default()),
        (DType::F32, Tuning { lora: Some(lora), ..Tuning::default() }),
        (DType::F32, frozen),
    ] {
        let strategy: Arc<dyn Strategy> = fsdp(ShardedOptions { dtype, grad_accum: ACCUM, ..sharded() });
        for (ep, checkpoint) in [(2, Checkpointing::Off), (4, Checkpointing::Full)] {
            let sizes = MeshSizes { ep, ..MeshSizes::sharded(4) };
            let [whole, halves] =
                both(EngineOptions { checkpoint, tuning: tuning.clone(), ..options(&strategy, ADAMW) });
            // Evaluated losses are compared with trained ones in f32 only.
            let outcome = |options| match dtype {
                DType::F32 => run(sizes, options, start),
                _ => outcome_on(sizes, options, 3, ACCUM),
            };
            assert_same_bits(&outcome(&whole), &outcome(&halves), &format!("{dtype} ep {ep} {tuning:?}"));
        }
    }
}

/// Either half may be late, in either direction.
#[test]
fn late_halves_change_no_bit() {
    let options = both(options(&fsdp(sharded()), SGD));
    let sizes = MeshSizes { ep: 4, ..MeshSizes::sharded(4) };
    let outcome = |options: &EngineOptions, seed: Option<u64>| {
        let results = mesh_ranks(sizes, |rank| {
            let late = |group: Arc<dyn Collective>| -> Arc<dyn Collective> {
                match seed.filter(|_| group.axis() == Axis::Ep) {
                    Some(seed) => Arc::new(Delayed::new(group, seed, &Seam::ALL, Duration::from_millis(2))),
                    None => group,
                }
            };
            let mut engine = Engine::new(rank.device, &rank.mesh.wrap(late), options)?;
            Ok((train(&mut engine, &options.spec, 2, 1)?, fragments(&mut engine)?))
        });
        gathered(&options.spec, results)
    };
    let expected = outcome(&options[0], None);
    for seed in 0..4 {
        assert_same_bits(&expected, &outcome(&options[1], Some(seed)), &format!("seed {seed}"));
    }
}

/// No more memory than without, but for the first rows of experts within the halves, and for the runs of the second.
#[test]
fn halves_share_the_buffers_of_the_whole() {
    let sizes = MeshSizes { ep: 2, ..MeshSizes::sharded(4) };
    let [whole, halves] = both(options(&fsdp(sharded()), SGD)).map(|options| options.bytes(&sizes, 0).unwrap());
    for ((category, whole), (_, halves)) in whole.into_iter().zip(halves) {
        // The first rank has 4 of 7 experts.
        let more = if category == Category::Scratch { 2 * (4 + 1) * 4 + 4 * 2 * 3 * 4 } else { 0 };
        assert_eq!(halves, whole + more, "{category:?}");
    }
}

/// What one rank starts and awaits in a block's exchange, in order, with its bytes.
fn exchanged(moe_overlap: bool) -> Vec<(Seam, &'static str, usize)> {
    let options = EngineOptions { moe_overlap, checkpoint: Checkpointing::Off, ..options(&fsdp(sharded()), SGD) };
    let logs = mesh_ranks(MeshSizes { ep: 2, ..MeshSizes::sharded(2) }, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let mut engine = Engine::new(rank.device, &mesh, &options)?;
        log.clear();
        step(&mut engine, &[batch(&options.spec, 1, 0, rank.rank)], 1)?;
        Ok(log)
    });
    let entries = logs[0].entries().into_iter().filter(|e| e.axis == Axis::Ep && e.tag.what != "rows of experts");
    let entries = entries.filter_map(|e| Some((e.seam?, e.tag.what, e.bytes)));
    entries.filter(|(seam, ..)| matches!(seam, Seam::AllToAll | Seam::Wait)).collect()
}
fn order(moe_overlap: bool) -> Vec<String> {
    let word = |seam| if seam == Seam::AllToAll { "send" } else { "await" };
    exchanged(moe_overlap).into_iter().map(|(seam, what, _)| format!("{} {what}", word(seam))).collect()
}

/// The second half is on its way while the experts of the first compute, and what the first gives back while those of
/// the second do: so in forward and in backward, where the weights' gradients follow what is given back, and inputs,
/// which only these need, arrive last.
#[test]
fn each_half_travels_while_the_experts_of_the_other_compute() {
    assert_eq!(spec().sparse_blocks(), 1);
    let forward = |parts: usize| {
        let (send, back) = (vec!["send dispatch"; parts], vec!["await combine"; parts]);
        let part = ["await dispatch", "send combine"].repeat(parts);
        [send, part, back].concat()
    };
    let backward = |parts: usize| {
        let sends = ["send dispatch weights", "send dispatch gradients", "send dispatch"].map(|what| vec![what; parts]);
        let part = ["await dispatch weights", "await dispatch gradients", "send combine weights"].repeat(parts);
        let rest = ["send combine gradients", "await dispatch", "await combine weights", "await combine gradients"];
        [sends.concat(), part, rest.map(|what| vec![what; parts]).concat()].concat()
    };
    for (overlap, parts) in [(false, 1), (true, 2)] {
        assert_eq!(order(overlap), [forward(parts), backward(parts)].concat(), "overlap {overlap}");
    }
}

/// The part of the wire's time that a rank waits, with a wire that moves a byte per tick, one operation after another,
/// and experts that compute for as long as all rows travel.
fn exposed(moe_overlap: bool) -> f64 {
    let events = exchanged(moe_overlap);
    let of = |what: &str| events.iter().filter(|event| event.1 == what).map(|event| event.2).sum::<usize>();
    let (computing, wire) = (of("dispatch"), events.iter().map(|event| event.2).sum::<usize>());
    let (mut now, mut free, mut waited) = (0, 0, 0);
    let mut due: Vec<(&str, usize)> = Vec::new();
    for &(seam, what, bytes) in &events {
        if seam == Seam::AllToAll {
            free = now.max(free) + bytes;
            due.push((what, free));
            continue;
        }
        let at = due.iter().position(|(sent, _)| *sent == what).unwrap();
        let arrived = now.max(due.remove(at).1);
        waited += arrived - now;
        // In forward, rows are what experts wait for; in backward, gradients, and then rows for those of the weights.
        let computes = ["dispatch", "dispatch gradients"].contains(&what);
        now = arrived + if computes { computing } else { 0 };
    }
    waited as f64 / wire as f64
}

/// Of the five times that the rows travel, three are awaited without halves: there and back in forward, and the
/// gradients in backward. With halves it is half of each.
#[test]
fn halves_expose_half_of_the_wire() {
    let (whole, halves) = (exposed(false), exposed(true));
    // Routing weights aside, which are a few percent of the rows.
    assert!((0.55..0.65).contains(&whole) && (0.25..0.35).contains(&halves), "{whole} and {halves} exposed");
}
