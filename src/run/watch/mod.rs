//! Observability: what a run shows and writes while it trains. Never changes what it does.

/// Log levels, stderr and log files.
pub mod log;
/// The metrics file, its events, and the interface of a sink.
pub mod metrics;
/// Other tools' names of the numbers.
pub mod scalars;
/// TensorBoard's file format, and a sink that writes it.
pub mod event_file;
pub mod tensorboard;
/// Weights & Biases, through its own package.
pub mod wandb;
/// The GPU's clocks, memory and warnings.
pub mod gpu;
/// How fast the device and the collectives can be.
pub mod limits;
/// How close a step comes to that: MFU and the speed of light.
pub mod sol;
/// Signs that a run goes wrong though no step fails.
mod health;
/// Colors of lines on a terminal.
pub mod style;
/// The progress bar, and the line of a step.
pub mod progress;
/// The run's header, and what to do next.
pub mod report;
/// The result of an evaluation.
pub mod evaluated;
/// All of them, fed by the loop.
pub mod reporter;

pub use evaluated::{Evaluated, PromptSample};
pub use log::RunLog;
pub use reporter::{HeldBytes, Reporter, StepDone, failed};
