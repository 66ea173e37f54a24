#!/usr/bin/env bash
# Prints cargo's target directory: target/, or as set by CARGO_TARGET_DIR or cargo's configuration.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo metadata --no-deps --format-version 1 | sed -E 's/.*"target_directory":"([^"]*)".*/\1/'
