//! The binary `run_fsdp`: sharded training.
use flatshard::run::StrategyName;
use flatshard::run::main as train;
use std::process::ExitCode;

const ABOUT: &str = "Trains a decoder transformer whose parameters, gradients and optimizer state are sharded over ranks.\nWith no argument: 2 ranks on this CPU, a small model, real text, a few minutes.";

fn main() -> ExitCode {
    train("run_fsdp", ABOUT, StrategyName::Fsdp)
}
