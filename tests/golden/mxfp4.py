"""A tiny gpt-oss as it is published, with the experts' matrices in MXFP4, for tests/checkpoint/export/mxfp4.rs.

    python mxfp4.py          writes mxfp4/: the model, and expected.safetensors with what transformers expands its matrices to
    python mxfp4.py check    loads what the test exported into transformers, and compares logits with those of the expanded model
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parent / "mxfp4"
SIZES = dict(vocab_size=13, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
             num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=32, sliding_window=4,
             rope_parameters=dict(rope_type="default", rope_theta=100.0), bos_token_id=None, eos_token_id=None, pad_token_id=None)


def make():
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES)).float()
    stored, expected = {}, {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = torch.normal(0.0, 0.3, parameter.shape).bfloat16()
            continue
        count, inputs, outputs = parameter.shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16)).to(torch.uint8)
        scales = torch.randint(119, 128, (count, outputs, inputs // 32)).to(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    HERE.mkdir(exist_ok=True)
    save_file(stored, HERE / "model.safetensors", metadata=dict(format="pt"))
    save_file(expected, HERE / "expected.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False)) | dict(architectures=["GptOssForCausalLM"], dtype="bfloat16")
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    (HERE / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def check():
    exported = HERE.parent.parent.parent / os.environ.get("CARGO_TARGET_DIR", "target") / "tmp" / "export" / "mxfp4"
    load = dict(dtype=torch.float32, attn_implementation="eager")
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True, **load)
    assert not any(info.values()), info
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES), attn_implementation="eager").float()
    weights = load_file(HERE / "model.safetensors") | load_file(HERE / "expected.safetensors")
    weights = {name: weight.float() for name, weight in weights.items() if not name.endswith(("_blocks", "_scales"))}
    reference.load_state_dict(weights)
    tokens = torch.arange(13)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)
    print("mxfp4: logits are equal")


if __name__ == "__main__":
    check() if sys.argv[1:] == ["check"] else make()
