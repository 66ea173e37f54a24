"""Golden values of mixtures of experts from Hugging Face transformers (eager) for tests/engine/experts.rs.

    python experts.py [CASE...]   writes experts/, or the files of these cases

For each family a tiny random model (weights exact in bf16, stored as such, one tensor per expert as in files) and in fp32:
logits, token loss, load-balancing loss, and every gradient of the token loss plus AUX times the load-balancing loss, for a
batch of documents that go through the model one by one; the load-balancing loss is that of all their tokens together."""

import json
import re
import sys
from pathlib import Path

import torch
import transformers
from make import randomize, targets_of
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

VOCAB = 29
LENGTHS = [17, 1, 9, 4]  # tokens of each document
AUX = 0.25
SIZES = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=22, num_attention_heads=4, num_key_value_heads=2,
             num_hidden_layers=2, max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=False,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
MANY_HEADS = dict(num_key_value_heads=4)
# The rule's outputs are small at the start of a document: with a smaller epsilon, their norm would show rounding errors.
DELTA = dict(rms_norm_eps=1e-3, head_dim=12, num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"], linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5,
             rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5))
CASES = {
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe": dict(num_hidden_layers=3, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=14,
                      shared_expert_intermediate_size=10, mlp_only_layers=[1]),
    "qwen3_moe": dict(head_dim=10, num_local_experts=6, num_experts_per_tok=3, moe_intermediate_size=14, norm_topk_prob=True,
                      attention_bias=True),
    "olmoe": dict(num_experts=5, num_experts_per_tok=2),
    # Some inputs are clamped, and some documents are longer than the window and than the length before scaling.
    "gpt_oss": dict(head_dim=10, num_local_experts=5, num_experts_per_tok=2, sliding_window=4, swiglu_limit=0.5,
                    rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, beta_fast=4.0, truncate=False,
                                         original_max_position_embeddings=8)),
    # Values are narrower than keys, then wider; some documents are longer than the length before scaling.
    "deepseek_v3": dict(**MANY_HEADS, num_hidden_layers=3, n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=14,
                        n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=9, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4,
                        v_head_dim=8, rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, beta_fast=4.0, mscale=0.5,
                                                           mscale_all_dim=2.0, original_max_position_embeddings=8)),
    "deepseek_v2": dict(**MANY_HEADS, n_routed_experts=6, n_group=3, topk_group=2, topk_method="group_limited_greedy", num_experts_per_tok=3,
                        moe_intermediate_size=14, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=8,
                        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, routed_scaling_factor=1.5),
    "glm4_moe_lite": dict(**MANY_HEADS, num_hidden_layers=3, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, q_lora_rank=9,
                          kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=12, attention_bias=True,
                          mlp_layer_types=["dense", "sparse", "sparse"]),
    "glm4_moe": dict(head_dim=12, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, attention_bias=True),
    "dots1": dict(head_dim=10, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, n_shared_experts=1, norm_topk_prob=True,
                  first_k_dense_replace=1, sliding_window=4, max_window_layers=1),
    "granitemoe": dict(num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5,
                       logits_scaling=4.0),
    "granitemoeshared": dict(num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=10, attention_bias=True),
    "ernie4_5_moe": dict(head_dim=10, num_hidden_layers=3, moe_num_experts=6, moe_k=3, moe_intermediate_size=14, moe_num_shared_experts=2,
                         moe_layer_start_index=1, moe_layer_interval=1),
    "hunyuan_v1_moe": dict(head_dim=10, num_experts=5, moe_topk=2),
    "minimax_m2": dict(head_dim=12, num_local_experts=5, num_experts_per_tok=2,
                       rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)),
    "solar_open": dict(head_dim=10, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, n_shared_experts=1),
    "qwen3_next": dict(**DELTA, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=14,
                       shared_expert_intermediate_size=10, mlp_only_layers=[1]),
    "qwen3_5_moe_text": dict(**DELTA, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=14,
                             shared_expert_intermediate_size=10),
    "lfm2_moe": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=5, num_experts_per_tok=2,
                     moe_intermediate_size=14, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    "exaone_moe": dict(head_dim=10, num_hidden_layers=4, sliding_window=4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14,
                       rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    "mellum": dict(head_dim=10, num_hidden_layers=3, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                   mlp_layer_types=["dense", "sparse", "sparse"], num_experts=6, num_experts_per_tok=3, moe_intermediate_size=14,
                   rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=50.0), sliding_attention=dict(rope_type="default", rope_theta=20.0))),
    # GLM 4.5 and later, beside the Air models.
    "glm4_moe_normed": dict(head_dim=12, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, attention_bias=True, use_qk_norm=True),
    "granitemoehybrid": dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
                             mamba_n_heads=4, mamba_expand=2, mamba_d_head=12, mamba_n_groups=1, mamba_d_state=6, mamba_chunk_size=16,
                             num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=10, position_embedding_type=None,
                             embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0, max_position_embeddings=128),
    # Blocks of one branch each; experts, of which one is shared, have two matrices.
    "nemotron_h": dict(num_hidden_layers=5, layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"], head_dim=10, mamba_num_heads=4,
                       mamba_head_dim=6, n_groups=2, ssm_state_size=6, chunk_size=16, n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3,
                       moe_intermediate_size=14, moe_shared_expert_intermediate_size=10, routed_scaling_factor=2.5),
    # The experts' output is normalized.
    "flex_olmo": dict(num_experts=5, num_experts_per_tok=2),
    "afmoe": dict(head_dim=10, num_hidden_layers=4, global_attn_every_n_layers=2, sliding_window=4, num_dense_layers=1, num_experts=5, num_experts_per_tok=2,
                  moe_intermediate_size=14, num_shared_experts=2, route_scale=1.5, mup_enabled=True, attention_bias=True,
                  rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    "granitemoe_swa": dict(sliding_window=4, layer_rope_theta=[100.0, 20.0],
                           num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=10, embedding_multiplier=3.0, attention_multiplier=0.25,
                           residual_multiplier=0.5, logits_scaling=4.0),
    "hy_v3": dict(head_dim=10, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, num_shared_experts=2, attention_bias=True,
                  router_scaling_factor=1.5,
                  rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    # The experts' output is normalized, and that of the dense layer is not.
    "axk1": dict(**MANY_HEADS, n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=14, n_shared_experts=2,
                 q_lora_rank=9, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
    # Whole heads rotate, by the class's own base.
    "sarvam_moe": dict(head_dim=12, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, num_shared_experts=2, use_qkv_bias=True),
    # Next to attention; the first layer is dense, has another width, and rotates without a window, which the third does not.
    "cohere2_moe": dict(head_dim=10, num_hidden_layers=4, sliding_window=4, sliding_window_pattern=2, first_k_dense_replace=1, prefix_dense_intermediate_size=30,
                        num_experts=5, num_experts_per_tok=2, num_shared_experts=2, rms_norm_eps=None, logit_scale=0.25,
                        rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    # RMSNorm; sums in place of means, and weights that are not normalized. The second layer is dense and does not rotate.
    "cohere2_moe_normed": dict(head_dim=10, num_hidden_layers=3, sliding_window=4, first_k_dense_replace=2, prefix_dense_sliding_window_pattern=2, num_experts=5,
                               num_experts_per_tok=2, num_shared_experts=1, shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid",
                               norm_topk_prob=False, logit_scale=0.25, rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    # Inputs of experts are weighted; heads are normalized after their rotation, and in the third layer neither: there queries grow.
    # Experts are chosen one after the other; many are nearly as good as the best. No document is longer than before scaling.
    "phimoe": dict(num_local_experts=5, router_jitter_noise=0.3, attention_bias=True, lm_head_bias=True, original_max_position_embeddings=20,
                   rope_parameters=dict(rope_type="longrope", rope_theta=100.0, short_factor=[1.5, 1.0, 2.0], long_factor=[2.0, 5.0, 9.0], short_mscale=1.2,
                                        long_mscale=1.4, original_max_position_embeddings=20)),
    "llama4_text": dict(head_dim=10, num_hidden_layers=4, intermediate_size=14, intermediate_size_mlp=22, num_local_experts=5, interleave_moe_layer_step=2,
                        no_rope_layer_interval=3, attention_chunk_size=20, floor_scale=4, attn_scale=0.5,
                        rope_parameters=dict(rope_type="default", rope_theta=100.0)),
}
# Chosen by scores: transformers has no load-balancing loss of them.
SCORED = {"phimoe", "llama4_text", "cohere2_moe", "cohere2_moe_normed", "sarvam_moe", "hy_v3", "axk1", "afmoe", "nemotron_h", "exaone_moe", "lfm2_moe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "solar_open", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "glm4_moe", "glm4_moe_normed", "dots1"}


def biases(model):
    """The biases of the choice of experts."""
    own = [*model.named_buffers(), *model.named_parameters()]
    return {n: b.data for n, b in own if n.endswith(("e_score_correction_bias", "expert_bias"))}


def per_expert(model_type, tensors):
    """The tensors as in files: transformers 5 holds those of all experts together."""
    mixtral, result = model_type in ("mixtral", "minimax_m2", "phimoe"), {}
    gate, up, down = ("w1", "w3", "w2") if mixtral or model_type == "lfm2_moe" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in tensors.items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.").replace(".router.", ".gate.")
        if model_type == "gpt_oss" and ".experts." in name:
            result |= {f"{name}[{e}]": of_expert.contiguous() for e, of_expert in enumerate(tensor)}
            continue
        if model_type == "llama4_text" and ".experts." in name:
            halves = enumerate(tensor.chunk(2, -1)) if name.endswith("gate_up_proj") else [(None, tensor)]
            result |= {f"{name}[{e}]" if k is None else f"{name}[{e}:{k}]": of_expert.contiguous() for k, part in halves for e, of_expert in enumerate(part)}
            continue
        if model_type == "granitemoe_swa" and ".experts." in name:
            halves = enumerate(tensor.chunk(2, 1)) if name.endswith("gate_up_proj") else [(None, tensor)]
            result |= {f"{name}[{e}]" if k is None else f"{name}[{e}.{k}]": of_expert.contiguous() for k, part in halves for e, of_expert in enumerate(part)}
            continue
        if model_type == "hy_v3":
            name = name.replace("mlp.gate.", "mlp.router.gate.").replace("e_score_correction_bias", "expert_bias").replace("shared_experts.", "shared_mlp.")
        name = name.replace("mlp.post_mlp_layernorm", "post_mlp_layernorm") if model_type == "axk1" else name
        if model_type.startswith("granitemoe") and model_type != "granitemoe_swa":
            name = name.replace("router.weight", "router.layer.weight").replace("experts.down_proj", "output_linear.weight")
            if name.endswith("experts.gate_up_proj"):
                whole = name.replace("experts.gate_up_proj", "input_linear.weight")
                result |= {f"{whole}[{e}.{k}]": half.contiguous() for e, both in enumerate(tensor) for k, half in enumerate(both.chunk(2))}
                continue
            if name.endswith("output_linear.weight") and tensor.dim() == 3:
                result |= {f"{name}[{e}]": down.contiguous() for e, down in enumerate(tensor)}
                continue
        name = name.replace(".gate.e_score", ".e_score") if model_type == "exaone_moe" else name
        name = name.replace(".gate.moe_statics.", ".moe_statics.") if model_type == "ernie4_5_moe" else name
        if match := re.fullmatch(r"(.*\.experts)\.(up_proj|down_proj)", name) if model_type == "nemotron_h" else None:
            result |= {f"{match[1]}.{e}.{match[2]}.weight": of_expert.contiguous() for e, of_expert in enumerate(tensor)}
        elif match := re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name):
            for e, of_expert in enumerate(tensor):
                kinds = [(down, of_expert)] if match[2] == "down_proj" else zip((gate, up), of_expert.chunk(2))
                result |= {f"{match[1]}.{e}.{kind}.weight": part.contiguous() for kind, part in kinds}
        else:
            result[name] = tensor.contiguous()
    return result


def main():
    named = sys.argv[1:] or list(CASES)
    out = Path(__file__).parent / "experts"
    out.mkdir(exist_ok=True)
    for seed, (name, keys) in enumerate(CASES.items()):
        if name not in named:
            continue
        torch.manual_seed(300 + seed)
        config = AutoConfig.for_model(name.removesuffix("_normed"), **(SIZES | keys))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").float().eval()
        randomize(model)
        for buffer in biases(model).values():
            buffer.copy_(torch.normal(0.0, 0.1, buffer.shape).bfloat16())
        tokens = torch.randint(VOCAB, (sum(LENGTHS),))
        targets = targets_of(tokens, LENGTHS)
        targets[[2, 20]] = -100
        scored = name in SCORED
        outputs = [model(d[None], **({} if scored else dict(output_router_logits=True))) for d in tokens.split(LENGTHS)]
        logits = torch.cat([o.logits[0] for o in outputs])
        layers = () if scored else tuple(torch.cat(layer) for layer in zip(*[o.router_logits for o in outputs]))
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        aux = torch.zeros(()) if scored else load_balancing_loss_func(layers, experts, config.num_experts_per_tok)
        # No choice of an expert may hang on a rounding error.
        for layer in layers:
            top = layer.softmax(-1).sort(descending=True).values
            assert (top[:, config.num_experts_per_tok - 1] - top[:, config.num_experts_per_tok]).min() > 2e-5
        loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100)
        factor = 0.0 if scored else AUX
        (loss + factor * aux).backward()
        # A buffer has no gradient: zeros stand for it.
        grads = {n: torch.zeros_like(b) for n, b in biases(model).items()} | {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
        tensors = {f"weight.{n}": p.bfloat16() for n, p in per_expert(name, biases(model) | {n: p.detach() for n, p in model.named_parameters()}).items()}
        tensors |= {f"grad.{n}": g for n, g in per_expert(name, grads).items()}
        tensors |= {"logits": logits.detach(), "tokens": tokens.int(), "targets": targets.int()}
        save_file(tensors, out / f"{name}.safetensors")
        golden = dict(lengths=LENGTHS, loss=loss.item(), aux=None if scored else aux.item(), factor=factor,
                      config=json.loads(model.config.to_json_string(use_diff=False)),
                      made_with=f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
        (out / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")
        print(f"{name}: loss {loss.item():.4f}, load-balancing loss {aux.item():.4f}, {len(grads)} parameters")


if __name__ == "__main__":
    main()
