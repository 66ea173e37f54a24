#!/usr/bin/env bash
# Runs the tests of shared-memory groups, whose ranks are threads, under the thread sanitizer. It must instrument the standard library
# too, so it needs a nightly compiler with rust-src (rustup +nightly component add rust-src); prints SKIPPED without one.
set -euo pipefail
cd "$(dirname "$0")/.."

toolchain=${TSAN_TOOLCHAIN:-nightly}
if ! root=$(rustc "+$toolchain" --print sysroot 2> /dev/null); then
    echo "SKIPPED: no $toolchain compiler for the thread sanitizer"
    exit 0
fi
if [ ! -d "$root/lib/rustlib/src/rust/library" ]; then
    echo "SKIPPED: the $toolchain compiler has no rust-src for the thread sanitizer"
    exit 0
fi
host=$(rustc "+$toolchain" -vV | sed -n 's/^host: //p')
export RUSTFLAGS="-Zsanitizer=thread --cfg tsan" CARGO_TARGET_DIR=$(scripts/target.sh)/tsan TSAN_OPTIONS="halt_on_error=0 exitcode=66"
# Tests with processes and hosts are left out: the sanitizer sees only threads.
cargo "+$toolchain" test --release -Zbuild-std --target "$host" --test comm -- --test-threads 1 values:: stress:: faults:: memory:: mesh::
