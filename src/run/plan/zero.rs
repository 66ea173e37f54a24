//! Options of the ZeRO store, from the settings. Never implements a stage.
use crate::base::{DType, Result};
use crate::run::settings::Settings;
use crate::run::settings::zero::ElementCount;
use crate::store::{Stage, ZeroOptions};

/// `dim`: the model's width.
pub fn options(s: &Settings, dtype: DType, dim: usize) -> Result<ZeroOptions> {
    let (z, stage) = (&s.zero, s.fsdp.zero_stage.unwrap_or(2));
    let stage = match stage {
        1 => Stage::One,
        2 => Stage::Two,
        _ => Stage::Three,
    };
    let size = |given: Option<ElementCount>, auto: usize, default: usize| match given {
        None => default,
        Some(ElementCount::Auto) => auto,
        Some(ElementCount::Count(n)) => n as usize,
    };
    let default = ZeroOptions::new(stage, dtype);
    let square = dim * dim;
    Ok(ZeroOptions {
        reduce_dtype: s.precision.reduce()?,
        reduce_bucket: size(z.reduce_bucket_size, square, default.reduce_bucket),
        overlap: z.overlap_comm.unwrap_or(default.overlap),
        gather_bucket: size(z.allgather_bucket_size, default.gather_bucket, default.gather_bucket),
        prefetch: size(z.stage3_prefetch_bucket_size, 9 * square / 10, default.prefetch),
        max_live: size(z.stage3_max_live_parameters, default.max_live, default.max_live),
        max_reuse: size(z.stage3_max_reuse_distance, default.max_reuse, default.max_reuse),
        ..default
    })
}
