#!/usr/bin/env bash
# Runs unit tests, the tests of kernels, collectives, stores, data and checkpoints, and the launchers with debug assertions and
# overflow checks in our own packages; with --features mpi if there is an mpicc. Dependencies are those of the release build. Not
# the whole suite: users run binaries without checks, and the README's test command tests those.
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
# All members, because the selection decides the features of dependencies, and with them whether the release build is reused.
checked() {
    cargo test --release --quiet --no-fail-fast --workspace "${features[@]}" "${checks[@]}" "$@"
}
failed=0
checked --lib --test comm --test data || failed=1
# The mock driver repeats on the emulator what the simulated device has done on it.
checked --test device --test engine --test checkpoint -- conformance:: stores:: files:: --skip the_real_driver || failed=1
scripts/hosts_check.sh || failed=1
exit $failed
