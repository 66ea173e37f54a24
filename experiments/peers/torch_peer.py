"""The PyTorch side of a comparison: DDP, FSDP1 or FSDP2 training of the same LLaMA decoder on synthetic tokens.

Needs: pip install torch transformers numpy
Run:   OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 experiments/peers/torch_peer.py --impl fsdp2 --precision bf16
Prints one line per step and, last, one JSON object: tokens/s of the whole job (median step after the first two) and the
largest peak memory of any rank in MiB (resident; on GPUs, allocated). With --metrics-path also writes an event file that
`experiments analyze` reads: it trains on different tokens than flatshard, so losses differ, and communication is not
measured. Optimizer (AdamW, fused), clipping at 1.0 and the batch equation are flatshard's. Ranks on the CPU communicate with
gloo, on GPUs with NCCL.

Ablations have flatshard's flags: --activation-checkpoint, --backward-prefetch, --forward-prefetch, --limit-all-gathers,
--sharding. Their defaults are PyTorch's, which does not prefetch in forward. What an implementation lacks is refused.
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
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    switch = argparse.BooleanOptionalAction
    p.add_argument("--impl", choices=["ddp", "fsdp1", "fsdp2"], default="fsdp2")
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if PyTorch finds a GPU")
    p.add_argument("--embed-dim", type=int, default=768)
    p.add_argument("--num-layers", type=int, default=6)
    p.add_argument("--num-heads", type=int, default=12)
    p.add_argument("--num-kv-heads", type=int, default=12)
    p.add_argument("--ff-hidden-dim", type=int, default=3072)
    p.add_argument("--vocab-size", type=int, default=32000)
    p.add_argument("--max-len", type=int, default=256)
    p.add_argument("--batch-size", type=int, default=4, help="sequences per micro-batch and rank")
    p.add_argument("--grad-accum", type=int, default=1, help="micro-batches per step; gradients are reduced once")
    p.add_argument("--max-steps", type=int, default=8)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--metrics-path", help="write the run and its steps as flatshard does (JSON lines)")
    p.add_argument("--activation-checkpoint", action=switch, default=False, help="recompute each block in backward")
    p.add_argument("--sharding", choices=["FULL_SHARD", "SHARD_GRAD_OP"], help="FSDP: reshard after forward, or after backward [default: FULL_SHARD]")
    p.add_argument("--backward-prefetch", choices=["BACKWARD_PRE", "BACKWARD_POST", "NONE"], help="FSDP; FSDP2 has no BACKWARD_POST [default: BACKWARD_PRE]")
    p.add_argument("--forward-prefetch", action=switch, help="FSDP: unshard the next block before computing this one [default: off]")
    p.add_argument("--limit-all-gathers", action=switch, help="FSDP1 only: at most two unsharded blocks [default: on]")
    a = p.parse_args()
    lacks = {"ddp": ["sharding", "backward_prefetch", "forward_prefetch", "limit_all_gathers"], "fsdp2": ["limit_all_gathers"], "fsdp1": []}
    for name in lacks[a.impl]:
        if getattr(a, name) is not None:
            p.error(f"{a.impl} has no {name}")
    if a.impl == "fsdp2" and a.backward_prefetch == "BACKWARD_POST":
        p.error("fsdp2 has no BACKWARD_POST: it prefetches before a block's gradient, or never")
    return a


def join_launcher():
    """Rank and world size for torch.distributed, also from srun and mpirun."""
    for rank, world, local in [("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")]:
        if "RANK" not in os.environ and rank in os.environ:
            os.environ |= {"RANK": os.environ[rank], "WORLD_SIZE": os.environ[world], "LOCAL_RANK": os.environ[local]}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def wrap(model, a, device):
    """The model under the strategy, its parameters placed on this rank."""
    bf16 = a.precision == "bf16"
    layers = model.model.layers
    if a.activation_checkpoint:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

        for i in range(len(layers)):
            layers[i] = checkpoint_wrapper(layers[i])
    if a.impl == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if a.impl == "fsdp1":
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
        unit = CheckpointWrapper if a.activation_checkpoint else LlamaDecoderLayer
        prefetch = a.backward_prefetch or "BACKWARD_PRE"
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({unit}),
            mixed_precision=mixed,
            device_id=device,
            sharding_strategy=ShardingStrategy[a.sharding or "FULL_SHARD"],
            backward_prefetch=None if prefetch == "NONE" else BackwardPrefetch[prefetch],
            forward_prefetch=bool(a.forward_prefetch),
            limit_all_gathers=a.limit_all_gathers is not False,
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    reshard = False if a.sharding == "SHARD_GRAD_OP" else None  # None: its default, all blocks but the root
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if a.forward_prefetch:
        for layer, following in zip([model, *layers], layers):
            layer.set_modules_to_forward_prefetch([following])
    if a.backward_prefetch == "NONE":
        for layer in [model, *layers]:
            # An explicit list replaces the default; the module itself is already unsharded, so nothing is prefetched.
            layer.set_modules_to_backward_prefetch([layer])
    return model


def unsynced(model, a):
    """Context for micro-batches whose gradients are not reduced."""
    if a.impl != "fsdp2":
        return model.no_sync()
    model.set_requires_gradient_sync(False)
    return contextlib.nullcontext()


def write_metrics(path, engine, params, world, times, losses, tokens, peak):
    """Writes events in flatshard's format, with the fields known here."""
    events = [{"event": "run", "engine": engine, "params": params, "world_size": world}]
    for step, (seconds, loss) in enumerate(zip(times, losses), 1):
        timed = {"step_time_s": seconds, "tokens": tokens, "tokens_per_sec": tokens / seconds}
        events.append({"event": "step", "step": step, "loss": loss if math.isfinite(loss) else None, **timed, "peak_mem_bytes": peak})
    with open(path, "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in [*events, {"event": "end", "steps": len(times)}])


def main():
    a = arguments()
    join_launcher()
    gpu = torch.cuda.is_available() if a.device == "auto" else a.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
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
    model = LlamaForCausalLM(config).to(device)
    params = sum(p.numel() for p in model.parameters())
    if a.compile:
        for layer in model.model.layers:
            layer.compile()
    model = wrap(model, a, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    autocast = a.precision == "bf16" and a.impl == "ddp"
    context = torch.autocast(device.type, dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    generator = torch.Generator().manual_seed(rank)
    times, losses = [], []

    def micro_batch():
        tokens = torch.randint(0, a.vocab_size, (a.batch_size, a.max_len), generator=generator).to(device)
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss / a.grad_accum
        loss.backward()
        return loss.detach()

    for step in range(a.max_steps):
        start = time.perf_counter()
        loss = torch.zeros((), device=device)
        for last in range(1 - a.grad_accum, 1):
            with unsynced(model, a) if last else contextlib.nullcontext():
                if a.impl == "fsdp2" and not last:
                    model.set_requires_gradient_sync(True)
                loss += micro_batch()
        if a.impl == "fsdp1":
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if gpu:
            torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
        if rank == 0:
            print(f"step: {step + 1} loss: {losses[-1]:.4f} {times[-1]:.3f} s", flush=True)
    mib = torch.cuda.max_memory_allocated() / 2**20 if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    peak = torch.tensor([mib], device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        median = statistics.median(times[2:] or times)
        tokens = a.batch_size * a.max_len * a.grad_accum * world
        name = f"torch {torch.__version__.split('+')[0]} {a.impl}{' compiled' if a.compile else ''}"
        if a.metrics_path:
            write_metrics(a.metrics_path, name, params, world, times, losses, tokens, int(peak.item() * 2**20))
        result = {"name": name, "precision": a.precision, "params": params, "world": world}
        print(json.dumps(result | {"tokens_per_sec": round(tokens / median, 1), "peak_mem_mib": round(peak.item())}))
    dist.barrier()  # keep the rank with the store alive until all are done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
