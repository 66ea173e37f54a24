#!/usr/bin/env bash
# What ptxas makes of the inner loops of attention and of grouped products (scripts/sass_check.py), without loops that contain other loops,
# such as those over tiles: fails on a GPU-wide fence in one of them,
# and unless their instructions and spills are as in ptx/tests/sass.txt. Plants a fence without a scope, which must be found. ptxas and
# nvdisasm come from PyPI. Prints SKIPPED without them.
set -euo pipefail
cd "$(dirname "$0")/.."

check=sass_check
lost="no loop was disassembled"
. scripts/pypi.sh
ptxas=$(tool $nvcc ptxas) && nvdisasm=$(tool nvidia-cuda-nvdisasm==13.2.51 nvdisasm) || skip "PyPI cannot be reached, or python3 has no venv"
kernels

dir=$target/sass
rm -rf "$dir"
mkdir -p "$dir"
# bf16 alone: f16 differs in the types of instructions.
cp "$kernels"/attention_*{forward,backward,dq,dk,dv,dkv}_bf16_*.ptx "$kernels"/grouped_{tile,hopper}_*_bf16.ptx "$dir"
sed 's/fence\.proxy\.async\.shared::cta/fence.proxy.async/' "$dir/attention_hopper_backward_bf16_128.ptx" > "$dir/planted.ptx"
for kernel in "$dir"/*.ptx; do
    echo "$(grep -o '^\.target sm_[0-9a]*' "$kernel" | cut -d ' ' -f 2)" "$kernel" "${kernel%.ptx}.cubin"
done | xargs -P "$(nproc)" -n 3 bash -c '"$0" -arch="$1" "$2" -o "$3"' "$ptxas"

python3 -B scripts/sass_check.py "$nvdisasm" "$dir"/*.cubin > "$dir/found"
grep -q '^planted: MEMBAR.ALL.GPU in the inner loop' "$dir/found" || { echo "sass_check: the planted fence was not found"; exit 1; }
table=ptx/tests/sass.txt
if ! diff <(grep -v '^#' $table | sed -E 's/^(\S+ \S+ \S+) \S+$/\1/') <(grep -v '^planted' "$dir/found"); then
    echo "sass_check: < is in $table, > was found: name, instructions of an iteration, GPU-wide fences outside of the loop"
    exit 1
fi
echo "$(grep -vc '^#' $table) inner loops are as in $table"
