"""One door for the files of every draft head."""
import jax
import jax.numpy as jnp

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import dflash
from specjax.checkpoints.heads import dspark
from specjax.checkpoints.heads import eagle
from specjax.checkpoints.heads import eagle3
from specjax.checkpoints.heads import files
from specjax.checkpoints.heads import hydra
from specjax.checkpoints.heads import medusa
from specjax.checkpoints.heads import mtp
from specjax.checkpoints.heads import peagle
from specjax.checkpoints.heads import shipped
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models.dflash import DFlashHead
from specjax.models.dspark import DSparkHead
from specjax.models.eagle import EagleHead
from specjax.models.eagle3 import Eagle3Head
from specjax.models.hydra import HydraHead
from specjax.models.medusa import MedusaHead
from specjax.models.mtp import MtpHead
from specjax.models.peagle import PEagleHead

# Head class -> the module of its files, in the order in which they are asked whether a file is theirs: DSpark's have what
# DFlash's have, and more, and P-EAGLE's what EAGLE-3's have.
_KINDS = {PEagleHead: peagle, Eagle3Head: eagle3, MtpHead: mtp, MedusaHead: medusa, HydraHead: hydra,
          DSparkHead: dspark, DFlashHead: dflash, EagleHead: eagle}
_SPECULATORS = ("eagle3", "mtp", "peagle")  # of its formats


def load_head(path, *, target=None, dtype=None):
  """Reads a draft head.

  Args:
    path: a folder with config.json and the tensors (safetensors, or as PyTorch wrote them), or the file of the tensors
      with config.json beside it. EAGLE-3 in the dialects of SafeAILab, SpecForge and speculators, EAGLE-1's heads (also
      EAGLE-2's) as SafeAILab's, Medusa's heads alone or beside a whole model, Hydra's and Hydra++'s, DFlash as z-lab
      writes it, DSpark as DeepSpec does, P-EAGLE as speculators does, a module of multi-token prediction as speculators
      writes it or as Qwen3.5 and MiMo hold it. Or the name of one that comes with specjax: "smollm2-135m/eagle3".
    target: a `models.decoder.Decoder` that the head is checked against. Some files do not say which layers are read,
      or how many heads a layer of theirs has; this follows from the target's then.
    dtype: of the weights kept; None is the target's, and without a target float32 on a CPU and bfloat16 elsewhere.

  Returns:
    A `models.eagle3.Eagle3Head`, `models.eagle.EagleHead`, `models.medusa.MedusaHead`, `models.hydra.HydraHead`,
    `models.dflash.DFlashHead`, `models.dspark.DSparkHead`, `models.mtp.MtpHead` or `models.peagle.PEagleHead`.

  Raises:
    CheckpointError: names what is absent, damaged or unsupported: a file, a key of the configuration, a missing, extra
      or misshapen tensor; or says why the head is not for this target.
  """
  settings, source = files.open_head(shipped.named(path))
  if dtype is None and target is not None:
    dtype = target.weights.embedding.dtype
  elif dtype is None:
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  tensors = tensors_lib.Tensors(source, dtype)
  head = _kind(settings, tensors).read(settings, tensors, target)
  tensors.finish()
  if target is not None:
    try:
      head.check(target)
    except ValueError as error:
      raise CheckpointError(f"{source.path}: {error}") from error
    if target.config.layers in getattr(head, "features", ()):
      raise CheckpointError(f"{source.path}: the head reads the output of the target's last layer, {target.config.layers}; "
                            "published trainers differ in whether that is behind the final norm, so it is not supported")
  return head


def kind_of(head) -> str:
  """The kind of a head by its short name: "eagle", "eagle3", "medusa", "hydra", "dflash", "dspark", "peagle"
  or "mtp"."""
  return _KINDS[type(head)].__name__.rpartition(".")[2]


def save_head(head, path, dialect: str | None = None, *, dtype=None) -> None:
  """Writes a draft head that `load_head` gives back, bit for bit.

  Args:
    head: what `load_head` returns.
    path: the folder of config.json and the tensors; made if it is not there, what it holds of these names replaced.
    dialect: of EAGLE-3 "safeailab", "specforge" or "speculators", of EAGLE-1 "safeailab", of Medusa "medusa", of Hydra
      "hydra", of DFlash "z-lab", of DSpark "deepspec", of MTP "speculators", "qwen" or "mimo", of P-EAGLE "speculators";
      None is the first of them that can say what the head is. An EAGLE-3 head's `first_position`, which changes nothing
      that it computes, becomes the dialect's.
    dtype: of the weights written; None keeps the head's.

  Raises:
    CheckpointError: the dialect is unknown or cannot say what the head is.
  """
  kind = _KINDS.get(type(head))
  if kind is None:
    raise CheckpointError(f"{type(head).__name__} is no head that is written; "
                          f"{', '.join(known.__name__ for known in _KINDS)} are")
  if dialect is not None and dialect not in kind.DIALECTS:
    raise CheckpointError(f"dialect {dialect!r} is unknown; of {type(head).__name__} there are "
                          f"{', '.join(kind.DIALECTS)}")
  for name in [dialect] if dialect else kind.DIALECTS:
    try:
      config, tensors = kind.write(head, name)
      break
    except CheckpointError:
      if name in (dialect, kind.DIALECTS[-1]):
        raise
  files.write_head(path, kind.FILE, config, tensors, dtype)


def _kind(settings, tensors):
  if any("Eagle4" in name for name in settings.names("architectures")):
    raise settings.error("architectures", "EAGLE-4 is not supported; EAGLE-3 is")
  if settings.get("speculators_model_type", "eagle3") not in _SPECULATORS:
    raise settings.error("speculators_model_type", "of speculators' formats only "
                         f"{', '.join(map(repr, _SPECULATORS))} are supported")
  for kind in _KINDS.values():
    if kind.is_one(settings, tensors.shapes):
      return kind
  raise CheckpointError(f"{tensors.path}: is no draft head of a known kind (EAGLE, EAGLE-3, P-EAGLE, MTP, Medusa, "
                        "Hydra, DFlash, DSpark) by its config.json and names of tensors, such as "
                        f"{min(tensors.shapes, default=None)!r}")
