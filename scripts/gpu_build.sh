#!/usr/bin/env bash
# Builds what scripts/gpu_check.sh needs on a machine with a GPU and without a toolchain: stripped release binaries, packed as
# gpu_check.tar.gz in cargo's target directory (about 17 MiB, 118 MiB unpacked). Copy that file and scripts/ there.
# BEFORE=COMMIT also packs gpu_check as of that commit, whose attention is measured next to today's. The whole commit is built, because
# kernels and the code that expands and launches them change together; it must already have `gpu_check bench attention` (8906f59).
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(scripts/target.sh)
out=$target/gpu_check
mkdir -p "$out"
cargo build --release --bin run_fsdp --bin gpu_check
conformance=$(cargo test --release --package flatshard-device --no-run --test conformance --message-format json |
    grep -o '"executable":"[^"]*/conformance-[^"]*"' | tail -1 | cut -d'"' -f4)
cp "$target/release/run_fsdp" "$target/release/gpu_check" "$out"
cp "$conformance" "$out/conformance"
rm -f "$out/gpu_check_before"
if [ -n "${BEFORE:-}" ]; then
    tree=$(mktemp -d)
    trap 'git worktree remove --force "$tree"' EXIT
    git worktree add --detach "$tree" "$BEFORE"
    (cd "$tree" && CARGO_TARGET_DIR="$target/before" cargo build --release --bin gpu_check)
    cp "$target/before/release/gpu_check" "$out/gpu_check_before"
fi
strip "$out"/*
tar -czf "$out.tar.gz" -C "$target" gpu_check
du -h "$out.tar.gz"
