"""Golden values of preference objectives for tests/engine/preference.rs. Needs torch, transformers and peft.

    python preference.py make     writes preference/
    python preference.py check    reads target/tmp/preference: the reward model and the adapters that
                                  tests/cli/preference.rs saved when it last ran

Two tiny random Llamas (policy and reference, weights exact in bf16), six pairs of unequal lengths, and in fp32 with eager
attention, for each variant of the loss: the loss, the rewards and every gradient. The formulas are those of OpenRLHF's
DPOLoss (openrlhf/models/loss.py; TRL's sigmoid and ipo losses are the same functions of the log-ratios), over
log-probabilities summed over the answer's tokens, and the mean over the pairs. For reward models a
LlamaForSequenceClassification with one label, and OpenRLHF's PairWiseLoss and LogExpLoss of the scores at the last
tokens. For KTO the prompts with their chosen answers, labeled, and TRL's KTOTrainer with all of them as one batch on
one device: the KL divergence is estimated from each prompt with the answer `shift` rows further.
"""

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers import LlamaForSequenceClassification

HERE = Path(__file__).parent / "preference"
VOCAB, PAIRS = 31, 6
MARGINS = [0.0, 0.5, -1.0, 2.0, 0.25, 1.0]
LABELS = [True, False, True, True, False, False]
KTO = {
    "kto": dict(beta=0.3, desirable_weight=1.0, undesirable_weight=1.0, shift=1),
    "kto_weights": dict(beta=0.1, desirable_weight=1.33, undesirable_weight=0.7, shift=2),
}
CASES = {
    "sigmoid": dict(beta=0.3),
    "smooth": dict(beta=0.3, label_smoothing=0.1, nll_loss_coef=0.25),
    "ipo": dict(beta=0.3, ipo=True),
}


def model(seed, kind=LlamaForCausalLM, **more):
    torch.manual_seed(seed)
    made = kind(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        intermediate_size=24, max_position_embeddings=32, rope_theta=10000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=False, attn_implementation="eager", bos_token_id=None, eos_token_id=None,
        **more)).eval()
    for p in made.parameters():
        mean, deviation = (0.0, 0.2) if p.ndim > 1 else (1.0, 0.2)
        p.data = torch.normal(mean, deviation, p.shape).bfloat16().float()
    return made


def rows():
    torch.manual_seed(7)
    lengths = torch.randint(1, 9, (PAIRS, 3)).tolist()
    ids = lambda n: torch.randint(VOCAB, (n,)).tolist()
    return [dict(prompt=ids(p), chosen=ids(c), rejected=ids(r)) for p, c, r in lengths]


def logps(model, prompt, answer):
    """Of the answer's tokens."""
    ids = torch.tensor(prompt + answer)
    scores = F.log_softmax(model(ids[None]).logits[0].float(), dim=-1)
    return scores[:-1].gather(1, ids[1:, None])[len(prompt) - 1:, 0]


def dpo(policy, reference, row, beta, label_smoothing=0.0, nll_loss_coef=0.0, ipo=False):
    """Loss of a pair, and its rewards."""
    chosen, rejected = (logps(policy, row["prompt"], row[k]) for k in ("chosen", "rejected"))
    with torch.no_grad():
        ref = [logps(reference, row["prompt"], row[k]).sum() for k in ("chosen", "rejected")]
    logits = (chosen.sum() - rejected.sum()) - (ref[0] - ref[1])
    if ipo:
        loss = (logits - 1 / (2 * beta)) ** 2
    else:
        loss = -F.logsigmoid(beta * logits) * (1 - label_smoothing) - F.logsigmoid(-beta * logits) * label_smoothing
    loss = loss - nll_loss_coef * chosen.mean()
    return loss, beta * (chosen.sum() - ref[0]).item(), beta * (rejected.sum() - ref[1]).item()


def kto(policy, reference, pairs, beta, desirable_weight, undesirable_weight, shift):
    """Loss of all answers, and its metrics."""
    def ratios(shift):
        answers = [row["chosen"] for row in pairs]
        each = [(row["prompt"], answers[(i + shift) % len(pairs)]) for i, row in enumerate(pairs)]
        with torch.no_grad():
            theirs = torch.stack([logps(reference, *it).sum() for it in each])
        return torch.stack([logps(policy, *it).sum() for it in each]) - theirs
    kl, own, labels = ratios(shift).mean().clamp(min=0).detach(), ratios(0), torch.tensor(LABELS)
    chosen, rejected = own[labels], own[~labels]
    loss = torch.cat([
        desirable_weight * (1 - F.sigmoid(beta * (chosen - kl))), undesirable_weight * (1 - F.sigmoid(beta * (kl - rejected))),
    ]).mean()
    return loss, {
        "loss": loss.item(), "reward_chosen": beta * chosen.mean().item(), "reward_rejected": beta * rejected.mean().item(),
        "kl": kl.item(),
    }


