//! Configs of vision-language models: which part describes the text model, in the terms of its own family. Never reads
//! what describes the vision tower, which is not trained.
//!
//! M-RoPE rotates with three positions per token, which are equal for text: then it is RoPE, whatever its sections.
use super::keys::{ConfigKeys, object};
use crate::base::{Error, Result, quote};
use serde_json::{Map, Value, json};

const TEXT: &str = "text_config";

/// A class with a vision tower: its `model_type`, and those that its text model may have, the default first, each with
/// the family that computes the same.
struct TowerClass {
    model_type: &'static str,
    texts: &'static [(&'static str, &'static str)],
}

const LLAVA: [(&str, &str); 6] = [
    ("llama", "llama"),
    ("mistral", "mistral"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("phi3", "phi3"),
    ("gemma", "gemma"),
];
const QWENS: [(&str, &str); 3] = [("qwen2", "qwen2"), ("qwen3", "qwen3"), ("llama", "llama")];

const CLASSES: [TowerClass; 43] = [
    TowerClass { model_type: "apertus1p5", texts: &[("apertus1p5_text", "apertus1p5_text")] },
    TowerClass { model_type: "deepseek_vl", texts: &[("llama", "llama")] },
    TowerClass { model_type: "deepseek_vl_hybrid", texts: &[("llama", "llama")] },
    TowerClass { model_type: "exaone4_5", texts: &[("exaone4", "exaone4")] },
    TowerClass { model_type: "gemma3", texts: &[("gemma3_text", "gemma3_text")] },
    TowerClass { model_type: "gemma4", texts: &[("gemma4_text", "gemma4_text")] },
    TowerClass { model_type: "gemma4_unified", texts: &[("gemma4_unified_text", "gemma4_unified_text")] },
    TowerClass { model_type: "glm46v", texts: &[("glm4v_text", "glm4")] },
    TowerClass { model_type: "glm4v", texts: &[("glm4v_text", "glm4")] },
    TowerClass { model_type: "glm4v_moe", texts: &[("glm4v_moe_text", "glm4_moe")] },
    TowerClass { model_type: "glmga", texts: &[("glm4v_text", "glm4")] },
    TowerClass { model_type: "glm_ocr", texts: &[("glm_ocr_text", "glm4")] },
    TowerClass { model_type: "got_ocr2", texts: &[("qwen2", "qwen2")] },
    TowerClass { model_type: "hyperclovax_vision_v2", texts: &[("hyperclovax", "hyperclovax")] },
    TowerClass { model_type: "idefics2", texts: &[("mistral", "mistral"), ("llama", "llama")] },
    TowerClass { model_type: "idefics3", texts: &[("llama", "llama")] },
    TowerClass { model_type: "internvl", texts: &QWENS },
    TowerClass { model_type: "janus", texts: &[("llama", "llama")] },
    TowerClass { model_type: "lfm2_vl", texts: &[("lfm2", "lfm2")] },
    TowerClass { model_type: "lfm3_vl", texts: &[("lfm3", "lfm3")] },
    TowerClass { model_type: "lighton_ocr", texts: &[("qwen3", "qwen3")] },
    TowerClass { model_type: "llama4", texts: &[("llama4_text", "llama4_text")] },
    TowerClass { model_type: "llava", texts: &LLAVA },
    TowerClass { model_type: "llava_next", texts: &LLAVA },
    TowerClass { model_type: "llava_next_video", texts: &LLAVA },
    TowerClass { model_type: "llava_onevision", texts: &QWENS },
    TowerClass { model_type: "minicpm_ocr", texts: &[("qwen3_5_text", "qwen3_5_text")] },
    TowerClass { model_type: "minicpmv4_6", texts: &[("qwen3_5_text", "qwen3_5_text")] },
    TowerClass { model_type: "minicpmv4_7", texts: &[("qwen3_5_text", "qwen3_5_text")] },
    TowerClass { model_type: "mistral3", texts: &[("mistral", "mistral"), ("ministral3", "ministral3")] },
    TowerClass { model_type: "ovis2", texts: &[("qwen2", "qwen2")] },
    TowerClass { model_type: "paddleocr_vl", texts: &[("paddleocr_vl_text", "llama")] },
    TowerClass { model_type: "pp_chart2table", texts: &[("qwen2", "qwen2")] },
    TowerClass { model_type: "qwen2_vl", texts: &[("qwen2_vl_text", "qwen2"), ("qwen2_vl", "qwen2")] },
    TowerClass { model_type: "qwen2_5_vl", texts: &[("qwen2_5_vl_text", "qwen2"), ("qwen2_5_vl", "qwen2")] },
    TowerClass { model_type: "qwen3_vl", texts: &[("qwen3_vl_text", "qwen3")] },
    TowerClass { model_type: "qwen3_5", texts: &[("qwen3_5_text", "qwen3_5_text")] },
    TowerClass { model_type: "qwen3_5_moe", texts: &[("qwen3_5_moe_text", "qwen3_5_moe_text")] },
    TowerClass { model_type: "qwen3_vl_moe", texts: &[("qwen3_vl_moe_text", "qwen3_vl_moe_text")] },
    TowerClass { model_type: "smolvlm", texts: &[("llama", "llama")] },
    TowerClass { model_type: "video_llava", texts: &[("llama", "llama")] },
    TowerClass { model_type: "video_llama_3", texts: &[("qwen2", "qwen2")] },
    TowerClass { model_type: "vipllava", texts: &[("llama", "llama")] },
];

/// Keys of these classes that do not affect text.
const VISUAL: [&str; 59] = [
    "adapter_layer_norm_eps",
    "alignment_intermediate_size",
    "audio_config",
    "audio_token_id",
    "audio_token_offset",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "boi_token_id",
    "boi_token_index",
    "downsample_factor",
    "downsample_ratio",
    "downsample_mode",
    "drop_vision_last_layer",
    "eoi_token_id",
    "eoi_token_index",
    "high_res_vision_config",
    "image_end_id",
    "image_end_token_id",
    "image_grid_pinpoints",
    "image_seq_length",
    "image_size",
    "image_start_id",
    "image_start_token_id",
    "image_token_id",
    "image_token_index",
    "image_token_offset",
    "insert_layer_id",
    "merge_kernel_size",
    "merger_times",
    "mm_tokens_per_image",
    "newline_id",
    "patch_size",
    "multimodal_projector_bias",
    "perceiver_config",
    "projector_bias",
    "projector_hidden_act",
    "projector_hidden_size",
    "projector_layernorm_eps",
    "projector_use_layernorm",
    "scale_factor",
    "slice_end_id",
    "slice_start_id",
    "spatial_merge_size",
    "video_seq_length",
    "video_token_index",
    "video_end_token_id",
    "video_start_token_id",
    "video_token_id",
    "vision_aspect_ratio",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_start_token_id",
    "vision_token_id",
    "visual_indicator_token_ids",
    "vq_config",
    TEXT,
];

/// The classes, for messages.
pub fn names() -> String {
    CLASSES.map(|class| class.model_type).join(", ")
}

/// What is missing for models that are asked for often, by `model_type`.
pub fn missing(model_type: &str) -> Option<&'static str> {
    Some(match model_type {
        "aya_vision" | "cohere2_vision" => {
            "transformers' class leaves out the logit_scale of its text model, so its loss is another than the text model's"
        }
        "paligemma" => "its prompts attend to later tokens too, which is not supported yet",
        "gemma3n" | "gemma3n_text" => "embeddings of each layer are not supported yet",
        _ => return None,
    })
}

