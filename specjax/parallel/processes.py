"""One program in several processes: they find each other, make sure that they run the same, and one of them writes.

JAX's own runtime (`jax.distributed`) carries it. Every process runs the same program over the same input; a host
decides nothing on its own, or it asks the first one (`from_first`). What is said between hosts goes through the store
of the runtime and touches no device, so that it works before a backend starts and after one has failed. Without
`start` there is one process, the first, and nothing here does anything.
"""
import hashlib
import itertools
import json
import os
import socket
import threading
import time
from typing import Any

import jax
from jax._src import clusters
from jax._src import distributed
from jax.experimental import multihost_utils
import numpy as np

# The store and the barriers have no public door; orbax enters by this one as well. They wait as long as it takes: that
# a process has died is noticed by its missing heartbeats, and that it has failed by `failures`.
FOREVER_MS = 30 * 24 * 3600 * 1000
_SLACK = 3600  # seconds that jax's own timeout stands behind ours, which says more than a stack trace
_CALLS = itertools.count()  # of this module's questions: every process asks the same ones in the same order


def start(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None, *,
          timeout: float = 300, heartbeat: float = 60, autodetect: bool = True) -> None:
  """Joins the other processes; to be called before any device is touched. Returns when all of them have come.

  Args:
    coordinator: "HOST:PORT", where process 0 listens and all others find it; JAX_COORDINATOR_ADDRESS of the
      environment by default.
    num_processes, process_id: how many there are, and which one this is, from 0.
    timeout: seconds to wait for the coordinator and for the other processes.
    heartbeat: seconds after which a process that gives no sign of life is taken for dead, and all others abort.
    autodetect: what is not given is taken from the cluster (`detected`). Slurm and Open MPI show each process one GPU.

  Raises:
    ValueError: for settings that are missing or wrong; a coordinator that does not answer, or processes that do not
      come, with the address and the timeout. The process should then end (`failures.leave`): the runtime cannot be
      started a second time.
  """
  coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
  cluster = detected() if autodetect and None in (coordinator, num_processes, process_id) else None
  if cluster is not None:
    coordinator, num_processes, process_id = _of_cluster(cluster, coordinator, num_processes, process_id, timeout)
  check(coordinator, num_processes, process_id)
  host, port = coordinator.rsplit(":", 1)
  where = f"--coordinator={coordinator}, --process_id={process_id}"
  # The service would take SIGTERM, with which schedulers end or preempt a job, and let the program go on.
  jax.config.update("jax_enable_preemption_service", False)
  end, failed = time.monotonic() + timeout, []

  def initialize():
    try:
      jax.distributed.initialize(
          coordinator, num_processes, process_id, initialization_timeout=int(timeout) + _SLACK,
          heartbeat_timeout_seconds=max(1, round(heartbeat)),
          cluster_detection_method=None if autodetect else "deactivate")
    except Exception as error:  # pylint: disable=broad-exception-caught
      failed.append(error)

  # JAX aborts the process where its timeout passes; a thread that is waited for leaves it to us to say what is wrong.
  thread = threading.Thread(target=initialize, daemon=True)
  if process_id == 0:
    _check_free(int(port), where)
    thread.start()
  while not failed and not _answers(host.strip("[]"), int(port)):
    if time.monotonic() > end:
      raise ValueError(
          f"{where}: the coordinator did not answer within {timeout:g} s; " +
          ("is that this machine, at a port that others reach?" if process_id == 0 else
           "start process 0 there, or raise --coordinator_timeout"))
    time.sleep(0.1)
  if process_id != 0:
    thread.start()
  thread.join(max(0.0, end - time.monotonic()))
  if failed:
    raise ValueError(f"{where}: {failed[0]}") from failed[0]
  if thread.is_alive():
    there = "is there" if _answers(host.strip("[]"), int(port)) else "was there and has gone"
    raise ValueError(f"{where}: the coordinator {there}, and not all {num_processes} processes came within "
                     f"{timeout:g} s; start each of them once, with --process_id=0 to {num_processes - 1}, or raise "
                     "--coordinator_timeout")


def detected() -> type[clusters.ClusterEnv] | None:
  """The kind of cluster, as JAX knows it, in which this is one of several processes; None for a process alone.

  Of Slurm that is a task of an `srun` with several, not the script or the shell that runs it; of Kubernetes a pod of an
  indexed Job. A Cloud TPU host asks its metadata server, a pod its cluster; all else is in the environment.

  Raises:
    ValueError: the cluster does not answer.
  """
  for kind in clusters.ClusterEnv._cluster_types:  # pylint: disable=protected-access
    # A notebook in a pod is no job: JAX would ask the cluster, and warn of a package that is not installed.
    alone = kind.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in os.environ
    alone |= kind.name == "slurm" and os.environ.get("SLURM_STEP_NUM_TASKS") == "1"  # the script of sbatch
    if not alone and not kind.opt_in_only_method and kind.is_env_present():
      return kind if _ask(kind, kind.get_process_count) > 1 else None
  return None


def check(coordinator, num_processes, process_id) -> None:
  """Raises ValueError for settings of `start` that are incomplete or wrong; names the flag."""
  given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
  missing = [name for name, value in given.items() if value is None]
  if missing:
    known = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    raise ValueError(f"{known or 'several processes'}: {' and '.join(missing)} must be given as well; this is no task "
                     "of a cluster (Slurm, Open MPI, Cloud TPU, Kubernetes) that would tell")
  host, colon, port = coordinator.rpartition(":")
  if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
    raise ValueError(f"--coordinator={coordinator} is not HOST:PORT, with a port of 1 to 65535")
  if num_processes < 1:
    raise ValueError(f"--num_processes={num_processes}: it must be 1 or more")
  if not 0 <= process_id < num_processes:
    raise ValueError(f"--process_id={process_id}: with --num_processes={num_processes} it must be 0 to "
                     f"{num_processes - 1}")


