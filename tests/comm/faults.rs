//! Misuse, missing ranks and failing ranks: each ends in a clear error, never in a hang.
use super::*;
use flatshard::comm::{Axis, Reduce};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

#[test]
fn wrong_lengths_and_dtypes_are_refused_before_anything_starts() {
    world(2, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let (mut a, mut b) = (plain(DType::F32, 10), plain(DType::F32, 21));
        let text = error(g.all_gather(Tag::new("params", 3), a.view(), b.view_mut()));
        assert!(text.contains("all_gather on fsdp (params 3)") && text.contains("full has 21 elements"), "{text}");
        assert!(text.contains("2 shards of 10 are 20"), "{text}");
        let text = error(g.reduce_scatter(T, b.view_mut(), a.view_mut(), false));
        assert!(text.contains("full has 21 elements"), "{text}");
        let mut u = plain(DType::U32, 20);
        assert!(error(g.all_gather(T, a.view(), u.view_mut())).contains("from f32 into u32"));
        assert!(error(g.all_reduce(T, u.view_mut(), Reduce::Sum)).contains("Sum of u32"));
        // Into a narrower dtype, or from one narrow dtype into the other.
        let (mut c, mut d) = (plain(DType::F32, 20), plain(DType::Bf16, 10));
        assert!(error(g.reduce_scatter(T, c.view_mut(), d.view_mut(), false)).contains("from f32 into bf16"));
        let mut c = plain(DType::F16, 20);
        assert!(error(g.reduce_scatter(T, c.view_mut(), d.view_mut(), false)).contains("from f16 into bf16"));
        assert!(error(g.broadcast(T, a.view_mut(), 2)).contains("no rank 2 in a group of 2"));
        assert!(error(g.send_recv(T, 0, a.view(), 5, b.view_mut())).contains("no rank 5"));
        // Nothing was started: the group is still usable.
        g.barrier(T).unwrap();
    });
}

#[test]
fn a_buffer_shared_by_all_ranks_is_only_gathered_into() {
    world(2, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut shared = g.alloc(DType::F32, 8, CommUse::Gathered, Category::Other).unwrap();
        assert!(error(g.all_reduce(T, shared.view_mut(), Reduce::Sum)).contains("share"));
        assert!(error(g.broadcast(T, shared.view_mut(), 0)).contains("share"));
        // Also by another group of the same rank.
        let shard = plain(DType::F32, 4);
        assert!(error(mesh.group(Axis::World).all_gather(T, shard.view(), shared.view_mut())).contains("share"));
        g.barrier(T).unwrap();
    });
}

#[test]
fn gathering_over_contents_that_were_not_released_is_refused() {
    world(2, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut full = g.alloc(DType::F32, 8, CommUse::Gathered, Category::Other).unwrap();
        let shard = plain(DType::F32, 4);
        let first = g.all_gather(Tag::new("unit", 1), shard.view(), full.view_mut()).unwrap();
        g.wait(first).unwrap();
        let half = plain(DType::F32, 1);
        let text = error(g.all_gather(Tag::new("unit", 2), half.view(), full.view_mut().slice(6..8)));
        assert!(text.contains("not released") && text.contains("unit 1"), "{text}");
        g.release(first).unwrap();
        let t = g.all_gather(Tag::new("unit", 2), half.view(), full.view_mut().slice(6..8)).unwrap();
        g.wait(t).unwrap();
    });
}

#[test]
fn differing_operations_name_both_ranks_and_both_operations() {
    let errors = world(3, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut buf = plain(DType::F32, 30);
        let mut out = plain(DType::F32, 10);
        let result = match mesh.rank() {
            1 => g.reduce_scatter(Tag::new("grads", 5), buf.view_mut(), out.view_mut(), false),
            _ => g.all_gather(Tag::new("params", 4), out.view(), buf.view_mut()),
        };
        error(result.and_then(|t| g.wait(t)))
    });
    for (rank, text) in errors.iter().enumerate() {
        assert!(text.contains(&format!("rank {rank}: ")), "{text}");
        assert!(text.contains("all_gather (params 4) of 10 f32"), "{text}");
        assert!(text.contains("reduce_scatter (grads 5) of 10 f32"), "{text}");
        assert!(text.contains("rank 1 called"), "{text}");
    }
}

#[test]
fn differing_lengths_dtypes_units_and_buffers_are_found() {
    type Start = fn(&dyn Collective, usize) -> String;
    let cases: [(&str, Start); 5] = [
        ("all_reduce (test 0) of 10 f32", |g, me| {
            let mut buf = plain(DType::F32, 10 + me);
            error(g.all_reduce(T, buf.view_mut(), Reduce::Sum).and_then(|t| g.wait(t)))
        }),
        ("of 10 f64", |g, me| {
            let mut buf = plain([DType::F64, DType::F32][me], 10);
            error(g.all_reduce(T, buf.view_mut(), Reduce::Sum).and_then(|t| g.wait(t)))
        }),
        ("max", |g, me| {
            let mut buf = plain(DType::F32, 10);
            error(g.all_reduce(T, buf.view_mut(), [Reduce::Max, Reduce::Sum][me]).and_then(|t| g.wait(t)))
        }),
        ("test 7", |g, me| {
            let mut buf = plain(DType::F32, 10);
            error(g.all_reduce(Tag::new("test", 6 + me), buf.view_mut(), Reduce::Sum).and_then(|t| g.wait(t)))
        }),
        ("in group buffer 0 at byte 8", |g, me| {
            let mut buf = g.alloc(DType::F32, 20, CommUse::Reduced, Category::Other).unwrap();
            let part = buf.view_mut().slice(2 * me..2 * me + 10);
            error(g.all_reduce(T, part, Reduce::Sum).and_then(|t| g.wait(t)))
        }),
    ];
    for (expected, start) in cases {
        for text in world(2, |mesh| start(&**mesh.group(Axis::Fsdp), mesh.rank())) {
            assert!(text.contains("differs: rank") && text.contains(expected), "{expected}: {text}");
        }
    }
}

