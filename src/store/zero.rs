//! ZeRO (Rajbhandari et al. 2020) as DeepSpeed does it: each stage replicates less on every rank.
//!
//! ```text
//!                 stage 1           stage 2           stage 3
//! optimizer, f32  12 P/N            12 P/N            12 P/N      masters and AdamW's two moments
//! gradients       4 P + 4 P/N       4 b + 4 P/N       4 b + 4 P/N
//! weights         2 P + 2 P/N       2 P + 2 P/N       2 (R + kU) + 2 P/N
//! received        2 P + 4 P         2 P + 4 aP        2 (R + (2n - k) U) + 4 aP
//! ```
//!
//! Bytes per rank, and bytes it receives per step times N / (N - 1), for P padded parameters over N ranks, a
//! micro-batches, root R, n blocks of at most U, b elements of a bucket (twice with overlap, and the root's) in bf16.
//! In f32, weights take 4 bytes and the copy in P/N is the master. Stage 3 receives 4 (n - k) U for each micro-batch
//! after the first. In shared memory unsharded weights exist once per host, and each rank counts 1/N of them.
//!
//! - *Stage 1* sums full gradients over the step, then reduce-scatters them; *stage 2* reduces each micro-batch, bucket
//!   by bucket while backward runs, and adds it to the shards: another order of the same sum. Both gather all weights
//!   after the optimizer has changed them.
//! - *Stage 3* gathers a layer when it is acquired, as `sharded` does, but by DeepSpeed's rules: limits on elements
//!   prefetched, on live elements, and on the reuse distance of what stays gathered.
//!
//! Replicas of all this (`--dp-replicate-size`) sum their shards' gradients at the end of the step.
//!
//! A bucket holds whole layers, at least one, because a layer's gradient is complete at once. A bucket is one
//! collective in stages 1 and 2, and one per layer in stage 3, which shards each layer separately.
use super::flat::{Flat, Unit, Wrap};
use super::kept::narrow;
use super::slots::Cycles;
use super::units::{ShardedUnits, UnitPlan};
use super::{Offload, PackedShard, Shard, Store, Strategy};
use crate::base::{DType, Result};
use crate::comm::{Axis, Mesh};
use crate::device::Device;
use crate::nn::{Grads, Layout, ParamStore, Pass, Weights};
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
pub enum Stage {
    /// Partitions optimizer state.
    One,
    /// Also partitions gradients.
    Two,
    /// Also partitions parameters.
    Three,
}

/// Sizes are in elements; comments give DeepSpeed's names.
#[derive(Clone, PartialEq, Debug)]
pub struct ZeroOptions {
    pub stage: Stage,
    /// Compute dtype, in which weights are gathered: f32, bf16 or f16. Gradients are f32.
    pub dtype: DType,
    /// Dtype of master weights: f32; or bf16 if that is the compute dtype, and then they are what is gathered.
    pub masters: DType,
    /// Dtype of gradients in the reduction within a replica: f32, bf16 or f16, rounded once on each rank. Sums, and
    /// all_reduces between replicas, are always f32.
    pub reduce_dtype: DType,
    /// Maximum gradient elements reduced together (`reduce_bucket_size`).
    pub reduce_bucket: usize,
    /// Reduce a bucket while the next one fills, which takes a second buffer (`overlap_comm`).
    pub overlap: bool,
    /// Stages 1 and 2: maximum weights per all_gather (`allgather_bucket_size`).
    pub gather_bucket: usize,
    /// Stage 3: how many elements are gathered ahead of the layer in use (`stage3_prefetch_bucket_size`).
    pub prefetch: usize,
    /// Stage 3: maximum unsharded elements, at least the root and one layer (`stage3_max_live_parameters`).
    pub max_live: usize,
    /// Stage 3: a layer stays gathered for backward if at most this many elements are used in between
    /// (`stage3_max_reuse_distance`).
    pub max_reuse: usize,
    pub offload: Offload,
}

impl ZeroOptions {
    /// DeepSpeed's defaults.
    pub fn new(stage: Stage, dtype: DType) -> ZeroOptions {
        ZeroOptions {
            stage,
            dtype,
            masters: DType::F32,
            reduce_dtype: DType::F32,
            reduce_bucket: 500_000_000,
            overlap: stage == Stage::Three,
            gather_bucket: 500_000_000,
            prefetch: 50_000_000,
            max_live: 1_000_000_000,
            max_reuse: 1_000_000_000,
            offload: Offload::Nothing,
        }
    }
    fn plan(&self, layouts: &[Layout], ranks: usize) -> UnitPlan {
        let wrap = if self.stage == Stage::Three { Wrap::Transformer } else { Wrap::AtMost(self.reduce_bucket) };
        let flat = Flat::new(layouts, wrap, ranks);
        UnitPlan {
            cycles: self.cycles(&flat, ranks),
            flat,
            dtype: self.dtype,
            masters: self.masters,
            offload: self.offload,
        }
    }
    fn cycles(&self, flat: &Flat, ranks: usize) -> Cycles {
        let (all, each) = (flat.units.len(), if self.overlap { 2 } else { 1 });
        let longest = self.buckets(flat).iter().map(Range::len).max().unwrap_or(1);
        Cycles {
            weights: if self.stage == Stage::Three { self.live(flat) } else { all },
            grads: if self.stage == Stage::One { all } else { (each * longest).min(all) },
            wire: narrow(self.reduce_dtype, ranks),
        }
    }
    /// Units that are reduced together, in backward order. The root's gradient is complete last, so it has its own
    /// bucket.
    fn buckets(&self, flat: &Flat) -> Vec<Range<usize>> {
        let mut buckets: Vec<Range<usize>> = Vec::new();
        for unit in (0..flat.units.len()).rev() {
            let elements = |range: Range<usize>| flat.units[range].iter().map(Unit::trained_extent).sum::<usize>();
            match buckets
                .last_mut()
                .filter(|b| self.stage == Stage::Three && unit > 0 && elements(unit..b.end) <= self.reduce_bucket)
            {
                Some(bucket) => bucket.start = unit,
                None => buckets.push(unit..unit + 1),
            }
        }
        buckets
    }
    /// Stage 3: how many non-root layers may be unsharded at once: those kept for backward, or the current one and
    /// those prefetched, capped by `max_live`.
    fn live(&self, flat: &Flat) -> usize {
        let layers = &flat.units[1..];
        let smallest = layers.iter().map(Unit::elements).min();
        // Between forward and backward of a layer, every later layer runs twice.
        let later = |i: usize| 2 * layers[i + 1..].iter().map(Unit::elements).sum::<usize>();
        let kept = (0..layers.len()).filter(|&i| later(i) <= self.max_reuse).count();
        let ahead = self.prefetch.div_ceil(smallest.unwrap_or(1).max(1));
        kept.max(1 + ahead).min(flat.fitting(self.max_live)).clamp(1, layers.len().max(1))
    }
}

