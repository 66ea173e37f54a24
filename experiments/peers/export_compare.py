"""Loads what flatshard exports with transformers and PEFT, and compares logits and scores: of models from scratch a mixture of
experts (`configs/moe.yaml`, a Mixtral) and reward models with and without experts; and adapters of experts, with merged models.

Needs: pip install torch transformers peft numpy safetensors, and `cargo build --release`.
Run:   python3 experiments/peers/export_compare.py [--steps 20] [--prompts 4]
Logits are compared as log-probabilities of all tokens after a prompt: flatshard writes those of one-token answers with
--precompute-ref-logps. Scores are compared as differences of two, which a pair's held-out loss gives. Fails above 1e-5.
"""
import argparse
import json
import math
import pathlib
import random
import subprocess
import tempfile

import numpy
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from compare import RELEASE, ROOT

MOE = ["--config", str(ROOT / "configs/moe.yaml")]
DENSE = ["--embed-dim", "256", "--num-layers", "4", "--num-heads", "4", "--max-len", "256", "--batch-size", "8"]
BOUND = 1e-5
TINY = dict(vocab_size=29, hidden_size=24, intermediate_size=22, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, num_hidden_layers=3,
            bos_token_id=None, eos_token_id=None, pad_token_id=None)
FAMILIES = {
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe": dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=14, shared_expert_intermediate_size=10, mlp_only_layers=[1]),
    "qwen3_moe": dict(head_dim=10, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=14, mlp_only_layers=[]),
    "olmoe": dict(num_experts=5, num_experts_per_tok=2),
}


def run(directory, *flags):
    """Events of a run in a directory of its own."""
    directory.mkdir()
    metrics = directory / "metrics.jsonl"
    command = [str(RELEASE / "run_fsdp"), *map(str, flags), "--no-sample", "--metrics-path", str(metrics)]
    done = subprocess.run([*command, "--cache-dir", str(directory / "cache")], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def rows(path, pairs):
    keys = ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, pair))) + "\n" for pair in pairs))
    return path


def load(kind, directory, **more):
    model, info = kind.from_pretrained(directory, output_loading_info=True, dtype=torch.float32, **more)
    assert not any(info.values()), info
    return model.eval()


def numbers(cache, count):
    """The only kept file of so many numbers: a header of 4096 bytes, then f64."""
    found = []
    for path in cache.glob("*.tokens"):
        data = path.read_bytes()
        width, words, of_rows = numpy.frombuffer(data[24:48], "<u8")
        if (width, words, of_rows) == (4, 2 * count, 0):
            found.append(numpy.frombuffer(data[4096:4096 + 8 * count], "<f8"))
    assert len(found) == 1, f"{len(found)} files of {count} numbers"
    return found[0]


def logits(scratch, steps, count):
    """The largest difference of a log-probability."""
    export = scratch / "moe"
    run(scratch / "pretraining", *MOE, "--dataset", "synthetic", "--max-steps", steps, "--save-hf", export)
    model = load(AutoModelForCausalLM, export)
    assert type(model).__name__ == "MixtralForCausalLM"
    vocab = model.config.vocab_size
    prompts = [[random.randrange(vocab) for _ in range(random.randint(1, 60))] for _ in range(count)]
    pairs = [(prompt, [token], [token + 1]) for prompt in prompts for token in range(0, vocab, 2)]
    data = rows(scratch / "answers.jsonl", pairs)
    flags = ["--pretrain", export, "--ref-pretrain", export, "--objective", "dpo", "--precompute-ref-logps", "--dataset", data]
    run(scratch / "answers", *flags, "--max-steps", 1, "--max-len", 64, "--batch-size", 8, "--no-eval", "--nproc-per-node", 1)
    ours = -numbers(scratch / "answers/cache", len(prompts) * vocab).reshape(count, vocab)
    with torch.inference_mode():
        theirs = [model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1) for prompt in prompts]
    return numpy.abs(ours - torch.stack(theirs).numpy()).max()


