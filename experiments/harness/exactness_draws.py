"""What runs, against the laws that `exactness` judges: draws over all their uniforms, races, two steps in a row."""
import collections.abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import keys
from specjax import sampling
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.theory import drafts
from specjax.theory import draws
from specjax.theory import oracle
from specjax.theory import tables as tables_lib
from specjax.theory import worlds
from specjax.verifiers import coupled

_ROWS = 8  # outcomes of a draft that are drawn from
RACES = 2 ** 20  # draws that are counted
_CHAIN, _TREE, _VOCABULARY = (0, 0, 1, 2), (0, 0, 1, 1, 0, 4), 3

# name -> parameters of the rows, a value each; the first takes the sampler's way without filters, the second that with.
PARAMS = {
    "temperature": sampling.SamplingParams(temperature=0.9),
    "filters, greedy rows": sampling.SamplingParams(
        temperature=[0.9, 1.5, 0.0, 0.9, 1.2, 0.7, 0.0, 1.0], top_k=[0, 2, 0, 2, 0, 0, 2, 0],
        top_p=[1.0, 0.8, 1.0, 1.0, 0.6, 1.0, 1.0, 0.9], min_p=[0.0, 0.0, 0.0, 0.1, 0.0, 0.3, 0.0, 0.0]),
}


def rules() -> dict[str, collections.abc.Callable]:
  """Every rule that is judged, by name: the registry's, and the second rule of cascades."""
  found = dict(verifiers.BY_NAME)
  cascades = [name for name in found if "lossy_cascade" in name]
  return found | {f"{name}, opt": functools.partial(found[name], rule="opt") for name in cascades}


def fast_draws(seed: int = 1) -> collections.abc.Iterator[dict]:
  """The draws integrated over their uniforms, two lines a rule: a chain with dense q, and with filters, greedy rows
  beside others and sparse q a tree where the rule takes one, drawn without replacement where the rule takes that; and
  the races of the coupled rule."""
  for name, make in rules().items():
    rule = make()
    if keys.NOISE in rule.purposes:
      continue
    for setting, params in PARAMS.items():
      first = setting == "temperature"
      shape, parents = ("chain of 3", _CHAIN) if first or rule.chain_only else ("branches", _TREE)
      kind = _kind(name, rule, first)
      draft = drafts.named(kind, parents, sparse=not first and kind not in drafts.POINTS)
      what = f"{shape}, {kind}{', sparse' if draft.sparse else ''}; {setting}"
      yield {"verifier": name, "tree": what, "max_error": _draw_error(rule, draft, params, seed)}
  yield from races(seed)


def _kind(name, rule, first):
  if keys.TOKEN in rule.purposes:
    return "top_k"  # points are verified by the token stream; every other rule is tried on drawn nodes
  if first or rule.chain_only:
    return "iid"
  return {"recursive": "without_replacement", "traversal": "without_replacement",
          "greedy_multi": "greedy_multi"}.get(name, "iid")


def _draw_error(rule, draft, params, seed):
  outcomes = draft.outcomes(tables_lib.random_tables(seed, _VOCABULARY, 3, sharpness=1.2, agreement=0.6),
                            tables_lib.Setting(), np.float32)
  chosen = np.linspace(0, len(outcomes.tokens) - 1, _ROWS).astype(int)
  few = dataclasses.replace(outcomes, **{name: getattr(outcomes, name)[chosen] for name in (
      "tokens", "parents", "size", "probability", "sampled", "q")})
  width, depth = few.tokens.shape[1], int(drafts.depths(few.parents).max())
  logits = np.random.default_rng(seed).normal(size=(_ROWS, width, _VOCABULARY)).astype(np.float32)
  given = jnp.asarray(logits), few.tree(np.float32), params.batch(_ROWS, _VOCABULARY)
  made = draws.draw_law(rule, *given, depth)
  stop, following = (np.asarray(x, np.float64) for x in _claimed(rule, depth, *given))
  return float(np.abs(made - stop[..., None] * following).max())


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=tables_lib.CHEAP)
def _claimed(rule, depth, logits, tree, params):
  return rule.law(sampling.process(logits, params), tree, depth, **rule.evidence(logits, tree, params))


