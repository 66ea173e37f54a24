"""Compares checkpoints of flatshard and torch.distributed.checkpoint: one model, 2 CPU ranks, one disk, medians of several rounds.

Needs: pip install torch transformers numpy safetensors, and `cargo build --release`.
Run:   python3 experiments/peers/checkpoint_compare.py [--rounds 3] [--dir DIR] [--out results.json]
What is compared is what a user needs: a state to resume from and a model that transformers loads. flatshard's checkpoint is
both at once; with PyTorch it takes a checkpoint and a consolidation to safetensors. Everything is written durably by flatshard
(fsync, rename); reads come from the page cache for both. --dir decides what is measured: a disk, or memory under /dev/shm.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from compare import MODEL, RELEASE, ROOT, flags, machine


def torch_peer(directory, model):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "experiments/peers/checkpoint_peer.py"), str(directory), *flags(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def flatshard(directory, model):
    metrics = directory / "metrics.jsonl"
    base = [str(RELEASE / "run_fsdp"), "--nproc-per-node", "2", "--dataset", "synthetic", "--no-sample", "--no-eval"]
    base += [*flags(model), "--max-len", "32", "--batch-size", "1", "--metrics-path", str(metrics)]

    def run(*more):
        done = subprocess.run([*base, *more], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    def event(rows, name):
        return [row for row in rows if row["event"] == name][-1]

    rows = run("--max-steps", "1", "--ckpt-dir", str(directory / "ckpt"))
    saved, started = event(rows, "checkpoint"), event(rows, "run")
    peaks = [row["peak_mem_bytes"] for row in rows if row["event"] == "step"]
    loaded = run("--max-steps", "2", "--resume", saved["path"])
    pretrained = run("--max-steps", "1", "--pretrain", saved["path"])
    peaks += [row["peak_mem_bytes"] for row in loaded if row["event"] == "step"]
    seconds = {
        "save": saved["seconds"],
        "export": 0.0,
        "load": event(loaded, "run")["load_seconds"],
        "load_model": event(pretrained, "run")["load_seconds"],
    }
    size = {"checkpoint": saved["bytes"], "model": 4 * started["params"]}
    return {
        "name": "flatshard",
        "params": started["params"],
        "world": 2,
        "seconds": seconds,
        "bytes": size,
        "peak_mem_mib": round(max(peaks) / 2**20),
    }


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--dir", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    p.add_argument("--scale", type=int, default=1, help="factor on the number of layers")
    p.add_argument("--out", type=pathlib.Path, help="write every measurement as JSON")
    a = p.parse_args()
    model = MODEL | {"num-layers": MODEL["num-layers"] * a.scale}
    runs = []
    for number in range(a.rounds):
        for contender in (flatshard, torch_peer):
            with tempfile.TemporaryDirectory(dir=a.dir) as directory:
                runs.append(contender(pathlib.Path(directory), model) | {"round": number})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print("| contender | save s | + export s | GB/s | load s | GB/s | load model s | peak MiB per rank |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    totals = {}
    for name in dict.fromkeys(run["name"] for run in runs):
        rows = [run for run in runs if run["name"] == name]
        s = {key: statistics.median(row["seconds"][key] for row in rows) for key in rows[0]["seconds"]}
        gigabytes = rows[0]["bytes"]["checkpoint"] / 1e9
        written = s["save"] + s["export"]
        totals[name] = written + s["load"]
        peak = max(row["peak_mem_mib"] for row in rows)
        print(
            f"| {name} | {s['save']:.2f} | {s['export']:.2f} | {gigabytes / written:.2f} | {s['load']:.2f} "
            f"| {gigabytes / s['load']:.2f} | {s['load_model']:.2f} | {peak} |"
        )
    ours, theirs = totals["flatshard"], max(totals.values())
    print(f"\nsave, export and load: {theirs / ours:.1f} times faster")
    if a.out:
        a.out.write_text(json.dumps({"machine": machine(), "model": model, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
