#!/usr/bin/env bash
# All checks: lint, types, migrations, tests on SQLite, PostgreSQL and a real local Ray.
#   scripts/test.sh           everything
#   scripts/test.sh --fast    leaves out the tests marked slow
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

select=()
if [ "${1:-}" = "--fast" ]; then
  shift
  select=(-m "not slow")
fi
. scripts/venv.sh

echo "== ruff"
ruff check .
ruff format --check .
echo "== mypy"
mypy
echo "== migrations"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
DOFSWEEP_HOME="$scratch/home" DOFSWEEP_DB="$scratch/check.db" dofsweep db upgrade
DOFSWEEP_HOME="$scratch/home" DOFSWEEP_DB="$scratch/check.db" dofsweep db check
echo "== pytest"
python -m pytest "${select[@]}" "$@"
