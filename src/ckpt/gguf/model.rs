//! The model in a GGUF file: tensor names, and the layouts in which llama.cpp differs from transformers. Llama's query
//! and key rows are interleaved, since llama.cpp rotates neighbors and not halves; Gemma's norms are stored with their
//! 1 added; the experts of a block are one tensor. Never reads or writes a file.
use super::header::TENSOR_ALIGN;
use super::quant::GgmlType;
use crate::base::{Error, Result};
use crate::nn::{Arch, Layout, Rotary, Scaling, Segment, Spec};
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
    pub(super) fn id(self) -> usize {
        match self {
            GgufType::F16 => 1,
            GgufType::Q8_0 => 7,
            GgufType::Bf16 => 32,
        }
    }
    pub(super) fn of(self, shape: &[usize]) -> GgmlType {
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
    /// With the experts outermost, of a matrix of experts.
    pub shape: Vec<usize>,
    pub form: GgmlType,
    /// Which expert's matrix of the tensor it is.
    pub expert: Option<usize>,
    /// Its first byte, counted from the first tensor's.
    pub offset: u64,
    /// Number of heads whose rows are interleaved; 0 leaves rows where they are.
    heads: usize,
    /// Our weight is the difference from 1; the file's is not.
    plus_one: bool,
}

impl GgufTensor {
    /// Whether a tensor of the file begins with it: all but the later experts of a matrix.
    pub fn is_first(&self) -> bool {
        self.expert.is_none_or(|expert| expert == 0)
    }
    /// Without the experts.
    pub fn own_shape(&self) -> &[usize] {
        &self.shape[usize::from(self.expert.is_some())..]
    }
    /// Elements of a row; 1 for biases.
    fn row(&self) -> usize {
        self.own_shape().get(1).copied().unwrap_or(1)
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
        let (row, head) = (self.row(), self.own_shape()[0] / self.heads);
        let (mut at, mut rest) = (at, &*values);
        while !rest.is_empty() {
            let (index, column) = (at / row, at % row);
            let (part, behind) = rest.split_at(rest.len().min(row - column));
            put(moved(index, head) * row + column, part)?;
            (at, rest) = (at + part.len(), behind);
        }
        Ok(())
    }
}

/// Where a file has row `index` of heads of `head` rows: row i of a head's first half and row i of its second half
/// become neighbors. With 0, rows stay.
pub fn moved(index: usize, head: usize) -> usize {
    if head == 0 {
        return index;
    }
    let (first, i) = (index - index % head, index % head);
    first + i % (head / 2) * 2 + i / (head / 2)
}

/// The tensors of a file, sorted by their names in Hugging Face files, but all experts of a block by their matrices.
/// The factors of llama3 rotary scaling come first, if there are any.
pub struct GgufTensors {
    pub list: Vec<GgufTensor>,
    by_source: HashMap<String, usize>,
    pub factors: Vec<f32>,
    /// Size of all tensors, padding included.
    pub bytes: u64,
}

pub const FACTORS: &str = "rope_freqs.weight";

impl GgufTensors {
    pub fn new<'a>(spec: &Spec, layouts: &'a [Layout], kind: GgufType) -> Result<GgufTensors> {
        check(spec)?;
        let named = |segment: &'a Segment| Ok((segment, GgufName::of(spec, &segment.name)?));
        let segments = layouts.iter().flat_map(|l| &l.segments).map(named);
        let mut segments: Vec<(&Segment, GgufName)> = segments.collect::<Result<_>>()?;
        segments.sort_by_key(|(segment, name)| name.order(&segment.name));
        let experts = spec.experts.as_ref().map_or(0, |experts| experts.count);
        let factors = spec.rope.as_ref().map_or_else(Vec::new, |rope| factors(rope, spec.head_dim));
        let mut offset = padded(4 * factors.len());
        let mut list = Vec::with_capacity(segments.len());
        for (segment, GgufName { name, expert }) in segments {
            let (mut shape, source) = (segment.global_shape(), segment.name.clone());
            let is_router = name.contains(".ffn_gate_inp");
            let form = if is_router { GgmlType::F32 } else { kind.of(&shape) };
            let heads = interleaved_heads(spec, &source);
            let bytes = form.bytes(shape.iter().product());
            let plus_one = spec.norm_from_one && source.ends_with("norm.weight");
            shape.splice(0..0, expert.map(|_| experts));
            list.push(GgufTensor { name, source, shape, form, expert, offset, heads, plus_one });
            let is_whole = expert.is_none_or(|expert| expert + 1 == experts);
            offset += if is_whole { padded(bytes) } else { bytes as u64 };
        }
        let by_source = list.iter().enumerate().map(|(i, t)| (t.source.clone(), i)).collect();
        Ok(GgufTensors { list, by_source, factors, bytes: offset })
    }
    pub fn find(&self, source: &str) -> Option<&GgufTensor> {
        self.by_source.get(source).map(|&i| &self.list[i])
    }
}

pub fn padded(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(TENSOR_ALIGN)
}

