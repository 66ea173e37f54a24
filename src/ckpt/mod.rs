//! Floor 6: checkpoints as plain safetensors in the model's own global layout. Every rank writes the bytes it owns and
//! reads the bytes it needs: nothing is gathered, and another number of ranks, strategy or precision needs no
//! conversion. A checkpoint either exists completely or not at all. Never knows the loop.
//!
//! ```text
//! CKPT_DIR/latest                        "step-00000100"
//! CKPT_DIR/best                          the same, for the lowest evaluation loss
//! CKPT_DIR/step-00000100/config.json     a Hugging Face model directory, with
//!                        model*.safetensors      f32 master weights
//!                        optimizer*.safetensors  exp_avg.{tensor}, exp_avg_sq.{tensor}
//!                        trainer_state.json      progress of the run; checksums of all of the above
//! ```
pub mod disk; // writes, syncs and renames, observable by tests
mod checksum; // checksums of tensors, summed over ranks
mod elements; // elements in file dtypes
mod json; // no key twice
pub mod header; // headers of untrusted safetensors files
pub mod layout; // which tensor is where in which file
pub mod state; // progress of a run: trainer_state.json
mod evaluations; // the lowest loss so far
pub mod dirs; // names of checkpoint directories
pub mod hf; // Hugging Face's config.json
pub mod adapter; // PEFT's adapter_config.json
mod companions; // files next to the weights
mod naming; // names of a text model's tensors in files
mod slices; // tensors of files that hold several of ours
mod mxfp4; // matrices in 4 bits
mod transposed; // matrices whose transposes files have
mod columns; // matrices that are columns of wider ones
mod unstack; // slices of what files hold
mod published; // names that transformers' classes do not have
mod tower; // tensors that are carried through
mod unused; // tensors that a model does not use
mod model_dir; // whether a directory is a model's
mod source; // validated files to load from
mod weights_hash; // tells models apart
mod room; // whether a directory may be written, and disk space
mod writer; // one rank's writes
mod publish; // small files, then the final name
mod async_save; // a copy, written by a thread
mod checkpointer; // state shared by saving and loading
mod save; // all ranks write
mod load; // all ranks read
mod merging; // adapters, opened
mod merge; // adapters into weights
pub mod gguf; // one file for llama.cpp

pub use checkpointer::Checkpointer;
pub use companions::Companions;
pub use dirs::{Lock, Resume, candidates, clear, later, mark_best, newest, of_model, of_step, prepare, resolve};
pub use evaluations::Evaluations;
pub use json::KeysOnce;
pub use load::{CarriedSize, carried, inspect, inspect_model, inspect_trained_adapter};
pub use merge::inspect_adapter;
pub use merging::Merged;
pub use model_dir::is_model;
pub use publish::SavedCheckpoint;
pub use room::{check_export, check_room, same_place};
pub use safetensors::Dtype;
pub use source::is_created;
pub use state::{TrainerState, fingerprint};
pub use weights_hash::{same_weights, weights_hash};
