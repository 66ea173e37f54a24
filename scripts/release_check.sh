#!/usr/bin/env bash
# The programs that users run: README's first command with few steps, `experiments smoke`, and the same losses, gradient norms and
# checkpoints, bit for bit, from the build with debug assertions that the tests use. RUN_FSDP and EXPERIMENTS name the binaries where
# they are not to be built here.
set -euo pipefail
cd "$(dirname "$0")/.."

check=release_check
. scripts/pypi.sh
binaries
cargo test --quiet --workspace --no-run # as the gate's tests, which are built already
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# numbers FILE: losses and norms, in full precision.
numbers() {
    sed -n -E 's/^\{"event":"step","step":([0-9]+),"loss":([^,]*),.*"grad_norm":([^,]*),.*/\1 \2 \3/p' "$1"
}
# same NAME FLAG...: trains with both builds.
same() {
    local name=$1 build
    shift
    for build in "$RUN_FSDP" "$target/debug/run_fsdp"; do
        local out=$scratch/$name-$(basename "$(dirname "$build")")
        "$build" --max-steps 6 --warmup-steps 2 --log-every 1 --no-sample --metrics-path "$out.jsonl" --ckpt-dir "$out" --save-every 6 \
            "$@" > "$out.log" 2>&1 || { cat "$out.log"; echo "release_check: $build failed"; exit 1; }
        numbers "$out.jsonl" > "$out.numbers"
        [ "$(wc -l < "$out.numbers")" = 6 ] || { cat "$out.log"; echo "release_check: $build wrote no metrics"; exit 1; }
        rm -f "$out"/step-*/trainer_state.json # times
    done
    diff "$scratch/$name"-{release,debug}.numbers && diff -r "$scratch/$name"-{release,debug} ||
        { echo "release_check: $name: release (<) and the build for tests (>) train to other bits"; exit 1; }
}
small=(--embed-dim 64 --num-layers 2 --num-heads 4 --max-len 64 --batch-size 2 --no-eval)
same readme --no-eval
same bf16 "${small[@]}" --precision bf16 --grad-accum 2 --activation-checkpoint
same experts "${small[@]}" --num-experts 4 --ff-hidden-dim 64 --ep-size 2 --optimizer muon
same adapters "${small[@]}" --tp-size 2 --lora-rank 4
"$EXPERIMENTS" smoke
echo "release_check: both builds train to the same bits"