impl Strategy for ZeroOptions {
    fn name(&self) -> &'static str {
        match self.stage {
            Stage::One => "zero_1",
            Stage::Two => "zero_2",
            Stage::Three => "zero_3",
        }
    }
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn masters(&self) -> DType {
        self.masters
    }
    fn offload(&self) -> Offload {
        self.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Zero::new(dev, mesh, layouts, self)?))
    }
}

pub struct Zero {
    options: ZeroOptions,
    buckets: Vec<Range<usize>>,
    /// Number of weight slots that the non-root units rotate through.
    cycle: usize,
    units: ShardedUnits,
}

impl Zero {
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout], options: &ZeroOptions) -> Result<Zero> {
        let plan = options.plan(layouts, mesh.group(Axis::Fsdp).size());
        Ok(Zero {
            buckets: options.buckets(&plan.flat),
            cycle: plan.cycles.weights,
            units: ShardedUnits::new(dev, mesh, plan)?,
            options: options.clone(),
        })
    }

    fn partitions_weights(&self) -> bool {
        self.options.stage == Stage::Three
    }

    /// Starts the all_gathers of the units that this pass uses after `unit`.
    fn prefetch(&mut self, unit: usize, pass: Pass) -> Result<()> {
        let (mut at, mut ahead) = (unit, 0);
        for _ in 1..self.cycle {
            match self.units.flat.next(at, pass) {
                Some(next) if ahead < self.options.prefetch => at = next,
                _ => break,
            }
            ahead += self.units.flat.units[at].elements();
            self.units.unshard(at)?;
        }
        Ok(())
    }

    /// Stages 1 and 2: gathers all weights within the in-flight limit. Returns while the last ones are in flight.
    fn unshard_all(&mut self) -> Result<()> {
        let (mut oldest, mut flying) = (0, 0);
        for unit in 0..self.units.flat.units.len() {
            flying += self.units.flat.units[unit].elements();
            while oldest < unit && flying > self.options.gather_bucket {
                self.units.wait(oldest)?;
                flying -= self.units.flat.units[oldest].elements();
                oldest += 1;
            }
            self.units.unshard(unit)?;
        }
        Ok(())
    }
}

impl ParamStore for Zero {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let unit = self.units.flat.home(layer).unit;
        if !self.units.is_unsharded(unit) {
            self.units.unshard(unit)?;
            if self.partitions_weights() {
                self.prefetch(unit, pass)?;
            }
            self.units.wait(unit)?;
        }
        self.units.weights(layer)
    }

    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        let unit = self.units.flat.home(layer).unit;
        match self.partitions_weights() && self.units.flat.closes(layer, pass) && self.units.is_unsharded(unit) {
            true => self.units.reshard(unit),
            false => Ok(()),
        }
    }

    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        self.units.grads(layer)
    }

    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        let sums = self.options.stage == Stage::One;
        let Some(unit) = self.units.completed_by(layer).filter(|_| self.units.last || !sums) else { return Ok(()) };
        self.units.complete(unit)?;
        let Some(bucket) = self.buckets.iter().find(|b| b.start == unit) else { return Ok(()) }; // not full
        for unit in bucket.clone().rev() {
            self.units.reduce_scatter(unit, !sums && !self.units.first)?;
        }
        if self.options.overlap { Ok(()) } else { self.units.wait_reductions() }
    }
}

impl Store for Zero {
    fn units(&self) -> usize {
        self.units.flat.units.len()
    }
    fn replicated(&self) -> bool {
        false
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.units.begin_micro_batch(first, last);
        Ok(())
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.units.wait_reductions()?;
        (0..self.units.flat.units.len()).try_for_each(|unit| self.units.sum_replicas(unit))?;
        self.units.replicas.finish()
    }
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        self.units.visit(f)
    }
    fn for_each_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        self.units.visit_packed(f)
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.units.clear()?;
        if self.partitions_weights() { Ok(()) } else { self.unshard_all() }
    }
    fn weights_updated(&mut self) -> Result<()> {
        self.units.clear_trained()?;
        if self.partitions_weights() { Ok(()) } else { self.unshard_all() }
    }
}
