//! The model in a GGUF file: keys, tensor names, and the layouts in which llama.cpp differs from transformers. Llama's
//! query and key rows are interleaved, since llama.cpp rotates neighbors and not halves; Gemma's norms are stored with
//! their 1 added. Never reads or writes a file.
use super::header::{GgufKeys, KeyValue, TENSOR_ALIGN};
use super::quant::GgmlType;
use crate::base::{Error, Result};
use crate::nn::{Arch, Layout, Rotary, Scaling, Segment, Spec};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::f32::consts::TAU;

/// `--gguf-type`: the type of matrices. Other tensors are f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GgufType {
    F16,
    Bf16,
    Q8_0,
}

impl GgufType {
    /// llama.cpp's number of the file's type.
    fn id(self) -> usize {
        match self {
            GgufType::F16 => 1,
            GgufType::Q8_0 => 7,
            GgufType::Bf16 => 32,
        }
    }
    fn of(self, shape: &[usize]) -> GgmlType {
        match (self, shape) {
            (_, [] | [_]) => GgmlType::F32,
            (GgufType::Q8_0, [.., row]) if row % GgmlType::Q8_0.block() == 0 => GgmlType::Q8_0,
            (GgufType::Bf16, _) => GgmlType::Bf16,
            _ => GgmlType::F16, // for q8_0: rows that are not whole blocks
        }
    }
}

/// A tensor of the model in the file.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// Its name in layouts and checkpoints.
    pub source: String,
    pub name: String,
    pub shape: Vec<usize>,
    pub form: GgmlType,
    /// Its first byte, counted from the first tensor's.
    pub offset: u64,
    /// Number of heads whose rows are interleaved; 0 leaves rows where they are.
    heads: usize,
    /// Our weight is the difference from 1; the file's is not.
    plus_one: bool,
}

impl GgufTensor {
    /// Elements of a row; 1 for biases.
    fn row(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(1)
    }

