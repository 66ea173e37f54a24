"""Models that change hands with Hugging Face transformers. Needs torch and transformers.

    python pretrained.py make [NAME...]   writes pretrained/{llama,gpt,exaone,sarvam_moe}: what transformers saves (bf16), which tests/checkpoint/export.rs reads
    python pretrained.py check            reads target/tmp/export/*: what tests/checkpoint/export.rs saved when it last ran

Both compare logits: `logits.json` beside the model holds tokens and the logits after each, and what follows the first five of
them when the likeliest token is always taken.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from make import gpt, llama, randomize
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
TOKENS = [5, 11, 0, 46, 23, 11, 7, 7, 30, 2, 19, 40]


SIZES = dict(vocab_size=47, hidden_size=24, intermediate_size=22, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
             max_position_embeddings=32, bos_token_id=None, eos_token_id=None, pad_token_id=None)
EXPERTS = dict(head_dim=6, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, num_shared_experts=1, use_qkv_bias=True)


def published(model_type, **more):
    """A model whose files have other names than its class."""
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **more))


MODELS = dict(llama=llama, gpt=gpt, exaone=published("exaone"), sarvam_moe=published("sarvam_moe", **EXPERTS))


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].float()


def greedy(model, tokens):
    tokens = torch.tensor([tokens])
    seen = torch.ones_like(tokens)  # or token 0 would be taken for padding
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    return model.eval().generate(tokens, attention_mask=seen, **options)[0, tokens.shape[1] :].tolist()


def make():
    for name in sys.argv[2:] or MODELS:
        torch.manual_seed(8)
        model = MODELS[name]()
        randomize(model)
        path = HERE / "pretrained" / name
        said = logits(model, TOKENS).tolist()  # weights are exact in bf16, so fp32 logits are those of the file
        model.bfloat16().save_pretrained(path)
        (path / "generation_config.json").unlink(missing_ok=True)
        written = greedy(model.float(), TOKENS[:5])
        (path / "logits.json").write_text(json.dumps({"tokens": TOKENS, "logits": said, "greedy": written}) + "\n")
        print("made", path)


def check():
    for path in sorted((HERE.parent.parent / os.environ.get("CARGO_TARGET_DIR", "target") / "tmp" / "export").glob("*/")):
        name = path.name
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
        for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
            assert not info[kind], f"{name}: {kind}: {info[kind]}"
        assert str(model.dtype) == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(name.split("-")[-1], "torch.float32")
        model = model.float()
        golden = json.loads((path.parent / f"{name}.logits.json").read_text())
        ours, theirs = torch.tensor(golden["logits"]), logits(model, golden["tokens"])
        difference = (ours - theirs).abs().max().item() / theirs.abs().max().item()
        assert ours.shape == theirs.shape and difference < 2e-6, f"{name}: logits differ by {difference:.2e}"
        print(f"{name}: {type(model).__name__} of transformers {transformers.__version__}, every key matched, "
              f"logits differ by {difference:.1e} of their largest")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]]()
