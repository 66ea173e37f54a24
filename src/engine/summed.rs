//! All-reduces gradients that are partial sums over tp, of tensors that every tp rank has in full ([`Tp::Summed`]): the
//! norms of heads, with sequence parallelism all norms, and key and value heads that ranks share. Most are small, so
//! one all-reduce per step carries all that fit into the buffer, before the gradient norm is computed. Never touches
//! any other gradient.
use crate::base::{Category, DType, Result};
use crate::comm::Mesh;
use crate::comm::{Axis, Collective, CommUse, Reduce, Tag};
use crate::device::{Buf, Device, ViewMut};
use crate::nn::{Layout, Segment, Tp};
use crate::store::Store;
use std::ops::Range;
use std::sync::Arc;

/// Maximum elements in the buffer: 4 MiB, the norms of 100 layers of width 5120.
const MOST: usize = 1 << 20;

pub(super) struct Summed {
    tp: Arc<dyn Collective>,
    /// f32; None if there is nothing to sum.
    buf: Option<Buf>,
}

fn is_summed(segment: &Segment) -> bool {
    segment.tp == Tp::Summed && segment.is_trained()
}

/// Elements per all-reduce: all such tensors if they fit; 0 without tp.
fn len(layouts: &[Layout], tp: usize) -> usize {
    let summed = layouts.iter().flat_map(|l| &l.segments).filter(|s| tp > 1 && is_summed(s));
    summed.map(Segment::len).sum::<usize>().min(MOST)
}

impl Summed {
    pub fn new(mesh: &Mesh, layouts: &[Layout]) -> Result<Summed> {
        Summed::of(mesh, len(layouts, mesh.sizes.tp))
    }
    fn of(mesh: &Mesh, len: usize) -> Result<Summed> {
        let alloc = || mesh.group(Axis::Tp).alloc(DType::F32, len, CommUse::Reduced, Category::Grads);
        Ok(Summed { tp: mesh.group(Axis::Tp).clone(), buf: (len > 0).then(alloc).transpose()? })
    }

    /// Called after the store's own reductions: replaces each such gradient by its sum over tp. Ranks of tp own the
    /// same shards.
    pub fn reduce(&mut self, dev: &dyn Device, store: &mut dyn Store) -> Result<()> {
        let Some(buf) = &mut self.buf else { return Ok(()) };
        let (mut from, room) = (0, buf.len());
        loop {
            let window = from..from + room;
            let filled = each(store, window.clone(), &mut |grad, at| {
                let len = grad.len();
                dev.copy(grad.as_view(), buf.view_mut().slice(at..at + len))
            })?;
            if filled > 0 {
                let ticket = self.tp.all_reduce(Tag::new("summed", 0), buf.view_mut().slice(0..filled), Reduce::Sum)?;
                self.tp.wait(ticket)?;
                each(store, window, &mut |grad, at| dev.copy(buf.view().slice(at..at + grad.len()), grad))?;
            }
            if filled < room {
                return Ok(());
            }
            from += room;
        }
    }
}

