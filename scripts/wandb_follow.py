#!/usr/bin/env python3
"""Logs a run to Weights & Biases from its metrics file while it is running, through W&B's own package (pip install wandb).

    run_fsdp ... --wandb-project my-project              # starts this script itself
    scripts/wandb_follow.py run.jsonl --project my-project   # a running or finished run with --metrics-path run.jsonl

History is by training step, under the names of src/run/watch/scalars.tsv (TensorBoard's). The run's settings are its config. The
script ends with the run, and the run's exit code in W&B is 0, or 1 after an error. WANDB_MODE=offline and the package's other
environment variables work as usual. A finished file is logged at once.

W&B cannot log an earlier step, so steps that a restart repeats are logged once, with their first values; their number is in the
summary as redone_steps, next to restarts. A checkpoint written in the background is logged at the newest step when it was complete.
"""
import argparse
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "src/run/watch/scalars.tsv"


def rows(text=None):
    """(event, number, name, unit) of each row."""
    lines = (text or TABLE.read_text()).splitlines()
    return [tuple(line.split()) for line in lines if line and not line.startswith("#")]


def scalars(table, event, ranks):
    """The numbers of an event by name, without null values."""
    units = {"1": lambda x: x, "%": lambda x: x * 100.0, "GiB": lambda x: x / 2**30, "/rank": lambda x: x / ranks}
    found = {}
    for kind, number, name, unit in table:
        value = event if kind == event["event"] else None
        for key in number.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            found[name] = units[unit](value)
    return found


def events(path, wait, skip=0, earlier=None):
    """Yields each event of the file as it is written, from byte `skip` on, and None before each wait. Only complete lines are read;
    a line that a killed run left incomplete is not JSON and is skipped. `earlier`: inode of an old file that the run will move away."""
    while not path.exists() or path.stat().st_ino == earlier:
        yield None
        wait()
    with path.open("rb") as file:
        file.seek(skip)
        line = b""
        while True:
            line += file.readline()
            if not line.endswith(b"\n"):
                yield None
                wait()
                continue
            try:
                yield json.loads(line)
            except ValueError:
                pass
            line = b""


def follow(events, init, table, ended):
    """Returns the run's exit code: 0 after its end, 1 after an error, or what `ended` returns once no more events come. `ended` gets
    whether the run has failed and the seconds since the last event. `init` creates W&B's run from a config."""
    run, ranks, newest, failed = None, 1, 0, False
    seen, restarts, redone = set(), 0, 0
    last = time.monotonic()
    for event in events:
        if event is None:
            code = ended(failed, time.monotonic() - last)
            if code is not None:
                break
            continue
        last = time.monotonic()
        kind, step = event["event"], event.get("step")
        if kind == "run":
            ranks, failed = event["world_size"], False
            if run is None:
                others = {key: value for key, value in event.items() if key not in ("event", "config", "gpu")}
                run = init({**event["config"], "run_event": others})
            else:
                restarts += 1
                run.summary["restarts"] = restarts
        elif kind == "error":
            failed = True
            if run is not None:
                run.summary["error"] = event["message"]
        elif kind == "end":
            code = 0
            break
        elif (kind, step) in seen:
            redone += kind == "step"
            run.summary["redone_steps"] = redone
        elif step is not None:
            seen.add((kind, step))
            newest = max(newest, step)
            run.log(scalars(table, event, ranks), step=newest)
    if run is not None:
        run.finish(exit_code=code)
    return code


class Parent:
    """The program that started this script: it writes the run's exit code to our stdin. End of file means that it was killed."""
    code = None

    def wait(self):
        if self.code is None and select.select([sys.stdin], [], [], 0.5)[0]:
            self.code = int(sys.stdin.readline() or 1)


def serve(job):
    """For run_fsdp --wandb-project: answers one line once W&B has accepted the run, or why it did not."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # they stop the run; this script ends after it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep other output apart from answers

    def answer(kind, text):
        print(json.dumps({kind: str(text)}), file=answers, flush=True)

    try:
        import wandb
        wandb.init  # a directory named wandb imports as an empty package
    except (ImportError, AttributeError) as e:
        answer("missing", e)
        return 2
    kept = Path(job["run_id"]) if job["run_id"] else None
    arguments = {key: value for key, value in job["init"].items() if value is not None}
    try:
        if kept and job["resumed"] and kept.exists():
            arguments.update(id=kept.read_text().strip(), resume="allow")
        if "dir" in arguments:
            os.makedirs(arguments["dir"], exist_ok=True)
        run = wandb.init(**arguments)
        if kept:
            kept.write_text(f"{run.id}\n")
    except Exception as e:  # W&B raises many types
        answer("refused", e or type(e).__name__)
        return 2
    answer("ready", run.id)

    parent, begun = Parent(), []

    def init(config):
        run.config.update(config, allow_val_change=True)
        begun.append(run)
        return run

    found = events(Path(job["metrics"]), parent.wait, job["skip"], job["earlier"])
    code = follow(found, init, rows(job["table"]), lambda failed, idle: parent.code)
    if not begun:
        run.finish(exit_code=code)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="the file of --metrics-path; it need not exist yet")
    parser.add_argument("--project", default="flatshard")
    parser.add_argument("--entity")
    parser.add_argument("--name")
    parser.add_argument("--group")
    parser.add_argument("--patience", type=float, metavar="SECONDS", help="end the run as failed after this long without a new line")
    parser.add_argument("--after-error", type=float, default=0.0, metavar="SECONDS",
                        help="how long to wait for a launcher to restart a failed run")
    args = parser.parse_args()
    import wandb

    def init(config):
        return wandb.init(project=args.project, entity=args.entity, name=args.name, group=args.group, config=config)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # wandb finishes its run at interpreter exit
    return follow(events(args.metrics, lambda: time.sleep(0.5)), init, rows(), patience(args.patience, args.after_error))


def patience(limit_s, after_error):
    """Ends a run without new events for `limit_s` seconds, or `after_error` seconds after a failure."""
    def ended(failed, idle):
        limit = after_error if failed else limit_s
        return 1 if limit is not None and idle > limit else None
    return ended


if __name__ == "__main__":
    sys.exit(main())
