"""Runs a sweep, or one experiment, as JobSets on a GKE cluster: TPU slices or GPU nodes, one slice or group a point.

  python launch/gke.py --name=tokens --image=IMAGE --tpu=v6e --topology=4x4 --results=gs://bucket/specjax \
    --sweep=launch/sweeps/draft_tokens.json
  python launch/gke.py --name=bench --image=IMAGE --gpu=nvidia-h100-80gb --nodes=2 --results=pvc:results -- \
    experiments.benchmark --mesh=data:2,model:8

Results go to /results/NAME/POINT on a bucket or a volume that all pods share. The same command again tells how far the
points are and launches those that failed or are not there. --dry_run prints the manifest and what would be run, --xpk
the same points as lines of xpk, for clusters that it made.
"""
import json
import math
import pathlib
import re
import shlex
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags  # pylint: disable=wrong-import-position
import jinja2  # pylint: disable=wrong-import-position

from experiments.harness import sweep_file  # pylint: disable=wrong-import-position
from launch import program  # pylint: disable=wrong-import-position
from launch import shell as shell_lib  # pylint: disable=wrong-import-position

# Node label of each TPU, xpk's name of it, and what that counts a chip: v4 and v5p are named by their two cores.
_TPUS = {"v4": ("tpu-v4-podslice", "v4", 2), "v5e": ("tpu-v5-lite-podslice", "v5litepod", 1),
         "v5p": ("tpu-v5p-slice", "v5p", 2), "v6e": ("tpu-v6e-slice", "v6e", 1)}
