//! Collectives over several hosts allocate nothing after the first time, including their threads. In a separate
//! process, because every allocation of the process counts.
use crate::common::alone::alone;
use crate::common::round::Round;
use crate::heap::allocations_of_all_threads;
use flatshard::base::Meter;
use flatshard::comm::{Axis, MeshSizes, hosts, shm};
use std::sync::Barrier;
use std::time::Duration;

#[test]
fn operations_over_hosts_allocate_nothing() {
    if !alone(module_path!(), "operations_over_hosts_allocate_nothing") {
        return;
    }
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
                let mut round = Round::new(&**mesh.group(Axis::Fsdp));
                (0..3).for_each(|i| round.run(i));
                together.wait();
                let before = allocations_of_all_threads();
                together.wait();
                (3..STEPS).for_each(|i| round.run(i));
                together.wait();
                let allocated = allocations_of_all_threads() - before;
                // A step is five operations on each of four ranks. The threads that watch for lost ranks allocate a
                // list twenty times a second: less than once a step and rank, also on a machine under load.
                assert!(allocated < RANKS * STEPS, "{allocated} allocations in {STEPS} steps");
                together.wait();
            });
        }
    });
}
