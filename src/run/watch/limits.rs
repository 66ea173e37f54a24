//! How fast this rank's device and its collectives can be: what `mfu` and `sol` are relative to. Known GPUs have the
//! numbers of their data sheet; everything else is measured once at the start, all ranks at once since they share
//! caches, memory and clocks in training too. Never runs during training.
//!
//! [Note: what a measurement costs] At most about 0.2 s on a CPU, and at most a few percent of the time that the run
//! will take: a short run is measured with smaller products. Calls go in batches with one synchronization, so that a
//! GPU's launches are not what is timed.
use crate::base::{Category, DType, Result};
use crate::comm::{Collective, CommUse, Tag};
use crate::device::Device;
use crate::device::gpu::telemetry::DataSheet;
use crate::device::ops::{Gemm, GemmShape};
use crate::engine::{StepWork, WORKING_SETS};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Sides of square products. A CPU gains nothing from larger ones.
const SIDES: [usize; 3] = [256, 512, 1024];
const SIDES_OF_A_GPU: [usize; 5] = [256, 512, 1024, 2048, 4096];
/// Bytes of two buffers, one copied to the other, for each of [`WORKING_SETS`]: within an L2 cache, then the lower
/// limits, the last beyond most L3 caches.
const BUFFERS: [usize; WORKING_SETS.len()] = [256 << 10, 2 << 20, 16 << 20, 64 << 20];
/// The most seconds that one number takes, and the part of the run's own time.
const MOST: f64 = 0.02;
const PART: f64 = 0.005;
/// Batches of which the fastest counts.
const BATCHES: usize = 3;
/// Most bytes of a measured collective.
const COLLECTIVE: usize = 4 << 20;

/// Upper limits of one rank.
#[derive(Debug)]
pub struct Limits {
    /// FLOP/s by dtype of the inputs.
    flops: BTreeMap<DType, f64>,
    /// Bytes per second read and written, for each of [`WORKING_SETS`]; none where a step of full rows moves nothing.
    memory: [Option<f64>; WORKING_SETS.len()],
    /// Bytes per second received in gathers and in reductions; infinite without peers.
    gather: f64,
    reduce: f64,
    source: &'static str,
}

/// The shortest time that work can take.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ideal {
    /// The time of matrix products and attention.
    pub products: f64,
    /// The time of everything else, which only moves memory.
    pub memory: f64,
    /// The time of communication, hidden or not.
    pub communication: f64,
}

impl Limits {
    /// `work` is that of one of `steps` steps. `of_collectives`: the bytes of a measured collective, the same on all
    /// ranks; without them this call is not collective, and collectives are not limited. Ranks may have different
    /// devices.
    pub fn measure(
        device: &dyn Device,
        world: &Arc<dyn Collective>,
        (work, steps): (&StepWork, u64),
        of_collectives: Option<usize>,
        known: Option<(DataSheet, bool)>,
    ) -> Result<Limits> {
        let meet = |what| of_collectives.map_or(Ok(()), |_| world.barrier(Tag::new(what, 0)));
        let (mut flops, mut memory) = (BTreeMap::new(), [None; WORKING_SETS.len()]);
        meet("peak")?;
        if let Some((sheet, tf32)) = known {
            flops.extend(work.flops.keys().map(|&dtype| (dtype, sheet.flops(dtype, tf32))));
            memory.fill(Some(sheet.bandwidth));
        } else {
            let mut most = MOST;
            for &dtype in work.flops.keys() {
                let small = products(device, dtype, SIDES[0], 0.0)?;
                most = (work.all_flops() as f64 * steps as f64 / small * PART).min(MOST);
                let sides = if device.is_synchronous() { &SIDES[..] } else { &SIDES_OF_A_GPU };
                let side = sides.iter().rfind(|&&side| product(side) / small <= most).unwrap_or(&SIDES[0]);
                flops.insert(dtype, products(device, dtype, *side, most)?.max(small));
            }
            for (class, bytes) in BUFFERS.into_iter().enumerate().filter(|&(class, _)| work.moved[class] > 0) {
                memory[class] = Some(bandwidth(device, bytes, most / 4.0)?);
            }
        }
        let [gather, reduce] = match of_collectives {
            Some(bytes) => collectives(device, world, bytes.clamp(1 << 12, COLLECTIVE))?,
            None => [f64::INFINITY; 2],
        };
        let source = if known.is_some() { "data sheet" } else { "measured" };
        Ok(Limits { flops, memory, gather, reduce, source })
    }

    pub fn flops(&self, dtype: DType) -> Option<f64> {
        self.flops.get(&dtype).copied()
    }
    pub fn ideal(&self, work: &StepWork) -> Ideal {
        let rate = |dtype| self.flops(dtype).unwrap_or(f64::INFINITY);
        // A later step may move more at once.
        let best = self.memory.into_iter().flatten().fold(0.0, f64::max);
        let moved = |(&bytes, rate): (&u64, Option<f64>)| bytes as f64 / rate.unwrap_or(best);
        Ideal {
            products: work.flops.iter().map(|(&dtype, &flops)| flops as f64 / rate(dtype)).sum(),
            memory: work.moved.iter().zip(self.memory).filter(|(bytes, _)| **bytes > 0).map(moved).sum(),
            communication: work.gathered as f64 / self.gather + work.reduced as f64 / self.reduce,
        }
    }
    pub fn json(&self) -> Value {
        let flops: BTreeMap<_, _> = self.flops.iter().map(|(dtype, rate)| (dtype.name(), rate)).collect();
        let received = |rate: f64| rate.is_finite().then_some(rate);
        json!({
            "source": self.source,
            "flops_per_sec": flops,
            "memory_bytes_per_sec": self.memory,
            "gathered_bytes_per_sec": received(self.gather),
            "reduced_bytes_per_sec": received(self.reduce),
        })
    }
}

