"""GGUF files as llama.cpp's own converter makes them, for tests/checkpoint/gguf.rs.

    python gguf_files.py make LLAMA_CPP [CASE ...]    writes gguf_files/NAME.json: what convert_hf_to_gguf.py of this checkout makes of each case,
                                             and convert_lora_to_gguf.py of an adapter of it
    python gguf_files.py check RUN_FSDP [LLAMA_CPP]   exports each case and reads it with the gguf package; with a checkout, compares
                                             whole files; with the xllamacpp package, greedy tokens

A case is a config.json with a tokenizer. Weights follow from a formula (`weights`), which the test has too. `make` and a check
with a checkout need torch, transformers and sentencepiece; gguf and xllamacpp are on PyPI.

In one thing the converter is helped. It knows a pre-tokenizer by a hash of what a tokenizer makes of a text, and so only
published ones: `PRE` says what ours are called. The model's name is given to both.
"""

import hashlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DATA = HERE.parent / "data/golden"
TYPES = ["f16", "bf16", "q8_0"]
# llama.cpp rounds activations to the type of the weights: greedy tokens are compared in the one that rounds least.
GREEDY = "f16"
NEW, ENOUGH = 8, 2  # tokens after a prompt, and prompts
TEXT = "The year 2026: it's 12345 tokens,\n\n  and don't we know it? \u00e9t\u00e9"

ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64, intermediate_size=96, rms_norm_eps=1e-5)
COMMON = dict(ATTENTION, num_hidden_layers=2, max_position_embeddings=256, attention_dropout=0.0, tie_word_embeddings=False)
IDS = dict(bos_token_id=3, eos_token_id=2)
PIECES = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
GEMMA = dict(COMMON, **PIECES, vocab_size=432, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, query_pre_attn_scalar=16,
             sliding_window=8, rope_theta=10000.0)
LOCAL = lambda layers, every: ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]  # noqa: E731

