//! Groups of ranks from outside: ranks are threads here, over the same shared memory as processes.
use flatshard::base::{Category, DType, Meter};
use flatshard::comm::{CommUse, Mesh, MeshSizes, Reduce, Tag, shm};
use flatshard::device::Buf;

const T: Tag = Tag::new("test", 0);

/// Runs `f` on every rank of a world, each on its own thread.
fn world(sizes: MeshSizes, f: impl Fn(Mesh) + Sync) {
    let meters: Vec<Meter> = (0..sizes.world()).map(|_| Meter::default()).collect();
    let meshes = shm::threads(sizes, &meters).unwrap();
    std::thread::scope(|s| {
        for mesh in meshes {
            s.spawn(|| f(mesh));
        }
    });
}

/// A buffer that no group allocated.
fn plain(dtype: DType, len: usize) -> Buf {
    let owner = std::sync::Arc::new(vec![0u64; (len * dtype.size()).div_ceil(8) + 1]);
    let ptr = std::ptr::NonNull::new(owner.as_ptr().cast_mut().cast()).unwrap();
    // SAFETY: 8-byte aligned and long enough; the vector itself is never touched again.
    unsafe { Buf::from_raw(ptr, dtype, len, owner) }
}

#[test]
fn gather() {
    for n in [1, 2, 3, 5, 8] {
        world(MeshSizes::sharded(n), |mesh| {
            let (g, me) = (&mesh.fsdp, mesh.rank());
            for (arena, len) in [0usize, 1, 7, 1000, 300_001].into_iter().flat_map(|len| [(true, len), (false, len)]) {
                let make = |len, usage| match arena {
                    true => g.alloc(DType::F32, len, usage, Category::Params).unwrap(),
                    false => plain(DType::F32, len),
                };
                let mut shard = make(len, CommUse::Reduced);
                let mut full = make(len * n, CommUse::Gathered);
                for round in 0..3 {
                    for (i, x) in shard.view_mut().host::<f32>("t").unwrap().iter_mut().enumerate() {
                        *x = (me * 1000 + i + round) as f32;
                    }
                    let t = g.all_gather(T, shard.view(), full.view_mut()).unwrap();
                    g.wait(t).unwrap();
                    for (i, x) in full.view().host::<f32>("t").unwrap().iter().enumerate() {
                        assert_eq!(*x, ((i / len) * 1000 + i % len + round) as f32);
                    }
                    g.release(t).unwrap();
                    let mut out = make(len, CommUse::Reduced);
                    let mut grads = make(len * n, CommUse::Reduced);
                    for (i, x) in grads.view_mut().host::<f32>("t").unwrap().iter_mut().enumerate() {
                        *x = (me + i + round) as f32;
                    }
                    let t = g.reduce_scatter(T, grads.view_mut(), out.view_mut(), false).unwrap();
                    g.wait(t).unwrap();
                    g.wait_sent(t).unwrap();
                    for (i, x) in out.view().host::<f32>("t").unwrap().iter().enumerate() {
                        let want = (0..n).fold(0.0, |a, r| a + (r + me * len + i + round) as f32);
                        assert_eq!(*x, want);
                    }
                    let t = g.all_reduce(T, grads.view_mut(), Reduce::Sum).unwrap();
                    g.wait(t).unwrap();
                    for (i, x) in grads.view().host::<f32>("t").unwrap().iter().enumerate() {
                        let want = (0..n).fold(0.0, |a, r| a + (r + i + round) as f32);
                        assert_eq!(*x, want);
                    }
                    g.barrier(T).unwrap();
                }
            }
        });
    }
}
