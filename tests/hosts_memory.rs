//! What ranks of several hosts do together allocates nothing after the first time, the threads that do it included. A binary of its
//! own: every allocation of the process counts.
use flatshard::base::{Category, DType, Meter};
use flatshard::comm::{CommUse, MeshSizes, Reduce, Tag, hosts, shm};
use flatshard::device::{Device, cpu::CpuDevice};
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
    let options = shm::Options { timeout: Duration::from_secs(60) };
    let meshes = hosts::threads(MeshSizes::sharded(RANKS), 2, &meters, &options).unwrap();
    let together = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        for mesh in meshes {
            let together = &together;
            scope.spawn(move || {
                let g = &*mesh.fsdp;
                let plain = |dtype, len| CpuDevice::new(Meter::default()).alloc(dtype, len, Category::Other).unwrap();
                let mut full = g.alloc(DType::F32, 64 * RANKS, CommUse::Gathered, Category::Slots).unwrap();
                let mut grads = g.alloc(DType::F32, 64 * RANKS, CommUse::Reduced, Category::Slots).unwrap();
                let (mut shard, mut values) = (plain(DType::F32, 64), plain(DType::F64, 5));
                let (to, from) = ((g.rank() + 1) % RANKS, (g.rank() + RANKS - 1) % RANKS);
                let mut step = |i| {
                    let sent = grads.view().slice(0..64);
                    let d = g.send_recv(Tag::new("shift", i), to, sent, from, shard.view_mut()).unwrap();
                    g.wait(d).unwrap();
                    g.wait_sent(d).unwrap();
                    let a = g.all_gather(Tag::new("gather", i), shard.view(), full.view_mut()).unwrap();
                    let c = g.all_reduce(Tag::new("values", i), values.view_mut(), Reduce::Sum).unwrap();
                    g.wait(a).unwrap();
                    g.release(a).unwrap();
                    let b = g.reduce_scatter(Tag::new("reduce", i), grads.view_mut(), shard.view_mut(), true).unwrap();
                    g.wait(b).unwrap();
                    g.wait_sent(b).unwrap();
                    g.wait(c).unwrap();
                    g.barrier(Tag::new("end", i)).unwrap();
                };
                (0..3).for_each(&mut step);
                together.wait();
                let before = ALLOCATIONS.load(Relaxed);
                together.wait();
                (3..STEPS).for_each(&mut step);
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
