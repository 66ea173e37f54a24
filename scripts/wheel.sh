#!/usr/bin/env bash
# Builds the Python wheel and tries it: scripts/wheel.sh [--zig]
#
# Leaves in wheel/ of cargo's target directory: the wheel, bin/ with its stripped binaries, and debug/ with their debug information,
# which gdb finds where it lies next to them. Then installs the wheel into a clean virtual environment and trains there, as on a machine
# that has neither cargo nor its registry.
#
# The wheel runs with the glibc of this machine or a newer one; with --zig, which needs a build of its own, from glibc 2.17 on
# (manylinux2014). maturin and zig come from PyPI. Skips, aloud, where that cannot be reached.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(scripts/target.sh)
out=$target/wheel
tools=$target/wheel-tools
packages=(maturin==1.16.0 wheel==0.46.3)
flags=(--release --locked --features png --compression-method stored --out "$out/unstripped")
if [ "${1:-}" = --zig ]; then
    packages+=(ziglang==0.15.2)
    flags+=(--zig --compatibility manylinux2014)
fi
skip() {
    echo "wheel: SKIPPED, $1: no wheel was built"
    exit 0
}
python3 -m venv "$tools" 2> /dev/null || skip "python3 has no venv"
"$tools/bin/pip" install --quiet --retries 1 "${packages[@]}" || skip "PyPI cannot be reached"
PATH=$tools/bin:$PATH

rm -rf "$out"
mkdir -p "$out/bin" "$out/debug"
maturin build --quiet "${flags[@]}"
wheel unpack --dest "$out/unpacked" "$out"/unstripped/*.whl > /dev/null
for binary in "$out"/unpacked/*/*.data/scripts/*; do
    debug=$out/debug/$(basename "$binary").debug
    objcopy --only-keep-debug "$binary" "$debug"
    objcopy --strip-all --add-gnu-debuglink="$debug" "$binary"
    cp "$binary" "$out/bin"
done
wheel pack --dest-dir "$out" "$out"/unpacked/* > /dev/null
rm -r "$out/unstripped" "$out/unpacked"

wheel=$(echo "$out"/*.whl)
size=$(stat -c %s "$wheel")
echo "wheel: $(basename "$wheel"), $((size / 1000000)) MB: $(cd "$out/bin" && echo *)"
[ "$size" -lt 72000000 ] || { echo "wheel: larger than 72 MB"; exit 1; } # gpu_check, and four programs with the library; PyPI takes 100 MB

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --no-index "$wheel"
mkdir "$scratch/home"
cd "$scratch/home"
installed() {
    env -i HOME="$scratch/home" PATH="$scratch/venv/bin:/usr/bin:/bin" "$@"
}
installed run_fsdp --max-steps 5 --metrics-path run.jsonl
grep -q '"data":"flatshard' run.jsonl || { echo "wheel: not trained on the text in the program"; exit 1; }
grep -q '"event":"end","steps":5' run.jsonl || { echo "wheel: the run did not end after 5 steps"; exit 1; }
installed experiments compare run.jsonl run.jsonl --plot losses.png > /dev/null
python3 -c '
picture = open("losses.png", "rb").read()
assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.endswith(b"IEND\xaeB`\x82"), picture[:16]
assert int.from_bytes(picture[16:20], "big") == 2 * 960, "not twice the size of the SVG"'
installed experiments smoke
echo "wheel: installed from $(basename "$wheel"), it trains, draws a PNG, and experiments smoke passes"
