#!/usr/bin/env bash
# Real runs, read back by TensorBoard and Weights & Biases (scripts/watch_check.py). Both are installed once from PyPI into a virtual
# environment under cargo's target directory; W&B runs offline. RUN_FSDP names the binary, which is built if it is not set.
set -euo pipefail
cd "$(dirname "$0")/.."

check=watch_check
lost="neither TensorBoard nor W&B files were checked"
. scripts/pypi.sh
venv=${WATCH_VENV:-$target/watch-venv}
environment "$venv" "jsonschema, tensorboard, wandb" tensorboard==2.21.0 wandb==0.31.0 jsonschema==4.26.0 || skip "PyPI cannot be reached"
[ -n "${RUN_FSDP:-}" ] || binaries
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$venv/bin/python" -B scripts/watch_check.py "$RUN_FSDP" "$scratch/runs"
