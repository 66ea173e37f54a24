//! Traces of steps: their contents and completeness, and exposed communication, which grows without prefetching and
//! equals what the groups measured themselves.

use crate::common;
use crate::common::probe::{Told, Watched};
use crate::common::runs;
use crate::common::runs::time::passes_once;
use crate::common::*;
use flatshard::base::timeline::Lane;
use flatshard::comm::delayed::Slow;
use flatshard::comm::{Axis, CommStats, Mesh, MeshSizes};
use flatshard::engine::{Engine, Step, Strategy};
use flatshard::run::plan::profile::Profile;
use flatshard::run::trace::TracedSpan;
use flatshard::run::trace::Tracer;
use flatshard::run::trace::chrome;
use flatshard::run::trace::summary::Summary;
use flatshard::store::{BackwardPrefetch, ShardedOptions};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The strategy with slow layers: a pause on the rank whenever weights are acquired.
fn paused(inner: Arc<dyn Strategy>, pause: fn(usize) -> Duration) -> Arc<dyn Strategy> {
    let told = move |mesh: &Mesh| -> Told {
        let pause = pause(mesh.rank());
        Arc::new(move |what, _| {
            if what == "use" {
                std::thread::sleep(pause);
            }
        })
    };
    Arc::new(Watched { inner, told: Arc::new(told) })
}

/// One step's spans, and the groups' own measurements.
struct Traced {
    spans: Vec<TracedSpan>,
    stats: CommStats,
}

/// Steps 2 and up of `steps`, by rank. `wire`: the least that a collective takes.
fn traced(
    sizes: MeshSizes,
    options: ShardedOptions,
    wire: Duration,
    pause: fn(usize) -> Duration,
    steps: u64,
) -> Vec<Vec<Traced>> {
    let dir = tempfile::tempdir().unwrap();
    mesh_ranks(sizes, |rank| {
        let profile = Profile { steps: 2..=steps, folder: dir.path().into() };
        let strategy = paused(fsdp(options.clone()), pause);
        let options = common::options(&llama(), strategy, ADAMW);
        let mesh = match wire.is_zero() {
            true => rank.mesh,
            false => rank.mesh.wrap(|group| Arc::new(Slow::new(group, wire))),
        };
        let mut tracer = Tracer::new(Some(profile), mesh.rank(), mesh.group(Axis::World).size());
        let mesh = tracer.watch(mesh);
        let mut engine = Engine::new(rank.device.clone(), &mesh, &options)?;
        engine.on_timeline(tracer.timeline().clone());
        let (mut all, mut before) = (Vec::new(), 0);
        for number in 1..=steps {
            let batches = [batch(&options.spec, number, 0, mesh.group(Axis::Dp).rank())];
            tracer.next(number, &mesh, &*rank.device)?;
            let from = mesh.stats();
            let tokens = engine.global_count(batches[0].loss_tokens())?;
            engine.train_step(&batches, &Step { number, lr: 0.01, tokens })?;
            let to = mesh.stats();
            tracer.done(number);
            assert!(number > 1 || tracer.spans().0.is_empty(), "a step was recorded that was not asked for");
            tracer.drain(&*rank.device)?;
            let stats = CommStats {
                in_flight_s: to.in_flight_s - from.in_flight_s,
                exposed_s: to.exposed_s - from.exposed_s,
                bytes: to.bytes - from.bytes,
                ops: to.ops - from.ops,
                ..CommStats::default()
            };
            let spans = tracer.spans().0[before..].to_vec();
            before += spans.len();
            if number > 1 {
                all.push(Traced { spans, stats });
            }
        }
        assert_eq!(tracer.spans().1, 0, "spans were lost");
        tracer.next(steps + 1, &mesh, &*rank.device)?;
        assert!(!tracer.is_waiting());
        if mesh.rank() == 0 {
            let file = dir.path().join(format!("steps-2-{steps}.json"));
            assert_eq!(chrome::head(&file)?.summary.len(), mesh.group(Axis::World).size());
        }
        Ok(all)
    })
}

fn summary(step: &Traced) -> Summary {
    Summary::of(0, &step.spans, 0)
}
fn none(_: usize) -> Duration {
    Duration::ZERO
}