/// The config of the text model of a vision-language model.
pub struct TextConfig {
    pub map: Map<String, Value>,
    /// Precedes the names of its keys in messages.
    pub prefix: &'static str,
    /// Keys without an effect outside of it.
    pub inert: Vec<String>,
}

fn class(map: &Map<String, Value>) -> Option<&'static TowerClass> {
    let name = map.get("model_type")?.as_str()?;
    // Some text-only files of Gemma 3 have the name too.
    let plain = name == "gemma3" && map.get(TEXT).is_none_or(Value::is_null);
    CLASSES.iter().find(|class| class.model_type == name && !plain)
}

/// Whether this config is of a vision-language model.
pub fn is_tower(map: &Map<String, Value>) -> bool {
    class(map).is_some()
}

/// All keys as of one model: those of the text model take precedence.
pub fn flat(map: &Map<String, Value>) -> Map<String, Value> {
    let mut flat = map.clone();
    if let Some(text) = class(map).and_then(|_| map.get(TEXT)?.as_object()) {
        flat.extend(text.clone());
    }
    flat
}

/// Writes `dtype` where the text model has a name of its own for it.
pub fn retype(map: &mut Map<String, Value>, dtype: &Value) {
    if let (Some(_), Some(text)) = (class(map), map.get_mut(TEXT).and_then(Value::as_object_mut)) {
        for key in ["dtype", "torch_dtype"] {
            text.entry(key).and_modify(|value| *value = dtype.clone());
        }
    }
}

