"""Whole runs of training as PyTorch does them, for tests/engine/golden/training.rs. To make them again: python training.py

Each case is a command line with odd values of everything and what must come of it: the learning rate of each step in closed
form, and loss and gradient norm of PyTorch in fp32, which starts from the model that pretrained.py saved.
"""

import json
import math
from pathlib import Path

import torch
import transformers
from make import forward, targets_of
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
VOCAB = 47
MAX_LEN = 12
STEPS = 9
ROWS = 6  # of an optimizer step: 2 ranks of 3 micro-batches of 1 row
PLACE = ["--nproc-per-node", "2", "--grad-accum", "3", "--batch-size", "1"]


def constant(p):
    return 1.0


def linear(p):
    return 1.0 - p


def cosine(p, least=0.0):
    return least + (1.0 - least) * (1.0 + math.cos(math.pi * p)) / 2.0


def rates(peak, warmup, total, shape, log=False):
    """Steps count from 1. The first step after warmup is at the peak, and the one after the last would be at the end."""
    def rate(s):
        if s <= warmup:
            return math.log(s) / math.log(warmup) if log else s / warmup
        return shape((s - 1 - warmup) / (total - warmup))
    return [peak * rate(s) for s in range(1, total + 1)]


def flags(**values):
    """--lr-scheduler of lr_scheduler; a list is several words."""
    words = []
    for name, value in values.items():
        words.append("--" + name.replace("_", "-"))
        words += [str(v) for v in (value if isinstance(value, list) else [value])]
    return words


ADAMW = dict(lr=0.0137, betas=[0.83, 0.957], eps=0.0031, weight_decay=0.27)
SGD = dict(lr=0.171, momentum=0.71, weight_decay=0.043)
# Flags; the learning rates; which tensors are frozen, do not decay and learn more slowly.
CASES = {
    "adamw_linear": dict(
        model="llama",
        args=flags(optimizer="adamw", **ADAMW, warmup_steps=3, lr_scheduler="linear", grad_clip=3.05),
        lrs=rates(ADAMW["lr"], 3, STEPS, linear),
    ),
    "adamw_cosine_with_min_lr": dict(
        model="gpt",
        args=flags(optimizer="adamw", **ADAMW, warmup_steps=2, lr_scheduler="cosine_with_min_lr", min_lr_ratio=0.23,
                   grad_clip=1.71, freeze=["h.1.mlp.c_fc"], no_decay=["h.0.attn.c_proj"], lr_scale=["wte=0.31"]),
        lrs=rates(ADAMW["lr"], 2, STEPS, lambda p: cosine(p, 0.23)),
        freeze="h.1.mlp.c_fc", no_decay="h.0.attn.c_proj", slow=("wte", 0.31),
    ),
    "adamw_log_warmup": dict(
        model="llama",
        args=flags(optimizer="adamw", **ADAMW, warmup_steps=4, warmup_type="log", lr_scheduler="constant", grad_clip=0),
        lrs=rates(ADAMW["lr"], 4, STEPS, constant, log=True),
    ),
    "sgd_cosine": dict(
        model="llama",
        args=flags(optimizer="sgd", **SGD, warmup_steps=2, lr_scheduler="cosine", grad_clip=3.05),
        lrs=rates(SGD["lr"], 2, STEPS, cosine),
    ),
}


def run(case, rows):
    model = AutoModelForCausalLM.from_pretrained(HERE / "pretrained" / case["model"], dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    args = case["args"]
    clip = float(args[args.index("--grad-clip") + 1])
    groups, rules = [], []
    for name, p in model.named_parameters():
        if case.get("freeze", "-") in name:
            p.requires_grad = False
            continue
        decays = p.ndim > 1 and case.get("no_decay", "-") not in name
        slow, factor = case.get("slow", ("-", 1.0))
        adamw = args[1] == "adamw"
        groups.append(dict(params=[p], weight_decay=(ADAMW if adamw else SGD)["weight_decay"] if decays else 0.0))
        rules.append(factor if slow in name else 1.0)
    if args[1] == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=ADAMW["betas"], eps=ADAMW["eps"])
    else:
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=SGD["momentum"])
    losses, norms = [], []
    for step, lr in enumerate(case["lrs"]):
        batch = rows[step * ROWS : (step + 1) * ROWS]
        tokens, lengths = torch.tensor(sum(batch, [])), [len(row) for row in batch]
        optimizer.zero_grad()
        _, loss = forward(model, tokens, targets_of(tokens, lengths), lengths)
        loss.backward()
        learning = [p for p in model.parameters() if p.requires_grad]
        norms.append(torch.nn.utils.clip_grad_norm_(learning, clip if clip > 0 else math.inf).item())
        for group, factor in zip(optimizer.param_groups, rules):
            group["lr"] = lr * factor
        optimizer.step()
        losses.append(loss.item())
    if clip > 0:
        assert any(n > clip for n in norms) and any(n < clip for n in norms), f"both kinds are to be tested: {norms}"
    return losses, norms


def main():
    torch.manual_seed(31)
    # A few more than are trained on: the last rows may be held out.
    rows = [torch.randint(VOCAB, (int(n),)).tolist() for n in torch.randint(5, MAX_LEN + 1, (STEPS * ROWS + 20,))]
    cases = {}
    for name, case in CASES.items():
        losses, norms = run(case, rows)
        args = ["--max-len", str(MAX_LEN), "--max-steps", str(STEPS), *PLACE, *case["args"]]
        cases[name] = dict(model=case["model"], args=args, lrs=case["lrs"], losses=losses, norms=norms)
        print(name, [f"{x:.4f}" for x in losses], [f"{x:.3f}" for x in norms])
    golden = dict(rows=rows, cases=cases,
                  made_with=f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
    text = json.dumps(golden, separators=(",", ":")).replace('"cases"', '\n"cases"').replace('"adamw', '\n"adamw').replace('"sgd_', '\n"sgd_')
    (HERE / "training.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
