"""Processes that find each other, agree, and end together: real ones, on the CPU, and what a process alone does."""
import json
import os
import socket

import jax
from jax._src.clusters import cloud_tpu_cluster
import jax.numpy as jnp
import numpy as np
import pytest

import many_processes
from specjax.parallel import failures
from specjax.parallel import processes

# A process: `python FILE COORDINATOR COUNT PROCESS`. What it prints is JSON.
HEAD = """
import json, os, sys, time
import jax
import numpy as np
from jax.experimental import multihost_utils
from specjax.parallel import failures, processes
coordinator, count, process = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
processes.start(coordinator, count, process, timeout=60, heartbeat=5)
failures.watch()
gather = lambda: multihost_utils.process_allgather(np.ones(2))
"""

AGREE = HEAD + """
first = processes.from_first({"date": "today", "done": [0.1, None]} if process == 0 else "something else")
processes.same_everywhere({"--seed": 0, "--limit": None})
mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spread = lambda *axes: jax.make_array_from_callback(
    (8, 3), jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)),
    lambda place: np.arange(24, dtype=np.int32).reshape(8, 3)[place])
divided, whole = spread("data"), spread()
numbers = np.arange(24, dtype=np.int32).reshape(8, 3)
rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
keys = jax.random.split(jax.random.key(3), count)
placed = processes.place({"numbers": numbers, "keys": keys}, rows)
drawn = jax.jit(jax.vmap(jax.random.bits))(placed["keys"])
shown = [placed["numbers"].addressable_data(0).tolist(),
         processes.fetch(placed["numbers"]).tolist() == numbers.tolist(),
         processes.fetch(drawn).tolist() == jax.vmap(jax.random.bits)(keys).tolist()]
found = processes.fetch({"divided": divided, "whole": whole, "own": np.arange(3) + process, "number": 2.5})
try:
  more = {"--more": 1} if process else {}
  processes.same_everywhere({"--seed": 7 if process == 2 else 0, "--limit": None, **more})
  differ = None
except ValueError as error:
  differ = str(error)
print(json.dumps({
    "first": first, "alone": [divided.is_fully_addressable, whole.is_fully_addressable], "differ": differ,
    "placed": shown, "fetched": {name: [type(x).__name__, np.asarray(x).tolist()] for name, x in found.items()},
    "who": [processes.index(), processes.count(), processes.is_first()]}))
failures.finish()
"""

# One of four fails while one is in a collective, one asks the first process, and one is busy with something else.
BUSY = """
if process == 0: gather()
if process == 1: processes.from_first(None)
time.sleep(200)
"""
RAISES = HEAD + "if process == 3: failures.end('the lamp is broken', 5)\n" + BUSY
DIES = HEAD + "if process == 3: os._exit(9)\n" + BUSY
FIRST_RAISES = HEAD + "if process == 0: failures.end('the lamp is broken', 5)\ntime.sleep(200)\n"
FIRST_DIES = HEAD + """
processes.same_everywhere({})
if process == 0:
  time.sleep(0.5)
  os._exit(9)
time.sleep(200)
"""
IN_A_COLLECTIVE = HEAD + """
gather()
if process == 1: failures.end('the lamp is broken', 5)
try: gather()
except ValueError as error: failures.end(str(error), 2)
"""
ALL_FAIL = HEAD + "failures.end('no such file', 2)\n"
EARLY_END = HEAD + "failures._FINISH = 1\nif process == 1: failures.finish(4)\ntime.sleep(200)\n"
SLOW_END = HEAD + "if process == 0: time.sleep(2)\nfailures.finish()\nprint(process)\n"


# Settings of `start` that do not come about.
ALONE = """
import sys
from specjax.parallel import failures, processes
try:
  processes.start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), timeout=1.5)
except ValueError as error:
  print(error)
  failures.leave(2)
"""

