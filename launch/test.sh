#!/usr/bin/env bash
# The whole test suite: makes .venv if needed, installs the test extra, runs pytest. See launch/environment.sh for
# PYTHON and VENV. Further arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test
"$VENV/bin/python" -m pytest "$@"
