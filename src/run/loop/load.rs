//! Initial weights and moments of a run, from a model or a checkpoint, and the checkpointer that saves them. Never
//! chooses the checkpoint: `resume` does.
use crate::base::{Error, Result};
use crate::ckpt::{self, Checkpointer, is_created};
use crate::comm::mesh::Mesh;
use crate::device::Device;
use crate::engine::Engine;
use crate::nn::{Decoder, Segment};
use crate::optim::Moments;
use crate::run::plan::Plan;
use crate::run::plan::objective;
use crate::run::plan::resume::ResumeFrom;
use crate::run::plan::save;
use crate::run::watch::RunLog;
use crate::store::{Store, initialize, initialize_only};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub struct LoadedRun {
    pub checkpointer: Checkpointer,
    /// The checkpoint that the run resumes from.
    pub resumed: Option<ResumeFrom>,
    /// Time spent reading weights, if any were read.
    pub seconds: Option<f64>,
}

/// Draws the engine's weights, or loads them, its moments and loss scale, if there are any to read. Collective.
pub fn load(plan: &Plan, device: Arc<dyn Device>, mesh: &Mesh, engine: &mut Engine, log: &RunLog) -> Result<LoadedRun> {
    let pretrain = plan.settings.model.pretrain.as_deref();
    let source = plan.resume.as_ref().map(|r| r.dir.as_path()).or(pretrain);
    let mut checkpointer = checkpointer(plan, device.clone(), mesh, engine, source)?;
    let drawn = |segment: &Segment| source.is_none() || is_created(segment);
    initialize_only(engine.state().0, plan.engine.seed, &*device, &drawn)?;
    let started = Instant::now();
    let adapted = plan.engine.tuning.lora.is_some();
    if let Some(dir) = pretrain.filter(|_| adapted || plan.resume.is_none()) {
        checkpointer.load_model(dir, engine.state().0)?;
    }
    if let Some(dir) = plan.settings.lora.adapter.as_deref().filter(|_| plan.resume.is_none()) {
        let tower = pretrain.map_or(Ok(false), ckpt::hf::has_tower)?;
        checkpointer.load_adapter(dir, tower, engine.state().0)?;
    }
    let resumed = plan.resume.clone().map(|resume| read(resume, plan, &mut checkpointer, engine)).transpose()?;
    if let Some(ResumeFrom { dir, state, damaged, .. }) = &resumed {
        if mesh.rank() == 0 && !damaged.is_empty() {
            damaged.iter().for_each(|what| log.warn(format_args!("damaged checkpoint: {what}")));
            log.warn(format_args!("resuming from {}, step {}", dir.display(), state.step));
        }
        if let (Some(scaler), Some(state)) = (engine.scaler(), &state.scaler) {
            scaler.resume(state)?;
        }
    }
    if let Some(model) = engine.reference() {
        reference(plan, device.clone(), mesh, model)?;
    }
    if let Some(model) = engine.teacher() {
        frozen(plan, device, mesh, model, plan.settings.objective.teacher.as_deref())?;
    }
    Ok(LoadedRun { checkpointer, resumed, seconds: source.map(|_| started.elapsed().as_secs_f64()) })
}

/// Fills a reference model: from its directory, or with the weights that the run started from. Collective.
pub fn reference(plan: &Plan, device: Arc<dyn Device>, mesh: &Mesh, model: (&Decoder, &mut dyn Store)) -> Result<()> {
    frozen(plan, device, mesh, model, objective::reference_dir(&plan.settings))
}
/// Fills a frozen model from `dir`, or with initial weights. Collective.
fn frozen(
    plan: &Plan,
    device: Arc<dyn Device>,
    mesh: &Mesh,
    (decoder, store): (&Decoder, &mut dyn Store),
    dir: Option<&Path>,
) -> Result<()> {
    match dir {
        Some(dir) => {
            Checkpointer::new(device, mesh, decoder.spec(), decoder.layouts(), Moments::NONE)?.load_model(dir, store)
        }
        None => initialize(store, plan.engine.seed, &*device),
    }
}

/// Loads the checkpoint, or the newest older one whose tensors are intact, and returns which.
fn read(
    mut resume: ResumeFrom,
    plan: &Plan,
    checkpointer: &mut Checkpointer,
    engine: &mut Engine,
) -> Result<ResumeFrom> {
    loop {
        let (store, optimizer) = engine.state();
        match checkpointer.load(&resume.dir, store, optimizer) {
            Err(Error::Damaged(what)) => resume = resume.fall_back(what, &plan.engine, engine.decoder())?,
            loaded => return loaded.map(|_| resume),
        }
    }
}

/// The checkpointer of the engine's tensors, with the other files of a checkpoint: config, tokenizer, adapter config.
fn checkpointer(
    plan: &Plan,
    device: Arc<dyn Device>,
    mesh: &Mesh,
    engine: &Engine,
    source: Option<&Path>,
) -> Result<Checkpointer> {
    let (spec, layouts, moments) = (&plan.engine.spec, engine.decoder().layouts(), plan.engine.rule.state());
    let mut checkpointer =
        Checkpointer::new(device, mesh, spec, layouts, moments)?.with_files_of(plan.save.max_file_bytes);
    checkpointer.overwrite(plan.settings.checkpoint.overwrite == Some(true));
    checkpointer.export_beside();
    if mesh.rank() == 0 {
        let mut companions = save::companions(&plan.settings, spec, source, &plan.tokenizer)?;
        if let Some(lora) = &plan.engine.tuning.lora {
            companions = companions.adapting(lora, save::adapted(&plan.settings), spec);
        }
        checkpointer.accompany(companions);
    }
    Ok(checkpointer)
}
