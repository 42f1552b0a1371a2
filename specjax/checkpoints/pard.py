"""What the configuration of a PARD draft model says beside that of an ordinary one: the token of its masks.

AMD-AGI/PARD's trainer writes `pard_token` and `spd_type` "pard" into the config.json of a Llama or Qwen2 folder, whose
tensors are the ordinary ones. PARD-2 ("pard2", as `spd_type` or a key of its own), whose models read the target's
layers, is another kind.
"""
import pathlib

from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints import registry
from specjax.checkpoints.errors import CheckpointError


def pard_token(name: str | pathlib.Path) -> int:
  """The id of the mask token of a model that `checkpoints.load` reads by the same name.

  Raises:
    CheckpointError: the model is no folder, its config.json has no `pard_token`, or it is of another kind.
  """
  folder = registry.resolve(name)
  if not folder.is_dir():
    raise CheckpointError(f"{folder}: a GGUF file does not say which token a PARD model's masks are: pass the folder "
                          "with its config.json")
  path = folder / "config.json"
  values = folder_vocabulary.read_json(path, required=True)
  token, kind = values.get("pard_token"), values.get("spd_type", "pard")
  if type(token) is not int or token < 0:
    raise CheckpointError(f"{path}: 'pard_token' is {token!r}; a PARD model has the id of its mask token there (an "
                          "ordinary draft model drafts with DraftModel)")
  if kind != "pard" or values.get("pard2"):
    key, kind = ("spd_type", kind) if kind != "pard" else ("pard2", values["pard2"])
    raise CheckpointError(f"{path}: {key!r} is {kind!r}: PARD-2, whose models read the target's layers, is not "
                          "supported; PARD is")
  return token
