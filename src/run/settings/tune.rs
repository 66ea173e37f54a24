//! Settings per tensor, by name pattern: freezing, weight decay, learning-rate factors. Never searches a model.
use super::value::one_or_many;
use crate::base::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize};

/// In a file these keys may also be at the top level.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Tune")]
pub struct TuneSettings {
    /// Freeze tensors whose names match these regular expressions [default: none]
    #[arg(long, num_args = 1.., value_name = "PATTERN")]
    #[serde(deserialize_with = "one_or_many")]
    pub freeze: Option<Vec<String>>,
    /// Train only tensors whose names match these regular expressions and not those of --freeze [default: all]
    #[arg(long, num_args = 1.., value_name = "PATTERN")]
    #[serde(deserialize_with = "one_or_many")]
    pub unfreeze: Option<Vec<String>>,
    /// No weight decay for tensors whose names match, in addition to norms and biases [default: none]
    #[arg(long, num_args = 1.., value_name = "PATTERN")]
    #[serde(deserialize_with = "one_or_many")]
    pub no_decay: Option<Vec<String>>,
    /// Multiply the learning rate of tensors whose names match by FACTOR [default: none]
    #[arg(long, num_args = 1.., value_name = "PATTERN=FACTOR")]
    #[serde(deserialize_with = "pairs")]
    pub lr_scale: Option<Vec<String>>,
}

impl TuneSettings {
    pub fn check(&self) -> Result<()> {
        self.lr_scales().map(drop)
    }
    /// Patterns and factors.
    pub fn lr_scales(&self) -> Result<Vec<(String, f32)>> {
        let scale = |text: &String| {
            let pair = text.rsplit_once('=').and_then(|(pattern, x)| Some((pattern.to_string(), x.parse().ok()?)));
            pair.ok_or_else(|| {
                Error::input(format!("lr_scale {text:?}: expected PATTERN=FACTOR, such as embed_tokens=0.1"))
            })
        };
        self.lr_scale.iter().flatten().map(scale).collect()
    }
}

/// `lr_scale: {PATTERN: FACTOR}` is `lr_scale: [PATTERN=FACTOR]`.
fn pairs<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a mapping of patterns to factors, or a list of PATTERN=FACTOR")]
    enum Pairs {
        Map(serde_json::Map<String, serde_json::Value>),
        List(Vec<String>),
    }
    Ok(Option::<Pairs>::deserialize(d)?.map(|x| match x {
        Pairs::Map(map) => map.into_iter().map(|(pattern, factor)| format!("{pattern}={factor}")).collect(),
        Pairs::List(list) => list,
    }))
}
