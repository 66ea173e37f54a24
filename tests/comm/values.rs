//! Results of each collective, over world sizes, lengths, dtypes, and arena and other buffers.
use super::*;
use flatshard::base::dtype::Float;
use flatshard::comm::{Axis, Reduce};
use half::{bf16, f16};
use std::time::Instant;

const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];
/// Empty, less than a rank each, odd, and more than a mailbox holds (262144 bytes) by a little.
const LENS: [usize; 5] = [0, 1, 7, 1023, 70_001];
/// Ranks, and how many of them are on a host: columns and chains of one to three.
const SPREAD: [(usize, usize); 4] = [(2, 1), (4, 2), (3, 1), (6, 3)];
const HOMES: [Home; 2] = [Home::Arena, Home::Plain];

fn everywhere(f: impl Fn(&dyn Collective, Home, usize) + Sync) {
    let every = |mesh: Mesh| {
        for (home, len) in HOMES.into_iter().flat_map(|home| LENS.map(|len| (home, len))) {
            f(&**mesh.group(Axis::Fsdp), home, len);
        }
    };
    for n in WORLDS {
        world(n, every);
    }
    for (n, per_host) in SPREAD {
        spread(MeshSizes::sharded(n), per_host, 60_000, every);
    }
}

fn gathers<E: Elem + PartialEq + std::fmt::Debug>(value: impl Fn(usize) -> E + Sync) {
    everywhere(|g, home, len| {
        let (n, me) = (g.size(), g.rank());
        let mut shard = plain(E::DTYPE, len);
        let mut full = buffer(home, g, E::DTYPE, len * n, CommUse::Gathered);
        for round in 0..3 {
            fill(&mut shard, |i| value(me * len + i + round));
            let t = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
            g.wait(t).unwrap();
            g.wait(t).unwrap();
            expect(&full, |i| value(i + round));
            g.release(t).unwrap();
            g.release(t).unwrap();
        }
    });
}

#[test]
fn all_gather_puts_every_shard_in_its_place() {
    gathers(|i| i as f32);
    gathers(|i| i as u8);
}
#[test]
fn all_gather_moves_other_dtypes() {
    gathers(|i| bf16::from_f32((i % 256) as f32));
    gathers(|i| f16::from_f32((i % 2048) as f32));
    gathers(|i| i as f64);
    gathers(|i| -(i as i32));
}

#[test]
fn all_gather_into_part_of_a_buffer_leaves_the_rest() {
    world(3, |mesh| {
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let mut full = g.alloc(DType::F32, 100, CommUse::Gathered, Category::Slots).unwrap();
        let mut shard = plain(DType::F32, 5);
        fill(&mut shard, |i| (1 + me * 5 + i) as f32);
        for start in [10, 50] {
            let t = g.all_gather(T, shard.view(), full.view_mut().slice(start..start + 15)).unwrap();
            g.wait(t).unwrap();
            g.release(t).unwrap();
        }
        expect(&full, |i| match i {
            10..25 => (i - 9) as f32,
            50..65 => (i - 49) as f32,
            _ => 0.0,
        });
        g.barrier(T).unwrap();
    });
}

/// A content may be held for longer than the group remembers operations, and released before it is there.
#[test]
fn a_gathered_buffer_is_held_through_thousands_of_operations() {
    world(2, |mesh| {
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let mut full = g.alloc(DType::F32, 8, CommUse::Gathered, Category::Slots).unwrap();
        let mut shard = plain(DType::F32, 4);
        let mut value = plain(DType::F32, 1);
        fill(&mut shard, |_| me as f32);
        let held = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
        for _ in 0..3000 {
            let t = g.all_reduce(T, value.view_mut(), Reduce::Sum).unwrap();
            g.wait(t).unwrap();
        }
        g.wait(held).unwrap();
        expect(&full, |i| (i / 4) as f32);
        g.release(held).unwrap();
        for round in 1..100 {
            fill(&mut shard, |_| (round * 10 + me) as f32);
            let early = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
            g.release(early).unwrap();
            let next = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
            g.wait(next).unwrap();
            expect(&full, |i| (round * 10 + i / 4) as f32);
            g.release(next).unwrap();
            g.wait(early).unwrap();
        }
    });
}

/// Values whose sum depends on its order: rank order is what every strategy relies on.
fn rough(rank: usize, i: usize) -> f32 {
    let x = ((rank * 7919 + i * 104_729) % 1000) as f32 - 499.5;
    x * [1e-3, 1.0, 1e4][(rank + i) % 3]
}
fn in_rank_order(n: usize, i: usize) -> f32 {
    (1..n).fold(rough(0, i), |sum, r| sum + rough(r, i))
}

