//! Which tensors are trainable, decayed, and at what learning rate: name patterns applied to a model's layouts. Never
//! changes shapes or values.
use super::layout::{Layout, Segment, Storage};
use super::lora::{HEAD, Lora, SCORE, goes_with_adapters, has_adapters, is_adapter, linear_module};
use crate::base::nf4::BLOCK;
use crate::base::{Error, Result};
use regex::Regex;
use std::collections::HashSet;

/// Every pattern is a regular expression that is searched for in the tensor's Hugging Face name
/// (`model.layers.3.mlp.up_proj.weight`); `^` and `$` anchor it. A pattern that matches no tensor is an error.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Tuning {
    /// Frozen tensors: no gradient, no optimizer state, no reduction.
    pub freeze: Vec<String>,
    /// The tensors that alone are trained, as far as they are not frozen; empty: all.
    pub unfreeze: Vec<String>,
    /// Tensors without weight decay, in addition to norms and biases.
    pub no_decay: Vec<String>,
    /// Learning-rate factors; the last matching pattern applies.
    pub lr_scale: Vec<(String, f32)>,
    /// Train only adapters.
    pub lora: Option<Lora>,
    /// Store the matrices that adapters freeze in 4 bits ([`crate::base::nf4`]).
    pub load_in_4bit: bool,
    /// Compute with the matrices of the blocks in FP8 ([`crate::base::fp8`]), except those of the first and the last
    /// block and those that match one of these patterns.
    pub fp8: Option<Vec<String>>,
    /// Decay every tensor, so that the optimizer can treat a unit as one tensor.
    pub uniform: bool,
}

impl Tuning {
    /// Adds the adapters; sets [`Segment::storage`], [`Segment::decay`], [`Segment::lr_scale`] and
    /// [`Segment::fp8`].
    pub fn apply(&self, layouts: &mut [Layout]) -> Result<()> {
        if let Some(lora) = &self.lora {
            lora.apply(layouts)?;
        }
        for pattern in &self.freeze {
            each("freeze", pattern, layouts, |segment| segment.storage = Storage::Frozen)?;
        }
        self.freeze_others(layouts)?;
        for pattern in &self.no_decay {
            each("no_decay", pattern, layouts, |segment| segment.decay = false)?;
        }
        for (pattern, scale) in &self.lr_scale {
            if !(scale.is_finite() && *scale >= 0.0) {
                return Err(Error::input(format!("lr_scale of {pattern:?} is {scale}: it must be 0 or more")));
            }
            each("lr_scale", pattern, layouts, |segment| segment.lr_scale = *scale)?;
        }
        if self.uniform {
            layouts.iter_mut().flat_map(|l| &mut l.segments).for_each(|segment| segment.decay = true);
        }
        if !layouts.iter().flat_map(|l| &l.segments).any(Segment::is_trained) {
            return Err(Error::input("freeze and unfreeze leave no trainable tensor: remove a pattern"));
        }
        set_saved(layouts);
        match &self.fp8 {
            Some(_) if self.load_in_4bit => Err(Error::input(
                "precision fp8: weights in 4 bits are expanded to the compute dtype; use bf16, or leave out load_in_4bit",
            )),
            Some(exclude) => mark_fp8(layouts, exclude),
            None if self.load_in_4bit => pack(layouts),
            None => Ok(()),
        }
    }

    /// Freezes what `unfreeze` does not name.
    fn freeze_others(&self, layouts: &mut [Layout]) -> Result<()> {
        let mut named = HashSet::new();
        for pattern in &self.unfreeze {
            each("unfreeze", pattern, layouts, |segment| named.extend([segment.name.clone()]))?;
        }
        let others = layouts.iter_mut().flat_map(|l| &mut l.segments).filter(|s| !named.contains(&s.name));
        others.filter(|_| !self.unfreeze.is_empty()).for_each(|segment| segment.storage = Storage::Frozen);
        Ok(())
    }
}

