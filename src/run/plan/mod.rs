//! From raw settings to a [`Plan`]: derived, validated, the only thing that the rest sees. All validation is here, before any
//! rank starts. Never starts anything and writes nothing but the cache of tokens: an error leaves every file as it was.
pub mod batch;
pub mod bytes;
pub mod carrier;
pub mod check;
pub mod derive;
pub mod knobs;
pub mod limits;
pub mod memory;
pub mod mesh;
pub mod outline;
pub mod precision;
pub mod recompute;
pub mod resume;
pub mod split;
pub mod tensor;
use crate::base::CATEGORIES;
use crate::base::{Category, Error, Result};
use crate::ckpt::{self, TrainerState};
use crate::comm::env::RankEnv;
use crate::comm::mesh::MeshSizes;
use crate::comm::secret::Secret;
use crate::data::{Dataset, LoaderOptions, Tokenizer};
use crate::engine::EngineOptions;
use crate::nn::{Decoder, Segment};
use crate::optim::{Rule, Schedule};
use crate::run::launch::device;
use crate::run::launch::restart;
use crate::run::launch::restart::Restarts;
use crate::run::plan::carrier::Carrier;
use crate::run::plan::resume::Resume;
use crate::run::plan::split::Split;
use crate::run::settings::effect;
use crate::run::settings::stages;
use crate::run::settings::*;
use crate::run::trace::Profile;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

pub struct Plan {
    /// With every derived value filled in: what `--print-config` and the metrics say.
    pub settings: Settings,
    /// Never `auto`.
    pub device: DeviceName,
    pub carrier: Carrier,
    /// Of --job-secret-file.
    pub secret: Option<Secret>,
    pub ranks_per_gpu: usize,
    pub tf32: bool,
    pub mesh: MeshSizes,
    pub engine: EngineOptions,
    pub dataset: Arc<Dataset>,
    pub split: Split,
    pub tokenizer: Tokenizer,
    pub schedule: Schedule,
    /// Ranks started on this host.
    pub nproc: usize,
    pub params: usize,
    /// Those of them that are not frozen.
    pub trainable: usize,
    /// Of one rank, in the order of [`CATEGORIES`].
    pub planned: Vec<(Category, usize)>,
    /// The checkpoint to go on from.
    pub resume: Option<Resume>,
    pub save: derive::SaveOptions,
    pub comm_timeout: Duration,
    pub restarts: Restarts,
    pub profile: Option<Profile>,
    /// How often the launcher has started the ranks before.
    pub attempt: u32,
}

impl Plan {
    /// `default` is what the binary is for; `launched` is this process's place where a launcher started it.
    pub fn new(s: Settings, default: StrategyName, launched: Option<&RankEnv>) -> Result<Plan> {
        Plan::make(s, default, launched).map_err(Error::before_start)
    }
    fn make(mut s: Settings, default: StrategyName, launched: Option<&RankEnv>) -> Result<Plan> {
        if let Some((env, restart)) = launched.and_then(|env| Some((env, env.restart?))) {
            restart::adapt(&mut s, env, restart);
        }
        check::numbers(&s)?;
        check::outputs(&s)?;
        s.watch.check()?;
        check::merge(&s)?;
        if let (Some(before), None) = (&s.run.after, &s.model.pretrain) {
            s.model.pretrain = Some(stages::weights(before)?);
        }
        let device = device::choose(derive::set(&s.run.device, "run.device")?);
        let save = derive::save(&s.checkpoint)?;
        let strategy_name = derive::strategy(&mut s, default);
        let carrier = Carrier::choose(derive::set(&s.run.comm, "run.comm")?, device, launched)?;
        let secret = s.run.job_secret_file.as_deref().map(Secret::read).transpose()?;
        effect::engines(&s)?;
        knobs::check(&s, strategy_name)?;
        let ranks_per_gpu = derive::set(&s.run.ranks_per_gpu, "run.ranks_per_gpu")?;
        let (mesh, nproc) = mesh::sizes(&mut s, strategy_name, device, launched)?;
        batch::solve(&mut s, &mesh)?;
        let tokenizer = derive::tokenizer(&mut s)?;
        let spec = derive::spec(&mut s, &tokenizer)?;
        let mut engine = derive::engine(&s, strategy_name, device, spec)?;
        limits::together(&engine)?;
        tensor::settle(&s, &mesh, &mut engine)?;
        engine.update_threads = std::thread::available_parallelism().map_or(1, |cores| cores.get() / nproc).max(1);
        let decoder = Decoder::tuned(engine.spec.clone(), &engine.tuning)?;
        if engine.tuning.uniform {
            knobs::uniform(decoder.layouts(), derive::wrap(&s.fsdp)?)?;
        }
        let segments = || decoder.layouts().iter().flat_map(|l| &l.segments);
        let params = segments().map(Segment::len).sum();
        let trainable = segments().filter(|s| s.trainable).map(Segment::len).sum();
        let planned = bytes::of_training(&engine, &mesh, save.behind, device, nproc)?;
        let restarts = Restarts::new(&s, nproc, launched)?;
        let resume = resume::find(&s.checkpoint, &engine, &decoder)?;
        // Adapters are all that their checkpoints hold: the model comes from its own directory each time.
        if let Some(dir) = s.model.pretrain.as_ref().filter(|_| resume.is_none() || engine.tuning.lora.is_some()) {
            ckpt::inspect_model(dir, &engine.spec, decoder.layouts())?;
        }
        if s.lora.merge.is_some() {
            s.data.dataset = Some(vec!["synthetic".into()]); // a merge reads no data
        }
        let dataset = Arc::new(derive::dataset(&s, &tokenizer, &engine)?);
        let split = Split::new(&s, &mesh, &dataset, resume.as_ref().map(|resume| &resume.state))?;
        let loader = derive::loader(&s, &mesh, 0, split.held_out)?;
        let steps = derive::steps(&mut s, &dataset, loader)?;
        let schedule = derive::schedule(&s.optim, steps)?;
        let profile = Profile::new(&s)?;
        let tf32 = derive::set(&s.precision.tf32, "precision.tf32")?;
        let comm_timeout = Duration::from_secs_f64(derive::set(&s.run.comm_timeout, "run.comm_timeout")?);
        Ok(Plan {
            settings: s,
            device,
            carrier,
            secret,
            ranks_per_gpu,
            tf32,
            mesh,
            engine,
            dataset,
            split,
            tokenizer,
            schedule,
            nproc,
            params,
            trainable,
            planned,
            resume,
            save,
            comm_timeout,
            restarts,
            profile,
            attempt: launched.and_then(|env| env.restart).map_or(0, |restart| restart.attempt),
        })
    }