/// Visits the part inside `window` of the concatenation of all such gradients that this rank owns, in runs with their
/// offset in the window. Returns its length.
fn each(store: &mut dyn Store, window: Range<usize>, f: &mut dyn FnMut(ViewMut, usize) -> Result<()>) -> Result<usize> {
    let mut place = 0;
    store.for_each_shard(&mut |mut shard| {
        for segment in shard.layout.segments.iter().filter(|s| is_summed(s)) {
            let owned = shard.owned(segment.range());
            let (Some(grad), Some(owned)) = (&mut shard.grad, owned) else { continue };
            let (from, to) = (place.max(window.start), (place + owned.len()).min(window.end));
            if from < to {
                let first = owned.start + from - place;
                f(grad.reborrow().slice(first..first + to - from), from - window.start)?;
            }
            place += owned.len();
        }
        Ok(())
    })?;
    Ok(place.min(window.end).saturating_sub(window.start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Meter;
    use crate::comm::MeshSizes;
    use crate::comm::shm;
    use crate::device::cpu::CpuDevice;
    use crate::nn::{Init, Slice};
    use crate::optim::GradNorm;
    use crate::store::{BackwardPrefetch, Offload, ReplicatedOptions, ShardedOptions, Strategy, Wrap};

    /// Two layers with a tensor of each kind; shards of two ranks start inside tensors, and splits are uneven.
    fn layouts(index: usize, of: usize) -> Vec<Layout> {
        let over = Slice { index, of };
        let cut = |whole: usize| (Tp::Cut { dim: 0, over, whole }, over.share(whole).len());
        let layer = |layer: usize| {
            let mut layout = Layout::default();
            for (i, (tp, len)) in
                [(Tp::Summed, 130), cut(301), (Tp::Summed, 200), (Tp::Same, 150), cut(7)].into_iter().enumerate()
            {
                layout.push_part(format!("{layer}.{i}"), &[len], tp, true, Init::Constant(0.0));
            }
            layout
        };
        vec![layer(0), layer(1)]
    }
    /// What rank `tp` computes for element `i`: equal on both if the tensor is [`Tp::Same`].
    fn gradient(segment: &Segment, tp: usize, i: usize) -> f32 {
        let rank = if segment.tp == Tp::Same { 0 } else { tp };
        (segment.name.bytes().map(usize::from).sum::<usize>() % 7 + 3 * rank + i % 11) as f32
    }

    #[test]
    fn partial_gradients_are_summed_and_the_norm_counts_each_element_once() {
        let sharded = ShardedOptions {
            reduce_dtype: DType::F32,
            dtype: DType::F32,
            masters: DType::F32,
            wrap: Wrap::None,
            reshard: true,
            max_live: 0,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            grad_accum: 1,
            sync_each_batch: false,
            limit_all_gathers: true,
            offload: Offload::Nothing,
        };
        let replicated = ReplicatedOptions {
            dtype: DType::F32,
            masters: DType::F32,
            reduce_dtype: DType::F32,
            bucket_bytes: 1,
            offload: Offload::Nothing,
        };
        let mut squares = 0.0;
        let segments = |tp| layouts(tp, 2).into_iter().flat_map(|l| l.segments).map(move |s| (tp, s));
        for (tp, segment) in [0, 1].into_iter().flat_map(segments) {
            for i in 0..segment.len() {
                let of_rank = [0, 1].map(|tp| gradient(&segment, tp, i) as f64);
                squares += match segment.tp {
                    Tp::Cut { .. } | Tp::Parts { .. } => of_rank[tp].powi(2),
                    _ if tp > 0 => 0.0,
                    Tp::Same => of_rank[0].powi(2),
                    Tp::Summed => (of_rank[0] + of_rank[1]).powi(2),
                };
            }
        }
        for strategy in [&sharded as &dyn Strategy, &replicated] {
            for (dp_replicate, dp_shard, sp) in [(1, 1, 1), (1, 2, 1), (2, 1, 2)] {
                let sizes = MeshSizes { dp_replicate, dp_shard, sp, tp: 2, ep: 1 };
                let rank = |mesh: Mesh| -> Result<()> {
                    let (meter, tp) = (Meter::default(), mesh.coords.tp);
                    let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(meter));
                    let layouts = layouts(tp, 2);
                    let mut store = strategy.store(dev.clone(), &mesh, &layouts)?;
                    // All at once, or one shard at a time.
                    let mut summed = if sp == 1 { Summed::new(&mesh, &layouts)? } else { Summed::of(&mesh, 77)? };
                    let mut norm = GradNorm::new(&*dev, &mesh, 0.0, Offload::Nothing)?;
                    let mut one = dev.alloc(DType::F32, 1, Category::Other)?;
                    one.view_mut().host::<f32>("test")?.fill(1.0);
                    assert_eq!(summed.buf.as_ref().map(Buf::len), Some(if sp == 1 { 2 * (130 + 200) } else { 77 }));
                    // Every segment's part of each shard: the input to write, or the expected output.
                    let visit = |store: &mut dyn Store, f: &mut dyn FnMut(&Segment, usize, &mut f32)| {
                        store.for_each_shard(&mut |mut shard| {
                            for segment in &shard.layout.segments {
                                let Some(owned) = shard.owned(segment.range()) else { continue };
                                let first = shard.start + owned.start - segment.start;
                                let grad = shard.grad.as_mut().unwrap().reborrow().slice(owned);
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
                    norm.measure(&*dev, &mut *store, one.view())?;
                    assert_eq!(norm.norm().host::<f32>("test")?, [squares.sqrt() as f32], "{sizes:?}");
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
