"""The draft heads that come with specjax, trained with its own code; a model card stands beside each."""
import pathlib

FOLDER = pathlib.Path(__file__).parents[2] / "assets"


def shipped(target: str, kind: str) -> pathlib.Path | None:
  """The folder of the head of a `kind` ("eagle3", "medusa", ...) for a target by its known name; None without one."""
  path = FOLDER / target / kind
  return path if "/" not in target and (path / "config.json").exists() else None
