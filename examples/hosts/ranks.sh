#!/usr/bin/env bash
# Starts this host's ranks, without torchrun, MPI or Slurm. The four variables say where the host stands in the job:
#
#   NODE_RANK=0 NNODES=2 NPROC=8 MASTER_ADDR=node1 ranks.sh run_fsdp --dataset notes/     # on node1
#   NODE_RANK=1 NNODES=2 NPROC=8 MASTER_ADDR=node1 ranks.sh run_fsdp --dataset notes/     # on node2
#
# Signals go on to all ranks: they finish the step, save, and exit with status 128 + n, and so does this script. When a
# rank fails, the others notice and end too; the status is that of the first rank that failed.
set -u
: "${NODE_RANK:?}" "${NNODES:?}" "${NPROC:?}" "${MASTER_ADDR:?}"
export MASTER_ADDR WORLD_SIZE=$((NNODES * NPROC)) LOCAL_WORLD_SIZE=$NPROC

ranks=()
for signal in TERM INT HUP USR1; do
    # shellcheck disable=SC2064
    trap "kill -$signal \"\${ranks[@]}\" 2> /dev/null" $signal
done
for ((local = 0; local < NPROC; local++)); do
    RANK=$((NODE_RANK * NPROC + local)) LOCAL_RANK=$local "$@" < /dev/null &
    ranks+=($!)
done

status=0
for rank in "${ranks[@]}"; do
    # A signal interrupts `wait` while the rank still saves.
    while
        wait "$rank"
        code=$?
        [ $code -gt 128 ] && kill -0 "$rank" 2> /dev/null
    do :; done
    [ $status != 0 ] || status=$code
done
exit $status
