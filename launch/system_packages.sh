#!/usr/bin/env bash
# The system libraries the simulators need to render without a GPU.
#
#   ManiSkill (SAPIEN)  a Vulkan device; on a CPU that is Mesa's lavapipe, new enough to offer
#                       descriptor indexing and ray tracing. 22.3 is too old, 25.0 is tested.
#   LIBERO (MuJoCo)     OSMesa; where a distribution no longer carries it, Mesa's EGL instead.
#
# Returns at once when all of it is there. Otherwise, as root on Debian or Ubuntu, installs it
# without a question (Debian 12: from backports, out of the mirror already in use). Without root it
# installs nothing and says what to run.
#
# Usage: launch/system_packages.sh             check, then install if root
#        launch/system_packages.sh --check     only say what is missing
#        launch/system_packages.sh --user      no root: unpack the packages below $DVLA_MESA_DIR
#                                              (default ~/.local/share/dvla-mesa), write env.sh there
#        launch/system_packages.sh --renderer  print what MuJoCo should render with: osmesa or egl
# DVLA_SKIP_SYSTEM_PACKAGES=1 makes it do nothing.
set -euo pipefail

readonly MIN_MESA=25.0
readonly PACKAGES=(mesa-vulkan-drivers libegl1 libegl-mesa0 libgl1-mesa-dri libvulkan1 libx11-6 libgl1 libglib2.0-0)
readonly OSMESA=libosmesa6
readonly USER_DIR=${DVLA_MESA_DIR:-$HOME/.local/share/dvla-mesa}
PATH=$PATH:/usr/sbin:/sbin # ldconfig
APT_OPTIONS=()

say() { printf 'system packages: %s\n' "$*" >&2; }
die() {
  printf 'system packages: error: %s\n' "$*" >&2
  exit 1
}

version_ge() { [[ $(printf '%s\n' "$2" "$1" | sort -V | sed -n 1p) == "$2" ]]; }

# --- what is there ----------------------------------------------------------------------------

# Path of a shared library as the dynamic linker would find it, or nothing.
find_lib() {
  local dir dirs
  IFS=: read -ra dirs <<<"${LD_LIBRARY_PATH:-}"
  for dir in ${dirs[@]+"${dirs[@]}"}; do
    if [[ -n $dir && -e $dir/$1 ]]; then
      printf '%s\n' "$dir/$1"
      return
    fi
  done
  ldconfig -p 2>/dev/null | awk -v name="$1" '$1 == name { path = $NF } END { if (path) print path }'
}

