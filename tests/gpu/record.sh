#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: checks FLOPs, overhead, CUDA graphs and energy there, and records small shards.
#   tests/gpu/record.sh [FOLDER]
# Results go to FOLDER, else to $OUT, else to dist/gpu. Needs python3 (or $PYTHON) with torch; nvidia-ml-py for energy, pyarrow for
# shards. Without a GPU it says so and does nothing.
set -euo pipefail
out="$(realpath -m "${1:-${OUT:-$(dirname "${BASH_SOURCE[0]}")/../../dist/gpu}}")"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # the same sums in the same order, run after run
exec "${PYTHON:-python3}" -m tests.gpu.record "$out"
