//! All settings: one struct of all sections. Never fills defaults: all is `Option`, so that defaults < file < flags can
//! be decided by laying one over the other ([`super::config`]).
use super::{
    batch::BatchSettings, checkpoint::CheckpointSettings, data::DataSettings, faults::FaultSettings,
    fsdp::FsdpSettings, generate::GenerateSettings, lora::LoraSettings, model::ModelSettings, optim::OptimSettings,
    parallel::ParallelSettings, precision::PrecisionSettings, run::RunSettings, trace::TraceSettings,
    tune::TuneSettings, wandb::WandbSettings, watch::WatchSettings, zero::ZeroSettings,
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
    /// What was read in another tool's words, and what has no effect here: said once, before the run starts.
    #[arg(skip)]
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl Settings {
    /// Each value by itself; relations between settings follow in the plan.
    pub fn check(&self) -> Result<()> {
        self.run.check()?;
        self.model.check()?;
        self.data.check()?;
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
