"""Blocks of 8-bit optimizer state for tests/device/quantize.rs, made by bitsandbytes 0.50.2 on the CPU. To make them again:
python adamw8bit.py

The maps are bitsandbytes' own, with -1 for the least signed value, as its CPU kernel set it until 0.45 (code[0] = -1.0f in
cpu_ops.cpp). Two of its implementations must agree: the one for f64 on the CPU and the one of the default backend. Its newest CPU
kernel for f32 looks values up in 65536 equal steps, by which 0 becomes 2e-5 of the largest magnitude; it is not used. A second
moment that is positive is never 0 (`positive`), where theirs may be.

The steps are those of its update on the CPU, with that quantization.
"""
from pathlib import Path

import torch
from bitsandbytes.functional import create_dynamic_map
from safetensors.torch import save_file

BLOCK = 256


def main():
    torch.manual_seed(8)
    here, tensors = Path(__file__).parent, {}
    for name, signed in [("signed", True), ("unsigned", False)]:
        code = create_dynamic_map(signed)
        if signed:
            code[0] = -1.0
        # Blocks of many magnitudes, values over seven decades, a last block that is short.
        x = torch.randn(5 * BLOCK + 77) * 10 ** (-7 * torch.rand(5 * BLOCK + 77))
        x *= torch.tensor([1.0, 1e-12, 3e4, 1e-5, 0.7, 2.0]).repeat_interleave(BLOCK)[: len(x)]
        x[:: 11] = 0
        x = x if signed else x.abs()
        codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(x.double(), code, BLOCK)
        whole = 5 * BLOCK
        again, _ = default_quantize(x[:whole], code)
        assert (codes[:whole] == again).all()
        codes = positive(codes, x, code)
        values = torch.ops.bitsandbytes.dequantize_blockwise(codes, absmax, code, BLOCK, torch.float32)
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in
                    dict(map=code, x=x, codes=codes.to(torch.int32), absmax=absmax, values=values).items()}
    tensors |= {f"step.{key}": value.contiguous() for key, value in steps().items()}
    save_file(tensors, here / "adamw8bit.safetensors")


def steps(count=6, n=2 * BLOCK + 77):
    """States and weights after each of `count` steps of adamw8bit."""
    from bitsandbytes.backends.cpu import ops

    def quantize(x, code, absmax, out, blocksize):
        codes, largest = torch.ops.bitsandbytes.quantize_blockwise(x.double(), code, blocksize)
        out.copy_(positive(codes, x, code))
        absmax.copy_(largest)

    ops._quant_blockwise_fp32_direct = quantize
    signed, unsigned = create_dynamic_map(True), create_dynamic_map(False)
    signed[0] = -1.0
    p, m, v = torch.randn(n), torch.zeros(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
    of_m, of_v = torch.zeros(-(-n // BLOCK)), torch.zeros(-(-n // BLOCK))
    made = {"p": [p.clone()], "g": [], "m": [], "v": [], "of_m": [], "of_v": []}
    for step in range(1, count + 1):
        g = torch.randn(n) * 10 ** (-4 * torch.rand(n))
        ops._optimizer_update_8bit_blockwise_cpu("adam", g, p, m, v, 0.9, 0.95, 0.0, 0.0, 1e-8, step, 1e-2, signed, unsigned,
                                                 of_m, of_v, 0.1, 1.0)
        for key, value in dict(p=p, g=g, m=m, v=v, of_m=of_m, of_v=of_v).items():
            made[key].append(value.clone().to(torch.int32) if key in "mv" else value.clone())
    return {key: torch.stack(values) for key, values in made.items()}


def positive(codes, x, code):
    """The least positive fraction instead of 0, in the map without a sign."""
    return codes if code[0] < 0 else torch.where(x.reshape(codes.shape) > 0, codes.clamp(min=1), codes)


def default_quantize(x, code):
    """bitsandbytes/backends/default/ops.py: the dispatcher would choose the CPU kernel."""
    bounds = (code[:-1] + code[1:]) / 2
    blocks = x.reshape(-1, BLOCK)
    absmax = blocks.abs().max(dim=-1)[0]
    scaled = torch.clamp(blocks * (1.0 / absmax.clamp(min=1e-38).view(-1, 1)), -1, 1)
    return torch.bucketize(scaled.reshape(-1), bounds, out_int32=True).to(torch.uint8), absmax


if __name__ == "__main__":
    main()
