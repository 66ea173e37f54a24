#!/usr/bin/env bash
# Trains on two test hosts of two ranks each, started by the real launchers, and requires every loss, gradient norm and checkpoint
# to be bitwise equal to those of one host with four ranks. Needs a release build of run_fsdp; installs nothing. scripts/hosts/lab.sh
# defines a test host. A part without its tool or permission is skipped with the reason. Ends with a table, and exit status 1 if a
# part failed.
#
#   scripts/hosts_check.sh [--binary FILE] [PART...]
#
# Parts: plain (ranks started by hand), torchrun, mpirun and srun use TCP between hosts; mpi-mpirun and mpi-srun use MPI (a build
# with --features mpi). het, requeue: the batch scripts of examples/hosts, the second one stopped by a signal and requeued. killed,
# cable: a rank of the other host or its network dies; the others must name it and exit. strangers: node2 opens silent and slow
# connections to every port of node1 while a job with a secret starts, trains and loses a rank. torchrun comes from TORCHRUN or PATH.
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
        plain | torchrun | mpirun | srun | het | requeue | mpi-mpirun | mpi-srun | killed | cable | strangers) parts+=("$1") ;;
        *) echo "unknown part or flag: $1 (--help lists them)" >&2; exit 2 ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=(plain torchrun mpirun srun het requeue mpi-mpirun mpi-srun killed cable strangers)
[ -n "$binary" ] || binary=$("$here/target.sh")/release/run_fsdp
[ -x "$binary" ] || { echo "no $binary: run cargo build --release, or pass --binary FILE" >&2; exit 2; }
binary=$(realpath "$binary")
torchrun=${TORCHRUN:-$(command -v torchrun || true)}

if [ -z "${LAB:-}" ]; then
    why=$(lab_missing)
    [ -z "$why" ] || { echo "hosts_check: SKIPPED, $why"; exit 0; }
    LAB=$(mktemp -d)
    export LAB
    # The lab ends with its first process, which `unshare` kills when it exits.
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
