//! Units that are one tensor to the optimizer (`--no-use-orig-params`): what cannot be asked of some of their tensors.
//! Never changes a setting.
use crate::base::{Error, Result};
use crate::nn::Layout;
use crate::run::settings::Settings;
use crate::run::settings::effect::contradiction;
use crate::store::flat::{Flat, Wrap, runs};

/// Before anything is derived.
pub fn check(s: &Settings) -> Result<()> {
    match s.fsdp.use_orig_params == Some(false) && s.tune.no_decay.is_some() {
        false => Ok(()),
        true => Err(contradiction(
            "no-use-orig-params",
            "a unit is one tensor to the optimizer then, and no_decay asks for another decay of some of its tensors",
        )),
    }
}

/// Without original parameters, every tensor of a unit is updated alike, as PyTorch's FlatParameter is.
pub fn uniform(layouts: &[Layout], wrap: Wrap) -> Result<()> {
    for unit in Flat::new(layouts, wrap, 1).units {
        let name = |part: usize| unit.parts[part].layout.segments.first().map_or("", |s| &s.name);
        let refuse = |what: String| Err(Error::input(format!("--no-use-orig-params: {what}; use --use-orig-params")));
        if unit.parts.len() > 1 {
            return refuse(format!("a unit is one tensor, but {} of one learns and {} is frozen", name(0), name(1)));
        }
        let Some(part) = unit.part(true) else { continue };
        if let [first, second, ..] = &runs(&part.layout, 0..part.padded)[..] {
            return refuse(format!(
                "a unit is one tensor, but the one from {} on has tensors with {} and with {} times the learning rate",
                name(0),
                first.lr_scale,
                second.lr_scale
            ));
        }
    }
    Ok(())
}
