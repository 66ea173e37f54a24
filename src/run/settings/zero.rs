//! Settings of backend zero, under DeepSpeed's names. Never reads DeepSpeed's file: [`super::deepspeed`] does.
use crate::base::{DType, Error, Result};
use crate::run::settings::Settings;
use crate::store::{Stage, ZeroOptions};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::str::FromStr;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "ZeRO")]
pub struct Zero {
    /// Gradients reduced together, a layer's at least; auto: embed-dim squared [default: 5e8]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub reduce_bucket_size: Option<Elements>,
    /// Reduce a bucket while the next one fills [default: on in stage 3]
    #[arg(long)]
    pub overlap_comm: Option<bool>,
    /// Stages 1 and 2: weights gathered at a time after an update [default: 5e8]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub allgather_bucket_size: Option<Elements>,
    /// Stage 3: weights gathered ahead of the layer in use; auto: 0.9 of embed-dim squared [default: 5e7]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub stage3_prefetch_bucket_size: Option<Elements>,
    /// Stage 3: full weights at a time, the root and a layer at least [default: 1e9]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub stage3_max_live_parameters: Option<Elements>,
    /// Stage 3: weights stay after forward where so many or fewer are used before backward needs them [default: 1e9]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub stage3_max_reuse_distance: Option<Elements>,
}

/// A size in elements, or `auto`: by the model's width, as Hugging Face fills it in, or else the default.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Elements {
    Auto,
    Count(u64),
}

impl FromStr for Elements {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Elements, String> {
        let wrong = || format!("{text}: a whole number is expected, as 500000000 or 5e8, or auto");
        match text {
            "auto" => Ok(Elements::Auto),
            _ => text.parse().map_err(|_| wrong()).and_then(|x| whole(x).ok_or_else(wrong)),
        }
    }
}
/// Files write 5e8, which is a float to JSON.
fn whole(x: f64) -> Option<Elements> {
    (x >= 0.0 && x.fract() == 0.0 && x < 1e18).then_some(Elements::Count(x as u64))
}
impl Serialize for Elements {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Elements::Auto => s.serialize_str("auto"),
            Elements::Count(n) => s.serialize_u64(*n),
        }
    }
}
impl<'de> Deserialize<'de> for Elements {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Elements, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number of elements, or auto")]
        enum Either {
            Number(f64),
            Text(String),
        }
        match Either::deserialize(d)? {
            Either::Number(x) => whole(x).ok_or_else(|| format!("{x} is no number of elements")),
            Either::Text(text) => text.parse(),
        }
        .map_err(serde::de::Error::custom)
    }
}

/// What the store is told. `dim`: the model's width.
pub fn options(s: &Settings, dtype: DType, dim: usize) -> Result<ZeroOptions> {
    let (z, stage) = (&s.zero, s.fsdp.zero_stage.unwrap_or(2));
    let (stage, only_3, not_3) = match stage {
        1 => (Stage::One, true, false),
        2 => (Stage::Two, true, false),
        3 => (Stage::Three, false, true),
        other => {
            return Err(Error::input(format!(
                "zero_stage is {other}: it must be 1, 2 or 3 (stage 0 is what run_ddp does, or --sharding NO_SHARD)"
            )));
        }
    };
    let counted = |size: Option<Elements>| matches!(size, Some(Elements::Count(_)));
    for (name, size, without) in [
        ("stage3_prefetch_bucket_size", z.stage3_prefetch_bucket_size, only_3),
        ("stage3_max_live_parameters", z.stage3_max_live_parameters, only_3),
        ("stage3_max_reuse_distance", z.stage3_max_reuse_distance, only_3),
        ("allgather_bucket_size", z.allgather_bucket_size, not_3),
    ] {
        if counted(size) && without {
            let stages = if only_3 { "stage 3 only" } else { "stages 1 and 2 only" };
            return Err(Error::input(format!("{name} has a meaning in {stages}: leave it out, or set it to auto")));
        }
    }
    let size = |given: Option<Elements>, auto: usize, default: usize| match given {
        None => default,
        Some(Elements::Auto) => auto,
        Some(Elements::Count(n)) => n as usize,
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
