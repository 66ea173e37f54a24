#!/usr/bin/env bash
# The pages of `experiments analyze` and `experiments watch` in headless Chromium (scripts/pages_check.py). The browser is the machine's
# (CHROMIUM names another); what talks to it comes from PyPI, once, into a virtual environment under cargo's target directory.
# RUN_FSDP and EXPERIMENTS name the binaries where they are not to be built here; SCREENSHOTS a directory for pictures of every page.
set -euo pipefail
cd "$(dirname "$0")/.."

check=pages_check
lost="the pages were not opened in a browser"
. scripts/pypi.sh
chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
[ -n "$chromium" ] || skip "no Chromium"
venv=${PAGES_VENV:-$target/pages-venv}
environment "$venv" websocket websocket-client==1.9.0 || skip "PyPI cannot be reached"
binaries
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$venv/bin/python" -B scripts/pages_check.py "$chromium" "$RUN_FSDP" "$EXPERIMENTS" "$scratch" ${SCREENSHOTS:+"$SCREENSHOTS"}
