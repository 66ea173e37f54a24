"""Golden values of every model family from Hugging Face transformers for tests/engine/families.rs.

    python families.py make [CASE...]   writes families/, or the files of these cases
    python families.py errors   writes only the errors of bf16 in families/ again
    python families.py four [CASE...]   with transformers 4: writes each case's config as it does, to families/NAME.4.json
    python families.py check    gives transformers (4 or 5) the config.json files that tests/engine/families.rs wrote when it last ran

For each case a tiny random model (weights exact in bf16, stored as such) and, in fp32 with eager attention: logits, loss
and every gradient of a batch of documents that go through the model one by one, and tokens of greedy generation. What a
case is about must matter: with the keys of `without` instead, logits are others. For the bounds of bf16: how far PyTorch's
own bf16 typically is from its fp32.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from make import gradients, randomize, relative, scalars, targets_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 29
LENGTHS = [17, 1, 9, 4]  # tokens of each document
NEW = 10  # tokens generated
ORIGINAL = 8  # length before rotary scaling: the first documents are longer
SIZES = dict(vocab_size=VOCAB, hidden_size=18, intermediate_size=22, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
             num_hidden_layers=2, max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=False,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
# The hidden size must divide by the heads in these classes, although head_dim is given.
DIVIDED = dict(hidden_size=20)


def rope(kind, theta=100.0, **more):
    return dict(rope_type=kind, rope_theta=theta, **more)


PLAIN = dict(rope_parameters=rope("default"))
LATENT = dict(num_key_value_heads=4, head_dim=4, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)
YARN = rope("yarn", factor=4.0, beta_fast=4.0, original_max_position_embeddings=ORIGINAL)
LONG = rope("longrope", short_factor=[1.5, 1.0, 2.0], long_factor=[2.0, 5.0, 9.0], original_max_position_embeddings=ORIGINAL)
LONG_HEAD = LONG | dict(short_factor=[1.5, 1.0, 2.0, 1.2, 3.0], long_factor=[2.0, 5.0, 9.0, 3.0, 4.0])
# Of another base in a file of transformers 4, 5 makes the base of layers without a window only.
OLMO3_THETA = dict(rope_theta=500000.0)
GEMMA3_ROPES = dict(full_attention=rope("linear", 50.0, factor=4.0), sliding_attention=rope("default", 20.0))

GEMMA4_ROPES = dict(full_attention=rope("proportional", 50.0, partial_rotary_factor=0.5), sliding_attention=rope("default", 20.0))
GEMMA4 = dict(hidden_size=20, head_dim=8, global_head_dim=12, sliding_window=4, rope_parameters=GEMMA4_ROPES, hidden_size_per_layer_input=0,
              tie_word_embeddings=True)

NEXT = dict(rms_norm_eps=1e-3, hidden_size=20, head_dim=12, num_hidden_layers=3, max_position_embeddings=128, layer_types=["linear_attention"] * 2 + ["full_attention"],
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5,
            rope_parameters=rope("default", partial_rotary_factor=0.5))

BIG_CODE = dict(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_inner=22, n_positions=32, bos_token_id=None, eos_token_id=None)
FALCON_H1 = dict(hidden_size=20, mamba_n_heads=4, mamba_d_ssm=24, mamba_d_head=6, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16, max_position_embeddings=128,
                 mamba_norm_before_gate=False, rope_parameters=rope("default"), embedding_multiplier=3.3, lm_head_multiplier=0.6, key_multiplier=1.7,
                 attention_in_multiplier=1.1, attention_out_multiplier=0.9, ssm_in_multiplier=1.25, ssm_out_multiplier=0.7,
                 ssm_multipliers=[0.7, 0.6, 0.9, 1.3, 0.8], mlp_multipliers=[0.6, 0.9])
MAMBA = dict(hidden_size=20, mamba_n_heads=4, mamba_expand=2, mamba_d_head=10, mamba_n_groups=2, mamba_d_state=6, mamba_d_conv=4, mamba_chunk_size=16,
             rope_parameters=rope("default"), shared_intermediate_size=26, embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5,
             logits_scaling=4.0)
NEMOTRON_H = dict(hidden_size=20, mamba_num_heads=4, mamba_head_dim=6, n_groups=2, ssm_state_size=6, conv_kernel=4, chunk_size=16,
                  max_position_embeddings=128)
FALCON = dict(vocab_size=VOCAB, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=22, max_position_embeddings=32, rope_parameters=rope("default"),
              bos_token_id=None, eos_token_id=None)

LEARNED = dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=None)

CASES = {
    "llama3": ("llama", dict(**DIVIDED, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True), PLAIN),
    "llama_linear": ("llama", dict(**DIVIDED, rope_parameters=rope("linear", factor=3.0), tie_word_embeddings=True), PLAIN),
    # Longer than the model's own length, and all alike: the base depends on the longest sequence so far.
    "llama_dynamic": ("llama", dict(**DIVIDED, max_position_embeddings=ORIGINAL, rope_parameters=rope("dynamic", factor=2.0)),
                      PLAIN),
    "llama_yarn": ("llama", dict(**DIVIDED, rope_parameters=YARN), PLAIN),
    "mistral": ("mistral", dict(sliding_window=5), dict(sliding_window=None)),
    "qwen2": ("qwen2", dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=1,
                            tie_word_embeddings=True), dict(use_sliding_window=False)),
    "qwen3": ("qwen3", dict(rope_parameters=rope("yarn", factor=2.0, attention_factor=1.3, beta_slow=0.5, truncate=False,
                                                 original_max_position_embeddings=ORIGINAL)), PLAIN),
    "gemma2": ("gemma2", dict(**DIVIDED, num_hidden_layers=3, sliding_window=4, query_pre_attn_scalar=3,
                              attn_logit_softcapping=1.5, final_logit_softcapping=2.0, tie_word_embeddings=True),
               dict(attn_logit_softcapping=None)),
    "gemma3": ("gemma3_text", dict(**DIVIDED, num_hidden_layers=4, sliding_window=4, query_pre_attn_scalar=7,
                                   layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_parameters=GEMMA3_ROPES,
                                   tie_word_embeddings=True),
               dict(rope_parameters=dict(full_attention=rope("linear", 50.0, factor=4.0), sliding_attention=rope("default", 50.0)))),
    "gpt2": ("gpt2", dict(vocab_size=VOCAB, n_embd=18, n_layer=2, n_head=3, n_inner=22, n_positions=32, embd_pdrop=0.0,
                          attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None),
             dict(scale_attn_weights=False)),
    # Without biases of keys: where layers have no rotary positions, their gradient is zero but for rounding.
    "smollm3": ("smollm3", dict(num_hidden_layers=4, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=4,
                                rope_parameters=rope("default"), mlp_bias=True),
                dict(no_rope_layers=[1, 1, 1, 1])),
    "olmo2": ("olmo2", dict(**DIVIDED, rope_parameters=rope("default")), dict(rope_parameters=rope("default", 1000.0))),
    "olmo3": ("olmo3", dict(**DIVIDED, num_hidden_layers=4, sliding_window=4,
                            rope_parameters=dict(full_attention=YARN | OLMO3_THETA, sliding_attention=dict(rope_type="default", **OLMO3_THETA))),
              dict(rope_parameters=dict.fromkeys(["full_attention", "sliding_attention"], dict(rope_type="default", **OLMO3_THETA)))),
    # Long documents rotate differently in some layers only; or there are layers that do not rotate.
    "olmo3_long": ("olmo3", dict(**DIVIDED, num_hidden_layers=4, sliding_window=4,
                                 rope_parameters=dict(full_attention=LONG_HEAD, sliding_attention=rope("default"))),
                   dict(rope_parameters=dict.fromkeys(["full_attention", "sliding_attention"], rope("default")))),
    "exaone4_long": ("exaone4", dict(num_hidden_layers=4, sliding_window=4, rope_parameters=LONG_HEAD), PLAIN),
    "granite": ("granite", dict(**DIVIDED, rope_parameters=rope("default"), embedding_multiplier=3.0, attention_multiplier=0.25,
                                residual_multiplier=0.5, logits_scaling=4.0, attention_bias=True, tie_word_embeddings=True),
                dict(residual_multiplier=1.0)),
    "seed_oss": ("seed_oss", dict(rope_parameters=rope("default"), attention_out_bias=True, mlp_bias=True, attention_dropout=0.0,
                                  residual_dropout=0.0), dict(rope_parameters=rope("default", 1000.0))),
    "hunyuan": ("hunyuan_v1_dense", dict(rope_parameters=rope("dynamic", alpha=50.0, factor=1.0)), PLAIN),
    "exaone4": ("exaone4", dict(num_hidden_layers=4, sliding_window=4, rope_parameters=rope("default")),
                dict(layer_types=["sliding_attention"] * 4)),
    # Some documents are longer than the original length, others are not.
    "phi3": ("phi3", dict(hidden_size=40, rope_parameters=dict(**LONG, partial_rotary_factor=0.6), sliding_window=12,
                          original_max_position_embeddings=ORIGINAL), dict(sliding_window=None)),
    "glm": ("glm", dict(head_dim=12, rope_parameters=rope("default", partial_rotary_factor=0.5)),
            dict(rope_parameters=rope("default", partial_rotary_factor=1.0))),
    "glm4": ("glm4", dict(head_dim=12, rope_parameters=rope("default", partial_rotary_factor=0.5)),
             dict(rope_parameters=rope("default", partial_rotary_factor=1.0))),
    "ernie4_5": ("ernie4_5", dict(rope_parameters=rope("default"), use_bias=True, tie_word_embeddings=True),
                 dict(rope_parameters=rope("default", 1000.0))),
    "cohere2": ("cohere2", dict(hidden_size=40, num_hidden_layers=4, sliding_window=4, rope_parameters=rope("default"),
                                layer_norm_eps=1e-5, logit_scale=0.25, tie_word_embeddings=True),
                dict(layer_types=["sliding_attention"] * 4)),
    "starcoder2": ("starcoder2", dict(hidden_size=40, sliding_window=5, rope_parameters=rope("default"), tie_word_embeddings=True,
                                      norm_epsilon=1e-5), dict(sliding_window=None)),
    "gemma": ("gemma", dict(**DIVIDED, rope_parameters=rope("default"), tie_word_embeddings=True), dict(rope_parameters=rope("default", 1000.0))),
    "cohere": ("cohere", dict(hidden_size=40, rope_parameters=rope("default"), layer_norm_eps=1e-5, logit_scale=0.25, attention_bias=True,
                              tie_word_embeddings=True), dict(logit_scale=0.5)),
    "helium": ("helium", dict(hidden_size=40, rope_parameters=rope("default")), dict(rope_parameters=rope("default", 1000.0))),
    "stablelm": ("stablelm", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5, use_qkv_bias=True),
                 dict(rope_parameters=rope("default", partial_rotary_factor=1.0))),
    "stablelm_parallel": ("stablelm", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5,
                                           use_parallel_residual=True), dict(rope_parameters=rope("default", partial_rotary_factor=1.0))),
    "cwm": ("cwm", dict(**DIVIDED, num_hidden_layers=3, sliding_window=4, rope_parameters=LLAMA3, bos_token_id=1), dict(rope_parameters=rope("default"))),
    "hyperclovax": ("hyperclovax", dict(**DIVIDED, rope_parameters=rope("default"), embedding_multiplier=3.0, attention_multiplier=0.25,
                                        residual_multiplier=0.5, logits_scaling=0.5), dict(attention_multiplier=1.0)),
    "granitemoehybrid": ("granitemoehybrid", dict(hidden_size=40, mamba_n_heads=4, mamba_expand=2, mamba_d_head="auto", rope_parameters=rope("default"),
                                                  layer_types=["full_attention"] * 2, position_embedding_type="rope", num_local_experts=0,
                                                  shared_intermediate_size=26, embedding_multiplier=3.0, attention_multiplier=0.25,
                                                  residual_multiplier=0.5, logits_scaling=4.0), dict(position_embedding_type=None)),
    "youtu": ("youtu", dict(**DIVIDED, **LATENT, q_lora_rank=9, rope_parameters=rope("default"), tie_word_embeddings=True, attention_bias=True),
              dict(rope_interleave=False)),
    "minicpm3": ("minicpm3", dict(**DIVIDED, **LATENT, q_lora_rank=9, rope_parameters=rope("default"), tie_word_embeddings=True, scale_emb=3, scale_depth=1.2,
                                  dim_model_base=5), dict(scale_depth=1.0)),
    # The first document is longer than a block of the delta rule. Value heads share key heads.
    "qwen3_5": ("qwen3_5_text", dict(**NEXT, tie_word_embeddings=True),
                dict(rope_parameters=rope("default", partial_rotary_factor=1.0))),
    # Heads of two sizes, of which some pairs do not rotate.
    "gemma4": ("gemma4_text", dict(**GEMMA4, num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"], final_logit_softcapping=2.0),
               dict(rope_parameters=GEMMA4_ROPES | dict(full_attention=rope("proportional", 50.0, partial_rotary_factor=1.0)))),
    # The last two layers of each kind use keys and values of others, and have a wider MLP; values are keys in layers without a window.
    "gemma4_shared": ("gemma4_text", dict(**GEMMA4, num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=4,
                                          attention_k_eq_v=True, num_global_key_value_heads=1, use_double_wide_mlp=True, attention_bias=True),
                      dict(num_global_key_value_heads=1, rope_parameters=GEMMA4_ROPES | dict(sliding_attention=rope("default", 50.0)))),
    # Inputs of each layer besides the residual stream.
    "gemma4_inputs": ("gemma4_text", GEMMA4 | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
                                                   use_double_wide_mlp=True, hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCAB + 2),
                      dict(rope_parameters=GEMMA4_ROPES | dict(sliding_attention=rope("default", 50.0)))),
    "arcee": ("arcee", dict(hidden_size=40, rope_parameters=YARN, mlp_bias=True), PLAIN),
    "jais2": ("jais2", dict(hidden_size=40, rope_parameters=rope("default"), layer_norm_eps=1e-5), dict(rope_parameters=rope("default", 1000.0))),
    # The first document is longer than the taps, the second is not.
    "lfm2": ("lfm2", dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], norm_eps=1e-5, intermediate_size=33, block_multiple_of=4,
                          rope_parameters=rope("default"), tie_word_embeddings=True), dict(rope_parameters=rope("default", 10000.0))),
    # Norms around the branches, a gate for each head, windows in some layers; pairs of heads that do not rotate in the others.
    "lfm3": ("lfm3", dict(num_hidden_layers=4, head_dim=12, layer_types=["conv", "sliding_attention", "full_attention", "conv"], norm_eps=1e-5, sliding_window=4,
                          rope_parameters=GEMMA4_ROPES, attention_bias=True, tie_word_embeddings=True),
             dict(rope_parameters=GEMMA4_ROPES | dict(full_attention=rope("proportional", 50.0, partial_rotary_factor=1.0)))),
    # Norms before the branches with a gated delta net, and after the others. Without rotary positions, as published.
    "olmo_hybrid": ("olmo_hybrid", NEXT | dict(head_dim=None, num_attention_heads=2, num_key_value_heads=1, rope_parameters=dict(rope_type="default", rope_theta=None)),
                    dict(linear_allow_neg_eigval=False)),
    "vaultgemma": ("vaultgemma", dict(**DIVIDED, num_hidden_layers=3, sliding_window=4, query_pre_attn_scalar=3, attn_logit_softcapping=1.5,
                                      final_logit_softcapping=2.0, tie_word_embeddings=True), dict(attn_logit_softcapping=None)),
    "nemotron": ("nemotron", dict(rope_parameters=rope("default", partial_rotary_factor=0.4), norm_eps=1e-3, attention_bias=True, mlp_bias=True),
                 dict(rope_parameters=rope("default", partial_rotary_factor=0.8))),
    "olmo": ("olmo", dict(hidden_size=40, rope_parameters=rope("default")), dict(rope_parameters=rope("default", 1000.0))),
    # A dense layer and experts side by side in each block, of which the last is wider; inputs of each layer.
    "gemma4_experts": ("gemma4_text", GEMMA4 | dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"],
                                                    num_kv_shared_layers=1, use_double_wide_mlp=True, hidden_size_per_layer_input=6,
                                                    vocab_size_per_layer_input=VOCAB, enable_moe_block=True, num_experts=5, top_k_experts=2,
                                                    moe_intermediate_size=14, tie_word_embeddings=False), dict(top_k_experts=1)),
    "apertus": ("apertus", dict(**DIVIDED, rope_parameters=LLAMA3, attention_bias=True), PLAIN),
    # Mamba layers, of which heads share keys and queries in two groups that are normalized apart; attention without rotary positions.
    "granitemoehybrid_mamba": ("granitemoehybrid", dict(**MAMBA, num_hidden_layers=3, max_position_embeddings=128, num_local_experts=0, time_step_limit=[0.9, 2.0],
                                                        layer_types=["linear_attention", "full_attention", "linear_attention"]),
                               dict(time_step_limit=[0.0, 2.0])),
    # Blocks of one branch each.
    "nemotron_h": ("nemotron_h", dict(**NEMOTRON_H, num_hidden_layers=5, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
                                      mlp_bias=True, time_step_min=0.9), dict(time_step_min=0.001)),
    # Attention with rotary positions among Mamba layers.
    "bamba": ("bamba", dict(hidden_size=20, mamba_n_heads=4, mamba_expand=2, mamba_d_head=10, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16,
                            num_hidden_layers=3, max_position_embeddings=128, attn_layer_indices=[1], head_dim=12, attention_bias=True,
                            rope_parameters=rope("default", partial_rotary_factor=0.5)),
              dict(rope_parameters=rope("default", partial_rotary_factor=1.0))),
    "phi": ("phi", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5),
            dict(rope_parameters=rope("default", partial_rotary_factor=0.8))),
    # Both branches read the block's input, each through a norm of its own; or one after the other.
    "gpt_neox": ("gpt_neox", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5),
                 dict(rope_parameters=rope("default", partial_rotary_factor=0.8))),
    "gpt_neox_serial": ("gpt_neox", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5,
                                         use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast", tie_word_embeddings=True),
                        dict(use_parallel_residual=True)),
    "gptj": ("gptj", dict(vocab_size=VOCAB, n_embd=40, n_layer=2, n_head=4, n_inner=22, n_positions=32, rotary_dim=4, bos_token_id=None, eos_token_id=None),
             dict(rotary_dim=8)),
    # One matrix by four blocks: queries, values and keys of each.
    "codegen": ("codegen", dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=8, n_inner=22, n_positions=32, rotary_dim=2, bos_token_id=None, eos_token_id=None),
                dict(rotary_dim=4)),
    # Learned positions; queries that share a key and a value, or not.
    "gpt_bigcode": ("gpt_bigcode", BIG_CODE, dict(scale_attn_weights=False)),
    "gpt_bigcode_heads": ("gpt_bigcode", dict(**BIG_CODE, multi_query=False, scale_attn_weights=False, tie_word_embeddings=False), dict(scale_attn_weights=True)),
    "gpt_neo": ("gpt_neo", dict(vocab_size=VOCAB, hidden_size=24, num_layers=3, num_heads=4, intermediate_size=22, max_position_embeddings=32, window_size=4,
                                attention_types=[[["global", "local"], 1], [["local"], 1]], bos_token_id=None, eos_token_id=None), dict(window_size=32)),
    "gemma4_unified": ("gemma4_unified_text", {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"} | dict(
        num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"], attention_k_eq_v=True, num_global_key_value_heads=1),
        dict(rope_parameters=GEMMA4_ROPES | dict(sliding_attention=rope("default", 50.0)))),
    "nanochat": ("nanochat", dict(hidden_size=40, rope_parameters=rope("default"), final_logit_softcapping=1.5), dict(final_logit_softcapping=15.0)),
    # Three layouts of queries, keys and values; branches with one norm, with a norm of each, and one after the other.
    "falcon": ("falcon", FALCON, dict(rope_parameters=rope("default", 1000.0))),
    "falcon_new": ("falcon", dict(**FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True), dict(rope_parameters=rope("default", 1000.0))),
    "falcon_serial": ("falcon", dict(**FALCON, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False), dict(rope_parameters=rope("default", 1000.0))),
    # Limits of queries, keys and values; LayerNorm of heads with one weight, a tensor for each head, and one of all.
    "olmo_clipped": ("olmo", dict(hidden_size=40, rope_parameters=rope("default"), clip_qkv=0.5), dict(clip_qkv=None)),
    "phi_normed": ("phi", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5, qk_layernorm=True),
                   dict(rope_parameters=rope("default", partial_rotary_factor=0.8))),
    "persimmon": ("persimmon", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5),
                  dict(rope_parameters=rope("default", partial_rotary_factor=0.8))),
    "stablelm_normed": ("stablelm", dict(hidden_size=40, rope_parameters=rope("default", partial_rotary_factor=0.4), layer_norm_eps=1e-5, qk_layernorm=True),
                        dict(rope_parameters=rope("default", partial_rotary_factor=0.8))),
    "cohere_normed": ("cohere", dict(hidden_size=40, rope_parameters=rope("default"), layer_norm_eps=1e-5, logit_scale=0.25, use_qk_norm=True,
                                     tie_word_embeddings=True), dict(logit_scale=0.5)),
    # Learned positions.
    "opt": ("opt", dict(**LEARNED, hidden_size=20, ffn_dim=22, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32), dict(activation_function="gelu")),
    "biogpt": ("biogpt", dict(**LEARNED, hidden_size=20, intermediate_size=22, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32),
               dict(scale_embedding=False)),
    # A Llama with a base of its own.
    "exaone": ("exaone", dict(**DIVIDED), dict(rope_parameters=rope("default", 1000.0))),
    # The last layer has no rotary positions.
    "granite_swa": ("granite_swa", dict(**DIVIDED, num_hidden_layers=3, sliding_window=4, layer_rope_theta=[100.0, 20.0, 0],
                                        layer_types=["full_attention", "sliding_attention", "sliding_attention"], embedding_multiplier=3.0,
                                        attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0),
                    dict(layer_rope_theta=[100.0, 100.0, 100.0])),
    # Attention and Mamba in each block, and factors, of which none is a power of two.
    "falcon_h1": ("falcon_h1", FALCON_H1, dict(ssm_multipliers=[0.7, 0.6, 0.9, 1.3, 1.0], key_multiplier=0.3)),
    # Another layer has a norm after its gate.
    "falcon_h1_normed": ("falcon_h1", FALCON_H1 | dict(mamba_rms_norm=True, mamba_d_ssm=None, mamba_d_head="auto", tie_word_embeddings=True),
                         dict(mamba_rms_norm=True, mlp_multipliers=[1.7, 0.9])),
}
LONG_DOCUMENTS = [70, 1, 9, 4]
RECURRENT = {"bamba", "falcon_h1", "falcon_h1_normed", "qwen3_5", "olmo_hybrid", "granitemoehybrid_mamba", "nemotron_h"}
SPARSE = {"gemma4_experts"}  # errors of bf16 say little: another expert may be chosen


def named():
    """The cases that the command line names, or all."""
    return sys.argv[2:] or list(CASES)


def runnable(config):
    """With what transformers 5.24 needs for shared keys and values without inputs of layers, which it slices otherwise."""
    if getattr(config, "num_kv_shared_layers", 0) and not config.hidden_size_per_layer_input:
        config.output_hidden_states = True
    return config


def build(model_type, keys):
    sizes = {} if model_type in ("gpt2", "gptj", "codegen", "falcon", "opt", "biogpt", "gpt_bigcode", "gpt_neo") else SIZES
    every = {key: value for key, value in (sizes | keys).items() if (key, value) != ("head_dim", None)}
    config = runnable(AutoConfig.for_model(model_type, **every))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").float().eval()


def in_double(model_type, keys, weights, batch):
    """Gradients by transformers' code with float64 in place of float32: those of decays, which are sums of sums along a document,
    are off by 2e-5 in float32."""
    import importlib.util
    import inspect

    plain = inspect.getmodule(type(build(model_type, keys)))
    source = inspect.getsource(plain).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = source.replace("torch.float)", "torch.float64)")
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(f"{plain.__name__}_double", file.name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    config = build(model_type, keys).config
    config._attn_implementation = "eager"
    model = getattr(module, type(build(model_type, keys)).__name__)(config).double().eval()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
    model.tie_weights()
    tokens, targets, lengths = batch
    logits = torch.cat([model(d[None]).logits[0] for d in tokens.split(lengths)])
    torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100).backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def in_files(config, tensors):
    """The tensors under the names that files have, which are those of modules but for OLMo hybrid; and each expert's of those that hold
    the experts of a block. Numbers stand for any of their parts."""
    if getattr(config, "enable_moe_block", False):
        result = {}
        for name, tensor in tensors.items():
            if name.endswith("experts.gate_up_proj"):
                result |= {f"{name}[{e}.{k}]": half for e, both in enumerate(tensor) for k, half in enumerate(both.chunk(2))}
            elif name.endswith("experts.down_proj"):
                result |= {f"{name}[{e}]": down for e, down in enumerate(tensor)}
            else:
                result[name] = tensor
        return {name: tensor.contiguous() for name, tensor in result.items()}
    if getattr(config, "use_qk_norm", False):
        heads = dict(q_norm=config.num_attention_heads, k_norm=config.num_key_value_heads)
        result = {}
        for name, tensor in tensors.items():
            n = heads.get(name.split(".")[-2])
            parts = tensor if isinstance(tensor, torch.Tensor) else [tensor] * (n or 0)
            result |= {f"{name}[{h}]": parts[h].clone() if isinstance(tensor, torch.Tensor) else tensor for h in range(n)} if n else {name: tensor}
        return result
    if config.model_type != "olmo_hybrid":
        return tensors
    keys, values = [config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads * config.linear_value_head_dim]
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("linear_attn.conv1d.weight"):
            parts = tensor.split([keys, keys, values]) if isinstance(tensor, torch.Tensor) else [tensor] * 3
            result |= {name.replace("conv1d", f"{part}_conv1d"): of_part.clone() if isinstance(of_part, torch.Tensor) else of_part
                       for part, of_part in zip("qkv", parts)}
            continue
        if any(name.startswith(f"model.layers.{i}.") for i, kind in enumerate(config.layer_types) if kind == "linear_attention"):
            name = name.replace("input_layernorm", "attention_layer_norm").replace("post_attention_layernorm", "feedforward_layer_norm")
        result[name] = tensor
    return result


def of_modules(weights):
    """The tensors of modules, from those of `in_files` with each expert's."""
    result = {name: weight for name, weight in weights.items() if "[" not in name}
    for whole in sorted({name.partition("[")[0] for name in weights if "[" in name}):
        parts = [weights[name] for name in sorted(weights, key=lambda name: (len(name), name)) if name.startswith(f"{whole}[")]
        halves = f"{whole}[0.0]" in weights
        result[whole] = torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2])] if halves else parts)
    return result


