"""Compares fine-tuning with transformers, PEFT and TRL: one machine, one run, contenders in turn, medians of several rounds.

Needs: pip install torch transformers peft trl datasets tokenizers numpy, and `cargo build --release`.
Run:   python3 experiments/peers/adapters_compare.py [--jobs lora-8 packed ...] [--models smollm2] [--precision fp32 bf16] [--rounds 3] [--out results.json]
       ... --device cuda --models llama-8b --jobs lora-16 --precision bf16 --length 2048 --rows 4     on one GPU
Models have the shapes named and random weights; rows are random words, of which a part is prompt. Both sides train on the same rows with AdamW,
clipping at 1.0, and as many threads in all. The number that leads is tokens with loss per second; `of all` counts prompts too. Each round runs every
contender once, so that other load on the machine affects all alike. The peer of `packed` packs rows into sequences of 512 too, whose positions
start again in each row (transformers masks by them); that of `qlora` needs bitsandbytes. The ratio of bf16 is that to the peer's faster precision.
"""
import argparse
import importlib.metadata
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

from compare import RELEASE, machine

PEER = pathlib.Path(__file__).with_name("adapters_peer.py")
MODELS = {
    "smollm2": dict(kind="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                    num_key_value_heads=3),
    "qwen3-0.6b": dict(kind="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                       num_key_value_heads=8, head_dim=128),
    "llama-1b": dict(kind="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                     num_key_value_heads=8),
    "llama-8b": dict(kind="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                     num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16"),
}
# What each job adds to a run of ours. Rows of a step and their lengths: prompt, answer.
LORA = ["--lora-target-modules", "all-linear"]
PACK = ["--packing-samples", "--max-len", "512"]
JOBS = {
    "full": dict(flags=[], rank=0), "lora-8": dict(flags=["--lora-rank", "8", *LORA], rank=8), "lora-16": dict(flags=["--lora-rank", "16", *LORA], rank=16),
    "lora-64": dict(flags=["--lora-rank", "64", *LORA], rank=64),
    "qlora": dict(flags=["--lora-rank", "8", *LORA, "--load-in-4bit"], rank=8), "packed": dict(flags=["--lora-rank", "8", *LORA, *PACK], rank=8),
    "dpo": dict(flags=["--lora-rank", "8", *LORA, "--objective", "dpo"], rank=8), "evaluate": dict(flags=[], rank=0),
}


def rows(job, vocab, count, length, seed):
    """Rows of ids: half of each is prompt, except where lengths vary, with a third."""
    draw = random.Random(seed)
    words = lambda n: [draw.randrange(8, vocab) for _ in range(n)]
    for _ in range(count):
        if job == "dpo":
            yield {f"{part}_input_ids": words(length // 2) for part in ("prompt", "chosen", "rejected")}
            continue
        tokens = draw.randrange(50, 201) if job == "packed" else length
        ids, prompt = words(tokens), tokens // 3 if job == "packed" else tokens // 2
        yield {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


def ours(a, job, precision, model, data):
    with tempfile.TemporaryDirectory() as scratch:
        metrics = pathlib.Path(scratch, "metrics.jsonl")
        each = a.rows // 2 if job == "dpo" else a.rows
        command = [a.bin / "run_fsdp", "--pretrain", model, "--dataset", data, "--nproc-per-node", a.ranks]
        command += ["--device", a.device, "--threads-per-rank", max(a.threads // a.ranks, 1), "--batch-size", each // a.ranks, "--grad-accum", "1", "--precision", precision]
        command += ["--lr", "1e-4", "--seed", a.seed, "--no-sample", "--metrics-path", metrics]
        command += [] if "--max-len" in JOBS[job]["flags"] else ["--no-packing-samples", "--max-len", 2 * a.length if job == "dpo" else a.length]
        command += JOBS[job]["flags"]
        if job == "evaluate":
            command += ["--max-steps", "1", "--eval-dataset", data, "--eval-on-start"]
        else:
            command += ["--max-steps", a.steps, "--no-eval"]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
    if job == "evaluate":
        of = next(event for event in events if event["event"] == "eval")
        return {"name": "flatshard", "tokens_per_sec": of["tokens"] / of["seconds"], "all_tokens_per_sec": None, "peak_mem_mib": None}
    steps = [event for event in events if event["event"] == "step"][1:]
    of = lambda key: statistics.median(step[key] / step["step_time_s"] for step in steps)
    peak = max(step["peak_mem_bytes"] for step in steps) * a.ranks
    return {"name": "flatshard", "tokens_per_sec": of("trained_tokens"), "all_tokens_per_sec": of("tokens"), "peak_mem_mib": round(peak / 2**20)}


def peer(a, job, precision, model, data):
    command = [sys.executable, PEER, "--model", model, "--data", data, "--job", job, "--rank", JOBS[job]["rank"], "--precision", precision, "--steps", a.steps]
    command += ["--rows", a.rows // 2 if job == "dpo" else a.rows, "--threads", a.threads, "--seed", a.seed, "--device", a.device]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": str(a.threads)})
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(a, runs):
    print(f"| model | job | precision | contender | tokens with loss/s, median of {a.rounds} (min-max) | of all | ratio to the peer | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for model, job in itertools.product(a.models, a.jobs):
        of = {}
        for run in (run for run in runs if (run["model"], run["job"]) == (model, job)):
            of.setdefault((run["precision"], run["name"]), []).append(run)
        speed = {key: statistics.median(run["tokens_per_sec"] for run in rs) for key, rs in of.items()}
        peers = {precision: value for (precision, name), value in speed.items() if name != "flatshard"}
        for (precision, name), rs in sorted(of.items()):
            low, high = (f(run["tokens_per_sec"] for run in rs) for f in (min, max))
            best = peers.get("fp32", 0) if precision == "fp32" else max(peers.values(), default=0)
            ratio = f"{speed[precision, name] / best:.2f}" if best else "–"
            every = f"{statistics.median(run['all_tokens_per_sec'] for run in rs):.0f}" if rs[0]["all_tokens_per_sec"] else "–"
            rate = f"{speed[precision, name]:.0f} ({low:.0f}-{high:.0f})"
            print(f"| {model} | {job} | {precision} | {name} | {rate} | {every} | {ratio} | {rs[0]['peak_mem_mib'] or '–'} |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--jobs", nargs="+", choices=JOBS, default=[job for job in JOBS if job != "lora-16"])
    p.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2", "qwen3-0.6b"])
    p.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--rows", type=int, default=4, help="of a step")
    p.add_argument("--length", type=int, default=256, help="tokens of a row, except of packed ones")
    p.add_argument("--steps", type=int, default=5, help="of which the first is not counted")
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="of each contender, in all")
    p.add_argument("--ranks", type=int, default=1, help="of ours, which share the threads")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--bin", type=pathlib.Path, default=RELEASE, help="directory of run_fsdp")
    p.add_argument("--out", type=pathlib.Path, help="write every measurement as JSON")
    a = p.parse_args()
    runs, failed = [], []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        for name in a.models:
            shape = scratch / f"{name}.json"
            shape.write_text(json.dumps(MODELS[name]))
            subprocess.run([sys.executable, PEER, "--make", scratch / name, "--shape", shape, "--seed", str(a.seed), "--device", a.device], check=True, capture_output=True)
            for job in a.jobs:
                lines = rows(job, MODELS[name]["vocab_size"], (a.steps + 1) * a.rows * (8 if job == "packed" else 1), a.length, a.seed)
                (scratch / f"{name}-{job}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for number, name, job, precision in itertools.product(range(a.rounds), a.models, a.jobs, a.precision):
            at = {"model": name, "job": job, "precision": precision, "round": number, "load": os.getloadavg()[0]}
            for contender in (ours, peer):
                try:
                    runs.append(contender(a, job, precision, scratch / name, scratch / f"{name}-{job}.jsonl") | at)
                except RuntimeError as error:
                    failed.append({"contender": contender.__name__} | at | {"error": str(error).strip()[-500:]})
                    print(f"{contender.__name__} failed: {failed[-1]}", file=sys.stderr)
                    continue
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    table(a, runs)
    if a.out:
        versions = {package: version(package) for package in ("torch", "transformers", "peft", "trl", "bitsandbytes")}
        about = {"machine": machine(), "versions": versions} | {key: getattr(a, key) for key in ("seed", "steps", "threads", "ranks", "device", "rows", "length")}
        a.out.write_text(json.dumps(about | {"shapes": MODELS, "runs": runs, "failed": failed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
