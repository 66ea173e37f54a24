"""FP8 as PyTorch computes it, for tests/engine/fp8.rs. Needs torch, safetensors, numpy.

    python fp8.py    writes fp8.safetensors. "e4m3:values": the number of each code. "e4m3:first": bits of the first
                     positive f32 that is cast to each of the codes 0 to 127, or -1. This script checks with every f32
                     that codes increase with magnitude and that the sign is the upper bit, so these are all casts.
                     "linear:...": a linear layer in FP8, forward and backward, in f64 from the quantized operands.
                     The same for e5m2.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
CHUNK = 1 << 24


def casts(dtype):
    """The first bits of each code of non-negative numbers, infinity and NaNs."""
    first, last = torch.full((128,), -1, dtype=torch.int64), -1
    for start in range(0, 1 << 31, CHUNK):
        x = torch.arange(start, start + CHUNK, dtype=torch.int64).to(torch.int32).view(torch.float32)
        codes = x.to(dtype).view(torch.uint8)
        negative = (x.view(torch.int32) | -(2**31)).view(torch.float32).to(dtype).view(torch.uint8)
        assert torch.equal(negative, codes | 128)
        codes = codes.to(torch.int16)
        assert codes[0] >= last and bool((codes[1:] >= codes[:-1]).all()) and codes[-1] < 128
        steps = torch.nonzero(codes[1:] != codes[:-1]).flatten() + 1
        for i in ([0] if codes[0] != last else []) + steps.tolist():
            first[codes[i]] = start + i
        last = int(codes[-1])
    return first


def scale(x, most):
    """The least power of two that brings the largest magnitude to at most `most`."""
    amax = x.abs().max().double()
    return 2.0 ** max(-110, int(torch.ceil(torch.log2(amax / most)))) if amax > 0 else 2.0**-110


def quantized(x, name, tall):
    """x rounded to FP8, in f64, with a scale for each `tall` rows and 128 columns."""
    dtype, most = FORMATS[name]
    y = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], tall):
        for j in range(0, x.shape[1], 128):
            block = x[i : i + tall, j : j + 128].float()
            by = scale(block, most)
            y[i : i + tall, j : j + 128] = (block / by).to(dtype).double() * by
    return y


def hashed(rows, columns, salt):
    """The same values as `value` in src/nn/linear/tests.rs: magnitudes of many binades."""
    i = np.arange(rows * columns, dtype=np.uint32)
    u = i * np.uint32(2654435761) + np.uint32(salt) * np.uint32(40503)
    u = (u ^ (u >> np.uint32(15))) * np.uint32(0x2C1B3AC5)
    u = u ^ (u >> np.uint32(12))
    x = ((u >> np.uint32(8)).astype(np.float32) - np.float32(2**23)) * np.float32(2**-23)
    factor = np.exp2(-(u % np.uint32(12)).astype(np.float32)).astype(np.float32)
    return torch.from_numpy((x * factor).reshape(rows, columns)).bfloat16()


def main():
    golden = {}
    for name, (dtype, _) in FORMATS.items():
        golden[f"{name}:values"] = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        golden[f"{name}:first"] = casts(dtype)
    n, inputs, outputs = 5, 160, 200
    x, w, dy = hashed(n, inputs, 1), hashed(outputs, inputs, 2), hashed(n, outputs, 3)
    x8, w8, dy8 = quantized(x, "e4m3", 1), quantized(w, "e4m3", 128), quantized(dy, "e5m2", 1)
    golden["linear:y"] = (x8 @ w8.T).float()
    golden["linear:dx"] = (dy8 @ w8).float()
    save_file(golden, Path(__file__).parent / "fp8.safetensors")
    print({name: t.shape for name, t in golden.items()})


if __name__ == "__main__":
    main()