# Name: (tokenizer, config).
CASES = {
    # More ids than the tokenizer has; rows of 80 columns are no whole blocks of q8_0.
    "llama3": ("llama-bpe", dict(COMMON, **IDS, architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=384, intermediate_size=80,
                                 hidden_act="silu", rope_theta=500000.0, rope_scaling=LLAMA3, attention_bias=True, mlp_bias=False)),
    "llama2": ("pieces", dict(COMMON, **PIECES, architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=432, hidden_act="silu",
                              rope_theta=10000.0, attention_bias=False, mlp_bias=False, num_key_value_heads=4)),
    "qwen2": ("qwen2", dict(COMMON, **IDS, architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=384, hidden_act="silu",
                            rope_theta=1000000.0, use_sliding_window=False, tie_word_embeddings=True)),
    "qwen3": ("qwen2", dict(COMMON, **IDS, architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=384, hidden_act="silu", head_dim=32,
                            rope_theta=1000000.0, use_sliding_window=False, attention_bias=False, tie_word_embeddings=True,
                            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64))),
    "gemma2": ("pieces", dict(GEMMA, architectures=["Gemma2ForCausalLM"], model_type="gemma2", num_hidden_layers=4, layer_types=LOCAL(4, 2),
                              attn_logit_softcapping=50.0, final_logit_softcapping=30.0)),
    "gemma3": ("pieces", dict(GEMMA, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", num_hidden_layers=7, layer_types=LOCAL(7, 6),
                              rope_theta=1000000.0, rope_local_base_freq=10000.0, rope_scaling=dict(rope_type="linear", factor=8.0),
                              attn_logit_softcapping=None, final_logit_softcapping=None)),
}
# A matrix of all experts is one tensor; ten and more of them are in another order by name than by number.
MOE = dict(COMMON, **IDS, vocab_size=384, hidden_act="silu", rope_theta=1000000.0, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False)
QWEN_MOE = dict(MOE, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[])
del MOE["head_dim"]
CASES |= {
    "mixtral": ("pieces", dict(COMMON, **PIECES, architectures=["MixtralForCausalLM"], model_type="mixtral", vocab_size=432, hidden_act="silu",
                               rope_theta=10000.0, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2_moe": ("qwen2", {k: v for k, v in dict(QWEN_MOE, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", use_sliding_window=False,
                                                  shared_expert_intermediate_size=64).items() if k != "head_dim"}),
    "qwen3_moe": ("qwen2", dict(QWEN_MOE, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=32, num_experts=12,
                                norm_topk_prob=True, attention_bias=False, use_sliding_window=False)),
    "olmoe": ("llama-bpe", dict(MOE, architectures=["OlmoeForCausalLM"], model_type="olmoe", attention_bias=False, clip_qkv=None, num_key_value_heads=4)),
}
# Dense families beside the first ones. Phi 4 mini rotates a part of a head by factors of its own; windows of the others are keys.
BASE = dict(COMMON, **IDS, vocab_size=384, hidden_act="silu", rope_theta=10000.0, attention_bias=False)
AFTER = dict(BASE, num_hidden_layers=4, layer_types=LOCAL(4, 4), sliding_window=8)
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.1386294361119891, beta_fast=32, beta_slow=1, rope_theta=5e5)
PHI = dict(original_max_position_embeddings=64, rope_theta=250000.0)
WITHOUT = lambda config, *keys: {k: v for k, v in config.items() if k not in keys}  # noqa: E731
CASES |= {
    "smollm3": ("llama-bpe", WITHOUT(dict(BASE, architectures=["SmolLM3ForCausalLM"], model_type="smollm3", num_hidden_layers=4, mlp_bias=False,
                                          no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4, tie_word_embeddings=True, use_sliding_window=False,
                                          layer_types=["full_attention"] * 4), "head_dim")),
    "granite": ("llama-bpe", WITHOUT(dict(BASE, architectures=["GraniteForCausalLM"], model_type="granite", mlp_bias=False, attention_multiplier=0.2,
                                          embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=6.0, tie_word_embeddings=True), "head_dim")),
    "olmo2": ("llama-bpe", WITHOUT(dict(BASE, architectures=["Olmo2ForCausalLM"], model_type="olmo2", num_key_value_heads=4), "head_dim")),
    "olmo3": ("llama-bpe", WITHOUT(dict(AFTER, architectures=["Olmo3ForCausalLM"], model_type="olmo3", num_key_value_heads=4, intermediate_size=128,
                                        rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=5e5))),
                                   "head_dim", "rope_theta")),
    "seed_oss": ("llama-bpe", dict(BASE, architectures=["SeedOssForCausalLM"], model_type="seed_oss", attention_bias=True, attention_out_bias=False,
                                   mlp_bias=False, residual_dropout=0.0, head_dim=32)),
    "exaone4": ("llama-bpe", dict(BASE, architectures=["Exaone4ForCausalLM"], model_type="exaone4", sliding_window=None, layer_types=["full_attention"] * 2,
                                  rope_scaling=dict(LLAMA3, factor=16.0))),
    "phi4": ("phi", WITHOUT(dict(BASE | PHI, architectures=["Phi3ForCausalLM"], model_type="phi3", sliding_window=None, rope_scaling=None,
                                       resid_pdrop=0.0, embd_pdrop=0.0), "head_dim", "attention_bias")),
    "phi4_mini": ("phi", WITHOUT(dict(BASE | PHI, architectures=["Phi3ForCausalLM"], model_type="phi3", sliding_window=None, tie_word_embeddings=True,
                                            partial_rotary_factor=0.75, resid_pdrop=0.0, embd_pdrop=0.0,
                                            rope_scaling=dict(type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                                                              long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 4.5])), "head_dim", "attention_bias")),
    "starcoder2": ("llama-bpe", WITHOUT(dict(BASE, architectures=["Starcoder2ForCausalLM"], model_type="starcoder2", use_bias=True, norm_epsilon=1e-5,
                                             hidden_act="gelu_pytorch_tanh", norm_type="layer_norm", mlp_type="default", sliding_window=None,
                                             residual_dropout=0.0, embedding_dropout=0.0, tie_word_embeddings=True),
                                        "head_dim", "attention_bias", "rms_norm_eps")),
    "lfm2": ("llama-bpe", WITHOUT(dict(BASE, architectures=["Lfm2ForCausalLM"], model_type="lfm2", norm_eps=1e-5, conv_L_cache=3, conv_bias=False,
                                       num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True,
                                       block_auto_adjust_ff_dim=False, block_ffn_dim_multiplier=1.0, block_multiple_of=256, rope_theta=1e6),
                                  "head_dim", "attention_bias", "rms_norm_eps", "hidden_act")),
    "qwen3_5": ("qwen35", dict(COMMON, **IDS, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", vocab_size=384, hidden_act="silu",
                               num_hidden_layers=4, intermediate_size=128, layer_types=LINEAR, full_attention_interval=4, attention_bias=False, head_dim=32, linear_num_key_heads=2,
                               linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4, tie_word_embeddings=True,
                               rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5, mrope_section=[3, 3, 2], mrope_interleaved=True))),
}
# Families whose tensors transformers lists.
GROWN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
             llama_4_scaling_beta=0.1, rope_theta=1e6)
