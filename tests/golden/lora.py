"""Adapters that change hands with the PEFT library. Needs torch, transformers and peft.

    python lora.py make    writes lora/: an adapter as PEFT saves it, of pretrained/llama, and the logits of the two
    python lora.py check   reads what tests/cli/lora.rs trained and saved when it last ran: target/tmp/lora/adapter, and
                           target/tmp/lora-4bit/adapter of 4-bit weights, which is merged into the original ones
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pretrained import TOKENS, logits
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
BASE = HERE / "pretrained" / "llama"


def base(path=BASE):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def make():
    torch.manual_seed(9)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj"]
    model = get_peft_model(base(), LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (0.2 * torch.randn_like(parameter)).bfloat16().float()
    model.save_pretrained(HERE / "lora")
    (HERE / "lora" / "README.md").unlink()
    path = HERE / "lora" / "adapter_config.json"  # without the name of the directory that it was made in
    config = {**json.loads(path.read_text()), "base_model_name_or_path": "pretrained/llama"}
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2) + "\n")
    said = logits(model, TOKENS).tolist()
    (HERE / "lora" / "logits.json").write_text(json.dumps({"tokens": TOKENS, "logits": said}) + "\n")


def check():
    files = HERE.parent.parent / os.environ.get("CARGO_TARGET_DIR", "target") / "tmp"
    for path, of in [(files / "lora", BASE), (files / "lora-4bit", files / "lora-4bit" / "base")]:
        model = PeftModel.from_pretrained(base(of), path / "adapter")
        ours, theirs = logits(base(path / "merged"), TOKENS), logits(model, TOKENS)
        plain = logits(base(of), TOKENS)
        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        learnt = ((plain - theirs).abs().max() / theirs.abs().max()).item()
        assert difference < 1e-5 < learnt, (difference, learnt)
        print(f"PEFT reads the adapter: merged logits differ by {difference:.1e}, the base model's by {learnt:.1e}")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]]()
