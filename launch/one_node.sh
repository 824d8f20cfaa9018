#!/usr/bin/env bash
# Train on this machine.
#
# Usage: launch/one_node.sh experiment=reach [key=value …]
#   NPROC         ranks: one per GPU, or a few that share the CPU (default 2)
#   MAX_RESTARTS  how often to start all ranks again after one died; they resume from the last checkpoint (default 0)
set -euo pipefail

resume=()
((${MAX_RESTARTS:-0} == 0)) || resume=(resume=auto)

# Part of this shell, so that signals reach it.
# shellcheck source-path=SCRIPTDIR source=torchrun.sh
. "$(dirname "${BASH_SOURCE[0]}")/torchrun.sh" --standalone --nproc-per-node "${NPROC:-2}" \
  --max-restarts "${MAX_RESTARTS:-0}" -m dvla.train "${resume[@]}" "$@"
