//! Which layers have a window of attention, and which have a recurrence in its place. Never reads a file.
use super::cohere;
use super::defaults::{Defaults, WindowKeys};
use super::keys::ConfigKeys;
use super::lfm2;
use super::lists::{listed, rotated_layers};
use crate::base::{Error, Result};
use crate::nn::Arch;
use serde_json::json;

/// Whether each layer has a gated delta net: as the file lists them, or all but every nth.
pub(super) fn recurrent_layers(keys: &ConfigKeys, layers: usize) -> Result<Vec<bool>> {
    let every = keys.whole("full_attention_interval")?.unwrap_or(4).max(1);
    Ok(match listed(keys, layers, ["full_attention", "linear_attention"])? {
        Some(types) => types,
        None => (0..layers).map(|i| (i + 1) % every != 0).collect(),
    })
}

/// Whether a family's recurrent layers are Mamba.
pub(super) fn has_mamba(arch: Arch) -> bool {
    matches!(arch, Arch::GraniteHybrid | Arch::NemotronH | Arch::Bamba | Arch::FalconH1)
}

/// The window size, and which layers use it; (0, none) without a window.
pub(super) fn windows(keys: &ConfigKeys, arch: Arch, layers: usize) -> Result<(usize, Vec<bool>)> {
    let within = |keys: &ConfigKeys, key: &str| keys.size(key, "max_len");
    let switched = keys.flag("use_sliding_window")? == Some(true);
    let window = match Defaults::of(arch).window {
        WindowKeys::Never => {
            keys.unused("sliding_window");
            None
        }
        WindowKeys::Unclear => {
            // Which layers have windows differs between versions of transformers.
            keys.only("use_sliding_window", &[json!(false)])?;
            for unused in ["sliding_window", "max_window_layers"] {
                keys.get(unused);
            }
            None
        }
        WindowKeys::Given(default) => match default {
            Some(default) => keys.or("sliding_window", default, within)?,
            None => within(keys, "sliding_window")?,
        },
        WindowKeys::Switched(default) => match default {
            Some(default) => keys.or("sliding_window", default, within)?,
            None => within(keys, "sliding_window")?,
        }
        .filter(|_| switched),
    };
    // Unless the file lists them: all but every nth layer, or those from the nth on.
    let every = match arch {
        Arch::Gemma2 | Arch::VaultGemma | Arch::GptOss => 2,
        Arch::Gemma3 => keys.whole("sliding_window_pattern")?.unwrap_or(6).max(1),
        Arch::Gemma4 => 6,
        Arch::Olmo3 => 4,
        Arch::Cohere2 => keys.whole("sliding_window_pattern")?.unwrap_or(4).max(1),
        Arch::Afmoe => keys.whole("global_attn_every_n_layers")?.unwrap_or(4).max(1),
        // A file with a pattern such as "LLLG" lists the layers too.
        Arch::Exaone4 | Arch::ExaoneMoe if keys.present("layer_types").is_none() && window.is_some() => {
            keys.whole("sliding_window_pattern")?.unwrap_or(4).max(1)
        }
        Arch::Exaone4 | Arch::ExaoneMoe => {
            keys.get("sliding_window_pattern");
            0
        }
        _ => 0,
    };
    let first = match arch {
        Arch::Qwen2 | Arch::Qwen3 => keys.whole("max_window_layers")?.unwrap_or(28),
        Arch::Dots1 => keys.whole("max_window_layers")?.unwrap_or(62),
        _ => 0,
    };
    // Their layers have other types.
    if has_mamba(arch)
        || matches!(arch, Arch::Qwen3Next | Arch::Qwen35 | Arch::Qwen35Moe | Arch::OlmoHybrid)
        || matches!(arch, Arch::Lfm2 | Arch::Lfm2Moe | Arch::Llama4)
    {
        return Ok((0, Vec::new()));
    }
    let listed = match arch {
        Arch::Lfm3 => Some(lfm2::windowed(keys, layers)?),
        Arch::Cohere2Moe => Some(cohere::windowed(keys, layers)?),
        _ => layer_types(keys, layers)?,
    };
    let mut windowed = match listed {
        Some(types) if window.is_none() && types.contains(&true) => {
            return Err(Error::input("layer_types says sliding_attention, but there is no sliding_window"));
        }
        Some(types)
            if matches!(arch, Arch::Mistral | Arch::Ministral3) && window.is_some() && types.contains(&false) =>
        {
            return Err(keys.unsupported("layer_types", &[]));
        }
        Some(types) => types,
        None if every > 0 => (0..layers).map(|i| (i + 1) % every != 0).collect(),
        None if arch == Arch::Mellum => vec![false; layers],
        None if matches!(arch, Arch::Cwm | Arch::GraniteSwa | Arch::GraniteMoeSwa) => {
            (0..layers).map(|i| i % 4 != 0).collect()
        }
        // The layers without rotary positions.
        None if arch == Arch::SmolLm3 => rotated_layers(keys, layers)?.iter().map(|rotated| !rotated).collect(),
        None => (0..layers).map(|i| i >= first).collect(),
    };
    if let (Arch::Gemma4, Some(last)) = (arch, windowed.last_mut()) {
        *last = false; // transformers corrects files that say otherwise
    }
    Ok(match window {
        Some(window) if windowed.contains(&true) => (window, windowed),
        _ => (0, Vec::new()),
    })
}

/// Whether each layer uses the window, if the file lists layers one by one.
pub(super) fn layer_types(keys: &ConfigKeys, layers: usize) -> Result<Option<Vec<bool>>> {
    listed(keys, layers, ["full_attention", "sliding_attention"])
}
