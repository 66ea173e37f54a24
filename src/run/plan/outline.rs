//! The plan of a hypothetical run, for `experiments plan`: mesh, engine and bytes per rank, for any device and world
//! size. Never reads data, starts ranks or writes files.
use crate::base::{Category, Result};
use crate::ckpt::{self, CarriedSize, hf, is_model};
use crate::comm::mesh::MeshSizes;
use crate::data::Tokenizer;
use crate::engine::EngineOptions;
use crate::run::plan::bytes::PlannedRanks;
use crate::run::plan::model::{self, ModelPlan};
use crate::run::plan::prompts::{SamplePrompts, sampler_size};
use crate::run::plan::save::SaveOptions;
use crate::run::plan::{bytes, engine, knobs, mesh};
use crate::run::settings::value::set;
use crate::run::settings::{DeviceName, Settings};

#[derive(Clone)]
pub struct Outline {
    /// With the derived values filled in.
    pub settings: Settings,
    pub mesh: MeshSizes,
    pub engine: EngineOptions,
    pub params: usize,
    /// What the model has besides the text model that is trained, if its weights are there.
    pub carried: Option<CarriedSize>,
    /// Bytes of one rank, in the order of [`crate::base::CATEGORIES`]; on GPUs without the CUDA context.
    pub planned: Vec<(Category, usize)>,
    /// Tokens per sequence, sequences per micro-batch, micro-batches per step.
    pub work: [usize; 3],
}

impl Outline {
    /// `world` ranks, `per_node` of them on each host. The errors are those of a run.
    pub fn new(
        mut s: Settings,
        tokenizer: Tokenizer,
        device: DeviceName,
        world: usize,
        per_node: usize,
    ) -> Result<Outline> {
        let save = SaveOptions::new(&s.checkpoint)?;
        s.run.nproc_per_node = None; // the launcher's
        knobs::check(&s)?;
        let nproc = per_node.min(world);
        let (mesh, _) = mesh::sizes(&mut s, device, Some((world, nproc)))?;
        // A config.json suffices; where there is none, a run's message says what the directory is instead.
        if s.model.pretrain.as_ref().is_some_and(|dir| !dir.join(hf::FILE).exists()) {
            model::has_weights(&s)?;
        }
        let weights = s.model.pretrain.as_ref().filter(|dir| is_model(dir).is_ok());
        let carried = weights.map_or(Ok(None), |dir| ckpt::carried(dir))?;
        let ModelPlan { spec, tokenizer } = ModelPlan::with(tokenizer, &mut s)?;
        // There is no data that lengths could follow from.
        let longest = s.task.as_ref().and_then(|task| task.max_len).map(|limit| limit.min(spec.max_len));
        s.data.max_len = s.data.max_len.or(longest);
        let prompts = SamplePrompts::read(&s, &tokenizer, &spec)?;
        let engine = engine::options(&s, device, &mesh, spec)?;
        let engine = EngineOptions { samples: sampler_size(&s, prompts.as_ref(), &mesh, None)?, ..engine };
        let params = engine.spec.params();
        let ranks = PlannedRanks::new(&s, mesh, device, per_node);
        let planned = bytes::of_training(&s, &engine, &ranks, save.background)?;
        let work = [
            set(&s.data.max_len, "data.max_len")?,
            set(&s.batch.batch_size, "batch.batch_size")?,
            set(&s.batch.grad_accum, "batch.grad_accum")?,
        ];
        Ok(Outline { settings: s, mesh, engine, params, carried, planned, work })
    }
}