# Name -> program, number of processes, those that are started.
CASES = {
    "agree": (AGREE, 4, range(4)), "raises": (RAISES, 4, range(4)), "dies": (DIES, 4, range(4)),
    "first raises": (FIRST_RAISES, 2, range(2)), "first dies": (FIRST_DIES, 2, range(2)),
    "in a collective": (IN_A_COLLECTIVE, 2, range(2)), "all fail": (ALL_FAIL, 2, range(2)),
    "early end": (EARLY_END, 2, range(2)), "slow end": (SLOW_END, 2, range(2)), "no coordinator": (ALONE, 2, [1]),
    "nobody comes": (ALONE, 2, [0]), "port taken": (ALONE, 2, [0]),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  """By name of a case, how its processes ended; and by "ports", the coordinators' ports."""
  folder, cases, ports = tmp_path_factory.mktemp("programs"), [], {}
  with socket.create_server(("", 0)) as taken:
    for name, (program, count, which) in CASES.items():
      path = folder / f"{name}.py"
      path.write_text(program)
      ports[name] = taken.getsockname()[1] if name == "port taken" else many_processes.free_port()
      cases.append(([[path, f"127.0.0.1:{ports[name]}", count, process] for process in which], ""))
    found = many_processes.run_all(cases, folder=folder, imports=(
        "specjax.parallel.failures", "jax.experimental.multihost_utils"))
  return dict(zip(CASES, found, strict=True)) | {"ports": ports}


def test_four_processes_agree(ended):
  ended = ended["agree"]
  numbers = np.arange(24).reshape(8, 3).tolist()
  for process, end in enumerate(ended):
    assert end.code == 0, end.err
    found = json.loads(end.out.splitlines()[-1])
    assert found["first"] == {"date": "today", "done": [0.1, None]}
    assert found["who"] == [process, 4, process == 0]
    assert found["alone"] == [False, False]
    assert found["placed"] == [numbers[2 * process:2 * process + 2], True, True]
    assert found["fetched"] == {"divided": ["ndarray", numbers], "whole": ["ndarray", numbers],
                                "own": ["ndarray", [process, process + 1, process + 2]], "number": ["ndarray", 2.5]}
    assert found["differ"] == (
        "processes differ, and must not: --more is not there in process 0, 1 in processes 1, 2, 3; "
        "--seed is 0 in processes 0, 1, 3, 7 in process 2")


def test_a_process_that_fails_ends_all(ended):
  ended = ended["raises"]
  assert [end.code for end in ended] == [5] * 4
  assert ended[3].err.strip().endswith("error: process 3 of 4: the lamp is broken")
  for process in range(3):
    assert f"error: process {process} of 4: process 3 failed: the lamp is broken" in ended[process].err


def test_the_first_process_stays_until_all_know_that_it_failed(ended):
  ended = ended["first raises"]
  assert [end.code for end in ended] == [5, 5]
  assert "error: process 1 of 2: process 0 failed: the lamp is broken" in ended[1].err


@pytest.mark.parametrize("name, dead", [("dies", 3), ("first dies", 0)])
def test_a_process_that_dies_ends_all(ended, name, dead):
  ended = ended[name]
  for process, end in enumerate(ended):
    assert end.code == 9 if process == dead else end.code != 0
    if process != dead:
      assert "another task died" in end.err or "error: process" in end.err


def test_who_waits_in_a_collective_is_told_the_cause(ended):
  ended = ended["in a collective"]
  assert ended[1].code == 5 and ended[0].code in (2, 5)
  assert "process 1 failed" in ended[0].err and "the lamp is broken" in ended[0].err


def test_all_that_fail_alike_say_so_themselves(ended):
  for process, end in enumerate(ended["all fail"]):
    assert end.code == 2
    assert end.err.strip().splitlines()[-1] == f"error: process {process} of 2: no such file"


def test_a_process_that_alone_ends_with_an_error_ends_all(ended):
  ended = ended["early end"]
  assert [end.code for end in ended] == [4, 4]
  assert "process 1 failed: ended with code 4, and the others did not" in ended[0].err


def test_processes_wait_for_each_other_at_the_end(ended):
  for process, end in enumerate(ended["slow end"]):
    assert (end.code, end.out.split()) == (0, [str(process)]), end.err


def test_a_coordinator_that_does_not_answer(ended):
  port, (end,) = ended["ports"]["no coordinator"], ended["no coordinator"]
  assert end.code == 2, end.err
  assert f"--coordinator=127.0.0.1:{port}" in end.out and "did not answer within 1.5 s" in end.out
  assert "--coordinator_timeout" in end.out


def test_processes_that_do_not_come(ended):
  end, = ended["nobody comes"]
  assert end.code == 2, end.err
  assert "not all 2 processes came within 1.5 s" in end.out and "--process_id=0 to 1" in end.out


def test_a_coordinator_whose_port_is_taken(ended):
  port, (end,) = ended["ports"]["port taken"], ended["port taken"]
  assert end.code == 2, end.err
  assert f"--coordinator=127.0.0.1:{port}" in end.out and "taken by another program" in end.out


@pytest.mark.parametrize("given, named", [
    (("host:1", None, None), ["--coordinator=host:1", "--num_processes and --process_id must be given"]),
    ((None, 2, 0), ["--num_processes=2, --process_id=0: --coordinator must be given"]),
    ((None, None, None), ["several processes: --coordinator"]),
    (("host", 2, 0), ["--coordinator=host is not HOST:PORT"]),
    (("host:0", 2, 0), ["--coordinator=host:0", "1 to 65535"]),
    (("host:x", 2, 0), ["--coordinator=host:x"]),
    ((":80", 2, 0), ["--coordinator=:80"]),
    (("host:80", 0, 0), ["--num_processes=0"]),
    (("host:80", 2, 2), ["--process_id=2", "--num_processes=2", "0 to 1"]),
    (("host:80", 2, -1), ["--process_id=-1"]),
])
def test_settings_that_are_wrong(monkeypatch, given, named):
  outside(monkeypatch)
  with pytest.raises(ValueError) as error:
    processes.start(*given)
  for part in named:
    assert part in str(error.value)
  assert not jax.distributed.is_initialized()


def outside(monkeypatch):
  """No cluster, whatever runs the tests."""
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR", "KUBERNETES_", "JOB_COMPLETION")):
      monkeypatch.delenv(name)


SLURM = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node[03-04],other", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
         "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("changes, several", [
    ({}, True),
    ({"SLURM_STEP_NUM_TASKS": "4"}, True),
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),  # a task alone, as of an array of independent points
    ({"SLURM_STEP_NUM_TASKS": "1"}, False),               # the script that sbatch runs
    ({"SLURM_PROCID": None}, False),                      # the shell of salloc
    ({"SLURM_STEP_NODELIST": None}, False),
])
def test_slurm_is_recognized(monkeypatch, changes, several):
  outside(monkeypatch)
  for name, value in (SLURM | changes).items():
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
  found = processes.detected()
  assert (found is not None) == several
  if several:  # what is given wins over what the cluster says
    assert processes._of_cluster(found, None, None, None, 1) == ("node03:61441", 4, 2)
    assert processes._of_cluster(found, "a:1", 8, 7, 1) == ("a:1", 8, 7)


