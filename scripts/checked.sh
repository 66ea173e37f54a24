#!/usr/bin/env bash
# Unit tests and the tests of kernels, groups, stores, data and checkpoints with debug assertions and overflow checks in our own
# packages, and the launchers with such a binary; with --features mpi where there is an mpicc. The dependencies are those of the
# release build. Not the whole suite, and not the gate's main run: what users run is built without checks, and that is what the
# README's command is to test.
set -euo pipefail
cd "$(dirname "$0")/.."
checks=()
for package in flatshard flatshard-ptx flatshard-simcuda; do
    for check in debug-assertions overflow-checks; do
        checks+=(--config "profile.release.package.$package.$check=true")
    done
done
features=()
! command -v mpicc > /dev/null || features=(--features flatshard/mpi)
# All members, since what is selected decides the features of dependencies, and so whether those of the release build will do.
checked() {
    cargo test --release --quiet --no-fail-fast --workspace "${features[@]}" "${checks[@]}" "$@"
}
failed=0
checked --lib --test comm --test data || failed=1
checked --test device --test engine --test checkpoint -- conformance:: stores:: files:: || failed=1
scripts/hosts_check.sh || failed=1
exit $failed
