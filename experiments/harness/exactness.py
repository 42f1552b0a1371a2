"""The matrix of exactness, by enumeration: draft rules, verifiers and trees that go together, under processors."""
import collections.abc
import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np

from experiments.harness import exactness_draws
from specjax import constraints
from specjax import sampling
from specjax import verifiers
from specjax.theory import drafts
from specjax.theory import negatives as negatives_lib
from specjax.theory import oracle
from specjax.theory import tables as tables_lib
from specjax.theory import transport

BOUND, BOUND_X64, CAUGHT, DRAW_BOUND = 1e-6, 1e-12, 1e-3, 1e-6
CHANCE = 5  # standard errors that a count may be off; with one key and some twenty counts, one in a hundred thousand

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
    "tiny temperature": tables_lib.Setting(_make(temperature=1e-6)),
    "hot, top-k beyond": tables_lib.Setting(_make(temperature=2.0, top_k=100)),
    "tiny top-p, min-p 1": tables_lib.Setting(_make(temperature=1.0, top_p=1e-9, min_p=1.0)),
}
_EXTREMES = ("tiny temperature", "hot, top-k beyond", "tiny top-p, min-p 1")
_EXTREME_DRAFTS = ("top_k", "iid", "without_replacement")
_FEW = ("none", "top-k, top-p", "penalties")  # for draft rules that vary one of the main ones
_DRAWN = ("iid", "truncated", "without_replacement", "truncated_without_replacement")  # all nodes, from q
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
          for verifier, tree, draft in itertools.product(exactness_draws.rules(), TREES, DRAFTS)
          if _fits(verifier, tree, draft) for setting in _settings(draft)]


def _settings(draft):
  if draft not in _MAIN:
    return _FEW
  return [name for name in PROCESSORS if name not in _EXTREMES or draft in _EXTREME_DRAFTS]


def _fits(verifier, tree, draft):
  rule, chain = exactness_draws.rules()[verifier](), tree.startswith("chain")
  points = draft in drafts.POINTS
  if draft in ("top_k", "argmax") and chain == (draft == "top_k"):  # one rule under two names
    return False
  if chain and draft in _WITHOUT and (rule.chain_only or verifier == "coupled"):  # nothing is replaced on a chain
    return False
  if draft.endswith("sparse") and TREES[tree][1] > 3:  # a sparse law is read alike whatever the vocabulary
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
  rule = exactness_draws.rules()[cell.verifier]()
  made = lambda dtype: oracle.judge(rule, _case(cell.draft, cell.tree, cell.processors, seed, dtype))
  double = made(np.float64)
  single = made(np.float32) if rule.lossless else double  # how far a lossy rule strays is no matter of rounding
  return dataclasses.asdict(cell) | {
      "lossless": rule.lossless, "max_error": single.max_error, "max_error_x64": double.max_error,
      "total_variation": double.total_variation, "expected_accepted": double.expected_accepted,
      "best_possible": _best(cell.draft, cell.tree, cell.processors, seed)}


def other_seeds(seed: int = 1) -> collections.abc.Iterator[dict]:
  """Exact acceptance of rejection and block on five more tables, for `block_against_rejection`."""
  for other, tree, draft, verifier in itertools.product(
      range(seed + 1, seed + 6), ("chain of 2", "chain of 3"),
      ("argmax", "iid", "truncated", "mixture", "ragged"), ("rejection", "block")):
    result = oracle.judge(verifiers.BY_NAME[verifier](), _case(draft, tree, "none", other, np.float64))
    yield {"verifier": verifier, "draft": draft, "tree": f"{tree}, seed {other}", "processors": "none",
           "expected_accepted": result.expected_accepted}


@functools.cache
def _case(draft, tree, processors, seed, dtype):
  """What all verifiers of a draft share."""
  tables, setting = _tables(tree, seed), PROCESSORS[processors]
  return oracle.prepare(tables, _draft(draft, tree, processors).outcomes(tables, setting, dtype), setting, dtype)


def _draft(name, tree, processors):
  rule, _, variant = name.partition(", ")
  draft = drafts.named(rule, TREES[tree][0], sparse=variant == "sparse")
  return dataclasses.replace(draft, params=PROCESSORS[processors].params) if variant == "processed alike" else draft


