//! Ranks that die, stall, disagree or compute wrong values: every other rank exits with a message that names the rank,
//! and runs recover.
#[path = "../common/mod.rs"]
mod common;
mod disagreement;
mod flight_recorder;
mod processes;
mod replica_checks;
mod restart;
