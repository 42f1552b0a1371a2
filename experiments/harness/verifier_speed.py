"""What verification costs beside the target: one draw of every rule, from logits to verdict, and its memory.

The draft is a chain of T - 1 tokens drawn from a law close to the target's, or a tree of that many nodes, at the
vocabulary of the default target. Logits look like a language model's: a few tokens hold most of the mass.
"""
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_laws
from specjax import keys as keys_lib
from specjax import sampling
from specjax import tree as tree_lib
from specjax import verifiers

VOCABULARY, NODES = 49152, 8
_TREE = (0, 0, 0, 1, 1, 2, 2, 3)
_TURNS = 20

GREEDY = sampling.SamplingParams()
SAMPLED = sampling.SamplingParams(temperature=0.8)
FILTERED = sampling.SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
CASES = {
    "point, greedy": (verifiers.Point(), GREEDY, None, 0.3),
    "point, sampled": (verifiers.Point(), SAMPLED, None, 1.0),
    "coupled, sampled": (verifiers.Coupled(), SAMPLED, None, None),
    "rejection": (verifiers.Rejection(), SAMPLED, "chain", 3.0),
    "block": (verifiers.Block(), SAMPLED, "chain", 3.0),
    "recursive": (verifiers.Recursive(), SAMPLED, "tree", None),
    "traversal": (verifiers.Traversal(), SAMPLED, "tree", 8.0),
    "kseq": (verifiers.KSeq(), SAMPLED, "tree", None),
    "greedy_multi": (verifiers.GreedyMulti(), SAMPLED, "tree", None),
    "lossy_typical": (verifiers.LossyTypical(), SAMPLED, "tree", None),
    "lossy_lenient": (verifiers.LossyLenient(), SAMPLED, "chain", None),
    "lossy_cascade": (verifiers.LossyCascade(), SAMPLED, "chain", None),
}


def timers() -> dict:
  """By name, a function that runs a case and returns milliseconds a step, dispatch included."""
  runs = {f"verify, {name}": functools.partial(_timed, _compiled(name), *arguments(name)) for name in CASES}
  laws = jax.jit(sampling.law)
  params = FILTERED.batch(1)
  runs["law with top-k and top-p"] = functools.partial(_timed, laws, logits(), params, params.mode())
  return runs


def bars() -> dict:
  """Greatest milliseconds allowed, by the same names."""
  return {f"verify, {name}": bar for name, (*_, bar) in CASES.items()} | {"law with top-k and top-p": 8.0}


def memory(name: str) -> int:
  """Bytes that the compiled draw of a case holds beside its arguments."""
  return _compiled(name).lower(*arguments(name)).compile().memory_analysis().temp_size_in_bytes


@functools.lru_cache
def _compiled(name):
  verifier = CASES[name][0]

  def run(logits, tree, params, mode, keys):
    """Random numbers included: a rule that needs many of them is not cheap."""
    root = jnp.zeros_like(tree.size)
    positions = 1 + tree_lib.depths(tree_lib.ancestors(tree.parents, NODES - 1))
    uniforms = keys_lib.uniforms(verifier.purposes, keys, root, positions, VOCABULARY)
    return verifier.draw(logits, tree, params, mode, uniforms, NODES - 1)

  return jax.jit(run)


def logits(seed: int = 0) -> jax.Array:
  """f32[1, T, V], normal with a spread that leaves some ten tokens likely."""
  return jnp.asarray(np.random.default_rng(seed).normal(0, 3, (1, NODES, VOCABULARY)), jnp.float32)


def arguments(name: str) -> tuple:
  """What a case takes."""
  _, params, shape, _ = CASES[name]
  params = params.batch(1)
  target = logits()
  parents = jnp.asarray([_TREE if shape == "tree" else [0, *range(NODES - 1)]], jnp.int32)
  q = sampling.law(target + 0.5 * logits(1), SAMPLED.batch(1), jnp.int32(sampling.TEMPERATURE))
  noise = keys_lib.position_noise(keys_lib.row_keys(jax.random.key(1), jnp.zeros((1,), jnp.int32)),
                                  jnp.arange(NODES, dtype=jnp.int32)[None], VOCABULARY)
  drawn = jnp.take_along_axis(q, parents[..., None], axis=1) / noise
  tree = tree_lib.TokenTree(tokens=sampling.argmax(drawn), parents=parents, size=jnp.full((1,), NODES, jnp.int32))
  if shape:
    tree = tree.replace(sampled=(jnp.arange(NODES) > 0)[None], q=draft_laws.DenseLaw(q))
  return target, tree, params, params.mode(), keys_lib.row_keys(jax.random.key(0), jnp.zeros((1,), jnp.int32))


def _timed(function, *args):
  jax.block_until_ready(function(*args))
  begin = time.perf_counter()
  for _ in range(_TURNS):
    jax.block_until_ready(function(*args))
  return (time.perf_counter() - begin) * 1e3 / _TURNS
