//! A model that writes text: found, planned and loaded, for one prompt or for a conversation. Never picks a token.
//!
//! Every token needs all weights. If the ranks have the memory, weights are gathered for the first token and kept
//! unsharded; otherwise they are gathered for every token.
use super::ends::{special_stops, stop_tokens};
use super::suggested;
use crate::base::{Category, Error, Meter, Result};
use crate::ckpt::{self, Checkpointer, Resume};
use crate::comm::Axis;
use crate::comm::env::RankEnv;
use crate::comm::exchange::Exchange;
use crate::comm::mesh::Mesh;
use crate::data::Tokenizer;
use crate::data::tokenizer::FILES;
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::engine::{EngineOptions, Generator, GeneratorOptions, SamplerSize, Sampling};
use crate::hub::HubName;
use crate::nn::{Decoder, Spec};
use crate::optim::Moments;
use crate::run::launch::device::{self, RankDevice};
use crate::run::plan::bytes::PlannedRanks;
use crate::run::plan::model::ModelPlan;
use crate::run::plan::ranks::RankPlan;
use crate::run::plan::{batch, bytes, data, engine, facts, memory};
use crate::run::settings::idle;
use crate::run::settings::value::set;
use crate::run::settings::{DeviceName, Settings, ShardingName};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Where the weights are, what turns text into tokens, and the ranks that hold the model.
pub struct TextModel {
    pub settings: Settings,
    pub ranks: RankPlan,
    pub spec: Spec,
    pub tokenizer: Tokenizer,
    /// Tokens that end the text.
    pub stop: Vec<u32>,
    pub sampling: Sampling,
    /// Directory of the weights, and of the adapter that is merged into them.
    dir: PathBuf,
    adapter: Option<PathBuf>,
}

/// How weights are stored while text is written.
pub struct WeightPlan {
    /// Gathers weights for every token.
    lean: GeneratorOptions,
    /// Gathers weights once, with the bytes per rank; set if that takes more memory.
    kept: Option<(GeneratorOptions, usize)>,
}

impl TextModel {
    pub fn new(mut s: Settings, launched: Option<&RankEnv>) -> Result<TextModel> {
        let (dir, adapter) = with_base(&s, model_dir(&s)?)?;
        s.model.pretrain = Some(dir.clone());
        if let Some(adapter) = adapter.as_deref().filter(|dir| dir.join(FILES[0]).exists()) {
            s.data.tokenizer.get_or_insert_with(|| adapter.display().to_string());
        }
        let mut ranks = RankPlan::new(&mut s, launched)?;
        ranks.graphs = false; // shapes change with every prompt
        ranks.init_timeout = ranks.comm_timeout;
        s.notes.extend(idle::plan(&s, &facts::of_ranks(&s, &ranks, launched))?);
        batch::solve(&mut s, &ranks.mesh)?;
        let ModelPlan { spec, tokenizer } = ModelPlan::without_data(&mut s)?;
        if let Some(adapter) = &adapter {
            ckpt::inspect_adapter(adapter, &spec, Decoder::new(spec.clone())?.layouts())?;
        }
        let sampling = s.generate.sampling(set(&s.run.seed, "run.seed")?)?;
        s.notes.extend(suggested::unused(&dir, &s.generate));
        let mut stop = stop_tokens(&dir, &tokenizer)?;
        stop.extend(special_stops(&s, &tokenizer));
        Ok(TextModel { stop, settings: s, ranks, spec, tokenizer, sampling, dir, adapter })
    }

    /// Plans for texts of up to `prompt` tokens and `count` more: `texts` at once, or as many as there is memory for.
    /// Sets the planned bytes of the ranks.
    pub fn plan(&mut self, prompt: usize, count: usize, texts: usize) -> Result<WeightPlan> {
        let size = SamplerSize::of_many(prompt, count, texts);
        let plan = self.plan_of(size)?;
        let planned = self.ranks.planned;
        let lacks = self.ranks.device == DeviceName::Cpu
            && memory::available().is_some_and(|bytes| planned * self.ranks.nproc > bytes);
        if lacks && texts > 1 { self.plan(prompt, count, texts / 2) } else { Ok(plan) }
    }
    fn plan_of(&mut self, size: SamplerSize) -> Result<WeightPlan> {
        let RankPlan { device, mesh, nproc, .. } = self.ranks;
        let options = |s: &Settings| -> Result<(GeneratorOptions, usize)> {
            let EngineOptions { spec, strategy, cuts, .. } = engine::options(s, device, &mesh, self.spec.clone())?;
            let options = GeneratorOptions { spec, strategy, cuts, size };
            let planned = bytes::of_writing(&options, &PlannedRanks::new(s, mesh, device, nproc))?;
            let counts = |category: Category| device != DeviceName::Cuda || category != Category::Host;
            Ok((options, planned.iter().filter(|p| counts(p.0)).map(|p| p.1).sum()))
        };
        let (lean, planned) = options(&self.settings)?;
        let kept = options(&gathered_once(&self.settings)).map(|kept| Some(kept).filter(|kept| kept.1 > planned))?;
        self.ranks.planned = planned;
        Ok(WeightPlan { lean, kept })
    }

