#!/usr/bin/env bash
# Two hosts of eight ranks each under torchrun. Run it on both, with the name of one of them:
#
#   export FLATSHARD_JOB_SECRET=...      # the same on both: openssl rand -hex 32
#   torchrun.sh node1
#
# torchrun comes with PyTorch (pip install torch); nothing else of it is used. It restarts the ranks up to three times,
# and --resume auto continues from the last checkpoint.
set -euo pipefail
exec torchrun --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$1:29500" --rdzv-id "${JOB:-sft}" --no-python \
    run_fsdp --pretrain qwen --dataset chats.jsonl --apply-chat-template --precision bf16 \
    --sharding HYBRID_SHARD --ckpt-dir runs/sft --save-every 200 --resume auto