#[test]
fn allocations_that_differ_are_found() {
    for text in world(2, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let len = 100 + mesh.rank();
        let result = g.alloc(DType::F32, len, CommUse::Gathered, Category::Other);
        error(result.and_then(|_| g.barrier(T)))
    }) {
        assert!(text.contains("alloc (buffer 0) of 100 f32, gathered"), "{text}");
        assert!(text.contains("alloc (buffer 0) of 101 f32, gathered"), "{text}");
    }
}

#[test]
fn a_mismatched_send_and_receive_is_found() {
    for text in world(2, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let (send, mut recv) = (plain(DType::F32, 5), plain(DType::F32, 5 + mesh.rank()));
        let other = 1 - mesh.rank();
        error(g.send_recv(T, other, send.view(), other, recv.view_mut()).and_then(|t| g.wait(t)))
    }) {
        assert!(text.contains("send_recv (test 0) of 5 f32 to 0, 6 from 0"), "{text}");
    }
}

#[test]
fn a_timeout_names_the_missing_rank_and_its_last_operation() {
    let errors = impatient(4, 1_000, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        g.barrier(Tag::new("epoch", 8)).unwrap();
        if mesh.rank() % 2 == 1 {
            return None; // 1 and 3 leave
        }
        let mut buf = g.alloc(DType::F32, 64, CommUse::Reduced, Category::Other).unwrap();
        let mut shard = plain(DType::F32, 16);
        let t = g.reduce_scatter(Tag::new("grads", 2), buf.view_mut(), shard.view_mut(), false).unwrap();
        let start = Instant::now();
        let text = error(g.wait(t));
        assert!(start.elapsed() >= scaled(990), "{:?}", start.elapsed());
        // It stays failed, without waiting.
        assert_eq!(error(g.wait(t)), text);
        Some(text)
    });
    for rank in [0, 2] {
        let text = errors[rank].as_ref().unwrap();
        assert!(text.starts_with(&format!("rank {rank}: reduce_scatter on fsdp (grads 2): ")), "{text}");
        assert!(text.contains("from ranks 1, 3 "), "{text}");
        assert!(text.contains("rank 3: its last operation here is barrier (epoch 8)"), "{text}");
    }
}

#[test]
fn a_timeout_names_the_rank_that_holds_the_gathered_buffer() {
    let done = std::sync::atomic::AtomicBool::new(false);
    let errors = impatient(2, 300, |mesh| {
        let g = &**mesh.group(Axis::Fsdp);
        let mut full = g.alloc(DType::F32, 8, CommUse::Gathered, Category::Other).unwrap();
        let shard = plain(DType::F32, 4);
        let t = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
        g.wait(t).unwrap();
        if mesh.rank() == 1 {
            wait_until("rank 0 has given up", || done.load(SeqCst)); // holds it meanwhile
            return String::new();
        }
        g.release(t).unwrap();
        let t = g.all_gather(Tag::new("next", 1), shard.view(), full.view_mut()).unwrap();
        let text = error(g.wait(t));
        done.store(true, SeqCst);
        text
    });
    assert!(errors[0].contains("all_gather on fsdp (next 1)") && errors[0].contains("from rank 1 "), "{}", errors[0]);
    assert!(errors[0].contains("still holds the gathered buffer"), "{}", errors[0]);
}

#[test]
fn abort_ends_the_others_at_once() {
    let ends = |mesh: Mesh| {
        if mesh.rank() == 3 {
            std::thread::sleep(Duration::from_millis(100));
            mesh.member.abort();
            return;
        }
        // Asleep in different groups.
        let g = if mesh.rank() == 0 { mesh.group(Axis::World) } else { mesh.group(Axis::Fsdp) };
        let text = error(g.barrier(T));
        assert!(text.ends_with("rank 3 failed"), "{text}");
        assert!(error(g.barrier(T)).ends_with("rank 3 failed"));
    };
    in_time(|| world(4, ends));
}

#[test]
fn a_panicking_rank_ends_the_others() {
    let meshes = shm::threads(MeshSizes::sharded(3), &meters(3)).unwrap();
    let results = in_time(|| one_panics(meshes));
    assert!(results[1].is_err());
    for rank in [0, 2] {
        assert!(results[rank].as_ref().unwrap().ends_with("rank 1 failed"), "{:?}", results[rank]);
    }
}

#[test]
fn a_foreign_ticket_is_refused() {
    world(2, |mesh| {
        let mut buf = plain(DType::F32, 1);
        let t = mesh.group(Axis::Fsdp).all_reduce(T, buf.view_mut(), Reduce::Sum).unwrap();
        assert!(error(mesh.group(Axis::World).wait(t)).contains("not from this group"));
        mesh.group(Axis::Fsdp).wait(t).unwrap();
    });
}