# The driver manifests the Vulkan loader would read.
vulkan_manifests() {
  local listed=${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}
  if [[ -n $listed ]]; then
    tr : '\n' <<<"$listed"
    return
  fi
  local dir file
  for dir in "${XDG_DATA_HOME:-$HOME/.local/share}" /etc /usr/local/share /usr/share; do
    for file in "$dir"/vulkan/icd.d/*.json; do
      if [[ -e $file ]]; then printf '%s\n' "$file"; fi
    done
  done
}

# Mesa version of the best lavapipe the Vulkan loader would find (the library carries it as text).
lavapipe_version() {
  local manifest library version best=
  while read -r manifest; do
    [[ ${manifest##*/} == lvp_icd*.json && -r $manifest ]] || continue
    library=$(sed -n 's/.*"library_path"[^"]*"\([^"]*\)".*/\1/p' "$manifest")
    case $library in
      /*) ;;
      */*) library=${manifest%/*}/$library ;;
      *) library=$(find_lib "$library") ;;
    esac
    [[ -r $library ]] || continue
    version=$(grep -aoEm1 'Mesa [0-9]+\.[0-9]+(\.[0-9]+)?' "$library" | sed -n '1s/Mesa //p') || continue
    if [[ -z $best ]] || version_ge "$version" "$best"; then best=$version; fi
  done < <(vulkan_manifests)
  printf '%s\n' "$best"
}

has_gpu_vulkan() {
  [[ -e /dev/nvidiactl || -e /dev/dxg ]] && vulkan_manifests | grep -q 'nvidia_icd[^/]*\.json$'
}

# Sets MISSING to a comma separated list, empty when all is there, and MISSING_ALWAYS to the part of
# it that runs on a GPU need too.
check() {
  local lib lavapipe
  MISSING=
  for lib in libvulkan.so.1 libX11.so.6 libEGL.so.1 libGL.so.1 libglib-2.0.so.0; do
    if [[ -z $(find_lib "$lib") ]]; then MISSING+="${MISSING:+, }$lib"; fi
  done
  MISSING_ALWAYS=$MISSING
  lavapipe=$(lavapipe_version)
  if [[ -z $lavapipe ]]; then
    MISSING+="${MISSING:+, }lavapipe (software Vulkan)"
  elif ! version_ge "$lavapipe" "$MIN_MESA"; then
    MISSING+="${MISSING:+, }lavapipe of mesa >= $MIN_MESA (found $lavapipe)"
  fi
  SOFTWARE_GL=osmesa
  if [[ -z $(find_lib libOSMesa.so.8) ]]; then
    SOFTWARE_GL=egl
    # Mesa 25.1 was the first release without OSMesa: from there on EGL takes its place.
    if [[ -z $(find_lib libEGL_mesa.so.0) ]] || ! version_ge "${lavapipe:-0}" 25.1; then
      MISSING+="${MISSING:+, }libOSMesa.so.8"
    fi
  fi
  LAVAPIPE=$lavapipe
}

report_ok() { say "in place: lavapipe of mesa $LAVAPIPE, MuJoCo renders with MUJOCO_GL=$SOFTWARE_GL"; }

# --- apt --------------------------------------------------------------------------------------

apt_get() {
  DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get ${APT_OPTIONS[@]+"${APT_OPTIONS[@]}"} \
    -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 \
    -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "$@" </dev/null
}

# A broken third-party source must not stop us: whether the packages can be had is asked afterwards.
update() {
  say "reading the package lists (under a minute)"
  apt_get update -qq >&2 || say "some package lists could not be read; going on with the others"
}

# Candidate version of a package (epoch and Debian revision cut off), optionally from a suite.
candidate() {
  apt-cache ${APT_OPTIONS[@]+"${APT_OPTIONS[@]}"} ${2:+-o APT::Default-Release="$2"} policy "$1" 2>/dev/null |
    sed -n 's/^  Candidate: \([0-9]*:\)\{0,1\}\([0-9][^-]*\).*/\2/p'
}

candidate_is_new() {
  local version
  version=$(candidate mesa-vulkan-drivers "$1")
  [[ -n $version ]] && version_ge "$version" "$MIN_MESA"
}

os_release() { sed -n "s/^$1=\"\{0,1\}\([^\"]*\)\"\{0,1\}\$/\1/p" /etc/os-release; }

