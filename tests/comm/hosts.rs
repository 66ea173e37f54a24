//! Groups over several simulated hosts, beyond what `values` tests. Ranks are threads, each host has its own arena, and
//! hosts communicate over TCP.
use super::stress::program;
use super::*;
use flatshard::comm::delayed::Delayed;
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, Member, Reduce};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const FOUR: MeshSizes = MeshSizes { dp_replicate: 1, dp_shard: 4, sp: 1, tp: 1, ep: 1 };

#[test]
fn random_programs_over_hosts_under_delays() {
    for (i, (n, per_host)) in [(4, 2), (3, 1), (6, 2), (2, 1), (4, 2)].into_iter().enumerate() {
        let seed = 2000 + i as u64;
        spread(MeshSizes::sharded(n), per_host, 60_000, |mesh| match i {
            0..3 => program(&**mesh.group(Axis::Fsdp), seed, 150),
            _ => {
                let g = Delayed::new(mesh.group(Axis::Fsdp).clone(), seed, &Seam::ALL, Duration::from_millis(4));
                program(&g, seed, 50);
            }
        });
    }
}

/// Groups of one host and groups of several, in flight at once and waited for in opposite orders: a rank that waits for
/// its worker still moves its host's groups on.
#[test]
fn groups_of_a_host_and_of_several_do_not_wait_for_each_other() {
    let sizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };
    spread(sizes, 2, 60_000, |mesh| {
        let (inside, across, me) = (&**mesh.group(Axis::DpShard), &**mesh.group(Axis::DpReplicate), mesh.rank());
        let mut full = inside.alloc(DType::F32, 200_000, CommUse::Reduced, Category::Other).unwrap();
        let (mut shard, mut sum) = (plain(DType::F32, 100_000), plain(DType::F32, 100_000));
        for round in 0..50 {
            fill(&mut full, |i| (i % 100 + me) as f32);
            fill(&mut sum, |i| (i % 10 * me) as f32);
            let a = inside.reduce_scatter(Tag::new("in", round), full.view_mut(), shard.view_mut(), false).unwrap();
            let b = across.all_reduce(Tag::new("across", round), sum.view_mut(), Reduce::Sum).unwrap();
            if me % 2 == 0 {
                across.wait(b).unwrap();
                inside.wait(a).unwrap();
            } else {
                inside.wait(a).unwrap();
                across.wait(b).unwrap();
            }
            inside.wait_sent(a).unwrap();
            expect(&shard, |i| (2 * (i % 100) + 4 * (me / 2) + 1) as f32);
            expect(&sum, |i| (i % 10 * (2 * (me % 2) + 2)) as f32);
        }
    });
}

#[test]
fn one_gathered_buffer_per_host_and_each_byte_crosses_once() {
    let meters = meters(4);
    let options = shm::ShmOptions { timeout: Duration::from_secs(60) };
    let crossed = run(several::threads(FOUR, 2, &meters, &options).unwrap(), |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut full = g.alloc(DType::F32, 40_000, CommUse::Gathered, Category::Slots).unwrap();
        let shard = plain(DType::F32, 10_000);
        assert_eq!(meters[mesh.rank()].live(Category::Slots), 80_000); // half of it, on a host of two
        let before = g.stats();
        let t = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
        g.wait(t).unwrap();
        g.release(t).unwrap();
        assert_eq!(g.stats().bytes - before.bytes, 120_000);
        let crossed = g.stats().crossed - before.crossed;
        // From a buffer that the host does not share it is no more.
        let mut own = plain(DType::F32, 40_000);
        let before = g.stats().crossed;
        g.wait(g.all_gather(T, shard.view(), own.view_mut()).unwrap()).unwrap();
        assert_eq!(g.stats().crossed - before, crossed);
        g.barrier(T).unwrap();
        crossed
    });
    // The shard, and 64 bytes that say which operation it is.
    assert_eq!(crossed, [40_064; 4]);
}

