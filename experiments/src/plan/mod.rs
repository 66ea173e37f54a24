//! `experiments plan`: the cost of each strategy for a model on a number of GPUs, in bytes per rank and seconds per
//! step, and which one to run. Never trains, except to measure a CPU on request.
//!
//! Bytes are those of the library's own tables, which also allocate. Times come from a step of the real engine on a
//! device that computes nothing ([`simulate`]), where each operation and collective takes the machine's time for it
//! ([`machine`], [`links`], [`measured`]). Not modeled: contention between streams, stragglers, and the host except for
//! its launches.

// The streams of one rank in simulated time.
pub mod clock;
// The duration of a collective on given links.
pub mod links;
// The duration of operations and collectives on a machine: GPUs by published rates.
pub mod machine;
// Cards without a switch between them.
pub mod cards;
// The same for a measured machine.
pub mod measured;
// Groups with one rank that spend simulated time.
pub mod group;
// One step of the engine in simulated time.
pub mod simulate;
// Measures this machine's CPU.
pub mod calibrate;
// The strategies to plan, as flags.
pub mod candidates;
// The result of planning.
mod cost;
// A plan as a table and as JSON.
mod report;
// A simulated step as a Chrome trace.
mod trace;
// From flags to tables.
mod cli;

pub use cli::{flags, main};
