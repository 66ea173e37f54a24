"""Compares flatshard with PyTorch DDP, FSDP1 and FSDP2 on CPU ranks: one model, one machine, one run, medians of several rounds.

Needs: pip install torch transformers numpy, and `cargo build --release`.
Run:   python3 experiments/peers/compare.py [--rounds 3] [--precision fp32 bf16] [--seq 256 4096 --batch 4 1] [--ablate] [--without-amx] [--out results.json]
Each round runs every contender once, so that other load on the machine affects all alike. Prints a table of tokens/s, the
ratio to the best peer of the same precision and length, and the largest peak memory of any rank. With --ablate the contenders are
run_fsdp, FSDP1 and FSDP2, each with every setting of ABLATIONS that it supports. With --without-amx no contender uses AMX tiles:
the comparison on a CPU with AVX512-BF16 alone.
"""
import argparse
import ctypes
import datetime
import itertools
import json
import os
import pathlib
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
MODEL = {"embed-dim": 768, "num-layers": 6, "num-heads": 12, "num-kv-heads": 12, "ff-hidden-dim": 3072, "vocab-size": 32000}
# Flags of both run_fsdp and torch_peer.py. All ablations start from the first, since PyTorch does not prefetch in forward by default.
PREFETCH = ["--backward-prefetch", "BACKWARD_PRE", "--forward-prefetch"]
ABLATIONS = {
    "": PREFETCH,
    "checkpointing": [*PREFETCH, "--activation-checkpoint"],
    "no prefetch": ["--backward-prefetch", "NONE", "--no-forward-prefetch"],
    "BACKWARD_POST": ["--backward-prefetch", "BACKWARD_POST", "--forward-prefetch"],
    "no limit_all_gathers": [*PREFETCH, "--no-limit-all-gathers"],
}
FSDP2_LACKS = ["BACKWARD_POST", "no limit_all_gathers"]
PEERS = {"ddp": ("ddp", False), "fsdp1": ("fsdp1", False), "fsdp2": ("fsdp2", False), "ddp-compiled": ("ddp", True), "fsdp2-compiled": ("fsdp2", True)}
OURS = ["run_fsdp", "run_ddp"]


def flags(values):
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def deny_amx():
    """Denies this process and its children Linux's permission for AMX tiles: a seccomp filter fails arch_prctl(ARCH_REQ_XCOMP_PERM).

    Programs that ask, as they must, then use what a CPU without AMX has. For x86-64.
    """
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    load, equal, end = 0x20, 0x15, 0x06  # a word of seccomp_data, a jump, a verdict
    arch_prctl, request, deny, allow = 158, 0x1023, 0x00050001, 0x7FFF0000
    program = [(load, 0, 0, 0), (equal, 0, 3, arch_prctl), (load, 0, 0, 16), (equal, 0, 1, request), (end, 0, 0, deny), (end, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filter_mode, header, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot deny AMX")


def torch_peer(impl, compiled, work, ablation=None):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "experiments/peers/torch_peer.py")]
    command += ["--impl", impl, *flags(MODEL | work)]
    command += ["--compile"] if compiled else []
    command += ABLATIONS[ablation] if ablation is not None else []
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result | {"name": ", ".join(filter(None, [result["name"], ablation]))}


def flatshard(binary, work, ablation=None):
    with tempfile.TemporaryDirectory() as directory:
        metrics = pathlib.Path(directory) / "metrics.jsonl"
        command = [str(RELEASE / binary), "--nproc-per-node", "2", "--dataset", "synthetic", "--no-sample", "--no-eval"]
        command += [*flags(MODEL | work), "--grad-clip", "1.0", "--lr", "3e-4", "--metrics-path", str(metrics)]
        command += ABLATIONS[ablation] if ablation is not None else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    run = next(row for row in rows if row["event"] == "run")
    timed = [row for row in rows if row["event"] == "step"][2:]
    return {
        "name": ", ".join(filter(None, [f"flatshard {binary}", ablation])),
        "precision": work["precision"],
        "params": run["params"],
        "world": run["world_size"],
        "tokens_per_sec": round(statistics.median(row["tokens_per_sec"] for row in timed), 1),
        "peak_mem_mib": round(max(row["peak_mem_bytes"] for row in timed) / 2**20),
    }


