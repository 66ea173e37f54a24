"""Matrices in 4 bits as bitsandbytes stores them, for tests/engine/packed.rs. Needs torch, bitsandbytes, safetensors.

    python nf4.py    writes nf4.safetensors: for each matrix "ROWSxCOLUMNS:SALT" its bytes in the order of
                     src/base/nf4.rs, and for the smallest also its values in f32 and bf16

bitsandbytes sums the magnitudes in f32, in an order that depends on the machine. For each shape there is one matrix whose
mean is nevertheless that of the exact sum, and one whose mean is not.
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from safetensors.torch import save_file

SHAPES = [(32, 64), (64, 64), (288, 64), (64, 288)]


def matrix(rows, columns, salt):
    """The same values as `value` in tests/engine/packed.rs. The sixth block is zero."""
    i = np.arange(rows * columns, dtype=np.uint32)
    u = i * np.uint32(2654435761) + np.uint32(salt) * np.uint32(40503)
    u = (u ^ (u >> np.uint32(15))) * np.uint32(0x2C1B3AC5)
    u = u ^ (u >> np.uint32(12))
    x = ((u >> np.uint32(8)).astype(np.float32) - np.float32(2**23)) * np.float32(2**-24)
    block = i // np.uint32(64)
    factor = (np.uint32(16) + block * np.uint32(7) % np.uint32(13)).astype(np.float32) * np.float32(2**-8)
    x = np.where(block == 5, np.float32(0), x * factor)
    return torch.from_numpy(x.reshape(rows, columns))


def nearest(x, code, blocksize):
    """bitsandbytes' quantize_blockwise of its default backend: the CPU library's looks codes up in a coarse table."""
    default = torch._C.DispatchKey.CompositeExplicitAutograd
    return torch.ops.bitsandbytes.quantize_blockwise.default._op_dk(default, x, code, blocksize)


def quantized(w):
    codes, state = bnb.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    magnitudes = w.reshape(-1, 64).abs().max(1)[0]
    exact = np.float32(magnitudes.double().mean().item())
    state.absmax, factors = nearest(magnitudes - state.offset, state.state2.code, 256)
    assert torch.equal(factors, state.state2.absmax)
    padding = np.zeros(-(w.numel() // 2 + w.numel() // 64) % 4, np.uint8)
    floats = [state.state2.absmax, state.offset.reshape(1)]
    parts = [codes.flatten().numpy(), state.absmax.numpy(), padding, *[x.numpy().view(np.uint8) for x in floats]]
    return torch.from_numpy(np.concatenate(parts)), exact == state.offset.item(), (codes, state)


def main():
    golden = {}
    for rows, columns in SHAPES:
        wanted, salt = [True, False], 0
        while wanted:
            w = matrix(rows, columns, salt)
            data, exact, (codes, state) = quantized(w)
            if exact in wanted:
                wanted.remove(exact)
                name = f"{rows}x{columns}:{salt}"
                golden[name] = data
                if (rows, columns) == SHAPES[0]:
                    for dtype in [torch.float32, torch.bfloat16]:
                        state.dtype = dtype
                        golden[f"{name}:{str(dtype)[6:]}"] = bnb.dequantize_4bit(codes, state).contiguous()
            salt += 1
    save_file(golden, Path(__file__).parent / "nf4.safetensors")
    print("\n".join(f"{name} {tuple(t.shape)}" for name, t in golden.items()))


if __name__ == "__main__":
    main()
