"""The draft heads that come with specjax, trained with its own code; a model card stands beside each."""
import pathlib

FOLDER = pathlib.Path(__file__).parents[2] / "assets"


def shipped(target: str, kind: str) -> pathlib.Path | None:
  """The folder of the head of a `kind` ("eagle3", "medusa", ...) for a target by its known name; None without one."""
  path = FOLDER / target / kind
  return path if "/" not in target and (path / "config.json").exists() else None


def named(path):
  """The folder that a name such as "smollm2-135m/eagle3" means, unless there is such a path; else `path` itself."""
  target, _, kind = str(path).partition("/")
  return path if pathlib.Path(path).exists() or not kind or "/" in kind else shipped(target, kind) or path
