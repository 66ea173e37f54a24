#!/usr/bin/env bash
# Goldens and parity of the strategies on every CPU kernel and vector width that this machine has and does not choose by itself
# (FLATSHARD_TEST_CPU, tests/common/cpu.rs). Conformance of each operation on all of them is in the test command already.
set -euo pipefail
cd "$(dirname "$0")/.."

has() { grep -qw "$1" /proc/cpuinfo; }
kernels=(plain baseline)
has avx2 && kernels+=(avx2)
has avx512_bf16 && kernels+=(avx512-f32)
has amx_bf16 && has avx512_bf16 && kernels+=(avx512-bf16)
for kernel in "${kernels[@]}"; do
    echo "kernels_check: $kernel"
    FLATSHARD_TEST_CPU=$kernel cargo test --quiet --workspace --test engine -- golden:: families:: parity::
done