/// Sets [`Segment::fp8`]. Experts, routers and adapters stay in the compute dtype.
fn mark_fp8(layouts: &mut [Layout], exclude: &[String]) -> Result<()> {
    let mut blocks: Vec<&mut Layout> = layouts.iter_mut().skip(1).filter(|l| !l.experts).collect();
    let n = blocks.len();
    let inner = blocks.iter_mut().take(n.saturating_sub(1)).skip(1);
    let mut matrices: Vec<&mut Segment> = inner.flat_map(|l| &mut l.segments).collect();
    matrices.retain(|segment| linear_module(segment).is_some() && !is_adapter(segment));
    let names = match matrices.first() {
        Some(first) => format!("names are like {}", first.name),
        None => format!("{n} blocks have none, because the first and the last stay in bf16"),
    };
    matrices.iter_mut().for_each(|segment| segment.fp8 = true);
    for pattern in exclude {
        let regex = regex("fp8_exclude", pattern)?;
        let mut matches = matrices.iter_mut().filter(|s| regex.is_match(&s.name)).peekable();
        if matches.peek().is_none() {
            return Err(Error::input(format!("fp8_exclude: {pattern:?} matches no matrix in FP8; {names}")));
        }
        matches.for_each(|segment| segment.fp8 = false);
    }
    match matrices.iter().any(|segment| segment.fp8) {
        true => Ok(()),
        false => Err(Error::input(format!("precision fp8: no matrix is computed with in FP8; {names}"))),
    }
}

/// Packs the frozen matrices of the blocks. Embeddings, head and norms stay in the compute dtype.
fn pack(layouts: &mut [Layout]) -> Result<()> {
    let refuse = |what: String| Err(Error::input(format!("load_in_4bit: {what}")));
    if !has_adapters(layouts) {
        return refuse("only weights that adapters freeze can be in 4 bits; set a LoRA rank".into());
    }
    if layouts.iter().any(|layout| layout.experts) {
        return refuse("models with experts are not supported".into());
    }
    for layout in &mut layouts[1..] {
        for segment in layout.segments.iter_mut().filter(|s| s.shape.len() == 2 && !s.is_trained() && !is_adapter(s)) {
            segment.storage = Storage::Nf4;
            if !segment.is_packable() {
                let (name, shape) = (&segment.name, segment.global_shape());
                let parts = if segment.shape == shape { "" } else { ", divided over tp," };
                return refuse(format!("{name} of shape {shape:?}{parts} does not consist of whole blocks of {BLOCK}"));
            }
        }
        layout.place_again();
    }
    Ok(())
}

/// Checkpoints store the whole model, or only its adapters, frozen ones included: the base model is reloaded from its
/// own directory. A model that is frozen as a whole is only computed with.
pub(super) fn set_saved(layouts: &mut [Layout]) {
    let learns = layouts.iter().flat_map(|l| &l.segments).any(Segment::is_trained);
    let adapters = has_adapters(layouts);
    let segments = layouts.iter_mut().flat_map(|l| &mut l.segments);
    for segment in segments.filter(|segment| !segment.is_trained() && !segment.is_packed()) {
        let saved = if adapters { goes_with_adapters(segment) } else { learns };
        segment.storage = if saved { Storage::Saved } else { Storage::Frozen };
    }
}

fn regex(key: &str, pattern: &str) -> Result<Regex> {
    let bad = |e| Error::input(format!("{key}: {pattern:?} is not a regular expression: {}", last_line(&e)));
    Regex::new(pattern).map_err(bad)
}

fn each(key: &str, pattern: &str, layouts: &mut [Layout], mut change: impl FnMut(&mut Segment)) -> Result<()> {
    let regex = regex(key, pattern)?;
    let mut matched = false;
    for segment in layouts.iter_mut().flat_map(|l| &mut l.segments).filter(|s| regex.is_match(&s.name)) {
        change(segment);
        matched = true;
    }
    // The head of a tied model is its embedding, the first tensor of the root.
    let root = layouts.first_mut().map(|root| &mut root.segments[..]).filter(|_| !matched && regex.is_match(HEAD));
    if let Some([embedding, others @ ..]) = root
        && !others.iter().any(|s| [HEAD, SCORE].contains(&&*s.name))
    {
        change(embedding);
        matched = true;
    }
    match matched {
        true => Ok(()),
        false => {
            Err(Error::input(format!("{key}: {pattern:?} matches no tensor; names are like {}", examples(layouts))))
        }
    }
}