impl Ideal {
    /// The time of the whole step. `overlaps`: communication runs at the same time as computation, so that only what is
    /// longer than that is exposed.
    pub fn seconds(&self, overlaps: bool) -> f64 {
        let computing = self.products + self.memory;
        if overlaps { computing.max(self.communication) } else { computing + self.communication }
    }
}

fn product(side: usize) -> f64 {
    2.0 * (side as f64).powi(3)
}

/// Seconds of a call, at best: batches take about `most` seconds together, and each is waited for once.
fn fastest(device: &dyn Device, most: f64, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut batch = |calls: usize| -> Result<f64> {
        let started = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        device.synchronize()?;
        // The clock may not have moved.
        Ok(started.elapsed().as_secs_f64().max(1e-9) / calls as f64)
    };
    batch(1)?;
    let one = batch(1)?;
    let calls = (most / BATCHES as f64 / one).clamp(1.0, 1000.0) as usize;
    (0..BATCHES).try_fold(one, |best, _| Ok(best.min(batch(calls)?)))
}

/// FLOP/s of square products.
fn products(device: &dyn Device, dtype: DType, side: usize, most: f64) -> Result<f64> {
    let alloc = || device.alloc(dtype, side * side, Category::Scratch);
    let (mut a, mut b, mut c) = (alloc()?, alloc()?, alloc()?);
    // Not zeros, which some units multiply faster.
    let one: &[u8] = match dtype {
        DType::F16 => &[0x00, 0x3c],
        DType::Bf16 => &[0x80, 0x3f],
        _ => &[0x00, 0x00, 0x80, 0x3f],
    };
    let ones = one.repeat(side * side);
    device.upload(&ones, a.view_mut())?;
    device.upload(&ones, b.view_mut())?;
    let shape = GemmShape::nt(side, side, side);
    let call = || device.gemm(Gemm { shape, a: a.view(), b: b.view(), c: c.view_mut() });
    Ok(product(side) / fastest(device, most, call)?)
}

/// Bytes per second read and written: the faster of `y = x` and `y += x`.
fn bandwidth(device: &dyn Device, bytes: usize, most: f64) -> Result<f64> {
    let alloc = || device.alloc(DType::F32, bytes / 2 / DType::F32.size(), Category::Scratch);
    let (mut x, mut y) = (alloc()?, alloc()?);
    // Pages that were never written are all the same one.
    device.scale(1.0, x.view_mut())?;
    let copied = fastest(device, most, || device.copy(x.view(), y.view_mut()))?;
    let added = fastest(device, most, || device.add(x.view(), y.view_mut()))?;
    Ok((bytes as f64 / copied).max(1.5 * bytes as f64 / added))
}

/// Bytes per second received in an all-gather and in a reduce-scatter of `bytes` over all ranks.
fn collectives(device: &dyn Device, world: &Arc<dyn Collective>, bytes: usize) -> Result<[f64; 2]> {
    let ranks = world.size();
    if ranks == 1 {
        return Ok([f64::INFINITY; 2]);
    }
    let shard = bytes / DType::F32.size() / ranks;
    let mut mine = device.alloc(DType::F32, shard, Category::Scratch)?;
    let full = |usage| world.alloc(DType::F32, shard * ranks, usage, Category::Scratch);
    let (mut gathered, mut reduced) = (full(CommUse::Gathered)?, full(CommUse::Reduced)?);
    let received = (shard * DType::F32.size() * (ranks - 1)) as f64;
    // The number of calls is the same on every rank.
    let gather = fastest(device, 0.0, || {
        let ticket = world.all_gather(Tag::new("measure gather", 0), mine.view(), gathered.view_mut())?;
        world.wait(ticket)?;
        world.release(ticket)
    })?;
    let reduce = fastest(device, 0.0, || {
        let tag = Tag::new("measure reduction", 0);
        let ticket = world.reduce_scatter(tag, reduced.view_mut(), mine.view_mut(), false)?;
        world.wait(ticket)?;
        world.wait_sent(ticket)
    })?;
    Ok([received / gather, received / reduce])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            flops: BTreeMap::from([(DType::F32, 100.0), (DType::Bf16, 400.0)]),
            memory: [Some(40.0), Some(20.0), None, Some(5.0)],
            gather: 8.0,
            reduce: 4.0,
            source: "measured",
        }
    }

    #[test]
    fn each_part_takes_its_time_at_its_own_limit() {
        let work = StepWork {
            flops: BTreeMap::from([(DType::F32, 50), (DType::Bf16, 800)]),
            moved: [40, 0, 20, 10],
            gathered: 16,
            reduced: 4,
            ..StepWork::default()
        };
        let ideal = limits().ideal(&work);
        assert_eq!(ideal, Ideal { products: 2.5, memory: 3.5, communication: 3.0 });
        assert_eq!([ideal.seconds(false), ideal.seconds(true)], [9.0, 6.0]);
        let long = Ideal { communication: 7.0, ..ideal };
        assert_eq!(long.seconds(true), 7.0);
    }
}
