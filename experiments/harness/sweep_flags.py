"""Whether an experiment takes given flags, asked before anything is launched.

Experiments define flags of the same names, so each is imported in a process of its own; no device is touched there.
"""
import difflib
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHED = ("outdir", "resume", "overwrite")  # what launchers say themselves


def check(experiment: str, overlays: list[dict[str, str]]) -> bool:
  """Refuses flags that the experiment does not have, or values that they do not take; says whether it can resume.

  Args:
    experiment: NAME of `python -m experiments.NAME`.
    overlays: the flags of each point, as text.

  Raises:
    ValueError: names the experiment, the flag or the value, and what is allowed.
  """
  if not re.fullmatch(r"[a-z_]\w*(\.[a-z_]\w*)*", experiment) or experiment not in names():
    raise ValueError(f"experiment {experiment!r} is not known, or takes no --outdir; choose from {', '.join(names())}")
  # A launcher's own process may hold what only one process can, such as an accelerator's lock.
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  asked = subprocess.run([sys.executable, "-m", "experiments.harness.sweep_flags", experiment], cwd=ROOT, check=False,
                         input=json.dumps(overlays), env=environment, capture_output=True, text=True)
  if asked.returncode:
    last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
    raise ValueError(f"experiments.{experiment} cannot be imported: {last}")
  answer = json.loads(asked.stdout.splitlines()[-1])
  if answer["error"]:
    raise ValueError(f"experiments.{experiment}: {answer['error']}")
  return answer["resumes"]


def names() -> list[str]:
  """All experiments that write into a folder that they are given, but for the one that collects what others wrote."""
  folder = ROOT / "experiments"
  found = []
  for path in sorted(folder.rglob("*.py")):
    text = path.read_text(encoding="utf-8")
    if '("outdir"' in text and '__name__ == "__main__"' in text and path.stem != "collect":
      found.append(".".join(path.relative_to(folder).with_suffix("").parts))
  return found


def _answer(experiment, overlays):
  """What `check` wants to know, in the process that imports the experiment."""
  from absl import flags  # pylint: disable=import-outside-toplevel
  from absl.testing import flagsaver  # pylint: disable=import-outside-toplevel
  importlib.import_module(f"experiments.{experiment}")
  known = sorted(flag.name for module, defined in flags.FLAGS.flags_by_module_dict().items()
                 if module.startswith(("experiments.", "specjax.")) for flag in defined)
  for overlay in overlays:
    for name in overlay:
      if name in LAUNCHED:
        return {"error": f"--{name} is said by the launcher; leave it out of the sweep"}
      if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
        return {"error": f"--{name} is no flag of it; did you mean {', '.join(f'--{other}' for other in near)}?"}
    try:
      with flagsaver.flagsaver():
        flags.FLAGS([experiment, *(f"--{name}={value}" for name, value in overlay.items())])
    except flags.Error as error:
      return {"error": str(error)}
  return {"error": None, "resumes": "resume" in known}


if __name__ == "__main__":
  print("\n" + json.dumps(_answer(sys.argv[1], json.load(sys.stdin))))
