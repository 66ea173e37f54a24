//! The binary `flatshard`: verbs for command lines of `run_fsdp`. Never does more than call the library.
use flatshard::run::verbs::LINES;
use flatshard::run::{HelpPage, StrategyName, verbs_main};
use std::process::ExitCode;

const ABOUT: &str = "Train, fine-tune and talk to language models, sharded over ranks.\nA verb is a short way to write flags of run_fsdp: flatshard sft MODEL DATA.";

fn main() -> ExitCode {
    verbs_main(&HelpPage::verbs("flatshard", ABOUT, &LINES), StrategyName::Fsdp)
}
