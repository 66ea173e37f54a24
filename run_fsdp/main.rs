//! The binary `run_fsdp`: sharded training by default. Never does more than call the library.
use flatshard::run::main as train;
use flatshard::run::{HelpPage, StrategyName};
use std::process::ExitCode;

const ABOUT: &str = "Train a decoder transformer whose parameters, gradients and optimizer state are sharded over ranks.\nWithout arguments: a small LLaMA on real text, on 2 CPU ranks, in a few minutes.";

fn main() -> ExitCode {
    train(&HelpPage::training("run_fsdp", ABOUT), StrategyName::Fsdp)
}