#[test]
fn reduce_scatter_sums_in_rank_order() {
    everywhere(|g, home, len| {
        let (n, me) = (g.size(), g.rank());
        let mut full = buffer(home, g, DType::F32, len * n, CommUse::Reduced);
        let mut shard = plain(DType::F32, len);
        for accumulate in [false, true, false] {
            fill(&mut full, |i| rough(me, i));
            let t = g.reduce_scatter(T, full.view_mut(), shard.view_mut(), accumulate).unwrap();
            g.wait(t).unwrap();
            g.wait_sent(t).unwrap();
            fill(&mut full, |_| f32::NAN); // ours again
            expect(&shard, |i| {
                let sum = in_rank_order(n, me * len + i);
                if accumulate { sum + sum } else { sum }
            });
        }
    });
}

#[test]
fn all_reduce_sums_in_rank_order_on_every_rank() {
    everywhere(|g, home, len| {
        let (n, me) = (g.size(), g.rank());
        let mut buf = buffer(home, g, DType::F32, len, CommUse::Reduced);
        let mut wide = buffer(home, g, DType::F64, len, CommUse::Reduced);
        for _ in 0..2 {
            fill(&mut buf, |i| rough(me, i));
            fill(&mut wide, |i| rough(me, i) as f64 / 3.0);
            let a = g.all_reduce(T, buf.view_mut(), Reduce::Sum).unwrap();
            let b = g.all_reduce(T, wide.view_mut(), Reduce::Sum).unwrap();
            g.wait(b).unwrap();
            g.wait(a).unwrap();
            expect(&buf, |i| in_rank_order(n, i));
            expect(&wide, |i| (1..n).fold(rough(0, i) as f64 / 3.0, |sum, r| sum + rough(r, i) as f64 / 3.0));
        }
    });
}

/// As [`rough`] after the rounding of a narrow dtype: at most 5e6 becomes 5e4, which f16 holds.
fn narrow<T: Float>(rank: usize, i: usize) -> T {
    T::from_f32(rough(rank, i) * 0.01)
}
/// In f32, in rank order, not rounded.
fn narrow_sum<T: Float>(n: usize, i: usize) -> f32 {
    (1..n).fold(narrow::<T>(0, i).to_f32(), |sum, r| sum + narrow::<T>(r, i).to_f32())
}

/// Sums of narrow elements into shards of the same dtype, rounded once at the end, and of f32, not rounded at all.
fn scatters_narrow<T: Float + std::fmt::Debug>() {
    everywhere(|g, home, len| {
        let (n, me) = (g.size(), g.rank());
        let mut full = buffer(home, g, T::DTYPE, len * n, CommUse::Reduced);
        let (mut same, mut wide) = (plain(T::DTYPE, len), plain(DType::F32, len));
        let sum = |i: usize| narrow_sum::<T>(n, me * len + i);
        for accumulate in [false, true, true] {
            for shard in [&mut same, &mut wide] {
                fill(&mut full, |i| narrow::<T>(me, i));
                let before = g.stats().bytes;
                let t = g.reduce_scatter(T, full.view_mut(), shard.view_mut(), accumulate).unwrap();
                g.wait(t).unwrap();
                g.wait_sent(t).unwrap();
                assert_eq!(g.stats().bytes - before, ((n - 1) * len * T::DTYPE.size()) as u64);
                fill(&mut full, |_| T::from_f32(f32::NAN)); // ours again
            }
        }
        // The sum, thrice: rounded each time, or not.
        expect(&same, |i| {
            let once = T::from_f32(sum(i));
            let twice = T::from_f32(once.to_f32() + sum(i));
            T::from_f32(twice.to_f32() + sum(i))
        });
        expect(&wide, |i| sum(i) + sum(i) + sum(i));
    });
}
/// Every rank's bits are compared with the same expected ones.
fn reduces_narrow<T: Float + std::fmt::Debug>() {
    everywhere(|g, home, len| {
        let (n, me) = (g.size(), g.rank());
        let mut buf = buffer(home, g, T::DTYPE, len, CommUse::Reduced);
        for _ in 0..2 {
            fill(&mut buf, |i| narrow::<T>(me, i));
            g.wait(g.all_reduce(T, buf.view_mut(), Reduce::Sum).unwrap()).unwrap();
            expect(&buf, |i| T::from_f32(narrow_sum::<T>(n, i)));
        }
        fill(&mut buf, |i| if i == 3 && me == n / 2 { T::from_f32(f32::NAN) } else { narrow::<T>(me, i) });
        g.wait(g.all_reduce(T, buf.view_mut(), Reduce::Max).unwrap()).unwrap();
        for (i, x) in host::<T>(&buf).iter().enumerate() {
            let largest = (0..n).map(|r| narrow::<T>(r, i).to_f32()).fold(f32::NEG_INFINITY, f32::max);
            let x = x.to_f32();
            assert!(if i == 3 { x.is_nan() } else { x == largest }, "element {i}: {x}, largest is {largest}");
        }
    });
}
#[test]
fn reduce_scatter_of_narrow_elements_sums_in_f32() {
    scatters_narrow::<bf16>();
    scatters_narrow::<f16>();
}
#[test]
fn all_reduce_of_narrow_elements_sums_in_f32_and_rounds_once() {
    reduces_narrow::<bf16>();
    reduces_narrow::<f16>();
}
/// Beyond 65504 there is no number: the optimizer step learns of it by the norm.
#[test]
fn a_sum_beyond_f16_is_infinite_in_f16_and_finite_in_f32() {
    world(4, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let (mut full, mut same, mut wide) = (plain(DType::F16, 4), plain(DType::F16, 1), plain(DType::F32, 1));
        fill(&mut full, |_| f16::from_f32(20_000.0));
        g.wait(g.reduce_scatter(T, full.view_mut(), wide.view_mut(), false).unwrap()).unwrap();
        expect(&wide, |_| 80_000.0f32);
        g.wait(g.reduce_scatter(T, full.view_mut(), same.view_mut(), false).unwrap()).unwrap();
        expect(&same, |_| f16::INFINITY);
    });
}

