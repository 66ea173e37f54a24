"""Trains every golden model of tests/golden on the CPU and on a GPU, with the same rows and steps, and says where they differ.

Run by scripts/gpu_check.sh; needs nothing beyond Python. Each model takes three steps in fp32 and in bf16, and continues its golden prompt;
one of them also does every job there is (adapters, 4 bits, preferences, distillation, samples, optimizers). Prints one JSON object. A family or a
job that a GPU cannot do is refused by name, which is reported and no failure; the reason is in its row. With --device cpu it is a rehearsal.
"""
import argparse
import concurrent.futures
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "tests/golden"
LENGTH, ROWS, STEPS = 32, 4, 3
BOUND = {"fp32": 2e-4, "bf16": 3e-2}
LORA = ["--lora-rank", "4", "--lora-target-modules", "all-linear"]
# A new model, whose sizes allow every job.
NEW = "--dataset synthetic --device cpu --nproc-per-node 1 --max-steps 1 --no-eval --no-sample --tokenizer bytes --embed-dim 128 --num-layers 2 --num-heads 2 \
    --num-kv-heads 1 --ff-hidden-dim 256 --max-len 128".split()
# Its jobs, by their flags; those with `kind` take other rows than text.
JOBS = {
    "lora": dict(flags=LORA), "lora, 4 bits": dict(flags=[*LORA, "--load-in-4bit"]), "compiled": dict(flags=["--compile"]),
    "recomputed": dict(flags=["--activation-checkpoint"]), "accumulated": dict(flags=["--grad-accum", "2", "--batch-size", "2"]),
    "packed": dict(flags=["--packing-samples"], kind="short"), "muon": dict(flags=["--optimizer", "muon"]),
    "dpo": dict(flags=["--objective", "dpo"], kind="pairs"), "dpo, lora": dict(flags=[*LORA, "--objective", "dpo"], kind="pairs"),
    "kto": dict(flags=["--objective", "kto"], kind="judged"), "rm": dict(flags=["--objective", "rm"], kind="pairs"),
    "distilled": dict(flags=["--objective", "distill", "--teacher", "MODEL"]),
    "grpo": dict(flags=["--objective", "grpo", "--reward", "length:4", "--group-size", "4", "--max-new-tokens", "12"], kind="prompts"),
}


