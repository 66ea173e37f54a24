//! Meshes: coordinates, groups, and that groups do not interfere.
use super::*;
use flatshard::comm::{Axis, Reduce};

fn factorisations(world: usize) -> Vec<MeshSizes> {
    let mut all = vec![];
    for dp_replicate in 1..=world {
        for dp_shard in 1..=world {
            for sp in 1..=world {
                for tp in 1..=world {
                    if dp_replicate * dp_shard * sp * tp == world {
                        all.push(MeshSizes { dp_replicate, dp_shard, sp, tp, ep: 1 });
                    }
                }
            }
        }
    }
    all
}

#[test]
fn ranks_are_laid_out_outermost_first() {
    let sizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 2, ep: 1 };
    assert_eq!(sizes.group(Axis::Tp, 5), [4, 5]);
    assert_eq!(sizes.group(Axis::DpShard, 5), [5, 7]);
    assert_eq!(sizes.group(Axis::DpReplicate, 5), [1, 5]);
    assert_eq!(sizes.group(Axis::Dp, 5), [1, 3, 5, 7]);
    assert_eq!(sizes.group(Axis::Sp, 5), [5]);
    let sizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 2, tp: 1, ep: 1 };
    assert_eq!(sizes.group(Axis::Fsdp, 1), [0, 1, 2, 3]);
    assert_eq!(sizes.group(Axis::Sp, 6), [6, 7]);
    for rank in 0..8 {
        assert_eq!(sizes.rank(sizes.coords(rank)), rank);
    }
    // Ranks that share experts are next to each other in dp_shard; those that share an expert are the others.
    let sizes = MeshSizes { dp_replicate: 1, dp_shard: 4, sp: 2, tp: 1, ep: 2 };
    assert_eq!((sizes.group(Axis::Ep, 0), sizes.group(Axis::Ep, 5)), (vec![0, 2], vec![5, 7]));
    assert_eq!(sizes.group(Axis::ExpertFsdp, 3), [2, 3, 6, 7]);
    assert_eq!(sizes.group(Axis::Fsdp, 3).len(), 8);
}

#[test]
fn a_product_other_than_the_world_size_is_refused_with_the_equation() {
    let sizes = MeshSizes { dp_replicate: 1, dp_shard: 3, sp: 2, tp: 1, ep: 1 };
    let e = sizes.check(8).unwrap_err();
    assert_eq!(e.exit_status(), 2);
    assert!(e.to_string().contains("dp_shard 3 x sp 2 x tp 1 = 6, but there are 8 ranks"), "{e}");
    assert!(MeshSizes::sharded(0).check(0).is_err());
    let uneven = MeshSizes { ep: 2, ..MeshSizes::sharded(3) };
    assert!(uneven.check(3).unwrap_err().to_string().contains("ep 2 does not divide dp_shard 3"));
}

/// On every axis of every mesh of 8 at once: a gather and a reduction in flight, waited for in another order.
#[test]
fn the_groups_of_every_mesh_of_eight_do_not_interfere() {
    let meshes = factorisations(8);
    assert_eq!(meshes.len(), 20);
    let shared =
        meshes.iter().filter(|sizes| sizes.dp_shard.is_multiple_of(2)).map(|sizes| MeshSizes { ep: 2, ..*sizes });
    let meshes: Vec<MeshSizes> = meshes.iter().copied().chain(shared).collect();
    for sizes in meshes {
        run(shm::threads(sizes, &meters(8)).unwrap(), |mesh| {
            let me = mesh.rank();
            let mut started = vec![];
            for axis in mesh.axes() {
                let g = mesh.group(axis);
                assert_eq!((g.axis(), g.size()), (axis, sizes.group(axis, me).len()));
                let mut shard = plain(DType::U32, 3);
                fill(&mut shard, |i| (me * 10 + i) as u32);
                let mut full = g.alloc(DType::U32, 3 * g.size(), CommUse::Gathered, Category::Other).unwrap();
                let mut sum = g.alloc(DType::F32, 1000, CommUse::Reduced, Category::Other).unwrap();
                fill(&mut sum, |i| (me * i) as f32);
                let a = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
                let b = g.all_reduce(T, sum.view_mut(), Reduce::Sum).unwrap();
                started.push((axis, shard, full, sum, a, b));
            }
            if me % 2 == 1 {
                started.reverse();
            }
            for (axis, _shard, full, sum, a, b) in started {
                let (g, ranks) = (mesh.group(axis), sizes.group(axis, me));
                g.wait(b).unwrap();
                g.wait(a).unwrap();
                expect(&full, |i| (ranks[i / 3] * 10 + i % 3) as u32);
                expect(&sum, |i| ranks.iter().map(|r| r * i).sum::<usize>() as f32);
                g.release(a).unwrap();
            }
        });
    }
}