#[test]
fn all_reduce_max_keeps_nan() {
    everywhere(|g, home, len| {
        let (n, me) = (g.size(), g.rank());
        let mut buf = buffer(home, g, DType::F32, len, CommUse::Reduced);
        fill(&mut buf, |i| if i == 3 && me == n / 2 { f32::NAN } else { rough(me, i) });
        let t = g.all_reduce(T, buf.view_mut(), Reduce::Max).unwrap();
        g.wait(t).unwrap();
        for (i, x) in host::<f32>(&buf).iter().enumerate() {
            let largest = (0..n).map(|r| rough(r, i)).fold(f32::NEG_INFINITY, f32::max);
            assert!(if i == 3 { x.is_nan() } else { *x == largest }, "element {i}: {x}, largest is {largest}");
        }
    });
}

#[test]
fn broadcast_copies_the_roots_values() {
    everywhere(|g, home, len| {
        let mut buf = buffer(home, g, DType::U32, len, CommUse::Reduced);
        for root in [0, g.size() - 1] {
            fill(&mut buf, |i| (i * 10 + g.rank()) as u32);
            let t = g.broadcast(T, buf.view_mut(), root).unwrap();
            g.wait(t).unwrap();
            expect(&buf, |i| (i * 10 + root) as u32);
        }
    });
}

/// A ring in which rank r sends len + r elements: lengths differ between the pairs.
#[test]
fn send_recv_shifts_along_a_ring() {
    shifts(|i| i as f32);
    shifts(|i| bf16::from_f32((i % 256) as f32));
    shifts(|i| f16::from_f32((i % 2048) as f32));
    shifts(|i| i as u32);
}
fn shifts<E: Elem + PartialEq + std::fmt::Debug>(value: impl Fn(usize) -> E + Sync) {
    everywhere(|g, home, len| {
        let (n, me) = (g.size(), g.rank());
        let (to, from) = ((me + 1) % n, (me + n - 1) % n);
        let mut send = buffer(home, g, E::DTYPE, len + n, CommUse::Reduced);
        let mut recv = plain(E::DTYPE, len + from);
        for round in 0..2 {
            fill(&mut send, |i| value(me * 1000 + i + round));
            let t = g.send_recv(T, to, send.view().slice(0..len + me), from, recv.view_mut()).unwrap();
            g.wait_sent(t).unwrap();
            fill(&mut send, |_| value(7)); // ours again
            g.wait(t).unwrap();
            expect(&recv, |i| value(from * 1000 + i + round));
        }
    });
}

/// One rank sends from a group buffer, another from its own memory.
#[test]
fn senders_choose_where_they_send_from() {
    const LEN: usize = 300_000; // more than a mailbox holds
    world(3, |mesh| {
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let (to, from) = ((me + 1) % 3, (me + 2) % 3);
        let mut shared = g.alloc(DType::F32, LEN + 7, CommUse::Reduced, Category::Other).unwrap();
        let (mut own, mut recv) = (plain(DType::F32, LEN + 7), plain(DType::F32, LEN));
        for round in 0..6 {
            let send = if (me + round) % 3 == 0 { &mut own } else { &mut shared };
            fill(send, |i| (me * 1_000_000 + i + round) as f32);
            let t = g.send_recv(T, to, send.view().slice(7..LEN + 7), from, recv.view_mut()).unwrap();
            g.wait_sent(t).unwrap();
            fill(send, |_| -1.0f32);
            g.wait(t).unwrap();
            expect(&recv, |i| (from * 1_000_000 + i + 7 + round) as f32);
        }
    });
}

