//! From settings to a [`Plan`]: read -> check -> derive -> fit. All validation is here and in the settings, before any
//! rank starts, and never in the loop: a plan that exists is valid.

/// Resolves the device `auto`.
pub mod device;
/// The transport between ranks.
pub mod carrier;
/// The axes of the mesh.
pub mod mesh;
/// All of a run's ranks.
pub mod ranks;
/// Sequences per step.
pub mod batch;
/// The model's shapes and its tokenizer.
pub mod model;
/// Options of backend zero.
pub mod zero;
/// Tensor parallelism.
pub mod tensor;
/// What is minimized, and the reference model.
pub mod objective;
/// The engine's options.
pub mod engine;
/// Checks of `use_orig_params`.
pub mod knobs;
/// Bytes per rank.
pub mod bytes;
/// The engine within a memory budget, and what a rank holds.
pub mod sized;
/// The tokenizer and its chat template.
pub mod tokens;
/// The data set.
pub mod data;
/// Prompts that are sampled at evaluations.
pub mod prompts;
/// Which rows are held out.
pub mod split;
/// Steps and learning rates.
pub mod schedule;
/// How checkpoints are written.
pub mod save;
/// Which checkpoint the run resumes from.
pub mod resume;
/// The best checkpoint and early stopping.
pub mod evaluations;
/// Restarts after a failure, time limit, signals.
pub mod restarts;
/// The metrics file that W&B reads.
pub mod wandb;
/// Which steps are traced.
pub mod profile;
/// Checks of settings together and of the paths they name.
pub mod check;
/// Facts of a plan that the settings alone do not have.
pub mod facts;
/// The whole plan of a training run.
pub mod training;
/// What checkpoints, metrics and `--print-config` say of a plan.
pub mod record;
/// Available and held memory, from the kernel.
pub mod memory;
/// Whether the plan fits on this host.
pub mod fit;
/// A plan without data, for any machine: for the planner.
pub mod outline;

pub use training::Plan;
