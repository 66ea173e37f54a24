#!/usr/bin/env python3
"""Measures the error of `experiments plan`: against steps of the engine on this CPU, and against published throughput.

    cargo build --release --workspace && python3 experiments/peers/plan_check.py [--skip-cpu] [--output FILE]

The CPU part calibrates on two blocks of each model, predicts the whole model under each strategy and runs it; run nothing else
meanwhile. The published part plans the published configuration and compares tokens per second and GPU; differences between those runs
and this engine (PyTorch's eager kernels, another attention) are part of the error. Writes one JSON document.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
EXPERIMENTS = os.path.join(HERE, "..", "..", os.environ.get("CARGO_TARGET_DIR", "target"), "release", "experiments")

KEPT = "--activation-checkpoint off"
# Precision, flags.
CPU_MODELS = [
    ("fp32", f"--embed-dim 256 --num-layers 6 --num-heads 4 --vocab-size 4096 --max-len 256 --batch-size 4"),
    ("bf16", f"--embed-dim 256 --num-layers 6 --num-heads 4 --vocab-size 4096 --max-len 256 --batch-size 4 {KEPT}"),
    ("fp32", f"--embed-dim 512 --num-layers 8 --num-heads 8 --vocab-size 16384 --max-len 256 --batch-size 2 {KEPT}"),
    ("bf16", f"--embed-dim 512 --num-layers 8 --num-heads 8 --vocab-size 16384 --max-len 512 --batch-size 2 {KEPT}"),
    ("bf16", f"--embed-dim 768 --num-layers 6 --num-heads 12 --ff-hidden-dim 3072 --vocab-size 32000 --max-len 256 --batch-size 2 {KEPT}"),
]

MPT = "--arch gpt --vocab-size 50368 --sharding FULL_SHARD --sync-each-batch"
FOUNDRY = "mosaicml/llm-foundry scripts/train/benchmarking/README.md"
TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md (H100 96 GB HBM2e, 500 W)"
LLMC = "karpathy/llm.c scripts, headers"
FSDP = "Zhao et al. 2023, arXiv 2304.11277: TFLOP/s per GPU, counted as 4/3 of the model's (checkpointing)"


def mpt(dim, layers, heads):
    return f"{MPT} --embed-dim {dim} --num-layers {layers} --num-heads {heads}"


NONE, FULL = "--no-activation-checkpoint", "--activation-checkpoint full"
LLAMA_8B = (
    "--embed-dim 4096 --num-layers 32 --num-heads 32 --num-kv-heads 8 --ff-hidden-dim 14336 --vocab-size 128256 "
    "--max-len 8192 --batch-size 2 --sharding FULL_SHARD --activation-checkpoint selective"
)
# Model, source, published tokens per second and GPU, flags.
PUBLISHED = [
    ("MPT 760M, 8 H100, 2048", FOUNDRY, 63147, f"--gpus 8 {mpt(1536, 24, 12)} --max-len 2048 --batch-size 24 --grad-accum 2 {NONE}"),
    ("MPT 1B, 8 H100, 2048", FOUNDRY, 45455, f"--gpus 8 {mpt(2048, 24, 16)} --max-len 2048 --batch-size 14 {NONE}"),
    ("MPT 3B, 16 H100, 2048", FOUNDRY, 24142, f"--gpus 16 {mpt(2560, 32, 20)} --max-len 2048 --batch-size 10 --grad-accum 3 {NONE}"),
    ("MPT 7B, 8 H100, 2048", FOUNDRY, 10643, f"--gpus 8 {mpt(4096, 32, 32)} --max-len 2048 --batch-size 6 {NONE}"),
    ("MPT 7B, 8 H100, 4096", FOUNDRY, 8611, f"--gpus 8 {mpt(4096, 32, 32)} --max-len 4096 --batch-size 16 --grad-accum 2 {FULL}"),
    ("MPT 7B, 8 H100, 8192", FOUNDRY, 6935, f"--gpus 8 {mpt(4096, 32, 32)} --max-len 8192 --batch-size 8 --grad-accum 2 {FULL}"),
    ("MPT 7B, 8 H100, 32768", FOUNDRY, 3318, f"--gpus 8 {mpt(4096, 32, 32)} --max-len 32768 --batch-size 2 --grad-accum 2 {FULL}"),
    ("MPT 13B, 8 H100, 2048", FOUNDRY, 4792, f"--gpus 8 {mpt(5120, 40, 40)} --max-len 2048 --batch-size 2 {NONE}"),
    ("MPT 30B, 8 H100, 2048", FOUNDRY, 2002, f"--gpus 8 {mpt(7168, 48, 56)} --max-len 2048 --batch-size 3 --grad-accum 21 {FULL}"),
    ("MPT 7B, 128 H100, 2048", FOUNDRY, 10475, f"--gpus 128 {mpt(4096, 32, 32)} --max-len 2048 --batch-size 6 {NONE}"),
    ("MPT 7B, 256 H100, 2048", FOUNDRY, 10119, f"--gpus 256 {mpt(4096, 32, 32)} --max-len 2048 --batch-size 6 {NONE}"),
    ("MPT 7B, 512 H100, 2048", FOUNDRY, 9670, f"--gpus 512 {mpt(4096, 32, 32)} --max-len 2048 --batch-size 6 {NONE}"),
    ("MPT 70B, 512 H100, 2048", FOUNDRY, 1007, f"--gpus 512 {mpt(8192, 80, 64)} --max-len 2048 --batch-size 8 {FULL}"),
    ("Llama 3.1 8B, 8 H100, eager", TITAN, 5762, f"--gpus 8 {LLAMA_8B}"),
    ("Llama 3.1 8B, 8 H100, compiled", TITAN, 6667, f"--gpus 8 {LLAMA_8B}"),
    ("Llama 3.1 8B, 128 H100, eager", TITAN, 5605, f"--gpus 128 {LLAMA_8B}"),
    ("Llama 3.1 8B, 128 H100, compiled", TITAN, 6514, f"--gpus 128 {LLAMA_8B}"),
    (
        "GPT-2 124M, 8 A100, ZeRO-1 there, DDP here",
        LLMC,
        524288 / 0.300 / 8,
        "--gpu a100 --gpus 8 --arch gpt --embed-dim 768 --num-layers 12 --num-heads 12 --vocab-size 50304 --max-len 1024 "
        f"--batch-size 64 --strategy ddp {NONE}",
    ),
    (
        "GPT-2 1558M, 8 H100, ZeRO-1 there, DDP here",
        LLMC,
        1048576 / 2.80 / 8,
        "--gpus 8 --arch gpt --embed-dim 1600 --num-layers 48 --num-heads 25 --vocab-size 50304 --max-len 1024 "
        f"--batch-size 16 --grad-accum 8 --strategy ddp {NONE}",
    ),
]
GPT_175B = (
    "--gpu a100 --gpus 128 --arch gpt --embed-dim 12288 --num-layers 96 --num-heads 96 --vocab-size 50304 --max-len 2048 "
    "--sharding FULL_SHARD --activation-checkpoint full"
)
# The same in TFLOP/s per GPU.
PUBLISHED_TFLOPS = [
    ("GPT 175B, 128 A100, batch 1", FSDP, 173, f"{GPT_175B} --batch-size 1"),
    ("GPT 175B, 128 A100, batch 2", FSDP, 186, f"{GPT_175B} --batch-size 2"),
]
# The only row that a constant of the model was fitted to.
FITTED = "MPT 7B, 8 H100, 2048"


def plan(flags, experiments):
    argv = [experiments, "plan", "--json", *shlex.split(flags)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if not done.stdout:
        sys.exit(f"{flags}: {done.stderr}")
    return json.loads(done.stdout)


def cpu(experiments):
    rows = []
    for precision, model in CPU_MODELS:
        for ranks in (1, 2):
            flags = f"--gpus {ranks} --gpu cpu --calibrate --check --precision {precision} {model}"
            document = plan(flags, experiments)
            for s in document["strategies"]:
                if s.get("measured_step_s") is None:
                    continue
                rows.append(
                    {
                        "params": document["params"],
                        "precision": precision,
                        "ranks": ranks,
                        "strategy": s["strategy"],
                        "predicted_ms": round(1e3 * s["step_s"], 2),
                        "measured_ms": round(1e3 * s["measured_step_s"], 2),
                        "measured_wall_ms": round(1e3 * s["measured_wall_s"], 2),
                        "error": round(s["error"], 4),
                        "command": f"experiments plan {flags}",
                    }
                )
                print("{params} parameters, {precision}, {ranks} ranks, {strategy}: {predicted_ms} ms, measured {measured_ms}, {error:+.1%}".format(**rows[-1]))
    return rows


def published(experiments):
    rows = []
    for what, source, figure, flags in PUBLISHED + PUBLISHED_TFLOPS:
        document = plan(f"--precision bf16 {flags}", experiments)
        s = next(s for s in document["strategies"] if "step_s" in s)
        rate = s["tokens_per_sec"] / document["gpus"]
        tflops = (what, source, figure, flags) in PUBLISHED_TFLOPS
        if tflops:
            rate = 4 / 3 * s["mfu_llm_foundry"] * 312
        rows.append(
            {
                "what": what,
                "source": source,
                "unit": "TFLOP/s/GPU" if tflops else "tokens/s/GPU",
                "published": round(figure, 1),
                "predicted": round(rate, 1),
                "error": round(rate / figure - 1, 4),
                "exposed_part": round(s["exposed_comm_s"] / s["step_s"], 4),
                "fitted": what == FITTED,
                "command": f"experiments plan --precision bf16 {flags}",
            }
        )
        print("{what}: {predicted} {unit}, published {published}, {error:+.1%}".format(**rows[-1]))
    return rows


def summary(rows):
    errors = [r["error"] for r in rows]
    return {
        "compared": len(errors),
        "median_error": round(statistics.median(errors), 4),
        "median_absolute_error": round(statistics.median(abs(e) for e in errors), 4),
        "largest_absolute_error": round(max(abs(e) for e in errors), 4),
        "within_15_percent": sum(abs(e) <= 0.15 for e in errors),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-cpu", action="store_true", help="published figures only")
    parser.add_argument("--experiments", default=EXPERIMENTS, help="the binary")
    parser.add_argument("--output", help="JSON file")
    args = parser.parse_args()
    rows = published(args.experiments)
    document = {
        "date": datetime.date.today().isoformat(),
        "command": "python3 experiments/peers/plan_check.py",
        "published": {
            "fitted_to": FITTED,
            **summary([r for r in rows if not r["fitted"]]),
            "rows": rows,
        },
    }
    if not args.skip_cpu:
        measured = cpu(args.experiments)
        document["cpu"] = {"machine": platform.processor() or platform.machine(), **summary(measured), "runs": measured}
    text = json.dumps(document, indent=1) + "\n"
    if args.output:
        with open(args.output, "w") as file:
            file.write(text)
    print("published:", {k: v for k, v in document["published"].items() if k != "rows"})
    if "cpu" in document:
        print("cpu:", {k: v for k, v in document["cpu"].items() if k != "runs"})


if __name__ == "__main__":
    main()
