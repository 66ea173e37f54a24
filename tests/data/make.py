"""Makes tests/data/golden: small tokenizers in the two shapes that model directories have, and what transformers does with
them; conversations rendered by transformers through chat templates of the well-known shapes. Needs transformers
and pyarrow. Run from the repository root: python tests/data/make.py"""
import json
import pathlib
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
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


CHATS = {
    "one turn": [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "To be, or not?\n"},
        {"role": "assistant", "content": "That is the question.\n"},
    ],
    "turns": [
        {"role": "user", "content": "h\u00e9llo <b>\u6f22</b>"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
        {"role": "user", "content": "It's 1984?"},
        {"role": "assistant", "content": "It wasn't."},
        {"role": "user", "content": "Over & out"},
    ],
    "tools": [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {
            "name": "weather", "arguments": {"city": "K\u00f6ln", "days": [1, 2.5], "now": True, "unit": None}}}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "21"},
        {"role": "assistant", "content": "It is."},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": " Hi "}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
    ],
    "twice the user": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}


def chats(tokenizer):
    """What transformers renders, or that it refuses, of every conversation through every template."""
    cases = []
    for path in sorted((OUT / "templates").glob("*.jinja")):
        for name, messages in CHATS.items():
            if name == "parts" and path.stem not in ("gemma3", "chatml"):
                continue  # Python's spelling of a list is not what anybody trains on
            for prompt in (False, True):
                case = {"template": path.stem, "chat": name, "prompt": prompt}
                try:
                    case["text"] = tokenizer.apply_chat_template(
                        messages, chat_template=path.read_text(), tokenize=False, add_generation_prompt=prompt)
                except Exception as e:
                    case["error"] = str(e)
                cases.append(case)
    write(OUT / "templates" / "golden.json", {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token, "chats": CHATS, "cases": cases})


def sft(tokenizer, row, *, input_key, output_key=None, input_template=None, chat=None, multiturn=False, pretrain=False, special=None, max_len):
    """Tokens and loss of a row: (ids, which of them have a loss), or None for a row that is left out. The text is that of
    OpenRLHF's SFT dataset, or with `special` of TRL's SFTTrainer for a prompt and a completion; a token has a loss if it overlaps a span of characters, as in transformers'
    return_assistant_tokens_mask. A row that is too long is cut, and does not end in the end of text."""
    def render(messages, **more):
        return tokenizer.apply_chat_template(messages, chat_template=chat, tokenize=False, **more)

    if pretrain:
        tokens = tokenizer(row[input_key], add_special_tokens=False)["input_ids"][:max_len]
        return (tokens, [True] * len(tokens)) if len(tokens) > 1 else None
    spans = []
    if chat is None:
        prompt = input_template.format(row[input_key]) if input_template else row[input_key]
        response = row[output_key]
    else:
        messages = row[input_key]
        if output_key and isinstance(messages, str):
            messages = [{"role": "user", "content": messages}, {"role": "assistant", "content": row[output_key]}]
        elif output_key:
            messages = messages + row[output_key]
        if not messages[-1]["content"]:
            return None
        prompt = render(messages[:-1], add_generation_prompt=True)
        response = render(messages)[len(prompt):]
        for i, message in enumerate(messages if multiturn else []):
            if message["role"] == "assistant":
                before = render(messages[:i], add_generation_prompt=True)
                spans.append((len(before), len(render(messages[:i + 1]))))
    if not prompt or not response:
        return None
    text = prompt + response if special else (prompt + response).rstrip("\n")
    spans = [(start, end if end < len(text) else float("inf")) for start, end in spans or [(len(prompt), float("inf"))]]
    if not text.endswith(tokenizer.eos_token):
        text += tokenizer.eos_token if special else " " + tokenizer.eos_token
    made = tokenizer(text, add_special_tokens=bool(special), return_offsets_mapping=True, return_special_tokens_mask=True)
    tokens = made["input_ids"][:-1] + [tokenizer.eos_token_id]
    loss = [any(a < max(end, start + 1) and start < b for a, b in spans) for start, end in made["offset_mapping"]]
    if special and made["special_tokens_mask"][0]:
        loss[0] = False
    if not multiturn and loss.index(True) + 2 >= max_len:
        return None
    tokens, loss = tokens[:max_len], loss[:max_len]
    return (tokens, loss) if any(loss[1:]) else None


