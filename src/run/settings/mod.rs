//! Every setting, declared once: its flag, its key in a file (the same name with underscores, in the section named by
//! the field of `Settings`), its type, its line in `--help` and its check. Never relates settings to the machine or
//! the data: the plan does.

/// Enumerated settings.
pub mod names;
/// What declarations share: ranges, sizes, lists.
pub mod value;

// The sections, one file each, in the order of `--help`.
pub mod run; // ranks, devices, steps, output
pub mod model; // sizes, or a model to start from
pub mod data; // data sets, templates, packing
pub mod objective; // what is learned, and from which fields
pub mod optim; // the optimizer, its schedule, clipping
pub mod tune; // freezing, weight decay and learning rate by tensor name
pub mod lora; // adapters
pub mod batch; // sequences in a micro-batch and in a step
pub mod fsdp; // sharding, prefetch, recomputation, offload
pub mod zero; // DeepSpeed's buckets
pub mod precision; // dtypes and the loss scale
pub mod parallel; // sizes of the mesh's axes
pub mod checkpoint; // saving and resuming
pub mod faults; // restarts, timeouts, bad steps
pub mod watch; // logs and TensorBoard
pub mod wandb; // Weights & Biases
pub mod trace; // profiles and memory over time
pub mod generate; // sampling
/// Names of the hub among them.
pub mod hub;
/// All of them: [`Settings`].
pub mod sections;

/// `defaults.yaml`.
pub mod defaults;
/// Names of our settings in other tools: `synonyms.tsv`.
pub mod synonyms;
/// A command line with flags of other tools, read as ours.
pub mod spellings;
/// `training_stages:` of a file.
pub mod stages;
/// Defaults by task, of runs that start from a model.
pub mod tasks;
/// DeepSpeed's file, read as settings.
pub mod deepspeed;
/// Settings that determine other settings.
pub mod effect;
/// Settings without effect, given the others: `idle.tsv`.
pub mod idle;
/// What `--help` and its like print.
pub mod help;
/// The command line.
pub mod args;
/// File keys named like flags, ours or those of other tools.
mod foreign;
/// Files of other tools.
mod tools;
/// One block of a file.
mod blocks;
/// A file: its blocks and stages, overlaid.
mod file;
/// Files and flags, overlaid on the defaults.
pub mod config;

pub use names::*;
pub use sections::Settings;
