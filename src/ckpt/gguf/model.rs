//! The model in a GGUF file: tensor names, and the values in which llama.cpp differs from transformers. Gemma's norms
//! are stored with their 1 added; the experts of a block are one tensor. Never reads or writes a file.
use super::super::elements::storable;
use super::check::check;
use super::family::GgufFactors;
use super::header::TENSOR_ALIGN;
use super::order::GgufOrder;
use super::parts::GgufPart;
use super::quant::{GgmlType, Q8_0_BLOCK};
use crate::base::{Error, Result};
use crate::nn::{Arch, Layout, SlicePart, Spec, sliced};
use std::collections::HashMap;
use std::ops::Range;

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
    /// Which expert's matrix of the tensor it is, or which of their parts, counted over all experts.
    pub expert: Option<usize>,
    /// Its first byte, counted from the first tensor's.
    pub offset: u64,
    order: GgufOrder,
    /// What it has of its source, if not all or in the source's rows.
    part: Option<GgufPart>,
    change: GgufChange,
}

/// What a file has in place of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum GgufChange {
    None,
    /// Our weight is the difference from 1; the file's is not.
    PlusOne,
    /// Ours is the logarithm of a rate.
    MinusExp,
}

impl GgufChange {
    fn of(spec: &Spec, source: &str) -> GgufChange {
        match source.rsplit_once('.').map_or("", |(_, name)| name) {
            "A_log" => GgufChange::MinusExp,
            // The norm of a gated delta net is not from 1.
            _ if source.ends_with("linear_attn.norm.weight") => GgufChange::None,
            _ if spec.norm_from_one && source.ends_with("norm.weight") => GgufChange::PlusOne,
            _ => GgufChange::None,
        }
    }
    fn apply(self, values: &mut [f32]) {
        match self {
            GgufChange::None => {}
            GgufChange::PlusOne => values.iter_mut().for_each(|x| *x += 1.0),
            GgufChange::MinusExp => values.iter_mut().for_each(|x| *x = -f64::from(*x).exp() as f32),
        }
    }
}

impl GgufTensor {
    /// Whether a tensor of the file begins with it: all but the later experts of a matrix.
    pub fn is_first(&self) -> bool {
        self.expert.is_none_or(|expert| expert == 0)
    }
    /// Whether the file has it transposed.
    pub fn is_turned(&self) -> bool {
        matches!(self.part, Some(GgufPart::Turned(_)))
    }
    /// The shape of one expert, or the whole one.
    pub fn of_expert(&self) -> &[usize] {
        &self.shape[usize::from(self.expert.is_some())..]
    }
    /// Elements of a row; 1 for biases.
    fn row(&self) -> usize {
        if let [_, .., row] = self.of_expert() { *row } else { 1 }
    }

