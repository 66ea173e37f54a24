//! The model in a GGUF file: tensor names, and the values in which llama.cpp differs from transformers. Gemma's norms
//! are stored with their 1 added; the experts of a block are one tensor. Never reads or writes a file.
use super::check::check;
use super::family::GgufFactors;
use super::header::TENSOR_ALIGN;
use super::order::GgufOrder;
use super::quant::GgmlType;
use crate::base::{Error, Result};
use crate::nn::{Arch, Layout, Segment, SlicePart, Spec, sliced};
use std::collections::HashMap;

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
    /// The shape of one expert, or the whole one.
    pub fn of_expert(&self) -> &[usize] {
        &self.shape[usize::from(self.expert.is_some())..]
    }
    /// Elements of a row; 1 for biases.
    fn row(&self) -> usize {
        self.of_expert().get(1).copied().unwrap_or(1)
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
        self.change.apply(values);
        let mut put = |at: usize, values: &[f32]| {
            scratch.clear();
            self.form.encode(values, scratch);
            f(scratch, self.offset + self.form.bytes(at) as u64)
        };
        if self.order == GgufOrder::Same {
            return put(at, values);
        }
        let unit = self.order.unit(self.row());
        let (mut at, mut rest) = (at, &*values);
        while !rest.is_empty() {
            let (index, within) = (at / unit, at % unit);
            let (part, behind) = rest.split_at(rest.len().min(unit - within));
            put(self.order.place(index) * unit + within, part)?;
            (at, rest) = (at + part.len(), behind);
        }
        Ok(())
    }
}

/// The tensors of a file, sorted by their names in Hugging Face files, but all experts of a block by their matrices.
/// Factors of rotary frequencies come first, if there are any.
pub struct GgufTensors {
    pub list: Vec<GgufTensor>,
    by_source: HashMap<String, usize>,
    pub factors: Vec<GgufFactors>,
    /// Size of all tensors, padding included.
    pub bytes: u64,
}

