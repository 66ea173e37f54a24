#!/usr/bin/env bash
# For the edit loop: scripts/quick.sh [COMMIT]. Format, the rules about the sources, lints of the packages that differ from COMMIT (HEAD
# by default), and the tests of modules named like the changed files: after an edit in src/run/settings/stages.rs, its unit tests and
# tests/cli/stages.rs. Says how long each took. Not the gate, which is .ci/run.
set -euo pipefail
cd "$(dirname "$0")/.."

changed=$(git diff --name-only "${1:-HEAD}" && git ls-files --others --exclude-standard)
sources=$(grep -E '\.rs$' <<< "$changed" || true)
packages=() modules=()
while read -r file; do
    [ -n "$file" ] || continue
    case $file in
        src/base/*) package=flatshard-base ;;
        src/device/* | build.rs | tests/device/conformance/*) package=flatshard-device ;;
        ptx/driver/*) package=flatshard-simcuda ;;
        ptx/*) package=flatshard-ptx ;;
        tests/tidy/*) package=flatshard-tidy ;;
        *) package=flatshard ;;
    esac
    packages+=(--package "$package")
    module=$(basename "$file" .rs)
    case $module in mod | lib | main) module=$(basename "$(dirname "$file")") ;; esac
    modules+=("$module::")
done <<< "$sources"

step() {
    local began=$SECONDS
    "${@:2}"
    echo "quick: $1 $((SECONDS - began)) s"
}
step format cargo fmt --all --check
step tidy cargo test --quiet --package flatshard-tidy
[ ${#packages[@]} -gt 0 ] || { echo "quick: no Rust file differs from ${1:-HEAD}"; exit 0; }
step lints cargo clippy --quiet --all-targets "${packages[@]}" -- -D warnings
step "tests of ${modules[*]}" cargo test --workspace --quiet --no-fail-fast -- "${modules[@]}"
