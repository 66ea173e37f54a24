"""Compares what TensorBoard and Weights & Biases read of real runs, through their own packages, with the metrics file, and lets
jsonschema validate that. Run by scripts/watch_check.sh, which installs the packages: watch_check.py RUN_FSDP SCRATCH.

One run loses rank 1 and restarts from a checkpoint, so that some steps run twice; the other run fails.
"""
import glob
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib
from pathlib import Path

import jsonschema
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from wandb_follow import events, follow, patience, rows, scalars

RANKS, STEPS = 2, 60
TINY = ("--dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --batch-size 4 --warmup-steps 2 "
        f"--lr 0.01 --eval-every 7 --save-every 10 --max-steps {STEPS} --nproc-per-node {RANKS}").split()


def lines(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def until(what, done, seconds=120):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.002)


def killed_run(program, metrics, *more):
    """Kills rank 1 a few steps after the first checkpoint."""
    run = subprocess.Popen([program, *TINY, "--metrics-path", metrics, *more], stderr=subprocess.PIPE, text=True)
    until("13 steps", lambda: sum(e["event"] == "step" for e in lines(metrics)) >= 13)
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        if b"RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            os.kill(int(child), signal.SIGKILL)
    _, stderr = run.communicate(timeout=300)
    return run.returncode, stderr


def expected(metrics, latest):
    """{name: {step: value}}. Of steps that ran twice: the latest value, or the first one, at the newest step so far."""
    curves, seen, newest = {}, set(), 0
    for event in lines(metrics):
        if event["event"] == "run" and latest:
            resumed = event["resumed_from_step"] or 0
            for curve in curves.values():
                for step in [step for step in curve if step > resumed]:
                    del curve[step]
        step = event.get("step", 0)
        again = (event["event"], step) in seen
        seen.add((event["event"], step))
        newest = max(newest, step)
        for name, value in scalars(rows(), event, RANKS).items():
            if latest:
                curves.setdefault(name, {})[step] = value
            elif not again:
                curves.setdefault(name, {})[newest] = value
    return curves