LISTED = {
    "ministral3": ("tekken", WITHOUT(dict(BASE, architectures=["Ministral3ForCausalLM"], model_type="ministral3", rope_parameters=GROWN, sliding_window=None),
                                     "rope_theta", "attention_bias")),
    "glm4": ("glm", dict(BASE, architectures=["Glm4ForCausalLM"], model_type="glm4", attention_bias=True, eos_token_id=[0, 1], pad_token_id=0,
                               rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "cohere2": ("command-r", WITHOUT(dict(BASE, architectures=["Cohere2ForCausalLM"], model_type="cohere2", num_hidden_layers=4, layer_norm_eps=1e-5, logit_scale=0.25,
                                          rotary_pct=1.0, sliding_window=8, sliding_window_pattern=4, layer_types=LOCAL(4, 4), tie_word_embeddings=True),
                                     "rms_norm_eps")),
    # Heads are as wide as the class has them.
    "ernie4_5": ("pieces", WITHOUT(dict(COMMON, **PIECES, architectures=["Ernie4_5ForCausalLM"], model_type="ernie4_5", vocab_size=432, hidden_act="silu",
                                        rope_theta=5e5, use_bias=False, tie_word_embeddings=True), "head_dim")),
    "hunyuan": ("hunyuan", dict(BASE, architectures=["HunYuanDenseV1ForCausalLM"], model_type="hunyuan_v1_dense", max_position_embeddings=32768,
                                tie_word_embeddings=True, pad_token_id=0, eod_token_id=1,
                                rope_scaling=dict(type="dynamic", alpha=50.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.0))),
    "lfm2_moe": ("llama-bpe", WITHOUT(dict(BASE, architectures=["Lfm2MoeForCausalLM"], model_type="lfm2_moe", norm_eps=1e-5, conv_L_cache=3, conv_bias=False,
                                           num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"], num_dense_layers=1, num_experts=5,
                                           num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, use_expert_bias=True, routed_scaling_factor=1.0,
                                           tie_word_embeddings=True, rope_theta=1e6), "head_dim", "attention_bias", "rms_norm_eps", "hidden_act")),
    "qwen3_5_moe": ("qwen35", WITHOUT(dict(CASES["qwen3_5"][1], architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", num_experts=6,
                                           num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64, tie_word_embeddings=False),
                                      "intermediate_size")),
}
ROPES = dict(full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25), sliding_attention=dict(rope_type="default", rope_theta=1e4))
GEMMA4 = dict(WITHOUT(COMMON, "tie_word_embeddings"), **PIECES, architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", vocab_size=420,
              hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, sliding_window=8, global_head_dim=32, rope_parameters=ROPES,
              final_logit_softcapping=30.0, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
LISTED |= {
    # Inputs of each layer, and layers that share keys and values, as in the small ones.
    "gemma4": ("gemma4", dict(GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=32, vocab_size_per_layer_input=420)),
    # Experts, and values that are keys in layers without a window.
    "gemma4_moe": ("gemma4", dict(GEMMA4, num_kv_shared_layers=0, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=5, top_k_experts=2,
                                  moe_intermediate_size=32, attention_k_eq_v=True, num_global_key_value_heads=1)),
}
# Tensors that files have transposed, or as two. q8_0 of gpt-oss is refused: ranks have its blocks apart.
LATENT = dict(WITHOUT(BASE, "head_dim", "attention_bias"), attention_bias=False, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
              v_head_dim=16, num_key_value_heads=4, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=2, first_k_dense_replace=1)
MSCALE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0, rope_theta=1e4)
LISTED |= {
    "gpt_oss": ("llama-bpe", dict(WITHOUT(BASE, "rope_theta"), architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, intermediate_size=32,
                                  num_local_experts=5, num_experts_per_tok=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"], swiglu_limit=7.0,
                                  rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, rope_theta=1.5e5,
                                                       truncate=False))),
    "deepseek_v2": ("hunyuan", dict(LATENT, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", topk_method="greedy", routed_scaling_factor=1.0,
                                    scoring_func="softmax", norm_topk_prob=False, n_group=1, topk_group=1)),
    "deepseek_v3": ("hunyuan", dict(WITHOUT(LATENT, "rope_theta"), architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", n_routed_experts=8, n_group=4, topk_group=2,
                                    routed_scaling_factor=2.5, scoring_func="sigmoid", norm_topk_prob=True, n_shared_experts=1, rope_parameters=MSCALE)),
    "glm4_moe_lite": ("glm-flash", dict(LATENT, architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", n_group=1, topk_group=1, routed_scaling_factor=1.8,
                                        scoring_func="sigmoid", norm_topk_prob=True, n_shared_experts=1, eos_token_id=[0, 1], pad_token_id=0)),
    "qwen3_next": ("qwen2", dict(BASE, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", num_hidden_layers=4, layer_types=LINEAR, head_dim=32,
                                 linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
                                 partial_rotary_factor=0.25, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64,
                                 decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, intermediate_size=128, tie_word_embeddings=True)),
}
# A vision-language model, of which a file has the text model.
LISTED["qwen3_vl"] = ("qwen2", dict(
    architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl", image_token_id=380, video_token_id=381, vision_start_token_id=378, vision_end_token_id=379,
    tie_word_embeddings=False, text_config=dict(BASE, model_type="qwen3_vl_text", head_dim=32, rope_scaling=dict(rope_type="default", mrope_section=[6, 6, 4], mrope_interleaved=True)),
    vision_config=dict(model_type="qwen3_vl", depth=2, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=64, patch_size=4, spatial_merge_size=2,
                       num_position_embeddings=16, deepstack_visual_indexes=[0])))
