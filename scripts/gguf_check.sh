#!/usr/bin/env bash
# GGUF files of every family, read by the gguf package and run by llama.cpp (tests/golden/gguf_files.py check): greedy tokens are
# ours. Both come from PyPI, once, into a virtual environment under cargo's target directory. RUN_FSDP names the binary where it is
# not to be built here; LLAMA_CPP a checkout of llama.cpp, whose converter's files are compared too where torch, transformers and
# sentencepiece are in the environment that GGUF_VENV names.
set -euo pipefail
cd "$(dirname "$0")/.."

check=gguf_check
lost="GGUF files were not read by gguf, nor run by llama.cpp"
. scripts/pypi.sh
venv=${GGUF_VENV:-$target/gguf-venv}
environment "$venv" "gguf, xllamacpp, tokenizers, safetensors" --only-binary :all: gguf==0.19.0 xllamacpp==2026.10.11549 \
    tokenizers==0.23.3 safetensors==0.8.0 || skip "PyPI cannot be reached, or has no wheels for this machine"
[ -n "${RUN_FSDP:-}" ] || binaries
"$venv/bin/python" -B tests/golden/gguf_files.py check "$RUN_FSDP" ${LLAMA_CPP:+"$LLAMA_CPP"} 2> "$target/gguf_check.log" ||
    { tail -20 "$target/gguf_check.log"; exit 1; }
