//! How models and checkpoints are written. Never writes one.
use crate::base::Result;
use crate::ckpt;
use crate::run::settings::PrecisionName;
use crate::run::settings::checkpoint::CheckpointSettings;
use crate::run::settings::value::{StepInterval, set};

/// How models and checkpoints are written.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions {
    /// A file grows up to so many bytes.
    pub max_file_bytes: u64,
    /// Of what `--save-hf` writes.
    pub dtype: ckpt::Dtype,
    /// Checkpoints between steps are written while training goes on.
    pub behind: bool,
}

impl SaveOptions {
    pub fn new(c: &CheckpointSettings) -> Result<SaveOptions> {
        Ok(SaveOptions {
            max_file_bytes: c.max_file_bytes()?,
            dtype: match set(&c.save_dtype, "checkpoint.save_dtype")? {
                PrecisionName::Fp32 => ckpt::Dtype::F32,
                PrecisionName::Bf16 => ckpt::Dtype::BF16,
                PrecisionName::Fp16 => ckpt::Dtype::F16,
            },
            behind: set(&c.async_save, "checkpoint.async_save")?
                && c.ckpt_dir.is_some()
                && c.save_every != Some(StepInterval::Steps(0)),
        })
    }
}
