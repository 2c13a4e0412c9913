#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest. Example: scripts/test.sh tests/test_machine.py -k quota
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --test
# Not "python -m pytest": that puts the checkout in front of the installed package, and it lacks the native library.
exec .venv/bin/pytest "$@"
