"""Golden values from PyTorch and Hugging Face transformers for tests/engine/golden.rs. To make them again: python make.py

For each family a tiny random model (weights exact in bf16, stored as such) and, in fp32 with eager attention: logits,
loss and every gradient of one batch of documents, some targets ignored; loss and gradient norm of ten steps of AdamW
over two batches in turn. The documents go through the model one by one, so packing is checked against no packing. For
the bounds of bf16 and fp16: how far PyTorch's own are from its fp32.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

LENGTHS = [17, 1, 9, 4]  # tokens of each document
STEPS = 10
VOCAB = 47
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY = 0.1  # matrices and embeddings only
MAX_NORM = 2.0  # some of the ten steps are clipped, some are not
COMMON = dict(vocab_size=VOCAB, attn_implementation="eager", bos_token_id=None, eos_token_id=None)


def llama():
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
        intermediate_size=44, max_position_embeddings=24, rope_theta=10000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=False, **COMMON))


def gpt():
    return GPT2LMHeadModel(GPT2Config(
        n_embd=36, n_layer=2, n_head=3, n_inner=44, n_positions=24, layer_norm_epsilon=1e-5,
        activation_function="gelu_new", embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, tie_word_embeddings=True,
        **COMMON))


def randomize(model):
    """Large enough that norms, biases and clipping matter; exact in bf16. The filters of short convolutions give heads that are
    normalized: with small ones, rounding errors would matter."""
    for name, p in model.named_parameters():
        mean, deviation = (0.0, 0.6 if "conv1d" in name else 0.15) if p.ndim > 1 else (1.0 if p.mean() > 0.5 else 0.0, 0.2)
        p.data = torch.normal(mean, deviation, p.shape).bfloat16().float()
    for name, buffer in scalars(model):
        buffer.copy_((torch.normal(1.0, 0.2, buffer.shape) if name.endswith("layer_scalar") else buffer).bfloat16())


def scalars(model):
    """Factors of layers and two numbers of xIELU, which are saved but not trained."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(("layer_scalar", "act_fn.beta", "act_fn.eps"))]


def targets_of(tokens, lengths=LENGTHS):
    """What each position predicts: the next token of its document, none for its last."""
    return torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in tokens.split(lengths)])


def forward(model, tokens, targets, lengths=LENGTHS):
    """Logits of all documents, and the mean loss over the targets that are not ignored."""
    logits = torch.cat([model(d[None]).logits[0] for d in tokens.split(lengths)]).float()
    count = (targets != -100).sum()
    return logits, F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / count


def gradients(model, tokens, targets, lengths=LENGTHS, scale=1.0):
    """`scale` is that of the loss in fp16, which is taken from the gradient again."""
    model.zero_grad()
    logits, loss = forward(model, tokens, targets, lengths)
    (loss * scale).backward()
    return logits.detach(), loss.item(), {n: p.grad.float() / scale for n, p in model.named_parameters()}


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def main():
    here = Path(__file__).parent
    for name, build in [("llama", llama), ("gpt", gpt)]:
        torch.manual_seed(20)
        model = build().eval()
        randomize(model)
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        tokens = torch.randint(VOCAB, (2, sum(LENGTHS)))
        targets = targets_of(tokens[0])
        targets[[2, 3, 20]] = -100
        logits, loss, grads = gradients(model, tokens[0], targets)

        errors = {}
        for dtype, scale in [(torch.bfloat16, 1.0), (torch.float16, 65536.0)]:
            narrow = build().eval()
            narrow.load_state_dict(model.state_dict())
            logits16, loss16, grads16 = gradients(narrow.to(dtype), tokens[0], targets, scale=scale)
            errors[dtype] = {"loss": abs(loss16 - loss) / loss, "logits": relative(logits16, logits),
                             "grads": {n: relative(grads16[n], grads[n]) for n in grads}}

        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups = [dict(params=decay, weight_decay=WEIGHT_DECAY), dict(params=rest, weight_decay=0.0)]
        adamw = torch.optim.AdamW(groups, **ADAMW)
        losses, norms = [], []
        for step in range(STEPS):
            batch = tokens[step % 2]
            adamw.zero_grad()
            _, step_loss = forward(model, batch, targets_of(batch))
            step_loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            adamw.step()
            losses.append(step_loss.item())

        tensors = {f"weight.{n}": w.bfloat16().contiguous() for n, w in weights.items()}
        tensors |= {f"grad.{n}": g.contiguous() for n, g in grads.items()}
        tensors |= {"logits": logits, "tokens": tokens.int(), "targets": targets.int()}
        save_file(tensors, here / f"{name}.safetensors")
        golden = dict(lengths=LENGTHS, loss=loss, losses=losses, norms=norms, max_norm=MAX_NORM,
                      weight_decay=WEIGHT_DECAY, bf16_errors=errors[torch.bfloat16],
                      fp16_errors=errors[torch.float16], **ADAMW,
                      made_with=f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
        (here / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