/// The text model of a vision-language config; None of other configs.
pub fn text(map: &Map<String, Value>) -> Result<Option<TextConfig>> {
    let Some(class) = class(map) else { return Ok(None) };
    let keys = ConfigKeys::new(map, "");
    if let Some(other) = keys.present("architectures").and_then(|list| list.get(0)?.as_str())
        && !other.ends_with("ForConditionalGeneration")
    {
        return Err(Error::input(format!(
            "architectures is {}: of vision-language models only ...ForConditionalGeneration is supported",
            quote(other)
        )));
    }
    keys.unquantized()?;
    ["bos_token_id", "eos_token_id", "pad_token_id"].into_iter().try_for_each(|key| keys.ids(key))?;
    keys.known(VISUAL);
    let outer = keys.flag("tie_word_embeddings")?;
    if class.model_type == "ovis2" {
        keys.known(["hidden_size", "vocab_size"]); // the text model's own are those that count
    }
    let (mut text, prefix, inert) = match map.get(TEXT).filter(|text| !text.is_null()) {
        Some(Value::Object(text)) => {
            // Some versions write the text model's keys twice.
            keys.known(text.keys());
            keys.finish()?;
            (text.clone(), "text_config.", keys.inert())
        }
        Some(other) => {
            return Err(Error::input(format!("text_config is {}; it must be an object", quote(other))));
        }
        None if class.model_type.starts_with("qwen2") => {
            let mut text = map.clone();
            VISUAL.iter().chain(&["architectures"]).for_each(|key| drop(text.shift_remove(*key)));
            (text, "", Vec::new())
        }
        None => return Err(Error::input("text_config is missing")),
    };
    let default = json!(class.texts[0].0);
    let name = text.get("model_type").filter(|name| !name.is_null()).unwrap_or(&default);
    let Some((name, family)) = class.texts.iter().find(|(known, _)| name == known) else {
        let known: Vec<String> = class.texts.iter().map(|(known, _)| format!("\"{known}\"")).collect();
        let what = format!("{prefix}model_type is {}; with a {} model it must be ", quote(name), class.model_type);
        return Err(Error::input(what + &known.join(" or ")));
    };
    let mut all = text_defaults(name);
    all.append(&mut text);
    all.insert("model_type".into(), json!(family));
    // transformers 5 reads the outer key, 4 the inner one; both write both. Of Qwen 2, either one is enough.
    if let Some(outer) = outer {
        let inner = all.get("tie_word_embeddings") == Some(&json!(true)) && class.model_type.starts_with("qwen2");
        all.insert("tie_word_embeddings".into(), json!(outer || inner));
    }
    if class.model_type.starts_with("glm") && class.model_type != "glm4v_moe" {
        glm(&mut all, name);
    }
    if *name == "paddleocr_vl_text" {
        // Its name for biases, which no published model has.
        ConfigKeys::new(&all, prefix).only("use_bias", &[json!(false)])?;
        all.shift_remove("use_bias");
    }
    let mut inert = inert;
    if ["qwen", "glm", "paddleocr", "minicpm"].iter().any(|family| class.model_type.starts_with(family)) {
        text_rope(&mut all);
    }
    if class.model_type.starts_with("qwen3_vl") {
        let unused = ["layer_types", "max_window_layers", "sliding_window", "use_sliding_window"];
        let found = unused.iter().filter(|key| all.shift_remove(**key).is_some_and(|value| !value.is_null()));
        inert.extend(found.map(|key| format!("{prefix}{key}")));
    }
    Ok(Some(TextConfig { map: all, prefix, inert }))
}

/// What GLM's text models have in other ways than GLM 4.
fn glm(text: &mut Map<String, Value>, name: &str) {
    let whole = |key: &str| text.get(key).and_then(Value::as_u64).unwrap_or(0);
    let head_dim = whole("hidden_size") / whole("num_attention_heads").max(1);
    // GLM-4.1V's class ignores the key.
    if name == "glm4v_text" || !text.contains_key("head_dim") {
        text.insert("head_dim".into(), json!(head_dim));
    }
    text.entry("partial_rotary_factor").or_insert(json!(1.0));
    text.insert("attention_bias".into(), json!(name == "glm4v_text"));
}

/// Replaces M-RoPE by the RoPE that it is for text.
pub(super) fn text_rope(text: &mut Map<String, Value>) {
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(rope) = text.get_mut(key).and_then(Value::as_object_mut) else { continue };
        ["mrope_section", "mrope_interleaved"].iter().for_each(|key| drop(rope.shift_remove(*key)));
        for kind in ["type", "rope_type"] {
            rope.entry(kind).and_modify(|kind| {
                if kind == "mrope" {
                    *kind = json!("default");
                }
            });
        }
    }
}

