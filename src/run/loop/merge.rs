//! `--lora-merge`: the model of `--pretrain` with an adapter added to it, written to `--save-hf`. Never trains: every
//! rank merges the weights that it owns and writes them.
use crate::base::{Error, Result};
use crate::ckpt::{Checkpointer, Companions};
use crate::comm::mesh::Mesh;
use crate::device::Device;
use crate::nn::Decoder;
use crate::run::plan::Plan;
use crate::run::watch::RunLog;
use crate::run::watch::report;
use std::path::Path;
use std::sync::Arc;

pub fn run(plan: &Plan, adapter: &Path, device: Arc<dyn Device>, mesh: &Mesh, log: &RunLog) -> Result<()> {
    let asked = (&plan.settings.model.pretrain, &plan.settings.checkpoint.save_hf);
    let (Some(base), Some(target)) = asked else { return Err(Error::op("merge", "a model and a place for it")) };
    let decoder = Decoder::new(plan.engine.spec.clone())?;
    let mut store = plan.engine.strategy.store(device.clone(), mesh, decoder.layouts())?;
    let (spec, max) = (&plan.engine.spec, plan.save.max_file_bytes);
    let mut checkpointer = Checkpointer::new(device, mesh, spec, decoder.layouts(), &[])?.with_files_of(max);
    checkpointer.overwrite(plan.settings.checkpoint.overwrite == Some(true));
    if mesh.rank() == 0 {
        let tokenizer = plan.tokenizer.files();
        checkpointer.accompany(Companions::of(spec, Some(base), tokenizer.first().map(|p| p.as_path()))?);
    }
    checkpointer.load_model(base, &mut *store)?;
    let adapters = checkpointer.merge(adapter, &mut *store)?;
    let saved = checkpointer.save_hf(target, plan.save.dtype, &mut *store)?;
    if mesh.rank() == 0 {
        log.info(format_args!(
            "{adapters} adapters merged; model in {}, {}",
            saved.path.display(),
            report::mib(saved.bytes)
        ));
    }
    Ok(())
}
