//! How weights start. Never communicates: every number is a function of the seed, the tensor's name and the index in
//! the whole tensor, so each rank fills what it owns, and any cut of any unit or tensor gives the same model.
use super::{Store, assign};
use crate::base::Result;
use crate::base::rng::Rng;
use crate::device::Device;
use crate::nn::Init;

/// Elements filled on the host at once: 256 kB.
const CHUNK: usize = 1 << 16;

/// Fills the shards of this rank by their segments' [`Init`]; padding stays 0.
pub fn initialize(store: &mut dyn Store, seed: u64, dev: &dyn Device) -> Result<()> {
    let (mut chunk, mut rounded) = (vec![0f32; CHUNK], Vec::new());
    store.for_each_shard(&mut |mut shard| {
        let owned = shard.start..shard.start + shard.master.len();
        for segment in &shard.layout.segments {
            let rng = Rng::named(seed, &segment.name);
            let (mut at, end) = (segment.start.max(owned.start), segment.range().end.min(owned.end));
            while at < end {
                let n = CHUNK.min(end - at);
                let values = &mut chunk[..n];
                let first = at - segment.start;
                for (part, place) in segment.stretches(first..first + n) {
                    fill(segment.init, &rng, place as u64, &mut values[part.start - first..part.end - first]);
                }
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
    store.weights_changed()
}

/// Values of a tensor from its element `place` on.
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
