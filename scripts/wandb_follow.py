#!/usr/bin/env python3
"""Logs a run to Weights & Biases from its metrics file while it goes on, through W&B's own package (pip install wandb).

    run_fsdp ... --wandb-project my-project              # starts this script itself
    scripts/wandb_follow.py run.jsonl --project my-project   # a run that goes on, or a finished one, with --metrics-path run.jsonl

History is by training step, under the names of src/run/watch/scalars.tsv (TensorBoard's). The run's settings are its config. It
ends when the run does, with the run's exit code as W&B shows it: 0, or 1 after an error. WANDB_MODE=offline and all else that
the package reads works as ever. A finished file is logged at once.

W&B cannot take a step back: what a restart does again is logged once, as it was the first time; how many steps that were is in
the summary as redone_steps, next to restarts. A checkpoint that was written in the background stands at the step that was the newest
when it was complete.
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


def events(path, wait, skip=0, earlier=None):
    """Each event of the file as it comes, from byte `skip` on; None before each wait for more. A line is read when it is whole;
    one that a killed run has left is no JSON and is passed over. `earlier` is the inode of a file that the run will put aside."""
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
    """Returns the run's exit code: 0 after its end, 1 after an error, or what `ended` says where no more events come: it is called
    with whether the run has failed, and the seconds since the last event. `init` makes W&B's run of a config."""
    run, ranks, newest, failed = None, 1, 0, False
    told, restarts, redone = set(), 0, 0
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
            code = 0
            break
        elif (kind, step) in told:
            redone += kind == "step"
            run.summary["redone_steps"] = redone
        elif step is not None:
            told.add((kind, step))
            newest = max(newest, step)
            run.log(scalars(table, event, ranks), step=newest)
    if run is not None:
        run.finish(exit_code=code)
    return code


class Parent:
    """The program that runs this script: the last line that it writes here is the run's exit code. Without one it was killed."""
    code = None

    def wait(self):
        if self.code is None and select.select([sys.stdin], [], [], 0.5)[0]:
            self.code = int(sys.stdin.readline() or 1)


def serve(job):
    """For run_fsdp --wandb-project: answers one line when W&B has taken the run, or why it has not."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # they are for the run; this ends after it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is not an answer

    def answer(kind, text):
        print(json.dumps({kind: str(text)}), file=answers, flush=True)

    try:
        import wandb
        wandb.init  # a directory named wandb is a package without anything in it
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
    except Exception as e:  # whatever W&B raises
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
    return follow(events(args.metrics, lambda: time.sleep(0.5)), init, rows(), patience(args.patience, args.after_error))


def patience(most, after_error):
    """Ends a run that says nothing more for `most` seconds, or for `after_error` after it has failed."""
    def ended(failed, idle):
        limit = after_error if failed else most
        return 1 if limit is not None and idle > limit else None
    return ended


if __name__ == "__main__":
    sys.exit(main())
