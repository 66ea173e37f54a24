//! `--lora-merge` and `--export`: writes the model of `--pretrain` to `--save-hf` and `--save-gguf`, with an adapter
//! merged into it or as it is; an adapter alone to `--save-gguf`. Every rank reads, merges and writes the weights that
//! it owns. Never trains, and reads no data.
use crate::base::{Category, Error, Meter, Result};
use crate::ckpt::{self, Checkpointer};
use crate::comm::env::RankEnv;
use crate::comm::mesh::Mesh;
use crate::nn::{Decoder, Layout, Segment, Storage};
use crate::optim::Moments;
use crate::run::launch::device::RankDevice;
use crate::run::launch::{self, Launch, RankJob};
use crate::run::r#loop::{export, rank, same};
use crate::run::plan::bytes::{self, PlannedRanks};
use crate::run::plan::model::ModelPlan;
use crate::run::plan::ranks::RankPlan;
use crate::run::plan::save::{self, SaveOptions};
use crate::run::plan::{check, engine, fit, record};
use crate::run::settings::{PrecisionName, Settings, StateName};
use crate::run::watch::{RunLog, report};
use crate::store::{self, Strategy};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;

/// Everything that a rank needs.
pub struct Conversion {
    settings: Settings,
    ranks: RankPlan,
    model: ModelPlan,
    /// The layouts of the model without adapters; nothing has a gradient.
    layouts: Vec<Layout>,
    strategy: Arc<dyn Strategy>,
    save: SaveOptions,
    /// Directory of the weights, and of the adapter that is merged into them.
    base: PathBuf,
    adapter: Option<PathBuf>,
    /// Bytes of one rank, in the order of [`crate::base::CATEGORIES`].
    planned: Vec<(Category, usize)>,
}

impl Conversion {
    /// `launched`: this process's rank, if a launcher started it.
    pub fn new(mut s: Settings, launched: Option<&RankEnv>) -> Result<Conversion> {
        let (base, adapter) = sources(&s)?;
        // In ranks that we start, another one may already write there.
        if launched.is_none_or(|env| env.parent_pid.is_none()) {
            check::outputs(&s)?;
        }
        // Weights are read, merged and rounded to their new dtype in f32.
        (s.precision.precision, s.precision.master_dtype) = (Some(PrecisionName::Fp32), Some(StateName::Fp32));
        let save = SaveOptions::new(&s.checkpoint)?;
        let mut ranks = RankPlan::new(&mut s, launched)?;
        ranks.graphs = false;
        let model = ModelPlan::without_data(&mut s)?;
        let engine = engine::options(&s, ranks.device, &ranks.mesh, model.spec.clone())?;
        let mut layouts = Decoder::new(model.spec.clone())?.layouts().to_vec();
        layouts.iter_mut().flat_map(|layout| &mut layout.segments).for_each(|s| s.storage = Storage::Saved);
        ckpt::inspect_model(&base, &model.spec, &layouts)?;
        if let Some(adapter) = &adapter {
            ckpt::inspect_adapter(adapter, &model.spec, &layouts)?;
        }
        let left_out = check::gguf(&s, Some(&base), &model.tokenizer, &engine, ranks.mesh.tp)?;
        s.notes.extend(left_out);
        let all = PlannedRanks::new(&s, ranks.mesh, ranks.device, ranks.nproc);
        let planned = bytes::of_weights(&*engine.strategy, &layouts, &all)?;
        ranks.planned = bytes::on_device(&planned);
        let strategy = engine.strategy;
        let conversion = Conversion { settings: s, ranks, model, layouts, strategy, save, base, adapter, planned };
        check::room(&conversion.settings, conversion.params(), 0)?;
        Ok(conversion)
    }

    fn params(&self) -> usize {
        self.layouts.iter().flat_map(|layout| &layout.segments).map(Segment::len).sum()
    }

    /// The output of `--print-config`.
    pub fn print(&self) -> Result<String> {
        let plan = json!({
            "strategy": self.strategy.name(),
            "world_size": self.ranks.mesh.world(),
            "mesh": record::mesh(&self.ranks.mesh),
            "params": self.params(),
            "planned_bytes": record::planned(&self.planned),
        });
        record::printed(&self.settings, plan)
    }

    /// This process's rank.
    fn run(&self, env: &RankEnv, log: &RunLog) -> Result<()> {
        let env = &self.ranks.with_secret(env);
        let facts = || same::of_model(&self.settings, &self.ranks, &self.model.tokenizer);
        let (taken, world) = rank::join(&self.settings, &self.ranks, env, Meter::default(), log, facts)?;
        let mesh = Mesh::with_world(world, taken.member.clone(), self.ranks.mesh)?;
        self.write(&taken, &mesh, log).inspect_err(|_| mesh.member.abort())
    }

