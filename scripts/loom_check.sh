#!/usr/bin/env bash
# The memory orderings of src/comm/shm/words.rs in every order of events (loom/models.rs), then each of them weakened: a model that passes
# all the same does not see it, and fails this check. By hand, in loom/: RUSTFLAGS="--cfg loom" cargo test --release
set -euo pipefail
cd "$(dirname "$0")/.."

export RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(scripts/target.sh)/loom RUST_BACKTRACE=0
(cd loom && cargo test --release --quiet)

# A copy with one ordering less: the nth Release, Acquire or AcqRel becomes Relaxed, the nth fence goes.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/src/comm/shm"
cp -r loom "$copy/"
words=src/comm/shm/words.rs
missed=0
weaken() { # line number, what sed does with it
    sed "$1$2" "$words" > "$copy/$words"
    if (cd "$copy/loom" && timeout 300 cargo test --release --quiet > "$copy/said" 2>&1); then
        echo "$words:$1 weakened, and no model fails: $(sed -n "$1p" "$words")"
        missed=1
    elif ! grep -q 'error: test failed' "$copy/said"; then
        cat "$copy/said" # it does not compile, or it ran out of time
        missed=1
    fi
}
lines() { grep -nE "$1" "$words" | grep -v '//' | cut -d: -f1; }
count=0
for line in $(lines '\((.*, )?(Release|Acquire|AcqRel)\)'); do weaken "$line" 's/Release\|Acquire\|AcqRel/Relaxed/'; count=$((count + 1)); done
for line in $(lines 'fence\(SeqCst\)'); do weaken "$line" d; count=$((count + 1)); done
[ "$count" -gt 8 ] || { echo "only $count orderings were found in $words"; exit 1; }
[ $missed = 0 ] || exit 1
echo "loom: $count orderings, each needed"