def tensors(path):
    """Every tensor of a safetensors file: name, (dtype, shape, bytes)."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    for name, of in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            start, end = of["data_offsets"]
            yield name, (of["dtype"], of["shape"], data[8 + size + start:8 + size + end])


def write(path, parts):
    header, at = {}, 0
    for name, (dtype, shape, data) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in parts.values()))


def ids(parts, name):
    dtype, _, data = parts[name]
    return list(struct.unpack(f"<{len(data) // (8 if dtype == 'I64' else 4)}{'q' if dtype == 'I64' else 'i'}", data)) if dtype in ("I64", "I32") else None


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(golden, folder):
    """The model as a directory, with rows; the golden prompt and its greedy continuation, if there are any."""
    config = json.loads(golden.with_suffix(".json").read_text())["config"]
    parts = dict(tensors(golden))
    weights = {name.removeprefix("weight."): part for name, part in parts.items() if name.startswith("weight.")}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", weights)
    rows_of(config["vocab_size"], folder)
    return (ids(parts, "prompt"), ids(parts, "greedy")) if {"prompt", "greedy"} <= parts.keys() else None


def rows_of(vocab, folder):
    """Rows of random tokens for each kind of job."""
    draw = random.Random(1)
    words = lambda n: [draw.randrange(vocab) for _ in range(n)]
    lines(folder / "text.rows", [dict(input_ids=row, labels=row) for row in (words(LENGTH) for _ in range(STEPS * ROWS))])
    short = [words(draw.randrange(4, 15)) for _ in range(STEPS * ROWS * 4)]
    lines(folder / "short.rows", [dict(input_ids=row, labels=row) for row in short])
    lines(folder / "prompts.rows", [dict(prompt_ids=words(12)) for _ in range(STEPS * ROWS)])
    pairs = [dict(prompt_input_ids=words(12), chosen_input_ids=words(20), rejected_input_ids=words(16)) for _ in range(STEPS * ROWS)]
    lines(folder / "pairs.rows", pairs)
    judged = [dict(prompt_input_ids=words(12), completion_input_ids=words(20), label=i % 2 == 0) for i in range(STEPS * ROWS)]
    lines(folder / "judged.rows", judged)


def run(binary, *flags):
    done = subprocess.run([str(binary), *map(str, flags)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr.strip()


def trained(binary, folder, name, device, precision, job):
    metrics = folder / f"{name}-{device}-{precision}.metrics".replace(" ", "_").replace(",", "")
    kind = job.get("kind", "text")
    data = folder / f"{kind}-{name}-{device}-{precision}.jsonl".replace(" ", "_").replace(",", "")
    data.write_text((folder / f"{kind}.rows").read_text())
    flags = [folder if flag == "MODEL" else flag for flag in job["flags"]]
    code, _, said = run(
        binary, "--pretrain", folder, "--dataset", data, "--no-shuffle", "--batch-size", ROWS, "--max-steps", STEPS, "--max-len", LENGTH, "--lr", 1e-3,
        "--lr-scheduler", "constant", "--warmup-steps", 0, "--weight-decay", 0, "--grad-clip", 0, "--device", device, "--precision", precision, "--dropout", 0,
        "--nproc-per-node", 1, "--no-sample", "--no-eval", "--no-cache", "--metrics-path", metrics, "--log-every", 1, *flags)
    if code == 2:
        return None, said.splitlines()[-1][:400]
    if code != 0:
        raise RuntimeError(f"exit status {code}: {said[-600:]}")
    steps = [event for event in map(json.loads, metrics.read_text().splitlines()) if event["event"] == "step"]
    # Samples may differ where probabilities are close, so that of those only the mismatch of sampler and trainer is compared, with 0.
    sampled = lambda step: (0.0 if device == "cpu" else abs(step["logprob_mismatch"]), 0.0)
    return [sampled(step) if kind == "prompts" else (step["loss"], step["grad_norm"]) for step in steps], None


def compared(binary, folder, name, device, precision, job):
    """The largest difference of losses and norms, relative to 1 or to the value."""
    row = {"model": folder.name, "job": name, "precision": precision}
    try:
        (cpu, cpu_why), (gpu, why) = (trained(binary, folder, name, d, precision, job) for d in ("cpu", device))
        if cpu is None:
            return row | {"failed": f"refused on the CPU: {cpu_why}"}
        if gpu is None:
            return row | {"refused": why}
        off = [max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(*values)) for values in ((list(zip(*gpu))[i], list(zip(*cpu))[i]) for i in (0, 1))]
        bound = BOUND[precision]
        if precision == "bf16" and max(off) > bound:
            # Some of these small models lose more to bf16 itself: both devices may be as far from fp32.
            exact, _ = trained(binary, folder, name + "-exact", "cpu", "fp32", job)
            bound = max(bound, 2 * max(abs(a - b) / max(1.0, abs(b)) for of in zip(exact, cpu) for a, b in zip(*of)))
        bad = len(cpu) != len(gpu) or not max(off) <= bound
        return row | {"loss": off[0], "norm": off[1]} | ({"failed": f"cpu {cpu}, {device} {gpu}"} if bad else {})
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return row | {"failed": str(error)[-800:]}


def continued(binary, folder, device, greedy):
    row, (prompt, right) = {"model": folder.name, "job": "generate", "precision": "fp32"}, greedy
    code, said, why = run(binary, "--pretrain", folder, "--generate", " ".join(map(str, prompt)), "--max-new-tokens", len(right), "--temperature", 0,
                          "--device", device, "--nproc-per-node", 1)
    if code == 2:
        return row | {"refused": why.splitlines()[-1][:400]}
    new = [int(word) for word in said.split() if word.isdigit()][-len(right):] if code == 0 else why[-600:]
    return row | ({} if new == right else {"failed": f"{new}, right is {right}"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="run_fsdp")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", nargs="*", help="only these [default: all]")
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS), help="only these [default: all]")
    parser.add_argument("--at-once", type=int, default=12)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(a.at_once) as pool:
        work = []
        folder = pathlib.Path(scratch, "llama")
        new = run(a.bin, *NEW, "--save-hf", folder)
        assert new[0] == 0, new[2]
        rows_of(256, folder)
        for name in a.jobs:
            for precision in BOUND:
                work.append(pool.submit(compared, a.bin, folder, name, a.device, precision, JOBS[name]))
        for golden in sorted(path for kind in ("families", "experts") for path in (GOLDEN / kind).glob("*.safetensors")):
            if golden.stem.startswith("vl_") or (a.models is not None and golden.stem not in a.models):
                continue  # A text model of its own stands for that of a vision-language model.
            folder = pathlib.Path(scratch, golden.stem)
            greedy = prepare(golden, folder)
            for precision in BOUND:
                work.append(pool.submit(compared, a.bin, folder, "train", a.device, precision, dict(flags=[])))
            if greedy and None not in greedy:
                work.append(pool.submit(continued, a.bin, folder, a.device, greedy))
        rows = [one.result() for one in work]
    print(json.dumps({"rows": rows}))
    failed, refused = ([row for row in rows if key in row] for key in ("failed", "refused"))
    for row in failed:
        print(f"{row['model']}, {row['job']}, {row['precision']}: {row['failed']}", file=sys.stderr)
    print(f"{len(rows)} comparisons, {len(refused)} refused by name, {len(failed)} failed", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
