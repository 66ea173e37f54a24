"""Ten steps of torch.optim.Muon for tests/engine/golden/muon.rs. To make them again: python muon.py

The models, batches and clipping are those of make.py, whose files are read. The matrices of the blocks are Muon's, with
match_rms_adamw; embeddings, head, norms and biases are AdamW's. PyTorch iterates in bf16 whatever the dtype; here the same
function runs in the gradient's own, since rounding is not what is compared. Written: losses and gradient norms, and the
weights after the last step.
"""

import json
from pathlib import Path

import torch
from make import ADAMW, MAX_NORM, STEPS, WEIGHT_DECAY, forward, gpt, llama, targets_of
from safetensors.torch import load_file, save_file
from torch.optim import _muon

LR = 1e-2
MOMENTUM = 0.9


def in_full_precision(grad, ns_coefficients, ns_steps, eps):
    """torch.optim._muon._zeropower_via_newtonschulz, with `grad` in place of `grad.bfloat16()`."""
    a, b, c = ns_coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


def main():
    _muon._zeropower_via_newtonschulz = in_full_precision
    here = Path(__file__).parent
    golden, tensors = {}, {}
    for name, build in [("llama", llama), ("gpt", gpt)]:
        files = load_file(here / f"{name}.safetensors")
        model = build().eval()
        for n, p in model.named_parameters():
            p.data = files[f"weight.{n}"].float()
        tokens = files["tokens"].long()
        block = [p for n, p in model.named_parameters() if p.ndim == 2 and (".layers." in n or ".h." in n)]
        ids = {id(p) for p in block}
        rest = [p for p in model.parameters() if id(p) not in ids]
        groups = [dict(params=[p for p in rest if p.ndim > 1], weight_decay=WEIGHT_DECAY),
                  dict(params=[p for p in rest if p.ndim <= 1], weight_decay=0.0)]
        optimizers = [
            torch.optim.Muon(block, lr=LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, nesterov=True,
                             ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, **(ADAMW | dict(lr=LR)))]
        losses, norms = [], []
        for step in range(STEPS):
            batch = tokens[step % 2]
            model.zero_grad()
            _, loss = forward(model, batch, targets_of(batch))
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        golden[name] = dict(losses=losses, norms=norms)
        tensors |= {f"{name}.{n}": p.detach().contiguous() for n, p in model.named_parameters()}
    golden |= dict(lr=LR, momentum=MOMENTUM, made_with=f"torch {torch.__version__.split('+')[0]}")
    save_file(tensors, here / "muon.safetensors")
    (here / "muon.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
