#!/usr/bin/env bash
# Writes requirements.lock: the newest versions that pyproject.toml allows, with the tested torch.
# The local part of torch's version (+cpu) is left out, so that any build of it will do.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3.11}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 ".[dev]"
{
  echo "# Every version that was tested together. Made by scripts/lock.sh."
  "$scratch/venv/bin/python" -m pip freeze --exclude dofsweep | sed 's/+cpu$//'
} > requirements.lock