CASES |= LISTED
REFUSED = [("gpt_oss", "q8_0")]
PRE = {"glm-flash": "smaug-bpe", "gemma4": None, "glm": "smaug-bpe", "tekken": "tekken", "command-r": "smollm", "hunyuan": "deepseek-v3", "qwen35": "qwen35", "llama-bpe": "smaug-bpe", "phi": "smaug-bpe", "qwen2": "qwen2", "pieces": None}
TEMPLATE = {"glm-flash": "llama3", "gemma4": "gemma", "glm": "llama3", "tekken": "llama3", "command-r": "llama3", "hunyuan": "llama3", "qwen35": "qwen2", "llama-bpe": "llama3", "phi": "llama3", "qwen2": "qwen2", "pieces": "gemma"}


def listed(case):
    """The same, as transformers saves the model; kept with the golden values."""
    kept = HERE / f"gguf_files/{case}.json"
    config = LISTED[case][1]
    if kept.exists() and (found := json.loads(kept.read_text()))["config"] == config:
        return [tuple(tensor) for tensor in found["tensors"]]
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        model = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
        model.from_config(AutoConfig.from_pretrained(scratch)).save_pretrained(scratch)
        with safe_open(f"{scratch}/model.safetensors", "np") as file:
            return sorted((name, file.get_slice(name).get_shape()) for name in file.keys())


