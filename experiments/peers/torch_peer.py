"""The PyTorch side of a comparison: DDP, FSDP1 or FSDP2 training of the same LLaMA decoder on synthetic tokens.

Needs: pip install torch transformers numpy
Run:   OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 experiments/peers/torch_peer.py --impl fsdp2 --precision bf16
Prints one line a step and, last, one JSON object: tokens/s of the whole job (median step after the first two) and the peak
resident memory of the largest rank in MiB. With --metrics-path also a file of events that `experiments analyze` reads: its losses
are of other tokens than flatshard's, and communication is not measured. Optimizer (AdamW, fused), clipping at 1.0 and the
batch equation are flatshard's.
"""
import argparse
import contextlib
import json
import math
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--impl", choices=["ddp", "fsdp1", "fsdp2"], default="fsdp2")
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--embed-dim", type=int, default=768)
    p.add_argument("--num-layers", type=int, default=6)
    p.add_argument("--num-heads", type=int, default=12)
    p.add_argument("--num-kv-heads", type=int, default=12)
    p.add_argument("--ff-hidden-dim", type=int, default=3072)
    p.add_argument("--vocab-size", type=int, default=32000)
    p.add_argument("--max-len", type=int, default=256)
    p.add_argument("--batch-size", type=int, default=4, help="sequences in a micro-batch of a rank")
    p.add_argument("--max-steps", type=int, default=8)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--metrics-path", help="write the run and its steps as flatshard does (JSON lines)")
    return p.parse_args()


def wrap(model, a):
    """The model under the strategy, its parameters placed on this rank."""
    bf16 = a.precision == "bf16"
    if a.impl == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if a.impl == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=mixed, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def write_metrics(path, engine, params, world, times, losses, tokens, peak):
    """Events as flatshard writes them, of what is known here."""
    events = [{"event": "run", "engine": engine, "params": params, "world_size": world}]
    for step, (seconds, loss) in enumerate(zip(times, losses), 1):
        timed = {"step_time_s": seconds, "tokens": tokens, "tokens_per_sec": tokens / seconds}
        events.append({"event": "step", "step": step, "loss": loss if math.isfinite(loss) else None, **timed, "peak_mem_bytes": peak})
    with open(path, "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in [*events, {"event": "end", "steps": len(times)}])


def main():
    a = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=a.embed_dim,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        intermediate_size=a.ff_hidden_dim,
        vocab_size=a.vocab_size,
        max_position_embeddings=a.max_len,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    params = sum(p.numel() for p in model.parameters())
    if a.compile:
        for layer in model.model.layers:
            layer.compile()
    model = wrap(model, a)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    autocast = a.precision == "bf16" and a.impl == "ddp"
    context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    generator = torch.Generator().manual_seed(rank)
    times, losses = [], []
    for step in range(a.max_steps):
        start = time.perf_counter()
        tokens = torch.randint(0, a.vocab_size, (a.batch_size, a.max_len), generator=generator)
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if a.impl == "fsdp1":
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
        if rank == 0:
            print(step + 1, f"loss {loss.item():.4f}", f"{times[-1]:.3f} s", flush=True)
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        median = statistics.median(times[2:] or times)
        tokens = a.batch_size * a.max_len * world
        name = f"torch {torch.__version__.split('+')[0]} {a.impl}{' compiled' if a.compile else ''}"
        if a.metrics_path:
            write_metrics(a.metrics_path, name, params, world, times, losses, tokens, int(peak.item() * 2**20))
        result = {"name": name, "precision": a.precision, "params": params, "world": world}
        print(json.dumps(result | {"tokens_per_sec": round(tokens / median, 1), "peak_mem_mib": round(peak.item())}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
