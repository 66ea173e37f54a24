#!/usr/bin/env bash
# huggingface_hub from PyPI and run_fsdp read and write one cache, also at the same time (scripts/hub_check.py). RUN_FSDP names the
# binary where it is not to be built here; HUB_VENV an environment with huggingface_hub.
set -euo pipefail
cd "$(dirname "$0")/.."

check=hub_check
lost="the cache was not shared with huggingface_hub"
. scripts/pypi.sh
venv=${HUB_VENV:-$target/hub-venv}
environment "$venv" huggingface_hub huggingface_hub==2.4.0 || skip "PyPI cannot be reached"
[ -n "${RUN_FSDP:-}" ] || binaries
"$venv/bin/python" -B scripts/hub_check.py "$RUN_FSDP"
