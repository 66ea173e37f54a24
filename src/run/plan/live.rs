//! How many texts are sampled at once, and how many parameters manual sharding keeps unsharded, within a memory budget.
//! Never allocates.
use super::{bytes, engine};
use crate::base::{Category, Error, Result};
use crate::engine::{EngineOptions, SamplerSize};
use crate::nn::Layout;
use crate::run::settings::{DeviceName, Settings};

/// `engine` with as many texts at once as fit within `memory_budget`, at least one; `samples` returns the size of a
/// sampler with at most so many, None if nothing is sampled. Texts do not depend on how many there are at once.
pub fn sampling_within_budget(
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
pub fn within_budget(
    s: &Settings,
    device: DeviceName,
    layouts: &[Layout],
    planned: &dyn Fn(Option<usize>) -> Result<Vec<(Category, usize)>>,
) -> Result<Option<usize>> {
    let Some(budget) = s.fsdp.budget()?.filter(|_| !s.only_converts()) else { return Ok(None) };
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
