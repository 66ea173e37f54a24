//! Random programs: many operations of all kinds in flight, finished in a different order on each rank, under delays.
use super::*;
use flatshard::base::rng::Rng;
use flatshard::comm::delayed::Delayed;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, Reduce, Ticket};

/// Small integers: sums of them are exact in any order.
fn value(op: usize, rank: usize, i: usize) -> f32 {
    ((op * 31 + rank * 17 + i * 7) % 1000) as f32
}
fn sum(n: usize, op: usize, i: usize) -> f32 {
    (0..n).map(|r| value(op, r, i)).sum()
}

#[derive(Clone, Copy, Debug)]
enum What {
    Gather,
    ReduceScatter,
    AllReduce,
    Broadcast { root: usize },
    Shift { by: usize },
    Trade,
}

struct Flight {
    op: usize,
    what: What,
    len: usize,
    ticket: Ticket,
    slot: usize,
    full: Buf,
    shard: Buf,
}

/// Every rank draws the same operations and its own order of finishing them.
pub fn program(g: &dyn Collective, seed: u64, ops: usize) {
    let (n, me) = (g.size(), g.rank());
    let (shared, own) = (Rng::new(seed, 1_000_000), Rng::new(seed, me as u64));
    const LARGEST: usize = 20_000;
    let mut gathered: Vec<Option<Buf>> =
        (0..3).map(|_| Some(buffer(Home::Arena, g, DType::F32, LARGEST * n, CommUse::Gathered))).collect();
    let mut reduced: Vec<Option<Buf>> =
        (0..3).map(|_| Some(buffer(Home::Arena, g, DType::F32, LARGEST * n, CommUse::Reduced))).collect();
    let mut flights: Vec<Flight> = vec![];
    let mut draws = 0;
    for op in 0..ops {
        let [kind, size, slot, other] = shared.words(op as u64).map(|w| w as usize);
        let len = match size % 4 {
            0 => size / 4 % 5,
            1 => size / 4 % LARGEST,
            _ => size / 4 % 500,
        };
        let what = match kind % 6 {
            0 => What::Gather,
            1 => What::ReduceScatter,
            2 => What::AllReduce,
            3 => What::Broadcast { root: other % n },
            4 => What::Shift { by: other % n },
            _ => What::Trade,
        };
        // Slots 0..3 are the arena's, others a plain buffer.
        let slot = slot % 5;
        let pool = if matches!(what, What::Gather) { &mut gathered } else { &mut reduced };
        if slot < 3 && pool[slot].is_none() {
            let same = |f: &Flight| f.slot == slot && matches!(f.what, What::Gather) == matches!(what, What::Gather);
            let at = flights.iter().position(same).unwrap();
            finish(g, flights.remove(at), &mut gathered, &mut reduced);
        }
        let pool = if matches!(what, What::Gather) { &mut gathered } else { &mut reduced };
        let mut full = if slot < 3 { pool[slot].take().unwrap() } else { plain(DType::F32, len * n) };
        let mut shard = plain(DType::F32, if matches!(what, What::Trade) { len * n } else { len });
        let tag = Tag::new("op", op);
        let ticket = match what {
            What::Gather => {
                fill(&mut shard, |i| value(op, me, i));
                g.all_gather(tag, shard.view(), full.view_mut().slice(0..len * n))
            }
            What::ReduceScatter => {
                fill_part(&mut full, len * n, |i| value(op, me, i));
                g.reduce_scatter(tag, full.view_mut().slice(0..len * n), shard.view_mut(), false)
            }
            What::AllReduce => {
                fill_part(&mut full, len, |i| value(op, me, i));
                g.all_reduce(tag, full.view_mut().slice(0..len), Reduce::Sum)
            }
            What::Broadcast { root } => {
                fill_part(&mut full, len, |i| value(op, me, i));
                g.broadcast(tag, full.view_mut().slice(0..len), root)
            }
            What::Shift { by } => {
                fill_part(&mut full, len, |i| value(op, me, i));
                let (to, from) = ((me + by) % n, (me + n - by) % n);
                g.send_recv(tag, to, full.view().slice(0..len), from, shard.view_mut())
            }
            What::Trade => {
                fill_part(&mut full, len * n, |i| value(op, me, i));
                let sends: Vec<_> = (0..n).map(|r| r * len..r * len + traded(op, len, me, r)).collect();
                let recvs: Vec<_> = (0..n).map(|r| r * len..r * len + traded(op, len, r, me)).collect();
                g.all_to_all(tag, full.view().slice(0..len * n), &sends, shard.view_mut(), &recvs)
            }
        };
        flights.push(Flight { op, what, len, ticket: ticket.unwrap(), slot, full, shard });
        // Finish some, of this rank's choice.
        while flights.len() > 8 || (!flights.is_empty() && own.words(draws)[1] % 3 == 0) {
            let at = own.words(draws)[0] as usize % flights.len();
            draws += 1;
            finish(g, flights.swap_remove(at), &mut gathered, &mut reduced);
        }
        draws += 1;
        if other % 50 == 0 {
            g.barrier(tag).unwrap();
        }
    }
    while !flights.is_empty() {
        let at = own.words(draws)[0] as usize % flights.len();
        draws += 1;
        finish(g, flights.swap_remove(at), &mut gathered, &mut reduced);
    }
}

