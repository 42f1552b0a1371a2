"""The matrix of exactness: every draft rule x verifier x tree x processor setting that go together, by enumeration."""
import collections.abc
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import constraints
from specjax import keys
from specjax import sampling
from specjax import verifiers
from specjax.theory import drafts
from specjax.theory import draws
from specjax.theory import negatives as negatives_lib
from specjax.theory import oracle
from specjax.theory import tables as tables_lib
from specjax.theory import transport
from specjax.theory import worlds

BOUND, BOUND_X64, CAUGHT, DRAW_BOUND = 1e-6, 1e-12, 1e-3, 1e-6

# name -> parents, vocabulary; shapes in depth-first order, so that rows may end early anywhere. Few vocabularies and
# widths: each pair of them is a program of its own.
TREES = {
    "chain of 1": ((0, 0), 3),
    "chain of 2": ((0, 0, 1), 3),
    "chain of 3": ((0, 0, 1, 2), 3),
    "two siblings": ((0, 0, 0), 5),
    "three siblings": ((0, 0, 0, 0), 3),
    "branches": ((0, 0, 1, 1, 0, 4), 3),
    "depth 3": ((0, 0, 1, 2, 1, 0), 3),
}

_make = sampling.SamplingParams


def no_repeats(vocabulary: int) -> constraints.Automaton:
  """A grammar: no id follows itself, and the text does not begin with the last one. State v: v was said last."""
  table = np.tile(np.arange(vocabulary), (vocabulary + 1, 1))
  np.fill_diagonal(table, -1)
  table[vocabulary, -1] = -1
  return constraints.Automaton(transitions=jnp.asarray(table, jnp.int32), start=vocabulary)


# name -> parameters, the prompt (its last token is pending), end ids
PROCESSORS = {
    "none": tables_lib.Setting(),
    "greedy": tables_lib.Setting(_make(temperature=0.0)),
    "temperature": tables_lib.Setting(_make(temperature=0.5)),
    "top-k, top-p": tables_lib.Setting(_make(temperature=1.5, top_k=2, top_p=0.8)),
    "min-p": tables_lib.Setting(_make(temperature=1.0, min_p=0.4)),
    "penalties": tables_lib.Setting(_make(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5,
                                          frequency_penalty=0.4), prompt=(1, 0, 1)),
    "bias, banned ids": tables_lib.Setting(_make(temperature=1.0, logit_bias={0: 1.0}, banned_ids=[1])),
    "allowed ids": tables_lib.Setting(_make(temperature=1.0, allowed_ids=[0, 1])),
    "minimum length": tables_lib.Setting(_make(temperature=1.0, min_new_tokens=2), eos=(0,)),
    "grammar": tables_lib.Setting(_make(temperature=1.0), constraint=no_repeats),
    "all together": tables_lib.Setting(_make(temperature=0.7, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=1.2,
                                             presence_penalty=0.3, frequency_penalty=0.2, logit_bias={0: 0.5},
                                             min_new_tokens=1), prompt=(0, 1), eos=(1,)),
}
_FEW = ("none", "top-k, top-p", "penalties")  # for draft rules that vary one of the main ones
_SPARSE = ("iid", "without_replacement", "truncated", "mixture")
_MAIN = ("top_k", "iid", "without_replacement", "truncated", "greedy_multi", "mixture", "iid, sparse",
         "iid, processed alike")
DRAFTS = (*drafts.NAMES, *(f"{name}, sparse" for name in _SPARSE), "iid, processed alike")
_WITHOUT = tuple(name for name in DRAFTS if "without_replacement" in name)


@dataclasses.dataclass(frozen=True)
class Cell:
  """One combination."""
  draft: str
  verifier: str
  tree: str
  processors: str


def cells() -> list[Cell]:
  """All that go together."""
  return [Cell(draft, verifier, tree, setting)
          for verifier, tree, draft in itertools.product(verifiers.BY_NAME, TREES, DRAFTS)
          if _fits(verifier, tree, draft) for setting in (PROCESSORS if draft in _MAIN else _FEW)]