/// The reason, without regex's drawing of its position.
fn last_line(e: &regex::Error) -> String {
    e.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_string()
}

/// The names of the root and of the first block.
fn examples(layouts: &[Layout]) -> String {
    let names: Vec<&str> = layouts.iter().take(2).flat_map(|l| &l.segments).map(|s| s.name.as_str()).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Init;

    fn layouts() -> Vec<Layout> {
        let mut root = Layout::default();
        root.push("model.embed_tokens.weight", &[4, 3], true, Init::Constant(0.0));
        root.push("model.norm.weight", &[3], false, Init::Constant(0.0));
        let block = |i| {
            let mut block = Layout::default();
            block.push(format!("model.layers.{i}.mlp.up_proj.weight"), &[3, 3], true, Init::Constant(0.0));
            block
        };
        vec![root, block(0), block(1), block(10)]
    }
    fn applied(tuning: Tuning) -> Vec<Segment> {
        let mut layouts = layouts();
        tuning.apply(&mut layouts).unwrap();
        layouts.into_iter().flat_map(|l| l.segments).collect()
    }
    fn refused(tuning: Tuning) -> String {
        tuning.apply(&mut layouts()).unwrap_err().to_string()
    }
    fn texts(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|p| p.to_string()).collect()
    }

    #[test]
    fn patterns_choose_tensors_by_name() {
        let freeze = texts(&["embed", r"layers\.[01]\."]);
        let trainable: Vec<bool> =
            applied(Tuning { freeze, ..Tuning::default() }).iter().map(Segment::is_trained).collect();
        assert_eq!(trainable, [false, true, false, false, true]);
        let (unfreeze, freeze) = (texts(&["norm", r"layers\.[01]"]), texts(&[r"layers\.1\."]));
        let trainable: Vec<bool> =
            applied(Tuning { freeze, unfreeze, ..Tuning::default() }).iter().map(Segment::is_trained).collect();
        assert_eq!(trainable, [false, true, true, false, true]);
        let lr_scale = vec![("layers".to_string(), 0.5), (r"layers\.10".to_string(), 2.0)];
        // Spectrum's lists begin with the head, which these tie.
        let unfreeze = texts(&["^lm_head.weight$", r"layers\.1\."]);
        let trainable: Vec<bool> =
            applied(Tuning { unfreeze, ..Tuning::default() }).iter().map(Segment::is_trained).collect();
        assert_eq!(trainable, [true, false, false, true, false]);
        let tuned = applied(Tuning { no_decay: texts(&["embed"]), lr_scale, ..Tuning::default() });
        assert_eq!(tuned.iter().map(|s| s.decay).collect::<Vec<_>>(), [false, false, true, true, true]);
        assert_eq!(tuned.iter().map(|s| s.lr_scale).collect::<Vec<_>>(), [1.0, 1.0, 0.5, 0.5, 2.0]);
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let freeze = |patterns: &[&str]| refused(Tuning { freeze: texts(patterns), ..Tuning::default() });
        let unknown = freeze(&["layer.0"]);
        assert!(unknown.contains(r#""layer.0""#) && unknown.contains("model.embed_tokens.weight"), "{unknown}");
        assert!(freeze(&["layers.("]).contains("unclosed group"));
        assert!(freeze(&["."]).contains("no trainable tensor"));
        let unfreeze = Tuning { unfreeze: texts(&["embed", "layer.0"]), ..Tuning::default() };
        assert!(refused(unfreeze).contains(r#"unfreeze: "layer.0" matches no tensor"#));
        let scale = Tuning { lr_scale: vec![("embed".into(), f32::NAN)], ..Tuning::default() };
        assert!(refused(scale).contains("NaN"));
    }
}
