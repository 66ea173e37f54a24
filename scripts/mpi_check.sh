#!/usr/bin/env bash
# The feature mpi: unit tests of its files, and two test hosts whose ranks talk MPI, with debug assertions. Prints SKIPPED without mpicc.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v mpicc > /dev/null || { echo "mpi_check: SKIPPED, no mpicc (Debian: libopenmpi-dev libclang-dev)"; exit 0; }
cargo test --quiet --features mpi --lib comm::
cargo build --quiet --features mpi --bin run_fsdp
scripts/hosts_check.sh --binary "$(scripts/target.sh)/debug/run_fsdp" mpi-mpirun mpi-srun