#[test]
fn without_prefetching_more_communication_is_exposed() {
    // Layers take longer than the wire does, so what is started a layer ahead is there in time.
    let (wire, layer) = (Duration::from_millis(3), |_| Duration::from_millis(5));
    let exposed = |options: ShardedOptions| {
        let ranks = traced(MeshSizes::sharded(2), options, wire, layer, 4);
        // The minimum over steps: a busy machine only adds time.
        let steps = ranks[0].iter().map(|step| summary(step).lanes[0].clone());
        steps.map(|(name, gathers)| (name, gathers.exposed_s)).min_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
    };
    let lazy = ShardedOptions { forward_prefetch: false, backward_prefetch: BackwardPrefetch::None, ..sharded() };
    let (name, lazy) = exposed(lazy);
    assert_eq!(name, "gathers");
    // The root and four blocks forward, two more backward: all seven wait for the wire; ahead, the root does.
    let wires = 7.0 * wire.as_secs_f64();
    assert!(lazy > wires * 0.95, "{lazy} s exposed without prefetching");
    passes_once(|| {
        let (_, ahead) = exposed(sharded());
        (ahead < wires / 2.0).then_some(()).ok_or(format!("{ahead} s exposed with prefetching, {wires} s of the wire"))
    });
}

#[test]
fn exposed_communication_equals_what_the_groups_measured() {
    // One rank is slower, so that the other one waits measurably.
    let slow = |rank| Duration::from_millis(if rank == 1 { 6 } else { 0 });
    for sizes in [MeshSizes::sharded(2), MeshSizes { dp_replicate: 2, dp_shard: 1, sp: 1, tp: 1, ep: 1 }] {
        passes_once(|| {
            let ranks = traced(sizes, sharded(), Duration::ZERO, slow, 4);
            let mut same = Err(String::new());
            for step in &ranks[0] {
                let (of, stats) = (summary(step).comm, step.stats);
                assert_eq!(of.ops as u64, stats.ops);
                // Spans lie outside the groups' own calls: a rank that loses the processor in between makes them
                // longer.
                assert!(of.exposed_s >= stats.exposed_s - 1e-5, "{of:?}, the groups say {stats:?}");
                assert!(of.exposed_s <= of.in_flight_s);
                let most = |ours: f64, theirs: f64| ours <= theirs + 0.05 * stats.exposed_s + 0.002;
                let waited = stats.exposed_s > 0.02 && of.overlap() < 1.0;
                match waited && most(of.exposed_s, stats.exposed_s) && most(of.in_flight_s, stats.in_flight_s) {
                    true => same = Ok(()),
                    false => same = same.map_err(|_| format!("{of:?}, the groups say {stats:?}")),
                }
            }
            same
        });
    }
}

#[test]
fn a_step_holds_every_layer_and_every_collective_once() {
    let ranks = traced(MeshSizes::sharded(3), sharded(), Duration::ZERO, none, 3);
    for step in ranks.iter().flatten() {
        let compute = step.spans.iter().filter(|s| s.lane == Lane::Compute);
        let names = compute.map(|s| format!("{} {}", s.what, s.number.unwrap())).collect::<Vec<_>>().join(", ");
        let expected = "embed 0, forward 1, forward 2, forward 3, forward 4, loss 0, backward 4, backward 3, backward \
        2, \
                        backward 1, embed backward 0";
        assert_eq!(names, expected);
        let of =
            |lane: Lane| -> Vec<&TracedSpan> { step.spans.iter().filter(|s| s.lane == lane && !s.is_call()).collect() };
        // In the order of their starts.
        let told = |lane| {
            let mut of = of(lane);
            of.sort_by_key(|s| s.flow.unwrap().id);
            of.iter().map(|s| s.number.unwrap()).collect::<Vec<_>>()
        };
        assert_eq!((told(Lane::Gathers), told(Lane::Scatters)), (vec![0, 1, 2, 3, 4, 2, 1], vec![4, 3, 2, 1, 0]));
        assert!(of(Lane::Gathers).iter().all(|s| s.flow.unwrap().bytes > 0));
        let optimizer = of(Lane::Optimizer).iter().map(|s| s.what).collect::<Vec<_>>();
        assert_eq!(optimizer, ["norm", "update"]);
        // A call belongs to an operation that was under way when it began, and was over when the wait for it returned.
        let ops: BTreeMap<u64, &TracedSpan> =
            step.spans.iter().filter(|s| !s.is_call()).filter_map(|s| Some((s.flow?.id, s))).collect();
        for call in step.spans.iter().filter(|s| s.is_call()) {
            let (flow, op) = (call.flow.unwrap(), ops[&call.flow.unwrap().id]);
            assert!(op.start <= call.start && (flow.call != Some("wait") || op.end <= call.end), "{call:?} of {op:?}");
        }
        let waited: BTreeSet<u64> =
            step.spans.iter().filter_map(|s| s.flow).filter(|f| f.call == Some("wait")).map(|f| f.id).collect();
        assert!(of(Lane::Gathers).iter().all(|s| waited.contains(&s.flow.unwrap().id)));
    }
}

