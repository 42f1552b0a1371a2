#!/usr/bin/env bash
# A sweep on a real Slurm: one controller and one node on loopback, started here and ended here, without systemd,
# cgroups or a file outside a temporary folder. Six points are submitted; in the middle of its work one is killed, one
# is told that its time is over, and one is put back into the queue by Slurm. The second submission must take the killed
# one alone, all three must go on where they were, and all six must be collected. Needs root and Debian's slurm-wlm and
# munge, which it installs by apt-get if it can; without them it says why it is skipped, and ends with exit code 0. See
# launch/environment.sh for PYTHON and VENV. Takes three minutes on two cores.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export PATH=$PATH:/usr/sbin:/sbin
folder=
skip() { echo "skipped: $*"; rm -rf "$folder"; exit 0; }
[ "$(id -u)" = 0 ] || skip "the daemons of Slurm run as root here; this is $(id -un)"
folder=$(mktemp -d "${TMPDIR:-/tmp}/specjax-slurm.XXXXXX")
echo "== logs: $folder"
missing() {
  local program
  for program in slurmctld slurmd sbatch srun squeue munged; do command -v $program >/dev/null || echo $program; done
}
if [ -n "$(missing)" ]; then
  command -v apt-get >/dev/null || skip "no apt-get to install slurm-wlm and munge with"
  echo "== installing slurm-wlm and munge"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge; } >"$folder/apt.log" 2>&1 ||
    skip "apt-get could not install slurm-wlm and munge: $(tail -n 1 "$folder/apt.log")"
fi
[ -z "$(missing)" ] || skip "$(missing | head -n 1) was not found"
prepare launch

wait_for() { # wait_for SECONDS WHAT COMMAND...: until the command succeeds
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ $SECONDS -lt $end ] || { echo "error: waited in vain for $what" >&2; return 1; }
    sleep 0.2
  done
}
empty() { [ -z "$(squeue --noheader 2>>"$folder/squeue.log")" ]; }
pids=()
ended() { # also after a failure: the jobs first, then the daemons that were started here, munge last
  local code=$? number
  trap - EXIT
  set +e
  if [ ${#pids[@]} = 3 ] && ! empty; then
    scancel --state=PENDING --user=root
    scancel --signal=KILL --full --user=root
    wait_for 30 "the end of all jobs" empty
  fi >>"$folder/cancel.log" 2>&1
  for number in 2 1 0; do
    [ -n "${pids[number]:-}" ] || continue
    kill "${pids[number]}" 2>/dev/null
    wait "${pids[number]}" 2>/dev/null
  done
  if [ $code = 0 ]; then rm -rf "$folder" && echo ok; else echo "FAILED with exit code $code; logs: $folder"; fi
  exit $code
}
trap ended EXIT
trap 'exit 130' INT TERM

host=$(hostname -s) python=$PWD/$VENV/bin/python
[ "${VENV#/}" = "$VENV" ] || python=$VENV/bin/python
read -r port node_port < <("$python" - <<'PYTHON'
import socket
free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in free))
PYTHON
)
mkdir -m 700 "$folder/munge" "$folder/controller" "$folder/node"
(umask 077 && head -c 128 /dev/urandom >"$folder/munge/key")
export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<TEXT
ClusterName=specjax
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$node_port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
StateSaveLocation=$folder/controller
SlurmdSpoolDir=$folder/node
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
TEXT

echo "== starting munge, slurmctld and slurmd $(slurmd -V | cut -d' ' -f2) on loopback"
munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
  --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
  >"$folder/munge/out" 2>&1 & pids+=($!)
wait_for 20 "munge" test -S "$folder/munge/socket"
slurmctld -D -f "$SLURM_CONF" >"$folder/slurmctld.out" 2>&1 & pids+=($!)
slurmd -D -f "$SLURM_CONF" >"$folder/slurmd.out" 2>&1 & pids+=($!)
idle() { [ "$(sinfo --noheader --format=%t 2>>"$folder/sinfo.log")" = idle ]; }
wait_for 60 "an idle node" idle
sinfo

# Ten seconds and more of short requests a point, so that there is a middle to be stopped in.
out=$folder/results
for number in $(seq 40); do
  echo "{\"id\": \"$number\", \"category\": \"chat\", \"lang\": \"en\", \"prompt\": \"$number rivers\"}"
done >"$folder/requests.jsonl"
cat >"$folder/sweep.json" <<TEXT
{"experiment": "benchmark",
 "flags": {"target": "tests/fixtures/tiny_llama", "workload": "$folder/requests.jsonl", "methods": ["plain"],
           "temperature": 0.8, "max_new_tokens": 64, "repeats": 12, "costs": false},
 "points": {"product": {"seed": [0, 1, 2], "top_p": [0.95, 0.8]}}}
TEXT
export JAX_PLATFORMS=cpu
submit() { "$python" launch/slurm_sweep.py --sweep="$folder/sweep.json" --outdir="$out" --time=30 --cpus_per_task=1 \
  --at_a_time=2 "$@"; }
collect() { "$python" -m experiments.collect --outdir="$out"; }
field() { "$python" -c 'import json, sys; print(json.load(open(sys.argv[1])).get(sys.argv[2]))' "$1" "$2"; }
told() { field "$out/${names[$1]}.status.json" "$2"; }
job() { field "$out/slurm/submitted.json" "${names[$1]}"; }
records() { cat "$out/${names[$1]}/requests.jsonl" 2>/dev/null | wc -l; }
midway() { [ "$(records "$1")" -ge 80 ]; }
went_on() {
  [ "$(told "$1" resumed) $(told "$1" exit_code)" = "True 0" ] ||
    fail "point $1 did not go on: $(cat "$out/${names[$1]}.status.json")"
}
fail() { echo "error: $*" >&2; exit 1; }

echo "== the first submission"
submit
mapfile -t names < <("$python" -c 'import json, sys
for point in json.load(open(sys.argv[1]))["points"]: print(point["name"])' "$out/sweep.json")
wait_for 600 "point 0 to be in the middle" midway 0
echo "== point 0 (${names[0]}) has $(records 0) records: its process $(told 0 pid) is killed"
kill -9 "$(told 0 pid)"
wait_for 600 "point 1 to be in the middle" midway 1
echo "== point 1 (${names[1]}) has $(records 1) records: Slurm tells job $(job 1) that its time is over"
# scancel asks again and again, and then complains, if the job is already on its way back into the queue.
timeout 5 scancel --signal=USR2 "$(job 1)" 2>>"$folder/cancel.log" || true
wait_for 600 "point 2 to be in the middle" midway 2
echo "== point 2 (${names[2]}) has $(records 2) records: Slurm takes the node from job $(job 2), and queues it again"
scontrol requeue "$(job 2)"
wait_for 1200 "the queue to be empty" empty
echo "== what there is"
collect && fail "point 0 was killed, and nothing was missing"
went_on 1
went_on 2

echo "== the second submission"
submit | tee "$folder/second"
grep -q "^1 of 6 points submitted" "$folder/second" || fail "the killed point alone was to be submitted"
wait_for 600 "the queue to be empty" empty
went_on 0
echo "== the third submission"
submit | tee "$folder/third"
grep -q "^0 of 6 points submitted" "$folder/third" || fail "nothing was to be submitted"
collect
for point in 0 1 2 3 4 5; do
  [ "$(records $point)" = "$(records 5)" ] || fail "point $point has $(records $point) records, point 5 $(records 5)"
done
