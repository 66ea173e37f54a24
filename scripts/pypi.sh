# Sourced by checks whose tools come from PyPI. They set `check`, their name, and `lost`, what is not checked when they are skipped.
target=$(scripts/target.sh)

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
# Builds the binaries that RUN_FSDP and EXPERIMENTS do not name, as the gate builds them.
binaries() {
    if [ -z "${RUN_FSDP:-}" ] || [ -z "${EXPERIMENTS:-}" ]; then
        cargo build --quiet --release --workspace --bins
    fi
    RUN_FSDP=${RUN_FSDP:-$target/release/run_fsdp}
    EXPERIMENTS=${EXPERIMENTS:-$target/release/experiments}
}