    /// Calls `f` with the encoded bytes of `values`, which are elements `at..` of the whole tensor, and with their
    /// offset from the first tensor. Uses `values` as scratch space.
    pub fn place(
        &self,
        at: usize,
        values: &mut [f32],
        scratch: &mut Vec<u8>,
        f: &mut dyn FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<()> {
        if self.plus_one {
            values.iter_mut().for_each(|x| *x += 1.0);
        }
        let mut put = |at: usize, values: &[f32]| {
            scratch.clear();
            self.form.encode(values, scratch);
            f(scratch, self.offset + self.form.bytes(at) as u64)
        };
        if self.heads == 0 {
            return put(at, values);
        }
        let (row, head) = (self.row(), self.shape[0] / self.heads);
        let (mut at, mut rest) = (at, &*values);
        while !rest.is_empty() {
            let (index, column) = (at / row, at % row);
            let (part, behind) = rest.split_at(rest.len().min(row - column));
            let (first, i) = (index - index % head, index % head);
            // Row i of a head's first half and row i of its second half become neighbors.
            let moved = first + i % (head / 2) * 2 + i / (head / 2);
            put(moved * row + column, part)?;
            (at, rest) = (at + part.len(), behind);
        }
        Ok(())
    }
}

/// The tensors of a file, sorted by their names in Hugging Face files. The factors of llama3 rotary scaling come
/// first, if there are any.
pub struct GgufTensors {
    pub list: Vec<GgufTensor>,
    by_source: HashMap<String, usize>,
    pub factors: Vec<f32>,
    /// Size of all tensors, padding included.
    pub bytes: u64,
}

pub const FACTORS: &str = "rope_freqs.weight";

impl GgufTensors {
    pub fn new(spec: &Spec, layouts: &[Layout], kind: GgufType) -> Result<GgufTensors> {
        check(spec)?;
        let mut segments: Vec<&Segment> = layouts.iter().flat_map(|l| &l.segments).collect();
        segments.sort_by(|a, b| a.name.cmp(&b.name));
        let factors = spec.rope.as_ref().map_or_else(Vec::new, |rope| factors(rope, spec.head_dim));
        let mut offset = padded(4 * factors.len());
        let mut list = Vec::with_capacity(segments.len());
        for segment in segments {
            let (shape, source) = (segment.global_shape(), segment.name.clone());
            let form = kind.of(&shape);
            let heads = interleaved_heads(spec, &source);
            let bytes = form.bytes(shape.iter().product());
            let plus_one = spec.norm_from_one && source.ends_with("norm.weight");
            list.push(GgufTensor {
                name: GgufName::of(spec, &source)?.name,
                source,
                shape,
                form,
                offset,
                heads,
                plus_one,
            });
            offset += padded(bytes);
        }
        let by_source = list.iter().enumerate().map(|(i, t)| (t.source.clone(), i)).collect();
        Ok(GgufTensors { list, by_source, factors, bytes: offset })
    }
    pub fn find(&self, source: &str) -> Option<&GgufTensor> {
        self.by_source.get(source).map(|&i| &self.list[i])
    }
    fn params(&self) -> usize {
        self.factors.len() + self.list.iter().map(|t| t.shape.iter().product::<usize>()).sum::<usize>()
    }
}

fn padded(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(TENSOR_ALIGN)
}

/// llama.cpp's name of a tensor. Those of experts are one tensor there, with the experts outermost.
pub struct GgufName {
    pub name: String,
    pub expert: Option<usize>,
}

impl GgufName {
    /// That of the tensor `source`.
    pub fn of(spec: &Spec, source: &str) -> Result<GgufName> {
        let unknown = || Error::input(format!("llama.cpp has no name for the tensor {source}"));
        let (module, suffix) = source.rsplit_once('.').ok_or_else(unknown)?;
        let (block, module) = match module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
            Some((i, module)) => (format!("blk.{i}."), module),
            None => (String::new(), module),
        };
        let of_expert = ["mlp.experts.", "block_sparse_moe.experts."].iter().find_map(|p| module.strip_prefix(p));
        if let Some((expert, kind)) = of_expert.and_then(|rest| rest.split_once('.')) {
            let kind = match kind {
                "gate_proj" | "w1" => "gate",
                "up_proj" | "w3" => "up",
                "down_proj" | "w2" => "down",
                _ => return Err(unknown()),
            };
            let expert = Some(expert.parse().map_err(|_| unknown())?);
            return Ok(GgufName { name: format!("{block}ffn_{kind}_exps.{suffix}"), expert });
        }
        let known = match module {
            "model.embed_tokens" => "token_embd",
            "model.norm" => "output_norm",
            "lm_head" => "output",
            "input_layernorm" => "attn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "post_attention_layernorm" if spec.post_norms => "post_attention_norm",
            "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            "mlp.gate" | "block_sparse_moe.gate" => "ffn_gate_inp",
            "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
            "mlp.shared_expert.up_proj" => "ffn_up_shexp",
            "mlp.shared_expert.down_proj" => "ffn_down_shexp",
            "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
            _ => return Err(unknown()),
        };
        Ok(GgufName { name: format!("{block}{known}.{suffix}"), expert: None })
    }
}

/// Heads of the tensor `source` whose rows llama.cpp has interleaved; 0 if it has them as they are.
pub fn interleaved_heads(spec: &Spec, source: &str) -> usize {
    match () {
        _ if !matches!(spec.arch, Arch::Llama | Arch::Mistral | Arch::Mixtral) => 0,
        _ if source.contains(".q_proj.") => spec.heads,
        _ if source.contains(".k_proj.") => spec.kv_heads,
        _ => 0,
    }
}