    /// Loads the model in this process's rank, and calls `write` with it.
    pub fn load(
        &self,
        env: &RankEnv,
        plan: &WeightPlan,
        write: impl FnOnce(&mut Generator, &Mesh) -> Result<()>,
    ) -> Result<()> {
        let env = &self.ranks.with_secret(env);
        for caution in self.ranks.caution(env).map(String::from).into_iter().chain(self.ranks.crowded(env)) {
            let _ = writeln!(std::io::stderr(), "{caution}");
        }
        let RankDevice { device, member, gpu, .. } = device::take(&self.ranks, env, Meter::default())?;
        let mesh = Mesh::with_world(Mesh::world(&*member)?, member, self.ranks.mesh)?;
        let written = || {
            let options = match &plan.kept {
                Some((kept, planned)) if self.fits(*planned, &*device, gpu.as_deref(), &mesh)? => kept,
                Some((_, planned)) => {
                    if mesh.rank() == 0 {
                        let gib = *planned as f64 / (1u64 << 30) as f64;
                        let what = "gathering weights for every token: keeping them would take";
                        let _ = writeln!(std::io::stderr(), "{what} {gib:.2} GiB per rank, more than is free");
                    }
                    &plan.lean
                }
                None => &plan.lean,
            };
            let mut generator = Generator::new(device.clone(), &mesh, options)?;
            let layouts = generator.layouts().to_vec();
            let mut checkpointer = Checkpointer::new(device, &mesh, &options.spec, &layouts, Moments::NONE)?;
            checkpointer.load_model(&self.dir, generator.store())?;
            if let Some(adapter) = &self.adapter {
                checkpointer.merge(adapter, generator.store())?;
            }
            write(&mut generator, &mesh)
        };
        written().inspect_err(|_| mesh.member.abort())
    }

    /// Whether every rank has the memory for `planned` bytes. Collective; called before the first large allocation.
    fn fits(&self, planned: usize, dev: &dyn Device, gpu: Option<&Cuda>, mesh: &Mesh) -> Result<bool> {
        let fits = match gpu {
            Some(gpu) => gpu.require(planned, self.ranks.ranks_per_gpu).is_ok(),
            None => memory::available().is_none_or(|bytes| planned * self.ranks.nproc <= bytes),
        };
        let mut exchange = Exchange::new(dev, mesh.group(Axis::World).clone(), "memory for weights", 1)?;
        Ok(exchange.gather(dev, &[u64::from(fits)])?.iter().all(|&fits| fits == 1))
    }
}

/// The same settings with weights that stay unsharded: SHARD_GRAD_OP, or ZeRO stage 2.
fn gathered_once(s: &Settings) -> Settings {
    let mut s = s.clone();
    s.fsdp.sharding = Some(ShardingName::ShardGradOp);
    if s.fsdp.zero_stage == Some(3) {
        (s.fsdp.zero_stage, s.zero) = (Some(2), Default::default());
    }
    s
}

/// The checkpoint of `--resume` or `--ckpt-dir`, or else the model of `--pretrain`, which may also be a checkpoint
/// directory.
fn model_dir(s: &Settings) -> Result<PathBuf> {
    let c = &s.checkpoint;
    let from = match (c.resume.as_deref(), &c.ckpt_dir, &s.model.pretrain) {
        (None | Some("auto"), Some(dir), _) => dir,
        (Some("best"), Some(dir), _) => &dir.join("best"),
        (Some(dir), ..) if dir != "auto" => &PathBuf::from(dir),
        (_, _, Some(dir)) => dir,
        _ => {
            return Err(Error::input(
                "--generate needs a model: add --pretrain DIR, or --ckpt-dir DIR for the newest checkpoint there",
            ));
        }
    };
    if [ckpt::hf::FILE, ckpt::adapter::FILE].iter().any(|file| from.join(file).exists()) {
        return Ok(from.clone());
    }
    let newest = if from.is_file() { None } else { ckpt::newest(from)? };
    match (newest, &s.model.pretrain) {
        (Some(newest), _) => Ok(newest),
        (None, Some(dir)) if dir == from => Ok(from.clone()),
        (None, _) => ckpt::resolve(None, &Resume::Dir(from.clone()))?
            .ok_or_else(|| Error::input(format!("{}: holds no checkpoint", from.display()))),
    }
}

/// The model in `dir`; if it is an adapter alone, its base model (of `--pretrain`, or that it names) and itself.
fn with_base(s: &Settings, dir: PathBuf) -> Result<(PathBuf, Option<PathBuf>)> {
    if !dir.join(ckpt::adapter::FILE).exists() || ckpt::is_model(&dir).is_ok() {
        return Ok((dir, None));
    }
    let given = s.model.pretrain.clone().filter(|base| !names(base, &dir));
    let base = given.or_else(|| ckpt::adapter::base(&dir).map(PathBuf::from));
    let base = base.map(|base| ckpt::gguf::resolve(&base, &data::cache_dir(&s.data))).transpose()?;
    match base.filter(|base| base.is_dir()) {
        Some(base) => Ok((base, Some(dir))),
        None => Err(Error::input(format!(
            "--generate: {} is a LoRA adapter, and its base model ({}) is not a directory here: add --pretrain BASE \
             --resume {}",
            dir.display(),
            ckpt::adapter::base(&dir).unwrap_or("not named".into()),
            dir.display()
        ))),
    }
}

/// Whether `path` names `adapter`: it is its directory, or that of checkpoints of which it is the newest.
fn names(path: &Path, adapter: &Path) -> bool {
    path == adapter || ckpt::of_model(path).is_ok_and(|found| found == adapter)
}

/// The adapter whose base model has to be found on the hub, and its name there.
pub fn base_name(s: &Settings) -> Option<(PathBuf, HubName)> {
    let dir = model_dir(s).ok().filter(|dir| dir.join(ckpt::adapter::FILE).exists() && ckpt::is_model(dir).is_err())?;
    if s.model.pretrain.as_ref().is_some_and(|base| !names(base, &dir)) {
        return None;
    }
    let base = ckpt::adapter::base(&dir).filter(|base| !Path::new(base).exists())?;
    Some((dir, HubName::model(&base)?))
}
