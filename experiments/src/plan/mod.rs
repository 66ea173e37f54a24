//! `experiments plan`: what each strategy costs a model on a number of GPUs, in bytes per rank and seconds per step,
//! and which one to run. Never trains, except to measure a CPU on request.
//!
//! Bytes are those of the library's own tables, which also allocate. Times come from a step of the real engine on a
//! device that computes nothing ([`simulate`]), where each operation and collective takes what the machine takes for it
//! ([`machine`], [`links`], [`measured`]). Not modeled: streams that slow each other down, late ranks, and the host
//! except for its launches.

// The streams of one rank in simulated time.
pub mod clock;
// How long a collective takes on given links.
pub mod links;
// The FLOPs and bytes of one device operation.
pub mod op;
// How long a machine takes for an operation or a collective: GPUs by published rates.
pub mod machine;
// The same for a machine that was measured.
pub mod measured;
// A device that turns calls into costs.
pub mod device;
// Groups of one rank that spend simulated time.
pub mod group;
// One step of the engine in simulated time.
pub mod simulate;
// Measures this machine's CPU.
pub mod calibrate;
// The strategies to plan, as flags.
pub mod candidates;
// What planning finds out.
mod cost;
// A plan as a table and as JSON.
mod report;
// A simulated step as a Chrome trace.
mod trace;
// From flags to the plan.
mod cli;

pub use cli::main;
