//! The engine of a run and the bytes of a rank: how many texts it samples at once, and how many parameters manual
//! sharding keeps unsharded, follow from the memory budget. Never allocates.
use super::bytes::{self, PlannedRanks};
use super::prompts::{SamplePrompts, sampler_size};
use super::ranks::RankPlan;
use super::{engine, knobs};
use crate::base::{Category, Error, Result};
use crate::engine::{EngineOptions, SamplerSize};
use crate::nn::{Decoder, Layout, Segment, Spec};
use crate::run::settings::{DeviceName, Settings};
use serde::{Deserialize, Serialize};

/// Parameters, and bytes per rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelSize {
    pub params: usize,
    /// Parameters that are not frozen.
    pub trainable: usize,
    /// Bytes of one rank, in the order of [`crate::base::CATEGORIES`].
    pub planned: Vec<(Category, usize)>,
}

impl ModelSize {
    /// Bytes of a rank on its device.
    pub fn on_device(&self) -> usize {
        bytes::on_device(&self.planned)
    }
}

pub struct SizedEngine {
    pub options: EngineOptions,
    /// `max_live_parameters` that follows from `memory_budget`.
    pub live: Option<usize>,
    pub size: ModelSize,
    /// The whole model.
    pub decoder: Decoder,
    /// Rank 0's part of it.
    pub of_rank: Decoder,
}

impl SizedEngine {
    /// `copies`: async checkpoints keep a copy of what they save.
    pub fn new(
        s: &Settings,
        ranks: &RankPlan,
        spec: Spec,
        prompts: Option<&SamplePrompts>,
        copies: bool,
    ) -> Result<SizedEngine> {
        let options = engine::options(s, ranks.device, &ranks.mesh, spec)?;
        let decoder = Decoder::tuned(options.spec.clone(), &options.tuning)?;
        if options.tuning.uniform {
            knobs::uniform(decoder.layouts(), engine::wrap(&s.fsdp)?)?;
        }
        let of_rank = options.decoder(&ranks.mesh, &ranks.mesh.coords(0))?;
        let all = PlannedRanks::new(s, ranks.mesh, ranks.device, ranks.nproc);
        let samples = |most| sampler_size(s, prompts, &ranks.mesh, most);
        let options = sampling_within_budget(s, options, &samples, |options: &EngineOptions| {
            bytes::of_training(s, options, &all, copies)
        })?;
        let planned = |live| {
            let options = engine::keeping(s, ranks.device, live, options.clone())?;
            bytes::of_training(s, &options, &all, copies)
        };
        let live = within_budget(s, ranks.device, of_rank.layouts(), &planned)?;
        let segments = || decoder.layouts().iter().flat_map(|layout| &layout.segments);
        let size = ModelSize {
            params: segments().map(Segment::len).sum(),
            trainable: segments().filter(|segment| segment.is_trained()).map(Segment::len).sum(),
            planned: planned(live)?,
        };
        let options = engine::keeping(s, ranks.device, live, options)?;
        Ok(SizedEngine { options, live, size, decoder, of_rank })
    }
}

/// `engine` with as many texts at once as fit within `memory_budget`, at least one; `samples` returns the size of a
/// sampler with at most so many, None if nothing is sampled. Texts do not depend on how many there are at once.
fn sampling_within_budget(
    s: &Settings,
    engine: EngineOptions,
    samples: &dyn Fn(Option<usize>) -> Result<Option<SamplerSize>>,
    planned: impl Fn(&EngineOptions) -> Result<Vec<(Category, usize)>>,
) -> Result<EngineOptions> {
    let engine = EngineOptions { samples: samples(None)?, ..engine };
    let (Some(budget), Some(size)) = (s.fsdp.budget()?, &engine.samples) else { return Ok(engine) };
    let (mut fitting, mut unknown) = (0, size.texts);
    let with = |texts| Ok::<_, Error>(EngineOptions { samples: samples(Some(texts))?, ..engine.clone() });
    while fitting < unknown {
        let middle = (fitting + unknown).div_ceil(2);
        match bytes::on_device(&planned(&with(middle)?)?) as u64 <= budget {
            true => fitting = middle,
            false => unknown = middle - 1,
        }
    }
    with(fitting.max(1))
}

/// The most parameters that FULL_SHARD or HYBRID_SHARD can have unsharded within `memory_budget`, if these are more
/// than it needs and the user set no limit. `planned` returns the bytes of a rank, with that limit if given. Fails if
/// even without it a rank takes more than the budget.
fn within_budget(
    s: &Settings,
    device: DeviceName,
    layouts: &[Layout],
    planned: &dyn Fn(Option<usize>) -> Result<Vec<(Category, usize)>>,
) -> Result<Option<usize>> {
    let Some(budget) = s.fsdp.budget()? else { return Ok(None) };
    let needed = |live| -> Result<u64> { Ok(bytes::on_device(&planned(live)?) as u64) };
    let least = needed(None)?;
    if least > budget {
        return Err(Error::input(format!(
            "memory_budget is {budget} bytes, but this run needs {least} bytes per rank: raise it, or use a smaller model, \
             batch_size or max_len, activation_checkpoint, precision bf16, or more ranks"
        )));
    }
    let sharded = engine::sharded(s, device)?.filter(|sharded| sharded.reshard);
    let Some(sharded) = sharded.filter(|_| s.fsdp.max_live_parameters.is_none()) else { return Ok(None) };
    // Bytes grow with the units that are kept: the first limit that does not fit follows the one to choose.
    let limits = sharded.keeping_more(layouts);
    let (mut fitting, mut unknown) = (0, limits.len());
    while fitting < unknown {
        let middle = (fitting + unknown) / 2;
        match needed(Some(limits[middle]))? <= budget {
            true => fitting = middle + 1,
            false => unknown = middle,
        }
    }
    Ok(fitting.checked_sub(1).map(|last| limits[last]))
}
