//! The all_to_all: uneven, empty and reordered parts over one and several hosts, from buffers that peers can read and
//! from others; what it counts; what it refuses.
use super::*;
use flatshard::comm::Axis;
use flatshard::comm::flight::Flight;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use half::bf16;
use std::ops::Range;

/// Elements that `from` sends to `to`: none for some pairs, and more than a mailbox holds for one.
fn count(from: usize, to: usize, round: usize) -> usize {
    match (from * 5 + to * 3 + round) % 7 {
        0 => 0,
        6 => 70_001,
        k => k * 37 + to,
    }
}
/// Parts of these lengths, the last rank's first, with a gap of `gap` elements in front of each.
fn parts(n: usize, gap: usize, len: impl Fn(usize) -> usize) -> (Vec<Range<usize>>, usize) {
    let (mut parts, mut at) = (vec![0..0; n], 0);
    for rank in (0..n).rev() {
        let start = at + gap;
        at = start + len(rank);
        parts[rank] = start..at;
    }
    (parts, at)
}

fn trades<E: Elem + PartialEq + std::fmt::Debug>(value: impl Fn(usize) -> E + Sync) {
    let every = |mesh: Mesh| {
        let (g, n, me) = (&**mesh.group(Axis::Fsdp), mesh.group(Axis::Fsdp).size(), mesh.group(Axis::Fsdp).rank());
        for home in [Home::Arena, Home::Plain] {
            for round in 0..4 {
                let (sends, sent) = parts(n, 3, |r| count(me, r, round));
                let (recvs, got) = parts(n, 5, |r| count(r, me, round));
                let largest = (0..n).map(|r| parts(n, 3, |to| count(r, to, round)).1).max().unwrap();
                let mut send = buffer(home, g, E::DTYPE, largest, CommUse::Reduced);
                let mut recv = plain(E::DTYPE, got);
                fill(&mut recv, |_| value(9));
                fill(&mut send, |i| value(me * 1000 + i));
                let before = g.stats().bytes;
                let t = g.all_to_all(T, send.view().slice(0..sent), &sends, recv.view_mut(), &recvs).unwrap();
                let others: usize = (0..n).filter(|&r| r != me).map(|r| count(r, me, round)).sum();
                assert_eq!(g.stats().bytes - before, (others * E::DTYPE.size()) as u64);
                g.wait_sent(t).unwrap();
                fill(&mut send, |_| value(7)); // ours again
                g.wait(t).unwrap();
                let start_at = |from: usize| parts(n, 3, |to| count(from, to, round)).0[me].start;
                expect(&recv, |i| match recvs.iter().position(|part| part.contains(&i)) {
                    Some(from) => value(from * 1000 + start_at(from) + i - recvs[from].start),
                    None => value(9),
                });
            }
        }
    };
    for n in [1, 2, 3, 5, 8] {
        world(n, every);
    }
    for (n, per_host) in [(2, 1), (4, 2), (3, 1), (6, 3), (6, 2)] {
        spread(MeshSizes::sharded(n), per_host, 60_000, every);
    }
}

#[test]
fn every_part_reaches_its_rank_and_its_place() {
    trades(|i| i as f32);
    trades(|i| (i % 251) as u8);
}
#[test]
fn other_dtypes_are_traded_too() {
    trades(|i| bf16::from_f32((i % 256) as f32));
    trades(|i| i as u32);
}

/// Equal parts, one range for all ranks on the sending side: everyone gets everything, as from an all_gather.
#[test]
fn ranges_of_the_input_may_overlap() {
    world(4, |mesh| {
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let mut send = g.alloc(DType::F32, 10, CommUse::Reduced, Category::Other).unwrap();
        let mut recv = plain(DType::F32, 40);
        fill(&mut send, |i| (me * 10 + i) as f32);
        let recvs: Vec<_> = (0..4).map(|r| r * 10..r * 10 + 10).collect();
        let t = g.all_to_all(T, send.view(), &vec![0..10; 4], recv.view_mut(), &recvs).unwrap();
        g.wait(t).unwrap();
        g.wait_sent(t).unwrap();
        expect(&recv, |i| i as f32);
    });
}

