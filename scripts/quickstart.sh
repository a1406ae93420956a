#!/usr/bin/env bash
# Train a GPT of 5 million parameters on the book in data/ and show what it learned. Flags are passed on: see --help.
source "$(dirname "$0")/environment.sh" train
exec .venv/bin/python scripts/pretrain_gpt.py --config quickstart --save "runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