/// llama.cpp's name of a tensor. Those of experts are one tensor there, with the experts outermost.
pub struct GgufName {
    pub name: String,
    pub expert: Option<usize>,
}

impl GgufName {
    /// Files are sorted by names in Hugging Face files; all experts of a block by their matrices.
    pub fn order(&self, source: &str) -> (String, String, Option<usize>) {
        let block = self.expert.and_then(|_| source.split_once(".experts."));
        let matrix = |rest: &str| rest.split_once('.').map_or("", |(_, matrix)| matrix).to_string();
        block.map_or((source.into(), String::new(), None), |(block, rest)| {
            (format!("{block}.experts."), matrix(rest), self.expert)
        })
    }
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

/// The families whose converter is followed, and GPT-2, which is refused for its positions.
const EXPORTED: [Arch; 11] = [
    Arch::Llama,
    Arch::Mistral,
    Arch::Mixtral,
    Arch::Qwen2,
    Arch::Qwen2Moe,
    Arch::Qwen3,
    Arch::Qwen3Moe,
    Arch::Olmoe,
    Arch::Gemma2,
    Arch::Gemma3,
    Arch::Gpt,
];
const NAMES: &str = "Llama, Mixtral, OLMoE, Qwen 2 and 3 with their mixtures, Gemma 2 and 3";

/// An error if llama.cpp does not compute what this model computes, or its converter's bytes are not known.
fn check(spec: &Spec) -> Result<()> {
    if !EXPORTED.contains(&spec.arch) {
        return Err(Error::input(format!(
            "`save_gguf`: {} models cannot be exported yet: only {NAMES} can. Use `save_hf` DIR, which llama.cpp's \
             converter reads",
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
    let has_biases = matches!(spec.arch, Arch::Qwen2 | Arch::Qwen2Moe);
    let biased = spec.out_bias || spec.mlp_bias || spec.qkv_bias && !has_biases;
    // Files have no key for it: llama.cpp knows it of each family.
    let normalizes = matches!(spec.arch, Arch::Mixtral | Arch::Qwen3Moe);
    let experts = spec.experts.as_ref();
    let what = match spec.rope.as_ref().map(|rope| &rope.scaling) {
        _ if experts.is_some_and(|experts| !experts.dense.is_empty()) => {
            Some(format!("dense layers in {}", spec.arch.name()))
        }
        _ if experts.is_some_and(|experts| experts.normalize != normalizes) => {
            Some(format!("norm_topk_prob: {} in {}", !normalizes, spec.arch.name()))
        }
        // Its norms are over all queries and all keys, which have one width in llama.cpp.
        _ if spec.arch == Arch::Olmoe && [spec.heads, spec.kv_heads].iter().any(|n| n * spec.head_dim != spec.dim) => {
            Some("keys that are narrower than the model in olmoe".into())
        }
        _ if spec.qkv_clip.is_some() => Some(format!("clip_qkv in {}", spec.arch.name())),
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
            "`save_gguf`: llama.cpp does not run {what}: only {NAMES} can be exported. `save_hf` DIR exports this model"
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Experts;

    #[test]
    fn families_that_cannot_be_exported_are_named() {
        for family in Arch::all().filter(|family| !super::EXPORTED.contains(&family.arch)) {
            let refused = check(&Spec { arch: family.arch, layers: 2, ..Spec::default() });
            let says = format!("{} models cannot", family.name);
            assert!(refused.unwrap_err().to_string().contains(&says), "{}", family.name);
        }
    }

    /// llama.cpp knows of each family what its files have no key for.
    #[test]
    fn unusual_mixtures_are_refused() {
        let experts =
            |normalize, dense| Some(Experts { count: 4, top_k: 2, ff: 16, normalize, dense, ..Experts::default() });
        let of = |arch, experts| Spec {
            arch,
            layers: 2,
            experts,
            rope: Some(Rotary { theta: 1e4, scaling: Scaling::None }),
            ..Spec::default()
        };
        for (spec, what) in [
            (of(Arch::Qwen3Moe, experts(true, vec![0])), "dense layers in qwen3_moe"),
            (of(Arch::Qwen3Moe, experts(false, vec![])), "norm_topk_prob: false in qwen3_moe"),
            (of(Arch::Olmoe, experts(true, vec![])), "norm_topk_prob: true in olmoe"),
            (
                Spec { dim: 64, heads: 4, head_dim: 16, kv_heads: 2, ..of(Arch::Olmoe, experts(false, vec![])) },
                "keys that are",
            ),
            (Spec { qkv_clip: Some(8.0), ..of(Arch::Olmoe, experts(false, vec![])) }, "clip_qkv in olmoe"),
        ] {
            let refused = check(&spec).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
        for (arch, normalize) in
            [(Arch::Mixtral, true), (Arch::Qwen2Moe, false), (Arch::Qwen3Moe, true), (Arch::Olmoe, false)]
        {
            check(&of(arch, experts(normalize, vec![]))).unwrap();
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
}
