#!/usr/bin/env bash
# Two or more hosts over plain ssh. Run it on any of them, in a directory that all of them share:
#
#   ssh.sh HOSTS NPROC COMMAND...      ssh.sh hosts.txt 8 run_fsdp --dataset notes/
#
# HOSTS has the name of one host per line, rank 0's first; NPROC is the number of ranks on each. Needs ssh without a
# password, and ranks.sh next to this file. Ctrl-C ends the sessions, which sends the ranks SIGHUP: they save and exit.
set -euo pipefail
ranks=$(realpath "$(dirname "$0")")/ranks.sh
mapfile -t hosts < <(grep . "$1")
nproc=$2
shift 2

# The secret that the ranks prove to each other. It never appears on a command line.
secret=$PWD/.job-secret.$$
trap 'rm -f "$secret"' EXIT
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$secret")

sessions=()
for n in "${!hosts[@]}"; do
    printf -v command '%q ' env NODE_RANK="$n" NNODES=${#hosts[@]} NPROC="$nproc" MASTER_ADDR="${hosts[0]}" \
        bash "$ranks" "$@" --job-secret-file "$secret"
    # -tt: the ranks end with the session.
    ssh -tt -o BatchMode=yes "${hosts[n]}" "cd ${PWD@Q} && exec $command" < /dev/null &
    sessions+=($!)
done

trap 'kill "${sessions[@]}" 2> /dev/null || true' INT TERM
status=0
for session in "${sessions[@]}"; do
    wait "$session" || status=$?
done
exit $status
