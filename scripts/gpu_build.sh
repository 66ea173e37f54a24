#!/usr/bin/env bash
# Builds what scripts/gpu_check.sh needs on a machine with a GPU and without a toolchain: stripped release binaries, packed as
# gpu_check.tar.gz in cargo's target directory (about 17 MiB, 118 MiB unpacked). Copy that file and scripts/ there.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(scripts/target.sh)
out=$target/gpu_check
mkdir -p "$out"
cargo build --release --bin run_fsdp --bin gpu_check
test_binary() {
    cargo test --release --no-run --test "$1" --message-format json |
        grep -o '"executable":"[^"]*/'"$1"'-[^"]*"' | tail -1 | cut -d'"' -f4
}
cp "$target/release/run_fsdp" "$target/release/gpu_check" "$out"
cp "$(test_binary device)" "$out/device"
strip "$out"/*
tar -czf "$out.tar.gz" -C "$target" gpu_check
du -h "$out.tar.gz"
