# Sourced by checks whose tools come from PyPI. They set `check`, their name, and `lost`, what is not checked when they are skipped.
target=$(scripts/target.sh)
# The ptxas that the checks of kernels use.
nvcc=nvidia-cuda-nvcc==13.0.88

skip() {
    echo "$check: SKIPPED, $1: $lost"
    exit 0
}
# environment DIR MODULES PACKAGE...: a virtual environment that can import these modules, installed if it is missing. False without PyPI.
environment() {
    "$1/bin/python" -c "import $2" 2> /dev/null && return
    python3 -m venv "$1" 2> /dev/null || skip "python3 has no venv"
    "$1/bin/pip" install --quiet --retries 1 "${@:3}"
}
# tool PACKAGE==VERSION PROGRAM: prints the path of a wheel's program, downloaded if it is missing. False without PyPI or venv.
tool() {
    local path=$target/tools/$1/$2 scratch=$target/tools/scratch.$$
    if [ ! -x "$path" ]; then
        mkdir -p "$(dirname "$path")"
        python3 -m venv "$scratch" > /dev/null && "$scratch/bin/pip" install --quiet --retries 1 --no-deps --target "$scratch/wheel" "$1" &&
            mv "$(find "$scratch/wheel" -type f -name "$2")" "$path" || { rm -rf "$scratch"; return 1; }
        rm -rf "$scratch"
    fi
    echo "$path"
}
# kernels: writes every kernel variant as plain PTX into a new directory `kernels` under cargo's target directory.
kernels() {
    kernels=$target/kernels
    rm -rf "$kernels"
    cargo build --quiet --release --workspace --bin expand_kernels # with --workspace, so that nothing is compiled again
    "$target/release/expand_kernels" "$kernels"
}
# Builds the binaries that RUN_FSDP and EXPERIMENTS do not name, as the gate builds them.
binaries() {
    if [ -z "${RUN_FSDP:-}" ] || [ -z "${EXPERIMENTS:-}" ]; then
        cargo build --quiet --release --workspace --bins
    fi
    RUN_FSDP=${RUN_FSDP:-$target/release/run_fsdp}
    EXPERIMENTS=${EXPERIMENTS:-$target/release/experiments}
}
