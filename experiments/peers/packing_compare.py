"""Compares packing with one sample per sequence, on samples of skewed lengths: real tokens per second of run_fsdp, rounds interleaved.

Needs: `cargo build --release`. Run: python3 experiments/peers/packing_compare.py [--rounds 3]
Lengths are lognormal (median 67 bytes, mean about 100, truncated at 510). Neither side pads: without packing, a micro-batch holds
concatenated samples. So packing gains from fuller micro-batches: fewer passes over the weights for the same tokens.
"""
import argparse
import json
import math
import pathlib
import random
import statistics
import subprocess
import tempfile

from compare import RELEASE


def rows(n):
    draw = random.Random(7)
    words = "the of and a to in is you that it he was for on are as with his they at".split()
    for _ in range(n):
        length = min(510, max(8, int(math.exp(draw.gauss(4.2, 0.9)))))
        text = ""
        while len(text) < length:
            text += draw.choice(words) + " "
        yield text[:length]


def run(directory, packed):
    metrics = directory / "m.jsonl"
    metrics.unlink(missing_ok=True)
    flags = "--max-len 512 --batch-size 4 --embed-dim 512 --num-layers 4 --num-heads 8 --max-steps 8 --no-eval --no-sample"
    command = [str(RELEASE / "run_fsdp"), "--dataset", str(directory / "skew.jsonl"), *flags.split()]
    command += ["--metrics-path", str(metrics), "--packing-samples" if packed else "--no-packing-samples"]
    subprocess.run(command, check=True, capture_output=True)
    steps = [e for e in map(json.loads, metrics.read_text().splitlines()) if e["event"] == "step"][2:]
    return {
        "packed": packed,
        "tokens_per_sec": sum(s["tokens"] for s in steps) / sum(s["step_time_s"] for s in steps),
        "fill": statistics.mean(s["fill"] for s in steps),
        "samples_per_step": statistics.mean(s["samples"] for s in steps),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        (directory / "skew.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows(4000)))
        results = []
        for _ in range(args.rounds):
            for packed in [False, True]:
                results.append(run(directory, packed))
                print(json.dumps(results[-1]), flush=True)
    median = [statistics.median(r["tokens_per_sec"] for r in results if r["packed"] == p) for p in [False, True]]
    print(f"real tokens/s: {median[0]:.0f} without, {median[1]:.0f} with packing, {median[1] / median[0]:.2f} times")


if __name__ == "__main__":
    main()
