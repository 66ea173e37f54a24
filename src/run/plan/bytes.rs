//! Bytes that a rank will hold, by category, found by building its engine on a device that only counts. Never
//! allocates.
use crate::base::{Category, Result};
use crate::ckpt::Checkpointer;
use crate::comm::{IPC_STAGE, Mesh, MeshSizes};
use crate::device::Device;
use crate::engine::{Engine, EngineOptions, Generator, GeneratorOptions, PlannedRank, ReferenceModel, ReferenceScorer};
use crate::nn::Layout;
use crate::optim::Moments;
use crate::run::plan::objective;
use crate::run::settings::{CommName, DeviceName, Settings};
use crate::store::{self, Strategy};
use std::sync::Arc;

/// The ranks of a run.
#[derive(Clone, Copy)]
pub struct PlannedRanks {
    pub mesh: MeshSizes,
    gpu: bool,
    per_host: usize,
    stage: usize,
}

impl PlannedRanks {
    pub fn new(s: &Settings, mesh: MeshSizes, device: DeviceName, per_host: usize) -> PlannedRanks {
        let stage = if s.run.comm == Some(CommName::Ipc) { IPC_STAGE } else { 0 };
        PlannedRanks { mesh, gpu: device == DeviceName::Cuda, per_host, stage }
    }
    /// Rank 0: no rank holds more.
    fn bytes<T>(&self, build: impl FnOnce(Arc<dyn Device>, &Mesh) -> Result<T>) -> Result<Vec<(Category, usize)>> {
        let PlannedRanks { mesh, gpu, per_host, stage } = *self;
        PlannedRank { mesh, rank: 0, sharing: if gpu { 1 } else { per_host }, stage, gpu }.bytes(build)
    }
}

/// The bytes that are on the rank's device.
pub fn on_device(planned: &[(Category, usize)]) -> usize {
    planned.iter().filter(|p| p.0 != Category::Host).map(|p| p.1).sum()
}

/// Bytes of a rank that trains and saves, in the order of [`crate::base::CATEGORIES`]. `copies`: async checkpoints,
/// which keep a copy of what they save.
pub fn of_training(
    s: &Settings,
    options: &EngineOptions,
    ranks: &PlannedRanks,
    copies: bool,
) -> Result<Vec<(Category, usize)>> {
    let (moments, mut copy) = (options.rule.state(), 0);
    let mut bytes = ranks.bytes(|dev, mesh| {
        let engine = Engine::unfilled(dev.clone(), mesh, options)?;
        let layouts = engine.decoder().layouts();
        if copies {
            copy = Checkpointer::copy_bytes(layouts, options.strategy.masters(), &moments, &mesh.sizes);
        }
        let exchange = Checkpointer::exchange(&*dev, mesh, layouts, &moments)?;
        Ok((engine, exchange))
    })?;
    bytes.iter_mut().filter(|b| b.0 == Category::Other).for_each(|b| b.1 += copy);
    let reference = objective::reference_model(s, &options.spec)?;
    if let Some(reference) = reference.filter(|_| options.reference == ReferenceModel::Given) {
        // It is scored before there is an engine, and may be larger than the trained model.
        let before = ranks.bytes(|dev, mesh| ReferenceScorer::new(dev, mesh, options, &reference))?;
        bytes.iter_mut().zip(before).for_each(|(most, before)| most.1 = most.1.max(before.1));
    }
    Ok(bytes)
}

/// Bytes of a rank that only reads and writes weights.
pub fn of_weights(strategy: &dyn Strategy, layouts: &[Layout], ranks: &PlannedRanks) -> Result<Vec<(Category, usize)>> {
    ranks.bytes(|dev, mesh| {
        let exchange = Checkpointer::exchange(&*dev, mesh, layouts, &Moments::NONE)?;
        Ok((store::allocate(strategy, dev, mesh, layouts)?, exchange))
    })
}

/// Bytes of a rank that only generates text.
pub fn of_writing(options: &GeneratorOptions, ranks: &PlannedRanks) -> Result<Vec<(Category, usize)>> {
    ranks.bytes(|dev, mesh| Generator::new(dev, mesh, options))
}