    fn write(&self, RankDevice { device, .. }: &RankDevice, mesh: &Mesh, log: &RunLog) -> Result<()> {
        let (spec, layouts, c) = (&self.model.spec, &self.layouts[..], &self.settings.checkpoint);
        let mut store = store::allocate(&*self.strategy, device.clone(), mesh, layouts)?;
        let checkpointer = Checkpointer::new(device.clone(), mesh, spec, layouts, Moments::NONE)?;
        let mut checkpointer = checkpointer.with_files_of(self.save.max_file_bytes);
        checkpointer.overwrite(c.overwrite == Some(true));
        if mesh.rank() == 0 {
            let companions = save::companions(&self.settings, spec, Some(&self.base), &self.model.tokenizer)?;
            checkpointer.accompany(companions);
        }
        checkpointer.load_model(&self.base, &mut *store)?;
        let merged = self.adapter.as_deref().map(|adapter| checkpointer.merge(adapter, &mut *store)).transpose()?;
        let what = match merged {
            None => "export".into(),
            Some(merged) if merged.whole > 0 => {
                format!("merge  {} adapters and {} whole tensors", merged.adapters, merged.whole)
            }
            Some(merged) => format!("merge  {} adapters", merged.adapters),
        };
        for saved in export::model(c, &self.save, &mut checkpointer, &mut *store)?.iter().filter(|_| mesh.rank() == 0) {
            let (path, size) = (saved.path.display(), report::mib(saved.bytes));
            log.info(format_args!("{what}  {size}  {path}"));
        }
        Ok(())
    }
}

/// The model that is written, and the adapter that is merged into it.
fn sources(s: &Settings) -> Result<(PathBuf, Option<PathBuf>)> {
    let c = &s.checkpoint;
    match (&s.model.pretrain, &s.lora.merge) {
        (Some(base), adapter) if c.save_hf.is_some() || c.save_gguf.is_some() => {
            adapter.as_deref().map_or(Ok(()), |adapter| ckpt::adapter::read(adapter).map(drop))?;
            Ok((base.clone(), adapter.clone()))
        }
        (_, None) => Err(Error::input(
            "--export needs a model and a place for it: add --pretrain MODEL and --save-hf DIR or --save-gguf FILE",
        )),
        (_, Some(_)) => Err(Error::input(
            "--lora-merge needs the base model of the adapter and a place for the merged model: add --pretrain DIR and \
             --save-hf DIR or --save-gguf FILE",
        )),
    }
}

/// Writes an adapter alone to its file; the base model's config tells its shapes.
fn alone(mut s: Settings, launched: Option<&RankEnv>) -> Result<()> {
    if !launch::is_first(launched) {
        return Ok(());
    }
    let mut write = || -> Result<_> {
        let (Some(adapter), Some(file)) = (s.lora.merge.clone(), s.checkpoint.save_gguf.clone()) else {
            return Err(Error::input("--export of an adapter needs a place for it: add --save-gguf FILE"));
        };
        let Some(base) = s.model.pretrain.clone() else {
            return Err(Error::input("--export of an adapter needs its base model: add --pretrain MODEL"));
        };
        check::outputs(&s)?;
        let kind = save::gguf_type(&s.checkpoint);
        let model = ModelPlan::without_data(&mut s)?;
        let decoder = Decoder::new(model.spec.clone())?;
        let bytes = ckpt::gguf::save_adapter([&adapter, &base], &model.spec, decoder.layouts(), kind, &file)?;
        Ok((file, bytes))
    };
    let (file, bytes) = write().map_err(Error::before_start)?;
    let log = RunLog::open(&s.watch, launched).map_err(Error::before_start)?;
    log.notes(&s.notes);
    log.info(format_args!("export  {}  {}", report::mib(bytes), file.display()));
    Ok(())
}

/// Writes the model, on all ranks of this host or in this process's.
pub fn main(settings: Settings, launched: Option<&RankEnv>) -> Result<()> {
    if settings.lora.is_alone {
        return alone(settings, launched);
    }
    let job = RankJob::Convert(Box::new(settings.clone()));
    let conversion = Conversion::new(settings, launched).map_err(Error::before_start)?;
    let Conversion { settings, ranks, planned, .. } = &conversion;
    let prepares = launch::prepares(launched);
    if prepares {
        fit::memory_of(ranks, planned, "more hosts, or a machine with more memory")?;
    }
    let log = RunLog::open(&settings.watch, launched).map_err(Error::before_start)?;
    if prepares && launch::is_first(launched) {
        log.notes(&settings.notes);
    }
    let ended = match launched {
        Some(env) => conversion.run(env, &log),
        None => launch::run(&Launch::once(ranks, &job, &settings.faults.signals()?)),
    };
    ended.inspect_err(|e| log.ended(e))
}
