//! Settings that are one of a few names: each name with its spelling, the same as a flag and in a file. Never says what a
//! name means.
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A name that both a flag and a file take; the spelling is the one of the derive line.
macro_rules! names {
    ($(#[$doc:meta])* $name:ident, $case:tt, $($(#[$attr:meta])* $variant:ident),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
        #[value(rename_all = $case)]
        #[serde(rename_all = $case)]
        pub enum $name { $($(#[$attr])* $variant),+ }
    };
}
names!(StrategyName, "snake_case", Auto, Fsdp, Ddp);
names!(DeviceName, "snake_case", Auto, Cpu, Cuda, Sim);
names!(CommName, "snake_case", Auto, Shm, Nccl);
names!(ArchName, "snake_case", Llama, Gpt);
names!(OptimizerName, "snake_case", Adamw, Sgd);
names!(SchedulerName, "snake_case", Constant, Linear, Cosine, CosineWithMinLr);
names!(
    BackendName,
    "snake_case",
    #[value(alias = "fsdp2")]
    #[serde(alias = "fsdp2")]
    Fsdp,
    #[value(alias = "deepspeed")]
    #[serde(alias = "deepspeed")]
    Zero
);
names!(FsdpImpl, "snake_case", Manual, Reference);
names!(ShardingName, "SCREAMING_SNAKE_CASE", FullShard, ShardGradOp, NoShard, HybridShard);
names!(WrapName, "snake_case", Transformer, Size, None);
names!(PrefetchName, "SCREAMING_SNAKE_CASE", BackwardPre, BackwardPost, None);
names!(
    PrecisionName,
    "lowercase",
    #[value(alias = "no")]
    #[serde(alias = "no")]
    Fp32,
    Bf16,
    Fp16
);

impl PrecisionName {
    pub fn name(self) -> &'static str {
        match self {
            PrecisionName::Fp32 => "fp32",
            PrecisionName::Bf16 => "bf16",
            PrecisionName::Fp16 => "fp16",
        }
    }
}
