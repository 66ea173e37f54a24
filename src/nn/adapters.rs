//! Attaches adapters to the layers of a model. Never changes layouts.
use super::arch::Arch;
use super::block::DecoderBlock;
use super::layout::Layout;
use super::lora::{Lora, is_adapter};
use super::per_layer::PerLayerRoot;
use super::product_buffers::ProductWidths;
use super::root::Root;
use super::spec::Spec;
use crate::base::{Error, Result};

/// Attaches the adapters that `layouts` have, and adds what their products need to `widths`. Returns the hashed names
/// of those with dropout, in the order of their keys.
pub fn attach(
    lora: &Lora,
    spec: &Spec,
    layouts: &[Layout],
    (root, blocks): (&mut Root, &mut [DecoderBlock]),
    widths: &mut ProductWidths,
) -> Result<Vec<u64>> {
    if spec.arch == Arch::Gpt {
        return Err(Error::input(
            "lora: arch gpt is not supported, because its matrices are stored transposed; use another arch",
        ));
    }
    let mut masks = Vec::new();
    widths.rank = lora.rank;
    if let Some(PerLayerRoot { projection, .. }) = &mut root.per_layer {
        lora.adapt(projection, &layouts[0], &mut masks);
        widths.dropped = if lora.dropout > 0.0 { projection.inputs } else { 0 };
    }
    for (i, block) in blocks.iter_mut().enumerate() {
        let widest = block.adapt(lora, layouts, 1 + i, &mut masks, &mut widths.kept);
        widths.dropped = widths.dropped.max(widest);
    }
    let has_experts = layouts.iter().any(|l| l.experts && l.segments.iter().any(is_adapter));
    widths.experts = if has_experts { lora.rank } else { 0 };
    Ok(masks)
}
