//! Floor 6: checkpoints as plain safetensors in the model's own global layout. Every rank writes the bytes that it owns
//! and reads the bytes that it needs, so that nothing is gathered anywhere, and another number of ranks, strategy or
//! precision needs no conversion. A checkpoint is there complete or not at all. Never knows the loop.
//!
//! ```text
//! CKPT_DIR/latest                        "step-00000100"
//! CKPT_DIR/best                          the same, of the checkpoint with the lowest evaluation loss
//! CKPT_DIR/step-00000100/config.json     a Hugging Face model directory, with
//!                        model*.safetensors      f32 masters
//!                        optimizer*.safetensors  exp_avg.{tensor}, exp_avg_sq.{tensor}
//!                        trainer_state.json      where the run stood; checksums of all the above
//! ```
pub mod disk; // writes, syncs and renames, which a test watches
mod checksum; // of a tensor, summed over ranks
mod elements; // elements as a file holds them
pub mod header; // headers of safetensors files, from anybody
pub mod layout; // which tensor is where in which file
pub mod state; // where a run stood: trainer_state.json
mod evaluations; // the lowest loss so far
pub mod dirs; // names of checkpoint directories
pub mod hf; // Hugging Face's config.json
pub mod adapter; // PEFT's adapter_config.json
mod companions; // files next to the weights
mod source; // files to read from, checked
mod room; // whether a directory may be written, and fits
mod writer; // one rank's part of the files
mod publish; // small files, then the name
mod async_save; // a copy, written by a thread
mod checkpointer; // what ranks share when they save and load
mod save; // all ranks write
mod load; // all ranks read
mod merge; // adapters into weights

pub use checkpointer::Checkpointer;
pub use companions::Companions;
pub use dirs::{Lock, Resume, candidates, clear, mark_best, newest, prepare, resolve};
pub use evaluations::Evaluations;
pub use load::{inspect, inspect_model};
pub use publish::SavedCheckpoint;
pub use room::{check_export, same_place};
pub use safetensors::Dtype;
pub use source::is_model;
pub use state::{TrainerState, fingerprint};
