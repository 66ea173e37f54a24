"""The other side of adapters_compare.py: one job with transformers and PEFT, or with TRL for DPO. Prints one JSON object last.

Run:   python3 experiments/peers/adapters_peer.py --model DIR --data rows.jsonl --job lora-8 --rank 8 --precision fp32
With --make DIR --shape FILE it saves a model with random weights and a tokenizer of one word per token instead.
"""
import argparse
import json
import resource
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make(a):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shape = json.load(open(a.shape))
    torch.manual_seed(a.seed)
    shape = dict(tie_word_embeddings=True) | shape | dict(max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    dtype = getattr(torch, shape.pop("dtype", "float32"))
    config = AutoConfig.for_model(shape.pop("kind"), **shape)
    with torch.device(a.device):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(a.make)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w2", unk_token="w0").save_pretrained(a.make)


def loaded(a):
    options = {"dtype": torch.bfloat16 if a.precision == "bf16" else torch.float32}
    if a.job == "qlora":
        from transformers import BitsAndBytesConfig

        nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=options["dtype"])
        options["quantization_config"] = BitsAndBytesConfig(**nf4)
    return AutoModelForCausalLM.from_pretrained(a.model, attn_implementation="sdpa", device_map=a.device, **options)


def lora(a):
    from peft import LoraConfig

    return LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules=TARGETS, lora_dropout=0.0, task_type="CAUSAL_LM")


def batches(a):
    """Micro-batches with their tokens, and how many of those have a loss."""
    rows = [json.loads(line) for line in open(a.data)]
    if a.job == "packed":
        at = 0
        for _ in range(a.steps):
            sequences = []
            for _ in range(a.rows):
                ids, labels, positions = [], [], []
                while at < len(rows) and len(ids) + len(rows[at]["input_ids"]) <= 512:
                    ids += rows[at]["input_ids"]
                    labels += [-100, *rows[at]["labels"][1:]]
                    positions += range(len(rows[at]["input_ids"]))
                    at += 1
                left = 512 - len(ids)
                sequences.append((ids + [2] * left, labels + [-100] * left, positions + list(range(left)), len(ids)))
            ids, labels, positions = (torch.tensor([sequence[i] for sequence in sequences]) for i in range(3))
            yield {"input_ids": ids, "labels": labels, "position_ids": positions}, sum(sequence[3] for sequence in sequences)
        return
    for step in range(a.steps):
        part = rows[step * a.rows:(step + 1) * a.rows]
        ids, labels = (torch.tensor([row[key] for row in part]) for key in ("input_ids", "labels"))
        yield {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}, ids.numel()


def plain(a):
    model = loaded(a)
    if a.rank:
        from peft import get_peft_model

        model = get_peft_model(model, lora(a))
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train = a.job != "evaluate"
    optimizer = torch.optim.AdamW(learns, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True) if train else None
    model.train(train)
    rates, every = [], []
    for batch, tokens in batches(a):
        batch = {name: value.to(a.device) for name, value in batch.items()}
        start = time.perf_counter()
        with torch.set_grad_enabled(train):
            loss = model(**batch, use_cache=False).loss
        if train:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learns, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if a.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        with_loss = int((batch["labels"][:, 1:] != -100).sum())
        rates.append(with_loss / seconds)
        every.append(tokens / seconds)
    return statistics.median(rates[1:]), statistics.median(every[1:])


def dpo(a):
    """TRL's trainer; answers are as long as ours, and get no end of text from us either."""
    import tempfile

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in open(a.data)]
    text = lambda ids: " ".join(f"w{i}" for i in ids)
    data = Dataset.from_list([{key: text(row[f"{key}_input_ids"]) + " " * (key == "prompt") for key in ("prompt", "chosen", "rejected")} for row in rows])
    times = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            times.append([time.perf_counter()])

        def on_step_end(self, *_, **__):
            times[-1].append(time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch:
        settings = DPOConfig(output_dir=scratch, per_device_train_batch_size=a.rows, max_steps=a.steps, learning_rate=1e-4, max_grad_norm=1.0, use_cpu=a.device == "cpu",
                             report_to=[], save_strategy="no", logging_steps=1000, max_length=None, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
        words = AutoTokenizer.from_pretrained(a.model)
        DPOTrainer(model=loaded(a), args=settings, train_dataset=data, processing_class=words, peft_config=lora(a), callbacks=[Clock()]).train()
    seconds = statistics.median(end - start for start, end in times[1:])
    answers = sum(len(rows[0][f"{key}_input_ids"]) for key in ("chosen", "rejected"))
    return a.rows * answers / seconds, a.rows * (answers + 2 * len(rows[0]["prompt_input_ids"])) / seconds


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--make", help="directory of the model to make")
    p.add_argument("--shape", help="JSON file of a model's sizes")
    for name in ("model", "data", "job"):
        p.add_argument(f"--{name}")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    for name, default in {"rank": 0, "steps": 5, "rows": 4, "threads": 1, "seed": 1}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    a = p.parse_args()
    if a.make:
        return make(a)
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    rate, every = dpo(a) if a.job == "dpo" else plain(a)
    name = "TRL" if a.job == "dpo" else "PEFT" if a.rank else "transformers"
    peak = torch.cuda.max_memory_allocated() >> 20 if a.device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"name": name, "tokens_per_sec": rate, "all_tokens_per_sec": every, "peak_mem_mib": peak}))


if __name__ == "__main__":
    main()