/// From a buffer of the group a receiver helps itself, however long the sender computes.
#[test]
fn a_send_from_a_group_buffer_arrives_while_the_sender_computes() {
    const LEN: usize = 1 << 20;
    let arrived = std::sync::atomic::AtomicBool::new(false);
    world(2, |mesh| {
        use std::sync::atomic::Ordering::SeqCst;
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let mut send = g.alloc(DType::F32, LEN, CommUse::Reduced, Category::Other).unwrap();
        let mut recv = plain(DType::F32, LEN);
        fill(&mut send, |i| (me + i) as f32);
        g.barrier(T).unwrap();
        let t = g.send_recv(T, 1 - me, send.view(), 1 - me, recv.view_mut()).unwrap();
        if me == 0 {
            wait_until("it arrives at rank 1", || arrived.load(SeqCst)); // computes
        } else {
            g.wait(t).unwrap();
            expect(&recv, |i| i as f32);
            arrived.store(true, SeqCst);
        }
        g.wait(t).unwrap();
        g.wait_sent(t).unwrap();
    });
}

#[test]
fn no_rank_leaves_a_barrier_before_all_arrive() {
    let came = std::sync::atomic::AtomicUsize::new(0);
    world(5, |mesh| {
        for round in 1..=200 {
            came.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            mesh.group(Axis::World).barrier(Tag::new("round", round)).unwrap();
            assert!(came.load(std::sync::atomic::Ordering::SeqCst) >= 5 * round);
            mesh.group(Axis::World).barrier(Tag::new("round", round)).unwrap();
        }
    });
}

#[test]
fn bytes_are_counted_by_the_algorithm() {
    world(4, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let (mut full, mut shard) = (plain(DType::F32, 400), plain(DType::F32, 100));
        let t = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
        g.wait(t).unwrap();
        assert_eq!((g.stats().bytes, g.stats().ops), (1200, 1));
        let t = g.reduce_scatter(T, full.view_mut(), shard.view_mut(), false).unwrap();
        g.wait(t).unwrap();
        assert_eq!((g.stats().bytes, g.stats().ops), (2400, 2));
        let t = g.all_reduce(T, full.view_mut(), Reduce::Sum).unwrap();
        g.wait(t).unwrap();
        assert_eq!((g.stats().bytes, g.stats().ops), (4800, 3));
        let stats = g.stats();
        assert!(stats.in_flight_s > 0.0 && stats.exposed_s > 0.0, "{stats:?}");
    });
}

/// Rank 1 starts `LATE` after rank 0, which computes meanwhile, or waits. All of that is in flight; exposed is what
/// passes in calls.
#[test]
fn time_in_flight_is_not_exposed_time() {
    const LATE: f64 = 0.1;
    for computes in [true, false] {
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        let started = AtomicUsize::new(0);
        let times = world(2, |mesh| {
            let (g, first) = (&**mesh.group(Axis::Fsdp), mesh.rank() == 0);
            let mut full = g.alloc(DType::F32, 64, CommUse::Gathered, Category::Other).unwrap();
            let shard = plain(DType::F32, 32);
            g.barrier(T).unwrap();
            if !first {
                while started.load(SeqCst) == 0 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_secs_f64(LATE));
            }
            let (before, since) = (g.stats(), Instant::now());
            let t = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
            let compute = Instant::now();
            started.fetch_add(1, SeqCst);
            while first && computes && started.load(SeqCst) < 2 {
                std::thread::yield_now();
            }
            let outside = seconds(compute);
            g.wait(t).unwrap();
            g.release(t).unwrap();
            let (after, passed) = (g.stats(), seconds(since));
            [after.in_flight_s - before.in_flight_s, after.exposed_s - before.exposed_s, passed, outside]
        });
        let said = format!("computes: {computes}: in flight, exposed, passed, outside of calls: {times:?}");
        for [in_flight, exposed, passed, outside] in &times {
            // The gather of the rank that starts last is complete at once: it is never seen in flight.
            assert!(*in_flight <= *passed && 0.0 < *exposed && *exposed <= passed - outside, "{said}");
        }
        let [in_flight, exposed, _, outside] = times[0];
        assert!(in_flight >= LATE && exposed >= LATE - outside - LATE / 2.0, "{said}");
    }
}
