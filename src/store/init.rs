//! Initial weights. Never communicates: every value is a function of the seed, the tensor's name and the index in the
//! whole tensor. Each rank fills only what it owns, and any sharding and any number of threads give the same model.
use super::{Store, assign};
use crate::base::Result;
use crate::base::rng::Rng;
use crate::device::Device;
use crate::nn::{Init, Segment};

/// Elements that a thread draws at a time: 1 MiB, which takes a hundred times as long as starting the thread.
const CHUNK: usize = 1 << 18;

/// Fills this rank's shards according to each segment's [`Init`]. Padding stays 0.
pub fn initialize(store: &mut dyn Store, seed: u64, dev: &dyn Device) -> Result<()> {
    initialize_only(store, seed, dev, &|_| true)
}

/// Like [`initialize`], of the segments that `wanted` chooses: the others will be read from files.
pub fn initialize_only(
    store: &mut dyn Store,
    seed: u64,
    dev: &dyn Device,
    wanted: &dyn Fn(&Segment) -> bool,
) -> Result<()> {
    let (mut drawn, mut rounded) = (vec![0f32; CHUNK * dev.host_threads()], Vec::new());
    store.for_each_shard(&mut |mut shard| {
        let owned = shard.start..shard.start + shard.master.len();
        for segment in shard.layout.segments.iter().filter(|segment| wanted(segment)) {
            let rng = Rng::named(seed, &segment.name);
            let (mut at, end) = (segment.start.max(owned.start), segment.range().end.min(owned.end));
            while at < end {
                let n = drawn.len().min(end - at);
                let values = &mut drawn[..n];
                std::thread::scope(|threads| {
                    let first = at - segment.start;
                    for (i, values) in values.chunks_mut(CHUNK).enumerate().rev() {
                        let mut fill = move || draw(segment, &rng, first + i * CHUNK, values);
                        // The first on this thread, when the others have started.
                        if i == 0 { fill() } else { _ = threads.spawn(fill) }
                    }
                });
                let to = at - owned.start..at - owned.start + n;
                assign(dev, values, &mut rounded, shard.master.reborrow().slice(to))?;
                at += n;
            }
        }
        match shard.param {
            Some(param) => dev.copy(shard.master.as_view(), param),
            None => Ok(()),
        }
    })?;
    store.for_each_packed(&mut |shard| {
        shard.fill(dev, wanted, &mut |segment, place, values, _| {
            fill(segment.init, &Rng::named(seed, &segment.name), place as u64, values);
            Ok(())
        })
    })?;
    store.weights_changed()
}

/// This rank's values of a segment, from its element `first` on.
fn draw(segment: &Segment, rng: &Rng, first: usize, values: &mut [f32]) {
    for (part, place) in segment.stretches(first..first + values.len()) {
        fill(segment.init, rng, place as u64, &mut values[part.start - first..part.end - first]);
    }
}

/// Values of a tensor, starting at its element `place`.
fn fill(init: Init, rng: &Rng, place: u64, values: &mut [f32]) {
    match init {
        Init::Normal(std) => {
            rng.normals(place, values);
            values.iter_mut().for_each(|x| *x *= std);
        }
        Init::Uniform(bound) => {
            let draw = |i| bound * (2.0 * rng.uniform(place + i) - 1.0) as f32;
            (0..).zip(values).for_each(|(i, x)| *x = draw(i));
        }
        Init::Constant(value) => values.fill(value),
    }
}
