//! Rotary positions in a config: `rope_theta` with `rope_scaling` of transformers 4, or `rope_parameters` of 5. Never
//! reads other keys.
use super::defaults::Defaults;
use super::keys::ConfigKeys;
use crate::base::{Error, Result, quote};
use crate::nn::{Arch, QueryGrowth, Rotary, Scaling, Spec};
use serde_json::{Value, json};

/// The rotary embedding of most layers, that of windowed layers if the family has two, and the part of a head that is
/// rotated.
pub fn rotaries(keys: &ConfigKeys, arch: Arch, sizes: (usize, usize)) -> Result<(Rotary, Option<Rotary>, f64)> {
    let of = Defaults::of(arch);
    let two = matches!(arch, Arch::Gemma3 | Arch::Gemma4 | Arch::Olmo3 | Arch::Mellum | Arch::Lfm3);
    // Keys of the model say nothing of these, and a file without any has those of the class.
    let class = match arch {
        Arch::Gemma4 => Some(proportional(0.25)),
        Arch::Lfm3 => Some(proportional(0.5)),
        _ => None,
    };
    let theta = keys.positive("rope_theta")?.unwrap_or(of.theta);
    let local = match arch {
        Arch::Gemma3 => keys.positive("rope_local_base_freq")?.unwrap_or(10_000.0),
        Arch::Mellum => 10_000.0,
        _ => theta,
    };
    let part = match of.part {
        None => 1.0,
        Some(default) => {
            // MiniMax's published files have the elements instead.
            let elements = if arch == Arch::MiniMaxM2 { keys.size("rotary_dim", "head_dim")? } else { None };
            let default = elements.map_or(default, |n| n as f64 / sizes.1 as f64);
            keys.positive("partial_rotary_factor")?.unwrap_or(default)
        }
    };
    let (old, new) = (keys.object("rope_scaling")?, keys.object("rope_parameters")?);
    // transformers 5 takes one scaling from here first, and two from their own objects only.
    let kind = match old.as_ref().or(new.as_ref()) {
        Some(keys) => keys.text("rope_type")?.or(keys.text("type")?),
        None => None,
    };
    let original = match kind {
        _ if arch == Arch::Phi3 => keys.size("original_max_position_embeddings", "max_positions")?.or(Some(4096)),
        Some("llama3" | "yarn" | "longrope") if !two => {
            keys.size("original_max_position_embeddings", "max_positions")?
        }
        _ => None,
    };
    let plain = RotaryDefaults {
        theta,
        part: of.part.map(|_| part),
        original,
        max_len: sizes.0,
        head_dim: sizes.1,
        proportional: class.is_some(),
        whole: matches!(arch, Arch::Glm4MoeLite | Arch::Mellum),
        sized: arch == Arch::PhiMoe,
        based: matches!(arch, Arch::HunyuanDense | Arch::HunyuanMoe),
    };
    if arch == Arch::Olmo3 && new.is_none() && theta != of.theta {
        return Err(Error::input(format!(
            "rope_theta is {theta}, without rope_parameters: transformers 4 rotates all layers of olmo3 with it, and 5 \
             those with a window with {}. Say what is meant in rope_parameters, with full_attention and \
             sliding_attention",
            of.theta
        )));
    }
    if matches!(arch, Arch::Apertus | Arch::Cwm) && old.is_none() && new.is_none() && theta != of.theta {
        return Err(Error::input(format!(
            "rope_theta is {theta}, without rope_parameters: transformers 4 rotates with it and with the scaling of the \
             class, and 5 with {} in its place. Say what is meant in rope_parameters, with rope_type and rope_theta",
            of.theta
        )));
    }
    let typed = |old: &ConfigKeys| -> Result<bool> {
        Ok(old.text("rope_type")?.is_none() && old.text("type")?.is_some_and(|kind| kind != "default"))
    };
    if two && class.is_none() && old.as_ref().map_or(Ok(false), typed)? {
        return Err(Error::input(
            "rope_scaling has no rope_type: transformers 4 scales by its type, and 5 does not. Say what is meant with rope_type",
        ));
    }
    let found = match (old, new) {
        (Some(_), Some(_)) => Err(Error::input("rope_scaling and rope_parameters are both present; remove one")),
        (Some(_), None) if class.is_some() => Err(keys.unsupported("rope_scaling", &[])),
        (None, None) if class.is_some() => {
            let (rope, local) = class.unzip();
            Ok((rope.unwrap_or(Rotary::new(theta)), local, part))
        }
        (None, Some(new)) if two => {
            let of = |key, theta| match new.object(key)? {
                None if class.is_some() => Err(Error::input(format!("{} is missing", new.name(key)))),
                Some(keys) => rotary(&keys, RotaryDefaults { theta, ..plain }).map(|(rope, _)| rope),
                None => Ok(Rotary::new(theta)),
            };
            let both = (of("full_attention", theta)?, Some(of("sliding_attention", local)?), part);
            new.finish()?;
            Ok(both)
        }
        (old, new) => {
            let (rope, part) = match old.or(new) {
                Some(keys) => rotary(&keys, plain)?,
                None if arch == Arch::GptOss => (Rotary { theta, scaling: gpt_oss() }, part),
                None if arch == Arch::Apertus => (Rotary { theta, scaling: APERTUS }, part),
                None if arch == Arch::Cwm => (Rotary { theta, scaling: CWM }, part),
                None => (Rotary::new(theta), part),
            };
            Ok((rope, two.then(|| Rotary::new(local)), part))
        }
    }?;
    let scaled = [Some(&found.0), found.1.as_ref()].into_iter().flatten().any(|rope| rope.scaling != Scaling::None);
    match of.part {
        None if scaled || plain.whole => keys.only(UNSCALED[0], &[json!(1), json!(1.0)])?,
        None => UNSCALED.into_iter().for_each(|key| keys.unused(key)),
        Some(_) => {}
    }
    Ok(found)
}

