//! A full disk, simulated by a file-size limit, so that this runs anywhere and as any user. In its own process, because
//! the limit is process-wide.

use crate::common::alone::alone;
use crate::common::known_state::*;
use crate::common::*;
use flatshard::ckpt::{self, Resume};
use flatshard::comm::Axis;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[test]
fn a_full_disk_fails_the_save_and_touches_nothing() {
    if !alone(module_path!(), "a_full_disk_fails_the_save_and_touches_nothing") {
        return;
    }
    // Without a handler, the signal that comes with the refusal would kill the process.
    let refused = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, refused.clone()).unwrap();
    let (dir, spec) = (tempfile::tempdir().unwrap(), llama());
    let before = |step: u64| saved(2, &spec, &plain(), ADAMW, SMALL, dir.path(), step);
    before(1);
    let old = getrlimit(Resource::Fsize);
    // Enough for every file of the model except the last of the optimizer, and for the test's own output.
    let errors = ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, u64::MAX)?.fill()?;
        rank.mesh.group(Axis::World).barrier(flatshard::comm::Tag::new("limit", 0))?;
        if rank.rank == 0 {
            setrlimit(Resource::Fsize, Rlimit { current: Some(100_000), maximum: old.maximum }).unwrap();
        }
        let error = held.ckpt.save(dir.path(), 1, &mut *held.store, &mut held.optimizer, &state(2)).unwrap_err();
        Ok(error)
    });
    setrlimit(Resource::Fsize, old).unwrap();
    assert!(refused.load(Relaxed), "nothing was refused");
    let text = errors[0].to_string();
    let says =
        ["reserve", ".tmp-step-00000002", "optimizer.safetensors", "File too large", "bytes", "another directory"];
    assert!(says.iter().all(|s| text.contains(s)), "{text}");
    assert!(errors[1].to_string().contains("rank 0 could not make room"), "{}", errors[1]);
    assert!(errors.iter().all(|e| e.exit_status() == 1));
    assert_eq!(listed(dir.path()), ["latest", "step-00000001"]);
    assert_eq!(ckpt::resolve(Some(dir.path()), &Resume::Auto).unwrap(), Some(dir.path().join("step-00000001")));
    load(2, &spec, ADAMW, &dir.path().join("step-00000001")).into_iter().for_each(|(result, _)| result.unwrap());
    before(2); // free the space again
}