def tensors(config):
    """Names and shapes in a Hugging Face file, sorted."""
    for case, (_, of) in LISTED.items():
        if of is config:
            return listed(case)
    c, kind = config, config["model_type"]
    d, f, h = c["hidden_size"], c["intermediate_size"], c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * h, c["num_key_value_heads"] * h
    found = {"model.embed_tokens.weight": [c["vocab_size"], d], "model.norm.weight": [d]}
    biased = c.get("use_bias")
    if biased:
        found["model.norm.bias"] = [d]
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = [c["vocab_size"], d]
    if kind == "lfm2":
        found["model.embedding_norm.weight"] = found.pop("model.norm.weight")
        for i, mixer in enumerate(c["layer_types"]):
            block = {"operator_norm.weight": [d], "ffn_norm.weight": [d], "feed_forward.w1.weight": [f, d], "feed_forward.w2.weight": [d, f],
                     "feed_forward.w3.weight": [f, d]}
            if mixer == "conv":
                block |= {"conv.conv.weight": [d, 1, c["conv_L_cache"]], "conv.in_proj.weight": [3 * d, d], "conv.out_proj.weight": [d, d]}
            else:
                block |= {f"self_attn.{name}_proj.weight": shape for name, shape in [("q", [q, d]), ("k", [kv, d]), ("v", [kv, d]), ("out", [d, q])]}
                block |= {"self_attn.q_layernorm.weight": [h], "self_attn.k_layernorm.weight": [h]}
            found |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
        return sorted(found.items())
    if kind == "qwen3_5_text":
        (nk, nv), (dk, dv) = [(c[f"linear_num_{s}_heads"]) for s in ("key", "value")], [c[f"linear_{s}_head_dim"] for s in ("key", "value")]
        channels = 2 * nk * dk + nv * dv
        for i, mixer in enumerate(c["layer_types"]):
            block = {"input_layernorm.weight": [d], "post_attention_layernorm.weight": [d], "mlp.gate_proj.weight": [f, d], "mlp.up_proj.weight": [f, d],
                     "mlp.down_proj.weight": [d, f]}
            if mixer == "full_attention":
                block |= {f"self_attn.{n}_proj.weight": s for n, s in [("q", [2 * q, d]), ("k", [kv, d]), ("v", [kv, d]), ("o", [d, q])]}
                block |= {"self_attn.q_norm.weight": [h], "self_attn.k_norm.weight": [h]}
            else:
                block |= {f"linear_attn.{n}.weight": s for n, s in [("in_proj_qkv", [channels, d]), ("in_proj_z", [nv * dv, d]), ("in_proj_a", [nv, d]),
                                                                   ("in_proj_b", [nv, d]), ("conv1d", [channels, 1, c["linear_conv_kernel_dim"]]),
                                                                   ("norm", [dv]), ("out_proj", [d, nv * dv])]}
                block |= {"linear_attn.A_log": [nv], "linear_attn.dt_bias": [nv]}
            found |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
        return sorted(found.items())
    after = kind in ("olmo2", "olmo3", "exaone4")
    norms = ["post_attention_layernorm", "post_feedforward_layernorm" if after else "input_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if "gemma" in kind else []
    for i in range(c["num_hidden_layers"]):
        block = {f"{norm}.weight": [d] for norm in norms} | {f"{norm}.bias": [d] for norm in norms if biased}
        projections = [("qkv", [q + 2 * kv, d])] if kind == "phi3" else [("q", [q, d]), ("k", [kv, d]), ("v", [kv, d])]
        for name, shape in [*projections, ("o", [d, q])]:
            block[f"self_attn.{name}_proj.weight"] = shape
            if biased or c.get("attention_bias") and (name != "o" or c.get("attention_out_bias", True)) or kind in ("qwen2", "qwen2_moe") and name != "o":
                block[f"self_attn.{name}_proj.bias"] = shape[:1]
        if kind in ("qwen3", "qwen3_moe", "gemma3_text", "exaone4"):
            block |= {"self_attn.q_norm.weight": [h], "self_attn.k_norm.weight": [h]}
        if kind in ("olmoe", "olmo2", "olmo3"):
            block |= {"self_attn.q_norm.weight": [q], "self_attn.k_norm.weight": [kv]}
        parts = lambda f: [("gate_proj", [f, d]), ("up_proj", [f, d]), ("down_proj", [d, f])]  # noqa: E731
        if kind == "phi3":
            parts = lambda f: [("gate_up_proj", [2 * f, d]), ("down_proj", [d, f])]  # noqa: E731
        if kind == "starcoder2":
            parts = lambda f: [("c_fc", [f, d]), ("c_proj", [d, f])]  # noqa: E731
        experts = c.get("num_local_experts") or c.get("num_experts")
        if not experts:
            block |= {f"mlp.{name}.weight": shape for name, shape in parts(f)}
            block |= {f"mlp.{name}.bias": shape[:1] for name, shape in parts(f) if biased}
        else:
            mlp = "block_sparse_moe" if kind == "mixtral" else "mlp"
            own = [("w1", [f, d]), ("w3", [f, d]), ("w2", [d, f])] if kind == "mixtral" else parts(c.get("moe_intermediate_size", f))
            block[f"{mlp}.gate.weight"] = [experts, d]
            block |= {f"{mlp}.experts.{e}.{name}.weight": shape for e in range(experts) for name, shape in own}
        if shared := c.get("shared_expert_intermediate_size"):
            block |= {f"mlp.shared_expert.{name}.weight": shape for name, shape in parts(shared)}
            block["mlp.shared_expert_gate.weight"] = [1, d]
        found |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    return sorted(found.items())


def weights(index, name, shape, gemma):
    """Element i of tensor `index`: 24 mixed bits of its place as a number in -0.5..0.5, times a scale."""
    x = (np.arange(np.prod(shape), dtype=np.uint64) + 1_000_003 * (index + 1)) * 2654435761 % 2**32
    x = (x ^ x >> 15) * 2246822519 % 2**32
    x = ((x ^ x >> 13) >> 8).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    if name.endswith("norm.weight"):
        return (x * np.float32(0.5) + np.float32(0 if gemma else 1)).reshape(shape)
    scale = 2.0 if name in ("model.embed_tokens.weight", "lm_head.weight") else 0.5
    return (x * np.float32(scale)).reshape(shape)


def proto(field, value):
    """A field of a message of protocol buffers: bytes, a float, or a number."""
    def number(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + number(n >> 7)
    if isinstance(value, float):
        return number(field << 3 | 5) + np.float32(value).tobytes()
    if isinstance(value, int):
        return number(field << 3) + number(value)
    return number(field << 3 | 2) + number(len(value)) + value


def sentencepiece_model():
    """tokenizer.model of the tokenizer in tests/data/golden/sentencepiece."""
    vocab = json.loads((DATA / "sentencepiece/tokenizer.json").read_text())["model"]["vocab"]
    out = b""
    for token, i in sorted(vocab.items(), key=lambda item: item[1]):
        kind = 2 if i == 0 else 3 if i < 3 else 6 if token.startswith("<0x") else 1
        out += proto(1, proto(1, token.encode()) + proto(2, float(-i)) + proto(3, kind))
    trainer = proto(3, 2) + proto(4, len(vocab)) + proto(35, 1)  # BPE that falls back on bytes
    return out + proto(2, trainer) + proto(3, proto(1, b"identity") + proto(3, 1) + proto(4, 0) + proto(5, 1))


def steps(*patterns, digits=False):
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns]
    parts = [{"type": "Digits", "individual_digits": True}] if digits else splits
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*parts, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": digits}]}}


# Parts of a tokenizer.json as published files have them.
CASED = [r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+", r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"]
REPLACED = {
    "gemma4": {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
               "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
               "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
                                                            {"type": "Fuse"}]}},
    "tekken": steps("|".join(CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "command-r": steps(digits=True),
    # With characters that other files escape.
    "hunyuan": steps(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                      r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n]*"
                      + r"|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+"),
}
# Tokens that the converter looks for.
RENAMED = {"glm": {"<|im_start|>": "<|user|>"}, "glm-flash": {"<|im_start|>": "<|user|>", "<|im_end|>": "<|observation|>", "<s>": "[gMASK]"}}


