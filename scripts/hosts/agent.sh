#!/usr/bin/env bash
# mpirun's replacement for ssh (plm_rsh_agent): agent.sh HOST COMMAND... runs a shell command on a test host.
set -euo pipefail
source "$(dirname "$0")/lab.sh"
host=$1
shift
on "$host" sh -c "$*"
