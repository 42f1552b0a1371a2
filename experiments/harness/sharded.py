"""Targets and drafters over several devices: the flags that say how, and what is loaded by them."""
import dataclasses
import functools
import sys

from absl import flags
import jax

import specjax
from specjax.models import configured
from specjax.parallel import mesh as mesh_lib
from specjax.parallel import placing
from specjax.parallel import processes
from specjax.parallel import rules as rules_lib
from specjax.proposers import base
from specjax.training import online

MESH = flags.DEFINE_string("mesh", None, "Devices in a grid, as axis:size,axis:size of data (rows), model (heads, "
                           "feed-forward, vocabulary), expert and, in training, fsdp; one device without it.")
_DRAFTERS = flags.DEFINE_enum("draft_sharding", "replicated", ["replicated", "divided"], "With --mesh: every device has "
                              "a draft model whole, or it is divided as the target is.")
_REQUIRED = flags.DEFINE_list("must_divide", [], "With --mesh: axes that must be divided, of heads, kv_heads, mlp, vocab, "
                              "experts; others are kept whole on every device where they do not divide.")
_AXES = ("heads", "kv_heads", "mlp", "vocab", "experts")


def value(flag):
  """What a flag says; its default where this is a library to a program that reads no flags."""
  return flag.value if flags.FLAGS.is_parsed() else flag.default


def check(*, drafting: bool = True) -> None:
  """Refuses, before anything is loaded, a mesh that cannot be, and options that go unread without one.

  Args:
    drafting: whether draft models are loaded.

  Raises:
    ValueError: names the flag.
  """
  if value(MESH) is None:
    for flag in (_DRAFTERS, _REQUIRED):
      if flag.present:
        raise ValueError(f"--{flag.name}={flag.value}: it says how things lie on a mesh; add --mesh, or leave it out")
    return
  if _DRAFTERS.present and not drafting:
    raise ValueError(f"--draft_sharding={_DRAFTERS.value}: no draft model is loaded here; leave it out")
  rules(rules_lib.TENSOR)
  mesh()


def mesh() -> jax.sharding.Mesh | None:
  """The mesh of the flags; None for one device."""
  return None if value(MESH) is None else _mesh(value(MESH))


_mesh = functools.cache(mesh_lib.make)


def load(name: str, given: rules_lib.Rules = rules_lib.TENSOR):
  """A target and its tokenizer, on the mesh if there is one; each device's part is read straight from the files. What is
  kept whole although its rule would divide it is said on standard error.

  Raises:
    ValueError: as `specjax.load` and `check`.
  """
  check()
  if mesh() is None:
    return specjax.load(name)
  target, tokenizer = placing.load(name, mesh(), rules(given))
  for note in target.layout.notes:
    print(f"--mesh={MESH.value}: {note}", file=sys.stderr)
  return target, tokenizer


def drafter(proposer, target):
  """A proposer on the mesh of its target.

  Raises:
    ValueError: in several processes, one that drafts or learns on the host, which reads what other processes hold; one
      that learns a model which is divided.
  """
  if processes.count() > 1 and (proposer.host or proposer.remember.__func__ is not base.Defaults.remember):
    raise ValueError(f"{type(proposer).__name__} drafts or learns on the host, and this is one of several processes, none "
                     "of which holds all that it reads; leave it out, or run one process")
  if mesh() is None:
    return proposer
  if _DRAFTERS.value == "divided" and isinstance(proposer, online.Online):
    raise ValueError("--draft_sharding=divided: a draft model that learns between requests is whole on every device; "
                     "leave the flag out")
  own = rules(rules_lib.TENSOR) if _DRAFTERS.value == "divided" else rules_lib.REPLICATED
  placed = placing.drafter(proposer, target, own)
  layouts = {part.layout for part in jax.tree.leaves(placed, is_leaf=_is_model) if _is_model(part)}
  for note in dict.fromkeys(note for layout in layouts - {target.layout} for note in layout.notes):
    print(f"--mesh={MESH.value}, draft model: {note}", file=sys.stderr)
  return placed


def _is_model(part):
  return isinstance(part, configured.Configured)


def rules(given: rules_lib.Rules) -> rules_lib.Rules:
  """Rules with what --must_divide requires."""
  for name in _REQUIRED.value:
    if name not in _AXES:
      raise ValueError(f"--must_divide={','.join(_REQUIRED.value)}: {name!r} is none of {', '.join(_AXES)}")
  of_experts = ("expert_mlp", "shared_mlp") if "mlp" in _REQUIRED.value else ()
  return dataclasses.replace(given, required=(*_REQUIRED.value, *of_experts))