def tokenizer(name):
    """Files of a model directory."""
    template = (DATA / f"templates/{TEMPLATE[name]}.jinja").read_text()
    if name == "pieces":
        source, config = DATA / "sentencepiece", {"add_bos_token": True, "add_eos_token": False, "add_prefix_space": True}
        config["added_tokens_decoder"] = {"421": {"content": "<start_of_turn>", "special": False}, "1": {"content": "<s>", "special": True}}
        more = {"tokenizer.model": (HERE / "gguf_files/tokenizer.model").read_bytes(), "added_tokens.json": b'{"<image>": 420}'}
    elif name == "gemma4":  # a token that only its type calls special, and one that llama.cpp always shows
        source, config, more = DATA / "sentencepiece", {"pad_token": "<unk>", "boi_token": "argc", "extra_special_tokens": ["Fran"]}, {}
    else:
        source, config, more = DATA / "byte_level", {}, {}
    config = json.loads((source / "tokenizer_config.json").read_text()) | config
    if name == "phi":
        config["tokenizer_class"] = "GPT2Tokenizer"  # by which the converter knows the Phi 4s
    text = (source / "tokenizer.json").read_text()
    if name in REPLACED:
        text = json.dumps(json.loads(text) | REPLACED[name])
    for old, new in RENAMED.get(name, {}).items():
        text = text.replace(old, new)
        config |= {key: new for key, value in config.items() if value == old}
    if name == "qwen35":
        text = text.replace("\\\\p{N}{1,3}", "\\\\p{N}").replace("?\\\\p{L}+", "?[\\\\p{L}\\\\p{M}]+").replace("[^\\\\s\\\\p{L}\\\\p{N}]", "[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]")
        config["chat_template"] = template
    elif name == "qwen2":
        text = text.replace("\\\\p{N}{1,3}", "\\\\p{N}")
        more["chat_template.jinja"] = template.encode()
        more["generation_config.json"] = b'{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}'
    else:
        config["chat_template"] = template
    return more | {"tokenizer.json": text.encode(), "tokenizer_config.json": json.dumps(config, indent=1).encode()}


def write(case, path):
    """The model directory of a case."""
    from safetensors.numpy import save_file

    kind, config = CASES[case]
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=1))
    for name, content in tokenizer(kind).items():
        (path / name).write_bytes(content)
    gemma = case.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
    save_file({n: weights(i, n, s, gemma) for i, (n, s) in enumerate(tensors(config))}, path / "model.safetensors", {"format": "pt"})


def adapter_tensors(config):
    """Names and shapes of an adapter of rank 4 of all linear layers, sorted as safetensors has them."""
    found = {}
    # llama.cpp applies none to latents.
    latent = ["self_attn.q_", "kv_a_proj"] if "kv_lora_rank" in config else []
    for name, shape in tensors(config):
        others = *latent, "gate.weight", "shared_expert_gate", "router", "kv_b_proj", "in_proj_qkvz", ".experts.gate_up", ".experts.down_proj"
        if len(shape) == 2 and name.startswith(("model.layers", "model.language_model.layers")) and not any(other in name for other in others):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            found |= {f"{module}.lora_A.weight": [4, shape[1]], f"{module}.lora_B.weight": [shape[0], 4]}
    return sorted(found.items())


ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": "all-linear", "bias": "none", "task_type": "CAUSAL_LM"}


def write_adapter(case, base, path):
    from safetensors.numpy import save_file

    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(ADAPTER | {"base_model_name_or_path": str(base)}))
    found = {n: weights(i, n, s, False) for i, (n, s) in enumerate(adapter_tensors(CASES[case][1]))}
    save_file(found, path / "adapter_model.safetensors", {"format": "pt"})


def convert_adapter(llama_cpp, base, path, out):
    # It has no --no-mtp, and knows Ministral 3 by the class of another that does the work.
    program = f"""
import runpy, conversion.base as b, conversion.mistral3 as m
b.ModelBase.no_mtp = True
b.ModelBase._model_classes[b.ModelType.TEXT]["Ministral3ForCausalLM"] = m.Mistral3Model.Ministral3Model
runpy.run_path({str(llama_cpp / 'convert_lora_to_gguf.py')!r}, run_name='__main__')"""
    subprocess.run([sys.executable, "-c", program, "--base", base, "--outfile", out, path], check=True, capture_output=True)
    return out.read_bytes()


def convert(llama_cpp, path, case, kind, out):
    from conversion.base import TextModel

    pre = PRE[CASES[case][0]]
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    more = ["--no-mtp"] if case.startswith(("qwen3_5", "qwen3_next")) else []  # layers that predict several tokens are none of a model's here
    sys.argv = ["convert_hf_to_gguf.py", str(path), *more, "--outtype", kind, "--model-name", out.stem, "--outfile", str(out)]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")
    return out.read_bytes()


def parts(content):
    """[name, first byte, bytes, start of the sha256] of the header, then of each tensor."""
    import gguf

    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        reader = gguf.GGUFReader(file.name)
        spans = [("header", 0, reader.data_offset)] + [(t.name, int(t.data_offset), int(t.n_bytes)) for t in reader.tensors]
    return [[name, at, size, hashlib.sha256(content[at : at + size]).hexdigest()[:16]] for name, at, size in spans]