/// The defaults of [`defaults`], and the sizes of classes whose own configs say them.
fn text_defaults(model_type: &str) -> Map<String, Value> {
    match model_type {
        "llama" => sizes([32_000, 4096, 11_008, 32, 32, 2048]),
        "qwen2" => sizes([151_936, 4096, 22_016, 32, 32, 32_768]),
        "qwen3" => sizes([151_936, 4096, 22_016, 32, 32, 32_768]),
        "phi3" => sizes([32_064, 3072, 8192, 32, 32, 4096]),
        "gemma" => sizes([256_000, 3072, 24_576, 28, 16, 8192]),
        other => defaults(other),
    }
}

/// Vocabulary, width, hidden width of the feed-forward layer, layers, heads and positions.
fn sizes([vocab, dim, ff, layers, heads, max_len]: [usize; 6]) -> Map<String, Value> {
    object(json!({
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": max_len,
    }))
}

/// The defaults of transformers' config class `model_type` that its family here does not have.
pub fn defaults(model_type: &str) -> Map<String, Value> {
    let with = |mut map: Map<String, Value>, more: Value| {
        map.extend(object(more));
        map
    };
    match model_type {
        "gemma4_text" => sizes([262_144, 2304, 9216, 30, 8, 131_072]),
        "gemma4_unified_text" => sizes([262_144, 2304, 9216, 30, 8, 262_144]),
        "gemma3_text" => sizes([262_208, 2304, 9216, 26, 8, 131_072]),
        "mistral" => sizes([32_000, 4096, 14_336, 32, 32, 131_072]),
        "ministral3" => with(
            sizes([131_072, 4096, 14_336, 34, 32, 262_144]),
            json!({"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
        ),
        "qwen2_vl_text" | "qwen2_vl" | "qwen2_5_vl_text" | "qwen2_5_vl" => with(
            sizes([152_064, 8192, 29_568, 80, 64, 32_768]),
            json!({"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}),
        ),
        "qwen3_vl_moe_text" => sizes([151_936, 2048, 5632, 24, 16, 128_000]),
        "paddleocr_vl_text" => with(
            sizes([103_424, 1024, 3072, 18, 16, 131_072]),
            json!({"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": true}),
        ),
        "glm4v_text" => with(sizes([151_552, 4096, 13_696, 40, 32, 32_768]), json!({"rms_norm_eps": 1e-5})),
        "glm4v_moe_text" => with(
            sizes([151_424, 4096, 10_944, 46, 96, 65_536]),
            json!({"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "attention_bias": true, "n_routed_experts": 128}),
        ),
        // Published files leave it out.
        "falcon" => object(json!({"max_position_embeddings": 2048})),
        "exaone4" => sizes([102_400, 4096, 16_384, 32, 32, 2048]),
        "exaone_moe" => sizes([102_400, 4096, 16_384, 32, 32, 2048]),
        "mellum" => sizes([98_304, 2304, 7168, 28, 32, 131_072]),
        "vaultgemma" => sizes([256_000, 2304, 9216, 26, 8, 8192]),
        "glm_ocr_text" => {
            with(sizes([59_392, 1024, 4096, 16, 16, 131_072]), json!({"rms_norm_eps": 1e-5, "num_key_value_heads": 8}))
        }
        "qwen3_vl_text" => with(
            sizes([151_936, 4096, 22_016, 32, 32, 128_000]),
            json!({"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5}),
        ),
        "llama4_text" => sizes([202_048, 5120, 8192, 48, 40, 131_072]),
        "lfm2" => sizes([65_536, 2560, 12_288, 32, 32, 128_000]),
        "lfm3" => sizes([128_000, 2048, 7680, 24, 16, 128_000]),
        "lfm2_moe" => sizes([65_536, 2048, 7168, 32, 32, 128_000]),
        "olmo_hybrid" => sizes([100_352, 3840, 11_008, 32, 30, 65_536]),
        "qwen3_next" => sizes([151_936, 2048, 5632, 48, 16, 32_768]),
        "qwen3_5_text" => sizes([248_320, 4096, 12_288, 32, 16, 32_768]),
        "qwen3_5_moe_text" => {
            let mut map = sizes([248_320, 2048, 0, 40, 16, 32_768]);
            map.shift_remove("intermediate_size");
            map
        }
        _ => Map::new(),
    }
}
