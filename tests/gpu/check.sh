#!/usr/bin/env bash
# Checks on one NVIDIA GPU what tests on a CPU cannot: pinned shared memory, slots, the weight plane beside NCCL, memory
# pools, rounding, CUDA graphs, and short training runs. Takes a few minutes, ten at the most.
#
# Needs a checkout, Python 3.11 or 3.12 with torch, numpy and psutil, and nothing from the network. Checks whose modules
# are missing are named, with the command that installs these.
#
# Usage: tests/gpu/check.sh [--list | NAME …]
#   PYTHON                    the Python to use (default: python3)
#   OUT                       a folder that gets gpu_check.jsonl: one JSON object for each check
#   DVLA_GPU_CHECK_DEVICE     cpu makes a dry run without a GPU: it says what cannot be checked so
# Exit code: 0 if no check failed, 1 if one did, 2 if nothing could be checked.
set -euo pipefail

if [[ -n ${OUT:-} ]]; then
  mkdir -p "$OUT"
  OUT=$(cd "$OUT" && pwd)
  export OUT
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  printf 'check.sh: error: %s is no Python 3.11 or newer: set PYTHON\n' "$PYTHON" >&2
  exit 2
fi
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m gpu.run "$@"