def check_schema(metrics):
    """Each line by a validator that is not ours (tests/cli/metrics_schema.rs has ours, and more runs)."""
    schema = json.loads((Path(__file__).parent.parent / "docs/metrics.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for event in lines(metrics):
        validator.validate(event)
        assert not validator.is_valid({**event, "unknown": 1}), event
    print(f"jsonschema: {len(lines(metrics))} lines are valid")


def bits(curve):
    return {int(step): np.float32(value).tobytes() for step, value in curve}


def check_tensorboard(board, metrics):
    want = expected(metrics, latest=True)
    read = EventAccumulator(str(board), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    assert sorted(read.Tags()["scalars"]) == sorted(want), sorted(set(want) ^ set(read.Tags()["scalars"]))
    for name, curve in want.items():
        found = [(e.step, e.value) for e in read.Scalars(name)]
        assert len(found) == len(curve) and bits(found) == bits(curve.items()), f"{name}: {found}\n{curve}"
    config = read.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert f"max_steps: {STEPS}" in config, config
    assert set(want["train/loss"]) == set(range(1, STEPS + 1))
    count = sum(len(curve) for curve in want.values())
    print(f"TensorBoard's accumulator: {len(want)} curves, {count} values, all bitwise equal")


def check_server(board, metrics):
    """What the web page requests, from the server with its own loader of event files (written in Rust)."""
    bin = Path(sys.executable).parent / "tensorboard"
    server = subprocess.Popen([sys.executable, bin, "--logdir", board, "--port", "0", "--reload_interval", "1"],
                              stderr=subprocess.PIPE, text=True)
    try:
        while "http://" not in (line := server.stderr.readline()):
            assert line, "TensorBoard ended before it served"
        port = line.split("http://")[1].split(":")[1].split("/")[0]
        loss = expected(metrics, latest=True)["train/loss"]
        found = []

        def complete():
            query = urllib.parse.urlencode({"run": ".", "tag": "train/loss"})
            try:
                with urllib.request.urlopen(f"http://localhost:{port}/data/plugin/scalars/scalars?{query}") as page:
                    found[:] = json.load(page)
            except urllib.error.URLError:
                return False  # not loaded yet
            return len(found) >= len(loss)

        until("the server has loaded the run", complete)
        assert bits((step, value) for _, step, value in found) == bits(loss.items()), found
        assert [step for _, step, _ in found] == sorted(loss), "steps in order, each once"
    finally:
        server.kill()
        server.wait()
    print(f"TensorBoard's server: train/loss, {len(loss)} values, all bitwise equal")


def offline_records(folder):
    """Records of an offline run's file: LevelDB's log format around W&B's protobuf."""
    [path] = glob.glob(f"{folder}/wandb/offline-run-*/run-*.wandb")
    data, at, record, found = Path(path).read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        crc, size, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7:at + 7 + size]
        at += 7 + size
        assert zlib.crc32(bytes([kind]) + body) == crc, f"{path} is damaged before byte {at}"
        record += body
        if kind in (1, 4):  # whole, or the last part
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            found.append(parsed)
            record = b""
    return found


def check_wandb(folder, metrics, code):
    """History, config, summary and exit code that scripts/wandb_follow.py logged from the metrics file."""
    records = offline_records(folder)
    history, config, summary, exits = {}, {}, {}, []
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):  # at the start, or with the run event
            update = record.run.config.update if kind == "run" else record.config.update
            config.update({item.key: json.loads(item.value_json) for item in update})
        if kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    history.setdefault(name, {})[row["_step"]] = value
        if kind == "summary":
            summary.update({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update})
        if kind == "exit":
            exits.append(record.exit.exit_code)
    assert exits == [code], exits
    want = expected(metrics, latest=False)
    assert history.keys() == want.keys(), sorted(history.keys() ^ want.keys())
    for name, curve in want.items():
        assert history[name] == curve, f"{name}: {history[name]}\n{curve}"
    event = lines(metrics)[0]
    assert config["optim"] == event["config"]["optim"] and config["run_event"]["world_size"] == RANKS, config
    logged = lines(metrics)
    done = [e["step"] for e in logged if e["event"] == "step"]
    restarts = sum(e["event"] == "run" for e in logged) - 1
    assert summary.get("restarts", 0) == restarts and summary.get("redone_steps", 0) == len(done) - len(set(done)), summary
    if code:
        assert summary["error"] == logged[-1]["message"], summary
    count = sum(len(curve) for curve in want.values())
    print(f"W&B's offline file: {len(want)} curves, {count} values, exit code {code}, {restarts} restart(s)")


def check_error_then_restart(scratch):
    """An external launcher restarts a failed run: its file continues after the error."""
    path, logged = scratch / "again.jsonl", []

    class Run:
        summary = {}

        def log(self, values, step):
            logged.append((step, values["train/loss"]))

        def finish(self, exit_code):
            logged.append(exit_code)

    def add(*events):
        with path.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    run = {"event": "run", "config": {}, "world_size": 1}
    add(run, {"event": "step", "step": 1, "loss": 2.0}, {"event": "error", "message": "lost"})
    again = threading.Timer(0.3, add, [run, {"event": "step", "step": 1, "loss": 3.0},
                                       {"event": "step", "step": 2, "loss": 1.0}, {"event": "end"}])
    again.start()
    read = lambda: events(path, lambda: time.sleep(0.01))
    assert follow(read(), lambda config: Run(), rows(), patience(None, 60)) == 0
    assert logged == [(1, 2.0), (2, 1.0), 0] and Run.summary == {"error": "lost", "restarts": 1, "redone_steps": 1}, logged
    path = scratch / "failed.jsonl"
    add(run, {"event": "error", "message": "lost"})
    read = lambda: events(path, lambda: time.sleep(0.01))
    assert follow(read(), lambda config: Run(), rows(), patience(None, 0)) == 1, "no restart follows"


def main(program, scratch):
    scratch.mkdir(parents=True)
    check_error_then_restart(scratch)
    for name, restarts in (("restarted", 1), ("failed", 0)):
        folder = scratch / name
        folder.mkdir(parents=True)
        metrics, board = folder / "m.jsonl", folder / "board"
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(folder))
        args = ["--ckpt-dir", folder / "ckpt", "--tensorboard", board, "--max-restarts", str(restarts)]
        if restarts:  # the run starts the script itself, with the first python3 of PATH
            os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            args += ["--wandb-project", "check"]
        else:
            script = Path(__file__).parent / "wandb_follow.py"
            follower = subprocess.Popen([sys.executable, script, metrics, "--project", "check"])
        status, stderr = killed_run(program, metrics, *args)
        assert status == 1 - restarts, stderr
        assert restarts or follower.wait(120) == status
        check_schema(metrics)
        check_wandb(folder, metrics, status)
        if restarts:
            check_tensorboard(board, metrics)
            check_server(board, metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