def _fits(verifier, tree, draft):
  rule, chain = verifiers.BY_NAME[verifier], tree.startswith("chain")
  points = draft in drafts.POINTS
  if draft in ("top_k", "argmax") and chain == (draft == "top_k"):  # one rule under two names
    return False
  if (rule.chain_only and not chain) or (rule.needs_q and points):
    return False
  if verifier == "kseq":
    return draft not in _WITHOUT
  if verifier == "coupled":  # its law is known for sampled nodes without siblings
    return points or chain
  return verifier != "greedy_multi" or draft.startswith(("greedy_multi", "mixture", "iid"))


def judge(cell: Cell, seed: int = 1) -> dict:
  """The line of `exactness.json` for one cell: exact errors in float32 and float64, exact expected acceptance."""
  rule = verifiers.BY_NAME[cell.verifier]()
  single, double = (oracle.judge(rule, _case(cell.draft, cell.tree, cell.processors, seed, dtype))
                    for dtype in (np.float32, np.float64))
  return dataclasses.asdict(cell) | {
      "lossless": rule.lossless, "max_error": single.max_error, "max_error_x64": double.max_error,
      "total_variation": double.total_variation, "expected_accepted": double.expected_accepted,
      "best_possible": _best(cell, _tables(cell.tree, seed), PROCESSORS[cell.processors], _draft(cell.draft, cell.tree,
                                                                                                 cell.processors))}


@functools.cache
def _case(draft, tree, processors, seed, dtype):
  """What all verifiers of a draft share."""
  tables, setting = _tables(tree, seed), PROCESSORS[processors]
  return oracle.prepare(tables, _draft(draft, tree, processors).outcomes(tables, setting, dtype), setting, dtype)


def _draft(name, tree, processors):
  rule, _, variant = name.partition(", ")
  draft = drafts.named(rule, TREES[tree][0], sparse=variant == "sparse")
  return dataclasses.replace(draft, params=PROCESSORS[processors].params) if variant == "processed alike" else draft


def _best(cell, tables, setting, draft):
  """The optimal acceptance among siblings drawn by one rule, by optimal transport; None where it is not known."""
  parents, _ = TREES[cell.tree]
  rule = cell.draft.partition(", ")[0]
  if any(parents) or rule not in ("iid", "truncated", "without_replacement", "truncated_without_replacement"):
    return None
  p, q = (tables_lib.conditionals(logits[:1], setting, params)[0][0]
          for logits, params in ((tables.target, None), (tables.draft, draft.params)))
  return transport.optimal(p, q, len(parents) - 1, draft.replacement)


@functools.cache
def _tables(tree, seed):
  parents, vocabulary = TREES[tree]
  depth = [0]
  for node in range(1, len(parents)):
    depth.append(depth[parents[node]] + 1)
  return tables_lib.random_tables(seed, vocabulary, max(depth), sharpness=1.2, agreement=0.6)


def fits_bound(line: dict) -> bool:
  """Whether a lossless cell keeps the target's law."""
  return line["max_error"] < BOUND and line["max_error_x64"] < BOUND_X64


def negatives() -> collections.abc.Iterator[dict]:
  """The known-wrong rules and their right twins."""
  for negative in negatives_lib.NEGATIVES:
    yield {"name": negative.name, "max_error": negative.wrong(verifiers), "right_twin": negative.right(verifiers)}


def fast_draws() -> collections.abc.Iterator[dict]:
  """What actually runs, integrated over its uniforms, against the law that was judged: a line a verifier and tree."""
  for verifier, tree in itertools.product(verifiers.BY_NAME, ("chain of 3", "branches")):
    rule = verifiers.BY_NAME[verifier]()
    if keys.NOISE in rule.purposes or (rule.chain_only and not tree.startswith("chain")):
      continue
    parents, vocabulary = TREES[tree]
    # Points are verified by the token stream; every other rule is tried on drawn nodes.
    draft = drafts.named("top_k" if verifier == "point" else "iid", parents)
    outcomes = draft.outcomes(_tables(tree, 1), tables_lib.Setting(), np.float32)
    chosen = np.linspace(0, len(outcomes.tokens) - 1, 8).astype(int)
    few = dataclasses.replace(outcomes, **{name: getattr(outcomes, name)[chosen] for name in (
        "tokens", "parents", "size", "probability", "sampled", "q")})
    logits = np.random.default_rng(7).normal(size=(len(chosen), len(parents), vocabulary)).astype(np.float32)
    params, depth = tables_lib.batched(_make(temperature=0.9), len(chosen), vocabulary), len(parents) - 1
    made = draws.draw_law(rule, jnp.asarray(logits), few.tree(np.float32), params, depth)
    p = sampling.process(jnp.asarray(logits), params)
    stop, following = (np.asarray(x, np.float64) for x in jax.jit(rule.law, static_argnums=2)(
        p, few.tree(np.float32), depth))
    yield {"verifier": verifier, "tree": tree, "max_error": float(np.abs(made - stop[..., None] * following).max())}