/// Two partial sums forward from the first host, one whole sum back from the second: f32, whatever is summed.
#[test]
fn a_chain_sends_partial_sums() {
    let crossed = spread(FOUR, 2, 60_000, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut full = g.alloc(DType::Bf16, 40_000, CommUse::Reduced, Category::Slots).unwrap();
        let mut shard = plain(DType::F32, 10_000);
        let t = g.reduce_scatter(T, full.view_mut(), shard.view_mut(), false).unwrap();
        g.wait(t).unwrap();
        g.wait_sent(t).unwrap();
        g.stats().crossed
    });
    assert_eq!(crossed, [80_064, 80_064, 40_064, 40_064]);
}

/// Each rank's error when one of them does something else.
type Told = fn(&dyn Collective, bool) -> String;

#[test]
fn operations_that_differ_between_hosts_name_both_ranks() {
    let cases: [(&str, Told); 3] = [
        ("called all_gather (params 4) of 10 f32", |g, odd| {
            let (mut full, mut part) = (plain(DType::F32, 40), plain(DType::F32, 10));
            error(
                match odd {
                    true => g.reduce_scatter(Tag::new("grads", 5), full.view_mut(), part.view_mut(), false),
                    false => g.all_gather(Tag::new("params", 4), part.view(), full.view_mut()),
                }
                .and_then(|t| g.wait(t)),
            )
        }),
        ("all_reduce (test 0) of 11 f32", |g, odd| {
            let mut buf = plain(DType::F32, 10 + usize::from(odd));
            error(g.all_reduce(T, buf.view_mut(), Reduce::Sum).and_then(|t| g.wait(t)))
        }),
        ("send_recv (test 0) of 5 f32 to", |g, odd| {
            let (send, mut recv) = (plain(DType::F32, 5), plain(DType::F32, 5 + usize::from(odd)));
            let (n, me) = (g.size(), g.rank());
            let t = g.send_recv(T, (me + 1) % n, send.view(), (me + n - 1) % n, recv.view_mut());
            // A pair that fits has done its part: others hear of it in what comes next.
            error(t.and_then(|t| g.wait(t)).and_then(|()| g.barrier(T)))
        }),
    ];
    for (expected, start) in cases {
        let errors = spread(FOUR, 2, 5_000, |mesh| {
            let text = start(&**mesh.group(Axis::Fsdp), mesh.rank() == 2);
            mesh.member.abort(); // as a run does with an error
            text
        });
        // Whoever compares first says so; the others hear that somebody failed.
        assert!(errors.iter().any(|text| text.contains("differs: rank") && text.contains(expected)), "{errors:?}");
        assert!(errors.iter().all(|text| text.contains("differs: rank") || text.contains("failed")), "{errors:?}");
    }
}

#[test]
fn a_missing_rank_of_another_host_is_named() {
    let errors = spread(FOUR, 2, 1_000, |mesh| {
        if mesh.rank() == 2 {
            while mesh.member.failed().is_none() {
                std::thread::sleep(Duration::from_millis(10)); // computes
            }
            return String::new();
        }
        let mut buf = plain(DType::F32, 10);
        let text = error(
            mesh.group(Axis::Fsdp)
                .all_reduce(Tag::new("loss", 3), buf.view_mut(), Reduce::Sum)
                .and_then(|t| mesh.group(Axis::Fsdp).wait(t)),
        );
        mesh.member.abort();
        text
    });
    // Rank 0 is of its column; rank 3 of its host.
    assert!(errors[0].contains("s from rank 2 on host1") || errors[0].contains("failed"), "{errors:?}");
    assert!(
        errors.iter().any(|text| text.contains("no answer within ") && text.contains("s from rank 2")),
        "{errors:?}"
    );
}

#[test]
fn an_operation_started_early_may_be_in_flight_longer_than_the_timeout() {
    const TIMEOUT: u64 = 1_000;
    let started = AtomicBool::new(false);
    spread(FOUR, 2, TIMEOUT, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut buf = plain(DType::F32, 10);
        g.barrier(T).unwrap();
        if mesh.rank() == 3 {
            std::thread::sleep(scaled(TIMEOUT + 300));
        }
        let t = g.all_reduce(T, buf.view_mut(), Reduce::Sum).unwrap();
        started.fetch_or(mesh.rank() == 3, SeqCst);
        wait_until("rank 3 has started it", || started.load(SeqCst)); // computes
        g.wait(t).unwrap();
    });
}