_STATES = {"Completed": "done", "Failed": "failed"}
_NAME = flags.DEFINE_string("name", None, "Name of this sweep in the cluster, and of its folder of results.")
_NAMESPACE = flags.DEFINE_string("namespace", "default", "Namespace of the cluster.")
_IMAGE = flags.DEFINE_string("image", None, "Image made by launch/Dockerfile.")
_TPU = flags.DEFINE_enum("tpu", None, list(_TPUS), "Kind of TPU.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "Its slice, such as 4x4, as the node pool has it.")
_CHIPS = flags.DEFINE_integer("chips_per_node", 4, "TPU chips of a node of the pool (8 on ct5lp-hightpu-8t and its "
                              "like).", lower_bound=1)
_GPU = flags.DEFINE_string("gpu", None, "Kind of GPU instead, as in the label cloud.google.com/gke-accelerator.")
_GPUS = flags.DEFINE_integer("gpus_per_node", 8, "GPUs of a node.", lower_bound=1)
_NODES = flags.DEFINE_integer("nodes", 1, "GPU nodes of a point, with a process each.", lower_bound=1)
_SPOT = flags.DEFINE_bool("spot", False, "Run on spot nodes.")
_QUEUE = flags.DEFINE_string("queue", None, "Kueue's local queue, if the cluster has one.")
_RESULTS = flags.DEFINE_string("results", None, "Where results go: gs://BUCKET/FOLDER, or pvc:CLAIM of a volume that "
                               "many nodes may write.")
_ACCOUNT = flags.DEFINE_string("service_account", None, "Kubernetes account that may write to the bucket.")
_RESTARTS = flags.DEFINE_integer("max_restarts", 3, "Times that a point is started again after it failed or was "
                                 "preempted; it goes on where it was, if its experiment can.", lower_bound=0)
_SWEEP = flags.DEFINE_string("sweep", None, "Sweep file.")
_DRY = flags.DEFINE_bool("dry_run", False, "Print the manifest and the command and do nothing else.")
_XPK = flags.DEFINE_string("xpk", None, "Print the points as lines of `xpk workload create` for this cluster instead.")


def sweep_text(line: list[str]) -> str:
  """The sweep of the flags as a file's content; a line of an experiment is a sweep of one point.

  Raises:
    ValueError: there is neither, or both, or the line is none; says what to give.
  """
  if bool(_SWEEP.value) == bool(line):
    raise ValueError("give either --sweep=FILE or, behind --, an experiment with its flags: -- experiments.benchmark "
                     "--methods=plain,ngram")
  if _SWEEP.value:
    try:
      return pathlib.Path(_SWEEP.value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f"--sweep={_SWEEP.value}: cannot be read ({error})") from error
  line = line[2:] if line[:2] == ["python", "-m"] else line
  found = {}
  for flag in line[1:]:
    name, given, value = flag.removeprefix("--").partition("=")
    if not flag.startswith("--") or not name:
      raise ValueError(f"behind -- stands {flag!r}; give flags as --name=value")
    # As absl has it: --name is true and --noname false.
    off = not given and name.startswith("no")
    found[name.removeprefix("no") if off else name] = value if given else "false" if off else "true"
  return json.dumps({"experiment": line[0].removeprefix("experiments."), "flags": found,
                     "points": {"list": [{"name": "run"}]}})


def read(text: str) -> sweep_file.Sweep:
  """Expands the sweep that `sweep_text` gave.

  Raises:
    ValueError: as `sweep_file.read`.
  """
  if _SWEEP.value:
    return sweep_file.read(_SWEEP.value)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "line.json"
    path.write_text(text, encoding="utf-8")
    try:
      return sweep_file.read(str(path))
    except ValueError as error:
      raise ValueError(f"behind --: {str(error).removeprefix(f'--sweep={path}: ')}") from error


def settings() -> dict:
  """What the manifest says of nodes and of the volume, from the flags.

  Raises:
    ValueError: a flag is missing or malformed; names it.
  """
  if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", _NAME.value or ""):
    raise ValueError(f"--name={_NAME.value}: give small letters, digits and hyphens, a letter first, at most 40")
  if not _IMAGE.value:
    raise ValueError("--image is needed: build launch/Dockerfile and push it where the cluster can read it")
  if bool(_TPU.value) == bool(_GPU.value):
    raise ValueError(f"give one of --tpu={'|'.join(_TPUS)} and --gpu=nvidia-h100-80gb or its like")
  spot = {"cloud.google.com/gke-spot": "true"} if _SPOT.value else {}
  if _TPU.value:
    if not re.fullmatch(r"\d+x\d+(x\d+)?", _TOPOLOGY.value or ""):
      raise ValueError(f"--topology={_TOPOLOGY.value}: give the slice of the node pool, such as 4x4 or 2x2x4")
    chips = _chips()
    if chips > _CHIPS.value and chips % _CHIPS.value:
      raise ValueError(f"--topology={_TOPOLOGY.value} has {chips} chips, which is no multiple of --chips_per_node="
                       f"{_CHIPS.value}")
    nodes = {"tpu": True, "processes": max(1, chips // _CHIPS.value), "resource": "google.com/tpu",
             "chips": min(chips, _CHIPS.value),
             "selector": {"cloud.google.com/gke-tpu-accelerator": _TPUS[_TPU.value][0],
                          "cloud.google.com/gke-tpu-topology": _TOPOLOGY.value, **spot}}
  else:
    nodes = {"tpu": False, "processes": _NODES.value, "resource": "nvidia.com/gpu", "chips": _GPUS.value,
             "selector": {"cloud.google.com/gke-accelerator": _GPU.value, **spot}}
  match = re.fullmatch(r"gs://([^/]+)/?(.*?)/?|pvc:([-a-z0-9.]+)", _RESULTS.value or "")
  if not match:
    raise ValueError(f"--results={_RESULTS.value}: give gs://BUCKET/FOLDER, or pvc:CLAIM")
  options = ["implicit-dirs", "uid=1000", "gid=1000", *([f"only-dir={match[2]}"] if match[2] else [])]
  return nodes | {"name": _NAME.value, "namespace": _NAMESPACE.value, "image": _IMAGE.value, "queue": _QUEUE.value,
                  "spot": _SPOT.value, "service_account": _ACCOUNT.value, "max_restarts": _RESTARTS.value,
                  "bucket": match[1], "claim": match[3], "mount_options": ",".join(options)}


def manifest(sweep: sweep_file.Sweep, text: str, numbers: list[int]) -> str:
  """The YAML of the sweep's file, and of a JobSet for each of these points.

  Raises:
    ValueError: see `settings`.
  """
  environment = jinja2.Environment(loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
                                   undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
  environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
  points = [{"jobset": jobset(number), "name": sweep.points[number].name, "line": line(sweep, number),
             "command": ["bash", "launch/gke_worker.sh", "point", f"/results/{_NAME.value}", str(number)]}
            for number in numbers]
  return environment.get_template("jobset.yaml.j2").render(points=points, sweep_text=text, **settings())


def jobset(number: int) -> str:
  """Name of the JobSet of a point."""
  return f"{_NAME.value}-{number}"


def line(sweep: sweep_file.Sweep, number: int) -> str:
  """The experiment's line of a point, as a shell takes it."""
  return shlex.join(sweep.command(sweep.points[number], f"/results/{_NAME.value}"))


def xpk_lines(sweep: sweep_file.Sweep) -> list[str]:
  """`xpk workload create` for each point; results need a storage that xpk attached at /results."""
  given = settings()
  if given["tpu"]:
    _, kind, times = _TPUS[_TPU.value]
    device = [f"--tpu-type={kind}-{_chips() * times}", "--num-slices=1"]
  else:
    device = [f"--device-type={_GPU.value.removeprefix('nvidia-')}-{_GPUS.value}", f"--num-nodes={_NODES.value}"]
  return [shlex.join(["xpk", "workload", "create", f"--cluster={_XPK.value}", f"--workload={jobset(point.number)}",
                      *device, f"--docker-image={_IMAGE.value}", f"--max-restarts={_RESTARTS.value}",
                      f"--command={line(sweep, point.number)}"]) for point in sweep.points]


def states(shell: shell_lib.Shell, sweep: sweep_file.Sweep) -> dict[int, str]:
  """"done", "failed" or "running" of each point that the cluster has a JobSet for.

  Raises:
    ValueError: kubectl could not tell, or the cluster has another sweep under this name.
  """
  asked = shell.run(["kubectl", "get", "jobsets", f"--namespace={_NAMESPACE.value}",
                     f"--selector=specjax-sweep={_NAME.value}", "--output=json"], quiet=True)
  if asked.code:
    raise ValueError(f"kubectl could not look for --name={_NAME.value}: {shell_lib.last_words(asked)}")
  found = {item["metadata"]["name"]: item for item in json.loads(asked.out)["items"]}
  others = set(found) - {jobset(point.number) for point in sweep.points}
  result = {}
  for point in sweep.points:
    item = found.get(jobset(point.number))
    if item:
      if item["metadata"].get("annotations", {}).get("specjax/command") != line(sweep, point.number):
        others.add(item["metadata"]["name"])
      ended = [_STATES[condition["type"]] for condition in item.get("status", {}).get("conditions", [])
               if condition["status"] == "True" and condition["type"] in _STATES]
      result[point.number] = ended[0] if ended else "running"
  if others:
    raise ValueError(f"--name={_NAME.value} is another sweep in this cluster, by {', '.join(sorted(others))}: choose "
                     f"another name, or remove that one: {_removal()}")
  return result


def main(verb: str, given: list[str]) -> None:
  """Launches what is missing; `given` is what stands behind --."""
  if verb:
    raise ValueError(f"unexpected argument {verb!r}: flags are given as --name=value, an experiment behind --")
  shell, text = shell_lib.Shell(_DRY.value), sweep_text(given)
  settings()
  sweep = read(text)
  if _XPK.value:
    print("\n".join(xpk_lines(sweep)))
    return
  there = {} if _DRY.value else states(shell, sweep)
  numbers = [point.number for point in sweep.points if there.get(point.number, "failed") == "failed"]
  failed = [jobset(number) for number in numbers if number in there]
  if numbers:
    yaml = manifest(sweep, text, numbers)
    if _DRY.value:
      print(yaml)
    if failed:  # a JobSet that has ended does not start again, and cannot be changed
      shell.check(["kubectl", "delete", "jobset", *failed, f"--namespace={_NAMESPACE.value}", "--wait"],
                  doing=f"deleting {', '.join(failed)}")
    shell.check(["kubectl", "apply", "--filename=-"], stdin=yaml, doing="kubectl apply")
  if _DRY.value:
    return
  counts = {state: list(there.values()).count(state) for state in ("done", "running")}
  shell_lib.note(f"{_NAME.value}: {counts['done']} done, {counts['running']} running, {len(numbers)} launched "
                 f"({len(failed)} of them again)")
  shell_lib.note(f"logs: kubectl logs --namespace={_NAMESPACE.value} --selector=specjax-sweep={_NAME.value} "
                 f"--container=run --prefix --tail=-1; to remove all: {_removal()}")


def _chips():
  return math.prod(map(int, _TOPOLOGY.value.split("x")))


def _removal():
  return f"kubectl delete jobset,configmap --namespace={_NAMESPACE.value} --selector=specjax-sweep={_NAME.value}"


if __name__ == "__main__":
  _verb, sys.argv, _line = shell_lib.arguments(sys.argv)
  program.run(lambda: main(_verb, _line))
