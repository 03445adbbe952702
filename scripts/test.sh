#!/usr/bin/env bash
# All checks: lint, types, migrations, tests on SQLite, PostgreSQL and a real local Ray.
#   scripts/test.sh           everything
#   scripts/test.sh --fast    leaves out the tests marked slow and those that start a Ray
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

fast=
if [ "${1:-}" = "--fast" ]; then
  shift
  fast=1
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
if [ -n "$fast" ]; then
  OMP_NUM_THREADS=1 python -m pytest -n 2 -m "not slow and not ray" "$@"
  exit
fi
# Tests on Ray mostly wait for processes to start, so the others run beside them. A part that the
# arguments leave empty (exit code 5) is no failure, unless both are.
OMP_NUM_THREADS=1 python -m pytest -m "not ray" "$@" > "$scratch/plain.log" 2>&1 &
plain=$!
trap '[ -z "$plain" ] || kill "$plain" 2>/dev/null; rm -rf "$scratch"' EXIT
on_ray=0 without=0
python -m pytest -m ray "$@" || on_ray=$?
wait "$plain" || without=$?
plain=
cat "$scratch/plain.log"
[ "$on_ray" -eq 5 ] && [ "$without" -ne 5 ] && on_ray=0
[ "$without" -eq 5 ] && [ "$on_ray" -eq 0 ] && without=0
exit $((on_ray > without ? on_ray : without))
