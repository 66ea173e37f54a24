#!/usr/bin/env bash
# Prints the directory that cargo builds into: target/, or what CARGO_TARGET_DIR or a configuration of cargo says.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo metadata --no-deps --format-version 1 | sed -E 's/.*"target_directory":"([^"]*)".*/\1/'
