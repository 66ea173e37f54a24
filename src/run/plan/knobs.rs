//! The knobs of sharding against each other: one that could have no effect is refused, so that nobody measures a
//! difference that is not there. Never changes a setting.
use crate::base::{Error, Result};
use crate::nn::Layout;
use crate::run::settings::effect::contradiction;
use crate::run::settings::{OffloadName, PrefetchName, Settings, StrategyName, WrapName};
use crate::store::flat::{Flat, Wrap, runs};

/// Before anything is derived.
pub fn check(s: &Settings) -> Result<()> {
    let f = &s.fsdp;
    let replicated = s.run.strategy == Some(StrategyName::Ddp);
    let (wrap, limited) = (f.auto_wrap, f.limit_all_gathers != Some(false));
    let ahead = f.forward_prefetch == Some(true) || f.backward_prefetch != Some(PrefetchName::None);
    let refused = [
        (
            replicated && f.sync_each_batch == Some(true),
            "sync-each-batch",
            "replicas hold whole gradients anyway, so that reducing each micro-batch would spare no memory",
        ),
        (
            !limited && wrap == Some(WrapName::None),
            "no-limit-all-gathers",
            "--auto-wrap none makes one unit of the model: there is none to gather ahead",
        ),
        (
            !limited && !ahead,
            "no-limit-all-gathers",
            "with --no-forward-prefetch and --backward-prefetch NONE nothing is gathered ahead",
        ),
        (
            f.use_orig_params == Some(false) && s.tune.no_decay.is_some(),
            "no-use-orig-params",
            "a unit is one tensor to the optimizer then, and no_decay asks for another decay of some of its tensors",
        ),
        (
            replicated && !matches!(f.cpu_offload, None | Some(OffloadName::Off | OffloadName::Optimizer)),
            "cpu-offload",
            "replicas compute with their weights and gradients where they are; --cpu-offload optimizer is possible, and \
             sharding offloads the rest",
        ),
    ];
    match refused.iter().find(|(contradicts, ..)| *contradicts) {
        None => Ok(()),
        Some((_, flag, reason)) => Err(contradiction(flag, reason)),
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