@pytest.mark.parametrize("hosts, several", [("host0,host1", True), ("localhost", False)])
def test_a_tpu_pod_is_recognized(monkeypatch, hosts, several):
  outside(monkeypatch)
  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
  for name, value in {"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "1",
                      "MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}.items():
    monkeypatch.setenv(name, value)
  found = processes.detected()
  assert (found is not None) == several
  if several:
    assert processes._of_cluster(found, "host0:8482", None, None, 1) == ("host0:8482", 2, 1)


def test_a_notebook_in_a_pod_is_no_job(monkeypatch):
  outside(monkeypatch)
  monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
  assert processes.detected() is None


def test_a_cluster_that_does_not_tell(monkeypatch):
  outside(monkeypatch)
  for name, value in (SLURM | {"SLURM_NTASKS": "4"}).items():
    monkeypatch.setenv(name, value)
  kind = processes.detected()
  monkeypatch.setattr(kind, "get_process_id", classmethod(lambda cls: os.environ["NOT_THERE"]))
  with pytest.raises(ValueError, match="SlurmCluster.*NOT_THERE.*--coordinator.*--distributed=off"):
    processes._of_cluster(kind, None, None, None, 1)


def test_a_process_alone_is_the_first_and_waits_for_nobody():
  assert (processes.index(), processes.count(), processes.is_first(), processes.store()) == (0, 1, True, None)
  value = object()
  assert processes.from_first(value) is value
  assert processes.same_everywhere({"--seed": 0}) is None
  assert failures.watch() is None
  assert failures.finish() is None
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  assert processes.place([np.arange(3)], here)[0].tolist() == [0, 1, 2]
  found = processes.fetch((jnp.arange(3), 4, None))
  assert isinstance(found[0], np.ndarray) and found[0].tolist() == [0, 1, 2] and found[1] == 4 and found[2] is None
  assert not jax.distributed.is_initialized()
