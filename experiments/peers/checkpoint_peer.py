"""The PyTorch side of the checkpoint comparison: FSDP2 on CPU ranks, saved and loaded with torch.distributed.checkpoint.

Needs: pip install torch transformers numpy safetensors
Run:   OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 experiments/peers/checkpoint_peer.py DIR
Saves weights and AdamW's state (resumable), writes the model as Hugging Face safetensors (each rank its part, then consolidated),
and reads both back. The last line is a JSON object: seconds of each phase, bytes, and the largest peak resident memory of any rank.
"""
import argparse
import json
import pathlib
import resource
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("dir", type=pathlib.Path)
    p.add_argument("--embed-dim", type=int, default=768)
    p.add_argument("--num-layers", type=int, default=6)
    p.add_argument("--num-heads", type=int, default=12)
    p.add_argument("--num-kv-heads", type=int, default=12)
    p.add_argument("--ff-hidden-dim", type=int, default=3072)
    p.add_argument("--vocab-size", type=int, default=32000)
    return p.parse_args()


def timed(work):
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def size(path):
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def main():
    a = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=a.embed_dim,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        intermediate_size=a.ff_hidden_dim,
        vocab_size=a.vocab_size,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    params = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for p in model.parameters():  # moments exist after the first step
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    resumable, parts = a.dir / "dcp", a.dir / "hf"
    weights, moments = get_state_dict(model, optimizer)
    seconds = {"save": timed(lambda: dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=resumable))}
    names = {name: 1 for name in weights}

    def export():
        writer = HuggingFaceStorageWriter(str(parts), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True)
        dcp.save(weights, storage_writer=writer)

    seconds["export"] = timed(export)

    def load():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=resumable)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    seconds["load"] = timed(load)

    def load_model():
        weights, _ = get_state_dict(model, optimizer)
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(parts)))
        set_model_state_dict(model, weights)

    seconds["load_model"] = timed(load_model)
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        name = f"torch {torch.__version__.split('+')[0]} distributed.checkpoint"
        bytes_ = {"checkpoint": size(resumable), "model": 4 * params}
        print(json.dumps({"name": name, "params": params, "world": world, "seconds": seconds, "bytes": bytes_, "peak_mem_mib": round(peak.item())}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