    /// The checkpoint to go on from is the last step's.
    pub fn is_done(&self) -> bool {
        self.resume.as_ref().is_some_and(|resume| resume.state.step >= self.steps())
    }
    pub fn steps(&self) -> u64 {
        self.schedule.total
    }
    pub fn loader(&self, dp_rank: usize) -> Result<LoaderOptions> {
        derive::loader(&self.settings, &self.mesh, dp_rank, self.split.held_out)
    }
    /// Tokens of an optimizer step, at most: rows that are shorter than max_len are not padded.
    pub fn tokens_per_step(&self) -> Result<u64> {
        Ok(self.loader(0)?.global_batch() * self.dataset.max_len() as u64)
    }
    /// Bytes of a rank on its device.
    pub fn planned_total(&self) -> usize {
        self.planned.iter().filter(|p| p.0 != Category::Host).map(|p| p.1).sum()
    }

    /// [`Plan::planned_total`] with --sync-each-batch, where that is off and could be on.
    pub fn planned_if_synced(&self) -> Result<Option<usize>> {
        let mut s = self.settings.clone();
        if s.batch.grad_accum == Some(1) || s.fsdp.sync_each_batch != Some(false) || !self.is_sharded() {
            return Ok(None);
        }
        s.fsdp.sync_each_batch = Some(true);
        let strategy = derive::engine(&s, StrategyName::Fsdp, self.device, self.engine.spec.clone())?.strategy;
        let engine = EngineOptions { strategy, ..self.engine.clone() };
        let planned = bytes::of_training(&engine, &self.mesh, self.save.behind, self.device, self.nproc)?;
        Ok(Some(planned.iter().filter(|p| p.0 != Category::Host).map(|p| p.1).sum()))
    }

