//! Rows that travel to their experts in halves (`moe_overlap`): the same bits as without, whatever arrives when; the
//! order of what is sent and awaited; and how long a rank waits for a slow wire.
use crate::common::time::{passes_once, seconds};
use crate::common::*;
use crate::expert_parallel::meshes;
use crate::meshes::{ACCUM, Part, run, shapes, stores};
use flatshard::base::{Category, DType};
use flatshard::comm::delayed::{Delayed, Slow};
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::{Hook, Hooked, Seam, Started};
use flatshard::comm::{Axis, Collective, Mesh, MeshSizes, Ticket};
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Arch, Checkpointing, Experts, Lora, Spec, Tuning};
use flatshard::optim::Rule;
use flatshard::store::ShardedOptions;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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

/// What one rank starts and awaits in a block's exchange, in order.
fn order(moe_overlap: bool) -> Vec<String> {
    let options = EngineOptions { moe_overlap, checkpoint: Checkpointing::Off, ..options(&fsdp(sharded()), SGD) };
    let logs = mesh_ranks(MeshSizes { ep: 2, ..MeshSizes::sharded(2) }, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let mut engine = Engine::new(rank.device, &mesh, &options)?;
        log.clear();
        step(&mut engine, &[batch(&options.spec, 1, 0, rank.rank)], 1)?;
        Ok(log)
    });
    let word = |seam| match seam {
        Seam::AllToAll => Some("send"),
        Seam::Wait => Some("await"),
        _ => None,
    };
    let entries = logs[0].entries().into_iter().filter(|e| e.axis == Axis::Ep && e.tag.what != "rows of experts");
    entries.filter_map(|e| Some(format!("{} {}", e.seam.and_then(word)?, e.tag.what))).collect()
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

/// Waits for a group, in seconds, and bytes received from other ranks.
#[derive(Default)]
struct Waited(Mutex<(Option<Instant>, f64, usize)>);

struct WaitClock(Arc<Waited>);

impl Hook for WaitClock {
    fn before(&self, _: Seam, _: Started) {}
    fn after(&self, _: Seam, started: Started, _: Option<Ticket>) {
        self.0.0.lock().unwrap().2 += started.bytes;
    }
    fn before_wait(&self, _: Seam, _: Ticket) {
        self.0.0.lock().unwrap().0 = Some(Instant::now());
    }
    fn after_wait(&self, _: Seam, _: Ticket) {
        let mut waited = self.0.0.lock().unwrap();
        waited.1 += seconds(waited.0.take().unwrap());
    }
}

/// Of the five times that the rows travel, three are awaited without halves: there and back in forward, and the
/// gradients in backward. With halves it is half of each.
#[test]
fn halves_expose_half_of_the_wire() {
    const RATE: f64 = 80e6;
    let experts =
        Experts { count: 4, top_k: 2, ff: 1024, shared_ff: 0, dense: Vec::new(), ..sparse().experts.unwrap() };
    let wide = Spec { vocab: 512, dim: 256, layers: 1, heads: 4, kv_heads: 4, head_dim: 64, max_len: 64, ..llama() };
    let spec = Spec { arch: Arch::Mixtral, experts: Some(experts), ..wide };
    let exposed = |moe_overlap| -> (f64, f64) {
        let options = EngineOptions { tokens: 512, moe_overlap, ..crate::common::options(&spec, fsdp(sharded()), SGD) };
        let waited = mesh_ranks(MeshSizes { ep: 2, ..MeshSizes::sharded(2) }, |rank| {
            let waited = Arc::new(Waited::default());
            let narrow = |group: Arc<dyn Collective>| -> Arc<dyn Collective> {
                if group.axis() != Axis::Ep {
                    return group;
                }
                Arc::new(Hooked::with(Arc::new(Slow::narrow(group, RATE)), WaitClock(waited.clone())))
            };
            let mesh: Mesh = rank.mesh.wrap(narrow);
            let mut engine = Engine::new(rank.device, &mesh, &options)?;
            let batches = [rows_of((64, 8), rank.rank)];
            step(&mut engine, &batches, 1)?;
            *waited.0.lock().unwrap() = (None, 0.0, 0);
            step(&mut engine, &batches, 2)?;
            let (_, seconds, bytes) = *waited.0.lock().unwrap();
            Ok((seconds, bytes as f64 / RATE))
        });
        waited[0]
    };
    passes_once(|| {
        let ((whole, wire), (halves, same)) = (exposed(false), exposed(true));
        // Words per row aside, which are fewer than one percent.
        let said = format!("{:.1} and {:.1} of {:.1} ms exposed", whole * 1e3, halves * 1e3, wire * 1e3);
        assert!(whole > 0.58 * wire && (same / wire - 1.0).abs() < 0.01, "{said}, {same}");
        match halves < 0.4 * wire {
            true => Ok(()),
            false => Err(said),
        }
    });
}
