#!/usr/bin/env python3
"""Tells Weights & Biases of a run while it goes on, from its metrics file, through W&B's own package (pip install wandb).

    run_fsdp ... --metrics-path run.jsonl &
    scripts/wandb_follow.py run.jsonl --project my-project

History is by training step, under the names of src/run/watch/scalars.tsv (TensorBoard's). The run's settings are its config. It
ends when the run does, with the run's exit code as W&B shows it: 0, or 1 after an error. WANDB_MODE=offline and all else that
the package reads works as ever. A finished file is told at once.

W&B cannot take a step back: what a restart does again is told once, as it was the first time; how many steps that were is in
the summary as redone_steps, beside restarts. A checkpoint that was written behind training stands at the step that was the newest
when it was complete.
"""
import argparse
import json
import signal
import sys
import time
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "src/run/watch/scalars.tsv"


def rows(path=TABLE):
    """(event, number, name, unit) of each row."""
    lines = path.read_text().splitlines()
    return [tuple(line.split()) for line in lines if line and not line.startswith("#")]


def scalars(table, event, ranks):
    """The numbers of an event by their names; those that are null are left out."""
    units = {"1": lambda x: x, "%": lambda x: x * 100.0, "GiB": lambda x: x / 2**30, "/rank": lambda x: x / ranks}
    found = {}
    for kind, number, name, unit in table:
        value = event if kind == event["event"] else None
        for key in number.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            found[name] = units[unit](value)
    return found


def events(path, poll=0.5):
    """Each event of the file as it comes; None after each wait for more. A line is read when it is whole; one that a killed run
    has left is no JSON and is passed over."""
    while not path.exists():
        time.sleep(poll)
        yield None
    with path.open() as file:
        line = ""
        while True:
            line += file.readline()
            if not line.endswith("\n"):
                time.sleep(poll)
                yield None
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                pass
            line = ""


def follow(path, init, table, patience=None, after_error=0.0, poll=0.5):
    """Returns the run's exit code: 0 after its end, 1 after an error or when `patience` is over. `init` makes W&B's run of a
    config."""
    run, ranks, newest, failed = None, 1, 0, False
    told, restarts, redone = set(), 0, 0
    last = time.monotonic()
    for event in events(path, poll):
        if event is None:
            limit = after_error if failed else patience
            if limit is not None and time.monotonic() - last > limit:
                failed = True
                break
            continue
        last = time.monotonic()
        kind, step = event["event"], event.get("step")
        if kind == "run":
            ranks, failed = event["world_size"], False
            if run is None:
                beside = {key: value for key, value in event.items() if key not in ("event", "config", "gpu")}
                run = init({**event["config"], "run_event": beside})
            else:
                restarts += 1
                run.summary["restarts"] = restarts
        elif kind == "error":
            failed = True
            if run is not None:
                run.summary["error"] = event["message"]
        elif kind == "end":
            break
        elif (kind, step) in told:
            redone += kind == "step"
            run.summary["redone_steps"] = redone
        elif step is not None:
            told.add((kind, step))
            newest = max(newest, step)
            run.log(scalars(table, event, ranks), step=newest)
    if run is not None:
        run.finish(exit_code=int(failed))
    return int(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="what --metrics-path names; it need not be there yet")
    parser.add_argument("--project", default="flatshard")
    parser.add_argument("--entity")
    parser.add_argument("--name")
    parser.add_argument("--group")
    parser.add_argument("--patience", type=float, metavar="SECONDS", help="no new line for so long ends it as failed")
    parser.add_argument("--after-error", type=float, default=0.0, metavar="SECONDS",
                        help="so long a launcher has to start a failed run again")
    args = parser.parse_args()
    import wandb

    def init(config):
        return wandb.init(project=args.project, entity=args.entity, name=args.name, group=args.group, config=config)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # wandb ends its run when the interpreter does
    return follow(args.metrics, init, rows(), args.patience, args.after_error)


if __name__ == "__main__":
    sys.exit(main())
