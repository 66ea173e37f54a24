//! What a run begins with: the weights of a model or of a checkpoint, with its moments, and the checkpointer that will
//! write them again. Never decides which checkpoint that is: `resume` does.
use crate::base::{Error, Result};
use crate::ckpt::{Checkpointer, Companions};
use crate::comm::mesh::Mesh;
use crate::device::Device;
use crate::engine::Engine;
use crate::run::plan::Plan;
use crate::run::plan::resume::ResumeFrom;
use crate::run::watch::RunLog;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub struct LoadedRun {
    pub checkpointer: Checkpointer,
    /// The checkpoint that the run goes on from.
    pub resumed: Option<ResumeFrom>,
    /// That it took to read weights, where they were read.
    pub seconds: Option<f64>,
}

/// Assigns the engine's weights, moments and loss scale, where there are any to read. All ranks together.
pub fn load(plan: &Plan, device: Arc<dyn Device>, mesh: &Mesh, engine: &mut Engine, log: &RunLog) -> Result<LoadedRun> {
    let pretrain = plan.settings.model.pretrain.as_deref();
    let source = plan.resume.as_ref().map(|r| r.dir.as_path()).or(pretrain);
    let mut checkpointer = checkpointer(plan, device, mesh, engine, source)?;
    let started = Instant::now();
    let adapted = plan.engine.tuning.lora.is_some();
    if let Some(dir) = pretrain.filter(|_| adapted || plan.resume.is_none()) {
        checkpointer.load_model(dir, engine.state().0)?;
    }
    let resumed = plan.resume.clone().map(|resume| read(resume, plan, &mut checkpointer, engine)).transpose()?;
    if let Some(ResumeFrom { dir, state, damaged, .. }) = &resumed {
        if mesh.rank() == 0 && !damaged.is_empty() {
            damaged.iter().for_each(|what| log.warn(format_args!("warning: damaged checkpoint: {what}")));
            log.warn(format_args!("warning: going on from {}, after step {}", dir.display(), state.step));
        }
        if let (Some(scaler), Some(state)) = (engine.scaler(), &state.scaler) {
            scaler.resume(state)?;
        }
    }
    Ok(LoadedRun { checkpointer, resumed, seconds: source.map(|_| started.elapsed().as_secs_f64()) })
}

/// The checkpoint, or the newest older one whose tensors are whole: which one it was.
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

/// Of the engine's tensors, with the files that stand beside them in what it writes.
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
    if mesh.rank() == 0 {
        let (tokenizer, ends) = (plan.tokenizer.files(), (plan.tokenizer.bos(), plan.tokenizer.eos()));
        let mut companions = Companions::of(spec, source, tokenizer.first().map(|p| p.as_path()))?.with_ends(ends);
        if let Some(lora) = &plan.engine.tuning.lora {
            companions = companions.adapting(lora, plan.settings.model.pretrain.as_deref());
        }
        checkpointer.accompany(companions);
    }
    Ok(checkpointer)
}
