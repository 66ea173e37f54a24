//! All settings in one struct, section by section. Never fills in defaults: every field is an `Option`, so that
//! [`super::config`] can overlay defaults, files and flags.
use super::hub::HubNames;
use super::tasks::RunTask;
use super::{
    batch::BatchSettings, checkpoint::CheckpointSettings, data::DataSettings, faults::FaultSettings,
    fsdp::FsdpSettings, generate::GenerateSettings, lora::LoraSettings, model::ModelSettings,
    objective::ObjectiveSettings, optim::OptimSettings, parallel::ParallelSettings, precision::PrecisionSettings,
    run::RunSettings, trace::TraceSettings, tune::TuneSettings, wandb::WandbSettings, watch::WatchSettings,
    zero::ZeroSettings,
};
use crate::base::Result;
use serde::{Deserialize, Serialize};

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct Settings {
    #[command(flatten)]
    pub run: RunSettings,
    #[command(flatten)]
    pub model: ModelSettings,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub objective: ObjectiveSettings,
    #[command(flatten)]
    pub optim: OptimSettings,
    #[command(flatten)]
    pub tune: TuneSettings,
    #[command(flatten)]
    pub lora: LoraSettings,
    #[command(flatten)]
    pub batch: BatchSettings,
    #[command(flatten)]
    pub fsdp: FsdpSettings,
    #[command(flatten)]
    pub zero: ZeroSettings,
    #[command(flatten)]
    pub precision: PrecisionSettings,
    #[command(flatten)]
    pub parallel: ParallelSettings,
    #[command(flatten)]
    pub checkpoint: CheckpointSettings,
    #[command(flatten)]
    pub faults: FaultSettings,
    #[command(flatten)]
    pub watch: WatchSettings,
    #[command(flatten)]
    pub wandb: WandbSettings,
    #[command(flatten)]
    pub trace: TraceSettings,
    #[command(flatten)]
    pub generate: GenerateSettings,
    /// Logged once before the run starts: how flags of other tools were read, and which settings have no effect.
    #[arg(skip)]
    #[serde(skip)]
    pub notes: Vec<String>,
    /// Derived: whose defaults apply; None: those of a run from nothing.
    #[arg(skip)]
    #[serde(skip)]
    pub task: Option<RunTask>,
    /// Derived: names of the hub, whose paths are among the settings.
    #[arg(skip)]
    #[serde(skip)]
    pub hub: HubNames,
    /// Derived from the data: tokens of the largest group of rollouts; 0 without.
    #[arg(skip)]
    #[serde(skip)]
    pub largest_group: usize,
}

impl Settings {
    /// Whether nothing is trained: a model is written in another form, after merging an adapter or as it is.
    pub fn only_converts(&self) -> bool {
        self.lora.merge.is_some() || self.checkpoint.export == Some(true)
    }
    /// Checks each value on its own; the plan checks relations between settings.
    pub fn check(&self) -> Result<()> {
        self.run.check()?;
        self.model.check()?;
        self.data.check()?;
        self.objective.check()?;
        self.optim.check()?;
        self.tune.check()?;
        self.lora.check()?;
        self.batch.check()?;
        self.fsdp.check()?;
        self.precision.check()?;
        self.parallel.check()?;
        self.checkpoint.check()?;
        self.faults.check()?;
        self.wandb.check()?;
        self.trace.check()?;
        self.generate.check()
    }
}
