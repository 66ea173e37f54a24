//! `--lora-merge` and `--export`: writes the model of `--pretrain` to `--save-hf` and `--save-gguf`, after merging an
//! adapter into it; and what a training run has made. Every rank merges and writes the weights that it owns. Never
//! trains.
use crate::base::{Error, Result};
use crate::ckpt::{self, Checkpointer, SavedCheckpoint};
use crate::comm::mesh::Mesh;
use crate::device::Device;
use crate::nn::Decoder;
use crate::optim::Moments;
use crate::run::plan::{Plan, save};
use crate::run::watch::RunLog;
use crate::run::watch::report;
use crate::store::{self, Store};
use std::sync::Arc;

pub fn run(plan: &Plan, device: Arc<dyn Device>, mesh: &Mesh, log: &RunLog) -> Result<()> {
    let Some(base) = &plan.settings.model.pretrain else { return Err(Error::op("merge", "no model")) };
    let decoder = Decoder::new(plan.engine.spec.clone())?;
    let mut store = store::allocate(&*plan.engine.strategy, device.clone(), mesh, decoder.layouts())?;
    let (spec, max) = (&plan.engine.spec, plan.save.max_file_bytes);
    let mut checkpointer = Checkpointer::new(device, mesh, spec, decoder.layouts(), Moments::NONE)?.with_files_of(max);
    checkpointer.overwrite(plan.settings.checkpoint.overwrite == Some(true));
    if mesh.rank() == 0 {
        checkpointer.accompany(save::companions(&plan.settings, spec, Some(base), &plan.tokenizer)?);
    }
    checkpointer.load_model(base, &mut *store)?;
    let adapter = plan.settings.lora.merge.as_deref();
    let what = match adapter.map(|adapter| checkpointer.merge(adapter, &mut *store)).transpose()? {
        None => "export".into(),
        Some(merged) if merged.whole > 0 => {
            format!("merge  {} adapters and {} whole tensors", merged.adapters, merged.whole)
        }
        Some(merged) => format!("merge  {} adapters", merged.adapters),
    };
    for saved in export(plan, &mut checkpointer, &mut *store)?.iter().filter(|_| mesh.rank() == 0) {
        let (path, size) = (saved.path.display(), report::mib(saved.bytes));
        log.info(format_args!("{what}  {size}  {path}"));
    }
    Ok(())
}

/// What a training run has made: its adapters alone, and the model, with them merged, in each of the forms that were
/// asked for. All ranks together.
pub fn trained(
    plan: &Plan,
    mesh: &Mesh,
    checkpointer: &mut Checkpointer,
    store: &mut dyn Store,
) -> Result<Vec<SavedCheckpoint>> {
    let c = &plan.settings.checkpoint;
    let (Some(_), Some(base)) = (&plan.engine.tuning.lora, &plan.settings.model.pretrain) else {
        return export(plan, checkpointer, store);
    };
    let adapter = c.save_adapter.as_ref().map(|dir| checkpointer.save_hf(dir, ckpt::Dtype::F32, store)).transpose()?;
    let Some(near) = c.save_hf.as_ref().or(c.save_gguf.as_ref()) else { return Ok(adapter.into_iter().collect()) };
    let model = export(plan, &mut checkpointer.merging(mesh, base, near, store)?, store)?;
    Ok(adapter.into_iter().chain(model).collect())
}

/// The model alone, in each of the forms that were asked for. All ranks together.
fn export(plan: &Plan, checkpointer: &mut Checkpointer, store: &mut dyn Store) -> Result<Vec<SavedCheckpoint>> {
    let (c, save) = (&plan.settings.checkpoint, &plan.save);
    let hf = c.save_hf.as_ref().map(|dir| checkpointer.save_hf(dir, save.dtype, store)).transpose()?;
    let gguf = c.save_gguf.as_ref().map(|file| checkpointer.save_gguf(file, save.gguf, store)).transpose()?;
    Ok(hf.into_iter().chain(gguf).collect())
}
