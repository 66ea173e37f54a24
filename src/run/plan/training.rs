//! The plan of a training run: read -> check -> derive -> fit. [`Plan::new`] makes it in the process that the user or
//! an external launcher started; ranks that we start inherit its `SettledPlan`. Never starts anything, and writes
//! only the token cache: an error leaves every other file unchanged.
use super::bytes::PlannedRanks;
use super::data::RunData;
use super::facts::RunFacts;
use super::model::{self, ModelPlan};
use super::profile::Profile;
use super::prompts::SamplePrompts;
use super::ranks::RankPlan;
use super::restarts::Restarts;
use super::resume::{self, ResumeFrom};
use super::save::SaveOptions;
use super::sized::{ModelSize, SizedEngine};
use super::split::EvalSplit;
use super::{batch, bytes, check, data, engine, evaluations, knobs, objective, schedule, tokens, wandb};
use crate::base::{Error, Result};
use crate::ckpt::Evaluations;
use crate::comm::env::RankEnv;
use crate::data::{Dataset, LoaderOptions, Tokenizer};
use crate::engine::{EngineOptions, SamplerSize};
use crate::optim::Schedule;
use crate::run::settings::hub::HubNames;
use crate::run::settings::tasks::RunTask;
use crate::run::settings::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

pub struct Plan {
    /// With every derived value filled in, as printed by `--print-config` and the metrics.
    pub settings: Settings,
    pub ranks: RankPlan,
    pub size: ModelSize,
    /// `max_live_parameters` that follows from `memory_budget`.
    pub live: Option<usize>,
    /// The checkpoint to resume from.
    pub resume: Option<ResumeFrom>,
    pub split: EvalSplit,
    pub tokenizer: Tokenizer,
    pub engine: EngineOptions,
    pub dataset: Arc<Dataset>,
    /// Evaluated in place of held-out rows.
    pub eval: Option<Arc<Dataset>>,
    /// Sampled at evaluations.
    pub prompts: Option<SamplePrompts>,
    pub schedule: Schedule,
    pub save: SaveOptions,
    pub restarts: Restarts,
    pub profile: Option<Profile>,
    /// What identifies the models that checkpoints do not hold.
    pub models: Map<String, Value>,
}

/// What a plan decides once, as plain values. The rest of it follows from them.
#[derive(Clone, Serialize, Deserialize)]
struct Decided {
    settings: Settings,
    ranks: RankPlan,
    size: ModelSize,
    live: Option<usize>,
    resume: Option<ResumeFrom>,
    split: EvalSplit,
    prompts: Option<SamplePrompts>,
    models: Map<String, Value>,
}

/// What the launching process hands to its ranks: that, and what its settings leave out and its engine adds.
#[derive(Serialize, Deserialize)]
pub struct SettledPlan {
    decided: Decided,
    task: Option<RunTask>,
    hub: HubNames,
    largest_group: usize,
    samples: Option<SamplerSize>,
}