def chosen(model, tokens, lengths):
    """No choice of an expert may hang on a rounding error."""
    probabilities, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith("router"):
            hooks.append(module.register_forward_hook(lambda *of: probabilities.append(of[2][0].detach())))
    gradients(model, tokens, torch.zeros_like(tokens), lengths)
    [hook.remove() for hook in hooks]
    assert len(probabilities) == len(lengths) * model.config.num_hidden_layers
    top = torch.cat(probabilities).sort(descending=True).values
    assert (top[:, model.config.top_k_experts - 1] - top[:, model.config.top_k_experts]).min() > 2e-5


def greedy(model, prompt, count):
    """Without a cache: the whole sequence each time. No step may hang on a rounding error."""
    tokens = prompt.clone()
    for _ in range(count):
        with torch.no_grad():
            top = model(tokens[None], use_cache=False).logits[0, -1].topk(2)
        assert top.values[0] - top.values[1] > 1e-4, top
        tokens = torch.cat([tokens, top.indices[:1]])
    settings = dict(max_new_tokens=count, do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0)
    theirs = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)[0].reshape(-1)
    assert torch.equal(tokens, theirs), (tokens, theirs)
    return tokens[len(prompt):]


HERE = Path(__file__).parent


def bf16_errors(model_type, keys, weights, batch):
    """How far bf16 is from fp32: the root mean square over the weights and 16 neighbors, each weight moved by about one rounding to
    bf16. Errors of one set of weights say little: where outputs are normalized, a tiny model's vary by a factor of 5 among neighbors."""
    every = []
    for neighbor in range(17):
        torch.manual_seed(neighbor)
        nearby = {n: (w * (1 + 0.004 * (neighbor > 0) * torch.randn_like(w))).bfloat16().float() for n, w in weights.items()}
        results = []
        for dtype in [torch.float32, torch.bfloat16]:
            model = build(model_type, keys)
            model.load_state_dict(nearby, strict=False)
            model.tie_weights()
            results.append(gradients(model.to(dtype), *batch))
        (logits, loss, grads), (logits16, loss16, grads16) = results
        every.append([abs(loss16 - loss) / loss, relative(logits16, logits), *(relative(grads16[n], grads[n]) for n in grads)])
    loss, logits, *errors = torch.tensor(every, dtype=torch.float64).square().mean(0).sqrt().tolist()
    return dict(loss=loss, logits=logits, grads=dict(zip(grads, errors)))


