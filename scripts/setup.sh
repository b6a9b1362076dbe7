#!/usr/bin/env bash
# Creates .venv with specax (editable) and its development tools.
#
#   scripts/setup.sh                               finds a Python >= 3.12 by itself
#   SPECAX_PYTHON=/path/to/python scripts/setup.sh uses that one, or says why it can't
#
# Returns at once, without network, when .venv works and was made from this pyproject.toml in this folder
# (to move an existing one to another Python: make clean first).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.installed
nl=$'\n'
rejected=""

say() { printf '[setup] %s\n' "$*" >&2; }
die() { say "error: $1"; exit 1; }

# A virtual environment holds absolute paths, so a moved checkout needs a new one: the folder is in the stamp.
wanted() { pwd -P; cat pyproject.toml; }

# Prints the interpreter's own path when it runs and fits; else its complaint on stderr and a failure.
# It has to be run: a pyenv shim exists on PATH for versions that are not active, and only fails.
probe() {
  "$1" - <<'PY'
import sys
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 12):
    sys.exit(f"is Python {version}, 3.12 or newer is needed")
if sys.version_info.releaselevel != "final" or sys.implementation.name != "cpython":
    sys.exit(f"is {sys.implementation.name} {version} ({sys.version_info.releaselevel}), a CPython release is needed")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(f"is Python {version} without venv (Debian, Ubuntu: apt install python3.{sys.version_info[1]}-venv)")
print(sys.executable)
PY
}

# Succeeds, with $python set, if $1 fits; else remembers why it doesn't.
try() {
  local answer
  if answer=$(probe "$1" 2>&1) && [ -x "$answer" ]; then
    python=$answer
    return 0
  fi
  rejected+="${nl}    $1: ${answer%%$nl*}"
  return 1
}

candidates() {
  local name root=${PYENV_ROOT:-${HOME:-}/.pyenv}
  for name in python3 python3.14 python3.13 python3.12; do
    type -aP "$name" || true # all on PATH: a real one may stand behind a shim
  done
  if [ -d "$root/versions" ]; then
    ls "$root/versions" | sort -rV | while read -r name; do
      if [ -x "$root/versions/$name/bin/python" ]; then echo "$root/versions/$name/bin/python"; fi
    done
  fi
}

find_python() {
  local candidate
  python=""
  if [ -n "${SPECAX_PYTHON:-}" ]; then
    try "$SPECAX_PYTHON" || die "SPECAX_PYTHON can't be used:$rejected"
    return
  fi
  while IFS= read -r candidate; do
    if try "$candidate" </dev/null; then return; fi
  done < <(candidates)
}

make_venv() {
  find_python
  if [ -n "$python" ]; then
    say "creating $venv with $python"
    "$python" -m venv --clear "$venv" >&2 || die "$python -m venv failed (see above)"
  elif command -v uv >/dev/null; then
    say "no Python >= 3.12 found; creating $venv with uv"
    rm -rf "$venv"
    # --seed: pip inside, which also fetches the demo model
    uv venv --quiet --seed --python 3.12 "$venv" || die "uv could not provide Python 3.12 (see above)"
  else
    die "no fitting Python (>= 3.12, with venv) found. Install one, for example
    Debian, Ubuntu:  apt install python3.12 python3.12-venv
    macOS:           brew install python@3.13
    pyenv:           pyenv install 3.13
    uv:              install uv, it then brings Python by itself
  or name one with SPECAX_PYTHON=/path/to/python. Looked at:${rejected:-${nl}    nothing named python3 on PATH}"
  fi
}

venv_works() { [ -x "$venv/bin/python" ] && probe "$venv/bin/python" >/dev/null 2>&1; }

if [ -f "$stamp" ] && wanted | cmp -s - "$stamp" && "$venv/bin/python" -c "" 2>/dev/null; then
  exit 0
fi

started=$SECONDS
if ! venv_works || ! [ -f "$stamp" ] || [ "$(head -n 1 "$stamp")" != "$(pwd -P)" ]; then
  make_venv
fi
rm -f "$stamp"
say "installing specax and its tools into $venv (a minute or two the first time)"
# pip's own lines, thinned to one for each package; unbuffered, so that they come as it works.
PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -e '.[dev]' |
  awk '/^Collecting / { printf "[setup]   %s\n", $2; fflush() }
       /^Installing collected/ { print "[setup]   unpacking"; fflush() }' >&2 ||
  die "pip failed (see above). The first set-up needs a network or a package mirror (pip's own settings,
  PIP_INDEX_URL among them, are used); run the same command again afterwards."
wanted >"$stamp"
say "ready: $("$venv/bin/python" --version), $((SECONDS - started)) s"