/// Elements that one rank sends to another: at most `len`, often none.
fn traded(op: usize, len: usize, from: usize, to: usize) -> usize {
    (op * 13 + from * 3119 + to * 1789) % (2 * len + 1) % (len + 1)
}
fn fill_part(buf: &mut Buf, len: usize, f: impl Fn(usize) -> f32) {
    for (i, x) in buf.view_mut().host::<f32>("fill").unwrap()[..len].iter_mut().enumerate() {
        *x = f(i);
    }
}

fn finish(g: &dyn Collective, f: Flight, gathered: &mut [Option<Buf>], reduced: &mut [Option<Buf>]) {
    let Flight { op, what, len, ticket, slot, full, shard } = f;
    let (n, me) = (g.size(), g.rank());
    g.wait(ticket).unwrap();
    let check = |got: &[f32], want: &dyn Fn(usize) -> f32| {
        for (i, x) in got.iter().enumerate() {
            assert_eq!(*x, want(i), "rank {me} of {n}, operation {op} {what:?}, element {i} of {len}, slot {slot}");
        }
    };
    let (all, part) = (host::<f32>(&full), host::<f32>(&shard));
    match what {
        What::Gather => check(&all[..len * n], &|i| value(op, i / len, i % len)),
        What::ReduceScatter => check(part, &|i| sum(n, op, me * len + i)),
        What::AllReduce => check(&all[..len], &|i| sum(n, op, i)),
        What::Broadcast { root } => check(&all[..len], &|i| value(op, root, i)),
        What::Trade => {
            for from in 0..n {
                let got = &part[from * len..from * len + traded(op, len, from, me)];
                check(got, &|i| value(op, from, me * len + i));
            }
        }
        What::Shift { by } => check(part, &|i| value(op, (me + n - by) % n, i)),
    }
    match what {
        What::Gather => g.release(ticket).unwrap(),
        _ => g.wait_sent(ticket).unwrap(),
    }
    g.wait(ticket).unwrap();
    if slot < 3 {
        let pool = if matches!(what, What::Gather) { gathered } else { reduced };
        pool[slot] = Some(full);
    }
}

#[test]
fn random_programs() {
    for seed in 0..50 {
        let n = [2, 3, 4, 5, 8][seed as usize % 5];
        world(n, |mesh| program(&**mesh.group(Axis::Fsdp), seed, 300));
    }
}

#[test]
fn random_programs_under_delays_at_each_seam_then_all() {
    let mut cases: Vec<Vec<Seam>> = Seam::ALL.iter().map(|&s| vec![s]).collect();
    cases.push(Seam::ALL.to_vec());
    for (i, seams) in cases.iter().enumerate() {
        world(2 + i % 3, |mesh| {
            let g = Delayed::new(mesh.group(Axis::Fsdp).clone(), i as u64, seams, Duration::from_millis(4));
            program(&g, 1000 + i as u64, 60);
        });
    }
}

