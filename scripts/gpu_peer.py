"""Measures in PyTorch what `gpu_check bench` and the 1B step measure, on the same GPU, as one JSON object.

Run by scripts/gpu_check.sh. Medians of CUDA event times; random data. The step comes first; when it is told to end (SIGTERM), it
prints what it has.
"""
import json
import signal
import sys
import time

import torch
import torch.nn.functional as F


def median_ms(call, rounds=15):
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def rows():
    n = 1 << 27
    x, z = bf16(n), bf16(n)
    yield "copy bf16", {"gb_per_s": 4 * n / median_ms(lambda: z.copy_(x)) / 1e6}
    del x, z
    for m, k, o in [(8192, 8192, 8192), (8192, 2048, 5632), (8192, 2048, 32000)]:
        a, w = bf16(m, k), bf16(o, k)
        ms = median_ms(lambda: a @ w.t())
        yield f"product bf16 nt {m}x{o}x{k}", {"tflops": 2 * m * k * o / ms / 1e9, "ms": ms}
    for d in (64, 128, 256):
        for s in (2048, 8192):
            b, h = 16384 // s, 2048 // d
            q, k, v = (bf16(b, h, s, d).requires_grad_() for _ in range(3))
            do = bf16(b, h, s, d)
            flops = 2 * b * s * s * d * h
            for name, backend in backends():
                with torch.nn.attention.sdpa_kernel(backend):
                    try:
                        ms = median_ms(lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True))
                        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                        back = median_ms(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
                    except RuntimeError as e:
                        yield f"attention forward causal {d} x {s} ({name})", {"error": str(e)[:100]}
                        continue
                yield f"attention forward causal {d} x {s} ({name})", {"tflops": flops / ms / 1e9, "ms": ms}
                yield f"attention backward causal {d} x {s} ({name})", {"tflops": 2.5 * flops / back / 1e9, "ms": back}


def backends():
    from torch.nn.attention import SDPBackend

    return [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]


def step_1b(compiled):
    """The model, batch and optimizer of the 1B step: fp32 master weights, bf16 compute, fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, intermediate_size=5632,
        vocab_size=32000, max_position_embeddings=2048, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(0, 32000, (8, 2048), device="cuda")
    forward = torch.compile(model) if compiled else model

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / 8
    return {"tokens_per_sec": tokens.numel() / seconds, "step_time_s": seconds, "peak_mem_bytes": torch.cuda.max_memory_allocated()}


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    try:
        for name, compiled in (("step 1b", False), ("step 1b, torch.compile", True)):
            try:
                report[name] = step_1b(compiled)
            except Exception as e:  # out of memory or no transformers: keep the other results
                report[name] = {"error": str(e)[:200]}
            torch.cuda.empty_cache()
        for name, row in rows():
            report[name] = row
    finally:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
