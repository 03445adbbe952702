# Sourced by the other scripts: makes .venv from requirements.lock, once per lock, and enters it.
# PYTHON names the interpreter to build it with (Python 3.11 or newer).

unset PYTHONDONTWRITEBYTECODE  # every process would compile its packages again

make_venv() {
  local python="${PYTHON:-}" candidate stamp
  for candidate in $python python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python="$candidate"
      break
    fi
  done
  if [ -z "$python" ]; then
    echo "error: no Python 3.11 or newer found; install one, or set PYTHON to it" >&2
    return 2
  fi
  stamp="$(cat requirements.lock pyproject.toml | cksum)"
  if [ ! -f .venv/.stamp ] || [ "$(cat .venv/.stamp)" != "$stamp" ]; then
    echo "== installing the locked packages into .venv" >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --editable .
    echo "$stamp" > .venv/.stamp
  fi
  . .venv/bin/activate
}

make_venv
