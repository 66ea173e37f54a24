//! Checkpoints and model files: reading and writing, async saves, damage, full disks, third-party models.
#[path = "../common/mod.rs"]
mod common;
mod async_save;
mod best;
mod damage;
mod damaged_model;
mod export;
mod files;
mod full_disk;
mod gguf;
mod gguf_in;
mod load_memory;
mod recovery;
mod resume;
mod save_flags;