    /// Calls `f` with the encoded bytes of `values`, and with their offset from the first tensor. `stretches` says
    /// which elements of the source they are.
    fn place(
        &self,
        stretches: &[(Range<usize>, usize)],
        values: &[f32],
        scratch: &mut Vec<u8>,
        f: &mut dyn FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<()> {
        let mut put = |at: usize, values: &[f32]| {
            scratch.clear();
            self.form.encode(values, scratch);
            f(scratch, self.offset + self.form.bytes(at) as u64)
        };
        let place: &dyn Fn(usize) -> Option<usize> = match self.part {
            Some(GgufPart::Turned(turned)) => return turned.runs(stretches, values, &mut put),
            Some(GgufPart::Rows(rows)) => &move |row| rows.place(row),
            None => &|index| Some(self.order.place(index)),
        };
        let whole = self.part.is_none() && self.order == GgufOrder::Same;
        let unit = if whole { usize::MAX } else { self.order.unit(self.row()) };
        for (range, at) in stretches {
            let (mut at, mut rest) = (*at, &values[range.clone()]);
            while !rest.is_empty() {
                let (index, within) = (at / unit, at % unit);
                let (part, behind) = rest.split_at(rest.len().min(unit - within));
                if let Some(index) = place(index) {
                    put(index * unit + within, part)?;
                }
                (at, rest) = (at + part.len(), behind);
            }
        }
        Ok(())
    }
}

/// The tensors of a file, sorted by their names in Hugging Face files, but all experts of a block by their matrices.
/// Factors of rotary frequencies come first, if there are any.
pub struct GgufTensors {
    pub list: Vec<GgufTensor>,
    by_source: HashMap<String, Vec<usize>>,
    pub factors: Vec<GgufFactors>,
    /// Size of all tensors, padding included.
    pub bytes: u64,
}

impl GgufTensors {
    pub fn new(spec: &Spec, layouts: &[Layout], kind: GgufType) -> Result<GgufTensors> {
        check(spec)?;
        let mut named = Vec::new();
        for segment in layouts.iter().flat_map(|l| &l.segments) {
            let parts = GgufPart::of(spec, &segment.name);
            if parts.is_empty() {
                named.push((segment, GgufName::of(spec, &segment.name)?, None));
            }
            for (i, (name, part)) in parts.into_iter().enumerate() {
                named.push((segment, GgufName::of_part(&segment.name, name, i), Some(part)));
            }
        }
        named.sort_by_key(|(segment, name, _)| name.order(&segment.name));
        let experts = spec.experts.as_ref().map_or(0, |experts| experts.count);
        let factors = GgufFactors::of(spec);
        let mut offset = factors.iter().map(|factors| padded(factors.bytes())).sum();
        let mut list = Vec::with_capacity(named.len());
        for (segment, GgufName { name, expert, parts, .. }, part) in named {
            let (mut shape, source) = (segment.global_shape(), segment.name.clone());
            if let Some(part) = part {
                shape = part.shape(&shape);
                if spec.latent.is_some() {
                    shape = vec![spec.heads, shape[0] / spec.heads, shape[1]];
                }
            }
            let is_conv = [".shortconv.conv.", ".ssm_conv1d."].iter().any(|part| name.contains(part));
            let order = if part.is_some() { GgufOrder::Same } else { GgufOrder::of(spec, &source) };
            let whole = is_conv || name.contains(".ffn_gate_inp");
            let form = if whole { GgmlType::F32 } else { kind.of(&shape) };
            let form = if form == GgmlType::Q8_0 { blocked(&source, expert, part, order)? } else { form };
            let change = GgufChange::of(spec, &source);
            let bytes = form.bytes(shape.iter().product());
            if expert.is_some() {
                shape[0] *= parts;
                shape.insert(0, experts);
            }
            if is_conv {
                shape.remove(1); // channels, 1, taps
            }
            list.push(GgufTensor { name, source, shape, form, expert, offset, order, part, change });
            let is_whole = expert.is_none_or(|expert| expert + 1 == parts * experts);
            offset += if is_whole { padded(bytes) } else { bytes as u64 };
        }
        let mut by_source = HashMap::<String, Vec<usize>>::new();
        list.iter().enumerate().for_each(|(i, t)| by_source.entry(t.source.clone()).or_default().push(i));
        Ok(GgufTensors { list, by_source, factors, bytes: offset })
    }
    /// The tensors that have something of the model's tensor `source`.
    fn of(&self, source: &str) -> impl Iterator<Item = &GgufTensor> {
        self.by_source.get(source).into_iter().flatten().map(|&i| &self.list[i])
    }
    pub fn has(&self, source: &str) -> bool {
        self.by_source.contains_key(source)
    }
    /// Calls `f` with the encoded bytes of `values` in each tensor that has them, and with their offset from the first
    /// tensor. `stretches` says which elements of the tensor `source` they are. Uses `values` as scratch space.
    pub fn place(
        &self,
        source: &str,
        stretches: &[(Range<usize>, usize)],
        values: &mut [f32],
        scratch: &mut Vec<u8>,
        f: &mut dyn FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<()> {
        for (i, tensor) in self.of(source).enumerate() {
            storable(source, values, tensor.form.name(), tensor.form.most())?;
            if i == 0 {
                tensor.change.apply(values);
            }
            tensor.place(stretches, values, scratch, f)?;
        }
        Ok(())
    }
}

/// The type in a q8_0 file of a matrix whose rows are whole blocks: ranks must not hold elements of a block apart.
fn blocked(source: &str, expert: Option<usize>, part: Option<GgufPart>, order: GgufOrder) -> Result<GgmlType> {
    match (part, order) {
        // The little that latents have.
        (Some(GgufPart::Turned(_)), _) if expert.is_none() => Ok(GgmlType::F16),
        (Some(GgufPart::Turned(_)), _) => Err(Error::input(
            "`gguf_type` q8_0: files have the experts of these models transposed, so that its blocks would be of several \
             ranks: use f16 or bf16, of which llama-quantize makes q8_0",
        )),
        (_, GgufOrder::TiledColumns { width, .. }) if width % Q8_0_BLOCK != 0 => Err(Error::input(format!(
            "`gguf_type` q8_0: {source} has heads of {width} columns, which are no whole blocks of {Q8_0_BLOCK}: use f16"
        ))),
        _ => Ok(GgmlType::Q8_0),
    }
}

pub fn padded(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(TENSOR_ALIGN)
}

/// Tensors whose last word llama.cpp has no `weight` or `bias` for.
const WHOLE: [(&str, &str); 8] = [
    (".layer_scalar", "layer_output_scale.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("self_attn.sinks", "attn_sinks.weight"),
];

/// `post_attention_layernorm` is the norm of attention's output, and not that of the feed-forward layer's input.
fn is_of_attention(spec: &Spec) -> bool {
    let named = matches!(spec.arch, Arch::SeedOss | Arch::GptOss | Arch::Qwen35 | Arch::Qwen35Moe | Arch::Qwen3Next);
    named || spec.post_norms && spec.arch != Arch::Glm4
}

/// llama.cpp's name of a tensor. Those of experts are one tensor there, with the experts outermost.
pub struct GgufName {
    pub name: String,
    pub expert: Option<usize>,
    /// Gate and up of an expert may be parts of one matrix, of which `expert` counts all.
    parts: usize,
    /// Which of the tensors that a source becomes.
    index: usize,
}

/// The prefix of the names of a block's tensors, and what a source is called within it.
fn within_block(source: &str) -> (String, Option<&str>) {
    let within = source.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    (within.map_or(String::new(), |(i, _)| format!("blk.{i}.")), within.map(|(_, name)| name))
}

impl GgufName {
    fn new(name: String) -> GgufName {
        GgufName { name, expert: None, parts: 1, index: 0 }
    }
    /// That of part `index` of the tensor `source`, which is called `name` within its block.
    fn of_part(source: &str, name: &str, index: usize) -> GgufName {
        let name = format!("{}{name}", within_block(source).0);
        GgufName { name, expert: sliced(source).map(|(_, expert, _)| expert), parts: 1, index }
    }
    /// Files are sorted by names in Hugging Face files; all experts of a block by their matrices.
    pub fn order(&self, source: &str) -> (String, String, usize, Option<usize>) {
        let whole = sliced(source).map_or(source, |(whole, ..)| whole);
        let block = self.expert.and_then(|_| whole.split_once(".experts."));
        let matrix = |rest: &str| rest.split_once('.').map_or(rest, |(_, matrix)| matrix).to_string();
        block.map_or((source.into(), String::new(), self.index, None), |(block, rest)| {
            (format!("{block}.experts."), matrix(rest), self.index, self.expert)
        })
    }
    /// That of the tensor `source`.
    pub fn of(spec: &Spec, source: &str) -> Result<GgufName> {
        let unknown = || Error::input(format!("llama.cpp has no name for the tensor {source}"));
        let (module, suffix) = source.rsplit_once('.').ok_or_else(unknown)?;
        let (block, within) = within_block(source);
        let of_experts = within.and_then(|name| name.strip_prefix("mlp.").unwrap_or(name).strip_prefix("experts."));
        if let Some((whole, place, part)) = of_experts.and_then(sliced) {
            let name = match (whole, part) {
                ("down_proj", SlicePart::Whole) => "ffn_down_exps.weight",
                ("down_proj_bias", SlicePart::Whole) => "ffn_down_exps.bias",
                ("gate_up_proj", SlicePart::Rows) => "ffn_gate_up_exps.weight",
                _ => return Err(unknown()),
            };
            return Ok(GgufName { name: format!("{block}{name}"), expert: Some(place), parts: part.count(), index: 0 });
        }
        if let Some((_, known)) = WHOLE.iter().find(|(name, _)| source.ends_with(name)) {
            return Ok(GgufName::new(format!("{block}{known}")));
        }
        let module = within.and_then(|name| Some(name.rsplit_once('.')?.0)).unwrap_or(module);
        let of_expert = ["mlp.experts.", "block_sparse_moe.experts.", "feed_forward.experts."]
            .iter()
            .find_map(|p| module.strip_prefix(p));
        if let Some((expert, kind)) = of_expert.and_then(|rest| rest.split_once('.')) {
            let kind = match kind {
                "gate_proj" | "w1" => "gate",
                "up_proj" | "w3" => "up",
                "down_proj" | "w2" => "down",
                _ => return Err(unknown()),
            };
            let expert = Some(expert.parse().map_err(|_| unknown())?);
            return Ok(GgufName { name: format!("{block}ffn_{kind}_exps.{suffix}"), expert, parts: 1, index: 0 });
        }
        let known = match module {
            "model.embed_tokens" => "token_embd",
            "model.embed_tokens_per_layer" => "per_layer_token_embd",
            "model.per_layer_model_projection" => "per_layer_model_proj",
            "model.per_layer_projection_norm" => "per_layer_proj_norm",
            "per_layer_input_gate" => "inp_gate",
            "per_layer_projection" => "proj",
            "post_per_layer_input_norm" => "post_norm",
            "pre_feedforward_layernorm_2" => "pre_ffw_norm_2",
            "post_feedforward_layernorm_1" => "post_ffw_norm_1",
            "post_feedforward_layernorm_2" => "post_ffw_norm_2",
            "router.proj" => "ffn_gate_inp",
            "model.norm" => "output_norm",
            "model.embedding_norm" => "token_embd_norm",
            "lm_head" => "output",
            "input_layernorm" | "operator_norm" => "attn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" | "self_attn.out_proj" => "attn_output",
            "self_attn.qkv_proj" => "attn_qkv",
            "self_attn.q_a_proj" => "attn_q_a",
            "self_attn.q_b_proj" => "attn_q_b",
            "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
            "self_attn.q_a_layernorm" => "attn_q_a_norm",
            "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
            "self_attn.q_norm" | "self_attn.q_layernorm" | "self_attn.query_layernorm" => "attn_q_norm",
            "self_attn.k_norm" | "self_attn.k_layernorm" | "self_attn.key_layernorm" => "attn_k_norm",
            "conv.conv" => "shortconv.conv",
            "conv.in_proj" => "shortconv.in_proj",
            "conv.out_proj" => "shortconv.out_proj",
            "post_self_attn_layernorm" => "post_attention_norm",
            "post_attention_layernorm" if is_of_attention(spec) => "post_attention_norm",
            "linear_attn.in_proj_qkv" => "attn_qkv",
            "linear_attn.in_proj_z" => "attn_gate",
            "linear_attn.in_proj_a" => "ssm_alpha",
            "linear_attn.in_proj_b" => "ssm_beta",
            "linear_attn.in_proj_ba" => "ssm_ba",
            "linear_attn.conv1d" => "ssm_conv1d",
            "linear_attn.norm" => "ssm_norm",
            "linear_attn.out_proj" => "ssm_out",
            "post_attention_layernorm" | "pre_feedforward_layernorm" | "ffn_norm" => "ffn_norm",
            "post_feedforward_layernorm" | "post_mlp_layernorm" => "post_ffw_norm",
            "mlp.gate_proj" | "feed_forward.w1" => "ffn_gate",
            "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.c_fc" | "feed_forward.w3" => "ffn_up",
            "mlp.down_proj" | "mlp.c_proj" | "feed_forward.w2" => "ffn_down",
            "mlp.gate" | "block_sparse_moe.gate" | "feed_forward.gate" | "mlp.router" => "ffn_gate_inp",
            "mlp.shared_expert.gate_proj" | "mlp.shared_experts.gate_proj" => "ffn_gate_shexp",
            "mlp.shared_expert.up_proj" | "mlp.shared_experts.up_proj" => "ffn_up_shexp",
            "mlp.shared_expert.down_proj" | "mlp.shared_experts.down_proj" => "ffn_down_shexp",
            "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
            _ => return Err(unknown()),
        };
        Ok(GgufName::new(format!("{block}{known}.{suffix}")))
    }
}
