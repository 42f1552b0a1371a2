"""A gcloud that has one Cloud TPU pod: folders for its workers, and real shells that run what is sent to them.

  fake_gcloud.py ARGUMENTS, with FAKE=FOLDER in the environment

FOLDER/scenario.json says how many workers there are, how often there is no room (`stockouts`), which states a place in
the queue goes through (`queue`), and a message with which a request is refused. What was asked stands in calls.jsonl.
`state` holds the pod's state; an experiment may write PREEMPTED into it, after which nobody reaches a worker. Refusals
are worded as gcloud 528 words them.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

FAKE = pathlib.Path(os.environ["FAKE"])
SCENARIO = json.loads((FAKE / "scenario.json").read_text())
STATE = FAKE / "state"


def main(arguments):
  with open(FAKE / "calls.jsonl", "a", encoding="utf-8") as file:
    file.write(json.dumps(arguments) + "\n")
  assert arguments[:2] == ["compute", "tpus"], arguments
  kind, verb, *rest = arguments[2:]
  flags = dict(a.removeprefix("--").partition("=")[::2] for a in rest if a.startswith("--"))
  if verb in ("ssh", "scp") and not STATE.exists():
    print(f"ERROR: (gcloud.compute.tpus.{kind}.{verb}) NOT_FOUND: there is no such node", file=sys.stderr)
    return 1
  return globals()[f"do_{verb}"](kind, [a for a in rest if not a.startswith("--")], flags)


def do_describe(kind, names, flags):
  del flags
  if not STATE.exists():
    print(f"ERROR: (gcloud.compute.tpus.{kind}.describe) NOT_FOUND: Resource {names[0]} was not found", file=sys.stderr)
    return 1
  state = STATE.read_text().strip()
  if kind == "queued-resources":
    queue = SCENARIO.get("queue", [])
    looks = count("looks")
    place = queue[looks] if looks < len(queue) else "SUSPENDED" if state == "PREEMPTED" else "ACTIVE"
    print(json.dumps({"state": {"state": place, **SCENARIO.get("details", {})}}))
  else:
    print(json.dumps({"state": state, "networkEndpoints": [{}] * SCENARIO["workers"]}))
  return 0


def do_create(kind, names, flags):
  del names, flags
  if count("creations") < SCENARIO.get("stockouts", 0):
    print(f'ERROR: (gcloud.compute.tpus.{kind}.create) {{\n  "code": 8,\n  "message": "There is no more capacity in '
          'the zone \\"us-east5-a\\"; you can try in another zone"\n}', file=sys.stderr)
    return 1
  if "refusal" in SCENARIO:
    print(f"ERROR: (gcloud.compute.tpus.{kind}.create) {SCENARIO['refusal']}", file=sys.stderr)
    return 1
  for worker in range(SCENARIO["workers"]):
    (FAKE / f"worker-{worker}").mkdir()
  STATE.write_text("READY")
  return 0


def do_delete(kind, names, flags):
  del kind, names, flags
  for worker in FAKE.glob("worker-*"):
    shutil.rmtree(worker)
  STATE.unlink()
  return 0


def do_scp(kind, names, flags):
  del kind
  here = names[-1]
  if here.endswith(":"):
    for worker in range(SCENARIO["workers"]):
      shutil.copy(names[0], FAKE / f"worker-{worker}")
    return 0
  source = FAKE / f"worker-{flags['worker']}" / names[0].partition(":")[2]
  assert "recurse" in flags and here.endswith("/") and pathlib.Path(here).is_dir()
  if not source.exists():
    print(f"scp: {source.name}: No such file or directory", file=sys.stderr)
    return 1
  shutil.copytree(source, pathlib.Path(here) / source.name, dirs_exist_ok=True)
  return 0


def do_ssh(kind, names, flags):
  del kind, names
  assert flags["worker"] == "all"
  codes = {}

  def run(worker):
    home = FAKE / f"worker-{worker}"
    code = subprocess.run(["bash", "-c", flags["command"]], cwd=home, start_new_session=True, check=False,
                          env=os.environ | {"HOME": str(home), "WORKER": str(worker)}).returncode
    code = 255 if STATE.read_text() == "PREEMPTED" or code < 0 else code
    if code and SCENARIO["workers"] > 1:
      print(f"##### Command execution on worker {worker} failed with exit status {code}. Continuing.",
            file=sys.stderr, flush=True)
    codes[worker] = code

  threads = [threading.Thread(target=run, args=(worker,)) for worker in range(SCENARIO["workers"])]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return next((code for _, code in sorted(codes.items()) if code), 0)


def count(name):
  """How often this was asked before."""
  path = FAKE / name
  before = int(path.read_text()) if path.exists() else 0
  path.write_text(str(before + 1))
  return before


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