def scores(scratch, name, flags, steps, count, expected):
    """The largest difference of a difference of two scores."""
    ids = lambda longest: [random.randrange(256) for _ in range(random.randint(1, longest))]
    pairs = [(ids(20), ids(20), ids(20)) for _ in range(64)]
    export, data = scratch / name, rows(scratch / f"{name}.jsonl", pairs)
    common = ["--objective", "rm", "--dataset", data, "--max-len", 64, "--batch-size", 4]
    run(scratch / f"{name}-training", *flags, *common, "--lr", 1e-3, "--max-steps", steps, "--save-hf", export)
    model = load(AutoModelForSequenceClassification, export)
    assert type(model).__name__ == expected, type(model)
    worst = 0.0
    for number, (prompt, *answers) in enumerate(pairs[:count]):
        one = rows(scratch / f"{name}-{number}.jsonl", [pairs[number]])
        evaluated = ["--eval-dataset", one, "--max-steps", 1, "--lr", 0, "--nproc-per-node", 1]
        events = run(scratch / f"{name}-{number}", "--pretrain", export, *common, *evaluated)
        loss = [event["loss"] for event in events if event["event"] == "eval"][-1]
        with torch.inference_mode():
            chosen, rejected = (model(torch.tensor([prompt + answer])).logits.item() for answer in answers)
        worst = max(worst, abs(-math.log(math.expm1(loss)) - (chosen - rejected)))
    return worst


def adapters(scratch, family):
    """The largest difference of a logit of an adapter that PEFT loads from the model that flatshard merges."""
    torch.manual_seed(0)
    base, adapter, merged = (scratch / f"{family}{part}" for part in ("", "-adapter", "-merged"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY, **FAMILIES[family])).float()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.ndim > 1 else torch.nn.init.normal_(p, 1.0, 0.2)
    model.save_pretrained(base)
    data = scratch / f"{family}.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [random.randrange(29) for _ in range(12)]}) + "\n" for _ in range(64)))
    targets = ["q_proj", *(["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"])]
    lora = ["--lora-rank", 4, "--lora-alpha", 8, "--lora-target-modules", *targets, "--warmup-steps", 0, "--lr", 0.01]
    data = ["--dataset", data, "--max-len", 16, "--batch-size", 2, "--max-steps", 10]
    run(scratch / f"{family}-training", "--pretrain", base, *data, *lora, "--save-adapter", adapter)
    merge = [str(RELEASE / "run_fsdp"), "--lora-merge", str(adapter), "--pretrain", str(base), "--save-hf", str(merged)]
    subprocess.run(merge, check=True, capture_output=True)
    tokens = torch.randint(29, (4, 20))
    # Narrow experts are not multiples of what torch's grouped product takes.
    models = [load(AutoModelForCausalLM, path, experts_implementation="eager") for path in (base, merged)]
    with torch.inference_mode():
        plain, whole = (model(tokens).logits for model in models)
        found = PeftModel.from_pretrained(models[0], adapter).eval()(tokens).logits
    assert (whole - plain).abs().max() > 0.1, "the adapter does nothing"
    return (whole - found).abs().max().item()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=20, help="training steps before an export [default: 20]")
    p.add_argument("--prompts", type=int, default=4, help="prompts, and pairs of each reward model [default: 4]")
    a = p.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        found = {
            "mixture of experts: log-probabilities": logits(scratch, a.steps, a.prompts),
            "reward model: score differences": scores(scratch, "rm", DENSE, a.steps, a.prompts, "LlamaForSequenceClassification"),
            "sparse reward model: score differences": scores(scratch, "moe-rm", MOE, a.steps, a.prompts, "MixtralForSequenceClassification"),
        }
        found |= {f"adapters of {family}: logits": adapters(scratch, family) for family in FAMILIES}
    for what, error in found.items():
        print(f"{what} within {error:.1e}")
    assert max(found.values()) < BOUND, f"above {BOUND}"


if __name__ == "__main__":
    main()