impl Plan {
    /// From checked settings. `launched`: this process's rank, if an external launcher started it.
    pub fn new(s: Settings, launched: Option<&RankEnv>) -> Result<Plan> {
        Plan::settle(s, launched, None).map_err(Error::before_start)
    }
    /// The plan after `attempt` failures: on `nproc` ranks, from the newest checkpoint, with the same global batch, in
    /// the micro-batches that [`batch::solve`] finds.
    pub fn again(&self, nproc: usize, attempt: u32) -> Result<Plan> {
        let mut s = self.settings.clone();
        s.run.nproc_per_node = Some(nproc);
        s.checkpoint.resume = Some("auto".into());
        let global_batch = self.loader(0)?.global_batch() as usize;
        (s.batch.train_batch_size, s.batch.grad_accum) = (Some(global_batch), None);
        s.task.iter_mut().for_each(|task| task.batch = false);
        let mut plan = Plan::settle(s, None, Some(RunData { train: self.dataset.clone(), eval: self.eval.clone() }))
            .map_err(Error::before_start)?;
        plan.ranks.attempt = attempt;
        Ok(plan)
    }
    /// Settings that are wrong by themselves are refused first; then come ranks and model, the memory that they take,
    /// the weights that they start from, and last the data, which takes longest to read.
    fn settle(mut s: Settings, launched: Option<&RankEnv>, data: Option<RunData>) -> Result<Plan> {
        wandb::settle(&mut s)?;
        check::outputs(&s)?;
        stages::start(&mut s)?;
        knobs::check(&s)?;
        objective::check(&s)?;
        let save = SaveOptions::new(&s.checkpoint)?;
        let mut ranks = RankPlan::new(&mut s, launched)?;
        check::restarts(&s, &Restarts::new(&s)?, ranks.nproc, launched)?;
        batch::solve(&mut s, &ranks.mesh)?;

        model::has_weights(&s)?;
        let mut model = ModelPlan::new(&mut s)?;
        model.tokenizer = tokens::resumed(model.tokenizer, &s.data, resume::newest(&s.checkpoint)?.as_deref())?;
        let data = match s.task.is_some() || s.objective.has_groups() {
            true => Some(data::before_sizes(&mut s, &ranks, &model, data)?),
            false => data,
        };
        let ModelPlan { spec, tokenizer } = model;
        let prompts = SamplePrompts::read(&s, &tokenizer, &spec)?;
        let sized = SizedEngine::new(&s, &ranks, spec, prompts.as_ref(), save.background)?;
        ranks.planned = sized.size.on_device();
        check::room(&s, sized.size.params, sized.size.trainable)?;

        let resume = resume::find(&s.checkpoint, &sized.options, &sized.decoder)?;
        let models = if s.hub.without_weights { Map::new() } else { objective::models(&s)? };
        if !s.hub.without_weights {
            check::weights(&s, &sized, resume.as_ref(), &models)?;
        }
        let source = resume.as_ref().map(|resume| resume.dir.as_path()).or(s.model.pretrain.as_deref());
        let left_out = check::gguf(&s, source, &tokenizer, &sized.options, ranks.mesh.tp)?;

        let data = data.map_or_else(|| RunData::open(&s, &tokenizer, &sized.options.spec), Ok)?;
        let state = resume.as_ref().map(|resume| &resume.state);
        let split = EvalSplit::new(&s, &ranks.mesh, &data.train, state)?;
        let evaluated = data.eval.as_ref().map_or_else(|| split.held_out.iter().sum(), |eval| eval.rows());
        evaluations::check_rows(&s, evaluated)?;
        let loader = data::loader(&s, &ranks.mesh, 0, &split.held_out)?;
        let asked = s.run.max_steps;
        schedule::steps(&mut s, &data.train, loader)?;
        schedule::warmup(&mut s, state)?;
        s.notes.extend(left_out);
        s.notes.extend(objective::unread_by_peft(&sized.decoder));
        s.notes.extend(objective::drawn_again(&s, state));
        s.notes.extend(prompts.as_ref().and_then(|prompts| prompts.note.clone()));
        let facts = RunFacts { settings: &s, asked, ranks: &ranks, launched, dataset: &data.train, sized: &sized };
        s.notes.extend(facts.idle()?);

        let SizedEngine { options, live, size, .. } = sized;
        let decided = Decided { settings: s, ranks, size, live, resume, split, prompts, models };
        let plan = Plan::derive(decided, tokenizer, options, data)?;
        check::profile(&plan.settings, plan.profile.as_ref())?;
        Ok(plan)
    }

    /// The part for the ranks that this process starts.
    pub fn settled(&self) -> SettledPlan {
        SettledPlan {
            decided: Decided {
                settings: self.settings.clone(),
                ranks: self.ranks.clone(),
                size: self.size.clone(),
                live: self.live,
                resume: self.resume.clone(),
                split: self.split.clone(),
                prompts: self.prompts.clone(),
                models: self.models.clone(),
            },
            task: self.settings.task.clone(),
            hub: self.settings.hub.clone(),
            largest_group: self.settings.largest_group,
            samples: self.engine.samples,
        }
    }
    /// The plan in such a rank: rebuilds only what cannot be inherited.
    pub fn inherit(settled: SettledPlan) -> Result<Plan> {
        let SettledPlan { mut decided, task, hub, largest_group, samples } = settled;
        let (s, ranks) = (&mut decided.settings, &decided.ranks);
        // What follows from the data is settled, but for the length that rows are read with.
        s.hub = hub;
        s.largest_group = largest_group;
        s.task = task.map(|task| RunTask { batch: false, ..task });
        let ModelPlan { spec, tokenizer } = ModelPlan::new(s)?;
        let engine = engine::options(s, ranks.device, &ranks.mesh, spec)?;
        let engine = engine::keeping(s, ranks.device, decided.live, engine)?;
        let engine = EngineOptions { samples, ..engine };
        let tokenizer = tokens::resumed(tokenizer, &s.data, decided.resume.as_ref().map(|r| r.dir.as_path()))?;
        let mut data = RunData::open(s, &tokenizer, &engine.spec)?;
        data::fit(s, &engine.spec, &mut data, 1)?;
        Plan::derive(decided, tokenizer, engine, data)
    }
    fn derive(decided: Decided, tokenizer: Tokenizer, engine: EngineOptions, data: RunData) -> Result<Plan> {
        let Decided { settings: s, ranks, size, live, resume, split, prompts, models } = decided;
        Ok(Plan {
            schedule: schedule::schedule(&s)?,
            save: SaveOptions::new(&s.checkpoint)?,
            restarts: Restarts::new(&s)?,
            profile: Profile::new(&s)?,
            settings: s,
            ranks,
            size,
            live,
            resume,
            split,
            tokenizer,
            engine,
            dataset: data.train,
            eval: data.eval,
            prompts,
            models,
        })
    }