/// Puts the keys that describe the model. `config` is its `config.json`, `generation` its `generation_config.json`.
pub fn put(
    keys: &mut GgufKeys,
    name: &str,
    spec: &Spec,
    config: &Map<String, Value>,
    generation: &Value,
    tensors: &GgufTensors,
    kind: GgufType,
) {
    let arch = match spec.arch {
        Arch::Mistral => Arch::Llama.name(),
        arch => arch.name(),
    };
    keys.put("general.architecture", KeyValue::Text(arch));
    keys.put("general.type", KeyValue::Text("model"));
    if let Some(k) = generation["top_k"].as_i64() {
        keys.put("general.sampling.top_k", KeyValue::I32(k));
    }
    for (key, from) in [("top_p", "top_p"), ("min_p", "min_p"), ("temp", "temperature")]
        .into_iter()
        .chain([("penalty_repeat", "repetition_penalty")])
    {
        if let Some(x) = generation[from].as_f64() {
            keys.put(&format!("general.sampling.{key}"), KeyValue::F32(x));
        }
    }
    keys.put("general.name", KeyValue::Text(name));
    keys.put("general.size_label", KeyValue::Text(&size_label(tensors.params())));

    let mut put = |key: &str, value: KeyValue| keys.put(&format!("{arch}.{key}"), value);
    let length = config.get("max_position_embeddings").and_then(Value::as_u64).unwrap_or(spec.max_len as u64) as usize;
    let heads = |put: &mut dyn FnMut(&str, KeyValue)| {
        put("feed_forward_length", KeyValue::U32(spec.ff));
        put("attention.head_count", KeyValue::U32(spec.heads));
        put("attention.head_count_kv", KeyValue::U32(spec.kv_heads));
    };
    // The converter writes these keys in another order for Gemma 2.
    if spec.arch == Arch::Gemma2 {
        put("context_length", KeyValue::U32(length));
        put("embedding_length", KeyValue::U32(spec.dim));
        put("block_count", KeyValue::U32(spec.layers));
        heads(&mut put);
    } else {
        put("block_count", KeyValue::U32(spec.layers));
        put("context_length", KeyValue::U32(length));
        put("embedding_length", KeyValue::U32(spec.dim));
        heads(&mut put);
        rope(&mut put, spec, config);
    }
    put("attention.layer_norm_rms_epsilon", KeyValue::F32(crate::ckpt::hf::decimal(spec.norm_eps)));
    if spec.arch != Arch::Qwen2 || config.get("head_dim").is_some_and(Value::is_u64) {
        put("attention.key_length", KeyValue::U32(spec.head_dim));
        put("attention.value_length", KeyValue::U32(spec.head_dim));
    }
    keys.put("general.file_type", KeyValue::U32(kind.id()));
    let mut put = |key: &str, value: KeyValue| keys.put(&format!("{arch}.{key}"), value);
    match spec.arch {
        Arch::Llama | Arch::Mistral => {
            put("vocab_size", KeyValue::U32(spec.vocab));
            put("rope.dimension_count", KeyValue::U32(spec.head_dim));
        }
        Arch::Gemma2 | Arch::Gemma3 => {
            for (key, cap) in [("attn_logit_softcapping", spec.score_cap), ("final_logit_softcapping", spec.logit_cap)]
            {
                if cap > 0.0 {
                    put(key, KeyValue::F32(cap as f64));
                }
            }
            put("attention.sliding_window", KeyValue::U32(spec.window));
        }
        _ => {}
    }
    keys.put("general.quantization_version", KeyValue::U32(2));
}

