#!/usr/bin/env bash
# Train on several machines: start the same line, with the same overrides, on each, in any order.
#
# Usage: HEAD=node1 NNODES=2 launch/several_nodes.sh experiment=reach run.root=/shared/runs [key=value …]
#   HEAD          name or address of one of the machines, as all of them can reach it
#   NNODES        how many machines
#   PORT          a free TCP port on HEAD, where they meet (default 29400)
#   NPROC         ranks on each machine, the same everywhere (default 2)
#   RUN_ID        tells runs on one HEAD and PORT apart (default: from the overrides)
#   JOIN_TIMEOUT  seconds in which all must have been started (default 300)
#   MAX_RESTARTS  how often to start all ranks again after one died; they resume from the last checkpoint (default 0)
# Where the machines cannot tell by its name which of them is HEAD: IS_HEAD=1 there and 0 elsewhere, and LOCAL_ADDR, the
# machine's own address. Which network is used is gloo's and NCCL's own choice: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.
set -euo pipefail

: "${HEAD:?set it to the name or address of one machine that all can reach}"
: "${NNODES:?set it to the number of machines}"
PORT=${PORT:-29400} JOIN_TIMEOUT=${JOIN_TIMEOUT:-300}
RUN_ID=${RUN_ID:-dvla-$(printf '%s\0' "$NNODES" "$@" | cksum | cut -d ' ' -f 1)}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
they="NNODES=$NNODES machines at HEAD=$HEAD, PORT=$PORT within JOIN_TIMEOUT=$JOIN_TIMEOUT s"
say "to meet: $they"
trap '(($? == 0)) || say "failed; if with a Rendezvous…Error, then not all could meet: $they"' EXIT

resume=()
((${MAX_RESTARTS:-0} == 0)) || resume=(resume=auto)

# Part of this shell, so that signals reach it.
# shellcheck source-path=SCRIPTDIR source=torchrun.sh
. "$(dirname "${BASH_SOURCE[0]}")/torchrun.sh" --nnodes "$NNODES" --nproc-per-node "${NPROC:-2}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$RUN_ID" \
  --rdzv-conf "join_timeout=$JOIN_TIMEOUT,read_timeout=$JOIN_TIMEOUT${IS_HEAD:+,is_host=$IS_HEAD}" \
  ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} --max-restarts "${MAX_RESTARTS:-0}" \
  -m dvla.train "${resume[@]}" "$@"
