#!/usr/bin/env bash
# What the default build leaves out: lints of the features mpi and cust, and the fuzz targets, all by the stable compiler. Links
# nothing, so that neither CUDA nor libFuzzer is needed. Skips mpi, aloud, where there is no mpicc.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(scripts/target.sh)

features=flatshard/cust
if command -v mpicc > /dev/null; then
    features=flatshard/mpi,flatshard/cust
else
    echo "features_check: SKIPPED mpi: no mpicc (Debian: libopenmpi-dev libclang-dev)"
fi
# The build script of `cust` looks for a CUDA directory, and for nothing in it that a check would read.
cuda=$target/no_cuda # always the same, or it is compiled again
mkdir -p "$cuda/include" "$cuda/lib64/stubs"
touch "$cuda/include/cuda.h"
CUDA_LIBRARY_PATH=$cuda cargo clippy --quiet --release --workspace --features "$features" -- -D warnings

# fuzz/ has no lock file of its own: ours, to check what is tested. A library of that name is never linked.
[ -e fuzz/Cargo.lock ] || cp Cargo.lock fuzz/Cargo.lock
CUSTOM_LIBFUZZER_PATH=$target/libfuzzer.a CARGO_TARGET_DIR=$target cargo check --quiet --release --manifest-path fuzz/Cargo.toml