def races(seed: int = 1) -> collections.abc.Iterator[dict]:
  """The law of coupled draws on a chain of one: against the exact integral over the exponentials, and against counts of
  the draw that runs, under one key; counts are off by their chance, so they are told in standard errors."""
  rule, setting = verifiers.BY_NAME["coupled"](), tables_lib.Setting()
  tables = tables_lib.random_tables(seed, _VOCABULARY, 1, sharpness=1.2, agreement=0.6)
  outcomes = drafts.named("iid", (0, 0)).outcomes(tables, setting)
  case = oracle.prepare(tables, outcomes, setting)
  stop, following = oracle.laws(rule, case)
  q, p = outcomes.probability, case.target[0][0]
  claimed = (q[:, None] * stop)[..., None] * following  # drafted token, node where the path ends, new token
  first = claimed[:, 0] + np.diag(claimed[:, 1].sum(-1))
  yield {"verifier": "coupled", "tree": "chain of 1, exponentials integrated exactly",
         "max_error": float(np.abs(first - draws.race_law(p, q)).max())}
  counts = _count_races(rule, tables, q, seed)
  spread = np.sqrt(RACES * claimed * (1 - claimed))
  off = np.where(spread > 0, np.abs(counts - RACES * claimed) / np.where(spread > 0, spread, 1),
                 np.where(counts > 0, np.inf, 0))
  yield {"verifier": "coupled", "tree": f"chain of 1, {RACES} draws counted under one key",
         "max_error": float(np.abs(counts / RACES - claimed).max()), "standard_errors": float(off.max())}


def _count_races(rule, tables, q, seed):
  some = 2 ** 14  # at once
  params = tables_lib.batched(tables_lib.Setting().params, some, _VOCABULARY)
  as_f32 = lambda x: jnp.asarray(x, jnp.float32)
  given = params, as_f32(tables.target[0][0]), as_f32(tables.target[1]), as_f32(q)
  drawn = [np.asarray(_race(rule, jax.random.key(seed), np.arange(first, first + some, dtype=np.int32), *given))
           for first in range(0, RACES, some)]
  shape = (_VOCABULARY, 2, _VOCABULARY)
  return np.bincount(np.concatenate(drawn), minlength=int(np.prod(shape))).reshape(shape)


@functools.partial(jax.jit, static_argnums=0)
def _race(rule, key, seeds, params, target, behind, law):
  some = seeds.shape[0]
  positions = jnp.broadcast_to(jnp.arange(1, 3, dtype=jnp.int32), (some, 2))
  noise = keys.position_noise(keys.row_keys(key, seeds), positions, _VOCABULARY)
  drafted = coupled.race(law, noise[:, 0])
  logits = jnp.stack([jnp.broadcast_to(target, (some, _VOCABULARY)), behind[drafted]], 1)
  ones = jnp.ones(some, jnp.int32)
  verdict = rule.draw(logits, tree_lib.chain(0 * ones, drafted[:, None], ones), params,
                      jnp.int32(sampling.TEMPERATURE), keys.Uniforms(noise=noise), 1)
  return (drafted * 2 + verdict.accepted) * _VOCABULARY + verdict.token


def two_steps(seed: int = 1) -> collections.abc.Iterator[dict]:
  """Two steps in a row under the real keys, chains of two: a line a verifier that is lossless and draws uniforms."""
  schedule = worlds.real_schedule(jax.random.key(seed))
  for verifier, make in verifiers.BY_NAME.items():
    rule = make()
    if rule.lossless and keys.NOISE not in rule.purposes:
      result = worlds.text_law(rule, tables_lib.random_tables(seed, 2, 5), 2, schedule)
      yield {"verifier": verifier, "max_error": result.max_error}
