//! An allocator that counts allocations, per thread and in total, for the test programs `engine` and `comm`. Counting
//! the whole process needs a separate process (alone.rs).
#![allow(dead_code)] // each program uses its part
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

thread_local! {
    /// Allocations of this thread: all, and those that are like the ones of the `gemm` crate.
    static COUNT: Cell<[usize; 2]> = const { Cell::new([0; 2]) };
}
static OF_ALL_THREADS: AtomicUsize = AtomicUsize::new(0);

/// Where our own kernels do not run, the `gemm` crate multiplies, which makes two allocations in each product and frees
/// them at once: packing buffers of such an alignment, and zeroed flags of a byte each.
const PACKING: usize = 64;

fn count(layout: Layout, zeroed: bool) {
    let alike = layout.align() >= PACKING || zeroed && layout.align() == 1;
    // A thread that is ending has no counter any more.
    let _ = COUNT.try_with(|count| count.set([count.get()[0] + 1, count.get()[1] + alike as usize]));
    OF_ALL_THREADS.fetch_add(1, Relaxed);
}
/// Allocations of this thread so far.
pub fn allocations() -> usize {
    COUNT.get()[0]
}
/// Those that are not like the ones of the `gemm` crate.
pub fn allocations_without_packing() -> usize {
    let [all, alike] = COUNT.get();
    all - alike
}
/// Allocations of the process so far.
pub fn allocations_of_all_threads() -> usize {
    OF_ALL_THREADS.load(Relaxed)
}

struct Counting;
// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, false);
        // SAFETY: as called.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout, true);
        // SAFETY: as called.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as called; it came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}
#[global_allocator]
static HEAP: Counting = Counting;