/// A model whose sequences are supported up to a length only.
pub fn up_to(max_len: usize, spec: Spec) -> Spec {
    Spec { max_len, beyond: Some(spec.max_len).filter(|positions| *positions > max_len), ..spec }
}

/// The growth of queries, whose keys are next to the rotary ones.
pub fn query_growth(keys: &ConfigKeys) -> Result<QueryGrowth> {
    let rope = keys.need("rope_parameters", ConfigKeys::object)?;
    Ok(QueryGrowth {
        beta: rope.need("llama_4_scaling_beta", ConfigKeys::number)?,
        original: rope.need("original_max_position_embeddings", |keys, key| keys.size(key, "max_positions"))?,
        unrotated: false,
    })
}

/// Keys that have no effect without a scaling, in families that always rotate the whole head.
const UNSCALED: [&str; 2] = ["partial_rotary_factor", "original_max_position_embeddings"];

/// What a rotary embedding takes from keys outside its object.
#[derive(Clone, Copy)]
struct RotaryDefaults {
    theta: f64,
    /// The part of a head that is rotated; none if the family always rotates all of it.
    part: Option<f64>,
    /// The length before scaling, if a key of the model's says so.
    original: Option<usize>,
    max_len: usize,
    head_dim: usize,
    /// Whether the family may rotate some pairs of wider heads only.
    proportional: bool,
    /// Whether the class may rotate a part of a head without a scaling, where we rotate all of it.
    whole: bool,
    /// Whether the family says the size of cosines and sines of short documents, and of long ones.
    sized: bool,
    /// Whether a factor `alpha` may make the base larger, whatever the length.
    based: bool,
}

/// One rotary embedding: `rope_scaling` of transformers 4, or `rope_parameters` (or its part for one layer type) of 5;
/// and the part of a head that is rotated.
fn rotary(keys: &ConfigKeys, of: RotaryDefaults) -> Result<(Rotary, f64)> {
    let key = if keys.present("rope_type").is_some() { "rope_type" } else { "type" };
    let part = match of.part {
        // The table says which pairs rotate.
        None if of.proportional && keys.text(key)? == Some("proportional") => 1.0,
        None => {
            match keys.text(key)? {
                // Scalings read both, whatever the family.
                None | Some("default") if !of.whole => UNSCALED.into_iter().for_each(|key| keys.unused(key)),
                _ => keys.only(UNSCALED[0], &[json!(1), json!(1.0)])?,
            }
            1.0
        }
        Some(part) => keys.positive("partial_rotary_factor")?.unwrap_or(part),
    };
    if keys.text(key)? == Some("default") {
        // As in transformers, which warns of it.
        keys.unused("factor");
    }
    if of.sized {
        // Others need sizes too, in transformers, which none of the published models has.
        keys.only(key, &["default", "longrope", "su"].map(Value::from))?;
    }
    let theta = keys.positive("rope_theta")?.unwrap_or(of.theta);
    keys.get("type");
    // Keys of [`query_growth`]; transformers writes the second and reads the model's own.
    keys.known(["llama_4_scaling_beta", "max_position_embeddings"]);
    let original = || {
        let inner = keys.size("original_max_position_embeddings", "max_positions")?;
        Ok::<_, Error>(of.original.or(inner).unwrap_or(of.max_len))
    };
    let need = |key| keys.need(key, ConfigKeys::positive);
    if !of.based {
        keys.unused("alpha");
    }
    if let Some(alpha) = keys.positive("alpha")?.filter(|_| of.based) {
        keys.only(key, &[json!("dynamic")])?;
        for unused in ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"] {
            keys.get(unused);
        }
        keys.finish()?;
        let d = of.head_dim as f64;
        return Ok((Rotary::new(theta * alpha.powf(d / (d - 2.0))), part));
    }
    let scaling = match keys.text(key)? {
        None | Some("default") => Scaling::None,
        Some("proportional") if of.proportional => Scaling::Proportional {
            part: keys.fraction("partial_rotary_factor")?.unwrap_or(1.0),
            factor: keys.positive("factor")?.unwrap_or(1.0),
        },
        Some("linear") => Scaling::Linear { factor: need("factor")? },
        Some("dynamic") => Scaling::Dynamic { factor: need("factor")?, original: of.max_len },
        Some("llama3") => Scaling::Llama3 {
            factor: need("factor")?,
            low: need("low_freq_factor")?,
            high: need("high_freq_factor")?,
            original: original()?,
        },
        // Phi-3's earlier names.
        Some("longrope" | "su") => long(keys, original()?, &of, part)?,
        Some("yarn") if keys.present("short_factor").is_some() => long(keys, original()?, &of, part)?,
        Some("yarn") => yarn(keys, original()?, of.max_len)?,
        Some(_) => {
            let known = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"].map(Value::from);
            return Err(keys.unsupported(key, &known));
        }
    };
    keys.finish()?;
    Ok((Rotary { theta, scaling }, part))
}

