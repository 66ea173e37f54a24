//! Gradients that tp ranks compute a part of each, of tensors that every one of them has whole ([`Tp::Summed`]): the norms of
//! heads, and with sequence parallelism all norms. They are small, so they travel together: one all-reduce a step, before
//! the gradient's norm is taken. Never touches any other gradient.
use crate::base::{Category, DType, Result};
use crate::comm::mesh::{Mesh, MeshSizes};
use crate::comm::{Collective, CommUse, Reduce, Tag};
use crate::device::{Buf, Device, ViewMut};
use crate::nn::{Layout, Segment, Tp};
use crate::store::Store;
use std::sync::Arc;

pub(super) struct Summed {
    tp: Arc<dyn Collective>,
    /// f32, as long as all such tensors; none where there are none to sum. A rank that owns a part of them uses the front.
    buf: Option<Buf>,
}

fn is_summed(segment: &Segment) -> bool {
    segment.tp == Tp::Summed && segment.trainable
}

/// Elements of all such tensors; 0 where a rank has them for itself.
fn len(layouts: &[Layout], tp: usize) -> usize {
    let summed = layouts.iter().flat_map(|l| &l.segments).filter(|s| tp > 1 && is_summed(s));
    summed.map(Segment::len).sum()
}

impl Summed {
    pub fn new(mesh: &Mesh, layouts: &[Layout]) -> Result<Summed> {
        let buf = match len(layouts, mesh.sizes.tp) {
            0 => None,
            len => Some(mesh.tp.alloc(DType::F32, len, CommUse::Reduced, Category::Grads)?),
        };
        Ok(Summed { tp: mesh.tp.clone(), buf })
    }
    /// Bytes that `new` allocates.
    pub fn planned(layouts: &[Layout], mesh: &MeshSizes) -> (Category, usize) {
        (Category::Grads, len(layouts, mesh.tp) * DType::F32.size())
    }

    /// After the store's own reductions: each such gradient becomes the sum over tp. Ranks of tp own the same parts.
    pub fn reduce(&mut self, dev: &dyn Device, store: &mut dyn Store) -> Result<()> {
        let Some(buf) = &mut self.buf else { return Ok(()) };
        let mut filled = 0;
        each(store, &mut |grad| {
            let at = filled;
            filled += grad.len();
            dev.copy(grad.as_view(), buf.view_mut().slice(at..filled))
        })?;
        if filled == 0 {
            return Ok(());
        }
        let ticket = self.tp.all_reduce(Tag::new("summed", 0), buf.view_mut().slice(0..filled), Reduce::Sum)?;
        self.tp.wait(ticket)?;
        let mut read = 0;
        each(store, &mut |grad| {
            let at = read;
            read += grad.len();
            dev.copy(buf.view().slice(at..read), grad)
        })
    }
}

