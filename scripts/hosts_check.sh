#!/usr/bin/env bash
# Trains on two test hosts of two ranks each, started by the real launchers, and holds every loss, gradient norm and checkpoint to
# those of one host with four ranks, bit for bit. Needs a release build of run_fsdp; installs nothing; scripts/hosts/lab.sh says
# what a test host is. A part whose tool or right is missing is skipped, and says what is missing. Ends with a table, and with
# status 1 if a part failed.
#
#   scripts/hosts_check.sh [--binary FILE] [PART...]
#
# Parts: plain (ranks started by hand), torchrun, mpirun, srun, which talk TCP between hosts; mpi-mpirun, mpi-srun, which talk MPI
# (a build with --features mpi); killed, cable: a rank of the other host dies, or its network does, and the others say so and end;
# strangers: node2 opens silent and slow connections to every port of node1 while a job with a secret starts, trains and loses a rank.
# torchrun is taken from TORCHRUN or PATH.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/hosts/lab.sh"
source "$here/hosts/slurm.sh"
source "$here/hosts/parts.sh"

binary=
parts=()
while [ $# -gt 0 ]; do
    case $1 in
        --binary) binary=$2; shift ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
        plain | torchrun | mpirun | srun | mpi-mpirun | mpi-srun | killed | cable | strangers) parts+=("$1") ;;
        *) echo "unknown part or flag: $1 (--help lists them)" >&2; exit 2 ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=(plain torchrun mpirun srun mpi-mpirun mpi-srun killed cable strangers)
[ -n "$binary" ] || binary=$("$here/target.sh")/release/run_fsdp
[ -x "$binary" ] || { echo "no $binary: cargo build --release, or --binary FILE" >&2; exit 2; }
binary=$(realpath "$binary")
torchrun=${TORCHRUN:-$(command -v torchrun || true)}

if [ -z "${LAB:-}" ]; then
    why=$(lab_missing)
    [ -z "$why" ] || { echo "hosts_check: SKIPPED, $why"; exit 0; }
    LAB=$(mktemp -d)
    export LAB
    # The lab ends with its first process, which `unshare` kills when it ends itself.
    trap '[ -z "${child:-}" ] || kill -9 "$child" 2> /dev/null || true; rmdir "$LAB"' EXIT
    trap 'exit 130' INT TERM HUP
    lab_run "$here/hosts_check.sh" --binary "$binary" "${parts[@]}" &
    child=$!
    status=0
    wait "$child" || status=$?
    child=
    exit $status
fi

lab_start
cd "$LAB"
reference
failed=0
for part in "${parts[@]}"; do
    run_part "$part"
done
printf '\n%-12s %-8s %s\n' part result note
printf '%s\n' "${table[@]}"
exit $failed
