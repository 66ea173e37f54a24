//! The binary `run_ddp`: replicated training by default. Never does more than call the library.
use flatshard::run::main as train;
use flatshard::run::{HelpPage, StrategyName};
use std::process::ExitCode;

const ABOUT: &str = "Train a decoder transformer with all parameters on every rank; gradients are summed over the ranks.\nWithout arguments: a small LLaMA on real text, on 2 CPU ranks, in a few minutes.";

fn main() -> ExitCode {
    train(&HelpPage::training("run_ddp", ABOUT), StrategyName::Ddp)
}