def contenders(a, work):
    """Names, and functions that each run one contender."""
    if a.ablate:
        yield from ((f"run_fsdp, {name}", partial(flatshard, "run_fsdp", work, name)) for name in ABLATIONS)
        yield from ((f"fsdp1, {name}", partial(torch_peer, "fsdp1", False, work, name)) for name in ABLATIONS)
        yield from ((f"fsdp2, {name}", partial(torch_peer, "fsdp2", False, work, name)) for name in ABLATIONS if name not in FSDP2_LACKS)
    else:
        yield from ((binary, partial(flatshard, binary, work)) for binary in a.ours)
        yield from ((name, partial(torch_peer, *PEERS[name], work)) for name in a.peers)


def machine():
    info = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), platform.processor())
    features = [f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {f}" in info]
    return {"cpu": model, "features": features, "cores": os.cpu_count(), "date": datetime.date.today().isoformat()}


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    p.add_argument("--seq", nargs="+", type=int, default=[256], metavar="TOKENS", help="sequence lengths [default: 256]")
    p.add_argument("--batch", nargs="+", type=int, default=[4], metavar="N", help="sequences per rank: one for each --seq, or one for all [default: 4]")
    p.add_argument("--ours", nargs="+", choices=OURS, default=OURS, metavar="NAME", help="of %(choices)s [default: all]")
    p.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help="of %(choices)s [default: all]")
    p.add_argument("--ablate", action="store_true", help="vary checkpointing, prefetch and limit_all_gathers, one at a time")
    p.add_argument("--without-amx", action="store_true", help="no contender uses AMX tiles (Linux on x86-64)")
    p.add_argument("--out", type=pathlib.Path, help="write every measurement as JSON")
    a = p.parse_args()
    if a.ablate and (a.ours != OURS or a.peers != list(PEERS)):
        p.error("--ablate has contenders of its own: leave out --ours and --peers")
    if a.without_amx and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        p.error("--without-amx needs Linux on x86-64")
    if len(a.batch) not in (1, len(a.seq)):
        p.error(f"--batch has {len(a.batch)} values for {len(a.seq)} of --seq: give one for each, or one for all")
    a.batch *= len(a.seq) // len(a.batch)
    return a


def main():
    a = arguments()
    if a.without_amx:
        deny_amx()  # all contenders are children
    runs, failed = [], []
    shapes = [{"max-len": seq, "batch-size": batch} for seq, batch in zip(a.seq, a.batch)]
    for number in range(a.rounds):
        for precision, shape in itertools.product(a.precision, shapes):
            for name, contender in contenders(a, shape | {"max-steps": a.steps, "precision": precision}):
                at = shape | {"round": number}
                try:
                    runs.append(contender() | at)
                except RuntimeError as error:
                    # The end says why: torchrun names the signal of the out-of-memory killer there.
                    failed.append({"name": name, "precision": precision} | at | {"error": str(error).strip()[-500:]})
                    print(f"{name} failed and is left out of the table:\n{error}", file=sys.stderr)
                    continue
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(f"| precision | sequence x batch | contender | tokens/s, median of {a.rounds} (min-max) | ratio to best peer | peak MiB per rank |")
    print("| --- | --- | --- | --- | --- | --- |")
    for precision, shape in itertools.product(a.precision, shapes):
        rows = {}
        for run in (r for r in runs if r["precision"] == precision and r.items() >= shape.items()):
            rows.setdefault(run["name"], []).append(run)
        speed = {name: statistics.median(r["tokens_per_sec"] for r in rs) for name, rs in rows.items()}
        best = max((s for name, s in speed.items() if name.startswith("torch")), default=float("nan"))
        length = f"{shape['max-len']:,} x {shape['batch-size']}"
        for name, rs in sorted(rows.items(), key=lambda item: -speed[item[0]]):
            low, high = (f(r["tokens_per_sec"] for r in rs) for f in (min, max))
            peak = max(r["peak_mem_mib"] for r in rs)
            print(f"| {precision} | {length} | {name} | {speed[name]:.0f} ({low:.0f}-{high:.0f}) | {speed[name] / best:.2f} | {peak} |")
    if a.out:
        about = {"machine": machine(), "without_amx": a.without_amx, "model": MODEL, "steps": a.steps}
        a.out.write_text(json.dumps(about | {"runs": runs, "failed": failed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
