"""Trains tiny random models of every family with transformers and with flatshard, and compares losses, gradient norms and exported weights.

Needs: pip install torch transformers peft safetensors, and `cargo build --release` (or --bin DIR).
Run:   python3 experiments/peers/family_compare.py [--families olmo3 phi3 ... | --towers [llava ...]] [--lora] [--bin DIR]
Each model is saved by transformers; both train four steps of AdamW in fp32 on the same rows, flatshard on five meshes: one rank, FSDP with accumulation
and recomputation, DDP, tp 2, a ring of 2. Its export is loaded with `AutoModelForCausalLM`, whose logits must be those of the model that PyTorch
trained, and so must be the greedy tokens of --generate. With --lora: adapters of all linear layers instead, which PEFT loads before training (those of a step
at a rate of almost 0) and after it. With --towers: vision-language models, trained on text alone. Fails above 2e-4.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from compare import RELEASE

BOUND = 2e-4
STEPS, ROWS, LENGTH, LR = 4, 4, 24, 1e-3
TINY = dict(vocab_size=64, hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
            max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
WIDE = dict(head_dim=16)
PART = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
LONG = dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 4.0, 8.0],
            original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, truncate=False, original_max_position_embeddings=16)
LATENT = dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
MULTIPLIERS = dict(embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0)
SCORED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1)
DELTA = dict(**WIDE, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, rope_parameters=PART)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
CONV = dict(layer_types=["conv", "full_attention"] * 2)
LFM3 = dict(**WIDE, sliding_window=9, layer_types=["conv", "sliding_attention", "full_attention", "conv"])
SPARSE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20)
MAMBA = dict(mamba_n_heads=6, mamba_expand=2, mamba_d_state=8, mamba_chunk_size=16, layer_types=["linear_attention", "full_attention"] * 2)
NEMOTRON_H = dict(**WIDE, mamba_num_heads=6, mamba_head_dim=8, n_groups=2, ssm_state_size=8, chunk_size=16)
GEMMA4 = dict(**WIDE, global_head_dim=24, sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2)
FAMILIES = {
    "llama": {}, "mistral": dict(sliding_window=9), "qwen2": {}, "qwen3": WIDE, "gemma2": WIDE, "gemma3_text": WIDE,
    "gemma4_text": dict(**GEMMA4, num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, use_double_wide_mlp=True),
    "gemma4_text keys": dict(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0, final_logit_softcapping=20.0),
    "gemma4_text experts": dict(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0, final_logit_softcapping=20.0,
                                enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "smollm3": dict(no_rope_layer_interval=2), "olmo2": {}, "olmo3": dict(sliding_window=9),
    "granite": dict(embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0),
    "seed_oss": dict(**WIDE, attention_dropout=0.0, residual_dropout=0.0, attention_out_bias=True), "hunyuan_v1_dense": WIDE,
    "exaone4": dict(sliding_window=9), "phi3": dict(sliding_window=9), "phi3 longrope": dict(rope_parameters=LONG, original_max_position_embeddings=16),
    "glm": dict(**WIDE, rope_parameters=PART), "glm4": dict(**WIDE, rope_parameters=PART), "ernie4_5": dict(**WIDE, use_bias=True),
    "cohere2": dict(sliding_window=9),
    "phimoe": dict(num_local_experts=4, router_jitter_noise=0.3, attention_bias=True, lm_head_bias=True, sliding_window=9),
    "llama4_text": dict(**WIDE, intermediate_size_mlp=64, num_local_experts=4, interleave_moe_layer_step=2, no_rope_layer_interval=3, attention_chunk_size=32,
                        floor_scale=8, attn_scale=0.5),
    "cohere2_moe": dict(**WIDE, sliding_window=9, first_k_dense_replace=1, num_experts=4, num_experts_per_tok=2, num_shared_experts=1), "starcoder2": dict(sliding_window=9),
    "gpt_oss": dict(**WIDE, sliding_window=9, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.5, rope_parameters=YARN),
    "deepseek_v3": dict(**LATENT, **SCORED, n_group=2, topk_group=1, first_k_dense_replace=1, rope_parameters=YARN | dict(mscale=0.5, mscale_all_dim=2.0)),
    "deepseek_v2": dict(**LATENT | dict(q_lora_rank=None), **SCORED, first_k_dense_replace=1), "glm4_moe_lite": dict(**LATENT | dict(v_head_dim=16), **SCORED),
    "gemma": WIDE, "cohere": dict(logit_scale=0.25), "helium": dict(head_dim=12), "stablelm": dict(rope_parameters=PART), "stablelm parallel": dict(rope_parameters=PART, use_parallel_residual=True),
    "cwm": dict(**WIDE, sliding_window=9, bos_token_id=1), "internlm3": WIDE,
    "hyperclovax": dict(embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=0.5),
    "granitemoehybrid": dict(mamba_n_heads=4, mamba_expand=2, layer_types=["full_attention"] * 4, position_embedding_type="rope", num_local_experts=0,
                             shared_intermediate_size=56, **MULTIPLIERS),
    "granitemoehybrid mamba": dict(**MAMBA, mamba_n_groups=2, num_local_experts=0, shared_intermediate_size=56, **MULTIPLIERS),
    "granitemoehybrid experts": dict(**MAMBA, mamba_n_groups=1, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24, **MULTIPLIERS),
    "nemotron_h": dict(**NEMOTRON_H, num_hidden_layers=5, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]),
    "nemotron_h experts": dict(**NEMOTRON_H, num_hidden_layers=6, layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
                               n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=24, n_group=2, topk_group=1),
    "falcon_h1": dict(**WIDE, mamba_n_heads=6, mamba_d_ssm=48, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=16, embedding_multiplier=3.3,
                      lm_head_multiplier=0.6, key_multiplier=1.7, attention_in_multiplier=1.1, attention_out_multiplier=0.9, ssm_in_multiplier=1.25,
                      ssm_out_multiplier=0.7, ssm_multipliers=[0.7, 0.6, 0.9, 1.3, 0.8], mlp_multipliers=[0.6, 0.9]),
    "bamba": dict(**WIDE, mamba_n_heads=6, mamba_expand=2, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=16, attn_layer_indices=[1, 3]),
    "olmo clipped": dict(clip_qkv=0.4), "olmoe clipped": dict(clip_qkv=0.8, num_experts=4, num_experts_per_tok=2), "phi normed": dict(rope_parameters=PART, qk_layernorm=True),
    "stablelm normed": dict(rope_parameters=PART, qk_layernorm=True), "cohere normed": dict(logit_scale=0.25, use_qk_norm=True),
    "persimmon": dict(rope_parameters=PART), "opt": dict(ffn_dim=80, dropout=0.0), "biogpt": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "nanochat": {}, "granite_swa": dict(sliding_window=9, layer_rope_theta=[10000.0, 500.0, 500.0, 0], **MULTIPLIERS), "gptj": dict(rotary_dim=6), "codegen": dict(rotary_dim=6),
    "gpt_bigcode": NO_DROPOUT, "gpt_bigcode heads": dict(**NO_DROPOUT, multi_query=False), "gpt_neo": dict(window_size=9, attention_types=[[["global", "local"], 2]]), "phi": dict(rope_parameters=PART), "gpt_neox": dict(rope_parameters=PART), "gpt_neox serial": dict(rope_parameters=PART, use_parallel_residual=False, hidden_act="gelu_new"),
    "arcee": {}, "jais2": {}, "nemotron": dict(rope_parameters=PART), "apertus": WIDE, "olmo": {}, "youtu": LATENT | dict(head_dim=4), "minicpm3": LATENT | dict(head_dim=4, scale_emb=3, scale_depth=1.2, dim_model_base=16),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2, **MULTIPLIERS),
    "granitemoeshared": dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24, **MULTIPLIERS),
    "ernie4_5_moe": dict(**WIDE, moe_num_experts=4, moe_k=2, moe_intermediate_size=32), "hunyuan_v1_moe": dict(**WIDE, num_experts=4, moe_topk=2),
    "minimax_m2": dict(**WIDE, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PART), "solar_open": dict(**WIDE, **SCORED),
    "glm4_moe": dict(**WIDE, **SCORED), "dots1": dict(**WIDE, **SCORED, first_k_dense_replace=1, sliding_window=9, max_window_layers=2),
    "lfm2": dict(**CONV, tie_word_embeddings=True), "lfm2_moe": dict(**CONV, num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "lfm3": dict(**LFM3, attention_bias=True),
    # transformers saves its three convolutions in equal parts, whatever they are.
    "olmo_hybrid": dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=12, linear_value_head_dim=12),
    "exaone_moe": dict(**WIDE, sliding_window=9, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), "vaultgemma": dict(**WIDE, sliding_window=9),
    "falcon": {}, "falcon new": dict(new_decoder_architecture=True, num_kv_heads=2, bias=True), "falcon serial": dict(multi_query=False, parallel_attn=False, bias=True),
    "granitemoe_swa": dict(**MULTIPLIERS, sliding_window=9, layer_rope_theta=[100.0, 20.0, 20.0, 0], num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24),
    "hy_v3": dict(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24), "axk1": dict(**LATENT, **SCORED, n_group=2, topk_group=1),
    "sarvam_mla": dict(**LATENT | dict(q_lora_rank=None), **SCORED), "apertus1p5_text": WIDE, "exaone": {},
    "sarvam_moe": dict(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_shared_experts=1, use_qkv_bias=True),
    "gemma4_unified_text": dict(**GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True, final_logit_softcapping=20.0),
    "flex_olmo": dict(num_experts=4, num_experts_per_tok=2), "afmoe": dict(**WIDE, sliding_window=9, global_attn_every_n_layers=2, num_dense_layers=1, num_experts=4,
                                                                            num_experts_per_tok=2, moe_intermediate_size=24, num_shared_experts=1, mup_enabled=True),
    "mellum": dict(**WIDE, sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "qwen3_next": dict(**DELTA, **SPARSE), "qwen3_5_text": DELTA, "qwen3_5_moe_text": dict(**DELTA, **SPARSE),
}
SIGHT = dict(hidden_size=8, intermediate_size=6, num_attention_heads=2, num_hidden_layers=1, image_size=4, patch_size=2)
CLIP, SIGLIP = dict(model_type="clip_vision_model", projection_dim=8, **SIGHT), dict(model_type="siglip_vision_model", **SIGHT)
QWEN = dict(depth=1, hidden_size=8, intermediate_size=6, num_heads=2, patch_size=2, out_hidden_size=48)
MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 2, 2]))
GLM = dict(rope_parameters=PART | dict(mrope_section=[1, 1, 1]))
# The text model's keys, and the outer ones.
TOWERS = {
    "llava": (dict(model_type="llama"), dict(vision_config=CLIP, image_token_index=63)),
    "llava_next": (dict(model_type="mistral"), dict(vision_config=CLIP, image_token_index=63)),
    "llava_onevision": (dict(model_type="qwen2"), dict(vision_config=SIGLIP, image_token_index=63)),
    "vipllava": (dict(model_type="llama"), dict(vision_config=CLIP, image_token_index=63)),
    "internvl": (dict(model_type="qwen2"), dict(vision_config=SIGHT | dict(image_size=[4, 4], patch_size=[2, 2]), image_token_id=63)),
    "idefics2": (dict(model_type="mistral"), dict(vision_config=SIGHT, image_token_id=63, perceiver_config=dict(
        resampler_n_latents=2, resampler_depth=1, resampler_n_heads=2, resampler_head_dim=4, num_key_value_heads=2, hidden_size=48, rms_norm_eps=1e-6))),
    "idefics3": (dict(model_type="llama"), dict(vision_config=SIGHT, image_token_id=63)),
    "smolvlm": (dict(model_type="llama"), dict(vision_config=SIGHT, image_token_id=63)),
    "got_ocr2": (dict(model_type="qwen2"), dict(image_token_index=63, vision_config=dict(
        hidden_size=8, output_channels=8, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, mlp_dim=8, window_size=2,
        global_attn_indexes=[0]))),
    "lighton_ocr": (dict(model_type="qwen3", **WIDE), dict(vision_config=dict(model_type="pixtral", head_dim=4, **SIGHT), image_token_id=63)),
    "ovis2": (dict(model_type="qwen2"), dict(vision_config=SIGHT, image_token_id=63, vocab_size=64, hidden_size=48, visual_indicator_token_ids=[62])),
    "gemma4": (GEMMA4 | dict(num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, pad_token_id=60), dict(
        audio_config=None, image_token_id=63, video_token_id=62, audio_token_id=61, vision_config=dict(
            hidden_size=8, intermediate_size=6, num_attention_heads=2, num_key_value_heads=2, head_dim=4, num_hidden_layers=1, patch_size=2,
            position_embedding_size=4, pooling_kernel_size=1))),
    "glm4v": (GLM, dict(vision_config=QWEN | dict(image_size=4), image_token_id=63)),
    "glm_ocr": (GLM | WIDE | dict(rope_parameters=PART | dict(mrope_section=[2, 1, 1])), dict(vision_config=QWEN | dict(image_size=4), image_token_id=63)),
    "paddleocr_vl": (MROPE | dict(head_dim=12), dict(vision_config=SIGHT, image_token_id=63)),
    "lfm2_vl": (dict(model_type="lfm2", **CONV), dict(image_token_id=63, projector_hidden_size=16, vision_config=dict(
        model_type="siglip2_vision_model", num_patches=4, **SIGHT))),
    "lfm3_vl": (dict(model_type="lfm3", **LFM3), dict(image_token_id=63, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60,
                                                      projector_hidden_size=16, vision_config=SIGHT | dict(num_key_value_heads=1, temporal_patch_size=1))),
    "exaone4_5": (dict(model_type="exaone4", sliding_window=9), dict(image_token_id=63, video_token_id=62, vision_config=QWEN | dict(
        window_size=4, fullatt_block_indexes=[0], num_key_value_heads=1))),
    "deepseek_vl": (dict(model_type="llama"), dict(vision_config=SIGLIP, image_token_id=63)),
    "janus": (dict(model_type="llama"), dict(image_token_id=63)),
    "video_llava": (dict(model_type="llama"), dict(vision_config=CLIP, image_token_index=63, video_token_index=62)),
    "pp_chart2table": (dict(model_type="qwen2"), dict(image_token_index=63, vision_config=dict(
        hidden_size=8, output_channels=8, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, mlp_dim=8, window_size=2,
        global_attn_indexes=[0]))),
    "hyperclovax_vision_v2": (dict(model_type="hyperclovax", embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=0.5), dict(
        image_token_id=63, video_token_id=62, vision_config=dict(model_type="qwen2_5_vl_vision", window_size=4, fullatt_block_indexes=[0], **QWEN))),
    "minicpmv4_6": (DELTA, dict(vision_config=SIGHT | dict(image_size=4), image_token_id=63, video_token_id=62)),
    "glmga": (GLM, dict(vision_config=QWEN | dict(image_size=4), image_token_id=63)),
    "gemma4_unified": (GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1, pad_token_id=60), dict(
        image_token_id=63, video_token_id=62, audio_token_id=61, audio_config=dict(audio_embed_dim=8, output_proj_dims=8),
        vision_config=dict(patch_size=2, pooling_kernel_size=1, mm_embed_dim=8, mm_posemb_size=4, output_proj_dims=8))),
    "minicpm_ocr": (DELTA, dict(vision_config=SIGHT | dict(insert_layer_id=0), insert_layer_id=0, image_token_id=63, video_token_id=62)),
    "minicpmv4_7": (DELTA, dict(vision_config=SIGHT | dict(insert_layer_id=0), insert_layer_id=0, image_token_id=63, video_token_id=62)),
    "deepseek_vl_hybrid": (dict(model_type="llama"), dict(vision_config=SIGLIP, image_token_id=63, high_res_vision_config=dict(
        hidden_size=8, output_channels=8, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, mlp_dim=8, window_size=2,
        global_attn_indexes=[0]))),
    "apertus1p5": (WIDE, dict(image_token_id=63, audio_token_id=62, image_token_offset=20, audio_token_offset=28, vision_config=dict(
        codebook_size=8, embed_dim=8, latent_channels=8, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1), audio_config=dict(
            model_type="wavtokenizer_encoder", num_filters=4, upsampling_ratios=[2, 2], num_lstm_layers=1, hidden_size=8, codebook_size=8, codebook_dim=8,
            decoder_hidden_size=8, decoder_intermediate_size=8, decoder_num_layers=1, decoder_attention_num_groups=4))),
    "glm46v": (GLM, dict(vision_config=QWEN | dict(image_size=4), image_token_id=63)),
    "glm4v_moe": (GLM | SCORED, dict(vision_config=QWEN | dict(image_size=4), image_token_id=63)),
    "video_llama_3": (dict(model_type="qwen2"), dict(vision_config=SIGHT, image_token_id=63, video_token_id=62)),
    "llava_next_video": (dict(model_type="llama"), dict(vision_config=CLIP, image_token_index=63, video_token_index=62)),
    "qwen3_vl_moe": (MROPE | dict(head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
                     dict(vision_config=QWEN | dict(num_position_embeddings=4, deepstack_visual_indexes=[0]), image_token_id=63, video_token_id=62,
                          vision_start_token_id=61, vision_end_token_id=60)),
}
# Of mixers: PEFT adapts experts in tensors of several, and not those of dense layers next to them (docs/experts.md).
LOW_RANK = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
TARGETS = {
    "deepseek_v3": ["q_a_proj", "q_b_proj", *LOW_RANK], "glm4_moe_lite": ["q_a_proj", "q_b_proj", *LOW_RANK], "axk1": ["q_a_proj", "q_b_proj", *LOW_RANK], "sarvam_mla": ["q_proj", *LOW_RANK], "deepseek_v2": ["q_proj", *LOW_RANK],
    "youtu": ["q_a_proj", "q_b_proj", *LOW_RANK], "minicpm3": ["q_a_proj", "q_b_proj", *LOW_RANK],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_5_moe_text": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"],
    "lfm2_moe": ["q_proj", "k_proj", "v_proj", "in_proj", "out_proj"], "falcon_h1": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"], "nemotron_h experts": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj"],
    "granitemoehybrid experts": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"],
    "llama4_text": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "afmoe": ["q_proj", "k_proj", "v_proj", "o_proj"], "olmoe clipped": ["q_proj", "k_proj", "v_proj", "o_proj"],
} | dict.fromkeys(["phimoe", "cohere2_moe", "sarvam_moe", "granitemoe_swa", "hy_v3", "flex_olmo", "exaone_moe", "mellum", "glm4_moe", "dots1", "granitemoe", "granitemoeshared", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "solar_open"],
                  ["q_proj", "k_proj", "v_proj", "o_proj"])
EXPERTS = {"phimoe", "llama4_text", "cohere2_moe", "olmoe clipped", "sarvam_mla", "sarvam_moe", "granitemoe_swa", "hy_v3", "axk1", "flex_olmo", "afmoe", "gemma4_text experts", "granitemoehybrid experts", "nemotron_h experts", "lfm2_moe", "exaone_moe", "mellum", "glm4v_moe", "granitemoe", "granitemoeshared", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "solar_open", "gpt_oss", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "glm4_moe", "dots1", "qwen3_next", "qwen3_5_moe_text"}
MESHES = {
    "one rank": ["--nproc-per-node", 1, "--batch-size", 4],
    "fsdp, accumulation, recomputation": ["--nproc-per-node", 2, "--batch-size", 1, "--grad-accum", 2, "--activation-checkpoint"],
    "ddp": ["--nproc-per-node", 2, "--batch-size", 2, "--sharding", "NO_SHARD"],
    "tp 2": ["--nproc-per-node", 2, "--batch-size", 4, "--tp-size", 2],
    "ring 2": ["--nproc-per-node", 2, "--batch-size", 4, "--ring-attn-size", 2],
}
# In training, its routers draw experts that are nearly as good as the best at random; without, they are those of evaluation.
NOISY = "phimoe"
# What a family's layers cannot do yet, which must be refused by name.
REFUSED = {"tp 2": ["granitemoehybrid experts"], "ring 2": ["falcon_h1", "bamba", "nemotron_h", "nemotron_h experts", "granitemoehybrid mamba", "granitemoehybrid experts","qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm3", "lfm2_moe", "lfm2_vl", "lfm3_vl", "minicpmv4_6", "minicpm_ocr", "minicpmv4_7"]}

EP = {"ep 2": ["--nproc-per-node", 2, "--batch-size", 2, "--ep-size", 2]}


def auto(name):
    return AutoModelForImageTextToText if name in TOWERS else AutoModelForCausalLM


def loaded(name, directory, adapter=None):
    """The model, with an adapter on it, as transformers and PEFT load it."""
    base = directory if adapter is None else adapter[0]
    model, info = auto(name).from_pretrained(base, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    return model if adapter is None else PeftModel.from_pretrained(model, directory, is_trainable=True)


def trained(model, rows):
    """Losses, norms and the model after training in PyTorch."""
    model.train(NOISY != model.config.model_type)
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        batch = torch.tensor(rows[step * ROWS:(step + 1) * ROWS])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(learns, 1e9).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.eval()


def run(binary, *flags):
    done = subprocess.run([str(binary), *map(str, flags)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout


def ours(binary, directory, data, out, mesh, steps=STEPS, lr=LR, save="--save-hf"):
    metrics = out.with_suffix(".jsonl")
    flags = ["--pretrain", directory, "--dataset", data, "--no-shuffle", "--max-steps", steps, "--max-len", LENGTH, "--lr", lr, "--lr-scheduler", "constant",
             "--warmup-steps", 0, "--weight-decay", 0, "--betas", 0.9, 0.95, "--eps", 1e-8, "--grad-clip", 0, "--device", "cpu", "--precision", "fp32",
             "--dropout", 0, save, out, "--metrics-path", metrics, "--log-every", 1, "--no-sample", *mesh]
    run(binary, *flags)
    steps = [e for e in map(json.loads, metrics.read_text().splitlines()) if e["event"] == "step"]
    return [e["loss"] for e in steps], [e["grad_norm"] for e in steps]


def worst(a, b):
    return max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(a, b, strict=True))


def as_published(source, kinds):
    """transformers renames norms of all layers when it saves OLMo hybrid; published files have those of attention as the class has them."""
    path = source / "model.safetensors"
    attends = tuple(f"model.layers.{i}." for i, kind in enumerate(kinds) if kind == "full_attention")
    tensors = {name.replace("feedforward_layer_norm", "post_attention_layernorm") if name.startswith(attends) else name: tensor
               for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def check(name, binary, folder, lora):
    torch.manual_seed(5)
    keys = TINY | FAMILIES[name] if name in FAMILIES else dict(text_config=TINY | TOWERS[name][0], **TOWERS[name][1])
    model = auto(name).from_config(AutoConfig.for_model(name.split()[0], **keys)).float()
    for parameter in model.parameters():  # norms and biases too
        parameter.data += 0.05 * torch.randn_like(parameter)
    for name_of, buffer in model.named_buffers():
        if name_of.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            buffer += 0.05 * torch.randn_like(buffer)
    source = folder / "source"
    model.save_pretrained(source)
    if name == "olmo_hybrid":
        as_published(source, model.config.layer_types)
    rows = torch.randint(TINY["vocab_size"] - 4, (STEPS * ROWS, LENGTH)).tolist()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(dict(input_ids=row, labels=row)) + "\n" for row in rows))
    # A ring's adapters see the same batch, but PEFT's names for them are those of one rank anyway.
    tuning = ["--lora-rank", 4, "--lora-target-modules", *TARGETS.get(name, ["all-linear"])] if lora else []
    adapter, save = ((source,), "--save-adapter") if lora else (None, "--save-hf")
    if lora:
        ours(binary, source, data, folder / "start", [*MESHES["one rank"], *tuning], 1, 1e-30, save)
    losses, norms, reference = trained(loaded(name, folder / "start" if lora else source, adapter), rows)
    prompt = torch.tensor(rows[:2])
    with torch.no_grad():
        logits = reference(input_ids=prompt).logits
    greedy = reference.generate(input_ids=prompt[:1, :12], attention_mask=torch.ones(1, 12), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    failed = False
    for mesh, flags in (MESHES | (EP if name in EXPERTS | {"qwen3_vl_moe"} else {})).items():
        out = folder / mesh.replace(" ", "_").replace(",", "")
        try:
            if name in REFUSED.get(mesh, []):
                try:
                    ours(binary, source, data, out, [*flags, *tuning], save=save)
                    raise AssertionError("was not refused")
                except RuntimeError as error:
                    assert any(mixer in str(error) for mixer in ["gated delta net", "short convolution", "Mamba layers"]), error
                print(f"{name}, {mesh}: refused by name", flush=True)
                continue
            our_losses, our_norms = ours(binary, source, data, out, [*flags, *tuning], save=save)
            with torch.no_grad():
                difference = ((loaded(name, out, adapter).eval()(input_ids=prompt).logits - logits).norm() / logits.norm()).item()
            said = run(binary, "--pretrain", out, "--generate", " ".join(map(str, rows[0][:12])), "--max-new-tokens", 12, "--temperature", 0, "--device", "cpu")
            assert [int(word) for word in said.split()][-12:] == greedy[0, 12:].tolist(), f"--generate: {said}, transformers {greedy[0].tolist()}"
            off = [worst(our_losses, losses), worst(our_norms, norms), difference]
            said = "loss {:.1e}, norm {:.1e}, logits after export {:.1e}".format(*off)
            bad = max(off) > BOUND
        except (RuntimeError, AssertionError) as error:
            said, bad = str(error), True
        failed |= bad
        print(f"{name}, {mesh}: {said}{' FAILED' if bad else ''}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--towers", nargs="*", default=None, choices=list(TOWERS))
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bin", type=pathlib.Path, default=RELEASE)
    args = parser.parse_args()
    failed = []
    for name in args.families if args.towers is None else args.towers or TOWERS:
        with tempfile.TemporaryDirectory() as folder:
            failed += [name] * check(name, args.bin / "run_fsdp", pathlib.Path(folder), args.lora)
    sys.exit(f"differences: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