/// A run of 8 steps with steps 3 to 6 traced.
fn profiled() -> (runs::Dir, runs::Ended) {
    let dir = runs::Dir::new();
    let (metrics, ckpt) = (dir.arg("m.jsonl"), dir.arg("ckpt"));
    let flags = ["--max-steps", "8", "--profile-steps", "3:6", "--metrics-path", &metrics, "--ckpt-dir", &ckpt];
    let ended = runs::good(runs::FSDP, &[&flags[..], &["--save-every", "3", "--async-save"]].concat());
    (dir, ended)
}

/// Within the steps, but for what is in flight around the steps themselves.
#[test]
fn exposed_communication_of_a_trace_equals_the_metrics() {
    passes_once(|| {
        let (dir, _) = profiled();
        let steps = runs::events(&dir.path("m.jsonl"), "step");
        let measured: f64 = steps[2..6].iter().map(|s| s["exposed_comm_s"].as_f64().unwrap()).sum();
        let event = &runs::events(&dir.path("m.jsonl"), "trace")[0];
        let exposed = event["ranks"][0]["comm"]["exposed_s"].as_f64().unwrap();
        let same = (exposed - measured).abs() < 0.1 * measured + 0.006;
        same.then_some(()).ok_or(format!("{exposed} s in the trace, {measured} s in the metrics"))
    });
}

#[test]
fn a_run_writes_valid_traces() {
    let (dir, ended) = profiled();
    let event = &runs::events(&dir.path("m.jsonl"), "trace")[0];
    assert_eq!(event["steps"], serde_json::json!([3, 6]));
    let path = dir.path("ckpt").join("traces/steps-3-6.json");
    assert_eq!(event["path"], path.to_str().unwrap());
    assert!(ended.stderr.contains("trace  steps 3:6  "), "{}", ended.stderr);
    assert!(ended.stderr.contains("rank 1, per step of "), "{}", ended.stderr);

    let text = std::fs::read_to_string(&path).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(file["distributedInfo"]["world_size"], 2);
    let (mut names, mut rows) = (BTreeSet::new(), BTreeMap::<(u64, u64), Vec<(i64, i64)>>::new());
    let mut arrows = BTreeMap::<u64, [usize; 2]>::new();
    for event in file["traceEvents"].as_array().unwrap() {
        let id = |key: &str| event[key].as_u64().unwrap();
        let ns = |key: &str| (event[key].as_f64().unwrap() * 1e3).round() as i64;
        match event["ph"].as_str().unwrap() {
            "X" => {
                names.insert((id("pid"), event["name"].as_str().unwrap().to_string()));
                rows.entry((id("pid"), id("tid"))).or_default().push((ns("ts"), ns("ts") + ns("dur")));
            }
            "s" => arrows.entry(id("id")).or_default()[0] += 1,
            "f" => arrows.entry(id("id")).or_default()[1] += 1,
            _ => {}
        }
    }
    for rank in [0, 1] {
        let expected = [
            "step 3",
            "step 6",
            "forward 1",
            "backward 2",
            "loss 0",
            "wait gather 1",
            "gather 1",
            "start reduce 2",
            "norm",
            "update",
            "wait for micro-batches 4",
            "copy 3",
            "write",
        ];
        for name in expected {
            assert!(names.contains(&(rank, name.to_string())), "no {name} of rank {rank} in {names:?}");
        }
    }
    assert!(arrows.len() > 30 && arrows.values().all(|ends| *ends == [1, 1]), "{arrows:?}");
    // Spans of a row must nest or be disjoint to be drawn correctly.
    for ((rank, row), spans) in &mut rows {
        spans.sort_by_key(|&(from, to)| (from, -to));
        let mut open: Vec<(i64, i64)> = vec![];
        for &(from, to) in spans.iter() {
            open.retain(|outer| outer.1 > from);
            assert!(open.iter().all(|outer| to <= outer.1), "rank {rank}, row {row}: {from}..{to} crosses {open:?}");
            open.push((from, to));
        }
    }
    for rank in 0..2 {
        assert!(dir.path("ckpt").join(format!("traces/steps-3-6-rank-{rank}.json")).exists());
    }
}

