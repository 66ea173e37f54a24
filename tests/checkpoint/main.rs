//! Checkpoints and models in files: what is written and read, async saves, damage, full disks, other tools' models.
#[path = "../common/mod.rs"]
mod common;
mod async_save;
mod best;
mod damage;
mod export;
mod files;
mod full_disk;
mod load_memory;
mod recovery;
mod resume;
mod save_flags;
