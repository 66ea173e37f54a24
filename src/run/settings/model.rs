//! The shapes of a model, or the directory that has them. Never reads that directory.
use super::names::ArchName;
use super::value::{count, number, size};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Model")]
pub struct ModelSettings {
    /// Model to start from: a Hugging Face directory, a GGUF file, or a name of the hub, OWNER/NAME or
    /// OWNER/NAME@REVISION; its config sets the shapes [default: none]
    #[arg(long, value_name = "MODEL")]
    pub pretrain: Option<PathBuf>,
    /// Architecture for training from scratch. llama: RMSNorm, RoPE, SwiGLU; gpt: LayerNorm, learned positions, GELU,
    /// biases
    #[arg(long)]
    pub arch: Option<ArchName>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    pub embed_dim: Option<usize>,
    /// Number of decoder blocks
    #[arg(long, value_name = "N")]
    pub num_layers: Option<usize>,
    /// Number of query heads
    #[arg(long, value_name = "N")]
    pub num_heads: Option<usize>,
    /// Number of key/value heads (grouped-query attention) [default: num-heads]
    #[arg(long, value_name = "N")]
    pub num_kv_heads: Option<usize>,
    /// Hidden width of the MLP, or of each expert [default: llama 8/3 embed-dim rounded up to a multiple of 64, gpt 4
    /// embed-dim]
    #[arg(long, value_name = "N")]
    pub ff_hidden_dim: Option<usize>,
    /// Mixture of experts: number of experts per block, with the layers of Mixtral; arch llama only [default: no
    /// experts]
    #[arg(long, value_name = "N")]
    pub num_experts: Option<usize>,
    /// Mixture of experts: experts that each token uses [default: 2]
    #[arg(long, value_name = "N")]
    pub num_experts_per_tok: Option<usize>,
    /// Rows of the embedding table [default: the tokenizer's vocabulary, rounded up to a multiple of 64]
    #[arg(long, value_name = "TOKENS")]
    pub vocab_size: Option<usize>,
    /// Longest sequence the model supports, in tokens [default: max-len]
    #[arg(long, value_name = "TOKENS")]
    pub max_positions: Option<usize>,
    /// Dropout probability after the embeddings and each residual branch, in [0, 1)
    #[arg(long, value_name = "P")]
    pub dropout: Option<f64>,
    /// Mixture of experts: factor of the load-balancing loss, 0 or more [default: the model's router_aux_loss_coef if
    /// its config.json has output_router_logits: true, else 0; 0.01 from scratch]
    #[arg(long, value_name = "X")]
    pub router_aux_loss_coef: Option<f64>,
    /// Share one tensor between the embedding table and the output head [default: llama no, gpt yes]
    #[arg(long)]
    pub tie_embeddings: Option<bool>,
}

impl ModelSettings {
    pub fn check(&self) -> Result<()> {
        size("num_layers", self.num_layers)?;
        count("num_heads", self.num_heads)?;
        size("num_kv_heads", self.num_kv_heads)?;
        size("embed_dim", self.embed_dim)?;
        size("ff_hidden_dim", self.ff_hidden_dim)?;
        count("num_experts", self.num_experts)?;
        count("num_experts_per_tok", self.num_experts_per_tok)?;
        size("vocab_size", self.vocab_size)?;
        size("max_positions", self.max_positions)?;
        number("router_aux_loss_coef", self.router_aux_loss_coef, |x| x >= 0.0, "0 or more")?;
        number("dropout", self.dropout, |x| (0.0..1.0).contains(&x), "in [0, 1)")
    }
}
