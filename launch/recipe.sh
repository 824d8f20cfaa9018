#!/usr/bin/env bash
# The whole way to a robot policy: demonstrations by a scripted expert, behaviour cloning, and reinforcement learning in the
# simulator, with success and videos from before and after.
#
# Usage: launch/recipe.sh TASK_MODEL [key=value …]
#   for which there are conf/demonstrations/TASK.yaml, conf/cloning/TASK_MODEL.yaml and conf/experiment/TASK_MODEL.yaml;
#   the overrides are of the reinforcement learning. Demonstrations and clone are made once.
#   NPROC  ranks that share the CPU (default 2)
#   ROOT   folder for what is made: datasets/TASK, runs/TASK_MODEL_sft, runs/TASK_MODEL (default, and start of a relative
#          path: the project's)
#   SEED   of everything that is made (default 0); what there is already keeps its own
# Ctrl-C and SIGTERM stop in order. The same command goes on: collecting starts anew, cloning from its last checkpoint, and
# with resume=auto so does the last part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

recipe=${1:-} root=${ROOT:-.} seed=${SEED:-0}
if [[ ! -f conf/cloning/$recipe.yaml ]]; then
  recipes=(conf/cloning/*.yaml)
  say "error: ${recipe:+no recipe $recipe; }name one of: $(basename -s .yaml "${recipes[@]}" | paste -sd ' ')"
  exit 2
fi
if [[ ! -x .venv/bin/python ]]; then
  say "error: no $PWD/.venv/bin/python: run make setup first"
  exit 2
fi
shift
demonstrations=$root/datasets/${recipe%%_*}
clone=${recipe}_sft

# Unknown keys and values of a wrong type show now, not after the first two parts.
.venv/bin/python -m dvla.train experiment="$recipe" "$@" --cfg job >/dev/null || exit 2

# Run one part until it has ended, whatever signals come, and end if any did, also between two parts.
stopped='' part=''
trap 'stopped=1; [[ -z $part ]] || kill -TERM "$part" 2>/dev/null || true' INT TERM HUP QUIT USR1
end_if_stopped() { [[ -z $stopped ]] || exit 0; }
run() {
  end_if_stopped
  say "$1"
  "${@:2}" </dev/null &
  part=$!
  [[ -z $stopped ]] || kill -TERM "$part" 2>/dev/null || true
  while kill -0 "$part" 2>/dev/null; do wait "$part" || true; done
  local code=0
  wait "$part" || code=$?
  part=''
  ((code == 0)) || exit "$code" # also when stopped: what a part could not save is no success
  end_if_stopped
}

if [[ ! -d $demonstrations ]]; then
  rm -rf "$demonstrations.part"
  # Far from the seeds of training and evaluation, and for every seed of this command other ones.
  run "1 of 3: demonstrations" .venv/bin/python -m dvla.collect demonstrations="${recipe%%_*}" \
    seed=$((2000000000 + 1000000 * seed)) out="$demonstrations.part"
  mv "$demonstrations.part" "$demonstrations"
fi
if ! grep -qs '"exit": "completed"' "$root/runs/$clone/summary.json"; then
  run "2 of 3: behaviour cloning" launch/torchrun.sh --standalone --nproc-per-node "${NPROC:-2}" -m dvla.sft \
    cloning="$recipe" "data.paths=[$demonstrations]" run.root="$root/runs" run.name="$clone" resume=auto seed="$seed"
fi
end_if_stopped
trap - INT TERM HUP QUIT USR1
say "3 of 3: reinforcement learning"
exec launch/one_node.sh experiment="$recipe" model.checkpoint="$root/runs/$clone/policy" run.root="$root/runs" \
  run.name="$recipe" seed="$seed" "$@"
