"""flatshard beside PyTorch DDP, FSDP1 and FSDP2 on CPU ranks: one model, one machine, one run, medians of several rounds.

Needs: pip install torch transformers numpy, and `cargo build --release`.
Run:   python3 experiments/peers/compare.py [--rounds 3] [--precision fp32 bf16] [--ablate] [--out results.json]
Each round runs every contender once, in turn, so that a busy neighbour hurts all alike. Prints a table of tokens/s, the
ratio to the best peer of the precision, and peak memory of the largest rank. With --ablate the contenders are run_fsdp, FSDP1
and FSDP2, each with every setting of ABLATIONS that it has.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
MODEL = {"embed-dim": 768, "num-layers": 6, "num-heads": 12, "num-kv-heads": 12, "ff-hidden-dim": 3072, "vocab-size": 32000}
BATCH = {"max-len": 256, "batch-size": 4}
# Flags of run_fsdp and of torch_peer.py alike; all start from the first, since PyTorch does not prefetch in forward by default.
PREFETCH = ["--backward-prefetch", "BACKWARD_PRE", "--forward-prefetch"]
ABLATIONS = {
    "": PREFETCH,
    "checkpointing": [*PREFETCH, "--activation-checkpoint"],
    "no prefetch": ["--backward-prefetch", "NONE", "--no-forward-prefetch"],
    "BACKWARD_POST": ["--backward-prefetch", "BACKWARD_POST", "--forward-prefetch"],
    "no limit_all_gathers": [*PREFETCH, "--no-limit-all-gathers"],
}
FSDP2_LACKS = ["BACKWARD_POST", "no limit_all_gathers"]
PEERS = [("ddp", False), ("fsdp1", False), ("fsdp2", False), ("ddp", True), ("fsdp2", True)]


def flags(values):
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def torch_peer(impl, compiled, precision, steps, ablation=None):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "experiments/peers/torch_peer.py")]
    command += ["--impl", impl, "--precision", precision, *flags(MODEL | BATCH | {"max-steps": steps})]
    command += ["--compile"] if compiled else []
    command += ABLATIONS[ablation] if ablation is not None else []
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result | {"name": ", ".join(filter(None, [result["name"], ablation]))}


def flatshard(binary, precision, steps, ablation=None):
    with tempfile.TemporaryDirectory() as directory:
        metrics = pathlib.Path(directory) / "metrics.jsonl"
        command = [str(RELEASE / binary), "--nproc-per-node", "2", "--dataset", "synthetic", "--no-sample", "--no-eval"]
        command += [*flags(MODEL | BATCH), "--max-steps", str(steps), "--precision", precision, "--grad-clip", "1.0"]
        command += ["--lr", "3e-4", "--metrics-path", str(metrics)]
        command += ABLATIONS[ablation] if ablation is not None else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    run = next(row for row in rows if row["event"] == "run")
    timed = [row for row in rows if row["event"] == "step"][2:]
    return {
        "name": ", ".join(filter(None, [f"flatshard {binary}", ablation])),
        "precision": precision,
        "params": run["params"],
        "world": run["world_size"],
        "tokens_per_sec": round(statistics.median(row["tokens_per_sec"] for row in timed), 1),
        "peak_mem_mib": round(max(row["peak_mem_bytes"] for row in timed) / 2**20),
    }


def contenders(a, precision):
    """Functions that run one contender each."""
    if a.ablate:
        yield from (partial(flatshard, "run_fsdp", precision, a.steps, name) for name in ABLATIONS)
        yield from (partial(torch_peer, "fsdp1", False, precision, a.steps, name) for name in ABLATIONS)
        yield from (partial(torch_peer, "fsdp2", False, precision, a.steps, name) for name in ABLATIONS if name not in FSDP2_LACKS)
    else:
        yield from (partial(flatshard, binary, precision, a.steps) for binary in ("run_fsdp", "run_ddp"))
        yield from (partial(torch_peer, impl, c, precision, a.steps) for impl, c in PEERS if not (c and a.no_compile))


def machine():
    info = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), platform.processor())
    features = [f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {f}" in info]
    return {"cpu": model, "features": features, "cores": os.cpu_count(), "date": datetime.date.today().isoformat()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    p.add_argument("--no-compile", action="store_true", help="leave out the compiled peers")
    p.add_argument("--ablate", action="store_true", help="checkpointing, prefetch and limit_all_gathers, one at a time")
    p.add_argument("--out", type=pathlib.Path, help="write every measurement as JSON")
    a = p.parse_args()
    if a.ablate and a.no_compile:
        p.error("--no-compile has no effect here: --ablate compiles nothing")
    runs = []
    for number in range(a.rounds):
        for precision in a.precision:
            for contender in contenders(a, precision):
                try:
                    runs.append(contender() | {"round": number})
                except RuntimeError as error:
                    print(f"one contender failed and is left out:\n{error}", file=sys.stderr)
                    continue
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(f"| precision | contender | tokens/s, median of {a.rounds} (min-max) | to the best peer | peak MiB of a rank |")
    print("| --- | --- | --- | --- | --- |")
    for precision in a.precision:
        rows = {}
        for run in (r for r in runs if r["precision"] == precision):
            rows.setdefault(run["name"], []).append(run)
        speed = {name: statistics.median(r["tokens_per_sec"] for r in rs) for name, rs in rows.items()}
        best = max((s for name, s in speed.items() if name.startswith("torch")), default=float("nan"))
        for name, rs in sorted(rows.items(), key=lambda item: -speed[item[0]]):
            low, high = (f(r["tokens_per_sec"] for r in rs) for f in (min, max))
            peak = max(r["peak_mem_mib"] for r in rs)
            print(f"| {precision} | {name} | {speed[name]:.0f} ({low:.0f}-{high:.0f}) | {speed[name] / best:.2f} | {peak} |")
    if a.out:
        a.out.write_text(json.dumps({"machine": machine(), "model": MODEL | BATCH, "steps": a.steps, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