def errors():
    for name in named():
        model_type, keys, _ = CASES[name]
        assert model_type != "olmo_hybrid", "its names are those of files here: use make"
        path, golden = HERE / "families" / f"{name}.json", load_file(HERE / "families" / f"{name}.safetensors")
        said = json.loads(path.read_text())
        weights = {n.removeprefix("weight."): w.float() for n, w in golden.items() if n.startswith("weight.")}
        batch = golden["tokens"].long(), golden["targets"].long(), said["lengths"]
        said["bf16_errors"] = bf16_errors(model_type, keys, weights, batch)
        path.write_text(json.dumps(said, indent=1) + "\n")
        print(f"{name}: logits {said['bf16_errors']['logits']:.1e}")


def make():
    out = HERE / "families"
    out.mkdir(exist_ok=True)
    for name in named():
        model_type, keys, without = CASES[name]
        torch.manual_seed(100 + list(CASES).index(name))
        model = build(model_type, keys)
        randomize(model)
        for module_name, parameter in model.named_parameters():
            # The epsilon of the norm after the rule is fixed: where outputs are smaller than it, rounding errors do not show.
            if model_type == "olmo_hybrid" and module_name.endswith("conv1d.weight"):
                parameter.data[2 * model.config.linear_num_key_heads * model.config.linear_key_head_dim:] /= 64
            if module_name.endswith("router.proj.weight"):
                parameter.data *= 8  # so that experts have different weights
        lengths = [14, 14, 14] if name == "llama_dynamic" else LONG_DOCUMENTS if name in RECURRENT else LENGTHS
        tokens = torch.randint(VOCAB, (sum(lengths),))
        targets = targets_of(tokens, lengths)
        targets[[2, 20]] = -100
        logits, loss, grads = gradients(model, tokens, targets, lengths)
        if name in RECURRENT or name in ("gemma4_inputs", "gemma4_experts", "apertus"):
            grads = in_double(model_type, keys, model.state_dict(), (tokens, targets, lengths))

        if name in SPARSE:
            chosen(model, tokens, lengths)

        other = build(model_type, keys | without)
        other.load_state_dict(model.state_dict())
        changed = relative(gradients(other, tokens, targets, lengths)[0], logits)
        assert changed > 0.003, f"{name}: what it is about changes logits by {changed:.1e} only"

        prompt, count = (tokens[:14], 1) if name == "llama_dynamic" else (tokens[:6], NEW)
        said = greedy(model, prompt, count)
        tensors = {f"weight.{n}": p.detach().bfloat16().contiguous()
                   for n, p in in_files(model.config, dict([*model.named_parameters(), *scalars(model)])).items()}
        tensors |= {f"grad.{n}": g.contiguous() for n, g in in_files(model.config, grads).items()}
        tensors |= {"logits": logits, "tokens": tokens.int(), "targets": targets.int(), "prompt": prompt.int(),
                    "greedy": said.int()}
        save_file(tensors, out / f"{name}.safetensors")
        errors = None if name in SPARSE else bf16_errors(model_type, keys, model.state_dict(), (tokens, targets, lengths))
        if errors:
            errors["grads"] = in_files(model.config, errors["grads"])
        golden = dict(lengths=lengths, loss=loss, bf16_errors=errors,
                      config=json.loads(model.config.to_json_string(use_diff=False)),
                      made_with=f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
        (out / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")
        print(f"{name}: loss {loss:.4f}, without: {changed:.1e}, greedy {said.tolist()}")


def written(name):
    """The config.json that tests/engine/families.rs wrote."""
    return AutoConfig.from_pretrained(HERE.parent.parent / os.environ.get("CARGO_TARGET_DIR", "target") / "tmp" / "families" / name)


def four():
    assert transformers.__version__.startswith("4."), transformers.__version__
    for name in named():
        config = written(name)
        config.dtype = "bfloat16"
        (HERE / "families" / f"{name}.4.json").write_text(config.to_json_string())


def check():
    for name in named():
        golden = load_file(HERE / "families" / f"{name}.safetensors")
        lengths = json.loads((HERE / "families" / f"{name}.json").read_text())["lengths"]
        weights = {n.removeprefix("weight."): w.float() for n, w in golden.items() if n.startswith("weight.")}
        with tempfile.TemporaryDirectory() as directory:
            runnable(written(name)).save_pretrained(directory)
            save_file(of_modules(weights), Path(directory) / "model.safetensors", {"format": "pt"})
            loading = dict(attn_implementation="eager", experts_implementation="eager", dtype=torch.float32, output_loading_info=True)
            model, said = AutoModelForCausalLM.from_pretrained(directory, **loading)
        assert not said["unexpected_keys"] and set(said["missing_keys"]) <= {"lm_head.weight"}, said
        with torch.no_grad():
            logits = torch.cat([model(d[None].long()).logits[0] for d in golden["tokens"].split(lengths)])
        difference = relative(logits, golden["logits"])
        assert difference < 1e-5, f"{name}: logits differ by {difference:.1e}"
        print(f"{name}: {type(model).__name__} of transformers {transformers.__version__}, logits differ by {difference:.1e}")


if __name__ == "__main__":
    {"make": make, "errors": errors, "four": four, "check": check}[sys.argv[1]]()
