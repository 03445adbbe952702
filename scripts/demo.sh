#!/usr/bin/env bash
# A real sweep on a real model: SmolLM2-135M, all 30 layers made linear, 64 features a layer on
# average, three plans, on the text that comes with Python. No model hub is needed.
# Results stay in DOFSWEEP_HOME (default: .demo in the checkout).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

export DOFSWEEP_HOME="${DOFSWEEP_HOME:-$PWD/.demo}"
what=(--model smollm2-135m --corpus pydoc --budget 64 --lam 2^-8
  --seq-len 256 --train-tokens 40960 --heldout-tokens 6144 --set n_points=512)
dofsweep launch "${what[@]}" --strategy fix --strategy dof --strategy dof_clip --name demo "$@"
dofsweep plan "${what[@]}"
