//! What ranks of several hosts do together allocates nothing after the first time, the threads that do it included. A binary of its
//! own: every allocation of the process counts.
#[path = "common/round.rs"]
mod round;

use flatshard::base::Meter;
use flatshard::comm::{MeshSizes, hosts, shm};
use round::Round;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

struct Counting;
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's word.
        unsafe { System.dealloc(ptr, layout) }
    }
}
#[global_allocator]
static HEAP: Counting = Counting;

#[test]
fn operations_over_hosts_allocate_nothing() {
    const RANKS: usize = 4;
    const STEPS: usize = 400;
    let meters = [(); RANKS].map(|()| Meter::default());
    let options = shm::ShmOptions { timeout: Duration::from_secs(60) };
    let meshes = hosts::threads(MeshSizes::sharded(RANKS), 2, &meters, &options).unwrap();
    let together = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        for mesh in meshes {
            let together = &together;
            scope.spawn(move || {
                let mut round = Round::new(&*mesh.fsdp);
                (0..3).for_each(|i| round.run(i));
                together.wait();
                let before = ALLOCATIONS.load(Relaxed);
                together.wait();
                (3..STEPS).for_each(|i| round.run(i));
                together.wait();
                let allocated = ALLOCATIONS.load(Relaxed) - before;
                // A step is five operations on each of four ranks. The threads that watch for lost ranks allocate a list twenty
                // times a second, which is much less than once a step.
                assert!(allocated < STEPS, "{allocated} allocations in {STEPS} steps");
                together.wait();
            });
        }
    });
}
