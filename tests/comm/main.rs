//! Collectives from outside. Ranks are threads here, over the same shared memory as processes; `processes` has real
//! ones. The groups' timeout bounds each test.
#[path = "../common/mod.rs"]
mod common;
mod all_to_all;
mod faults;
#[path = "../common/heap.rs"]
mod heap;
mod host_allocations;
mod hosts;
mod memory;
mod mesh;
mod processes;
mod stress;
mod values;
mod wire;

use crate::common::time::{in_time, scaled, seconds, wait_until};
use flatshard::base::{Category, DType, Elem, Meter, Result};
use flatshard::comm::{Axis, Collective, CommUse, Mesh, MeshSizes, Tag, hosts as several, shm};
use flatshard::device::{Buf, Device, cpu::CpuDevice};
use std::sync::Arc;
use std::time::Duration;

pub const T: Tag = Tag::new("test", 0);

pub fn meters(n: usize) -> Vec<Meter> {
    (0..n).map(|_| Meter::default()).collect()
}
/// Runs `f` on every rank, each on a thread of its own; the results in rank order. A panic of any rank is the test's.
pub fn run<R: Send>(meshes: Vec<Mesh>, f: impl Fn(Mesh) -> R + Sync) -> Vec<R> {
    std::thread::scope(|s| {
        let threads: Vec<_> = meshes.into_iter().map(|mesh| s.spawn(|| f(mesh))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
pub fn world<R: Send>(n: usize, f: impl Fn(Mesh) -> R + Sync) -> Vec<R> {
    run(shm::threads(MeshSizes::sharded(n), &meters(n)).unwrap(), f)
}
/// `per_host` ranks on each pretended host, over TCP.
pub fn spread<R: Send>(sizes: MeshSizes, per_host: usize, ms: u64, f: impl Fn(Mesh) -> R + Sync) -> Vec<R> {
    let options = shm::ShmOptions { timeout: scaled(ms) };
    run(several::threads(sizes, per_host, &meters(sizes.world()), &options).unwrap(), f)
}
/// A world whose blocked calls fail after `ms` milliseconds, or more on a busy machine.
pub fn impatient<R: Send>(n: usize, ms: u64, f: impl Fn(Mesh) -> R + Sync) -> Vec<R> {
    let options = shm::ShmOptions { timeout: scaled(ms) };
    run(shm::threads_with(MeshSizes::sharded(n), &meters(n), &options).unwrap(), f)
}

/// Rank 1 panics while the others wait for it: the result of each.
pub fn one_panics(meshes: Vec<Mesh>) -> Vec<std::thread::Result<String>> {
    std::thread::scope(|s| {
        let body = |mesh: Mesh| {
            assert!(mesh.rank() != 1, "planted");
            error(mesh.group(Axis::World).barrier(T))
        };
        let threads: Vec<_> = meshes.into_iter().map(|mesh| s.spawn(move || body(mesh))).collect();
        threads.into_iter().map(|t| t.join()).collect()
    })
}

/// A buffer that no group allocated: goes through the mailboxes.
pub fn plain(dtype: DType, len: usize) -> Buf {
    CpuDevice::new(Meter::default()).alloc(dtype, len, Category::Other).unwrap()
}
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Home {
    Arena,
    Plain,
}
pub fn buffer(home: Home, g: &dyn Collective, dtype: DType, len: usize, usage: CommUse) -> Buf {
    match home {
        Home::Arena => g.alloc(dtype, len, usage, Category::Other).unwrap(),
        Home::Plain => plain(dtype, len),
    }
}
pub fn fill<T: Elem>(buf: &mut Buf, f: impl Fn(usize) -> T) {
    for (i, x) in buf.view_mut().host::<T>("fill").unwrap().iter_mut().enumerate() {
        *x = f(i);
    }
}
pub fn host<T: Elem>(buf: &Buf) -> &[T] {
    buf.view().host("test").unwrap()
}
#[track_caller]
pub fn expect<T: Elem + PartialEq + std::fmt::Debug>(buf: &Buf, f: impl Fn(usize) -> T) {
    for (i, x) in host::<T>(buf).iter().enumerate() {
        assert_eq!(*x, f(i), "element {i} of {}", buf.len());
    }
}
/// The text of the expected error.
#[track_caller]
pub fn error<R>(result: Result<R>) -> String {
    match result {
        Ok(_) => panic!("this had to fail"),
        Err(e) => e.to_string(),
    }
}
