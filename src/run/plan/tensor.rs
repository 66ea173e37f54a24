//! Tensor parallelism in a plan: chooses the tp plan, resolves it for this model, and checks that the model can be
//! sharded so. Never starts a rank.
use crate::base::Result;
use crate::ckpt::hf;
use crate::comm::MeshSizes;
use crate::engine::EngineOptions;
use crate::nn::tp_plan::{self as plan, Meaning};
use crate::run::settings::Settings;
use crate::run::settings::value::set;

/// Sets which tensors are sharded over tp. No effect without tp.
pub fn settle(s: &Settings, mesh: &MeshSizes, engine: &mut EngineOptions) -> Result<()> {
    let theirs = set(&s.parallel.use_hf_tp_plan, "parallel.use_hf_tp_plan")?;
    if mesh.tp == 1 {
        return Ok(());
    }
    let arch = engine.spec.arch;
    let modules = match &s.model.pretrain {
        Some(dir) if theirs => hf::tp_plan(dir)?.unwrap_or_else(|| plan::transformers(arch)),
        _ if theirs => plan::transformers(arch),
        _ => plan::built_in(arch),
    };
    let Meaning { cuts, sequence_parallel } = plan::read(&engine.spec, &modules)?;
    engine.cuts = cuts;
    engine.sequence_parallel |= sequence_parallel;
    engine.decoder(mesh, &mesh.coords(0)).map(|_| ())
}
