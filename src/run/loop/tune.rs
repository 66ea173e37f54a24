//! Chooses the algorithms of a run's matrix products before its first step: from the choices of earlier runs, or by
//! timing those of the first step. Every rank ends with the same choices, those of the lowest rank that has one: ranks
//! that compute the same values (tp outside of sharded layers) would drift apart if they summed in different orders.
//! Later shapes (evaluation, rows of other lengths) use the library's first choice. Never times inside a step.
use super::context::RankContext;
use crate::base::{Error, Meter, Result};
use crate::comm::exchange::texts;
use crate::comm::{Axis, env};
use crate::data::MicroBatch;
use crate::device::gpu::GpuDevice;
use crate::device::gpu::cuda::{Choices, Cuda, Rehearsal, TunedProducts, WantedProduct};
use crate::engine::{self, EngineOptions};
use crate::run::plan::engine::strategy;
use crate::run::settings::DeviceName;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;

/// What one rank contributes.
#[derive(Serialize, Deserialize)]
struct RankChoices {
    machine: String,
    choices: Choices,
}

/// Collective. `batches`: the micro-batches of the first step.
pub fn tune(rank: &RankContext, batches: &[MicroBatch]) -> Result<()> {
    let RankContext { plan, log, mesh, .. } = *rank;
    let Some(gpu) = rank.gpu.as_ref().filter(|_| plan.settings.run.tune_products == Some(true)) else { return Ok(()) };
    let (started, machine, dir) = (Instant::now(), gpu.tuned_machine()?, env::cache_dir());
    let first_of_host = mesh.rank().is_multiple_of(plan.ranks.nproc);
    let known = Choices::read(&dir, &machine).unwrap_or_else(|why| {
        if first_of_host {
            log.warn(format_args!("cuBLASLt's algorithms are timed again: {why}"));
        }
        Choices::default()
    });
    let tuned = gpu.tune(&rehearsed(rank, gpu, batches)?, &known)?;
    let mine = RankChoices { machine, choices: tuned.choices.clone() };
    let mut choices = agreed(rank, &mine)?;
    let changed = gpu.install(&choices)?;
    if mesh.rank() == 0 {
        say(rank, &tuned, changed, started);
    }
    choices.fill_from(&known);
    if choices != known
        && let Err(e) = choices.write(&dir, &mine.machine)
        && first_of_host
    {
        log.warn(format_args!("cannot keep the choices of cuBLASLt's algorithms in {}: {e}", dir.display()));
    }
    Ok(())
}

/// The products of a step.
fn rehearsed(rank: &RankContext, gpu: &Arc<Cuda>, batches: &[MicroBatch]) -> Result<Vec<WantedProduct>> {
    let (plan, mesh) = (rank.plan, rank.mesh);
    let rehearsal = Arc::new(Rehearsal::new(gpu.clone()));
    let device = Arc::new(GpuDevice::new(rehearsal.clone(), Meter::default())?);
    // On the CPU nothing is offloaded: updates would touch host memory.
    let strategy = strategy(&plan.settings, DeviceName::Cpu, &plan.engine.spec)?;
    let options = EngineOptions { strategy, ..plan.engine.clone() };
    engine::rehearse(device, &options, mesh.sizes, mesh.rank(), batches)?;
    Ok(rehearsal.products())
}

/// The choices of all ranks on such machines; of the lowest rank where they differ.
fn agreed(rank: &RankContext, mine: &RankChoices) -> Result<Choices> {
    if rank.mesh.group(Axis::World).size() == 1 {
        return Ok(mine.choices.clone());
    }
    let unread = |e: serde_json::Error| Error::op("tune", format!("a rank's choices of algorithms: {e}"));
    let text = serde_json::to_string(mine).map_err(unread)?;
    let mut all = Choices::default();
    for text in texts(&*rank.device, rank.mesh.group(Axis::World), "tune", &text)? {
        let theirs: RankChoices = serde_json::from_str(&text).map_err(unread)?;
        if theirs.machine == mine.machine {
            all.fill_from(&theirs.choices);
        }
    }
    Ok(all)
}

fn say(rank: &RankContext, tuned: &TunedProducts, changed: usize, started: Instant) {
    let TunedProducts { known, timed, too_large, .. } = tuned;
    if known + timed + too_large == 0 {
        return; // every product has one algorithm
    }
    let skipped = match too_large {
        0 => String::new(),
        n => format!(", {n} did not fit the free memory"),
    };
    rank.log.info(format_args!(
        "matrix products: {timed} timed, {known} known from earlier runs{skipped}; {changed} use another algorithm than \
         the library's first ({:.1}s)",
        started.elapsed().as_secs_f64()
    ));
}
