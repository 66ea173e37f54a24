//! Every setting, declared once: its flag, its key in a file (the same name with underscores, in the section named by
//! the field of `Settings`), its type, its line in `--help` and its check. Never relates settings to the machine or
//! the data: the plan does.

/// Settings that are one of a few names.
pub mod names;
/// What declarations share: ranges, sizes, lists.
pub mod value;

// The sections, one file each, in the order of `--help`.
pub mod run;
pub mod model;
pub mod data;
pub mod optim;
pub mod tune;
pub mod lora;
pub mod batch;
pub mod fsdp;
pub mod zero;
pub mod precision;
pub mod parallel;
pub mod checkpoint;
pub mod faults;
pub mod watch;
pub mod trace;
pub mod generate;
/// All of them: [`Settings`].
pub mod sections;

/// `defaults.yaml`.
pub mod defaults;
/// What other tools call our settings: `synonyms.tsv`.
pub mod synonyms;
/// `training_stages:` of a file.
pub mod stages;
/// DeepSpeed's file, read as settings.
pub mod deepspeed;
/// What settings make of each other.
pub mod effect;
/// The command line.
pub mod args;
/// Files and flags, laid over the defaults.
pub mod config;

pub use names::*;
pub use sections::Settings;