def make(llama_cpp, cases):
    (HERE / "gguf_files/tokenizer.model").write_bytes(sentencepiece_model())
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases or CASES:
            kind, config = CASES[case]
            path = Path(scratch) / case
            write(case, path)
            golden = {}
            for gguf_type in TYPES:
                content = convert(llama_cpp, path, case, gguf_type, Path(scratch) / "model.gguf")
                golden[gguf_type] = {"bytes": len(content), "parts": parts(content)}
            write_adapter(case, path, Path(scratch) / f"{case}-adapter")
            adapter = parts(convert_adapter(llama_cpp, path, Path(scratch) / f"{case}-adapter", Path(scratch) / "adapter.gguf"))
            start = adapter[0][2]
            adapter = {"config": ADAPTER, "tensors": adapter_tensors(config), "parts": [[n, at - start, *rest] for n, at, *rest in adapter[1:]]}
            files = {name: text.decode() for name, text in tokenizer(kind).items() if name not in ("tokenizer.model", "tokenizer.json")}
            case_file = {"config": config, "tokenizer": kind, "replaced": REPLACED.get(kind), "renamed": RENAMED.get(kind), "files": files, "tensors": tensors(config), "golden": golden, "adapter": adapter}
            (HERE / f"gguf_files/{case}.json").write_text(json.dumps(case_file) + "\n")
            print("made", case)


def export(run_fsdp, path, kind, out, *more):
    """Our file of the model in `path`: one step that changes nothing, at a learning rate of 0."""
    args = "--device cpu --dataset synthetic --max-len 16 --batch-size 1 --max-steps 1 --lr 0 --weight-decay 0 --no-eval --no-sample --overwrite"
    command = [run_fsdp, "--pretrain", path, "--save-gguf", out, "--gguf-type", kind, *args.split(), *(more or ["--nproc-per-node", "2"])]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return out.read_bytes()


def keys(path):
    import gguf

    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def server(path, adapter=None):
    import xllamacpp

    params = xllamacpp.CommonParams()
    if adapter:
        of = xllamacpp.CommonAdapterLoraInfo()
        of.path, of.scale = str(adapter), 1.0
        params.lora_adapters = [of]
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = str(path), 128, 1, False, 0
    return xllamacpp.Server(params)


def named(llama, prompt):
    """llama.cpp's greedy tokens after `prompt`, without the repetition penalty that a file may ask for. It names none that ends
    within a character."""
    ask = {"prompt": prompt, "max_tokens": NEW, "temperature": 0.0, "repeat_penalty": 1.0, "logprobs": 1, "ignore_eos": True, "cache_prompt": False}
    return [token["id"] for token in (llama.handle_completions(ask)["choices"][0]["logprobs"] or {"content": []})["content"]]


def written(run_fsdp, path, prompt):
    """Ours, from the model itself."""
    args = f"--device cpu --nproc-per-node 1 --tokenizer none --temperature 0 --max-new-tokens {NEW} --generate"
    command = [run_fsdp, "--pretrain", path, *args.split(), " ".join(map(str, prompt))]
    return [int(word) for word in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()][-NEW:]


def cut(path, llama, case):
    """llama.cpp cuts a text into the tokens of the tokenizers library: what follows is the same."""
    from importlib.util import find_spec

    if not find_spec("tokenizers"):
        return ""
    from tokenizers import Tokenizer

    pipeline = Tokenizer.from_file(str(path / "tokenizer.json"))
    pipeline.no_truncation()
    ids = pipeline.encode(TEXT).ids
    assert named(llama, ids) == named(llama, TEXT), f"{case}: {TEXT!r} is not {ids} to llama.cpp"
    return f", a text of {len(ids)} tokens too"