#[test]
fn steps_beyond_the_run_are_refused() {
    let dir = runs::Dir::new();
    let folder = dir.arg("traces");
    for (flags, said) in [
        (&["--profile-steps", "0:2"][..], "must be A:B"),
        (&["--profile-steps", "3:2"], "must be A:B"),
        (&["--profile-steps", "2..3"], "must be A:B"),
        (&["--profile-steps", "5:7"], "the run ends at step 6"),
        (&["--profile-steps", "2:3"], "--trace-folder DIR"),
        (&["--trace-folder", &folder], "--profile-steps A:B"),
    ] {
        let ended = runs::Run::start(runs::FSDP, &[&["--max-steps", "6"], flags].concat()).end();
        assert_eq!(ended.status.code(), Some(2), "{flags:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(said), "{flags:?}: {}", ended.stderr);
    }
    assert!(!dir.path("traces").exists());
}

/// The lines of a memory timeline, by column name.
fn rows(path: &std::path::Path) -> Vec<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(|line| line.split(',').map(str::to_string).collect::<Vec<_>>());
    let names = lines.next().unwrap();
    lines.map(|line| names.iter().cloned().zip(line).collect()).collect()
}

#[test]
fn the_memory_timeline_ends_as_planned_and_shows_what_a_step_uses() {
    let dir = runs::Dir::new();
    let (metrics, memory) = (dir.arg("m.jsonl"), dir.arg("deep/memory.csv"));
    // Buffers of that measurement are freed before the first step.
    let flags = ["--max-steps", "3", "--no-measure-peak", "--metrics-path", &metrics, "--memory-timeline", &memory];
    runs::good(runs::FSDP, &flags);
    let planned = &runs::events(&dir.path("m.jsonl"), "run")[0]["planned_bytes"];
    let rows = rows(&dir.path("deep/memory.csv"));
    let number = |row: &BTreeMap<String, String>, name: &str| row[name].parse::<u64>().unwrap();
    for rank in ["0", "1"] {
        let of: Vec<_> = rows.iter().filter(|row| row["rank"] == rank).collect();
        let last = of.last().unwrap();
        for category in ["params", "grads", "optimizer", "slots", "saved", "scratch", "host"] {
            assert_eq!(Some(number(last, category)), planned[category].as_u64(), "{category} of rank {rank}");
        }
        // Beside the engine's: what ranks agree in.
        let beside = number(last, "total") - planned["total"].as_u64().unwrap();
        assert!(beside < 4000, "{beside} bytes more than planned");
        let totals: Vec<u64> = of.iter().map(|row| number(row, "total")).collect();
        assert!(totals[0] == 0 && totals.iter().max() == totals.last(), "{totals:?}");
        let times: Vec<f64> = of.iter().map(|row| row["time_s"].parse().unwrap()).collect();
        assert!(times.windows(2).all(|w| w[0] <= w[1]));

        // In a step that is looked at activations grow to the loss and are given back; the third is not looked at.
        let phases = |step: &str| {
            let of = of.iter().filter(|row| row["step"] == step && !row["layer"].is_empty());
            of.map(|row| (format!("{} {}", row["phase"], row["layer"]), number(row, "saved_in_use")))
                .collect::<Vec<_>>()
        };
        let second = phases("2");
        let at = |name: &str| second.iter().find(|(phase, _)| phase == name).unwrap_or_else(|| panic!("no {name}")).1;
        assert!(at("embed 0") < at("forward 1") && at("forward 1") < at("forward 2"));
        assert!(at("loss 0") == at("backward 2") && at("backward 2") > at("backward 1"));
        assert_eq!(Some(at("loss 0")), planned["saved"].as_u64());
        assert_eq!(phases("3"), []);
        let most = |column: &str| of.iter().map(|row| number(row, column)).max().unwrap();
        assert!(most("weights_in_use") > 0 && most("grads_in_use") > 0 && number(last, "saved_in_use") == 0);
    }
    assert!(!dir.path("deep/memory.csv.rank-1").exists());
    let refused = runs::Run::start(runs::FSDP, &["--memory-timeline", dir.path(".").to_str().unwrap()]).end();
    assert_eq!((refused.status.code(), refused.stderr.contains("is a directory")), (Some(2), true));
}
