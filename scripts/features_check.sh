#!/usr/bin/env bash
# Checks what the default build does not compile: the features png, mpi and cust, no feature at all (with clippy) and the fuzz targets, with the stable
# compiler. Links nothing, so neither CUDA nor libFuzzer is needed. Prints SKIPPED for mpi if there is no mpicc.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(scripts/target.sh)

features=flatshard/png,flatshard/cust
if command -v mpicc > /dev/null; then
    features=flatshard/png,flatshard/mpi,flatshard/cust
else
    echo "features_check: SKIPPED mpi: no mpicc (Debian: libopenmpi-dev libclang-dev)"
fi
# The build script of `cust` requires a CUDA directory, but a check reads nothing in it.
cuda=$target/no_cuda # a fixed path, so that it is not compiled again
mkdir -p "$cuda/include" "$cuda/lib64/stubs"
touch "$cuda/include/cuda.h"
CUDA_LIBRARY_PATH=$cuda cargo clippy --quiet --workspace --features "$features" -- -D warnings

# A library that depends on flatshard may leave the default features out.
cargo clippy --quiet --no-default-features --lib --bins -- -D warnings

# fuzz/ has no lock file: use ours, to check the tested versions. The library is never linked.
[ -e fuzz/Cargo.lock ] || cp Cargo.lock fuzz/Cargo.lock
CUSTOM_LIBFUZZER_PATH=$target/libfuzzer.a CARGO_TARGET_DIR=$target cargo check --quiet --manifest-path fuzz/Cargo.toml
