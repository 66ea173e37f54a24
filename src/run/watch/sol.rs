//! How close a step comes to what the machine can do: `mfu`, and the speed of light `sol`. Never changes what runs.
use super::limits::Limits;
use crate::base::Result;
use crate::comm::{Axis, Mesh};
use crate::data::{MicroBatch, SampleKind};
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::telemetry;
use crate::engine::{EngineOptions, StepCounter, StepWork};
use crate::run::plan::{Plan, engine};
use crate::run::settings::DeviceName;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Ratios of a step, as fractions.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Ratios {
    pub mfu: f64,
    pub mfu_llm_foundry: f64,
    pub sol: f64,
}

impl Ratios {
    /// Relative to the limits, or to the fastest step if that `beaten` them: a better measurement of the same.
    fn of_best(self, beaten: &mut f64) -> Ratios {
        *beaten = beaten.max(self.sol);
        Ratios { mfu: self.mfu / *beaten, mfu_llm_foundry: self.mfu_llm_foundry / *beaten, sol: self.sol / *beaten }
    }
}

pub struct SpeedOfLight {
    counter: StepCounter,
    /// A step of full rows.
    full: StepWork,
    /// None in the emulator, and with --no-measure-peak on a machine that is not known.
    limits: Option<Limits>,
    /// By llm-foundry's definition, FLOPs of a token over the peak of all ranks.
    foundry_seconds: Option<f64>,
    overlaps: bool,
    /// How much faster than its limits the fastest step was, at least 1: the machine was busy when they were measured.
    beaten: f64,
}

impl SpeedOfLight {
    /// Collective: ranks measure their limits together.
    pub fn new(plan: &Plan, device: &dyn Device, gpu: Option<&Cuda>, mesh: &Mesh) -> Result<SpeedOfLight> {
        let (s, spec) = (&plan.settings, &plan.engine.spec);
        // On the CPU nothing is offloaded.
        let strategy = engine::strategy(s, DeviceName::Cpu, spec)?;
        let options = EngineOptions { strategy, ..plan.engine.clone() };
        let mut counter = StepCounter::new(&options, mesh.sizes, mesh.rank())?;
        let loader = plan.loader(mesh.group(Axis::Dp).rank())?;
        let row = vec![0; plan.dataset.max_sequence()];
        let sequences = loader.batch_size * plan.dataset.max_len() / row.len();
        let rows = MicroBatch::from_rows((0..sequences).map(|_| &row[..]));
        // What comes with rows of preferences.
        let rows = MicroBatch { reference: vec![0.0; sequences], ..rows };
        let labeled = plan.dataset.kind() == SampleKind::Labeled;
        let batch = MicroBatch { mismatched: labeled.then(|| Box::new(rows.clone())), ..rows };
        let full = counter.step(&vec![batch; loader.grad_accum])?.clone();

        let known = gpu.map(Cuda::model).transpose()?.and_then(|name| telemetry::data_sheet(&name));
        let share = 1.0 / s.run.ranks_per_gpu.unwrap_or(1) as f64;
        let known = known.map(|sheet| (sheet.share(share), s.precision.tf32 == Some(true)));
        let measures = s.run.measure_peak != Some(false);
        let limits = match plan.ranks.device {
            DeviceName::Sim => None,
            _ if known.is_none() && !measures => None,
            _ => {
                let work = (&full, plan.steps());
                Some(Limits::measure(
                    device,
                    mesh.group(Axis::World),
                    work,
                    measures.then_some(4 * plan.size.params),
                    known,
                )?)
            }
        };
        let peak = limits.as_ref().and_then(|limits| limits.flops(plan.engine.strategy.dtype()));
        let foundry = spec.flops_per_token(plan.dataset.max_sequence()) as f64 / mesh.group(Axis::World).size() as f64;
        Ok(SpeedOfLight {
            counter,
            full,
            limits,
            foundry_seconds: peak.map(|peak| foundry / peak),
            overlaps: !device.is_synchronous(),
            beaten: 1.0,
        })
    }

    /// The ratios of a step of `tokens` tokens of all ranks that took so many seconds.
    pub fn of(&mut self, batches: &[MicroBatch], tokens: u64, seconds: f64) -> Result<Option<Ratios>> {
        let (Some(limits), Some(foundry)) = (&self.limits, self.foundry_seconds) else { return Ok(None) };
        let ideal = limits.ideal(self.counter.step(batches)?);
        let reached = Ratios {
            mfu: ideal.products / seconds,
            mfu_llm_foundry: foundry * tokens as f64 / seconds,
            sol: ideal.seconds(self.overlaps) / seconds,
        };
        Ok(Some(reached.of_best(&mut self.beaten)))
    }

    /// The work of a step of full rows on this rank.
    pub fn work_json(&self) -> Value {
        let StepWork { flops, attention, recomputed, moved, gathered, reduced } = &self.full;
        let flops: BTreeMap<_, _> = flops.iter().map(|(dtype, flops)| (dtype.name(), flops)).collect();
        json!({
            "flops": flops,
            "attention_flops": attention,
            "recomputed_flops": recomputed,
            "moved_bytes": moved.iter().sum::<u64>(),
            "gathered_bytes": gathered,
            "reduced_bytes": reduced,
        })
    }
    pub fn limits_json(&self) -> Value {
        self.limits.as_ref().map_or(Value::Null, Limits::json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_beats_the_limits_raises_them() {
        let mut beaten = 1.0;
        let mut of = |sol| Ratios { mfu: sol / 2.0, mfu_llm_foundry: sol, sol }.of_best(&mut beaten);
        let ratios = [0.8, 1.25, 1.0].map(&mut of).map(|ratios| [ratios.sol, ratios.mfu]);
        assert_eq!(ratios, [[0.8, 0.4], [1.0, 0.5], [0.8, 0.4]]);
    }
}