def greedy(run_fsdp, path, out, case):
    """Both write on after prompts; those count whose tokens llama.cpp names."""
    found, llama, seen, alike = keys(out)[0], server(out), 0, 0
    ascii_bytes = {chr(b) for b in range(33, 127)} | {"\u0120", "\u010a", "\u2581"}
    plain = [set(text) <= ascii_bytes and (kind != 6 or text < "<0x7F>") and kind in (1, 6)
             for text, kind in zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"])]
    for i in range(120):
        prompt = [5 + 3 * i, 17 + 5 * i % 300, 40]
        ours = written(run_fsdp, path, prompt)
        if len(ours) == NEW:  # shorter: it ended the text, which llama.cpp is kept from
            theirs = named(llama, prompt)
            if all(plain[token] for token in ours):
                assert ours == theirs, f"{case}: {ours} and llama.cpp's {theirs} after {prompt}"
                seen += 1
            else:
                alike += ours == theirs
            if seen == ENOUGH:
                break
    # Where models write few such texts, others count that are the same.
    if seen + alike >= ENOUGH:
        return f", {NEW} greedy tokens after {ENOUGH} prompts as llama.cpp's" + cut(path, llama, case)
    sys.exit(f"{case}: only {seen} prompts whose tokens llama.cpp names")


def adapted(run_fsdp, path, out, case):
    """An adapter alone: llama.cpp goes on with it as with the merged model."""
    from importlib.util import find_spec

    adapter, merged, alone = path.parent / "adapter", path.parent / "merged.gguf", path.parent / "adapter.gguf"
    write_adapter(case, path, adapter)
    for flags in (["--lora-merge", adapter, "--gguf-type", GREEDY, "--save-gguf", merged], ["--pretrain", adapter, "--export", "--save-gguf", alone]):
        subprocess.run([run_fsdp, "--device", "cpu", "--nproc-per-node", "1", "--overwrite", *flags], check=True, capture_output=True)
    found, listed = keys(alone)
    shutil.rmtree(adapter)
    assert found["general.type"] == "adapter" and found["adapter.lora.alpha"] == ADAPTER["lora_alpha"], f"{case}: {found}"
    if not find_spec("xllamacpp"):
        return f", an adapter of {len(listed)} tensors"

    def said(llama, prompt):
        ask = {"prompt": prompt, "max_tokens": NEW, "temperature": 0.0, "repeat_penalty": 1.0, "ignore_eos": True, "cache_prompt": False}
        return llama.handle_completions(ask)["choices"][0]["text"]

    prompts = [[5 + 3 * i, 17 + 5 * i % 300, 40] for i in range(8)]
    base, of_merged, of_both = [[said(llama, prompt) for prompt in prompts] for llama in (server(out), server(merged), server(out, alone))]
    same = sum(a == b for a, b in zip(of_merged, of_both))
    # A merge rounds to the type of the file. The Gemmas of these weights repeat one token, whatever the prompt.
    changed = base != of_both or len(set(base + of_both)) == 1
    assert changed and same >= len(prompts) - 2, f"{case}: {of_both} with the adapter, {of_merged} merged, {base} without"
    return f", an adapter after {same} of {len(prompts)} prompts as merged"


def check(run_fsdp, llama_cpp):
    from importlib.util import find_spec

    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            path, out, theirs = Path(scratch) / case, Path(scratch) / "ours.gguf", Path(scratch) / "theirs/ours.gguf"
            theirs.parent.mkdir(exist_ok=True)
            write(case, path)
            for kind in [kind for kind in TYPES if (case, kind) not in REFUSED]:
                content = export(run_fsdp, path, kind, out)
                found, listed = keys(out)
                config = CASES[case][1].get("text_config", CASES[case][1])
                names = [name for name, _ in tensors(CASES[case][1]) if "visual." not in name]
                whole = {re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in names}
                assert len(listed) >= len(whole), f"{case}: {len(listed)} tensors"
                assert len(found["tokenizer.ggml.tokens"]) == config["vocab_size"] and "tokenizer.chat_template" in found
                note = "read by gguf"
                if llama_cpp:
                    theirs_bytes = convert(llama_cpp, path, case, kind, theirs)
                    if content != theirs_bytes:
                        compare(out, theirs)
                        sys.exit(f"{case} {kind}: {len(content)} and {len(theirs_bytes)} bytes differ")
                    note += f", {len(content)} bytes as the converter's"
                if kind == GREEDY and find_spec("xllamacpp"):
                    note += greedy(run_fsdp, path, out, case)
                if kind == GREEDY:
                    note += adapted(run_fsdp, path, out, case)
                print(f"{case} {kind}: {note}")
            shutil.rmtree(path)
        if find_spec("xllamacpp"):
            trained_on_bytes(run_fsdp, Path(scratch))


def trained_on_bytes(run_fsdp, scratch):
    """Without a tokenizer's files the vocabulary is bytes: llama.cpp goes on as we do after a text."""
    (scratch / "text.txt").write_text("the cat sat on the mat. " * 200)
    train = "--device cpu --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --batch-size 4 --lr 0.01 --max-steps 80 --no-eval --no-sample"
    out = ["--dataset", scratch / "text.txt", "--save-gguf", scratch / "bytes.gguf", "--save-hf", scratch / "bytes"]
    subprocess.run([run_fsdp, *train.split(), *out], check=True, capture_output=True)
    ask = ["--pretrain", scratch / "bytes", "--device", "cpu", "--temperature", "0", "--max-new-tokens", "20", "--generate", "the cat s"]
    ours = subprocess.run([run_fsdp, *ask], check=True, capture_output=True, text=True).stdout.strip("\n")
    said = server(scratch / "bytes.gguf").handle_completions({"prompt": ask[-1], "max_tokens": 20, "temperature": 0.0})
    theirs = said["choices"][0]["text"]
    assert ours.endswith(theirs) and len(theirs) == 20, f"bytes: {ours!r} and llama.cpp's {theirs!r}"
    print(f"bytes f16: {theirs!r} after {ask[-1]!r} as llama.cpp's")


def compare(ours, theirs):
    (a, b), (c, d) = keys(ours), keys(theirs)
    print("order of keys", [x for x in zip(a, c) if x[0] != x[1]][:3], "tensors", [x for x in zip(b, d) if x[0] != x[1]][:3])
    for key in a.keys() | c.keys():
        if a.get(key) != c.get(key):
            print("key", key, str(a.get(key))[:200], str(c.get(key))[:200])
    for name in b.keys() | d.keys():
        same = name in b and name in d and b[name].tensor_type == d[name].tensor_type and np.array_equal(b[name].data, d[name].data)
        if not same:
            print("tensor", name, b.get(name) and b[name].tensor_type, d.get(name) and d[name].tensor_type)


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    paths = [Path(word).resolve() for word in words]
    llama_cpp = paths[0] if command == "make" else (paths + [None])[1]
    if llama_cpp:
        sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]  # the converter needs the gguf next to it
    make(llama_cpp, words[1:]) if command == "make" else check(str(paths[0]), llama_cpp)
