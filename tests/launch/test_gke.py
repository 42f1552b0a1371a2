"""JobSets: the manifest's fields, and a kubectl of our own that knows which points are done, failed or running."""
import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
# Answers `get` with items.json and keeps what is given to `apply`.
KUBECTL = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$FAKE/calls"
case $1 in
  get) cat "$FAKE/items.json" ;;
  apply) [ ! -e "$FAKE/refusal" ] || { cat "$FAKE/refusal" >&2; exit 1; }; cat >"$FAKE/applied.yaml" ;;
esac
"""
# Experiments are imported to check their flags, for which JAX takes seconds: only tests of that check ask for it.
UNCHECKED = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
from experiments.harness import sweep_flags
sweep_flags.check = lambda experiment, overlays: True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SWEEP = {"experiment": "benchmark", "flags": {"methods": ["plain"], "workload": "it's: \"{{ x }}\" $HOME\n- #"},
         "points": {"product": {"seed": [0, 1, 2]}}}
COMMON = ("--name=tokens", "--image=eu.gcr.io/p/specjax:1", "--results=gs://bucket/some/folder/")
TPU = (*COMMON, "--tpu=v5e", "--topology=4x4")
GPU = (*COMMON[:2], "--results=pvc:claim", "--gpu=nvidia-h100-80gb", "--nodes=2")
LINE = ("--", "experiments.benchmark")
REMOVAL = "kubectl delete jobset,configmap --namespace=default --selector=specjax-sweep=tokens"


@dataclasses.dataclass
class Cluster:
  """A machine with our kubectl."""
  folder: pathlib.Path

  def run(self, *arguments, start=("-c", UNCHECKED, str(ROOT))):
    env = os.environ | {"PATH": f"{self.folder / 'programs'}:{os.environ['PATH']}", "FAKE": str(self.folder)}
    return subprocess.run([sys.executable, *start, str(ROOT / "launch/gke.py"), *arguments], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=120, check=False)

  def has(self, **conditions):
    """JobSets of the cluster by name, each with its condition or None, as the last manifest made them."""
    items = []
    for document in self.applied:
      name = document["metadata"]["name"].replace("-", "_")
      if document["kind"] == "JobSet" and name in conditions:
        ended = conditions[name]
        items.append(document | {"status": {"conditions": [{"type": ended, "status": "True"}] if ended else []}})
    (self.folder / "items.json").write_text(json.dumps({"items": items}))

  @property
  def calls(self):
    path = self.folder / "calls"
    return path.read_text().splitlines() if path.exists() else []

  @property
  def applied(self):
    return list(yaml.safe_load_all((self.folder / "applied.yaml").read_text()))


@pytest.fixture(name="cluster")
def _cluster(tmp_path):
  (tmp_path / "programs").mkdir()
  (tmp_path / "programs/kubectl").write_text(KUBECTL)
  (tmp_path / "programs/kubectl").chmod(0o755)
  (tmp_path / "items.json").write_text('{"items": []}')
  (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
  return Cluster(tmp_path)


def manifest_of(done):
  """The documents that a dry run printed before its command."""
  assert done.returncode == 0, done.stderr
  text, apply = done.stdout.rstrip("\n").rsplit("\n", 1)
  assert apply == "kubectl apply --filename=-"
  return list(yaml.safe_load_all(text))


def pod_of(jobset):
  job, = jobset["spec"]["replicatedJobs"]
  return job, job["template"]["spec"]["template"]


def test_a_sweep_on_tpu_slices(cluster):
  done = cluster.run(*TPU, "--spot", "--queue=lab", "--service_account=writer", f"--sweep={cluster.folder}/sweep.json",
                     "--namespace=us", "--max_restarts=7", "--dry_run")
  config, *jobsets = manifest_of(done)
  assert not cluster.calls
  assert (config["kind"], config["metadata"]["name"]) == ("ConfigMap", "tokens-sweep")
  assert json.loads(config["data"]["sweep.json"]) == SWEEP  # whatever the flags hold
  assert [j["metadata"]["name"] for j in jobsets] == ["tokens-0", "tokens-1", "tokens-2"]
  for number, jobset in enumerate(jobsets):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"]["namespace"] == "us"
    assert jobset["metadata"]["labels"] == {"specjax-sweep": "tokens", "kueue.x-k8s.io/queue-name": "lab"}
    annotations = jobset["metadata"]["annotations"]
    assert annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] == "cloud.google.com/gke-nodepool"
    assert annotations["specjax/point"] == f"seed={number}"
    assert shlex.split(annotations["specjax/command"]) == [
        "python", "-m", "experiments.benchmark", "--methods=plain", f"--workload={SWEEP['flags']['workload']}",
        f"--seed={number}", f"--outdir=/results/tokens/seed={number}"]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 7}
    job, pod = pod_of(jobset)
    assert job["replicas"] == 1
    spec = job["template"]["spec"]
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    assert spec["completions"] == spec["parallelism"] == 4
    assert pod["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    assert pod["spec"]["restartPolicy"] == "Never" and pod["spec"]["serviceAccountName"] == "writer"
    assert pod["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice", "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true"}
    assert {t["key"] for t in pod["spec"]["tolerations"]} == {"google.com/tpu", "cloud.google.com/gke-spot"}
    container, = pod["spec"]["containers"]
    assert container["image"] == "eu.gcr.io/p/specjax:1"
    assert container["command"] == ["bash", "launch/gke_worker.sh", "point", "/results/tokens", str(number)]
    assert container["resources"] == {"limits": {"google.com/tpu": "4"}}
    assert {one["name"] for one in container["env"]} == {"PYTHONUNBUFFERED", "JOBSET_NAME", "JOB_UID"}
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    assert {m["name"]: m["mountPath"] for m in container["volumeMounts"]} == {
        "sweep": "/sweep", "results": "/results", "shared-memory": "/dev/shm"} and len(volumes) == 3
    assert volumes["sweep"]["configMap"] == {"name": "tokens-sweep"}
    assert volumes["results"]["csi"] == {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {
        "bucketName": "bucket", "mountOptions": "implicit-dirs,uid=1000,gid=1000,only-dir=some/folder"}}


@pytest.mark.parametrize("flags, processes, chips", [
    (("--tpu=v6e", "--topology=1x1"), 1, "1"), (("--tpu=v6e", "--topology=2x4", "--chips_per_node=8"), 1, "8"),
    (("--tpu=v5p", "--topology=2x2x4"), 4, "4")])
def test_nodes_of_a_slice(cluster, flags, processes, chips):
  _, jobset = manifest_of(cluster.run(*COMMON, *flags, "--dry_run", "--", "experiments.benchmark"))
  job, pod = pod_of(jobset)
  assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == processes
  assert pod["spec"]["containers"][0]["resources"] == {"limits": {"google.com/tpu": chips}}


def test_a_line_on_gpu_nodes_finds_its_processes(cluster):
  done = cluster.run(*GPU, "--dry_run", "--", "python", "-m", "experiments.benchmark", "--workload=a, b", "--nocosts",
                     "--raw")
  config, jobset = manifest_of(done)
  assert json.loads(config["data"]["sweep.json"]) == {
      "experiment": "benchmark", "flags": {"workload": "a, b", "costs": "false", "raw": "true"},
      "points": {"list": [{"name": "run"}]}}
  job, pod = pod_of(jobset)
  assert (job["template"]["spec"]["completions"], job["template"]["spec"]["parallelism"]) == (2, 2)
  assert "alpha.jobset.sigs.k8s.io/exclusive-topology" not in jobset["metadata"]["annotations"]
  assert pod["spec"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
  container, = pod["spec"]["containers"]
  assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
  env = {one["name"]: one.get("value") for one in container["env"]}
  # JobSet names pods JOBSET-JOB-INDEX-PROCESS, below a headless service with the JobSet's name.
  assert env["JAX_COORDINATOR_ADDRESS"] == "tokens-0-run-0-0.tokens-0:8476" and env["JAX_NUM_PROCESSES"] == "2"
  assert container["ports"] == [{"containerPort": 8476}]
  volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
  assert volumes["results"]["persistentVolumeClaim"] == {"claimName": "claim"} and "annotations" not in pod["metadata"]


def test_one_gpu_node_needs_no_coordinator(cluster):
  _, jobset = manifest_of(cluster.run(*GPU, "--nodes=1", "--dry_run", "--", "experiments.benchmark"))
  _, pod = pod_of(jobset)
  assert "JAX_COORDINATOR_ADDRESS" not in {one["name"] for one in pod["spec"]["containers"][0]["env"]}


def test_what_failed_or_is_missing_is_launched_again(cluster):
  arguments = (*TPU, f"--sweep={cluster.folder}/sweep.json")
  first = cluster.run(*arguments)
  assert first.returncode == 0, first.stderr
  look = "get jobsets --namespace=default --selector=specjax-sweep=tokens --output=json"
  assert cluster.calls == [look, "apply --filename=-"]
  assert [d["metadata"]["name"] for d in cluster.applied] == ["tokens-sweep", "tokens-0", "tokens-1", "tokens-2"]
  assert "== tokens: 0 done, 0 running, 3 launched (0 of them again)" in first.stderr and REMOVAL in first.stderr
  cluster.has(tokens_0="Completed", tokens_1="Failed", tokens_2=None)
  again = cluster.run(*arguments)
  assert again.returncode == 0, again.stderr
  assert "== tokens: 1 done, 1 running, 1 launched (1 of them again)" in again.stderr
  assert cluster.calls[2:] == [look, "delete jobset tokens-1 --namespace=default --wait", "apply --filename=-"]
  assert [d["metadata"]["name"] for d in cluster.applied] == ["tokens-sweep", "tokens-1"]


def test_nothing_is_launched_where_all_is_done_or_another_sweep_has_the_name(cluster):
  arguments = (*TPU, f"--sweep={cluster.folder}/sweep.json")
  cluster.run(*arguments)
  cluster.has(tokens_0="Completed", tokens_1="Completed", tokens_2="Completed")
  done = cluster.run(*arguments)
  assert done.returncode == 0 and "== tokens: 3 done, 0 running, 0 launched" in done.stderr
  (cluster.folder / "sweep.json").write_text(json.dumps(SWEEP | {"points": {"product": {"seed": [0, 5]}}}))
  other = cluster.run(*arguments)
  assert other.returncode == 2
  assert "--name=tokens is another sweep in this cluster, by tokens-1, tokens-2: choose another name" in other.stderr
  assert len(cluster.calls) == 4


def test_kubectl_says_no(cluster):
  refusal = 'no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"'
  (cluster.folder / "refusal").write_text(refusal)
  done = cluster.run(*TPU, "--", "experiments.benchmark")
  assert (done.returncode, done.stderr.splitlines()[-1]) == (
      2, f"error: kubectl apply failed with exit code 1: {refusal}")


@pytest.mark.parametrize("flags, device", [
    (TPU, ["--tpu-type=v5litepod-16", "--num-slices=1"]),
    ((*COMMON, "--tpu=v5p", "--topology=2x2x4"), ["--tpu-type=v5p-32", "--num-slices=1"]),
    (GPU, ["--device-type=h100-80gb-8", "--num-nodes=2"])])
def test_xpk(cluster, flags, device):
  done = cluster.run(*flags, "--xpk=lab", "--", "experiments.benchmark", "--workload=it's")
  assert done.returncode == 0, done.stderr
  assert shlex.split(done.stdout) == [
      "xpk", "workload", "create", "--cluster=lab", "--workload=tokens-0", *device,
      "--docker-image=eu.gcr.io/p/specjax:1", "--max-restarts=3",
      "--command=" + shlex.join(["python", "-m", "experiments.benchmark", "--workload=it's",
                                 "--outdir=/results/tokens/run"])]
  assert not cluster.calls


@pytest.mark.parametrize("arguments, message", [
    (TPU, "give either --sweep=FILE or, behind --"),
    ((*TPU, "--sweep=nowhere.json"), "--sweep=nowhere.json: cannot be read"),
    (("--name=Tokens", *TPU[1:], *LINE), "--name=Tokens: give small letters"),
    ((TPU[0], *TPU[2:], *LINE), "--image is needed"),
    ((*TPU, "--gpu=nvidia-l4", *LINE), "give one of --tpu=v4|v5e|v5p|v6e and --gpu"),
    ((*COMMON, "--tpu=v5e", "--topology=4", *LINE), "--topology=4: give the slice"),
    ((*COMMON, "--tpu=v5e", "--topology=3x3", *LINE), "--topology=3x3 has 9 chips, which is no multiple of"),
    ((*TPU, "--results=/disk", *LINE), "--results=/disk: give gs://BUCKET/FOLDER, or pvc:CLAIM"),
    ((*TPU, "--", "experiments.benchmark", "plain"), "behind -- stands 'plain'; give flags as --name=value"),
    (("apply", *TPU, *LINE), "unexpected argument 'apply'")])
def test_bad_input(cluster, arguments, message):
  done = cluster.run(*arguments)
  assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
  assert not cluster.calls


def test_a_line_is_checked_before_anything_is_launched(cluster):
  done = cluster.run(*TPU, "--", "experiments.benchmark", "--outdir=a", start=())
  assert (done.returncode, done.stderr.splitlines()[-1]) == (
      2, "error: behind --: experiments.benchmark: --outdir is said by the launcher; leave it out of the sweep")
  assert not cluster.calls


@pytest.mark.parametrize("process", ["0", "1"])
def test_a_pod_runs_its_point_and_tells_where_the_others_are(tmp_path, process):
  """`gke_worker.sh` with a Python that prints what it is called with, first as the pod, then as run_point.py would."""
  (tmp_path / "python").write_text(
      '#!/bin/sh\nprintf "%s|" "$@" "$SLURM_PROCID" "$SLURM_JOB_ID" "$SLURM_RESTART_COUNT"\n')
  (tmp_path / "python").chmod(0o755)
  pod = {"JOB_COMPLETION_INDEX": process, "JOBSET_NAME": "tokens-3", "JOB_UID": "uid"}
  coordinates = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2"}

  def worker(*arguments, **env):
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | pod | env
    return subprocess.run(["bash", str(ROOT / "launch/gke_worker.sh"), *arguments], env=env, check=True, text=True,
                          capture_output=True, cwd="/").stdout.split("|")[:-1]

  assert worker("point", "/results/tokens", "3") == [
      "launch/run_point.py", "--sweep=/sweep/sweep.json", "--outdir=/results/tokens", "--point=3",
      "--python=launch/gke_worker.sh", process, "tokens-3", "uid"]
  slurm = {"SLURM_PROCID": process, "SLURM_JOB_ID": "tokens-3", "SLURM_RESTART_COUNT": "uid"}
  line = ["-m", "experiments.benchmark", "--workload=a b"]
  assert worker(*line, **slurm) == [*line, "", "", ""]  # JAX is not to take the pod for a task of Slurm
  whole = [*line, "--coordinator=host:1", "--num_processes=2", f"--process_id={process}", "--coordinator_timeout=1800",
           "", "", ""]
  assert worker(*line, **slurm, **coordinates, POD_OUTPUT=str(tmp_path / "output")) == whole
  assert (tmp_path / "output").read_text().split("|")[:-1] == whole  # kubectl logs shows what the volume's log has
