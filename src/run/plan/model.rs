//! The model's shapes, from its directory or the settings, and its tokenizer; also fills both into the settings. Never
//! builds a model.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::data::Tokenizer;
use crate::nn::{Activation, Arch, Experts, Rotary, Scaling, Spec};
use crate::run::plan::tokens;
use crate::run::settings::model::ModelSettings;
use crate::run::settings::value::set;
use crate::run::settings::{ArchName, Settings};
use std::path::Path;

/// A model and its tokenizer. A model from nothing takes its vocabulary from the tokenizer; a tokenizer of bytes takes
/// its own from the model.
pub struct ModelPlan {
    pub spec: Spec,
    pub tokenizer: Tokenizer,
}

impl ModelPlan {
    /// The model of the settings, which get what they leave open.
    pub fn new(s: &mut Settings) -> Result<ModelPlan> {
        let tokenizer = tokens::tokenizer(s);
        ModelPlan::with(tokenizer, s)
    }
    /// The same with a tokenizer that has been read.
    pub fn with(tokenizer: Tokenizer, s: &mut Settings) -> Result<ModelPlan> {
        let spec = spec(s, &tokenizer)?;
        Ok(ModelPlan { tokenizer: tokenizer.for_model(spec.vocab), spec })
    }
    /// The model of settings that train nothing: no sequences could be too long.
    pub fn without_data(s: &mut Settings) -> Result<ModelPlan> {
        if !s.lora.is_alone {
            has_weights(s)?;
        }
        s.data.max_len = Some(1);
        ModelPlan::new(s)
    }
}

/// The model's shapes: its directory's, or else the settings'.
fn spec(s: &mut Settings, tokenizer: &Tokenizer) -> Result<Spec> {
    // Lengths that follow from the data stay within the model's.
    let (max_len, m) = (s.data.max_len.unwrap_or(1), &mut s.model);
    let mut spec = match m.pretrain.clone() {
        Some(dir) => pretrained(m, &dir)?,
        None => described(m, tokenizer, max_len)?,
    };
    if let Some(Rotary { scaling: Scaling::Dynamic { .. }, .. }) = spec.rope {
        // Dynamic scaling extends the model to longer sequences.
        spec.max_len = spec.max_len.max(max_len);
    }
    if max_len > spec.max_len {
        let why = match (spec.arch, &spec.rope) {
            (Arch::Llama4, _) => " (attention_chunk_size: attention in several chunks is not supported)",
            (Arch::PhiMoe, Some(Rotary { scaling: Scaling::Long { .. }, .. })) => {
                " (original_max_position_embeddings: its longrope is supported up to there)"
            }
            _ => "",
        };
        return Err(Error::input(format!(
            "max_len {max_len} is longer than the model's max_positions {}{why}: reduce --max-len, or use a model with \
             more positions",
            spec.max_len
        )));
    }
    if spec.score && !s.objective.scores() {
        return Err(Error::input(
            "the model is a reward model, whose head is a score and not logits: use --objective rm, or a \
             ...ForCausalLM model",
        ));
    }
    spec.score = s.objective.scores();
    if let Some(dir) = s.model.pretrain.as_deref().filter(|_| spec.score)
        && ckpt::hf::has_tower(dir)?
    {
        return Err(Error::input(format!(
            "--objective rm with {}: a reward model with a vision tower is not supported; use a text model",
            dir.display()
        )));
    }
    spec.validate()?;
    Ok(spec)
}

/// Fails unless the directory that training starts from looks like one with weights.
pub fn has_weights(s: &Settings) -> Result<()> {
    s.model.pretrain.as_deref().filter(|_| !s.hub.without_weights).map_or(Ok(()), ckpt::is_model)
}

/// Shapes of the directory's `config.json`, filled into the settings; dropout is the run's own.
fn pretrained(m: &mut ModelSettings, dir: &Path) -> Result<Spec> {
    let spec = Spec { dropout: set(&m.dropout, "model.dropout")? as f32, ..ckpt::hf::read(dir)? };
    m.arch = Some(if spec.arch == Arch::Gpt { ArchName::Gpt } else { ArchName::Llama });
    m.embed_dim = Some(spec.dim);
    m.num_layers = Some(spec.layers);
    m.num_heads = Some(spec.heads);
    m.num_kv_heads = Some(spec.kv_heads);
    m.ff_hidden_dim = Some(spec.ff);
    m.num_experts = spec.experts.as_ref().map(|e| e.count);
    m.num_experts_per_tok = spec.experts.as_ref().map(|e| e.top_k);
    m.vocab_size = Some(spec.vocab);
    m.max_positions = Some(spec.max_len);
    m.tie_embeddings = Some(spec.tied);
    Ok(spec)
}

fn described(m: &mut ModelSettings, tokenizer: &Tokenizer, max_len: usize) -> Result<Spec> {
    let arch = match (set(&m.arch, "model.arch")?, m.num_experts) {
        (ArchName::Llama, None) => Arch::Llama,
        (ArchName::Llama, Some(_)) => Arch::Mixtral,
        (ArchName::Gpt, None) => Arch::Gpt,
        (ArchName::Gpt, Some(experts)) => {
            return Err(Error::input(format!(
                "num_experts {experts} with arch gpt: its blocks cannot have experts; use arch llama, or remove it"
            )));
        }
    };
    let (dim, heads) = (set(&m.embed_dim, "model.embed_dim")?, set(&m.num_heads, "model.num_heads")?);
    if dim % heads != 0 {
        return Err(Error::input(format!(
            "embed_dim {dim} is not a multiple of num_heads {heads}: all heads have the same width"
        )));
    }
    let vocab = match m.vocab_size {
        Some(vocab) => vocab,
        None => {
            tokenizer.usable()?;
            *m.vocab_size.insert(tokenizer.vocab().next_multiple_of(64))
        }
    };
    let gpt = arch == Arch::Gpt;
    let ff = if gpt { 4 * dim } else { (8 * dim).div_ceil(3).next_multiple_of(64) };
    let ff = *m.ff_hidden_dim.get_or_insert(ff);
    Ok(Spec {
        arch,
        vocab,
        dim,
        layers: set(&m.num_layers, "model.num_layers")?,
        heads,
        kv_heads: *m.num_kv_heads.get_or_insert(heads),
        head_dim: dim / heads,
        ff,
        experts: mixture(m, ff),
        max_len: *m.max_positions.get_or_insert(max_len),
        norm_eps: 1e-5,
        rope: (!gpt).then_some(Rotary::new(10_000.0)),
        activation: if gpt { Activation::Gelu } else { Activation::SwiGlu },
        tied: *m.tie_embeddings.get_or_insert(gpt),
        dropout: set(&m.dropout, "model.dropout")? as f32,
        ..Spec::default()
    })
}

/// The experts of a model from scratch, as in Mixtral: a Llama with experts of width `ff` in every block, so that
/// nothing else differs from the dense model. Its config asks for the load-balancing loss, so that training of the
/// exported model continues with it.
fn mixture(m: &mut ModelSettings, ff: usize) -> Option<Experts> {
    /// The factor in the configs of OLMoE and in Fedus et al. 2021, "Switch Transformers".
    const BALANCE: f64 = 0.01;
    let count = m.num_experts?;
    let aux_coef = *m.router_aux_loss_coef.get_or_insert(BALANCE);
    let top_k = *m.num_experts_per_tok.get_or_insert(2);
    let aux_loss = aux_coef > 0.0;
    Some(Experts { count, top_k, ff, normalize: true, aux_coef, aux_loss, ..Experts::default() })
}