    /// The checkpoint to resume from is already final.
    pub fn is_done(&self) -> bool {
        self.resume.as_ref().is_some_and(|resume| resume.state.step >= self.steps() || self.is_stopped(resume))
    }
    /// The run that saved this checkpoint stopped early there, and would again.
    pub fn is_stopped(&self, resume: &ResumeFrom) -> bool {
        evaluations::is_patience_over(&self.settings, self.evaluations(Some(resume)).as_ref())
    }
    /// The evaluations that a start from `resumed` continues with.
    pub fn evaluations(&self, resumed: Option<&ResumeFrom>) -> Option<Evaluations> {
        evaluations::begin(&self.settings, self.evaluated_rows(), resumed)
    }
    /// Why earlier evaluations do not count, if there were any and they do not.
    pub fn forgotten_evaluations(&self, resumed: &ResumeFrom) -> Option<String> {
        evaluations::forgotten(&self.settings, &self.evaluated_rows(), resumed)
    }
    /// Identifies the evaluated rows, for [`Evaluations::rows`].
    fn evaluated_rows(&self) -> String {
        let o = &self.settings.objective;
        if let Some(prompts) = self.prompts.as_ref().filter(|_| o.is_grpo()) {
            let judged = format!("{:?} {:?}", o.reward, o.reward_weights);
            return format!("prompts {:016x}, judged by {:016x}", prompts.fingerprint(), xxh3_64(judged.as_bytes()));
        }
        let data = self.evaluated();
        let rows = self.eval.as_ref().map_or_else(|| self.split.recorded(), |eval| eval.rows().into());
        format!("{rows} of {} of {} ({} tokens)", data.rows(), data.fingerprint_text(), data.max_len())
    }
    /// The checkpoint directory, if the best checkpoint is saved.
    pub fn saves_best(&self) -> Option<&Path> {
        let c = &self.settings.checkpoint;
        c.ckpt_dir.as_deref().filter(|_| c.save_on_best == Some(true))
    }
    /// The same, if the run ends with loading it.
    pub fn loads_best(&self) -> Option<&Path> {
        self.saves_best().filter(|_| self.settings.checkpoint.load_best == Some(true))
    }
    pub fn steps(&self) -> u64 {
        self.schedule.total
    }
    pub fn loader(&self, dp_rank: usize) -> Result<LoaderOptions> {
        data::loader(&self.settings, &self.ranks.mesh, dp_rank, &self.split.held_out)
    }
    /// Maximum tokens of an optimizer step: rows shorter than max_len are not padded.
    pub fn tokens_per_step(&self) -> Result<u64> {
        Ok(self.loader(0)?.global_batch() * self.dataset.max_len() as u64)
    }

    /// Bytes of a rank on its device with --sync-each-batch, if that is off and would have an effect.
    pub fn planned_if_synced(&self) -> Result<Option<usize>> {
        let (mut s, r) = (self.settings.clone(), &self.ranks);
        if s.batch.grad_accum == Some(1) || s.fsdp.sync_each_batch != Some(false) || !self.is_sharded() {
            return Ok(None);
        }
        s.fsdp.sync_each_batch = Some(true);
        s.fsdp.max_live_parameters = s.fsdp.max_live_parameters.or(self.live);
        let strategy = engine::strategy(&s, r.device, &self.engine.spec)?;
        let engine = EngineOptions { strategy, ..self.engine.clone() };
        let ranks = PlannedRanks::new(&s, r.mesh, r.device, r.nproc);
        let planned = bytes::of_training(&s, &engine, &ranks, self.save.background)?;
        Ok(Some(ModelSize { planned, ..self.size.clone() }.on_device()))
    }

    pub fn is_sharded(&self) -> bool {
        self.settings.run.strategy != Some(StrategyName::Ddp)
    }
    /// The data set that is evaluated: its held-out rows, or all rows.
    pub fn evaluated(&self) -> &Arc<Dataset> {
        self.eval.as_ref().unwrap_or(&self.dataset)
    }
    /// Micro-batches have the same shape in each step and on each rank: rows have one length, or sequences are filled
    /// up; and no rank gets the rows of its experts from others, which choose how many.
    pub fn static_shapes(&self) -> bool {
        (!self.dataset.has_rows_of_its_own() || self.fills_up()) && self.ranks.mesh.ep == 1
    }
    /// Packed sequences are a few tokens short of max_len. Where steps are captured as graphs, they are filled up.
    pub fn fills_up(&self) -> bool {
        let (run, packing) = (&self.settings.run, self.settings.data.packing_samples == Some(true));
        run.compile == Some(true)
            && self.ranks.device != DeviceName::Cpu
            && packing
            && self.dataset.has_rows_of_its_own()
            && !self.dataset.kind().is_judged()
    }
}
