//! Typed access to the keys of a JSON object, and what becomes of those that nobody reads. transformers computes the
//! same whatever the value of a key that its class for the model does not have; every key that a class has is read, or
//! listed here. Never skips a key that transformers uses.
use crate::base::{Error, Result, limits, quote};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// Keys of `config.json` that do not affect a training step: provenance, token ids, generation settings, outputs we
/// never return, and dropout and initialization, which the run decides. Names that start with an underscore are
/// transformers' own notes.
const HARMLESS: &[&str] = &[
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "attn_pdrop",
    "bad_words_ids",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cls_token_id",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "embed_dropout",
    "embedding_dropout",
    "encoder_no_repeat_ngram_size",
    "eod_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_dropout",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];
/// GPT-2 also has sizes that follow from others, and heads for other tasks.
const HARMLESS_PREFIX: &[&str] = &["_", "summary_"];

/// Keys that transformers reads from the config of any class, and that change what it computes, or which file it reads.
const USED: &[&str] = &[
    "attention_chunk_size",
    "compression_config",
    "default_rope_type",
    "is_causal",
    "kv_sharing_modes",
    "layer_types",
    "original_max_position_embeddings",
    "per_layer_config",
    "sliding_window",
    "text_config",
    "transformers_weights",
    "vision_config",
];
/// The same within `rope_scaling` or `rope_parameters`, where each type has its own.
const USED_IN_ROPE: &[&str] = &[
    "alpha",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "full_attention",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "sliding_attention",
    "truncate",
    "type",
];

/// The shortest decimal number: 1e-5 and not 0.000009999999747378752.
pub fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(x as f64)
}
/// The map of an object.
pub fn object(value: Value) -> Map<String, Value> {
    if let Value::Object(map) = value { map } else { Map::new() }
}

pub struct ConfigKeys<'a> {
    map: &'a Map<String, Value>,
    /// Precedes the name in messages: "rope_scaling." or empty.
    prefix: String,
    /// Whether these are the keys of a model, and not of its rotary positions.
    model: bool,
    asked: RefCell<BTreeSet<String>>,
    /// Keys that transformers uses for other models, or other values of other keys.
    unused: RefCell<BTreeSet<&'static str>>,
    /// Keys without an effect, of all objects of a file.
    inert: Rc<RefCell<Vec<String>>>,
}

