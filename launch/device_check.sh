#!/usr/bin/env bash
# One short check of a machine, at most six minutes once the environment is there: exactness, step costs by width in
# bfloat16, plain and speculative tokens/s of a model with random weights and SYNTHETIC acceptance, beside the bound of
# the memory's bandwidth. Makes the environment with JAX for the machine (NVIDIA, TPU or CPU) and writes one JSON file.
# Further arguments are flags of experiments.device_check. See launch/environment.sh for PYTHON and VENV.
#
#   launch/device_check.sh device.json
#   launch/device_check.sh device.json --size=8b --rows=8
#
# EXTRA (cuda, tpu or none) chooses what is installed; by default what the machine has: an NVIDIA driver that lists a
# GPU, /dev/accel* or a TPU's variables. Newer TPU machines may show neither: set EXTRA=tpu. BOUND (360): seconds behind
# which the process is stopped.
here=$PWD  # the output's path is seen from here, and environment.sh changes the folder
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case ${1:-} in
  "" | -*) echo "usage: launch/device_check.sh OUTPUT.json [--size=auto] [--acceptance=0.8,0.7,0.6] ..." >&2; exit 2 ;;
  /*) output=$1 ;;
  *) output=$here/$1 ;;
esac
shift
if [ -z "${EXTRA:-}" ]; then
  EXTRA=none
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    EXTRA=cuda
  elif compgen -G "/dev/accel*" >/dev/null || [ -n "${TPU_NAME:-}${TPU_WORKER_ID:-}${TPU_ACCELERATOR_TYPE:-}" ]; then
    EXTRA=tpu
  fi
fi
case $EXTRA in
  none) prepare "" ;;
  cuda | tpu) prepare "$EXTRA" ;;
  *) echo "error: EXTRA=$EXTRA; allowed are cuda, tpu and none" >&2; exit 2 ;;
esac
echo "== checking the device (JAX for: $EXTRA)"
# A compilation cannot be interrupted from inside: past the bound the process is, and the file holds what it had found.
exec timeout --signal=INT --kill-after=10 "${BOUND:-360}" \
  "$VENV/bin/python" -m experiments.device_check --output="$output" "$@"