    /// Hosts of the job.
    pub fn hosts(&self) -> usize {
        self.mesh.world() / self.nproc
    }
    pub fn is_sharded(&self) -> bool {
        self.engine.strategy.name() != "ddp"
    }
    /// Whether the tokenizer can show what the tokens say.
    pub fn is_text(&self) -> bool {
        !self.dataset.has_rows_of_its_own() && self.dataset.loss_floor().is_none()
    }
    /// Where the run stands, as checkpoints keep it.
    pub fn trainer_state(&self, step: u64, samples_consumed: u64, trained_tokens: u64) -> TrainerState {
        let object = |value: Value| value.as_object().cloned().unwrap_or_default();
        let (o, s) = (&self.settings.optim, &self.schedule);
        TrainerState {
            step,
            samples_consumed,
            trained_tokens,
            optimizer_steps: 0, // the checkpointer asks the optimizer
            seed: self.engine.seed,
            rng: "philox4x32-10".into(),
            optimizer: object(match self.engine.rule {
                Rule::AdamW { .. } => {
                    json!({"kind": self.engine.rule.name(), "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay})
                }
                Rule::Sgd { .. } => {
                    json!({"kind": self.engine.rule.name(), "momentum": o.momentum, "weight_decay": o.weight_decay})
                }
            }),
            schedule: object(json!({
                "kind": o.lr_scheduler,
                "lr": s.peak,
                "warmup_steps": s.warmup,
                "warmup_type": o.warmup_type,
                "total_steps": s.total,
                "grad_clip": o.grad_clip,
            })),
            scaler: None, // the engine knows
            world: self.mesh.world(),
            strategy: self.engine.strategy.name().into(),
            precision: self.settings.precision.precision.map_or("", PrecisionName::name).into(),
            data: object(json!({
                "dataset": self.dataset.report().what,
                "rows": self.dataset.rows(),
                "max_len": self.dataset.max_len(),
                "fingerprint": self.dataset.fingerprint_text(),
                (split::HELD_OUT): self.split.held_out,
                "shuffle": self.settings.data.shuffle,
                "packing_samples": self.settings.data.packing_samples,
                "batch_size": self.settings.batch.batch_size,
                "grad_accum": self.settings.batch.grad_accum,
            })),
            run: None, // the checkpointer knows
        }
    }

    /// Micro-batches have the same shape, in each step and on each rank: rows are of one length, or sequences are filled up.
    pub fn static_shapes(&self) -> bool {
        !self.dataset.has_rows_of_its_own() || self.fills_up()
    }
    /// Packed sequences lack a few tokens of their full length. Where steps are captured they are filled up.
    pub fn fills_up(&self) -> bool {
        let (run, packing) = (&self.settings.run, self.settings.data.packing_samples == Some(true));
        run.compile == Some(true) && self.device != DeviceName::Cpu && packing && self.dataset.has_rows_of_its_own()
    }

    /// What each rank asks of the machine.
    pub fn wanted(&self) -> device::Wanted {
        let Plan { device, carrier, ranks_per_gpu, tf32, .. } = *self;
        let timeout = self.restarts.init_timeout;
        let graphs = self.settings.run.compile == Some(true);
        let (secret, planned) = (self.secret.clone(), self.planned_total());
        device::Wanted { device, carrier, secret, ranks_per_gpu, tf32, graphs, planned, timeout }
    }

    /// Once on a host, before any rank starts: the run fits in memory. On the `first` host the directory of checkpoints is
    /// there, and this run's own for as long as what is returned lives.
    pub fn prepare(&self, first: bool) -> Result<Option<ckpt::Lock>> {
        device::prepare(self)?;
        if self.device != DeviceName::Cuda {
            self.check_memory()?;
        }
        if first {
            check::opened(&self.settings)?;
        }
        self.settings.checkpoint.ckpt_dir.as_deref().filter(|_| first).map(ckpt::prepare).transpose()
    }

    fn check_memory(&self) -> Result<()> {
        // The device's memory is the host's, too.
        let (rank, available) = (self.planned.iter().map(|p| p.1).sum::<usize>(), memory::available());
        let needed = rank * self.nproc;
        if available.is_some_and(|available| needed > available) {
            let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
            return Err(Error::input(format!(
                "this run needs {:.2} GiB on this host ({} ranks of {:.2} GiB), which has {:.2} GiB available. Use a smaller \
                 model, --batch-size or --max-len, --activation-checkpoint, --precision bf16, or more hosts",
                gib(needed),
                self.nproc,
                gib(rank),
                gib(available.unwrap_or(0)),
            )));
        }
        Ok(())
    }

    pub fn mesh_json(&self) -> Value {
        let MeshSizes { dp_replicate, dp_shard, sp, tp } = self.mesh;
        json!({"dp_replicate": dp_replicate, "dp_shard": dp_shard, "sp": sp, "tp": tp})
    }
    pub fn planned_json(&self) -> Value {
        let by_name = CATEGORIES.iter().filter_map(|(category, name)| {
            let (_, bytes) = self.planned.iter().find(|(c, _)| c == category)?;
            Some((name.to_string(), json!(bytes)))
        });
        let mut map: serde_json::Map<String, Value> = by_name.collect();
        map.insert("total".into(), json!(self.planned_total()));
        Value::Object(map)
    }

    /// The resolved settings, without those that were left out on purpose.
    pub fn config_json(&self) -> Value {
        let mut config = json!(self.settings);
        for section in config.as_object_mut().into_iter().flat_map(|c| c.values_mut()) {
            if let Some(section) = section.as_object_mut() {
                section.retain(|_, value| !value.is_null());
            }
        }
        config
    }

    /// What `--print-config` prints: a file that `--config` takes, with the plan beside the settings.
    pub fn print(&self) -> Result<String> {
        let mut config = self.config_json();
        config["plan"] = json!({
            "strategy": self.engine.strategy.name(),
            "world_size": self.mesh.world(),
            "mesh": self.mesh_json(),
            "params": self.params,
            "trainable_params": self.trainable,
            "steps": self.steps(),
            "tokens_per_step": self.tokens_per_step()?,
            "dataset": self.dataset.report().to_string(),
            "resume": self.resume.as_ref().map(|r| &r.dir),
            "planned_bytes": self.planned_json(),
        });
        serde_saphyr::to_string(&config).map_err(|e| Error::Run(format!("print-config: {e}")))
    }
}