def score(model, ids):
    """Of the last token."""
    return model(torch.tensor([ids])).logits[0, 0]


def reward_model(reward, pairs, margins=None, log_exp=False):
    """The loss, the mean scores and every gradient."""
    reward.zero_grad()
    chosen, rejected = (torch.stack([score(reward, row["prompt"] + row[k]) for row in pairs]) for k in ("chosen", "rejected"))
    if log_exp:
        loss = torch.log(1 + torch.exp(rejected - chosen)).mean()
    else:
        loss = -F.logsigmoid(chosen - rejected - (torch.tensor(margins) if margins else 0)).mean()
    loss.backward()
    values = {
        "loss": loss.item(), "reward_chosen": chosen.mean().item(), "reward_rejected": rejected.mean().item(),
        "reward_accuracy": (chosen > rejected).float().mean().item(),
    }
    return values, {n: p.grad.clone() for n, p in reward.named_parameters()}


def make():
    HERE.mkdir(exist_ok=True)
    policy, reference, pairs = model(1), model(2), rows()
    reward = model(3, LlamaForSequenceClassification, num_labels=1)
    for name, made in (("policy", policy), ("reference", reference), ("reward", reward)):
        copy.deepcopy(made).bfloat16().save_pretrained(HERE / name)  # .bfloat16() rounds rotary frequencies too
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
    values, grads = {"pairs": pairs, "cases": {}}, {}
    for case, settings in CASES.items():
        policy.zero_grad()
        results = [dpo(policy, reference, row, **settings) for row in pairs]
        loss = torch.stack([r[0] for r in results]).mean()
        loss.backward()
        values["cases"][case] = {
            **settings, "loss": loss.item(),
            "reward_chosen": sum(r[1] for r in results) / PAIRS,
            "reward_rejected": sum(r[2] for r in results) / PAIRS,
            "reward_accuracy": sum(r[1] > r[2] for r in results) / PAIRS,
        }
        grads |= {f"{case}.{n}": p.grad.clone() for n, p in policy.named_parameters()}
    for case, settings in KTO.items():
        policy.zero_grad()
        loss, found = kto(policy, reference, pairs, **settings)
        loss.backward()
        values["cases"][case] = settings | found | {"labels": LABELS}
        grads |= {f"{case}.{n}": p.grad.clone() for n, p in policy.named_parameters()}
    for case, settings in (("rm", {}), ("rm_margins", dict(margins=MARGINS)), ("rm_logexp", dict(log_exp=True))):
        found, gradient = reward_model(reward, pairs, **settings)
        values["cases"][case] = found | settings
        grads |= {f"{case}.{n}": grad for n, grad in gradient.items()}
    (HERE / "values.json").write_text(json.dumps(values) + "\n")
    save_file(grads, HERE / "gradients.safetensors")


def check():
    """The saved models give the mean scores that the last evaluations reported; PEFT loads the adapters."""
    path = HERE.parent.parent.parent / os.environ.get("CARGO_TARGET_DIR", "target") / "tmp" / "preference"
    load = lambda name: AutoModelForSequenceClassification.from_pretrained(path / name, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (path / "pairs.jsonl").read_text().splitlines()]
    adapted = PeftModel.from_pretrained(load("shipped"), path / "adapter").eval()
    for model, metrics in ((load("reward"), "metrics.jsonl"), (adapted, "adapter.jsonl")):
        reported = [json.loads(line) for line in (path / metrics).read_text().splitlines()]
        reported = [event for event in reported if event["event"] == "eval"][-1]
        with torch.no_grad():
            for key in ("chosen", "rejected"):
                scores = [score(model, row["prompt_input_ids"] + row[f"{key}_input_ids"]) for row in rows]
                ours, theirs = reported[f"reward_{key}"], torch.stack(scores).mean().item()
                assert abs(ours - theirs) < 1e-5 * max(1, abs(theirs)), (metrics, key, ours, theirs)
                print(f"{metrics}: mean score of {key}: {ours:.7f}, transformers {theirs:.7f}")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]]()
