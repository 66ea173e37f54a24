//! How models and checkpoints are written. Never writes one.
use crate::base::Result;
use crate::ckpt::adapter::AdapterBase;
use crate::ckpt::gguf::GgufType;
use crate::ckpt::{self, Companions};
use crate::data::Tokenizer;
use crate::hub::HubName;
use crate::nn::Spec;
use crate::run::plan::tokens;
use crate::run::settings::checkpoint::CheckpointSettings;
use crate::run::settings::value::{StepInterval, set};
use crate::run::settings::{FloatName, GgufName, Settings};
use std::path::Path;

/// How models and checkpoints are written.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions {
    pub max_file_bytes: u64,
    /// Dtype of the `--save-hf` export.
    pub dtype: ckpt::Dtype,
    /// The type of what `--save-gguf` writes.
    pub gguf: GgufType,
    /// Checkpoints during the run are written in the background.
    pub background: bool,
}

impl SaveOptions {
    pub fn new(c: &CheckpointSettings) -> Result<SaveOptions> {
        Ok(SaveOptions {
            max_file_bytes: c.max_file_bytes()?,
            dtype: match set(&c.save_dtype, "checkpoint.save_dtype")? {
                FloatName::Fp32 => ckpt::Dtype::F32,
                FloatName::Bf16 => ckpt::Dtype::BF16,
                FloatName::Fp16 => ckpt::Dtype::F16,
            },
            gguf: gguf_type(c).unwrap_or(GgufType::F16),
            background: set(&c.async_save, "checkpoint.async_save")?
                && c.ckpt_dir.is_some()
                && c.save_every != Some(StepInterval::Steps(0)),
        })
    }
}

/// The type that `--gguf-type` names.
pub fn gguf_type(c: &CheckpointSettings) -> Option<GgufType> {
    c.gguf_type.map(|name| match name {
        GgufName::F16 => GgufType::F16,
        GgufName::Bf16 => GgufType::Bf16,
        GgufName::Q8_0 => GgufType::Q8_0,
    })
}

/// What stands next to the weights of a model like `spec` that came from the directory `source`. Its chat template is
/// the one in use.
pub fn companions(s: &Settings, spec: &Spec, source: Option<&Path>, tokenizer: &Tokenizer) -> Result<Companions> {
    let (files, ends) = (tokenizer.files(), (tokenizer.bos(), tokenizer.eos()));
    let companions = Companions::of(spec, source, files.first().map(|p| p.as_path()))?.with_ends(ends);
    let companions = companions.of_bytes(matches!(tokenizer, Tokenizer::Bytes));
    tokens::saved_template(s, tokenizer)?.map_or(Ok(companions.clone()), |text| companions.with_template(&text))
}

/// The model that adapters are of: by its name of the hub, which means the same on other machines, or its path.
pub fn adapted(s: &Settings) -> Option<AdapterBase> {
    let path = s.model.pretrain.as_deref()?;
    let named = s.hub.all.iter().find(|named| named.setting == "pretrain" && named.path == path);
    let name = named.and_then(|named| HubName::model(&named.pinned)).filter(|name| name.path.is_none());
    Some(match name {
        Some(HubName { repo, revision, .. }) => AdapterBase { name: repo, revision },
        None => AdapterBase::of_path(path),
    })
}