/// One rank sends from a group buffer, another from its own memory, with other operations in flight.
#[test]
fn senders_of_an_all_to_all_choose_where_they_send_from() {
    const LEN: usize = 100_000;
    world(3, |mesh| {
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let mut shared = g.alloc(DType::F32, 3 * LEN, CommUse::Reduced, Category::Other).unwrap();
        let (mut own, mut recv) = (plain(DType::F32, 3 * LEN), plain(DType::F32, 3 * LEN));
        let (mut sum, thirds) = (plain(DType::F32, LEN), [0..LEN, LEN..2 * LEN, 2 * LEN..3 * LEN]);
        for round in 0..9 {
            let send = if round < 6 && (me + round) % 3 == 0 { &mut own } else { &mut shared };
            fill(send, |i| (me * 1000 + i % 100 + round) as f32);
            fill(&mut sum, |i| (i % 10) as f32);
            let a = g.all_reduce(Tag::new("sum", round), sum.view_mut(), flatshard::comm::Reduce::Sum).unwrap();
            let t = g.all_to_all(Tag::new("trade", round), send.view(), &thirds, recv.view_mut(), &thirds).unwrap();
            g.wait(t).unwrap();
            expect(&recv, |i| (i / LEN * 1000 + (me * LEN + i % LEN) % 100 + round) as f32);
            g.wait_sent(t).unwrap();
            fill(send, |_| -1.0f32);
            g.wait(a).unwrap();
            expect(&sum, |i| (i % 10 * 3) as f32);
        }
    });
}

/// From a buffer of the group a receiver copies while the sender computes: no communication thread is needed.
#[test]
fn an_all_to_all_from_group_buffers_needs_only_its_receiver() {
    let arrived = std::sync::atomic::AtomicBool::new(false);
    world(2, |mesh| {
        use std::sync::atomic::Ordering::SeqCst;
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let mut send = g.alloc(DType::F32, 1 << 20, CommUse::Reduced, Category::Other).unwrap();
        let mut recv = plain(DType::F32, 1 << 20);
        let halves = [0..1 << 19, 1 << 19..1 << 20];
        fill(&mut send, |i| (me * 7 + i % 1000) as f32);
        g.barrier(T).unwrap();
        let t = g.all_to_all(T, send.view(), &halves, recv.view_mut(), &halves).unwrap();
        match me {
            0 => wait_until("it arrives at rank 1", || arrived.load(SeqCst)), // computes
            _ => {
                g.wait(t).unwrap();
                arrived.store(true, SeqCst);
            }
        }
        g.wait(t).unwrap();
        g.wait_sent(t).unwrap();
        expect(&recv, |i| (i / (1 << 19) * 7 + ((i % (1 << 19)) + me * (1 << 19)) % 1000) as f32);
    });
}

#[test]
fn lengths_that_differ_name_both_ranks_and_both_lengths() {
    let start = |g: &dyn Collective, odd: bool| {
        let (n, me) = (g.size(), g.rank());
        let (send, mut recv) = (plain(DType::F32, 5 * n), plain(DType::F32, 6 * n));
        let sends: Vec<_> = (0..n).map(|r| r * 5..r * 5 + 5).collect();
        // The odd rank expects one more from rank 1.
        let recvs: Vec<_> = (0..n).map(|r| r * 6..r * 6 + 5 + usize::from(odd && r == 1 && me != 1)).collect();
        let t = g.all_to_all(Tag::new("dispatch", 3), send.view(), &sends, recv.view_mut(), &recvs);
        error(t.and_then(|t| g.wait(t)).and_then(|()| g.barrier(T)))
    };
    let check = |errors: Vec<String>| {
        let named = "rank 2 called all_to_all (dispatch 3) of 5 f32 to 1, 6 from 1";
        let other = "rank 1 called all_to_all (dispatch 3) of 5 f32 to 2, 5 from 2";
        assert!(errors.iter().any(|text| text.contains(named) && text.contains(other)), "{errors:?}");
        assert!(errors.iter().all(|text| text.contains("differs: rank") || text.contains("failed")), "{errors:?}");
    };
    let ends = |mesh: Mesh| {
        let text = start(&**mesh.group(Axis::Fsdp), mesh.rank() == 2);
        mesh.member.abort(); // as a run does with an error
        text
    };
    check(impatient(3, 5_000, ends));
    check(spread(MeshSizes::sharded(4), 2, 5_000, ends));
}

