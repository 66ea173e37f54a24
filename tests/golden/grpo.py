"""Golden values of GRPO for tests/engine/grpo.rs. Needs torch, transformers and trl 1.16.

    python grpo.py make             writes grpo/
    python grpo.py rollouts DIR     writes configs/rollouts.jsonl: samples of the model in DIR, which is that of
                                    `run_fsdp --config configs/grpo.yaml --max-steps 1 --lr 1e-30 --save-hf DIR`

The policy and the reference of preference.py, groups of one to four samples with rewards, among them equal ones, and
recorded log-probabilities that are off by enough for ratios to be clipped both ways. In fp32 with eager attention, for
each loss type: the loss, the metrics and every gradient. The loss is TRL's own function, GRPOTrainer._compute_loss, on
all groups as one batch of one device; only the log-probabilities are computed here, sample by sample, without padding.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaForCausalLM
from trl import GRPOTrainer

HERE = Path(__file__).parent / "grpo"
VOCAB, LONGEST = 31, 9
SIZES = [3, 2, 4, 1, 3, 2]
REWARDS = [[0.0, 1.0, 0.5], [1.0, -1.0], [0.1, 0.7, 0.7, 2.0], [3.0], [0.3, 0.3, 0.3], [0.0, 5.0]]
CASES = {
    "grpo": dict(loss_type="grpo", beta=0.0, clip_low=0.2, clip_high=0.2),
    "grpo_kl": dict(loss_type="grpo", beta=0.04, clip_low=0.1, clip_high=0.28),
    "dapo": dict(loss_type="dapo", beta=0.0, clip_low=0.1, clip_high=0.28),
    "dapo_kl": dict(loss_type="dapo", beta=0.04, clip_low=0.2, clip_high=0.2),
    "dr_grpo": dict(loss_type="dr_grpo", beta=0.0, clip_low=0.2, clip_high=0.28),
    "dr_grpo_kl": dict(loss_type="dr_grpo", beta=0.04, clip_low=0.2, clip_high=0.2),
    "dapo_cool": dict(loss_type="dapo", beta=0.04, clip_low=0.2, clip_high=0.2, temperature=0.7),
}


def model(name):
    path = HERE.parent / "preference" / name
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def logps(model, prompt, ids, temperature=1.0):
    """Log-probabilities of the sampled tokens, and entropies at them: of logits over the temperature, as TRL's
    _get_per_token_logps_and_entropies has them."""
    both = torch.tensor(prompt + ids)
    scores = F.log_softmax(model(both[None]).logits[0].float() / temperature, dim=-1)[len(prompt) - 1:-1]
    return scores.gather(1, both[len(prompt):, None])[:, 0], -(scores.exp() * scores).sum(-1)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)


def groups(policy):
    torch.manual_seed(11)
    ids = lambda n: torch.randint(VOCAB, (n,)).tolist()
    made = []
    for size, rewards in zip(SIZES, REWARDS):
        group = {"prompt_ids": ids(torch.randint(1, 6, ()).item()), "samples": []}
        for reward in rewards:
            tokens = ids(torch.randint(1, 8, ()).item())
            with torch.no_grad():
                own, _ = logps(policy, group["prompt_ids"], tokens)
            recorded = (own + 0.3 * torch.randn(own.shape)).clamp(max=0.0)
            group["samples"].append({"ids": tokens, "logprobs": recorded.tolist(), "reward": reward})
        made.append(group)
    return made


def advantages(rewards, loss_type):
    """trl/trainer/grpo_trainer.py, lines 2766 to 2787; dr_grpo with its scale_rewards="none"."""
    rewards = torch.tensor(rewards)
    deviation = rewards.std() if len(rewards) > 1 else torch.zeros(())
    apart = rewards - rewards.mean()
    return apart if loss_type == "dr_grpo" else apart / (deviation + 1e-4)


def loss_of(policy, reference, all_groups, loss_type, beta, clip_low, clip_high, temperature=1.0):
    """TRL's loss, and its metrics."""
    samples = [(group["prompt_ids"], sample) for group in all_groups for sample in group["samples"]]
    found = [logps(policy, prompt, sample["ids"], temperature) for prompt, sample in samples]
    with torch.no_grad():
        theirs = [logps(reference, prompt, sample["ids"], temperature)[0] for prompt, sample in samples]
    mask = padded([[1] * len(sample["ids"]) for _, sample in samples])
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            padded([own for own, _ in found]), padded([entropy for _, entropy in found]), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=beta, loss_type=loss_type, epsilon_low=clip_low, epsilon_high=clip_high,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1), use_vllm=False,
        vllm_importance_sampling_correction=False, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=LONGEST, _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x))
    inputs = {
        "prompt_ids": padded([prompt for prompt, _ in samples]),
        "prompt_mask": padded([[1] * len(prompt) for prompt, _ in samples]),
        "completion_ids": padded([sample["ids"] for _, sample in samples]), "completion_mask": mask,
        "advantages": torch.cat([advantages([s["reward"] for s in g["samples"]], loss_type) for g in all_groups]),
        "old_per_token_logps": padded([torch.tensor(sample["logprobs"]) for _, sample in samples]),
        "ref_per_token_logps": padded(theirs), "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, policy, inputs)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    rewards = torch.tensor([sample["reward"] for _, sample in samples])
    apart = [(own - torch.tensor(s["logprobs"])).abs().max().item() for (own, _), (_, s) in zip(found, samples)]
    assert beta == 0 or metrics["kl"] > 0
    assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0
    return loss, {
        "loss": loss.item(), "reward_mean": rewards.mean().item(), "reward_std": rewards.std().item(),
        "clip_fraction": metrics["clip_ratio/region_mean"], "entropy": metrics["entropy"],
        "logprob_mismatch": max(apart), "completion_tokens": mask.sum().item(),
        **({"kl": metrics["kl"]} if beta else {}),
    }


def make():
    HERE.mkdir(exist_ok=True)
    policy, reference = model("policy"), model("reference")
    all_groups, cases, gradients = groups(policy), {}, {}
    for name, settings in CASES.items():
        policy.zero_grad()
        loss, metrics = loss_of(policy, reference, all_groups, **settings)
        loss.backward()
        cases[name] = settings | metrics
        gradients |= {f"{name}.{n}": p.grad.clone() for n, p in policy.named_parameters()}
        print(name, metrics)
    lines = [json.dumps(group) + "\n" for group in all_groups]
    (HERE / "rollouts.jsonl").write_text("".join(lines))
    (HERE / "values.json").write_text(json.dumps({"longest": LONGEST, "cases": cases}) + "\n")
    save_file(gradients, HERE / "gradients.safetensors")


def rollouts(path):
    """Samples of eight bytes; the reward is the share of lower-case letters."""
    torch.manual_seed(5)
    policy, lines = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval(), []
    for i in range(24):
        prompt, samples = list(f"{i}: ".encode()), []
        for _ in range(4):
            ids = []
            for _ in range(8):
                with torch.no_grad():
                    next_one = F.softmax(policy(torch.tensor([prompt + ids])).logits[0, -1], dim=-1)
                ids.append(torch.multinomial(next_one, 1).item())
            with torch.no_grad():
                own = [round(x, 6) for x in logps(policy, prompt, ids)[0].tolist()]
            samples.append({"ids": ids, "logprobs": own, "reward": sum(97 <= id < 123 for id in ids) / 8})
        lines.append(json.dumps({"prompt_ids": prompt, "samples": samples}) + "\n")
    (HERE.parent.parent.parent / "configs" / "rollouts.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    {"make": make, "rollouts": rollouts}[sys.argv[1]](*sys.argv[2:])