/// The rotations of layers without a window, and of the others, in files of Gemma 4 and LFM 3 without
/// `rope_parameters`.
fn proportional(part: f64) -> (Rotary, Rotary) {
    let scaling = Scaling::Proportional { part, factor: 1.0 };
    (Rotary { theta: 1_000_000.0, scaling }, Rotary::new(10_000.0))
}

/// What the class of CWM scales with where its config does not say.
const CWM: Scaling = Scaling::Llama3 { factor: 16.0, low: 1.0, high: 4.0, original: 8192 };

/// What that of Apertus does.
const APERTUS: Scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };

/// What the class of gpt-oss scales with where its config does not say.
fn gpt_oss() -> Scaling {
    let factor: f64 = 32.0;
    Scaling::Yarn {
        factor,
        original: 4096,
        attention: Scaling::yarn_attention(factor),
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
    }
}

fn long(keys: &ConfigKeys, original: usize, of: &RotaryDefaults, part: f64) -> Result<Scaling> {
    let half = (of.head_dim as f64 * part) as usize / 2;
    let list = |key: &str| {
        let value = keys.present(key).ok_or_else(|| Error::input(format!("{} is missing", keys.name(key))))?;
        let factor = |value: &Value| value.as_f64().filter(|x| *x > 0.0 && x.is_finite());
        let factors = value.as_array().and_then(|list| list.iter().map(factor).collect::<Option<Vec<f64>>>());
        factors.filter(|factors| factors.len() == half).ok_or_else(|| {
            Error::input(format!(
                "{} is {}; it must list {half} numbers above 0, one for each rotated pair",
                keys.name(key),
                quote(value)
            ))
        })
    };
    let factor = keys.positive("factor")?.unwrap_or(of.max_len as f64 / original as f64);
    let implied = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
    let attention = match of.sized {
        // That of long documents is not used: there are none ([`super::phimoe`]).
        true => {
            keys.known(["attention_factor", "long_mscale"]);
            keys.need("short_mscale", ConfigKeys::positive)?
        }
        false => keys.positive("attention_factor")?.unwrap_or(implied),
    };
    Ok(Scaling::Long { short: list("short_factor")?, long: list("long_factor")?, original, attention })
}

fn yarn(keys: &ConfigKeys, original: usize, max_len: usize) -> Result<Scaling> {
    let factor = keys.positive("factor")?.unwrap_or(max_len as f64 / original as f64);
    let (mscale, all) = (keys.number("mscale")?.unwrap_or(0.0), keys.number("mscale_all_dim")?.unwrap_or(0.0));
    let size = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let implied = if mscale != 0.0 && all != 0.0 { size(mscale) / size(all) } else { Scaling::yarn_attention(factor) };
    Ok(Scaling::Yarn {
        factor,
        original,
        attention: keys.positive("attention_factor")?.unwrap_or(implied),
        beta_fast: keys.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.positive("beta_slow")?.unwrap_or(1.0),
        truncate: keys.flag("truncate")?.unwrap_or(true),
    })
}
