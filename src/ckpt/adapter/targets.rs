//! Which modules PEFT's `target_modules` means: those with these ends of their paths, or those whose path one regular
//! expression matches in full. Never attaches an adapter.
use super::super::naming::Naming;
use crate::base::{Error, Result, quote};
use crate::nn::{Segment, Spec, is_path_end, linear_module};
use regex::Regex;
use std::collections::BTreeSet;

/// Characters that no name of a module has.
const SPECIAL: &[char] = &['*', '+', '?', '[', ']', '(', ')', '{', '}', '|', '\\', '^', '$'];

/// `given` as targets of adapters: names, or the ends of paths where modules of the same name are not all meant.
/// `tower`: the model has a vision tower, and its class other paths.
pub fn targets(given: Vec<String>, spec: &Spec, tower: impl FnOnce() -> Result<bool>) -> Result<Vec<String>> {
    let special = |name: &String| name.contains(SPECIAL);
    let pattern = match &given[..] {
        [one] if special(one) => Some(pattern(one)?),
        several if several.iter().any(special) => {
            return Err(Error::input("lora: target_modules: a regular expression must be its only value"));
        }
        names if names.iter().any(|name| name.contains('.')) => None,
        _ => return Ok(given),
    };
    let (tower, layouts) = (tower()?, spec.layouts());
    let of_experts: BTreeSet<&str> =
        layouts.iter().filter(|l| l.experts).flat_map(|l| &l.segments).filter_map(linear_module).collect();
    let modules: Vec<(&Segment, &str)> = layouts
        .iter()
        .flat_map(|layout| &layout.segments)
        .filter_map(|segment| Some((segment, segment.name.strip_suffix(".weight")?)))
        .collect();
    let mut found: Vec<&(&Segment, &str)> = Vec::new();
    for given in &given {
        let before = found.len();
        let means = |path: &String| match &pattern {
            Some(pattern) => pattern.is_match(path),
            None => is_path_end(given, path),
        };
        found.extend(modules.iter().filter(|(_, module)| paths(module, tower).iter().any(means)));
        if found.len() == before {
            let example = modules.iter().find(|(segment, _)| linear_module(segment).is_some());
            return Err(Error::input(format!(
                "lora: target_modules is {}, which matches no module's whole path, such as {}",
                quote(given),
                example.map_or_else(String::new, |(_, module)| paths(module, tower)[0].clone())
            )));
        }
    }
    for (segment, module) in &found {
        let Some(name) = linear_module(segment) else {
            return Err(Error::input(format!(
                "lora: target_modules matches {module}, whose adapters are not supported: match other modules only"
            )));
        };
        // PEFT's regular expressions match none of a block's experts, which transformers holds as one tensor.
        if of_experts.contains(name) {
            return Err(Error::input(format!(
                "lora: target_modules matches {module}, but modules with names of experts' are adapted by name alone: \
                 list {name} and the other names"
            )));
        }
    }
    let found: BTreeSet<&str> = found.into_iter().map(|(_, module)| *module).collect();
    let last = |module: &str| module.rsplit('.').next().unwrap_or_default().to_string();
    let names: BTreeSet<String> = found.iter().map(|module| last(module)).collect();
    let is_partial = |(segment, module): &(&Segment, &str)| {
        linear_module(segment).is_some_and(|name| names.contains(name)) && !found.contains(module)
    };
    Ok(match modules.iter().any(is_partial) {
        false => names.into_iter().collect(),
        true => found.into_iter().map(|module| module.strip_prefix("model.").unwrap_or(module).into()).collect(),
    })
}

fn pattern(text: &str) -> Result<Regex> {
    Regex::new(&format!("^(?:{text})$")).map_err(|e| {
        let last = e.to_string();
        let why = last.lines().last().unwrap_or_default();
        Error::input(format!("lora: target_modules is {}, not a supported regular expression: {why}", quote(text)))
    })
}

/// The paths of a module that transformers' classes have, or have had.
fn paths(module: &str, tower: bool) -> Vec<String> {
    match tower {
        true => [Naming::Within, Naming::Around, Naming::TextModel].map(|naming| naming.file_name(module)).into(),
        false => vec![module.into()],
    }
}