def index() -> int:
  """Which process this is, from 0."""
  return distributed.global_state.process_id


def count() -> int:
  """How many processes there are."""
  return distributed.global_state.num_processes


def is_first() -> bool:
  """Whether this is the process that writes files and prints."""
  return index() == 0


def store():
  """The runtime's client, with its key-value store and barriers; None for a process alone."""
  return distributed.global_state.client


def from_first(value: Any) -> Any:
  """What the first process gives here, for all of them; all must call it, others may give anything.

  Args:
    value: JSON-ready.
  """
  if store() is None or count() == 1:
    return value
  key = f"specjax/from_first/{next(_CALLS)}"
  if is_first():
    store().key_value_set(key, json.dumps(value))
    return value
  return json.loads(store().blocking_key_value_get(key, FOREVER_MS))


def same_everywhere(facts: dict) -> None:
  """Compares what should be the same in every process; all must call it.

  Only a hash of each goes to everyone; values follow where hashes differ.

  Args:
    facts: by name, JSON-ready; names as a user knows them, such as "--seed".

  Raises:
    ValueError: in every process, the same: names what differs, and each value with the processes that have it.
  """
  if store() is None or count() == 1:
    return
  text = json.dumps(facts, sort_keys=True)
  folder = f"specjax/same/{next(_CALLS)}"
  store().key_value_set(f"{folder}/facts/{index()}", text)
  store().key_value_set(f"{folder}/hash/{index()}", hashlib.sha256(text.encode()).hexdigest())
  store().wait_at_barrier(folder, FOREVER_MS)
  owners = {}
  for key, found in store().key_value_dir_get(f"{folder}/hash/"):
    owners.setdefault(found, []).append(int(key.rpartition("/")[2]))
  if len(owners) == 1:
    return
  owners = sorted(map(sorted, owners.values()))
  known = [json.loads(store().blocking_key_value_get(f"{folder}/facts/{who[0]}", FOREVER_MS)) for who in owners]
  raise ValueError("processes differ, and must not: " + "; ".join(_differences(owners, known)))


def fetch(tree: Any) -> Any:
  """NumPy arrays of the arrays of a pytree, whole in every process; all must call it with the same tree.

  What lies on this process's devices, or is whole on each device, is read there; the rest is gathered.
  """
  return jax.tree.map(_fetch, tree)


def place(tree: Any, shardings: Any) -> Any:
  """Arrays that every process has whole, on devices of all of them; each process copies what its own devices hold.

  In several processes `jax.device_put` gathers every array first, to see that it is the same everywhere: all weights
  would go over the network. Here that is the caller's care.

  Args:
    tree: arrays, NumPy's or of this process's devices.
    shardings: a tree of shardings, or one for all.
  """
  if count() == 1:
    return jax.device_put(tree, shardings)
  if isinstance(shardings, jax.sharding.Sharding):
    shardings = jax.tree.map(lambda _: shardings, tree)
  return jax.tree.map(_place, tree, shardings)


def _place(leaf, sharding):
  if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
    return jax.random.wrap_key_data(_place(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
  whole = np.asarray(leaf)
  return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])


def _fetch(leaf):
  if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
    return np.asarray(leaf)
  if leaf.is_fully_replicated:
    return np.asarray(leaf.addressable_data(0))
  return multihost_utils.process_allgather(leaf, tiled=True)


def _of_cluster(kind, coordinator, num_processes, process_id, timeout):
  """The three settings, those that are not given as the cluster has them."""
  if coordinator is None:
    port = os.environ.get("JAX_COORDINATOR_PORT")
    coordinator = _ask(kind, lambda: kind.get_coordinator_address(int(timeout), port))
  return (coordinator, _ask(kind, kind.get_process_count) if num_processes is None else num_processes,
          _ask(kind, kind.get_process_id) if process_id is None else process_id)


def _ask(kind, question):
  try:
    return question()
  except (RuntimeError, KeyError) as error:
    raise ValueError(f"this is a task of a {kind.__name__}, which does not tell where the others are ({error}); give "
                     "--coordinator, --num_processes and --process_id, or --distributed=off for a process alone"
                     ) from error


def _check_free(port, where):
  """Raises ValueError for a port that the coordinator cannot have: jaxlib 0.10.1 crashes there now and then."""
  try:
    socket.create_server(("", port)).close()
  except OSError as error:
    raise ValueError(f"{where}: port {port} of this machine cannot be listened at ({error.strerror}); is it taken by "
                     "another program? choose another") from error


def _answers(host, port):
  try:
    socket.create_connection((host, port), timeout=5).close()
  except OSError:  # a name that is not known yet, as that of a pod, is one as well
    return False
  return True


def _differences(owners, known):
  """A text for each fact that differs."""
  for name in sorted(set().union(*known)):
    values = {}
    for processes, facts in zip(owners, known, strict=True):
      values.setdefault(json.dumps(facts[name]) if name in facts else "not there", []).extend(processes)
    if len(values) > 1:
      yield f"{name} is " + ", ".join(f"{value} in {_processes(who)}" for value, who in values.items())


def _processes(who):
  shown = [str(process) for process in sorted(who)]
  if len(shown) > 8:
    shown[8:] = [f"{len(shown) - 8} more"]
  return f"process {shown[0]}" if len(shown) == 1 else f"processes {', '.join(shown)}"
