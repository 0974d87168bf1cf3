#!/usr/bin/env bash
# What a GPU has to show, on one of them, within 8 minutes: the same text with every draft, trees
# whose rows are those of dense attention, and what speculation is worth on a model of a 7B shape.
# The tests are the CPU's own, told another device. Without a GPU nothing is run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "skipped: torch finds no GPU that it can use"
  exit 0
fi
export OUTRIDER_TEST_DEVICE=cuda
timeout 180 "$PYTHON" -m pytest tests/gpu tests/exact/test_tiny_target.py tests/exact/test_hybrid.py
timeout 300 "$PYTHON" -m tests.gpu.speed "$@"
