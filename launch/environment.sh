# Sourced by the other scripts: makes .venv if needed and installs specjax in it. Idempotent.
#   PYTHON=python3.12  chooses the interpreter (default: python3)
#   VENV=FOLDER        chooses the folder (default: .venv, or .venv-3.12 if that holds another Python)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

# prepare EXTRAS: afterwards $VENV/bin/python runs specjax with these extras ("" for none).
prepare() {
  local extras=$1 wanted stamp
  command -v "$PYTHON" >/dev/null ||
    { echo "error: $PYTHON was not found; set PYTHON to a Python 3.11 or newer" >&2; exit 2; }
  wanted=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "error: $PYTHON is Python $wanted; specjax needs 3.11 or newer: set PYTHON=python3.11" >&2; exit 2; }
  if [ -x "$VENV/bin/python" ] &&
      [ "$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$wanted" ]; then
    VENV=$VENV-$wanted  # the folder holds another Python, and stays as it is
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    echo "== making $VENV with Python $wanted"
    "$PYTHON" -m venv "$VENV"
  fi
  # What is installed is named by what asked for it, so that a changed setup.cfg installs again and nothing else does.
  stamp="$VENV/specjax-installed${extras:+-$extras}"
  if ! cmp -s setup.cfg "$stamp"; then
    echo "== installing specjax${extras:+[$extras]} into $VENV"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar on -e ".${extras:+[$extras]}"
    cp setup.cfg "$stamp"
  fi
}
