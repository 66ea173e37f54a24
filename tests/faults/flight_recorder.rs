//! The flight recorder: the files of a failed run, its verdict on which rank was late or did something else, and that
//! ranks with different schedules fail at once.

use crate::common;
use crate::common::runs::*;
use crate::common::{mesh_ranks, options, ranks, sharded, train};
use flatshard::base::{Category, DType, Error};
use flatshard::comm::flight::{Dump, Flight, KEPT, verdict};
use flatshard::comm::{Axis, MeshSizes, Reduce, Tag};
use flatshard::engine::Engine;
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

fn read(dir: &Path, rank: usize) -> Dump {
    serde_json::from_slice(&fs::read(dir.join(format!("rank-{rank}.json"))).unwrap()).unwrap()
}

#[test]
fn the_ring_keeps_the_newest_entries_with_the_times_of_their_waits() {
    let spec = common::llama();
    ranks(2, |rank| {
        let flight = Flight::default();
        let mesh = flight.watch(rank.mesh.clone());
        let mut engine = Engine::new(rank.device, &mesh, &options(&spec, common::fsdp(sharded()), common::SGD))?;
        train(&mut engine, &spec, 2, 1)?;
        let ops = flight.ops();
        let gathers: Vec<_> = ops.iter().filter(|op| op.what == "gather").collect();
        assert!(gathers.len() > 10 && ops.iter().zip(1..).all(|(op, seq)| op.seq == seq), "{ops:?}");
        for op in &gathers {
            assert_eq!((op.op.as_str(), op.axis.as_str()), ("all_gather", "fsdp"));
            assert!(op.bytes > 0 && op.returned_s >= Some(op.started_s) && op.waited_s >= op.returned_s, "{op:?}");
        }
        for _ in 0..KEPT {
            mesh.group(Axis::World).barrier(Tag::new("again", 0))?;
        }
        let last = flight.ops();
        assert_eq!(last.len(), KEPT);
        assert!(last.windows(2).all(|pair| pair[0].seq + 1 == pair[1].seq) && last[0].seq == ops.len() as u64 + 1);
        Ok(())
    });
}

#[test]
fn the_same_program_has_the_same_schedule_and_another_has_another() {
    let hash = |extra: usize| {
        let hashes = ranks(2, |rank| {
            let flight = Flight::default();
            let mesh = flight.watch(rank.mesh.clone());
            (0..3 + extra).try_for_each(|unit| mesh.group(Axis::World).barrier(Tag::new("work", unit)))?;
            Ok(flight.schedule())
        });
        assert_eq!(hashes[0], hashes[1]);
        hashes[0]
    };
    assert_eq!(hash(0), hash(0));
    assert_ne!(hash(0), hash(1));
}

/// Numbers of bytes are part of the program, except where ranks of ep may have different numbers of experts.
#[test]
fn another_number_of_bytes_is_another_schedule() {
    let hash = |ep: usize, len: usize| {
        let hashes = mesh_ranks(MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep }, |rank| {
            let flight = Flight::default();
            let group = flight.watch(rank.mesh.clone()).group(Axis::DpReplicate).clone();
            let mut buf = rank.device.alloc(DType::F32, len, Category::Other)?;
            let ticket = group.all_reduce(Tag::new("gradients", 0), buf.view_mut(), Reduce::Sum)?;
            group.wait(ticket)?;
            Ok(flight.schedule())
        });
        assert!(hashes.iter().all(|hash| *hash == hashes[0]));
        hashes[0]
    };
    assert_ne!(hash(1, 8), hash(1, 16));
    assert_eq!(hash(2, 8), hash(2, 16));
}

#[test]
fn the_verdict_names_ranks_that_are_late_that_differ_and_that_left_no_record() {
    let dir = Dir::new();
    let since = SystemTime::now() - Duration::from_secs(1);
    // Rank 0 does 4 operations; rank 1 another third one; rank 2 stops after two; rank 3 writes nothing.
    ranks(1, |rank| {
        for (who, units) in [(0, &[1, 2, 3, 4][..]), (1, &[1, 2, 7]), (2, &[1, 2])] {
            let flight = Flight::default();
            let mesh = flight.watch(rank.mesh.clone());
            units.iter().try_for_each(|&unit| mesh.group(Axis::World).barrier(Tag::new("work", unit)))?;
            flight.dump(dir.0.path(), who, &Error::Run("as planned".into()))?;
        }
        Ok(())
    });
    assert_eq!(read(dir.0.path(), 2).error, "as planned");
    let text = verdict(dir.0.path(), 4, since).unwrap();
    assert!(
        text.starts_with("rank 0 got furthest, to operation 4, barrier on world (work 4); no record of rank 3"),
        "{text}"
    );
    assert!(
        text.contains("rank 1 first differs at operation 3, barrier on world (work 7), where rank 0 has operation 3"),
        "{text}"
    );
    assert!(
        text.contains("rank 2 is behind: its last is operation 2, barrier on world (work 2), rank 0 is at"),
        "{text}"
    );
    assert_eq!(verdict(dir.0.path(), 4, SystemTime::now() + Duration::from_secs(9)), None, "files of another run");
}

/// Rank 1 is stopped in the middle of training: the other one runs into its timeout, dumps, and the launcher's message
/// names the silent rank and the operation that waits for it. The start may take longer than a step.
#[test]
fn a_stalled_rank_is_named_within_the_step_timeout() {
    let dir = Dir::new();
    let (metrics, path, ckpt) = (dir.arg("m.jsonl"), dir.path("m.jsonl"), dir.arg("ckpt"));
    let limits = ["--comm-timeout", "2", "--init-timeout", "60"];
    let run = Run::start(
        FSDP,
        &[&["--max-steps", "100000", "--metrics-path", &metrics, "--ckpt-dir", &ckpt], &limits[..]].concat(),
    );
    wait_until("it trains", || steps(&path) > 3);
    let stalled = run.ranks(2)[1];
    send(Signal::STOP, stalled);
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1));
    let text = ended.stderr;
    assert!(
        text.contains("no answer within 2s from rank 1") && text.contains("rank 0 got furthest, to operation"),
        "{text}"
    );
    assert!(text.contains("no record of rank 1") && text.contains("comm_traces"), "{text}");
    assert!(!dir.path("comm_traces").exists(), "traces belong beside checkpoints");
    let dump = read(&dir.path("ckpt/comm_traces"), 0);
    assert!(dump.error.contains("no answer within 2s") && dump.ops.len() > 20, "{}", dump.error);
    // What it waited for, by the error's own words, is not over.
    let named = |op: &&flatshard::comm::flight::FlightOp| {
        dump.error.contains(&format!("{} on {} ({} {})", op.op, op.axis, op.what, op.unit))
    };
    assert!(dump.ops.iter().rev().find(named).unwrap().waited_s.is_none(), "{}", dump.error);
}
