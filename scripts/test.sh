#!/usr/bin/env bash
# Lint, format, types, import order, then doctests and tests. Arguments go to pytest: `-m slow` for the slow suite.
source "$(dirname "$0")/environment.sh" dev
export PATH="$PWD/.venv/bin:$PATH"
echo "== lint";         ruff check .
echo "== format";       ruff format --check .
echo "== types";        mypy
echo "== import order"; lint-imports
echo "== tests";        exec python -m pytest "$@"
