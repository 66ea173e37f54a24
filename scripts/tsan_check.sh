#!/usr/bin/env bash
# The tests of groups in shared memory, whose ranks are threads, under the thread sanitizer. It has to see the standard library's own
# synchronization, so it takes a nightly compiler with its sources (rustup +nightly component add rust-src) and says so where there is none.
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
# Processes and other hosts share nothing that the sanitizer could see.
cargo "+$toolchain" test --release -Zbuild-std --target "$host" --test comm -- --test-threads 1 values:: stress:: faults:: memory:: mesh::
