"""The modules that PEFT's target_modules match: regular expressions, and ends of paths. Needs torch, transformers and peft.

    python targets.py     writes targets.json: for each model of other goldens and each target, the modules
"""

import json
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = Path(__file__).parent
TARGETS = {
    "pretrained/llama": [
        r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
        r".*\.(q_proj|v_proj)",
        r"model\.layers\.1\.(self_attn|mlp)\..*_proj",
        r".*self_attn.*proj|model.layers.0.mlp.down_proj",
        ["layers.0.self_attn.q_proj", "mlp.down_proj"],
        ["model.layers.1.mlp.up_proj"],
    ],
    "towers/vl_qwen3": [
        r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
        r"model\.language_model\.layers\.0\.self_attn\.(q|k)_proj",
    ],
    "towers/vl_smolvlm": [r"model.text_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"],
}


def modules(of):
    config = AutoConfig.from_pretrained(HERE / of)
    auto = AutoModelForImageTextToText if of.startswith("towers") else AutoModelForCausalLM
    with torch.device("meta"):
        return [name for name, _ in auto.from_config(config).named_modules()]


def main():
    out = []
    for of, targets in TARGETS.items():
        for target in targets:
            config = LoraConfig(target_modules=target)
            matched = [name for name in modules(of) if check_target_module_exists(config, name)]
            assert matched, (of, target)
            out.append({"model": of, "target": target, "modules": sorted(matched)})
    (HERE / "targets.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in out) + "\n]\n")


if __name__ == "__main__":
    main()