#[test]
fn wrong_parts_are_refused_before_anything_starts() {
    let every = |mesh: Mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let (send, mut recv, mut other) = (plain(DType::F32, 10), plain(DType::F32, 10), plain(DType::U32, 10));
        let halves = [0..5, 5..10];
        assert!(error(g.all_to_all(T, send.view(), &halves, other.view_mut(), &halves)).contains("from f32 into u32"));
        let text = error(g.all_to_all(T, send.view(), &halves[..1], recv.view_mut(), &halves));
        assert!(text.contains("1 parts of send in a group of 2"), "{text}");
        let text = error(g.all_to_all(T, send.view(), &halves, recv.view_mut(), &[0..5, 5..11]));
        assert!(text.contains("recv has 10 elements, but the part of rank 1 is 5..11"), "{text}");
        let me = mesh.rank();
        let own = |len: usize| (0..2).map(|r| if r == me { 0..len } else { 0..0 }).collect::<Vec<_>>();
        let text = error(g.all_to_all(T, send.view(), &own(4), recv.view_mut(), &own(5)));
        assert!(text.contains("4 elements into 5"), "{text}");
        let mut shared = g.alloc(DType::F32, 10, CommUse::Gathered, Category::Other).unwrap();
        assert!(error(g.all_to_all(T, send.view(), &halves, shared.view_mut(), &halves)).contains("share"));
        g.barrier(T).unwrap();
    };
    world(2, every);
    spread(MeshSizes::sharded(2), 1, 60_000, every);
}

#[test]
fn a_rank_missing_from_an_all_to_all_is_named() {
    let ends = |mesh: Mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let until_failure = || {
            while mesh.member.failed().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        if mesh.rank() == 2 {
            until_failure(); // computes
            return String::new();
        }
        let (send, mut recv) = (plain(DType::F32, 4), plain(DType::F32, 4));
        let ones: Vec<_> = (0..4).map(|r| r..r + 1).collect();
        let t = g.all_to_all(Tag::new("dispatch", 3), send.view(), &ones, recv.view_mut(), &ones);
        let text = error(t.and_then(|t| g.wait(t)));
        // Over hosts, rank 3 waits for rank 0, which waits for rank 2: whose patience ends first is chance.
        if !text.contains("from rank 2") {
            until_failure();
        }
        mesh.member.abort();
        text
    };
    for errors in [impatient(4, 1_000, ends), spread(MeshSizes::sharded(4), 2, 1_000, ends)] {
        let named = |text: &String| text.contains("all_to_all on fsdp (dispatch 3)") && text.contains("from rank 2");
        assert!(errors.iter().any(named), "{errors:?}");
        let told = |text: &String| text.contains("no answer within") || text.contains("failed");
        assert!(errors.iter().all(|text| text.is_empty() || told(text)), "{errors:?}");
    }
}

/// Parts go straight to their receivers: each byte crosses to another host once, with 64 bytes per pair of ranks.
#[test]
fn each_byte_of_an_all_to_all_crosses_once() {
    let crossed = spread(MeshSizes::sharded(4), 2, 60_000, |mesh| {
        let (g, me) = (&**mesh.group(Axis::Fsdp), mesh.rank());
        let (send, mut recv) = (plain(DType::F32, 4000), plain(DType::F32, 8000));
        let sends: Vec<_> = (0..4).map(|r| r * 500..r * 500 + 100 * (r + me)).collect();
        let recvs: Vec<_> = (0..4).map(|r| r * 1000..r * 1000 + 100 * (r + me)).collect();
        g.wait(g.all_to_all(T, send.view(), &sends, recv.view_mut(), &recvs).unwrap()).unwrap();
        g.stats().crossed
    });
    let bytes = |me: u64, there: [u64; 2]| 128 + there.map(|r| 400 * (r + me)).iter().sum::<u64>();
    assert_eq!(crossed, [bytes(0, [2, 3]), bytes(1, [2, 3]), bytes(2, [0, 1]), bytes(3, [0, 1])]);
}

/// Ranks record the bytes that they receive, and have the same schedule nevertheless.
#[test]
fn schedules_agree_where_parts_differ() {
    let seen = world(3, |mesh| {
        let (me, flight, log) = (mesh.rank(), Flight::default(), Log::default());
        let watched = flight.watch(mesh);
        let g = Recorder::new(watched.group(Axis::Fsdp).clone(), log.clone());
        let (send, mut recv) = (plain(DType::Bf16, 30), plain(DType::Bf16, 30));
        let sends: Vec<_> = (0..3).map(|r| r * 10..r * 10 + r * 2).collect();
        let recvs: Vec<_> = (0..3).map(|r| r * 10..r * 10 + me * 2).collect();
        g.wait(g.all_to_all(Tag::new("dispatch", 5), send.view(), &sends, recv.view_mut(), &recvs).unwrap()).unwrap();
        let op = flight.ops().pop().unwrap();
        assert_eq!((op.op.as_str(), op.what.as_str(), op.unit), ("all_to_all", "dispatch", 5));
        assert_eq!((op.bytes, log.entries()[0].bytes, log.count(Seam::AllToAll)), (8 * me, 8 * me, 1));
        g.barrier(T).unwrap();
        flight.schedule()
    });
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "{seen:?}");
}
