//! Async checkpoints: what is written is the state at the time of the save, it becomes a checkpoint only when every
//! rank has written its part, and a failure there fails the run. One test runs in its own process, because it lowers a
//! process-wide limit.

use crate::common::alone::alone;
use crate::common::hooked_store::HookedStore;
use crate::common::known_state::*;
use crate::common::*;
use flatshard::base::{Category, DType, Result};
use flatshard::ckpt::{self, Checkpointer, Resume};
use flatshard::comm::{Axis, MeshSizes, Tag};
use flatshard::nn::Decoder;
use flatshard::store::{Shard, Store};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

fn wait_for(ended: impl Fn() -> bool) {
    while !ended() {
        std::thread::sleep(Duration::from_millis(1));
    }
}
/// Changes every weight and moment, as a training step does.
fn change(held: &mut KnownState) -> Result<()> {
    let dev = held.dev.clone();
    let optimizer = &mut held.optimizer;
    held.store.for_each_shard(&mut |shard| {
        for state in optimizer.states(shard.part()) {
            dev.zero(state)?;
        }
        dev.zero(shard.master)
    })
}
fn newest(dir: &Path) -> Option<String> {
    let path = ckpt::resolve(Some(dir), &Resume::Auto).unwrap();
    path.map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
}

#[test]
fn an_async_save_writes_the_copy_while_training_continues() {
    for (spec, strategy, rule) in [(llama(), plain(), ADAMW), (gpt(), ddp(flatshard::base::DType::Bf16), SGD)] {
        let (at_once, behind) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        saved(3, &spec, &strategy, rule, SMALL, at_once.path(), 1);
        ranks(3, |rank| {
            let mut held = KnownState::new(&rank, &spec, &*strategy, rule, SMALL)?.fill()?;
            held.optimizer.resume(1001);
            let before = rank.meter.live(Category::Other);
            held.ckpt.save_async(behind.path(), 9, &mut *held.store, &mut held.optimizer, &state(1))?;
            let copy = rank.meter.live(Category::Other) - before;
            change(&mut held)?;

            // Written by all, but not a checkpoint before all have agreed.
            wait_for(|| held.ckpt.ended());
            rank.mesh.group(Axis::World).barrier(Tag::new("all have written", 0))?;
            assert!(held.ckpt.published()?.is_none());
            assert_eq!(newest(behind.path()), None);
            rank.mesh.group(Axis::World).barrier(Tag::new("all have looked", 0))?;
            held.ckpt.advance()?;
            let told = held.ckpt.settle()?;
            assert_eq!(told.map(|t| t.step), (rank.rank == 0).then_some(Some(1)));
            assert_eq!(newest(behind.path()).as_deref(), Some("step-00000001"));

            // The second save reuses the memory and waits for nothing.
            held = held.fill()?;
            held.optimizer.resume(1002);
            held.ckpt.save_async(behind.path(), 9, &mut *held.store, &mut held.optimizer, &state(2))?;
            change(&mut held)?;
            assert_eq!(rank.meter.live(Category::Other) - before, copy);
            let layouts = Decoder::new(spec.clone())?.layouts().to_vec();
            let planned = Checkpointer::copy_bytes(&layouts, DType::F32, &rule.state(), &MeshSizes::sharded(3));
            assert!(copy > 0 && copy < planned * 3 / 2, "{copy} bytes for a copy, {planned} planned");

            // The third waits for the second.
            held = held.fill()?;
            held.optimizer.resume(1003);
            let earlier = held.ckpt.save_async(behind.path(), 9, &mut *held.store, &mut held.optimizer, &state(3))?;
            assert_eq!(earlier.map(|t| t.step), (rank.rank == 0).then_some(Some(2)));
            assert_eq!(newest(behind.path()).as_deref(), Some("step-00000002"));
            // And so does a synchronous one.
            held.optimizer.resume(1004);
            held.ckpt.save(behind.path(), 9, &mut *held.store, &mut held.optimizer, &state(4))
        });
        assert_eq!(
            listed(behind.path()),
            ["latest", "step-00000001", "step-00000002", "step-00000003", "step-00000004"]
        );
        let (expected, found) =
            (contents(&at_once.path().join("step-00000001")), contents(&behind.path().join("step-00000001")));
        assert!(expected.keys().eq(found.keys()), "{:?}", found.keys());
        for (name, bytes) in &expected {
            assert!(*bytes == found[name], "{name} differs");
        }
        for step in 1..=4 {
            for (result, _) in load(2, &spec, rule, &behind.path().join(format!("step-0000000{step}"))) {
                result.unwrap();
            }
        }
    }
}

/// Lowers the file-size limit when the store is copied: after space was reserved, before anything is written.
fn lowering(store: &mut dyn Store, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
    let old = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(30_000), maximum: old.maximum }).unwrap();
    store.for_each_shard(f)
}

#[test]
fn a_failed_background_write_is_an_error_on_every_rank() {
    if !alone(module_path!(), "a_failed_background_write_is_an_error_on_every_rank") {
        return;
    }
    // Without a handler, the signal that comes with the refusal would kill the process.
    let refused = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, refused.clone()).unwrap();
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), 1);
    let old = getrlimit(Resource::Fsize);
    let errors = ranks(2, |rank| {
        let KnownState { store, mut optimizer, mut ckpt, .. } =
            KnownState::new(&rank, &spec, &*plain(), ADAMW, u64::MAX)?.fill()?;
        let mut store = HookedStore { store, visit: lowering };
        ckpt.save_async(dir.path(), 1, &mut store, &mut optimizer, &state(2))?;
        wait_for(|| ckpt.ended());
        rank.mesh.group(Axis::World).barrier(Tag::new("all have tried", 0))?;
        Ok(ckpt.advance().unwrap_err())
    });
    setrlimit(Resource::Fsize, old).unwrap();
    assert!(refused.load(Relaxed), "nothing was refused");
    for (rank, error) in errors.iter().enumerate() {
        let text = error.to_string();
        assert!(text.contains("write") && text.contains(".tmp-step-00000002"), "rank {rank}: {text}");
        assert!(text.contains("File too large"), "rank {rank}: {text}");
        assert_eq!(error.exit_status(), 1);
    }
    assert_eq!(listed(dir.path()), ["latest", "step-00000001"]);
    load(2, &spec, ADAMW, &dir.path().join("step-00000001")).into_iter().for_each(|(result, _)| result.unwrap());
}