impl GgufTensors {
    pub fn new<'a>(spec: &Spec, layouts: &'a [Layout], kind: GgufType) -> Result<GgufTensors> {
        check(spec)?;
        let named = |segment: &'a Segment| Ok((segment, GgufName::of(spec, &segment.name)?));
        let segments = layouts.iter().flat_map(|l| &l.segments).map(named);
        let mut segments: Vec<(&Segment, GgufName)> = segments.collect::<Result<_>>()?;
        segments.sort_by_key(|(segment, name)| name.order(&segment.name));
        let experts = spec.experts.as_ref().map_or(0, |experts| experts.count);
        let factors = GgufFactors::of(spec);
        let mut offset = factors.iter().map(|factors| padded(factors.bytes())).sum();
        let mut list = Vec::with_capacity(segments.len());
        for (segment, GgufName { name, expert, parts }) in segments {
            let (mut shape, source) = (segment.global_shape(), segment.name.clone());
            let is_conv = [".shortconv.conv.", ".ssm_conv1d."].iter().any(|part| name.contains(part));
            let whole = is_conv || name.contains(".ffn_gate_inp");
            let form = if whole { GgmlType::F32 } else { kind.of(&shape) };
            let (order, change) = (GgufOrder::of(spec, &source), GgufChange::of(spec, &source));
            if let (GgufOrder::TiledColumns { width, .. }, GgmlType::Q8_0) = (order, form)
                && width % form.block() != 0
            {
                return Err(Error::input(format!(
                    "`gguf_type` q8_0: {source} has heads of {width} columns, which are no whole blocks of {}: use f16",
                    form.block()
                )));
            }
            let bytes = form.bytes(shape.iter().product());
            if expert.is_some() {
                shape[0] *= parts;
                shape.insert(0, experts);
            }
            if is_conv {
                shape.remove(1); // channels, 1, taps
            }
            list.push(GgufTensor { name, source, shape, form, expert, offset, order, change });
            let is_whole = expert.is_none_or(|expert| expert + 1 == parts * experts);
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

/// Tensors whose last word llama.cpp has no `weight` or `bias` for.
const WHOLE: [(&str, &str); 6] = [
    (".layer_scalar", "layer_output_scale.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
];

/// `post_attention_layernorm` is the norm of attention's output, and not that of the feed-forward layer's input.
fn is_of_attention(spec: &Spec) -> bool {
    let named = matches!(spec.arch, Arch::SeedOss | Arch::Qwen35 | Arch::Qwen35Moe);
    named || spec.post_norms && spec.arch != Arch::Glm4
}

/// llama.cpp's name of a tensor. Those of experts are one tensor there, with the experts outermost.
pub struct GgufName {
    pub name: String,
    pub expert: Option<usize>,
    /// Gate and up of an expert may be parts of one matrix, of which `expert` counts all.
    parts: usize,
}

impl GgufName {
    fn new(name: String) -> GgufName {
        GgufName { name, expert: None, parts: 1 }
    }
    /// Files are sorted by names in Hugging Face files; all experts of a block by their matrices.
    pub fn order(&self, source: &str) -> (String, String, Option<usize>) {
        let whole = sliced(source).map_or(source, |(whole, ..)| whole);
        let block = self.expert.and_then(|_| whole.split_once(".experts."));
        let matrix = |rest: &str| rest.split_once('.').map_or(rest, |(_, matrix)| matrix).to_string();
        block.map_or((source.into(), String::new(), None), |(block, rest)| {
            (format!("{block}.experts."), matrix(rest), self.expert)
        })
    }
    /// That of the tensor `source`.
    pub fn of(spec: &Spec, source: &str) -> Result<GgufName> {
        let unknown = || Error::input(format!("llama.cpp has no name for the tensor {source}"));
        let (module, suffix) = source.rsplit_once('.').ok_or_else(unknown)?;
        let within = source.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let block = within.map_or(String::new(), |(i, _)| format!("blk.{i}."));
        if let Some((whole, place, part)) = within.and_then(|(_, name)| sliced(name.strip_prefix("experts.")?)) {
            let name = match (whole, part) {
                ("down_proj", SlicePart::Whole) => "ffn_down_exps",
                ("gate_up_proj", SlicePart::Rows) => "ffn_gate_up_exps",
                _ => return Err(unknown()),
            };
            return Ok(GgufName { name: format!("{block}{name}.weight"), expert: Some(place), parts: part.count() });
        }
        if let Some((_, known)) = WHOLE.iter().find(|(name, _)| source.ends_with(name)) {
            return Ok(GgufName::new(format!("{block}{known}")));
        }
        let module = within.and_then(|(_, name)| Some(name.rsplit_once('.')?.0)).unwrap_or(module);
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
            return Ok(GgufName { name: format!("{block}ffn_{kind}_exps.{suffix}"), expert, parts: 1 });
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
            "linear_attn.conv1d" => "ssm_conv1d",
            "linear_attn.norm" => "ssm_norm",
            "linear_attn.out_proj" => "ssm_out",
            "post_attention_layernorm" | "pre_feedforward_layernorm" | "ffn_norm" => "ffn_norm",
            "post_feedforward_layernorm" | "post_mlp_layernorm" => "post_ffw_norm",
            "mlp.gate_proj" | "feed_forward.w1" => "ffn_gate",
            "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.c_fc" | "feed_forward.w3" => "ffn_up",
            "mlp.down_proj" | "mlp.c_proj" | "feed_forward.w2" => "ffn_down",
            "mlp.gate" | "block_sparse_moe.gate" | "feed_forward.gate" => "ffn_gate_inp",
            "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
            "mlp.shared_expert.up_proj" => "ffn_up_shexp",
            "mlp.shared_expert.down_proj" => "ffn_down_shexp",
            "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
            _ => return Err(unknown()),
        };
        Ok(GgufName::new(format!("{block}{known}.{suffix}")))
    }
}