@functools.cache
def _best(name, tree, processors, seed):
  """The greatest acceptance of any lossless rule for this draft: among siblings of the root by optimal transport, on a
  chain of two without processors by a linear program over what a rule for one path may do; else None."""
  setting, tables, draft = PROCESSORS[processors], _tables(tree, seed), _draft(name, tree, processors)
  rule = name.partition(", ")[0]
  laws = lambda logits, params, depth: tables_lib.conditionals(logits[:depth + 1], setting, params)
  if tree == "chain of 2" and processors == "none" and rule in _DRAWN:
    return transport.single_path_by_program(laws(tables.target, None, 2), laws(tables.draft, draft.params, 2), 2)
  if any(draft.parents):
    return None
  p = laws(tables.target, None, 0)[0][0]
  if rule in _DRAWN:
    return transport.optimal(p, laws(tables.draft, draft.params, 0)[0][0], len(draft.parents) - 1, draft.replacement)
  outcomes, law = draft.outcomes(tables, setting), {}
  for tokens, size, mass in zip(outcomes.tokens.tolist(), outcomes.size, outcomes.probability, strict=True):
    drawn = tuple(tokens[1:size])
    law[drawn] = law.get(drawn, 0.0) + mass
  return transport.optimal_by_program(p, law)


@functools.cache
def _tables(tree, seed):
  parents, vocabulary = TREES[tree]
  return tables_lib.random_tables(seed, vocabulary, int(drafts.depths(parents).max()), sharpness=1.2, agreement=0.6)


def fits_bound(line: dict) -> bool:
  """Whether a lossless cell keeps the target's law."""
  return line["max_error"] < BOUND and line["max_error_x64"] < BOUND_X64


def negatives() -> collections.abc.Iterator[dict]:
  """The known-wrong rules and their right twins."""
  for negative in negatives_lib.NEGATIVES:
    yield {"name": negative.name, "max_error": negative.wrong(verifiers), "right_twin": negative.right(verifiers)}


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
  start = f"{group['verifier']:20} {group['draft']:34} {group['cells']:3} cells  "
  accepted = f"  {group['expected_accepted']:.4f} accepted"
  if not group["lossless"]:
    return f"{start}LOSSY: total variation up to {group['total_variation']:.4f}         {accepted}"
  return f"{start}error {group['max_error']:.1e} (f32) {group['max_error_x64']:.1e} (x64){accepted}"


def failures(lines: list[dict], draws_made: list[dict], steps: list[dict], wrong: list[dict], block: dict) -> list[str]:
  """What is not as it must be, in words; empty when all is exact."""
  found = [f"{x['verifier']} with {x['draft']} on {x['tree']}, {x['processors']}: error {x['max_error']:.1e} in f32, "
           f"{x['max_error_x64']:.1e} under x64" for x in lines if x["lossless"] and not fits_bound(x)]
  found += [f"the draw of {x['verifier']} on {x['tree']} misses its law by {x['max_error']:.1e}" for x in draws_made
            if not (x["standard_errors"] < CHANCE if "standard_errors" in x else x["max_error"] < DRAW_BOUND)]
  known = [x for x in lines if x["lossless"] and x.get("best_possible") is not None]
  found += [f"{x['verifier']} with {x['draft']} on {x['tree']}, {x['processors']} accepts "
            f"{x['expected_accepted']:.9f}, more than is possible, {x['best_possible']:.9f}" for x in known
            if x["expected_accepted"] > x["best_possible"] + 1e-7]
  found += [f"two steps of {x['verifier']} miss the law by {x['max_error']:.1e}" for x in steps
            if not x["max_error"] < BOUND_X64]
  found += [f"the wrong rule {x['name']} was not caught: error {x['max_error']:.1e}" for x in wrong
            if not x["max_error"] > CAUGHT]
  found += [f"the right twin of {x['name']} has error {x['right_twin']:.1e}" for x in wrong
            if not x["right_twin"] < BOUND]
  if block["at_least"] < block["cells"] or block["equal"] < block["point_cells"]:
    found.append(f"block verification: {block}")
  return found