# Prints "KIND<newline>ENTRY": the machine's own entry for this Debian suite, rewritten to its backports.
# URI, key and options stay as they are, so that a local mirror keeps working.
backports_entry() {
  local suite=$1 uri file entry
  # shellcheck disable=SC2016 # apt fills these in
  uri=$(apt-get ${APT_OPTIONS[@]+"${APT_OPTIONS[@]}"} indextargets --format '$(ORIGIN)|$(RELEASE)|$(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
    awk -F'|' -v suite="$suite" '$1 == "Debian" && $2 == suite { sub(/\/$/, "", $3); print $3; exit }')
  for file in /etc/apt/sources.list.d/*.sources; do
    [[ -r $file ]] || continue
    entry=$(grep -v '^#' "$file" | awk -v RS= -v suite="$suite" -v uri="$uri" '
      function has(field, word) { return $0 ~ ("(^|\n)" field ":[^\n]*[ \t]" word "/?([ \t]|\n|$)") }
      has("Types", "deb") && has("Suites", suite) && has("Components", "main") && !has("Enabled", "no") &&
      (uri == "" || index($0, uri)) {
        n = split($0, lines, "\n")
        for (i = 1; i <= n; i++) {
          if (lines[i] ~ /^Types:/) lines[i] = "Types: deb"
          if (lines[i] ~ /^Suites:/) lines[i] = "Suites: " suite "-backports"
          if (lines[i] ~ /^Components:/) lines[i] = "Components: main"
          print lines[i]
        }
        exit
      }')
    if [[ -n $entry ]]; then
      printf 'sources\n%s\n' "$entry"
      return
    fi
  done
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [[ -r $file ]] || continue
    entry=$(sed -nE "s%^[[:space:]]*deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+)[[:space:]]+${suite}[[:space:]]+(.*[[:space:]])?main([[:space:]].*)?\$%deb \1\2 $suite-backports main%p" "$file" |
      { if [[ -n $uri ]]; then grep -F -- "$uri" || true; else cat; fi; } | sed -n 1p)
    if [[ -n $entry ]]; then
      printf 'list\n%s\n' "$entry"
      return
    fi
  done
}

# Makes a new enough Mesa known to apt. Sets SUITE (empty: the distribution's own packages will do).
# $1: where source entries are written.
find_mesa() {
  local codename kind entry complaint
  if ! complaint=$(apt-cache ${APT_OPTIONS[@]+"${APT_OPTIONS[@]}"} policy 2>&1 >/dev/null); then
    die "apt does not work here, mend this first: ${complaint%%$'\n'*}"
  fi
  codename=$(os_release VERSION_CODENAME)
  SUITE=
  if candidate_is_new ""; then return; fi
  if [[ $codename == bookworm ]]; then
    if candidate_is_new bookworm-backports; then
      SUITE=bookworm-backports
      return
    fi
  fi
  update
  if candidate_is_new ""; then return; fi
  if [[ $codename != bookworm ]]; then
    die "$(os_release PRETTY_NAME) offers mesa $(candidate mesa-vulkan-drivers ""), and $MIN_MESA or newer is needed: use Debian 12 or 13, or Ubuntu 24.04 with its updates, or install a newer mesa-vulkan-drivers by hand"
  fi
  SUITE=bookworm-backports
  if candidate_is_new "$SUITE"; then return; fi
  entry=$(backports_entry bookworm)
  [[ -n $entry ]] || die "no Debian source for bookworm was found below /etc/apt: add $SUITE there and run this again"
  kind=${entry%%$'\n'*}
  say "adding $SUITE from the mirror already in use ($1/dvla-backports.$kind)"
  printf '%s\n' "# Added by D-VLA for a Mesa that SAPIEN can render with." "${entry#*$'\n'}" >"$1/dvla-backports.$kind"
  update
  candidate_is_new "$SUITE" ||
    die "this machine's Debian mirror does not offer $SUITE: put a mirror that does into $1/dvla-backports.$kind and run this again"
}

# Sets WANTED: what to install. OSMesa is left out where it no longer exists.
choose_packages() {
  WANTED=("${PACKAGES[@]}")
  if apt_get install -s ${SUITE:+-t "$SUITE"} "${PACKAGES[@]}" "$OSMESA" >/dev/null 2>&1; then
    WANTED+=("$OSMESA")
  fi
}

apt_install() {
  choose_packages
  say "installing ${WANTED[*]} (about a minute)"
  apt_get install -y -q --no-install-recommends ${SUITE:+-t "$SUITE"} "${WANTED[@]}" >"$LOG" 2>&1
}

install_as_root() {
  LOG=$(mktemp)
  trap 'rm -f "$LOG"' EXIT
  find_mesa /etc/apt/sources.list.d
  if ! apt_install; then
    say "that failed; finishing what was interrupted, reading the lists anew and trying once more"
    DEBIAN_FRONTEND=noninteractive dpkg --configure -a </dev/null >&2 || true
    update
    if ! apt_install; then
      tail -n 20 "$LOG" >&2
      die "apt could not install ${WANTED[*]}: mend what it says above, then run this again"
    fi
  fi
}

# The same packages and those they need, unpacked below USER_DIR with an apt state of our own.
install_as_user() {
  local name deb names dir
  mkdir -p "$USER_DIR"/{sources,lists/partial,cache/archives/partial,root}
  cp /etc/apt/sources.list "$USER_DIR/sources.list" 2>/dev/null || : >"$USER_DIR/sources.list"
  for name in /etc/apt/sources.list.d/*.{list,sources}; do
    if [[ -r $name ]]; then cp "$name" "$USER_DIR/sources/"; fi
  done
  APT_OPTIONS=(-o Dir::Etc::SourceList="$USER_DIR/sources.list" -o Dir::Etc::SourceParts="$USER_DIR/sources"
    -o Dir::State::Lists="$USER_DIR/lists" -o Dir::Cache="$USER_DIR/cache" -o Debug::NoLocking=1)
  find_mesa "$USER_DIR/sources"
  choose_packages
  mapfile -t names < <(apt_get install --print-uris -qq --no-install-recommends ${SUITE:+-t "$SUITE"} "${WANTED[@]}" |
    awk '$2 ~ /\.deb$/ { sub(/_.*/, "", $2); print $2 }')
  say "downloading ${#names[@]} packages into $USER_DIR"
  if [[ ${#names[@]} -gt 0 ]]; then
    (cd "$USER_DIR/cache/archives" && apt_get download -qq ${SUITE:+-t "$SUITE"} "${names[@]}" >&2) ||
      die "download failed: see the message above, then run this again"
    for deb in "$USER_DIR"/cache/archives/*.deb; do dpkg -x "$deb" "$USER_DIR/root"; done
  fi
  rm -rf "$USER_DIR/cache"
  dir=$(find "$USER_DIR/root" -name libvulkan_lvp.so -printf '%h\n' | sed -n 1p)
  [[ -n $dir ]] || die "no lavapipe among the packages unpacked below $USER_DIR/root"
  sed "s%\"library_path\": *\"[^\"]*\"%\"library_path\": \"$dir/libvulkan_lvp.so\"%" \
    "$USER_DIR"/root/usr/share/vulkan/icd.d/lvp_icd*.json >"$USER_DIR/lvp_icd.json"
  cat >"$USER_DIR/env.sh" <<END
export VK_ICD_FILENAMES='$USER_DIR/lvp_icd.json'
export LD_LIBRARY_PATH='$dir'"\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export __EGL_VENDOR_LIBRARY_DIRS='$USER_DIR/root/usr/share/glvnd/egl_vendor.d'
END
  # shellcheck disable=SC1091 # written three lines above
  . "$USER_DIR/env.sh"
}

# --- main -------------------------------------------------------------------------------------

main() {
  local here=${BASH_SOURCE[0]}
  if [[ ${DVLA_SKIP_SYSTEM_PACKAGES:-0} == 1 && ${1:-} != --renderer ]]; then
    say "left alone (DVLA_SKIP_SYSTEM_PACKAGES=1)"
    return
  fi
  case ${1:-} in
    "" | --check | --renderer | --user) ;;
    *) die "unknown option $1: use none, --check, --renderer or --user" ;;
  esac
  check
  if [[ ${1:-} == --renderer ]]; then
    if has_gpu_vulkan; then SOFTWARE_GL=egl; fi
    printf '%s\n' "$SOFTWARE_GL"
    return
  fi
  if [[ -z $MISSING ]]; then
    report_ok
    return
  fi
  if [[ ${1:-} != --check ]] && command -v apt-get >/dev/null; then
    if [[ ${1:-} == --user ]]; then
      install_as_user
      check
      [[ -z $MISSING ]] || die "still missing after unpacking: $MISSING"
      report_ok
      say "now run, in every shell that trains:  . '$USER_DIR/env.sh'"
      return
    elif [[ $(id -u) == 0 ]]; then
      say "missing: $MISSING"
      if has_gpu_vulkan && [[ -z $MISSING_ALWAYS ]]; then
        (install_as_root) || say "going on: the GPU's own drivers are there, only runs without the GPU are affected"
        return
      fi
      install_as_root
      ldconfig
      check
      [[ -z $MISSING ]] || die "still missing after the installation: $MISSING${VK_ICD_FILENAMES:+ (VK_ICD_FILENAMES is set: unset it)}"
      report_ok
      return
    fi
  fi
  if has_gpu_vulkan && [[ -z $MISSING_ALWAYS ]]; then
    say "missing: $MISSING; the GPU's own drivers are there, so only runs without the GPU are affected"
    return
  fi
  say "missing: $MISSING"
  if command -v apt-get >/dev/null; then
    say "with root:     sudo bash '$here'"
    say "without root:  bash '$here' --user && . '$USER_DIR/env.sh'"
  else
    say "this is no Debian or Ubuntu: install mesa's Vulkan drivers (>= $MIN_MESA), EGL and OSMesa, the Vulkan loader and libX11 with your package manager"
  fi
  die "cannot render without these packages (to go on all the same: DVLA_SKIP_SYSTEM_PACKAGES=1)"
}

main "$@"
