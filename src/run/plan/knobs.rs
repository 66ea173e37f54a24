//! Checks of `--no-use-orig-params`, with which a unit is one tensor to the optimizer: its tensors cannot differ in
//! weight decay, learning rate or freezing. Never changes a setting.
use crate::base::{Error, Result};
use crate::nn::{Layout, Storage};
use crate::run::settings::Settings;
use crate::run::settings::effect::contradiction;
use crate::store::apart;
use crate::store::flat::{Flat, Wrap, runs};

/// The check that needs settings alone.
pub fn check(s: &Settings) -> Result<()> {
    match s.fsdp.use_orig_params == Some(false) && s.tune.no_decay.is_some() {
        false => Ok(()),
        true => Err(contradiction(
            "no-use-orig-params",
            "a unit is one tensor to the optimizer, but no_decay gives some of its tensors another weight decay",
        )),
    }
}

/// All tensors of a unit must be updated alike, as in PyTorch's FlatParameter.
pub fn uniform(layouts: &[Layout], wrap: Wrap) -> Result<()> {
    for unit in apart(layouts).iter().flat_map(|layouts| Flat::new(layouts, wrap, 1).units) {
        let name = |part: usize| unit.parts[part].layout.segments.first().map_or("", |s| &s.name);
        let refuse = |what: String| Err(Error::input(format!("--no-use-orig-params: {what}; use --use-orig-params")));
        if unit.parts.len() > 1 {
            return refuse(format!("a unit is one tensor, but {} is trained and {} is frozen", name(0), name(1)));
        }
        let Some(part) = unit.part(Storage::Trained) else { continue };
        let segments = &part.layout.segments;
        let alike = |i: usize| Some((segments[i].decay, segments[i].lr_scale));
        if let [first, second, ..] = &runs(&part.layout, 0..part.padded, alike)[..] {
            return refuse(format!(
                "a unit is one tensor, but in the unit of {} the learning rate is scaled by both {} and {}",
                name(0),
                segments[first.segment].lr_scale,
                segments[second.segment].lr_scale
            ));
        }
    }
    Ok(())
}
