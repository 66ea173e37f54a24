//! Configs as they are published: those of transformers 4 and 5 read the same, and vision-language configs hold the
//! text models of their families. Never reads a file.
use super::*;

/// As published with transformers 4, and as 5 writes the same, with the numbers of parameters that its classes have.
#[test]
fn published_configs_of_gpt_oss_and_deepseek_are_their_models() {
    let kinds: Vec<&str> = (0..24).map(|i| if i % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    let yarn = json!({
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": false,
    });
    let published = json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200_002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": kinds, "max_position_embeddings": 131_072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199_999,
        "quantization_config": {"modules_to_not_convert": ["model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5, "rope_scaling": yarn, "rope_theta": 150_000, "router_aux_loss_coef": 0.9,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201_088,
    });
    // What 5 leaves out has the same defaults.
    let brief = json!({
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_hidden_layers": 24, "num_local_experts": 32, "max_position_embeddings": 131_072, "vocab_size": 201_088,
        "router_aux_loss_coef": 0.9,
    });
    let gpt_oss = spec(published).unwrap();
    assert_eq!((gpt_oss.params(), spec(brief).unwrap()), (20_914_757_184, gpt_oss));

    let rope = json!({
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    });
    let mut published = object(json!({
        "model_type": "deepseek_v3", "aux_loss_alpha": 0.001, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18_432, "kv_lora_rank": 512, "max_position_embeddings": 163_840,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6, "rope_scaling": rope, "rope_theta": 10_000, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 129_280,
    }));
    let deepseek = spec(Value::Object(published.clone())).unwrap();
    // The bias of the choice is not a parameter there.
    assert_eq!(deepseek.params(), 671_026_404_352 + 58 * 256);
    let scale = deepseek.score_scale.unwrap() * 192f64.sqrt();
    assert!((scale - (0.1 * 40f64.ln() + 1.0).powi(2)).abs() < 1e-12, "{scale}");
    let mut rope = object(published.shift_remove("rope_scaling").unwrap());
    rope.extend([("rope_type".into(), rope["type"].clone()), ("rope_theta".into(), json!(10_000.0))]);
    published.insert("rope_parameters".into(), Value::Object(rope));
    assert_eq!(spec(Value::Object(published)).unwrap(), deepseek);
    assert_eq!(parse(config(&deepseek).as_bytes()).unwrap(), deepseek);
}

/// The text models of vision-language configs as found on model hubs, where keys are left out, and as transformers 4
/// and 5 write them, next to the same model as its plain class has it.
#[test]
fn text_models_of_vision_language_configs_are_those_of_their_families() {
    let vision = json!({"hidden_size": 1152, "model_type": "any", "num_hidden_layers": 27});
    let gemma = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
        "eos_token_id": [1, 106], "image_token_index": 262_144, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config": vision,
    });
    let same = json!({
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "max_position_embeddings": 131_072, "tie_word_embeddings": true, "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    });
    assert_eq!(spec(gemma.clone()).unwrap(), spec(same).unwrap());
    assert_eq!(spec(gemma.clone()).unwrap().params(), 3_880_263_168);
    let mistral = json!({
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32_768,
        "max_position_embeddings": 131_072, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": null, "vocab_size": 131_072,
    });
    let outer = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": false, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "text_config": mistral, "vision_config": vision, "vision_feature_layer": -1,
    });
    assert_eq!(spec(outer.clone()).unwrap(), spec(mistral.clone()).unwrap());
    let flat = json!({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653, "vision_token_id": 151_654, "image_token_id": 151_655,
        "video_token_id": 151_656, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11_008,
        "max_position_embeddings": 128_000, "max_window_layers": 70, "model_type": "qwen2_5_vl",
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "sliding_window": 32_768, "tie_word_embeddings": true, "use_sliding_window": false,
        "vision_config": vision, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151_936,
    });
    let mut qwen = object(flat.clone());
    qwen.insert("model_type".into(), json!("qwen2"));
    ["rope_scaling", "vision_config"].iter().for_each(|key| drop(qwen.shift_remove(*key)));
    assert_eq!(spec(flat.clone()).unwrap(), spec(Value::Object(qwen.clone())).unwrap());
    // As other versions save the same: the text model's keys twice, or once, and one of two keys for a tied head.
    let mut twice = object(flat);
    let mut within = object(twice["rope_scaling"].clone());
    within.insert("rope_type".into(), json!("default"));
    let text = object(json!({"model_type": "qwen2_5_vl_text", "rope_scaling": within}));
    twice.insert("text_config".into(), Value::Object(qwen.clone().into_iter().chain(text).collect()));
    twice.insert("tie_word_embeddings".into(), json!(false));
    twice.shift_remove("rope_scaling");
    assert_eq!(spec(Value::Object(twice)).unwrap(), spec(Value::Object(qwen)).unwrap());
    let text = json!({
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
        "max_position_embeddings": 262_144, "model_type": "qwen3_vl_text", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5_000_000,
        "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "tie_word_embeddings": true, "vocab_size": 151_936,
    });
    let outer = json!({
        "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151_655, "model_type": "qwen3_vl",
        "text_config": text, "tie_word_embeddings": true, "video_token_id": 151_656, "vision_config": vision,
    });
    let mut plain = object(text);
    plain.insert("model_type".into(), json!("qwen3"));
    plain.shift_remove("rope_scaling");
    assert_eq!(spec(outer.clone()).unwrap(), spec(Value::Object(plain)).unwrap());
    for (base, key, value, said) in [
        (&outer, "text_config", json!(3), "text_config is 3"),
        (&outer, "text_config", Value::Null, "text_config is missing"),
        (&outer, "text_config", json!({"model_type": "qwen2"}), "must be \"qwen3_vl_text\""),
        (&outer, "text_config", json!({"hidden_act": "gelu"}), "text_config.hidden_act is \"gelu\""),
        (&outer, "text_config", json!({"rope_scaling": {"rope_type": "x"}}), "text_config.rope_scaling.rope_type is"),
        (&outer, "quantization_config", json!({"bits": 4}), "quantization_config"),
        (&gemma, "architectures", json!(["Gemma3ForSequenceClassification"]), "only ...ForConditionalGeneration"),
        (&outer, "model_type", json!("qwen3_5"), "must be \"qwen3_5_text\""),
        (&outer, "model_type", json!("qwen3_vl_moe"), "it must be \"qwen3_vl_moe_text\""),
        (&outer, "model_type", json!("paligemma"), "its prompts attend to later tokens too"),
        (&outer, "model_type", json!("gemma4"), "must be \"gemma4_text\""),
        (&outer, "model_type", json!("florence2"), "\"florence2\"; supported: llama,"),
    ] {
        let mut map = object(base.clone());
        map.insert(key.into(), value);
        let error = spec(Value::Object(map)).expect_err(said);
        assert!(error.to_string().contains(said) && error.exit_status() == 2, "{said}: {error}");
    }
}

