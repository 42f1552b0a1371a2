#!/usr/bin/env bash
# One worker's part in what launch/tpu_pod.py does on every worker of a Cloud TPU pod at once.
#   tpu_worker.sh prepare 3.12          installs specjax with the tpu extra; uv brings Python if it is missing
#   tpu_worker.sh run LABEL COMMAND...  runs a command; its lines go to logs/LABEL.log, and out with the worker's number
#   tpu_worker.sh stop                  ends what still runs: a TPU serves one process at a time
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
  [ -f logs/group ] || return 0
  local group
  group=$(cat logs/group)
  rm -f logs/group
  kill -TERM -- "-$group" 2>/dev/null || return 0
  sleep "${STOP_SECONDS:-5}"
  kill -KILL -- "-$group" 2>/dev/null || true
}

case ${1:-} in
  prepare)
    PYTHON=python$2  # images of TPU machines come with an older one
    VENV=.venv-$2
    if ! command -v "$PYTHON" >/dev/null; then
      uv=~/.local/bin/uv
      python3 -m pip install --user --quiet --disable-pip-version-check uv && "$uv" python install --quiet "$2" &&
        PYTHON=$("$uv" python find "$2") || { echo "error: Python $2 cannot be installed here" >&2; exit 2; }
    fi
    source launch/environment.sh
    prepare tpu
    ;;
  run)
    label=$2
    shift 2
    stop
    mkdir -p logs
    # The number that Cloud TPU gives this worker, which is its rank in jax.distributed too.
    number=$(curl -sf -H "Metadata-Flavor: Google" \
      http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number) ||
      { echo "error: $(hostname) is no worker of a TPU: it has no agent-worker-number" >&2; exit 2; }
    ps -o pgid= -p $$ | tr -d ' ' >logs/group
    "$@" 2>&1 | tee "logs/$label.log" | sed -u "s/^/[worker $number] /"
    code=${PIPESTATUS[0]}
    rm -f logs/group
    exit "$code"
    ;;
  stop)
    stop
    ;;
  *)
    echo "usage: tpu_worker.sh prepare PYTHON | run LABEL COMMAND... | stop" >&2
    exit 2
    ;;
esac
