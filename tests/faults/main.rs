//! Ranks that die, stall, disagree or compute something else: every other rank ends with a message that names it, and
//! runs go on.
#[path = "../common/mod.rs"]
mod common;
mod disagreement;
mod flight_recorder;
mod processes;
mod replica_checks;
mod restart;
