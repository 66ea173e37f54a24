//! Bytes that a rank will hold, by category, found by building its engine on a device that only counts. Never
//! allocates.
use crate::base::{Category, Result};
use crate::ckpt::Checkpointer;
use crate::comm::mesh::MeshSizes;
use crate::engine::{Engine, EngineOptions, Generator, GeneratorOptions, PlannedRank, ReferenceScorer};
use crate::nn::Spec;
use crate::run::settings::DeviceName;

/// Rank 0: no rank holds more.
fn rank(mesh: &MeshSizes, device: DeviceName, per_host: usize) -> PlannedRank {
    let gpu = device == DeviceName::Cuda;
    PlannedRank { mesh: *mesh, rank: 0, sharing: if gpu { 1 } else { per_host }, gpu }
}

/// The bytes that are on the rank's device.
pub fn on_device(planned: &[(Category, usize)]) -> usize {
    planned.iter().filter(|p| p.0 != Category::Host).map(|p| p.1).sum()
}

/// Bytes of a rank that trains and saves, in the order of [`crate::base::CATEGORIES`]. `copies`: async checkpoints,
/// which keep a copy of what they save.
pub fn of_training(
    options: &EngineOptions,
    mesh: &MeshSizes,
    copies: bool,
    device: DeviceName,
    per_host: usize,
) -> Result<Vec<(Category, usize)>> {
    let (moments, mut copy) = (options.rule.state(), 0);
    let mut bytes = rank(mesh, device, per_host).bytes(|dev, mesh| {
        let engine = Engine::unfilled(dev.clone(), mesh, options)?;
        let layouts = engine.decoder().layouts();
        if copies {
            copy = Checkpointer::copy_bytes(layouts, options.strategy.masters(), &moments, &mesh.sizes);
        }
        let checkpointer = Checkpointer::new(dev, mesh, &options.spec, layouts, moments)?;
        Ok((engine, checkpointer))
    })?;
    bytes.iter_mut().filter(|b| b.0 == Category::Other).for_each(|b| b.1 += copy);
    Ok(bytes)
}

/// The same while the log-probabilities of `reference` are computed, before there is an engine.
pub fn of_scoring(
    options: &EngineOptions,
    reference: &Spec,
    mesh: &MeshSizes,
    device: DeviceName,
    per_host: usize,
) -> Result<Vec<(Category, usize)>> {
    rank(mesh, device, per_host).bytes(|dev, mesh| ReferenceScorer::new(dev, mesh, options, reference))
}

/// Bytes of a rank that only generates text.
pub fn of_writing(
    options: &GeneratorOptions,
    mesh: &MeshSizes,
    device: DeviceName,
    per_host: usize,
) -> Result<Vec<(Category, usize)>> {
    rank(mesh, device, per_host).bytes(|dev, mesh| Generator::new(dev, mesh, options))
}
