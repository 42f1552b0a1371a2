"""An interpreter that stands in for Python with an experiment: what a launcher does is seen in a second.

It takes the line of an experiment and writes what a benchmark would: config.json and summary.json. By its --seed it
fails (7), works until it is stopped (8), or takes no notice of an interrupt (9); when it resumes, it always finishes.
"""
import pathlib
import sys

_PROGRAM = '''
import json, os, pathlib, signal, sys, time
flags = dict(part.lstrip("-").split("=", 1) for part in sys.argv[3:] if "=" in part)
resume = "--resume" in sys.argv
folder = pathlib.Path(flags["outdir"])
if folder.exists() and not resume:
  sys.exit("error: not empty")
seed = int(flags.get("seed", 0))
print(f"seed {seed}, resume {resume}, device {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text("{}")
if seed == 7 and not resume:
  print("error: seven is not lucky", file=sys.stderr)
  sys.exit(3)
if seed == 9:
  signal.signal(signal.SIGINT, signal.SIG_IGN)
if seed in (8, 9) and not resume:
  (folder / "working").touch()
  try:
    time.sleep(100)
  except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
group = {"method": "plain", "category": "all", "language": "all", "tokens_per_second": 10.5 + seed,
         "speedup": None, "latency_ms": {"p50": 2.0}, "accepted_per_position": [0.5, 0.25]}
other = group | {"category": "code"}
(folder / "summary.json").write_text(json.dumps({"schema": 1, "groups": [other, group, group | {"method": "ngram"}]}))
'''


def make(folder: pathlib.Path) -> str:
  """Writes the interpreter; its path."""
  path = folder / "fake_python"
  path.write_text(f"#!{sys.executable}\n{_PROGRAM}", encoding="utf-8")
  path.chmod(0o755)
  return str(path)
