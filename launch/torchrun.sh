#!/usr/bin/env bash
# torchrun that can be stopped: Ctrl-C, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 make every rank save a checkpoint at one
# agreed step and end with exit code 0, and so does this script.
#
# By itself torchrun hands a signal on, but then prints a traceback and ends with 1, however well its ranks ended; and
# SIGUSR1 kills it. So here it gets none: it runs in a session of its own, which a terminal's Ctrl-C does not reach, and
# ignores SIGUSR1, which this script sends to its ranks.
#
# Usage: launch/torchrun.sh OPTIONS-OF-TORCHRUN -m dvla.train [key=value …]
# Paths in the overrides are taken from the folder of the project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# Whether a process has its handler for SIGUSR1 (signal 10: bit 9). Before that it would take no notice.
listens() { (($(sed -n 's/^SigCgt:\s*/16#/p' "/proc/$1/status" 2>/dev/null || echo 0) & 0x200)); }

stop() {
  local rank ranks deadline=$((SECONDS + 60))
  ranks=$(cat "/proc/${torchrun:-}/task"/*/children 2>/dev/null || true)
  if [[ -z $ranks ]]; then
    say "stopped before any rank had started"
    kill -TERM "${torchrun:-}" 2>/dev/null || true
    return
  fi
  for rank in $ranks; do
    while [[ -e /proc/$rank ]] && ! listens "$rank"; do
      if ((SECONDS >= deadline)); then
        say "rank with pid $rank hangs in its start: ending all"
        kill -TERM "$torchrun" 2>/dev/null || true
        return
      fi
      sleep 0.1
    done
    kill -USR1 "$rank" 2>/dev/null || true
  done
}

if [[ ! -x .venv/bin/torchrun ]]; then
  say "error: no $PWD/.venv/bin/torchrun: run make setup first"
  exit 2
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}                                   # torchrun would say so at length
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}   # time to save for a SIGTERM all the same
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1                                    # or restarted ranks look for the dead ones
export MUJOCO_GL=${MUJOCO_GL:-$(launch/system_packages.sh --renderer)}

# The ranks of one machine find each other by a file without a name, and by ports of the loopback interface: those that
# torchrun opens for --standalone can be reached from everywhere.
arguments=()
for argument; do
  if [[ $argument != --standalone ]]; then
    arguments+=("$argument")
    continue
  fi
  file=$(mktemp)
  exec {meeting}<>"$file"
  rm "$file"
  arguments+=(--rdzv-backend c10d --rdzv-endpoint "/proc/self/fd/$meeting" --rdzv-id "dvla-$$" --local-addr localhost
    --rdzv-conf "store_type=file,keep_alive_interval=600") # every sign of life makes the file a little longer
done

trap stop INT TERM HUP QUIT USR1
# Should this script be killed, torchrun gets SIGTERM, on which it ends its ranks.
setsid setpriv --pdeathsig TERM env --ignore-signal=USR1 .venv/bin/torchrun "${arguments[@]}" </dev/null &
torchrun=$!
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun" || true # a signal ends the wait, not torchrun
done
wait "$torchrun" # bash remembers its exit code