PROMPTS = [
    {"q": "What is the capital of France?", "a": "Paris is the capital of France."},
    {"q": "To be, or not to be", "a": "that is the question\n\n"},
    {"q": "The quick brown fox jumps over the lazy dog. " * 6, "a": "Yes."},
    {"q": "Count.", "a": "1, 2, 3, " * 40},
    {"q": "Empty?", "a": ""},
    {"q": "", "a": "Something."},
    {"q": "\u6f22", "a": "<|im_end|>"},
]
TALKS = [{"messages": chat} for name, chat in CHATS.items() if name in ("one turn", "system")] + [
    {"messages": [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi, user!"},
        {"role": "user", "content": "Print it 10 times"}, {"role": "assistant", "content": "in range(10):\n    print(it)\n"},
    ]},
    {"messages": [{"role": "user", "content": "a b c " * 30}, {"role": "assistant", "content": "no room"}]},
    {"messages": [{"role": "user", "content": "long?"}, {"role": "assistant", "content": "very " * 60},
                  {"role": "user", "content": "and?"}, {"role": "assistant", "content": "no"}]},
    {"messages": [{"role": "user", "content": "long?"}, {"role": "assistant", "content": "very " * 6},
                  {"role": "user", "content": "and?"}, {"role": "assistant", "content": "on and on " * 40}]},
]


def samples(name):
    tokenizer = AutoTokenizer.from_pretrained(OUT / name)
    template = lambda name: (OUT / "templates" / f"{name}.jinja").read_text()
    modes = [
        (PROMPTS, dict(input_key="q", output_key="a"), None),
        (PROMPTS, dict(input_key="q", output_key="a", special=True), None),
        (PROMPTS, dict(input_key="q", output_key="a", input_template="User: {}\nAssistant: "), None),
        (PROMPTS, dict(input_key="q", output_key="a"), "chatml"),
        (PROMPTS, dict(input_key="q", pretrain=True), None),
        *[(TALKS, dict(input_key="messages", multiturn=turns), t) for t in ("chatml", "llama3", "zephyr") for turns in (False, True)],
        ([{"c": TALKS[0]["messages"][:1], "r": TALKS[0]["messages"][1:]}], dict(input_key="c", output_key="r"), "qwen2"),
    ]
    cases = []
    for rows, options, chat in modes:
        for row in rows:
            made = sft(tokenizer, row, **options, chat=chat and template(chat), max_len=96)
            case = {"row": row, "template": chat, **options}
            if made:
                case["ids"], loss = made
                case["loss"] = "".join("x" if l else "." for l in loss)
            cases.append(case)
    write(OUT / name / "sft.json", {"max_len": 96, "cases": cases})


def parquet():
    """The rows of PROMPTS and TALKS, and token rows, as pyarrow writes them: nested, compressed, several row groups."""
    path = OUT / "parquet"
    path.mkdir(exist_ok=True)
    rows = [{"id": i, "q": p["q"], "blob": b"\xff" * 3, "a": p["a"]} for i, p in enumerate(PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), path / "prompts.parquet", compression="snappy", row_group_size=3)
    talks = [{"source": "x", "messages": [{**m, "name": None} for m in t["messages"]]} for t in TALKS]
    schema = pa.schema([("source", pa.string()), ("messages", pa.list_(pa.struct(
        [("role", pa.string()), ("content", pa.large_string()), ("name", pa.string())])))])
    pq.write_table(pa.Table.from_pylist(talks, schema), path / "talks.parquet", compression="zstd", row_group_size=2)
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int64()))])
    tokens = [{"input_ids": list(range(i + 2)), "labels": [-100] + list(range(1, i + 2))} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(tokens, schema), path / "tokens.parquet", compression="none")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    tokenizer = save(byte_level(), "byte_level")
    save(sentencepiece(), "sentencepiece")
    chats(tokenizer)
    samples("byte_level")
    samples("sentencepiece")
    parquet()