/// A rank that is more operations ahead than the ring holds waits, and does not overwrite what its peer has yet to
/// read.
#[test]
fn a_rank_far_ahead_waits_for_the_others() {
    const AHEAD: usize = 1500;
    world(2, |mesh| {
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let mut full = g.alloc(DType::F32, 2, CommUse::Gathered, Category::Other).unwrap();
        let mut shard = plain(DType::F32, 1);
        fill(&mut shard, |_| me as f32);
        let mut values = plain(DType::F32, AHEAD);
        fill(&mut values, |i| (i * (1 - me)) as f32);
        if me == 0 {
            std::thread::sleep(Duration::from_millis(100));
        }
        // Rank 1 starts it, then looks away: rank 0 finds it complete, and goes on.
        let gathered = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
        if me == 1 {
            std::thread::sleep(Duration::from_millis(400));
        }
        let started: Vec<Ticket> = (0..AHEAD)
            .map(|i| g.broadcast(Tag::new("ahead", i), values.view_mut().slice(i..i + 1), 0).unwrap())
            .collect();
        g.wait(gathered).unwrap();
        expect(&full, |i| i as f32);
        g.release(gathered).unwrap();
        for t in started.into_iter().rev() {
            g.wait(t).unwrap();
        }
        expect(&values, |i| i as f32);
    });
}

/// Two groups that share ranks, waits in opposite orders: blocked in one group, a rank moves the other one on.
#[test]
fn waiting_in_one_group_progresses_the_others() {
    world(3, |mesh| {
        let (a, b, me) = (&**mesh.group(Axis::World), &**mesh.group(Axis::Fsdp), mesh.rank());
        let mut x = a.alloc(DType::F32, 30, CommUse::Gathered, Category::Other).unwrap();
        let shard = plain(DType::F32, 10);
        let mut y = plain(DType::F32, 100_000 * 3);
        let mut z = plain(DType::F32, 100_000);
        for round in 0..50 {
            let t = a.all_gather(Tag::new("x", round), shard.view(), x.view_mut()).unwrap();
            let u = b.reduce_scatter(Tag::new("y", round), y.view_mut(), z.view_mut(), false).unwrap();
            let v = b.all_gather(Tag::new("z", round), z.view(), y.view_mut()).unwrap();
            if me == round % 3 {
                b.wait(v).unwrap();
                b.wait(u).unwrap();
                a.wait(t).unwrap();
            } else {
                a.wait(t).unwrap();
                std::thread::yield_now();
                b.wait(u).unwrap();
                b.wait(v).unwrap();
            }
            a.release(t).unwrap();
        }
    });
}

#[test]
fn the_recorder_keeps_calls_in_order() {
    world(2, |mesh| {
        let log = Log::default();
        let g = Recorder::new(mesh.group(Axis::Fsdp).clone(), log.clone());
        let mut full = g.alloc(DType::F32, 64, CommUse::Gathered, Category::Other).unwrap();
        let shard = plain(DType::F32, 32);
        let tag = Tag::new("params", 7);
        let t = g.all_gather(tag, shard.view(), full.view_mut()).unwrap();
        log.note(Tag::new("compute", 6));
        g.wait(t).unwrap();
        g.release(t).unwrap();
        let entries = log.entries();
        let seams: Vec<_> = entries.iter().map(|e| e.seam).collect();
        let expected = [Some(Seam::Alloc), Some(Seam::AllGather), None, Some(Seam::Wait), Some(Seam::Release)];
        assert_eq!(seams, expected);
        assert!(entries[1..2].iter().chain(&entries[3..]).all(|e| e.tag == tag), "{entries:?}");
        assert_eq!((entries[1].bytes, log.count(Seam::Wait)), (256, 1));
        assert_eq!((log.find(0, Seam::Release, tag), log.find(2, Seam::AllGather, tag)), (Some(4), None));
    });
}
