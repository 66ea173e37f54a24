"""GGUF files of others, for tests/checkpoint/gguf_in.rs. Needs numpy and the gguf package.

    python gguf_in.py      writes gguf_in/: small models with one type of tensor each, mixtures of experts, and hashes

`blocks.bin` has, for each type that is read, its number, blocks of random bytes with a sane scale, and their values in f32 as
the gguf package dequantizes them. `hashes.json` has the first bytes of SHA-256 of each tensor in f32 as transformers names it.
"""

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

OUT = Path(__file__).parent / "gguf_in"
RNG = np.random.default_rng(7)
# Where f16 scales stand in a block.
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0], Type.Q2_K: [80, 82], Type.Q3_K: [108],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}
TYPES = [Type.F32, Type.F16, Type.BF16, *SCALES]
HEADS, KV, HEAD, LAYERS, VOCAB = 4, 2, 8, 2, 29


def blocks(kind, rows, columns):
    """Bytes of a tensor, (rows, bytes of a row)."""
    if kind == Type.F32:
        return RNG.normal(size=(rows, columns)).astype(np.float32).view(np.uint8)
    if kind == Type.F16:
        return RNG.normal(size=(rows, columns)).astype(np.float16).view(np.uint8)
    if kind == Type.BF16:
        return gguf.quantize(RNG.normal(size=(rows, columns)).astype(np.float32), kind).view(np.uint8)
    size, length = gguf.GGML_QUANT_SIZES[kind]
    data = RNG.integers(0, 256, size=(rows * columns // size, length), dtype=np.uint8)
    for at in SCALES[kind]:
        data[:, at:at + 2] = RNG.normal(scale=0.02, size=len(data)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


def values(data, kind):
    return data.view(np.float32) if kind == Type.F32 else gguf.dequantize(data, kind).astype(np.float32)


def rotated(x, heads):
    """Rows as transformers has them: llama.cpp has row i of a head's halves next to each other."""
    return x.reshape(heads, len(x) // heads // 2, 2, -1).swapaxes(1, 2).reshape(x.shape)


class Model:
    def __init__(self, name, arch, dim, ff):
        self.name, self.arch, self.hashes = name, arch, {}
        self.w = gguf.GGUFWriter(OUT / f"{name}.gguf", arch)
        self.w.add_type("model")
        for add, value in [
            (self.w.add_block_count, LAYERS), (self.w.add_context_length, 64), (self.w.add_embedding_length, dim),
            (self.w.add_feed_forward_length, ff), (self.w.add_head_count, HEADS), (self.w.add_head_count_kv, KV),
            (self.w.add_layer_norm_rms_eps, 1e-5), (self.w.add_rope_freq_base, 10000.0), (self.w.add_key_length, HEAD),
            (self.w.add_value_length, HEAD),
        ]:
            add(value)
        self.w.add_tokenizer_model("none")

    def put(self, name, names, kind, rows, columns, heads=0, shape=None):
        """One tensor, or that of all experts: `names` are transformers' names."""
        data = blocks(kind, rows * len(names), columns)
        raw = data.reshape(len(names), rows, -1) if len(names) > 1 else data
        if kind == Type.F32:
            raw = raw.reshape(-1).view(np.float32).reshape(shape or (*raw.shape[:-1], columns))
            self.w.add_tensor(name, raw)
        else:
            self.w.add_tensor(name, raw, raw_dtype=kind)
        for own, x in zip(names, np.split(values(data, kind), len(names)), strict=True):
            x = rotated(x, heads) if heads else x
            self.hashes[own] = hashlib.sha256(np.ascontiguousarray(x + np.float32(0)).tobytes()).hexdigest()[:16]

    def norm(self, name, own, width):
        self.put(name, [own], Type.F32, 1, width, shape=(width,))

    def attention(self, dim, kinds, row_norm=False, head_norm=False):
        rotate = self.arch == "llama"
        self.put("token_embd.weight", ["model.embed_tokens.weight"], kinds[0], VOCAB, dim)
        self.put("output.weight", ["lm_head.weight"], kinds[1], VOCAB, dim)
        self.norm("output_norm.weight", "model.norm.weight", dim)
        for i in range(LAYERS):
            a, b = f"blk.{i}.attn_", f"model.layers.{i}.self_attn."
            self.norm(f"{a}norm.weight", f"model.layers.{i}.input_layernorm.weight", dim)
            self.norm(f"blk.{i}.ffn_norm.weight", f"model.layers.{i}.post_attention_layernorm.weight", dim)
            self.put(f"{a}q.weight", [f"{b}q_proj.weight"], kinds[2], HEADS * HEAD, dim, HEADS if rotate else 0)
            self.put(f"{a}k.weight", [f"{b}k_proj.weight"], kinds[3], KV * HEAD, dim, KV if rotate else 0)
            self.put(f"{a}v.weight", [f"{b}v_proj.weight"], kinds[4], KV * HEAD, dim)
            self.put(f"{a}output.weight", [f"{b}o_proj.weight"], kinds[5], dim, HEADS * HEAD)
            if self.arch == "qwen2moe":
                for part, rows in [("q", HEADS), ("k", KV), ("v", KV)]:
                    self.norm(f"{a}{part}.bias", f"{b}{part}_proj.bias", rows * HEAD)
            if row_norm or head_norm:
                self.norm(f"{a}q_norm.weight", f"{b}q_norm.weight", HEAD * (HEADS if row_norm else 1))
                self.norm(f"{a}k_norm.weight", f"{b}k_norm.weight", HEAD * (KV if row_norm else 1))

    def experts(self, dim, ff, count, module, kinds, shared=0):
        for i in range(LAYERS):
            a, b = f"blk.{i}.ffn_", f"model.layers.{i}.{module}."
            self.put(f"{a}gate_inp.weight", [f"{b}gate.weight"], Type.F32, count, dim)
            for name, own, rows, columns in [("gate", kinds[0], ff, dim), ("up", kinds[1], ff, dim), ("down", kinds[2], dim, ff)]:
                self.put(f"{a}{name}_exps.weight", [f"{b}experts.{e}.{own}.weight" for e in range(count)], Type.Q8_0, rows, columns)
            if shared:
                own = f"model.layers.{i}.mlp.shared_expert"
                self.put(f"{a}gate_shexp.weight", [f"{own}.gate_proj.weight"], Type.Q4_0, shared, dim)
                self.put(f"{a}up_shexp.weight", [f"{own}.up_proj.weight"], Type.Q4_0, shared, dim)
                self.put(f"{a}down_shexp.weight", [f"{own}.down_proj.weight"], Type.Q4_0, dim, shared)
                self.norm(f"{a}gate_inp_shexp.weight", f"{own}_gate.weight", dim)

    def done(self):
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()
        return self.hashes


def quants():
    """A Llama whose matrices have all types between them."""
    dim, ff = 256, 32
    m = Model("quants", "llama", dim, ff)
    m.w.add_rope_dimension_count(HEAD)
    m.w.add_vocab_size(VOCAB)
    m.attention(dim, [Type.Q6_K, Type.Q4_K, Type.Q4_K, Type.Q5_K, Type.Q3_K, Type.Q4_1])
    for i in range(LAYERS):
        a, b = f"blk.{i}.ffn_", f"model.layers.{i}.mlp."
        m.put(f"{a}gate.weight", [f"{b}gate_proj.weight"], Type.Q2_K, ff, dim)
        m.put(f"{a}up.weight", [f"{b}up_proj.weight"], [Type.Q4_0, Type.BF16][i], ff, dim)
        m.put(f"{a}down.weight", [f"{b}down_proj.weight"], [Type.Q5_0, Type.Q5_1][i], dim, ff)
    return m.done()


def sparse(name, arch, count, used, module, kinds, **more):
    dim, ff = 32, 32
    m = Model(name, arch, dim, ff)
    m.w.add_expert_count(count)
    m.w.add_expert_used_count(used)
    if arch.startswith("qwen"):
        m.w.add_expert_feed_forward_length(ff)
    if arch == "qwen2moe":
        m.w.add_expert_shared_feed_forward_length(64)
    m.attention(dim, [Type.F16] * 6, row_norm=arch == "olmoe", head_norm=arch == "qwen3moe")
    m.experts(dim, ff, count, module, kinds, **more)
    return m.done()


def main():
    OUT.mkdir(exist_ok=True)
    with open(OUT / "blocks.bin", "wb") as file:
        for kind in TYPES:
            count = 512 if kind in list(SCALES)[5:] else 64
            data = blocks(kind, 1, count)
            file.write(np.array([kind, data.size, count], dtype=np.uint32).tobytes() + data.tobytes() + values(data, kind).tobytes())
    qwen, mixtral = ["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]
    hashes = {
        "quants": quants(),
        "mixtral": sparse("mixtral", "llama", 3, 2, "block_sparse_moe", mixtral),
        "qwen2moe": sparse("qwen2moe", "qwen2moe", 4, 2, "mlp", qwen, shared=64),
        "qwen3moe": sparse("qwen3moe", "qwen3moe", 4, 2, "mlp", qwen),
        "olmoe": sparse("olmoe", "olmoe", 3, 2, "mlp", qwen),
    }
    (OUT / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
