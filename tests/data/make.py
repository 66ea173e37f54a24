"""Makes tests/data/golden: small tokenizers in the two shapes that model directories have, and what transformers does with
them; conversations rendered by transformers through chat templates of the well-known shapes. Needs transformers and
tokenizers. Run from the repository root: python tests/data/make.py"""
import json
import pathlib
import shutil

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
OUT = HERE / "golden"

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It wasn't the first time, and it won't be the last!",
    "def main(argc, argv):\n    for i in range(10):\n        print(f'{i} of {argc}')\n\n\n    return 0",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer",
    "In 1984, 3.14159 was approximately equal to pi; 1,000,000 is a million.",
    "User: What is the capital of France?\nAssistant: Paris is the capital of France.",
] * 4

TEXTS = [
    "Hello, world!",
    "",
    " leading and trailing ",
    "\n\n  The fox\tjumps 12345 times\n\nover it.\n",
    "h\u00e9llo \u6f22\u5b57 \U0001f600 na\u00efve",
    "<|im_start|>user\nhi<|im_end|>\n<s>text</s><|endoftext|>",
    "don't won't I'LL",
    "a" * 40,
]


def byte_level():
    """GPT-2, Llama 3, Qwen: byte-level BPE behind a pattern; bos by a template post-processor, as Llama 3 has it."""
    t = Tokenizer(models.BPE())
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(CORPUS, trainer)
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", t.token_to_id("<s>"))])])
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>")


def sentencepiece():
    """Llama 2, Mistral: BPE over pieces with a space in front, unknown characters as bytes; eos is </s>."""
    t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special))
    state = json.loads(t.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are in the vocabulary, not special
    t = Tokenizer.from_str(json.dumps(state))
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", t.token_to_id("<s>"))])
    t.enable_truncation(7)  # as training scripts leave it in the file: not what a user of the file asked for
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write(path, golden):
    """A case a line."""
    cases = ",\n".join(json.dumps(case) for case in golden.pop("cases"))
    path.write_text(json.dumps(golden)[:-1] + (", " if golden else "") + f'"cases": [\n{cases}\n]}}\n')


def save(tokenizer, name):
    path = OUT / name
    shutil.rmtree(path, ignore_errors=True)
    tokenizer.save_pretrained(path)
    loaded = AutoTokenizer.from_pretrained(path)
    cases = []
    for text in TEXTS:
        bare = loaded(text, add_special_tokens=False)["input_ids"]
        cases.append({"text": text, "bare": bare, "whole": loaded(text)["input_ids"],
                      "decoded": loaded.decode(bare, skip_special_tokens=True, clean_up_tokenization_spaces=False)})
    golden = {"vocab": max(loaded.get_vocab().values()) + 1, "bos": loaded.bos_token_id, "eos": loaded.eos_token_id, "cases": cases}
    write(path / "golden.json", golden)
    return loaded


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    save(byte_level(), "byte_level")
    save(sentencepiece(), "sentencepiece")
