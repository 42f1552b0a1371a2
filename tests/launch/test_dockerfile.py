"""What can be held of the image without building it: its sources, its extras, its user."""
import configparser
import fnmatch
import json
import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).parents[2]
LINES = re.sub(r"\\\n\s*", "", (ROOT / "launch/Dockerfile").read_text()).splitlines()


def said(instruction):
  """What stands behind each such instruction, flags left out."""
  return [re.sub(r"--\S+ ", "", line.split(maxsplit=1)[1]) for line in LINES if line.startswith(f"{instruction} ")]


def sent(path):
  """Whether .dockerignore lets a file through; the last pattern that fits decides."""
  result = True
  for pattern in (ROOT / ".dockerignore").read_text().splitlines():
    if pattern and not pattern.startswith("#"):
      bare = pattern.removeprefix("!").removeprefix("**/")
      parts = [str(part) for part in (path, *path.parents)]
      if any(fnmatch.fnmatch(part, bare) or fnmatch.fnmatch(part, f"*/{bare}") for part in parts):
        result = pattern.startswith("!")
  return result


def test_every_source_exists_and_is_sent():
  copies = [copy.split() for copy in said("COPY")]
  sources = [pathlib.Path(source) for *names, _ in copies for source in names]
  assert len(sources) > 5
  for source in sources:
    assert (ROOT / source).exists() and sent(source), source
  assert sent(pathlib.Path("specjax/models/decoder.py"))
  for kept_back in (".git/HEAD", "runs/a/summary.json", "tests/conftest.py", "specjax/__pycache__/tree.cpython-312.pyc",
                    "launch/a.pyc", ".venv/bin/python", "experiments/corpora/own/features-1/a"):
    assert not sent(pathlib.Path(kept_back)), kept_back


def test_what_setup_reads_is_copied_before_it_is_installed():
  install = next(place for place, line in enumerate(LINES) if "pip install" in line)
  before = " ".join(LINES[:install])
  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  for name in ("setup.cfg", "pyproject.toml", config["metadata"]["long_description"].removeprefix("file: "),
               config["metadata"]["license_files"], "specjax/__init__.py"):
    assert f" {name} " in before, name
  extras = config["options.extras_require"]
  usage = " ".join(line for line in LINES if line.startswith("#"))
  named = re.search(r"EXTRA is (\w+), (\w+), nothing, or several of setup.cfg's extras \(([\w,]+)\)", usage)
  assert {named[1], named[2], *named[3].split(",")} <= set(extras)
  assert any('pip install --editable ".${EXTRA:+[$EXTRA]}"' in line for line in LINES)


def test_the_user_is_the_one_of_the_jobset():
  user = said("USER")[-1]
  uid = re.search(rf"useradd --uid=(\d+) --gid=(\d+) \S+ {user}", " ".join(LINES))
  template = (ROOT / "launch/jobset.yaml.j2").read_text()
  context = yaml.safe_load(re.search(r"securityContext: (.*)", template)[1])
  assert context == {"runAsUser": int(uid[1]), "runAsGroup": int(uid[2]), "fsGroup": int(uid[2])}


def test_it_is_called_as_an_experiment():
  entry, arguments = json.loads(said("ENTRYPOINT")[-1]), json.loads(said("CMD")[-1])
  assert entry == ["python", "-m"] and arguments == ["experiments.benchmark", "--help"]
