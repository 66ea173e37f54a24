#!/usr/bin/env bash
# Checks the memory orderings of src/comm/shm/words.rs in every order of events (loom/models.rs), then weakens each of them: models that
# still pass do not cover it, which fails this check. By hand, in loom/: RUSTFLAGS="--cfg loom" cargo test --release
set -euo pipefail
cd "$(dirname "$0")/.."

export RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(scripts/target.sh)/loom RUST_BACKTRACE=0
(cd loom && cargo test --release --quiet)

# Works on a copy, in which one Release, Acquire or AcqRel becomes Relaxed, or one fence is removed.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/src/comm/shm"
cp -r loom "$copy/"
words=src/comm/shm/words.rs
missed=0
weaken() { # LINE SED-COMMAND
    sed "$1$2" "$words" > "$copy/$words"
    if (cd "$copy/loom" && timeout 300 cargo test --release --quiet > "$copy/log" 2>&1); then
        echo "$words:$1: no model fails with this ordering weakened: $(sed -n "$1p" "$words")"
        missed=1
    elif ! grep -q 'error: test failed' "$copy/log"; then
        cat "$copy/log" # it did not compile, or timed out
        missed=1
    fi
}
lines() { grep -nE "$1" "$words" | grep -v '//' | cut -d: -f1; }
count=0
for line in $(lines '\((.*, )?(Release|Acquire|AcqRel)\)'); do weaken "$line" 's/Release\|Acquire\|AcqRel/Relaxed/'; count=$((count + 1)); done
for line in $(lines 'fence\(SeqCst\)'); do weaken "$line" d; count=$((count + 1)); done
[ "$count" -gt 8 ] || { echo "found only $count orderings in $words"; exit 1; }
[ $missed = 0 ] || exit 1
echo "loom: all $count orderings are needed"