def two_steps() -> collections.abc.Iterator[dict]:
  """Two steps in a row under the real keys: a line a verifier."""
  for verifier in ("point", "rejection", "block", "recursive", "traversal"):
    result = worlds.text_law(verifiers.BY_NAME[verifier](), tables_lib.random_tables(2, 2, 5), 2,
                             worlds.real_schedule())
    yield {"verifier": verifier, "max_error": result.max_error}


def block_against_rejection(lines: list[dict]) -> dict:
  """In how many chains block accepts at least what rejection does, and in how many point chains exactly as much."""
  accepted = {(line["verifier"], line["draft"], line["tree"], line["processors"]): line["expected_accepted"]
              for line in lines}
  pairs = [(key, value, accepted["block", *key[1:]]) for key, value in accepted.items() if key[0] == "rejection"]
  points = [(a, b) for key, a, b in pairs if key[1] in drafts.POINTS]
  return {"cells": len(pairs), "at_least": sum(b >= a - 1e-12 for _, a, b in pairs),
          "point_cells": len(points), "equal": sum(abs(a - b) < 1e-12 for a, b in points)}


def groups(lines: list[dict]) -> list[dict]:
  """Cells of one verifier and draft rule together."""
  found = {}
  for line in lines:
    found.setdefault((line["verifier"], line["draft"]), []).append(line)
  return [{"verifier": verifier, "draft": draft, "cells": len(some), "lossless": some[0]["lossless"],
           "max_error": max(x["max_error"] for x in some), "max_error_x64": max(x["max_error_x64"] for x in some),
           "total_variation": max(x["total_variation"] for x in some),
           "expected_accepted": float(np.mean([x["expected_accepted"] for x in some]))}
          for (verifier, draft), some in found.items()]


def line_of(group: dict) -> str:
  """One group as a line of text."""
  start = f"{group['verifier']:12} {group['draft']:34} {group['cells']:3} cells  "
  accepted = f"  {group['expected_accepted']:.4f} accepted"
  if not group["lossless"]:
    return f"{start}LOSSY: total variation up to {group['total_variation']:.4f}         {accepted}"
  return f"{start}error {group['max_error']:.1e} (f32) {group['max_error_x64']:.1e} (x64){accepted}"


def failures(lines: list[dict], draws_made: list[dict], steps: list[dict], wrong: list[dict], block: dict) -> list[str]:
  """What is not as it must be, in words; empty when all is exact."""
  found = [f"{x['verifier']} with {x['draft']} on {x['tree']}, {x['processors']}: error {x['max_error']:.1e} in f32, "
           f"{x['max_error_x64']:.1e} under x64" for x in lines if x["lossless"] and not fits_bound(x)]
  found += [f"the draw of {x['verifier']} on {x['tree']} misses its law by {x['max_error']:.1e}" for x in draws_made
            if not x["max_error"] < DRAW_BOUND]
  found += [f"two steps of {x['verifier']} miss the law by {x['max_error']:.1e}" for x in steps
            if not x["max_error"] < BOUND_X64]
  found += [f"the wrong rule {x['name']} was not caught: error {x['max_error']:.1e}" for x in wrong
            if not x["max_error"] > CAUGHT]
  found += [f"the right twin of {x['name']} has error {x['right_twin']:.1e}" for x in wrong
            if not x["right_twin"] < BOUND]
  if block["at_least"] < block["cells"] or block["equal"] < block["point_cells"]:
    found.append(f"block verification: {block}")
  return found
