#!/usr/bin/env bash
# All checks and measurements that need a GPU, without network and without a toolchain, after scripts/gpu_build.sh on a machine with cargo:
#
#   scripts/gpu_check.sh [a | b | c] [OUT]
#
# For a borrowed machine they come in three calls of at most SECONDS_IN_ALL (540): (a) what must be known first: kernels, layouts,
# attention, parity in bf16, one 1B step eager and captured, rates of attention (also with those of the commit BEFORE, see gpu_build.sh);
# (b) benchmarks, and the same in PyTorch; (c) conformance without the emulators and the CPU, the other parities, several ranks, then
# compute-sanitizer. Without a letter all of them, in 1,620 seconds.
#
# OUT gets gpu_check.json, rewritten after each part, so that a run that is cut off leaves what it has, and gpu_check_logs.tar.gz, nothing
# else. Each part has a time limit, and later ones are skipped when the time of the whole is used up. The driver compiles all kernels
# once, in part `kernels`, into CUDA_CACHE_PATH, which may be carried from one machine to the next.
#
# Each part passes, fails, or is skipped with a reason; ends with a short table. Exit status 1 if a part failed, 3 if there is no
# usable GPU. QUICK=1 skips the benchmarks; PARTS="machine nccl" runs only those parts; SMALL="FLAGS" sets the model of the parity
# parts and ONE_BILLION="FLAGS" that of the 1B step; PATIENCE=N allows N times as long. With the emulated driver (ptx/driver) it is a
# rehearsal, and says so.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
target=$(cd "$root" && realpath -m "${CARGO_TARGET_DIR:-target}") # without cargo, which may not be installed
build=${BUILD:-$target/gpu_check}
[ ! -e "$build.tar.gz" ] || tar -xzf "$build.tar.gz" -C "$(dirname "$build")" || exit 2
calls=abc
case ${1:-} in a | b | c) calls=$1 && shift ;; esac
out=$(realpath -m "${1:-$target/gpu_check_out}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"
rm -f "$out"/gpu_check*
cd "$scratch"
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$build/cuda_cache} CUDA_CACHE_MAXSIZE=$((1 << 30))

# CUDA's libraries are in the usual places, or come with PyTorch; never its stubs, which only link.
libraries=$(python3 - 2> /dev/null << 'PY' || true
import glob, os, site, sysconfig
roots = {sysconfig.get_paths()["purelib"], *site.getsitepackages()}
found = [os.path.dirname(f) for r in roots for n in ("libcublasLt.so.*", "libnccl.so.*") for f in glob.glob(f"{r}/nvidia/**/{n}", recursive=True)]
print(":".join(sorted(set(found))))
PY
)
for dir in /usr/local/cuda*/lib64 /usr/local/cuda*/targets/x86_64-linux/lib; do [ ! -d "$dir" ] || libraries+=:$dir; done
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries"

