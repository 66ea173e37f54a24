#!/usr/bin/env bash
# Assembles every variant of every kernel for every supported architecture. Fails on an error, a spill, or a (C75xx) line, which ptxas
# reports as information although it means that ptxas serialized or repaired the kernel.
# ptxas comes from PTXAS, from PATH, or from the wheel below, installed under cargo's target directory. Prints SKIPPED if none of them is
# available.
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=nvidia-cuda-nvcc==13.0.88
target=$(scripts/target.sh)
venv=$target/ptxas
skip() {
    echo "ptxas_check: SKIPPED, $1: no kernel was assembled"
    exit 0
}
ptxas=${PTXAS:-$(command -v ptxas || true)}
if [ -z "$ptxas" ]; then
    if ! compgen -G "$venv/lib/python3*/site-packages/nvidia/cu13/bin/ptxas" > /dev/null; then
        python3 -m venv "$venv" || skip "python3 has no venv"
        "$venv/bin/pip" install --quiet --retries 1 --no-deps "$wheel" || skip "PyPI cannot be reached"
    fi
    ptxas=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13/bin/ptxas)
fi

dir=$target/kernels
rm -rf "$dir"
cargo build --quiet --release --workspace --bin expand_kernels # with --workspace, so that nothing is compiled again
"$target/release/expand_kernels" "$dir"
failed=0
for arch in sm_80 sm_90 sm_90a sm_100; do
    for kernel in "$dir"/*.ptx; do
        # Kernels for sm_90a assemble only for it; the others need not be assembled for it again.
        if grep -q '^\.target sm_90a' "$kernel"; then [ $arch = sm_90a ] || continue; else [ $arch != sm_90a ] || continue; fi
        if ! output=$("$ptxas" -v -warn-spills -Werror -arch=$arch "$kernel" -o /dev/null 2>&1) || grep -q '(C75' <<< "$output"; then
            failed=1
            echo "$arch $kernel: $output"
            continue
        fi
        registers=$(grep -o 'Used [0-9]* registers' <<< "$output" | grep -o '[0-9]*' | sort -n | tail -1)
        echo "$arch $(basename "$kernel" .ptx): $registers registers, no spills"
    done
done
exit $failed
