#!/usr/bin/env bash
# Makes .venv and installs D-VLA into it, editable, at the versions of launch/constraints.txt.
#
# Returns at once when nothing is to do. May be interrupted and started again; two at once wait for
# each other. Settings:
#   PYTHON           the Python to use, 3.11 or 3.12 (default: the first that fits on PATH)
#   TORCH_SPEC       another torch build, for instance torch==2.14.1 (remembered in .venv)
#   TORCH_INDEX_URL  where to take that torch from (pip's own index variables work as well)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$(pwd -P)
readonly ROOT VENV=.venv STAMP=.venv/.dvla-setup TORCH_CHOICE=.venv/.dvla-torch
readonly TESTED_TORCH=torch==2.13.0

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

torch_spec() {
  if [[ -n ${TORCH_SPEC:-} ]]; then
    printf '%s\n' "$TORCH_SPEC"
  else
    cat "$TORCH_CHOICE" 2>/dev/null || printf '%s\n' "$TESTED_TORCH"
  fi
}

# What the environment is made from: equal fingerprints mean that nothing is to do. The path counts,
# because a virtual environment does not survive being moved.
fingerprint() {
  { printf '%s\n' "$ROOT" "$(torch_spec)" && cat pyproject.toml launch/constraints.txt launch/setup.sh; } | sha256sum
}

up_to_date() { [[ -x $VENV/bin/python && "$(cat "$STAMP" 2>/dev/null)" == "$(fingerprint)" ]]; }

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
  local name fitting=
  if [[ -n ${PYTHON:-} ]]; then
    python_fits "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or 3.12"
  fi
  for name in ${PYTHON:-python3.11 python3.12 python3 python}; do
    python_fits "$name" || continue
    if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      command -v "$name"
      return
    fi
    fitting=$("$name" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  done
  if [[ -n $fitting ]]; then
    die "$fitting has no venv module: on Debian or Ubuntu run  sudo apt-get install -y $fitting-venv  and start again"
  fi
  die "no Python 3.11 or 3.12 on PATH: on Debian 12 or Ubuntu 24.04 run  sudo apt-get install -y python3 python3-venv  , elsewhere take one from your package manager, pyenv or conda (or set PYTHON)"
}

# A usable environment that was made here, by a Python that still exists.
venv_works() {
  python_fits "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 &&
    grep -qF "$ROOT/$VENV" "$VENV/bin/activate" 2>/dev/null
}

make_venv() {
  local python
  python=$(find_python)
  if [[ -e $VENV/pyvenv.cfg ]]; then
    say "$VENV is unusable (moved, interrupted, or its Python is gone): making it anew"
  fi
  find "$VENV" -mindepth 1 -maxdepth 1 ! -name .dvla-lock -exec rm -rf {} +
  say "making $VENV with $("$python" --version) ($python)"
  "$python" -m venv "$VENV"
}

# A terminal sees pip's progress bars, a log only what goes wrong.
pip_install() {
  local quiet=-qq
  if [[ -t 1 ]]; then quiet=; fi
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input ${quiet:+"$quiet"} "$@"
}

# Distributions that an interrupted pip left incomplete, one "name==version" a line.
incomplete() {
  "$VENV/bin/python" - <<'PYTHON'
import importlib.metadata
import os
import re
import sysconfig

for dist in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")]):
    if not dist.metadata["Name"]:
        continue
    files = dist.files
    # pip writes INSTALLER late, after the scripts in bin/.
    whole = files is not None and dist.read_text("INSTALLER") and all(
        os.path.exists(path := str(file.locate())) and file.size in (None, os.path.getsize(path))
        for file in files
        if not re.search(r"\.pyc$|dist-info[/\\]", str(file))
    )
    if not whole:
        print(f"{dist.metadata['Name']}=={dist.version}")
PYTHON
}

install() {
  local spec constraints broken
  spec=$(torch_spec)
  constraints=$VENV/.dvla-constraints.txt
  grep -v '^torch==' launch/constraints.txt >"$constraints"
  printf '%s\n' "$spec" >>"$constraints"

  say "1/3 $spec (up to a few GB, once: the longest step on a slow line)"
  pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -c "$constraints" "$spec"
  say "2/3 simulators, model libraries and tools (about 1 GB, some minutes the first time)"
  pip_install -c "$constraints" -e ".[dev]"
  say "3/3 checking what was installed"
  mapfile -t broken < <(incomplete)
  if [[ ${#broken[@]} -gt 0 ]]; then
    say "repairing what an interrupted installation left: ${broken[*]}"
    pip_install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} --ignore-installed --no-deps "${broken[@]}"
  fi
  "$VENV/bin/python" -m pip check >/dev/null || say "warning: $("$VENV/bin/python" -m pip check | sed -n 1p)"
  printf '%s\n' "$spec" >"$TORCH_CHOICE"
}

main() {
  if up_to_date; then return; fi
  mkdir -p "$VENV"
  exec 9>>"$VENV/.dvla-lock"
  if ! flock -n 9; then
    say "another setup is at work in $ROOT: waiting for it"
    flock 9
  fi
  if up_to_date; then return; fi

  local start=$SECONDS
  if venv_works; then say "bringing $VENV up to date"; else make_venv; fi
  rm -f "$STAMP"
  install
  fingerprint >"$STAMP"
  say "done in $((SECONDS - start)) s"
}

main