patience=${PATIENCE:-1}
deadline=$((SECONDS + patience * ${SECONDS_IN_ALL:-$((540 * ${#calls}))}))
# Whether the parts of this call run.
call() {
    [[ $calls == *$1* ]]
}

# One JSON document with every part so far and its output, even of a part that was cut off, if it printed all of it.
document() {
    local comma= simulated=false name status seconds note body
    ! grep -qs 'Simulated GPU' machine.json || simulated=true
    {
        echo "{\"simulated\": $simulated, \"parts\": ["
        while IFS='|' read -r name status seconds note; do
            body=null
            if [ "$status" != skipped ] && [ "$name" != conformance ] && [ "$(tail -c 2 "$name.json" 2> /dev/null)" = '}' ]; then
                body=$(cat "$name.json")
            fi
            echo "$comma{\"part\": \"$name\", \"status\": \"$status\", \"seconds\": ${seconds% s}, \"note\": \"$note\", \"result\": $body}"
            comma=,
        done < parts
        echo ']}'
    } > "$out/gpu_check.json.new" && mv "$out/gpu_check.json.new" "$out/gpu_check.json"
    tar -czf "$out/gpu_check_logs.tar.gz" --exclude=./cache . 2> /dev/null
}
wanted() {
    [[ -z ${PARTS:-} || " machine $PARTS " == *" $1 "* ]]
}
# part NAME SECONDS COMMAND...: standard output to NAME.json, standard error to NAME.log.
part() {
    local name=$1 limit=$((patience * $2)) status note started=$SECONDS left=$((deadline - SECONDS))
    wanted "$name" || return 0
    shift 2
    if [ "$left" -lt 5 ]; then
        skip "$name" "the time of the whole check is used up"
        return 0
    fi
    [ "$limit" -le "$left" ] || limit=$left
    timeout -k 5 "$limit" "$@" > "$name.json" 2> "$name.log"
    status=$?
    # The last line; test binaries report failures on standard output.
    note=$({ cat "$name.log"; grep -E "panicked|^test .* FAILED|: largest error|: mean error" "$name.json"; } 2> /dev/null |
        grep -v '^ *$' | tail -n 1 | tr '|"\\' '/  ' | cut -c1-160)
    case $status in
        0) echo "$name|passed|$((SECONDS - started)) s|" ;;
        3) echo "$name|skipped|$((SECONDS - started)) s|$note" ;;
        124 | 137) echo "$name|FAILED|$((SECONDS - started)) s|took longer than $limit s: $note" ;;
        *) echo "$name|FAILED|$((SECONDS - started)) s|$note" ;;
    esac >> parts
    tail -n 1 parts
    document
    return $status
}
skip() {
    wanted "$1" || return 0
    echo "$1|skipped|0 s|$2" | tee -a parts
    document
}

train() { # FILE.jsonl FLAGS...
    local metrics=$1
    shift
    rm -f "$metrics"
    FLATSHARD_CACHE_DIR=$PWD/cache "$build/run_fsdp" --dataset synthetic --no-eval --no-sample --metrics-path "$metrics" "$@" 1>&2
}
small="${SMALL:---embed-dim 256 --num-layers 2 --num-heads 4 --num-kv-heads 2 --ff-hidden-dim 512 --vocab-size 512 --max-len 128 --batch-size 2 --max-steps 6 --warmup-steps 2}"
parity() { # NAME TOLERANCE CPU-FLAGS -- CUDA-FLAGS
    local name=$1 tolerance=$2 cpu=()
    shift 2
    while [ "$1" != -- ]; do cpu+=("$1"); shift; done
    shift
    # shellcheck disable=SC2086
    train "$name-cpu.jsonl" --device cpu $small "${cpu[@]}" &&
        train "$name-cuda.jsonl" --device cuda $small "$@" &&
        "$build/gpu_check" parity "$name-cpu.jsonl" "$name-cuda.jsonl" "$tolerance"
}
compiled() { # NAME TOLERANCE FLAGS...: compares losses and norms with and without CUDA graphs
    local name=$1 tolerance=$2
    shift 2
    # shellcheck disable=SC2086
    train "$name-single.jsonl" --device cuda $small "$@" &&
        train "$name-graphs.jsonl" --device cuda $small "$@" --compile &&
        "$build/gpu_check" parity "$name-single.jsonl" "$name-graphs.jsonl" "$tolerance"
}
two_ranks() { # COMMAND...: two processes on one GPU, which NCCL treats as two hosts; with APART=1 on two GPUs
    local pids=() status=0 rank shared
    for rank in 0 1; do
        shared="NCCL_HOSTID=flatshard$rank NCCL_SOCKET_IFNAME==lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
            NCCL_NVLS_ENABLE=0"
        [ -z "${APART:-}" ] || shared=CUDA_VISIBLE_DEVICES=$rank
        # shellcheck disable=SC2086
        env RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29417 \
            $shared NCCL_DEBUG="${NCCL_DEBUG:-WARN}" NCCL_DEBUG_FILE=/dev/stderr "$@" > "rank$rank.json" 2> "rank$rank.log" &
        pids+=($!)
    done
    for rank in 0 1; do
        wait "${pids[$rank]}" || status=$?
    done
    cat rank0.json
    cat rank0.log rank1.log >&2
    return $status
}
sanitized() { # TOOL WORDS
    # shellcheck disable=SC2086
    compute-sanitizer --tool "$1" --error-exitcode 9 "$build/gpu_check" $2 > "sanitizer-$1.log" 2>&1
    local status=$?
    tail -n 3 "sanitizer-$1.log" >&2
    # Some machines do not allow the tool, which is not a kernel's fault.
    if grep -qE 'not supported|Unable to|initialization error' "sanitizer-$1.log" && ! grep -q 'ERROR SUMMARY: [1-9]' "sanitizer-$1.log"; then
        echo "compute-sanitizer does not work on this machine" >&2
        return 3
    fi
    grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "sanitizer-$1.log" | head -1 >&2
    return $status
}
export -f train parity compiled two_ranks sanitized
export build small

conformance() { # the device that a CUDA driver shows, in one process for each kind: a GPU that has failed refuses the rest
    local kinds="attention conv delta epilogue expand experts fp8 grad_norm grouped layers loss norms optim paged ring scored sinks xielu"
    # shellcheck disable=SC2086
    printf '%s\n' $kinds | FLATSHARD_TEST_ONLY_CUDA=1 FLATSHARD_TEST_DEEP=1 xargs -P 5 -I{} bash -c '
        "$build/conformance" "{}::" --test-threads 3 > "conformance-{}.log" 2>&1'
    local status=$?
    cat conformance-*.log
    return $status
}
export -f conformance

if ! part machine 60 "$build/gpu_check" machine; then
    cat machine.log
    exit 3
fi
if call a; then
    part kernels 300 "$build/gpu_check" kernels
    part layouts 60 "$build/gpu_check" layouts
    part attention 120 "$build/gpu_check" attention
    part parity_bf16 100 bash -c 'parity parity_bf16 3e-2 --nproc-per-node 1 --precision bf16 -- --nproc-per-node 1 --precision bf16'
    if [ -z "${QUICK:-}" ]; then
        one_billion="${ONE_BILLION:---embed-dim 2048 --num-layers 16 --num-heads 16 --ff-hidden-dim 5632 --vocab-size 32000 --max-len 2048 --batch-size 8 --max-steps 16 --warmup-steps 2 --nproc-per-node 1 --precision bf16}"
        export one_billion
        part step_1b 150 bash -c 'train step_1b.jsonl --device cuda $one_billion && "$build/gpu_check" rate step_1b.jsonl'
        part step_1b_compile 150 bash -c 'train step_1b_compile.jsonl --device cuda $one_billion --compile && "$build/gpu_check" rate step_1b_compile.jsonl'
        # In turn, so that a warm GPU favors neither.
        part rates 90 "$build/gpu_check" bench attention
        if [ -e "$build/gpu_check_before" ]; then
            part rates_before 90 "$build/gpu_check_before" bench attention
            part rates_again 90 "$build/gpu_check" bench attention
        else
            skip rates_before "no earlier build to compare with: BEFORE=COMMIT scripts/gpu_build.sh packs one"
        fi
    fi
fi
if call b && [ -z "${QUICK:-}" ]; then
    part bench 240 "$build/gpu_check" bench
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null; then
        part peer 300 python3 "$root/scripts/gpu_peer.py"
    else
        skip peer "no python3 with PyTorch and a GPU"
    fi
fi
if call c; then
    part conformance 300 bash -c conformance
    part parity_fp32 100 bash -c 'parity parity_fp32 2e-4 --nproc-per-node 1 -- --nproc-per-node 1'
    part parity_gpt 100 bash -c 'parity parity_gpt 2e-4 --arch gpt --num-kv-heads 4 --nproc-per-node 1 -- --arch gpt --num-kv-heads 4 --nproc-per-node 1'
    # Every model of tests/golden, and every job of one. FAMILIES="FLAGS" names fewer.
    # shellcheck disable=SC2086
    [ -n "${QUICK:-}" ] || part families 150 python3 "$root/scripts/gpu_families.py" --bin "$build/run_fsdp" ${FAMILIES:-}
    # The same kernels on the same operands must give the same bits, including dropout masks and accumulated gradients.
    part parity_compile 100 bash -c 'compiled parity_compile 0 --nproc-per-node 1 --precision bf16 --dropout 0.1 --grad-accum 2 --no-tune'
    # Two processes on one GPU, without NCCL: bits of the shared-memory group. gb_per_s of this part and of `nccl` say which is faster
    # where both run; with one GPU, NCCL is on sockets, so only several GPUs compare them.
    part ipc 120 bash -c "two_ranks $build/gpu_check ranks ipc"
    part nccl 120 bash -c "two_ranks $build/gpu_check ranks"
    # On two GPUs, all-gather and reduce-scatter with and without symmetric windows (`gb_per_s`). Needs NCCL 2.27.
    if [ "$(nvidia-smi -L 2> /dev/null | wc -l)" -gt 1 ]; then
        part nccl_apart 120 bash -c "APART=1 two_ranks $build/gpu_check ranks"
        part nccl_windows 120 bash -c "APART=1 two_ranks $build/gpu_check ranks windows"
    fi
    part parity_two_ranks 150 bash -c 'parity parity_two_ranks 2e-4 --nproc-per-node 2 -- --nproc-per-node 2 --ranks-per-gpu 2 --comm-timeout 60'
    part parity_compile_ranks 150 bash -c 'compiled parity_compile_ranks 1e-6 --nproc-per-node 2 --ranks-per-gpu 2 --comm-timeout 60 --dropout 0.1 --no-tune'
    if command -v compute-sanitizer > /dev/null; then
        part memcheck 150 bash -c 'sanitized memcheck attention'
        # From the kernels for sm_80 on: the tool does not follow an mbarrier at which one lane arrives for its warp
        # (scripts/racecheck_control.cu).
        part racecheck 150 bash -c 'sanitized racecheck "attention 15"'
    else
        skip memcheck "compute-sanitizer is not installed"
        skip racecheck "compute-sanitizer is not installed"
    fi
fi

echo
"$build/gpu_check" table . 2> /dev/null
echo
column -t -s '|' parts 2> /dev/null || cat parts
! grep -qs 'Simulated GPU' machine.json ||
    echo "SIMULATED: a rehearsal with the emulated driver. Nothing here was computed or measured by a GPU."
! grep -q '|FAILED|' parts