/// The gradient of every such tensor, as far as this rank owns it.
fn each(store: &mut dyn Store, f: &mut dyn FnMut(ViewMut) -> Result<()>) -> Result<()> {
    store.for_each_piece(&mut |mut piece| {
        for segment in piece.layout.segments.iter().filter(|s| is_summed(s)) {
            let owned = piece.owned(segment.range());
            if let (Some(grad), Some(owned)) = (&mut piece.grad, owned) {
                f(grad.reborrow().slice(owned))?;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Meter;
    use crate::comm::shm;
    use crate::device::cpu::CpuDevice;
    use crate::nn::Init;
    use crate::optim::GradNorm;
    use crate::store::{BackwardPrefetch, Offload, ReplicatedOptions, ShardedOptions, Wrap};
    use crate::strategy::{Ddp, Fsdp, Strategy};

    /// Two layers with a tensor of each kind; shards of two ranks begin inside tensors.
    fn layouts(index: usize, of: usize) -> Vec<Layout> {
        let layer = |layer: usize| {
            let mut layout = Layout::default();
            for (i, (tp, len)) in [
                (Tp::Summed, 130),
                (Tp::Cut { dim: 0, index, of }, 300),
                (Tp::Summed, 200),
                (Tp::Same, 150),
                (Tp::Cut { dim: 0, index, of }, 70),
            ]
            .into_iter()
            .enumerate()
            {
                layout.push(format!("{layer}.{i}"), &[len], true, Init::Constant(0.0));
                layout.segments[i].tp = tp;
            }
            layout
        };
        vec![layer(0), layer(1)]
    }
    /// What rank `tp` computes for element `i`: alike on both where the tensor is [`Tp::Same`].
    fn gradient(segment: &Segment, tp: usize, i: usize) -> f32 {
        let rank = if segment.tp == Tp::Same { 0 } else { tp };
        (segment.name.bytes().map(usize::from).sum::<usize>() % 7 + 3 * rank + i % 11) as f32
    }

    #[test]
    fn parts_are_added_up_and_the_norm_counts_every_element_once() {
        let sharded = Fsdp(ShardedOptions {
            dtype: DType::F32,
            wrap: Wrap::None,
            reshard: true,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            grad_accum: 1,
            sync_each_batch: false,
            limit_all_gathers: true,
            offload: Offload::Nothing,
        });
        let replicated = Ddp(ReplicatedOptions { dtype: DType::F32, bucket_bytes: 1, offload: Offload::Nothing });
        let mut squares = 0.0;
        for segment in layouts(0, 2).iter().flat_map(|l| &l.segments) {
            for i in 0..segment.len() {
                let of_rank = [0, 1].map(|tp| gradient(segment, tp, i) as f64);
                squares += match segment.tp {
                    Tp::Same => of_rank[0].powi(2),
                    Tp::Summed => (of_rank[0] + of_rank[1]).powi(2),
                    Tp::Cut { .. } => of_rank[0].powi(2) + of_rank[1].powi(2),
                };
            }
        }
        for strategy in [&sharded as &dyn Strategy, &replicated] {
            for (dp_replicate, dp_shard, sp) in [(1, 1, 1), (1, 2, 1), (2, 1, 2)] {
                let sizes = MeshSizes { dp_replicate, dp_shard, sp, tp: 2 };
                let rank = |mesh: Mesh| -> Result<()> {
                    let (meter, tp) = (Meter::default(), mesh.coords.tp);
                    let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(meter));
                    let layouts = layouts(tp, 2);
                    let mut store = strategy.store(dev.clone(), &mesh, &layouts)?;
                    let mut summed = Summed::new(&mesh, &layouts)?;
                    let mut norm = GradNorm::new(&*dev, &mesh, 0.0, Offload::Nothing)?;
                    assert_eq!(Summed::planned(&layouts, &sizes), (Category::Grads, 4 * 2 * (130 + 200)));
                    assert_eq!(summed.buf.as_ref().map(Buf::len), Some(2 * (130 + 200)));
                    // Every segment's part of each piece: what is to be there before, or what is there after.
                    let visit = |store: &mut dyn Store, f: &mut dyn FnMut(&Segment, usize, &mut f32)| {
                        store.for_each_piece(&mut |mut piece| {
                            for segment in &piece.layout.segments {
                                let Some(owned) = piece.owned(segment.range()) else { continue };
                                let first = piece.start + owned.start - segment.start;
                                let grad = piece.grad.as_mut().unwrap().reborrow().slice(owned);
                                for (i, x) in grad.host::<f32>("test")?.iter_mut().enumerate() {
                                    f(segment, first + i, x);
                                }
                            }
                            Ok(())
                        })
                    };
                    visit(&mut *store, &mut |segment, i, x| *x = gradient(segment, tp, i))?;
                    summed.reduce(&*dev, &mut *store)?;
                    visit(&mut *store, &mut |segment, i, x| {
                        let expected = match segment.tp {
                            Tp::Summed => gradient(segment, 0, i) + gradient(segment, 1, i),
                            _ => gradient(segment, tp, i),
                        };
                        assert_eq!(*x, expected, "{}[{i}]", segment.name);
                    })?;
                    assert_eq!(norm.measure(&*dev, &mut *store)?, squares.sqrt() as f32, "{sizes:?}");
                    Ok(())
                };
                let meters: Vec<Meter> = (0..sizes.world()).map(|_| Meter::default()).collect();
                let meshes = shm::threads(sizes, &meters).unwrap();
                std::thread::scope(|scope| {
                    let ranks: Vec<_> = meshes.into_iter().map(|mesh| scope.spawn(|| rank(mesh).unwrap())).collect();
                    ranks.into_iter().for_each(|rank| rank.join().unwrap());
                });
            }
        }
    }
}
