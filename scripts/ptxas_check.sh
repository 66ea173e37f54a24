#!/usr/bin/env bash
# Assembles every variant of every kernel for every supported architecture, and with older releases of ptxas, since each driver has its
# own, those for sm_90a, whose wgmmas it may serialize. Fails on a warning, a spill or a (C75xx) line, which ptxas reports as information
# although it means that ptxas serialized or repaired the kernel, unless ptx/src/kernels/ptxas.txt lists it; fails on a row of that table that
# no longer happens. PTXAS names the only ptxas to use; otherwise they come from PyPI. Prints SKIPPED if there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

check=ptxas_check
lost="no kernel was assembled"
. scripts/pypi.sh
# The first one assembles everything.
if [ -n "${PTXAS:-}" ]; then
    ptxas=("$PTXAS")
else
    ptxas=()
    for wheel in $nvcc nvidia-cuda-nvcc-cu12==12.{0.140,4.131,8.93}; do
        path=$(tool $wheel ptxas) || skip "PyPI cannot be reached, or python3 has no venv"
        ptxas+=("$path")
    done
fi
kernels

# assemble RELEASE PTXAS ARCH KERNEL: prints one line, with what ptxas did beyond assembling.
assemble() {
    local said did
    local found='C75[0-9]+|[1-9][0-9]* bytes spill stores|ptxas (warning|error|fatal|failed).*' name=${4##*/}
    said=$("$2" -v -arch="$3" "$4" -o /dev/null 2>&1) || said+=$'\nptxas failed'
    did=clean
    [[ ! $said =~ $found ]] || did=$(grep -oE "$found" <<< "$said" | sort -u | paste -sd ,)
    echo "$1 $3 ${name%.ptx} $did"
}
export -f assemble
table=ptx/src/kernels/ptxas.txt
lines=$target/ptxas_check.lines
for path in "${ptxas[@]}"; do
    release=$("$path" --version | grep -oE 'release [0-9.]+' | cut -d ' ' -f 2)
    for kernel in "$kernels"/*.ptx; do
        name=${kernel##*/} name=${name%.ptx}
        # Kernels for sm_90a assemble only for it.
        if grep -q '^\.target sm_90a' "$kernel"; then archs=sm_90a; else archs="sm_80 sm_90 sm_100"; fi
        for arch in $archs; do
            [ "$path" = "${ptxas[0]}" ] || [ "$arch" = sm_90a ] || grep -q "^$release $arch $name " $table || continue
            echo "$release" "$path" "$arch" "$kernel"
        done
    done
done | xargs -P "$(nproc)" -n 4 bash -c 'assemble "$@"' _ | sort > "$lines"
cut -d ' ' -f 1 "$lines" | uniq -c | while read -r count release; do echo "ptxas $release: $count kernels"; done

if ! diff <(awk 'NR == FNR { ran[$1]; next } $1 in ran' "$lines" $table | sort) <(grep -v ' clean$' "$lines"); then
    echo "ptxas_check: > is not in $table, < is and no longer happens"
    exit 1
fi
