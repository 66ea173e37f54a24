//! Settings of backend zero, under DeepSpeed's names. Never reads DeepSpeed's file: [`super::deepspeed`] does.
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::str::FromStr;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "ZeRO")]
pub struct ZeroSettings {
    /// Gradient elements per reduction, at least one layer; auto: embed-dim squared [default: 5e8]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub reduce_bucket_size: Option<ElementCount>,
    /// Reduce one bucket while the next one fills [default: on in stage 3]
    #[arg(long)]
    pub overlap_comm: Option<bool>,
    /// Stages 1 and 2: weight elements per all-gather after an update [default: 5e8]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub allgather_bucket_size: Option<ElementCount>,
    /// Stage 3: weight elements to prefetch beyond the layer in use; auto: 0.9 of embed-dim squared [default: 5e7]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub stage3_prefetch_bucket_size: Option<ElementCount>,
    /// Stage 3: maximum parameters unsharded at a time, at least the root and one layer [default: 1e9]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub stage3_max_live_parameters: Option<ElementCount>,
    /// Stage 3: keep weights unsharded after forward if fewer elements than this are used before backward needs them
    /// [default: 1e9]
    #[arg(long, value_name = "ELEMENTS|auto")]
    pub stage3_max_reuse_distance: Option<ElementCount>,
}

/// A size in elements. `auto`: from the model's width, as Hugging Face derives it, or else the default.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ElementCount {
    Auto,
    Count(u64),
}

impl FromStr for ElementCount {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<ElementCount, String> {
        let wrong = || format!("{text}: expected auto or a whole number, such as 500000000 or 5e8");
        match text {
            "auto" => Ok(ElementCount::Auto),
            _ => text.parse().map_err(|_| wrong()).and_then(|x| whole(x).ok_or_else(wrong)),
        }
    }
}
/// 5e8 is a float in JSON.
fn whole(x: f64) -> Option<ElementCount> {
    (x >= 0.0 && x.fract() == 0.0 && x < 1e18).then_some(ElementCount::Count(x as u64))
}
impl Serialize for ElementCount {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            ElementCount::Auto => s.serialize_str("auto"),
            ElementCount::Count(n) => s.serialize_u64(*n),
        }
    }
}
impl<'de> Deserialize<'de> for ElementCount {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<ElementCount, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number of elements, or auto")]
        enum Either {
            Number(f64),
            Text(String),
        }
        match Either::deserialize(d)? {
            Either::Number(x) => whole(x).ok_or_else(|| format!("{x} is not a whole number of elements")),
            Either::Text(text) => text.parse(),
        }
        .map_err(serde::de::Error::custom)
    }
}
