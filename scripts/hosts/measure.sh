#!/usr/bin/env bash
# Measures all-gathers between two test hosts over a link with the rate of a network: hierarchical (each shard crosses once) against
# flat (every rank fetches every remote shard). Starts four ranks by hand; prints the lines of benches/hosts.rs with the link's rate.
# BENCH is its binary (cargo bench --bench hosts --no-run prints its path), RATES are tc's, FLAGS go to the bench.
#
#   scripts/hosts/measure.sh BENCH "200mbit 1gbit" [FLAGS...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/lab.sh"
bench=$(realpath "$1") rates=$2
shift 2
if [ -z "${LAB:-}" ]; then
    why=$(lab_missing)
    [ -z "$why" ] || { echo "no test hosts: $why" >&2; exit 1; }
    LAB=$(mktemp -d)
    export LAB
    trap 'rmdir "$LAB"' EXIT
    lab_run "$0" "$bench" "$rates" "$@"
    exit
fi
lab_start
for rate in $rates; do
    for node in node1 node2; do
        # A token bucket of 10 ms at 200 Mbit/s; packets queue for up to 100 ms before they are dropped.
        on $node tc qdisc replace dev eth0 root tbf rate "$rate" burst 256kb latency 100ms
    done
    for rank in 0 1 2 3; do
        on node$((rank / 2 + 1)) env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 \
            MASTER_PORT=29500 TORCHELASTIC_RUN_ID="$rate" "$bench" "$@" &
    done | sed -u "s/^{/{\"rate\":\"$rate\",/"
done