#[test]
fn an_abort_reaches_every_host_at_once() {
    let sizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };
    let ends = |mesh: Mesh| {
        if mesh.rank() == 3 {
            std::thread::sleep(Duration::from_millis(200));
            mesh.member.abort();
            return String::new();
        }
        // Asleep in a group of the own host, and in groups of both.
        let g = mesh.group([Axis::World, Axis::DpReplicate, Axis::DpShard][mesh.rank()]);
        error(g.barrier(T))
    };
    let errors = in_time(|| spread(sizes, 2, 600_000, ends));
    for text in &errors[..3] {
        assert!(text.ends_with("rank 3 failed") || text.ends_with("rank 3 on host1 failed"), "{text}");
    }
}

#[test]
fn a_panicking_rank_ends_the_others_on_every_host() {
    let options = shm::ShmOptions { timeout: Duration::from_secs(600) };
    let meshes = several::threads(FOUR, 2, &meters(4), &options).unwrap();
    let results = in_time(|| one_panics(meshes));
    assert!(results[1].is_err());
    for rank in [0, 2, 3] {
        assert!(results[rank].as_ref().unwrap().contains("rank 1 on host0"), "{:?}", results[rank]);
    }
}

#[test]
fn misuse_is_refused_before_anything_starts() {
    spread(FOUR, 2, 60_000, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let (mut a, mut b) = (plain(DType::F32, 10), plain(DType::F32, 41));
        assert!(error(g.all_gather(T, a.view(), b.view_mut())).contains("4 shards of 10 are 40"));
        assert!(error(g.reduce_scatter(T, b.view_mut(), a.view_mut(), false)).contains("full has 41 elements"));
        assert!(error(g.broadcast(T, a.view_mut(), 4)).contains("no rank 4 in a group of 4"));
        assert!(error(g.send_recv(T, 0, a.view(), 5, b.view_mut())).contains("no rank 5"));
        let mut shared = g.alloc(DType::F32, 8, CommUse::Gathered, Category::Other).unwrap();
        assert!(error(g.all_reduce(T, shared.view_mut(), Reduce::Sum)).contains("share"));
        let (part, half) = (plain(DType::F32, 2), plain(DType::F32, 1));
        assert!(error(mesh.group(Axis::World).all_gather(T, part.view(), shared.view_mut())).contains("share"));
        let t = g.all_gather(Tag::new("unit", 1), part.view(), shared.view_mut()).unwrap();
        let text = error(g.all_gather(T, half.view(), shared.view_mut().slice(4..8)));
        assert!(text.contains("not released") && text.contains("unit 1"), "{text}");
        assert!(error(mesh.group(Axis::World).wait(t)).contains("not from this group"));
        g.wait(t).unwrap();
        g.release(t).unwrap();
        g.barrier(T).unwrap();
    });
}

/// Three ranks a host and groups of two: one of them has a rank on each side.
#[test]
fn a_group_spread_unevenly_over_hosts_is_refused() {
    let sizes = MeshSizes { dp_replicate: 1, dp_shard: 3, sp: 1, tp: 2, ep: 1 };
    let options = shm::ShmOptions { timeout: Duration::from_secs(60) };
    let text = several::threads(sizes, 3, &meters(6), &options).err().unwrap().to_string();
    assert!(text.contains("is spread unevenly over hosts"), "{text}");
    assert_eq!(sizes.group(Axis::DpShard, 0), [0, 2, 4]);
}

/// What a member knows of the world.
#[test]
fn members_know_the_whole_world() {
    spread(FOUR, 2, 60_000, |mesh| {
        let member: &dyn Member = &*mesh.member;
        assert_eq!((member.size(), member.rank() < 4, member.failed()), (4, true, None));
    });
}
