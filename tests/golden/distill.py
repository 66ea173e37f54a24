"""Golden values of distillation for tests/engine/distill.rs. Needs torch and transformers.

    python distill.py     writes distill/

The policy of preference/ is the student, and a wider random Llama of the same vocabulary the teacher. Six prompts with
answers; the loss of an answer's token is (1 - alpha) CE + alpha T^2 KL(teacher || student), with both models' logits
divided by T in the divergence, and the loss of the step is its mean over all answers' tokens: in fp32 with eager
attention, with every gradient of the student. The cases `own` take the answers as samples of the student: their loss is
T^2 KL(student || teacher).
"""

import copy
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from preference import VOCAB, model, rows

HERE = Path(__file__).parent / "distill"
CASES = {
    "half": dict(alpha=0.5, temperature=1.0),
    "warm": dict(alpha=0.3, temperature=2.5),
    "all": dict(alpha=1.0, temperature=0.7),
    "own": dict(alpha=1.0, temperature=1.0, on_policy=True),
    "own_warm": dict(alpha=1.0, temperature=1.7, on_policy=True),
}


def wider(seed):
    torch.manual_seed(seed)
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=40, max_position_embeddings=32, rope_theta=10000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=False, attn_implementation="eager", bos_token_id=None, eos_token_id=None)).eval()
    for p in made.parameters():
        mean, deviation = (0.0, 0.2) if p.ndim > 1 else (1.0, 0.2)
        p.data = torch.normal(mean, deviation, p.shape).bfloat16().float()
    return made


def losses(student, teacher, prompt, answer, alpha, temperature, on_policy=False):
    """By token of the answer."""
    ids = torch.tensor(prompt + answer)
    own = student(ids[None]).logits[0, len(prompt) - 1:-1].float()
    with torch.no_grad():
        taught = F.log_softmax(teacher(ids[None]).logits[0, len(prompt) - 1:-1].float() / temperature, dim=-1)
    told = F.log_softmax(own / temperature, dim=-1)
    apart = [taught, told] if on_policy else [told, taught]
    divergence = F.kl_div(*apart, log_target=True, reduction="none").sum(-1)
    entropy = F.cross_entropy(own, ids[len(prompt):], reduction="none")
    return (1 - alpha) * entropy + alpha * temperature**2 * divergence


def known(student, prompt, answer):
    """The log-probabilities of the answer's tokens, and the entropies where they are chosen."""
    with torch.no_grad():
        told = F.log_softmax(student(torch.tensor(prompt + answer)[None]).logits[0, len(prompt) - 1:-1].float(), dim=-1)
    return told.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist(), (-(told.exp() * told).sum(-1)).tolist()


def main():
    HERE.mkdir(exist_ok=True)
    student, teacher, pairs = model(1), wider(9), rows()
    copy.deepcopy(teacher).bfloat16().save_pretrained(HERE / "teacher")
    (HERE / "teacher" / "generation_config.json").unlink(missing_ok=True)
    values, grads = {"rows": [dict(prompt=row["prompt"], answer=row["chosen"]) for row in pairs], "cases": {}}, {}
    samples = [known(student, row["prompt"], row["chosen"]) for row in pairs]
    values["logprobs"] = [logprobs for logprobs, _ in samples]
    entropies = [x for _, entropies in samples for x in entropies]
    values["entropy"] = sum(entropies) / len(entropies)
    for case, settings in CASES.items():
        student.zero_grad()
        loss = torch.cat([losses(student, teacher, row["prompt"], row["chosen"], **settings) for row in pairs]).mean()
        loss.backward()
        values["cases"][case] = settings | {"loss": loss.item()}
        grads |= {f"{case}.{n}": p.grad.clone() for n, p in student.named_parameters()}
    (HERE / "values.json").write_text(json.dumps(values) + "\n")
    save_file(grads, HERE / "gradients.safetensors")


main()
