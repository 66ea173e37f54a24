//! The binary `run_ddp`: replicated training.
use flatshard::run::StrategyName;
use flatshard::run::main as train;
use std::process::ExitCode;

const ABOUT: &str = "Trains a decoder transformer with every rank holding all parameters; gradients are summed over ranks.\nWith no argument: 2 ranks on this CPU, a small model, real text, a few minutes.";

fn main() -> ExitCode {
    train("run_ddp", ABOUT, StrategyName::Ddp)
}
