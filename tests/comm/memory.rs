//! The memory of group buffers: what they cost, how the meter counts them, and that they are freed.
use super::*;
use crate::common::round::Round;
use crate::heap::allocations;
use flatshard::comm::shm::{Arena, ShmOptions, ShmWorld};
use flatshard::comm::{Axis, Reduce};
use std::os::unix::fs::MetadataExt;

#[test]
fn the_meter_counts_a_shared_buffer_once_per_host() {
    let meters = meters(4);
    run(shm::threads(MeshSizes::sharded(4), &meters).unwrap(), |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let _shared = g.alloc(DType::F32, 1000, CommUse::Gathered, Category::Slots).unwrap();
        let _own = g.alloc(DType::F32, 1000, CommUse::Reduced, Category::Grads).unwrap();
        g.barrier(T).unwrap();
        for meter in &meters {
            assert_eq!(meter.live(Category::Slots), 1000);
            assert_eq!(meter.live(Category::Grads), 4000);
        }
        g.barrier(T).unwrap();
    });
    for meter in &meters {
        assert_eq!((meter.total(), meter.peak()), (0, 5000));
    }
}

#[test]
fn operations_allocate_nothing() {
    world(3, |mesh| {
        let mut round = Round::new(&**mesh.group(Axis::Fsdp));
        round.run(0);
        let before = allocations();
        // More operations than the ring holds.
        (1..500).for_each(|i| round.run(i));
        assert_eq!(allocations() - before, 0);
    });
}

#[test]
fn memory_is_freed_when_the_last_rank_drops_a_buffer() {
    const BYTES: usize = 8 << 20;
    let arena = Arc::new(Arena::create(2).unwrap());
    let held = |arena: &Arena| {
        let meta = std::fs::metadata(format!("/proc/self/fd/{}", arena.fd())).unwrap();
        meta.blocks() as usize * 512
    };
    let worlds = [0, 1].map(|r| ShmWorld::new(arena.clone(), r, Meter::default(), &ShmOptions::default()).unwrap());
    let groups = worlds.each_ref().map(|w| w.group(Axis::World, vec![0, 1]).unwrap());
    // One of each use; the second stays.
    let alloc = |usage, len| {
        groups.each_ref().map(|g| {
            let mut buf = g.alloc(DType::U8, len, usage, Category::Other).unwrap();
            fill(&mut buf, |_| 1u8);
            buf
        })
    };
    let empty = held(&arena);
    let [a, b] = alloc(CommUse::Gathered, BYTES);
    let kept = alloc(CommUse::Reduced, 1 << 20);
    let full = held(&arena);
    assert!((BYTES + (2 << 20)..2 * BYTES).contains(&(full - empty)), "one shared buffer: {}", full - empty);
    drop(a);
    assert!(held(&arena) >= full, "a peer may still read");
    expect(&b, |_| 1u8);
    drop(b);
    assert!(full - held(&arena) >= BYTES);
    expect(&kept[0], |_| 1u8);
    // Later allocations are zeroed.
    let later = groups.each_ref().map(|g| g.alloc(DType::U8, BYTES, CommUse::Gathered, Category::Other).unwrap());
    expect(&later[0], |_| 0u8);
}

/// A buffer that its owner drops stays until its peers have read it.
#[test]
fn a_dropped_buffer_lives_on_for_its_peers() {
    world(2, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut buf = g.alloc(DType::F32, 1 << 20, CommUse::Reduced, Category::Other).unwrap();
        fill(&mut buf, |i| (i % 1000) as f32);
        if mesh.rank() == 0 {
            let mut shard = plain(DType::F32, 1 << 19);
            let t = g.reduce_scatter(T, buf.view_mut(), shard.view_mut(), false).unwrap();
            g.wait(t).unwrap();
            drop(buf); // without wait_sent
            mesh.group(Axis::World).barrier(T).unwrap();
        } else {
            let mut shard = plain(DType::F32, 1 << 19);
            let t = g.reduce_scatter(T, buf.view_mut(), shard.view_mut(), false).unwrap();
            mesh.group(Axis::World).barrier(T).unwrap();
            g.wait(t).unwrap();
            expect(&shard, |i| (2 * ((i + (1 << 19)) % 1000)) as f32);
        }
    });
}

#[test]
fn more_operations_than_the_ring_holds_time_out_with_a_clear_error() {
    let errors = impatient(2, 300, |mesh| {
        if mesh.rank() == 1 {
            return None; // never comes
        }
        let mut buf = plain(DType::F32, 1);
        (0..2000).find_map(|i| {
            let started = mesh.group(Axis::World).all_reduce(Tag::new("hoard", i), buf.view_mut(), Reduce::Sum);
            started.err().map(|e| (i, e.to_string()))
        })
    });
    let (i, text) = errors[0].clone().unwrap();
    assert_eq!(i, 1024);
    assert!(text.contains("from rank 1 ") && text.contains("has not finished an earlier operation"), "{text}");
}

#[test]
fn waits_do_not_spin() {
    world(2, |mesh| {
        let mut buf = plain(DType::F32, 1);
        if mesh.rank() == 1 {
            std::thread::sleep(Duration::from_millis(400));
        }
        let before = thread_cpu();
        let t = mesh.group(Axis::World).all_reduce(T, buf.view_mut(), Reduce::Sum).unwrap();
        mesh.group(Axis::World).wait(t).unwrap();
        let used = thread_cpu() - before;
        assert!(used < 0.1, "{used} s of processor time for a wait of 0.4 s");
    });
}
/// Processor time of this thread in seconds, by the kernel's ticks of 1/100.
fn thread_cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
