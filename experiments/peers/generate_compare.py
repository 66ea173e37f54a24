"""Compares greedy generation of flatshard and transformers: the same weights and prompts, each with its key-value cache, one process.

Needs: pip install torch transformers numpy safetensors, and `cargo build --release`.
Run:   python3 experiments/peers/generate_compare.py [--rounds 3] [--threads 1] [--texts 1 32] [--bin DIR] [--out results.json]
       ... --device cuda --models llama-1b --precision bf16 --texts 1 64     on one GPU
The models have random weights. Each round runs every contender once, for one text, and for many at once (transformers' batched `generate`). Times are from the prompt to the last token, without loading; tokens/s
are new tokens over that time. Also prints how many of the first tokens agree: in bf16, near-ties are decided by rounding.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from compare import RELEASE, machine

MODELS = {
    "29M": dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408, vocab_size=8192, tie_word_embeddings=True),
    "106M": dict(hidden_size=768, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=12, intermediate_size=3072, vocab_size=32000, tie_word_embeddings=False),
    "llama-1b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def flatshard(binaries, directory, precision, prompts, count, threads, device):
    command = [str(binaries / "run_fsdp"), "--pretrain", str(directory), "--precision", precision, "--nproc-per-node", "1", "--device", device]
    command += ["--max-new-tokens", str(count), "--temperature", "0", "--threads-per-rank", str(threads)]
    if len(prompts) == 1:
        command += ["--generate", " ".join(map(str, prompts[0]))]
    else:
        file = directory / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts))
        command += ["--generate", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    speed = float(re.search(r"([\d.]+) tok/s", done.stderr).group(1))
    if len(prompts) == 1:
        return speed, [[int(word) for word in done.stdout.split()]]
    return speed, [json.loads(line)["ids"] for line in done.stdout.splitlines()]


def transformers(binaries, directory, precision, prompts, count, threads, device):
    torch.set_num_threads(threads)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=DTYPES[precision]).to(device).eval()
    tokens = torch.tensor(prompts, device=device)
    with torch.inference_mode():
        started = time.perf_counter()
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, use_cache=True).cpu()
        seconds = time.perf_counter() - started
    return len(prompts) * count / seconds, out[:, tokens.shape[1] :].tolist()


def save(directory, shape, positions):
    """A model with random weights. Its tokens are their numbers, so that texts are ids."""
    torch.manual_seed(0)
    # No end-of-text token, so that every contender writes all tokens.
    config = LlamaConfig(**shape, max_position_embeddings=positions, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(shape["vocab_size"])}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="length of the prompt [default: 128]")
    p.add_argument("--count", type=int, default=128, metavar="TOKENS", help="new tokens [default: 128]")
    p.add_argument("--threads", type=int, default=1, help="of each contender [default: 1]")
    p.add_argument("--texts", type=int, nargs="+", default=[1, 32], help="texts at once [default: 1 32]")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--models", nargs="+", choices=MODELS, default=["29M", "106M"])
    p.add_argument("--bin", type=pathlib.Path, default=RELEASE, help="directory of the binaries [default: of the release build]")
    p.add_argument("--out", type=pathlib.Path, help="write every measurement as JSON")
    a = p.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in a.models:
            save(pathlib.Path(scratch) / name, MODELS[name], a.prompt + a.count)
        cases = [(name, precision, texts) for name in a.models for precision in a.precision for texts in a.texts]
        for number in range(a.rounds):
            for name, precision, texts in cases:
                made = torch.randint(0, MODELS[name]["vocab_size"], (texts, a.prompt), generator=torch.Generator().manual_seed(number)).tolist()
                written = []
                for contender in (flatshard, transformers):
                    speed, tokens = contender(a.bin, pathlib.Path(scratch) / name, precision, made, a.count, a.threads, a.device)
                    assert [len(text) for text in tokens] == [a.count] * texts, f"{contender.__name__} wrote {[len(text) for text in tokens]} tokens"
                    written.append(tokens)
                    runs.append({"model": name, "precision": precision, "texts": texts, "name": contender.__name__, "tokens_per_sec": round(speed, 1), "round": number})
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                same = [next((i for i, (x, y) in enumerate(zip(*pair)) if x != y), a.count) for pair in zip(*written)]
                runs[-2]["agree"] = statistics.median(same)
    print(f"| model | precision | texts | flatshard tokens/s, median of {a.rounds} (min-max) | transformers | ratio | first tokens that agree, median |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, precision, texts in cases:
        rows = [r for r in runs if (r["model"], r["precision"], r["texts"]) == (name, precision, texts)]
        ours, theirs = ([r["tokens_per_sec"] for r in rows if r["name"] == who] for who in ("flatshard", "transformers"))
        cells = [f"{statistics.median(x):.0f} ({min(x):.0f}-{max(x):.0f})" for x in (ours, theirs)]
        agree = statistics.median(r["agree"] for r in rows if "agree" in r)
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(f"| {name} | {precision} | {texts} | {cells[0]} | {cells[1]} | {ratio:.2f} | {agree:.0f} of {a.count} |")
    if a.out:
        versions = {"torch": torch.__version__, "transformers": __import__("transformers").__version__}
        shape = {"prompt": a.prompt, "count": a.count, "threads": a.threads, "device": a.device}
        a.out.write_text(json.dumps({"machine": machine(), **versions, **shape, "models": MODELS, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