fn rope(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>) {
    let Some(rope) = &spec.rope else { return };
    let scaled = |put: &mut dyn FnMut(&str, KeyValue), kind, factor| {
        put("rope.scaling.type", KeyValue::Text(kind));
        put("rope.scaling.factor", KeyValue::F32(factor));
    };
    match rope.scaling {
        Scaling::Linear { factor } => scaled(put, "linear", factor),
        Scaling::Yarn { factor, original, attention, .. } => {
            scaled(put, "yarn", factor);
            put("rope.scaling.original_context_length", KeyValue::U32(original));
            // llama.cpp and transformers have the same defaults for keys that the config leaves out.
            let given =
                ["rope_parameters", "rope_scaling"].iter().find_map(|key| config.get(*key).filter(|v| v.is_object()));
            let given = |key: &str| given.and_then(|map| map.get(key)?.as_f64());
            for (key, name) in [
                ("extrapolation_factor", "yarn_ext_factor"),
                ("attention_factor", "yarn_attn_factor"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            ] {
                // The config may have it in other words: mscale.
                let implied = key == "attention_factor" && attention != Scaling::yarn_attention(factor);
                if let Some(x) = given(key).or(implied.then_some(attention)) {
                    put(&format!("rope.scaling.{name}"), KeyValue::F32(x));
                }
            }
        }
        Scaling::None
        | Scaling::Llama3 { .. }
        | Scaling::Dynamic { .. }
        | Scaling::Proportional { .. }
        | Scaling::Long { .. } => {}
    }
    put("rope.freq_base", KeyValue::F32(rope.theta));
    if let Some(local) = &spec.local_rope {
        put("rope.freq_base_swa", KeyValue::F32(local.theta));
    }
}

/// The divisor of each frequency in llama3 rotary scaling, with the converter's steps and precision.
pub fn factors(rope: &Rotary, head_dim: usize) -> Vec<f32> {
    let Scaling::Llama3 { factor, low, high, original } = &rope.scaling else { return Vec::new() };
    let (factor, low, high, original) = (*factor as f32, *low as f32, *high as f32, *original as f32);
    let one = |i: usize| {
        let exponent = (2 * i) as f32 / head_dim as f32;
        let wave = TAU / (1.0 / (rope.theta as f32).powf(exponent));
        if wave < original / high {
            1.0
        } else if wave > original / low {
            factor
        } else {
            let smooth = (original / wave - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(one).collect()
}

/// Parameters with two digits or more: 1.2B, 350M.
fn size_label(params: usize) -> String {
    let (scale, unit) = [(1e12, "T"), (1e9, "B"), (1e6, "M")]
        .into_iter()
        .find(|(scale, _)| params as f64 > *scale)
        .unwrap_or((1e3, "K"));
    let scaled = params as f64 / scale;
    let digits = scaled.round_ties_even().to_string().trim_start_matches('0').len();
    format!("{scaled:.*}{unit}", 2usize.saturating_sub(digits))
}

/// The families whose converter is followed, and GPT-2, which is refused for its positions.
const EXPORTED: [Arch; 7] =
    [Arch::Llama, Arch::Mistral, Arch::Qwen2, Arch::Qwen3, Arch::Gemma2, Arch::Gemma3, Arch::Gpt];

/// An error if llama.cpp does not compute what this model computes, or its converter's bytes are not known.
fn check(spec: &Spec) -> Result<()> {
    if spec.experts.is_none() && !EXPORTED.contains(&spec.arch) {
        return Err(Error::input(format!(
            "`save_gguf`: {} models cannot be exported yet: only Llama, Qwen 2 and 3, Gemma 2 and 3 can. Use `save_hf` DIR, \
             which llama.cpp's converter reads",
            spec.arch.name()
        )));
    }
    let gemma = matches!(spec.arch, Arch::Gemma2 | Arch::Gemma3);
    // In Gemma 2 every other layer sees its window only, in Gemma 3 five of six.
    let every = if spec.arch == Arch::Gemma2 { 2 } else { 6 };
    let windows = |i: usize| gemma && !(i + 1).is_multiple_of(every);
    let largest = if spec.arch == Arch::Gemma2 { 46 } else { 62 };
    let scalar = if gemma && spec.layers == largest { spec.dim / spec.heads } else { spec.head_dim };
    let theta = spec.rope.as_ref().map(|rope| rope.theta);
    let biased = spec.out_bias || spec.mlp_bias || spec.qkv_bias && spec.arch != Arch::Qwen2;
    let what = match spec.rope.as_ref().map(|rope| &rope.scaling) {
        _ if spec.experts.is_some() => Some("mixtures of experts".into()),
        None => Some("these models with learned positions".into()),
        // The file of a Gemma 2 has no key for it, and that of a Gemma 3 a base alone for its windows.
        Some(scaling) if spec.arch == Arch::Gemma2 && (*scaling != Scaling::None || theta != Some(10_000.0)) => {
            Some("another rotation than the usual in a gemma2 model".into())
        }
        _ if spec.local_rope.as_ref().is_some_and(|local| local.scaling != Scaling::None) => {
            Some(format!("scaled rotations of windows in a {} model", spec.arch.name()))
        }
        Some(Scaling::Dynamic { .. }) => Some("dynamic rotary scaling".into()),
        Some(Scaling::Long { .. }) => Some(format!("longrope in a {} model", spec.arch.name())),
        Some(Scaling::Llama3 { .. }) if gemma => Some(format!("Llama 3's scaling in a {} model", spec.arch.name())),
        Some(Scaling::Yarn { truncate: false, .. }) => Some("YaRN with truncate: false".into()),
        _ if (0..spec.layers).any(|i| (spec.window_of(i) > 0) != windows(i)) => {
            Some(format!("sliding windows in these layers of a {} model", spec.arch.name()))
        }
        _ if spec.query_scalar.is_some_and(|given| given != scalar as f64) => Some(format!(
            "another query_pre_attn_scalar than {scalar} in a {} model of {} layers",
            spec.arch.name(),
            spec.layers
        )),
        _ if (spec.score_cap > 0.0) != (spec.arch == Arch::Gemma2) => Some("these softcaps of attention scores".into()),
        _ if spec.arch == Arch::Gemma2 && spec.logit_cap == 0.0 => Some("Gemma 2 without a softcap of logits".into()),
        _ if spec.arch == Arch::Gemma2 && !spec.tied => Some("Gemma 2 with a head of its own".into()),
        _ if biased && !matches!(spec.arch, Arch::Llama | Arch::Mistral) => {
            Some(format!("these biases in a {} model", spec.arch.name()))
        }
        _ => None,
    };
    what.map_or(Ok(()), |what| {
        Err(Error::input(format!(
            "`save_gguf`: llama.cpp does not run {what}: only Llama, Qwen 2 and 3, Gemma 2 and 3 can be exported. \
             `save_hf` DIR exports this model"
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The converter writes `attention_factor` as it is; a config may say the same by mscale.
    #[test]
    fn the_attention_of_yarn_is_written_unless_it_is_implied() {
        let written = |attention: f64, scaling: Value| {
            let scaled =
                Scaling::Yarn { factor: 4.0, original: 32, attention, beta_fast: 32.0, beta_slow: 1.0, truncate: true };
            let spec = Spec { rope: Some(Rotary { theta: 1e4, scaling: scaled }), ..Spec::default() };
            let (mut found, config) = (None, Map::from_iter([("rope_scaling".to_string(), scaling)]));
            let put = &mut |key: &str, value: KeyValue| {
                if let (true, KeyValue::F32(x)) = (key.ends_with("yarn_attn_factor"), value) {
                    found = Some(x);
                }
            };
            rope(put, &spec, &config);
            found
        };
        let implied = Scaling::yarn_attention(4.0);
        assert_eq!(written(implied, json!({"rope_type": "yarn", "factor": 4.0})), None);
        assert_eq!(written(implied, json!({"attention_factor": implied})), Some(implied));
        assert_eq!(written(0.7, json!({"mscale": 0.7, "mscale_all_dim": 1.3})), Some(0.7));
    }

    #[test]
    fn families_that_cannot_be_exported_are_named() {
        for family in Arch::all().filter(|family| !super::EXPORTED.contains(&family.arch)) {
            let refused = check(&Spec { arch: family.arch, layers: 2, ..Spec::default() });
            match family.name {
                "mixtral" | "qwen2_moe" | "qwen3_moe" | "olmoe" => {}
                name => assert!(refused.unwrap_err().to_string().contains(&format!("{name} models cannot")), "{name}"),
            }
        }
    }

    /// The file of a Gemma has no keys for them.
    #[test]
    fn unusual_rotations_of_gemma_are_refused() {
        let rope = |theta, scaling| Some(Rotary { theta, scaling });
        let linear = || Scaling::Linear { factor: 2.0 };
        let gemma2 =
            Spec { arch: Arch::Gemma2, layers: 2, score_cap: 50.0, logit_cap: 30.0, tied: true, ..Spec::default() };
        for (spec, what) in [
            (
                Spec { rope: rope(500.0, Scaling::None), ..gemma2.clone() },
                "another rotation than the usual in a gemma2",
            ),
            (Spec { rope: rope(1e4, linear()), ..gemma2 }, "another rotation than the usual in a gemma2"),
            (
                Spec {
                    arch: Arch::Gemma3,
                    layers: 2,
                    rope: rope(1e6, Scaling::None),
                    local_rope: rope(1e4, linear()),
                    ..Spec::default()
                },
                "scaled rotations of windows in a gemma3",
            ),
        ] {
            let refused = check(&spec).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
    }

    #[test]
    fn size_labels_have_two_digits() {
        let labels = [
            (999, "1.0K"),
            (9_960, "10K"),
            (21_500, "22K"),
            (1_235_814_400, "1.2B"),
            (494_032_768, "494M"),
            (95, "0.10K"),
        ];
        labels.iter().for_each(|(params, label)| assert_eq!(size_label(*params), *label));
    }
}
