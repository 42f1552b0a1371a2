#!/usr/bin/env bash
# The whole test suite: makes .venv if needed, installs the test extra, runs pytest. See launch/environment.sh for
# PYTHON and VENV. Further arguments go to pytest. Files are shared among a process a core, at most four, as each needs
# several GB; -n 0 runs them in this one. A process that dies ends the run: started anew it has been seen to wait for ever.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test
"$VENV/bin/python" -m pytest -n logical --maxprocesses=4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"
