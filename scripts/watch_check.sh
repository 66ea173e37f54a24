#!/usr/bin/env bash
# Real runs, read back by TensorBoard and Weights & Biases themselves (scripts/watch_check.py). Both come from PyPI, once, into a
# virtual environment under cargo's target directory; W&B runs offline. RUN_FSDP names the binary where it is not to be built here.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(scripts/target.sh)
venv=${WATCH_VENV:-$target/watch-venv}
skip() {
    echo "watch_check: SKIPPED, $1: event files were not read by TensorBoard, nor W&B's by W&B"
    exit 0
}
if ! [ -x "$venv/bin/wandb" ]; then
    python3 -m venv "$venv" 2> /dev/null || skip "python3 has no venv"
    "$venv/bin/pip" install --quiet --retries 1 tensorboard==2.21.0 wandb==0.31.0 || skip "PyPI cannot be reached"
fi
if [ -z "${RUN_FSDP:-}" ]; then
    cargo build --quiet --release --bin run_fsdp
    RUN_FSDP=$target/release/run_fsdp
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$venv/bin/python" -B scripts/watch_check.py "$RUN_FSDP" "$scratch/runs"