/// Files as found on model hubs, as written by transformers 4 and 5.
#[test]
fn files_of_transformers_4_and_5_read_the_same() {
    let sizes = json!({
        "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
        "num_hidden_layers": 8, "vocab_size": 97, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    });
    let with = |more: Value| {
        let mut map = object(sizes.clone());
        map.extend(object(more));
        spec(Value::Object(map)).unwrap()
    };
    let types = |f: &dyn Fn(usize) -> bool| -> Vec<&str> {
        (0..8).map(|i| if f(i) { "sliding_attention" } else { "full_attention" }).collect()
    };
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    });
    let with_theta = |scaling: &Value, theta: f64| {
        let mut map = object(scaling.clone());
        map.insert("rope_theta".into(), json!(theta));
        Value::Object(map)
    };
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
    let yarn5 = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6});
    let pairs = [
        (
            json!({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": llama3, "torch_dtype": "bfloat16",
                   "attention_bias": false, "mlp_bias": false, "pretraining_tp": 1, "use_cache": true}),
            json!({"model_type": "llama", "rope_parameters": with_theta(&llama3, 5e5), "dtype": "bfloat16"}),
        ),
        (
            json!({"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 12, "torch_dtype": "bfloat16"}),
            json!({"model_type": "mistral", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
                   "sliding_window": 12, "dtype": "bfloat16"}),
        ),
        (
            json!({"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": yarn, "use_sliding_window": true,
                   "sliding_window": 12, "max_window_layers": 5, "use_mrope": false}),
            json!({"model_type": "qwen2", "rope_parameters": yarn5, "use_sliding_window": true, "sliding_window": 12,
                   "max_window_layers": 5, "layer_types": types(&|i| i >= 5)}),
        ),
        (
            json!({"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": null, "attention_bias": false,
                   "use_sliding_window": false, "sliding_window": null, "max_window_layers": 28}),
            json!({"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                   "attention_bias": false, "use_sliding_window": false, "sliding_window": null,
                   "layer_types": types(&|_| false)}),
        ),
        (
            json!({"model_type": "gemma2", "rope_theta": 1e4, "sliding_window": 12, "query_pre_attn_scalar": 24,
                   "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
                   "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
            json!({"model_type": "gemma2", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
                   "sliding_window": 12, "query_pre_attn_scalar": 24, "layer_types": types(&|i| i % 2 == 0)}),
        ),
        (
            json!({"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 12,
                   "sliding_window_pattern": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                   "query_pre_attn_scalar": 256, "final_logit_softcapping": null, "attn_logit_softcapping": null}),
            json!({"model_type": "gemma3_text", "sliding_window": 12, "_sliding_window_pattern": 6,
                   "layer_types": types(&|i| i != 5), "use_bidirectional_attention": false,
                   "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                       "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        ),
    ];
    for (four, five) in pairs {
        let (four, five) = (with(four), with(five));
        assert_eq!(four, five);
    }
    // And the values are those in the files, not only the same.
    let gemma = with(json!({"model_type": "gemma3_text", "sliding_window": 12, "sliding_window_pattern": 3}));
    assert_eq!(gemma.windowed, [true, true, false, true, true, false, true, true]);
    assert_eq!((&gemma.rope, &gemma.local_rope), (&Some(Rotary::new(1e6)), &Some(Rotary::new(1e4))));
    assert!(gemma.tied && gemma.uses_local_rope(0) && !gemma.uses_local_rope(2));
    let gemma2 = with(json!({"model_type": "gemma2"}));
    assert_eq!((gemma2.score_cap, gemma2.logit_cap, gemma2.query_scalar), (50.0, 30.0, Some(256.0)));
    assert_eq!((gemma2.window_of(0), gemma2.window_of(1)), (4096, 0));
    let uncapped = with(json!({"model_type": "gemma2", "attn_logit_softcapping": null, "sliding_window": null}));
    assert_eq!((uncapped.score_cap, uncapped.window, uncapped.windowed.len()), (0.0, 0, 0));
    assert_eq!(with(json!({"model_type": "mistral"})).window_of(7), 4096);
}

/// As published with transformers 4 (Mixtral 8x7B, Qwen1.5-MoE-A2.7B, Qwen3-30B-A3B, OLMoE-1B-7B, but for sizes), and
/// as transformers 5 writes them.
#[test]
fn mixtures_of_transformers_4_and_5_read_the_same() {
    let full = ["full_attention"; 6];
    let experts = Experts { count: 6, top_k: 3, ff: 14, aux_coef: 0.02, ..Experts::default() };
    let cases = [
        (
            json!({"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3, "rope_theta": 1e6,
                   "sliding_window": null, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.02,
                   "output_router_logits": false, "attention_dropout": 0.0, "torch_dtype": "bfloat16",
                   "transformers_version": "4.36.0.dev0"}),
            json!({"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": null,
                   "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_window": null,
                   "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0,
                   "output_router_logits": false, "dtype": "bfloat16", "transformers_version": "5.23.0"}),
            Experts { ff: 44, normalize: true, ..experts.clone() },
        ),
        (
            json!({"model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14,
                   "shared_expert_intermediate_size": 10, "norm_topk_prob": false, "decoder_sparse_step": 1,
                   "router_aux_loss_coef": 0.02, "output_router_logits": false, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
                   "use_sliding_window": false, "sliding_window": 32768, "max_window_layers": 21,
                   "torch_dtype": "bfloat16"}),
            json!({"model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14,
                   "shared_expert_intermediate_size": 10, "norm_topk_prob": false, "decoder_sparse_step": 1,
                   "mlp_only_layers": [], "qkv_bias": true, "router_aux_loss_coef": 0.02, "output_router_logits": false,
                   "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rms_norm_eps": 1e-6,
                   "use_sliding_window": false, "sliding_window": 0, "max_window_layers": 21, "layer_types": full,
                   "dtype": "bfloat16"}),
            Experts { shared_ff: 10, ..experts.clone() },
        ),
        (
            json!({"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14,
                   "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16,
                   "router_aux_loss_coef": 0.02, "output_router_logits": false, "rope_theta": 1e6, "rope_scaling": null,
                   "attention_bias": false, "use_sliding_window": false, "sliding_window": null,
                   "max_window_layers": 48, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}),
            json!({"model_type": "qwen3_moe", "num_local_experts": 6, "num_experts_per_tok": 3,
                   "moe_intermediate_size": 14, "norm_topk_prob": true, "decoder_sparse_step": 1,
                   "mlp_only_layers": [], "head_dim": 16, "router_aux_loss_coef": 0.02,
                   "output_router_logits": false, "attention_bias": false,
                   "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "use_sliding_window": false,
                   "sliding_window": null, "rms_norm_eps": 1e-6, "dtype": "bfloat16"}),
            Experts { normalize: true, ..experts.clone() },
        ),
        (
            json!({"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": false,
                   "clip_qkv": null, "router_aux_loss_coef": 0.02, "output_router_logits": false, "rope_theta": 1e4,
                   "rope_scaling": null, "attention_bias": false, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}),
            json!({"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": false,
                   "clip_qkv": null, "router_aux_loss_coef": 0.02, "output_router_logits": false,
                   "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "attention_bias": false,
                   "rms_norm_eps": 1e-5, "dtype": "bfloat16"}),
            Experts { ff: 44, ..experts.clone() },
        ),
    ];
    for (four, five, experts) in cases {
        let (four, five) = (sparse(four).unwrap(), sparse(five).unwrap());
        assert_eq!(four, five);
        assert_eq!(four.experts, Some(experts), "{:?}", four.arch);
    }
}
