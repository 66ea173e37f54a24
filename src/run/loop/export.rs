//! What a training run has made, in each of the forms that were asked for: the model and its adapters. Every rank
//! writes the weights that it owns. Never trains.
use crate::base::Result;
use crate::ckpt::{self, Checkpointer, SavedCheckpoint};
use crate::comm::mesh::Mesh;
use crate::run::plan::Plan;
use crate::run::plan::save::SaveOptions;
use crate::run::settings::checkpoint::CheckpointSettings;
use crate::store::Store;

/// The adapters alone, and the model, with them merged. All ranks together.
pub fn trained(
    plan: &Plan,
    mesh: &Mesh,
    checkpointer: &mut Checkpointer,
    store: &mut dyn Store,
) -> Result<Vec<SavedCheckpoint>> {
    let (c, save) = (&plan.settings.checkpoint, &plan.save);
    let (Some(_), Some(base)) = (&plan.engine.tuning.lora, &plan.settings.model.pretrain) else {
        return model(c, save, checkpointer, store);
    };
    let adapter = c.save_adapter.as_ref().map(|dir| checkpointer.save_hf(dir, ckpt::Dtype::F32, store)).transpose()?;
    let Some(near) = c.save_hf.as_ref().or(c.save_gguf.as_ref()) else { return Ok(adapter.into_iter().collect()) };
    let model = model(c, save, &mut checkpointer.merging(mesh, base, near, store)?, store)?;
    Ok(adapter.into_iter().chain(model).collect())
}

/// The model alone. All ranks together.
pub fn model(
    c: &CheckpointSettings,
    save: &SaveOptions,
    checkpointer: &mut Checkpointer,
    store: &mut dyn Store,
) -> Result<Vec<SavedCheckpoint>> {
    let hf = c.save_hf.as_ref().map(|dir| checkpointer.save_hf(dir, save.dtype, store)).transpose()?;
    let gguf = c.save_gguf.as_ref().map(|file| checkpointer.save_gguf(file, save.gguf, store)).transpose()?;
    Ok(hf.into_iter().chain(gguf).collect())
}
