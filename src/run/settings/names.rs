//! Enumerated settings; a value is spelled the same as a flag and in a file. Never interprets a value.
use clap::ValueEnum;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// An enum that flags and files parse alike; `$case` is its spelling.
macro_rules! names {
    ($(#[$doc:meta])* enum $name:ident, $case:tt, $($(#[$attr:meta])* $variant:ident),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
        #[value(rename_all = $case)]
        #[serde(rename_all = $case)]
        pub enum $name { $($(#[$attr])* $variant),+ }
    };
}
names!(enum StrategyName, "snake_case", Auto, Fsdp, Ddp);
names!(enum DeviceName, "snake_case", Auto, Cpu, Cuda, Sim);
names!(enum CommName, "snake_case", Auto, Shm, Tcp, Nccl, Ipc, Mpi);
names!(
    #[derive(PartialOrd, Ord)]
    enum LogLevel,
    "snake_case",
    Error,
    Warn,
    Info,
    Debug
);
names!(enum ArchName, "snake_case", Llama, Gpt);
names!(enum ObjectiveName, "snake_case", Sft, Dpo, Rm, Kto, Grpo, Distill);
names!(enum RowFormatName, "snake_case", Messages, Conversations, Alpaca, PromptCompletion, Text, Tokens);
names!(enum LossName, "snake_case", Grpo, Dapo, DrGrpo);
names!(enum OptimizerName, "snake_case", Adamw, Adamw8bit, Sgd, Muon);
names!(enum SchedulerName, "snake_case", Constant, Linear, Cosine, CosineWithMinLr);
names!(enum WarmupName, "snake_case", Linear, Log);
names!(enum BackendName, "snake_case", Fsdp, Zero);
names!(enum FsdpImpl, "snake_case", Manual, Reference);
names!(enum ShardingName, "SCREAMING_SNAKE_CASE", FullShard, ShardGradOp, NoShard, HybridShard);
names!(enum SpName, "snake_case", Ring, Ulysses);
names!(enum RingName, "snake_case", Ring, Allgather);
names!(enum WrapName, "snake_case", Transformer, Size, None);
names!(enum PrefetchName, "SCREAMING_SNAKE_CASE", BackwardPre, BackwardPost, None);
names!(enum PrecisionName, "lowercase", Fp32, Bf16, Fp16, Fp8);
names!(enum FloatName, "lowercase", Fp32, Bf16, Fp16);
names!(enum StateName, "lowercase", Fp32, Bf16);
names!(enum GgufName, "snake_case", F16, Bf16, Q8_0);
names!(enum WandbMode, "snake_case", Online, Offline, Disabled);

/// A switch with modes: its first name is also `false` and `--no-x`, its second `true` and `--x` alone.
macro_rules! modes {
    ($(#[$doc:meta])* enum $name:ident, $off:ident, $on:ident, $($other:ident),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
        #[value(rename_all = "snake_case")]
        pub enum $name { #[value(alias = "false")] $off, #[value(alias = "true")] $on, $($other),+ }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                match self {
                    $name::$off => s.serialize_bool(false),
                    $name::$on => s.serialize_bool(true),
                    other => s.serialize_str(other.to_possible_value().unwrap_or_default().get_name()),
                }
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<$name, D::Error> {
                let name = match Mode::deserialize(d)? {
                    Mode::Switch(on) => on.to_string(),
                    Mode::Name(name) => name,
                };
                let names = || [$($name::$other),+, $name::$on].map(|m| m.to_possible_value().unwrap_or_default());
                $name::from_str(&name, false).map_err(|_| {
                    let names = names().map(|m| m.get_name().to_string()).join(", ");
                    D::Error::custom(format!("unknown mode `{name}`, expected true, false, {names}"))
                })
            }
        }
    };
}
#[derive(Deserialize)]
#[serde(untagged, expecting = "true, false or the name of a mode")]
enum Mode {
    Switch(bool),
    Name(String),
}
modes!(enum CheckpointName, Off, Full, Selective);
modes!(enum InputLossName, Off, On, Conversations);
modes!(enum OffloadName, Off, Parameters, Gradients, Optimizer);

impl CommName {
    pub fn name(self) -> &'static str {
        match self {
            CommName::Auto => "auto",
            CommName::Shm => "shm",
            CommName::Tcp => "tcp",
            CommName::Nccl => "nccl",
            CommName::Ipc => "ipc",
            CommName::Mpi => "mpi",
        }
    }
}
impl PrecisionName {
    pub fn name(self) -> &'static str {
        match self {
            PrecisionName::Fp32 => "fp32",
            PrecisionName::Bf16 => "bf16",
            PrecisionName::Fp16 => "fp16",
            PrecisionName::Fp8 => "fp8",
        }
    }
}