impl<'a> ConfigKeys<'a> {
    pub fn new(map: &'a Map<String, Value>, prefix: impl Into<String>) -> ConfigKeys<'a> {
        let (asked, unused) = (RefCell::default(), RefCell::default());
        ConfigKeys { map, prefix: prefix.into(), model: true, asked, unused, inert: Rc::default() }
    }
    /// The key as named in errors.
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
    /// The value, null included.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key.into());
        self.map.get(key)
    }
    /// Keys whose values do not matter here.
    pub fn known(&self, keys: impl IntoIterator<Item = impl AsRef<str>>) {
        self.asked.borrow_mut().extend(keys.into_iter().map(|key| key.as_ref().to_string()));
    }
    /// A key that has no effect on this model.
    pub fn unused(&self, key: &'static str) {
        self.unused.borrow_mut().insert(key);
    }
    /// The value if it is not null.
    pub fn present(&self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|v| !v.is_null())
    }
    fn typed<T>(&self, key: &str, kind: &str, of: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        of(value)
            .map(Some)
            .ok_or_else(|| Error::input(format!("{} is {}; it must be {kind}", self.name(key), quote(value))))
    }
    pub fn whole(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a nonnegative integer", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }
    /// An integer no larger than the setting `setting` may be.
    pub fn size(&self, key: &str, setting: &str) -> Result<Option<usize>> {
        let n = self.whole(key)?;
        n.map_or(Ok(()), |n| limits::check(setting, &self.name(key), n as u64))?;
        Ok(n)
    }
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }
    /// A number above 0, in f32 too.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        let fits = |x: &f64| *x as f32 > 0.0 && (*x as f32).is_finite();
        self.typed(key, "a number above 0", |v| v.as_f64().filter(fits))
    }
    /// A number from 0 to 1.
    pub fn fraction(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number from 0 to 1", |v| v.as_f64().filter(|x| (0.0..=1.0).contains(x)))
    }
    /// A token id or a list of them; -1 means none.
    pub fn ids(&self, key: &str) -> Result<()> {
        let id = |v: &Value| v.as_i64().is_some_and(|id| (-1..1 << 31).contains(&id));
        let ids = |v: &'a Value| v.as_array().map_or(id(v), |list| list.iter().all(id)).then_some(());
        self.typed(key, "a token id below 2^31, or a list of token ids", ids).map(|_| ())
    }
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }
    pub fn object(&self, key: &str) -> Result<Option<ConfigKeys<'a>>> {
        let map = self.typed(key, "an object", Value::as_object)?;
        let inert = &self.inert;
        let within = |map| ConfigKeys::new(map, format!("{}.", self.name(key)));
        Ok(map.map(|map| ConfigKeys { inert: inert.clone(), model: false, ..within(map) }))
    }
    pub fn need<T>(&self, key: &str, read: impl Fn(&Self, &str) -> Result<Option<T>>) -> Result<T> {
        read(self, key)?.ok_or_else(|| Error::input(format!("{} is missing", self.name(key))))
    }
    /// The value; transformers' default if the key is absent; None if it is null.
    pub fn or<T>(&self, key: &str, default: T, read: impl Fn(&Self, &str) -> Result<Option<T>>) -> Result<Option<T>> {
        if self.get(key).is_none() { Ok(Some(default)) } else { read(self, key) }
    }
    /// Refuses all values but these; absent and null are accepted.
    pub fn only(&self, key: &str, allowed: &[Value]) -> Result<()> {
        match self.present(key) {
            Some(value) if !allowed.contains(value) => Err(self.unsupported(key, allowed)),
            _ => Ok(()),
        }
    }
    /// Weights are not stored as codes.
    pub fn unquantized(&self) -> Result<()> {
        let key = "quantization_config";
        let holds = |config: &Value| config.as_object().is_none_or(|map| map.values().any(|value| !value.is_null()));
        let Some(config) = self.present(key).filter(|config| holds(config)) else { return Ok(()) };
        Err(Error::input(format!(
            "{} is {}: the files hold quantized weights, which are not read. Use the model that they were made from",
            self.name(key),
            quote(config)
        )))
    }
    pub fn unsupported(&self, key: &str, allowed: &[Value]) -> Error {
        let value = self.map.get(key).unwrap_or(&Value::Null);
        let instead: Vec<String> = allowed.iter().map(Value::to_string).collect();
        let instead = if instead.is_empty() { "null or absent".into() } else { instead.join(" or ") };
        Error::input(format!("{} is {}, which is not supported; it must be {instead}", self.name(key), quote(value)))
    }

    /// Refuses keys that transformers uses and nobody read, unless they disable a feature. Notes those that it does not
    /// have, without those that are known to be harmless.
    pub fn finish(&self) -> Result<()> {
        let (asked, top) = (self.asked.borrow(), self.model);
        let harmless = |key: &str| {
            asked.contains(key)
                || top && (HARMLESS.contains(&key) || HARMLESS_PREFIX.iter().any(|p| key.starts_with(p)))
        };
        let nothing = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(items) => items.is_empty(),
            _ => false,
        };
        let used = if top { USED } else { USED_IN_ROPE };
        let used = |key: &str| used.contains(&key) && !self.unused.borrow().contains(key);
        let unread = self.map.iter().filter(|(key, value)| !harmless(key) && !nothing(value));
        let (used, inert): (Vec<_>, Vec<_>) = unread.partition(|(key, _)| used(key));
        match used.first() {
            None => {
                self.inert.borrow_mut().extend(inert.iter().map(|(key, _)| quote(self.name(key)).to_string()));
                Ok(())
            }
            Some((key, value)) => Err(Error::input(format!(
                "{} is {}: it changes what the model computes, which is not supported for this model",
                quote(self.name(key)),
                quote(value)
            ))),
        }
    }
    /// The keys that [`ConfigKeys::finish`] noted, here and in objects within.
    pub fn inert(&self) -> Vec<String> {
        self.inert.take()
    }
}
