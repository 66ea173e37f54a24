"""Adapters that PEFT 0.21 trains in other ways than this project does, and PEFT's merges. Needs torch, transformers and
peft.

    python adapters.py     writes adapters/: base models, adapters of them, and the tensors that merging changes
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

HERE = Path(__file__).parent / "adapters"
SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
BASES = {
    "qwen2": Qwen2Config(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=20, n_embd=8, n_head=2, n_layer=1, n_positions=16, bos_token_id=None, eos_token_id=None
    ),
}
ADAPTERS = {
    "patterns": (
        "qwen2",
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": r".*\.(q_proj|v_proj|up_proj|down_proj)",
            "rank_pattern": {"v_proj": 2, r"^model\.layers\.1\.mlp\..*": 4},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 7, r"(q|up)_proj": 2},
        },
    ),
    "whole": (
        "qwen2",
        {
            "r": 2,
            "target_modules": ["q_proj", "k_proj"],
            "lora_bias": True,
            "modules_to_save": ["embed_tokens", "lm_head", "norm"],
        },
    ),
    "embeddings": (
        "qwen2",
        {"r": 2, "target_modules": ["embed_tokens", "lm_head", "q_proj"], "bias": "all", "init_lora_weights": "gaussian"},
    ),
    "together": (
        "tied",
        {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "apart": ("tied", {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]}),
    "tokens": ("qwen2", {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 17], "lm_head": [19]}}),
    "tied_tokens": ("tied", {"r": 2, "target_modules": ["o_proj"], "trainable_token_indices": [18, 0, 7]}),
    "transposed": ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "dora": ("tied", {"r": 2, "lora_alpha": 3, "use_dora": True, "target_modules": "all-linear"}),
    "dora_transposed": ("gpt2", {"r": 2, "use_dora": True, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "dora_embeddings": ("qwen2", {"r": 2, "use_dora": True, "target_modules": ["embed_tokens"]}),
    # As after a vocabulary has grown, for which PEFT saves the embeddings under their own names, too.
    "named_twice": ("qwen2", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "factors_together": (
        "tied",
        {"r": 2, "lora_alpha": 3, "target_modules": ["embed_tokens", "o_proj"], "ensure_weight_tying": True},
    ),
}
# Adapters of parameters: PEFT finds no modules among the experts of transformers 5.
SPARSE = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=4, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6, norm_topk_prob=True
    ),
}
STACKED = {"stacked": ("qwen3_moe", {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"})}


def base(name):
    return AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32)


def together(adapted):
    """The tied model that computes what the adapted one does. PEFT's own merge adds the product to the one tensor twice."""
    tokens = torch.tensor([[3, 17, 5, 0, 19]])
    with torch.no_grad():
        wanted = adapted.eval()(tokens).logits
        merged = base("tied")
        for name, module in adapted.base_model.model.named_modules():
            if hasattr(module, "get_delta_weight") and name != "lm_head":
                merged.get_submodule(name).weight += module.get_delta_weight("default")
        assert (merged.eval()(tokens).logits - wanted).abs().max() < 1e-5
    return merged.state_dict()


def saved(model):
    """The tensors under their names in files."""
    with tempfile.TemporaryDirectory() as at:
        model.save_pretrained(at)
        return load_file(Path(at) / "model.safetensors")


def write(bases, adapters, seed):
    torch.manual_seed(seed)
    for name, config in bases.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink()
    for name, (of, keys) in adapters.items():
        model = get_peft_model(base(of), LoraConfig(task_type="CAUSAL_LM", **keys))
        for parameter in model.parameters():
            if parameter.requires_grad:
                values = (0.3 * torch.randn_like(parameter)).bfloat16().float()
                if name == "factors_together":  # those of the head are views of those of the embeddings
                    parameter.data.copy_(values)
                else:
                    parameter.data = values
        model.save_pretrained(HERE / name, save_embedding_layers=name == "named_twice" or "auto")
        (HERE / name / "README.md").unlink()
        path = HERE / name / "adapter_config.json"  # without the name of the directory that it was made in
        config = {**json.loads(path.read_text()), "base_model_name_or_path": of}
        for key in ["target_modules", "target_parameters"]:
            if isinstance(config[key], list):
                config[key] = sorted(config[key])
        path.write_text(json.dumps(config, indent=2) + "\n")
        tensors = saved if name in STACKED else lambda model: model.state_dict()
        before = tensors(base(of))
        loaded = PeftModel.from_pretrained(base(of), HERE / name)
        after = together(loaded) if name == "factors_together" else tensors(loaded.merge_and_unload())
        assert before.keys() == after.keys()
        changed = {key: value.clone() for key, value in after.items() if not torch.equal(value, before[key])}
        if name != "apart":  # PEFT itself saves a model that is not the one it trained
            save_file(changed, HERE / name / "merged.safetensors")
        print(name, len(changed), "tensors changed")


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    write(BASES, ADAPTERS, 11)
    write(SPARSE, STACKED, 12)


if __name__ == "__main__":
    main()
