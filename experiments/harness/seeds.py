"""Counts of the first tokens over many seeds, against the law; and texts that must not depend on the drafter."""
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments.harness import context_table
from specjax import drivers
from specjax import keys as keys_lib
from specjax import proposers
from specjax import sampling
from specjax import testing
from specjax import verifiers
from specjax.proposers import base

TOKENS = 3
LEAST_P, GREATEST_GAP = 1e-4, 1e-4
_CHAIN, _TREE = (0, 0, 1), (0, 0, 0, 1)
# name -> verifier, the noisy drafter's shape and rule; None drafts nothing
CASES = {
    "plain": (verifiers.Point(), None, None),
    "point": (verifiers.Point(), _CHAIN, "independent"),
    "rejection": (verifiers.Rejection(), _CHAIN, "independent"),
    "block": (verifiers.Block(), _CHAIN, "independent"),
    "recursive": (verifiers.Recursive(), _TREE, "independent"),
    "recursive, without replacement": (verifiers.Recursive(), _TREE, "without_replacement"),
    "traversal": (verifiers.Traversal(), _TREE, "independent"),
    "traversal, without replacement": (verifiers.Traversal(), _TREE, "without_replacement"),
    "kseq": (verifiers.KSeq(), _TREE, "independent"),
    "greedy_multi": (verifiers.GreedyMulti(), _TREE, "greedy_multi"),
    "coupled": (verifiers.Coupled(), _CHAIN, "coupled"),
}


class Counted:
  """The law of the first `TOKENS` tokens behind one prompt, under top-k sampling, and counts of what is generated."""

  def __init__(self, target, prompt, *, temperature: float, top_k: int, noise: float):
    self._target, self._prompt, self._noise = target, prompt, noise
    self._table = context_table.tabulate(target, prompt, top_k, TOKENS)
    self._params = sampling.SamplingParams(temperature=temperature, top_k=top_k)
    self._law = self._exact_law()
    self._plain = None

  def run(self, name: str, seeds: int, batch: int, report=lambda done: None) -> dict:
    """Counts one case over `seeds` seeds, and its p-values; cases that come after "plain" are compared with it, too."""
    verifier, _, _ = CASES[name]
    counts, accepted, steps = dict.fromkeys(self._law, 0), 0, 0
    for begin in range(0, seeds, batch):
      rows = min(batch, seeds - begin)
      result = self._generate(self._table, name, np.arange(begin, begin + rows))
      for text in result.tokens.tolist():
        counts[tuple(text)] = counts.get(tuple(text), 0) + 1
      accepted += int(result.counters.accepted_tokens.sum())
      steps += int(result.counters.steps.sum())
      report(rows)
    observed = np.array(list(counts.values()), np.float64)
    expected = np.array([self._law.get(text, 0.0) for text in counts]) * seeds
    case = {"case": name, "verifier": type(verifier).__name__, "seeds": seeds, "accepted_per_step": accepted / steps,
            "impossible_texts": int(observed[expected == 0].sum()),
            "p_value": _goodness(observed, expected), "p_value_against_plain": None}
    if name == "plain":
      self._plain = counts
    elif self._plain:
      texts = list(self._law)
      case["p_value_against_plain"] = _two_samples([counts[t] for t in texts], [self._plain[t] for t in texts])
    return case

  def on_the_real_model(self, name: str, seeds: int) -> int:
    """How many of `seeds` texts of a case the model itself gives as the table does, drafts and all."""
    rows = np.arange(seeds)
    tables, real = (self._generate(target, name, rows).tokens for target in (self._table, self._target))
    return int((tables == real).all(1).sum())

  def _generate(self, target, name, seeds):
    verifier, shape, rule = CASES[name]
    proposer = proposers.Plain() if shape is None else testing.NoisySelf(noise=self._noise, parents=shape, rule=rule)
    return drivers.generate(target, proposer, [self._prompt] * len(seeds), self._params.replace(seed=seeds),
                            max_new_tokens=TOKENS, eos_ids=(), verifier=verifier)

  def _exact_law(self):
    """Every text's probability, by the one pipeline on the table."""
    rows = self._table.table.shape[0]
    laws = np.asarray(sampling.process(self._table.table[:, None], self._params.batch(rows)), np.float64)[:, 0]
    children, following = np.asarray(self._table.children), np.asarray(self._table.following)
    texts = {(): (0, 1.0)}
    for depth in range(TOKENS):
      longer = {}
      for text, (context, mass) in texts.items():
        law = laws[context] / laws[context].sum()
        for token in np.flatnonzero(law):
          behind = following[context][children[context] == token]
          longer[(*text, int(token))] = (int(behind[0]) if len(behind) else 0, mass * law[token])
      texts = longer
    return {text: mass for text, (_, mass) in texts.items()}


def _goodness(observed, expected):
  """Chi-square against the law; texts expected fewer than five times are one cell. 0 if an impossible text appeared."""
  if observed[expected == 0].sum():
    return 0.0
  often = expected >= 5
  pool = lambda x: np.append(x[often], x[~often].sum()) if (~often).any() else x
  observed, expected = pool(observed), pool(expected)
  kept = expected > 0
  return float(stats.chisquare(observed[kept], expected[kept] * observed.sum() / expected[kept].sum()).pvalue)


def _two_samples(a, b):
  table = np.array([a, b], np.float64)
  often = table.sum(0) >= 10
  table = np.concatenate([table[:, often], table[:, ~often].sum(1, keepdims=True)], axis=1)
  return float(stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


def line(case: dict) -> str:
  """One case as a line of text."""
  plain = case["p_value_against_plain"]
  return (f"{case['case']:32} {case['seeds']} seeds, {case['accepted_per_step']:.3f} accepted a step, "
          f"p = {case['p_value']:.3f} against the law" + ("" if plain is None else f", {plain:.3f} against plain"))


@struct.dataclass
class FixedWidth(base.Stateless):
  """Drafts what another proposer of chains drafts, filled up to its full width with one id.

  Products of another width round differently; at one width, texts of different drafters can be compared byte by byte.
  """
  inner: base.Proposer
  num_tokens: int = struct.field(pytree_node=False, default=7)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer`: the inner draft, then id 0."""
    tree, _ = self.inner.propose(target, cache, self.inner.init(target, context.length.shape[0], 0), context, keys)
    tree = tree.widen(self.num_tokens + 1)
    parents = jnp.maximum(jnp.arange(tree.width, dtype=jnp.int32) - 1, 0)
    full = jnp.where(context.active, tree.width, 1).astype(jnp.int32)
    sampled = None if tree.sampled is None else tree.sampled & tree.valid
    return tree.replace(tokens=jnp.where(tree.valid, tree.tokens, 0), sampled=sampled, size=full,
                        parents=jnp.broadcast_to(parents, tree.tokens.shape)), state


def coupled_texts(target, prompt, temperature: float, tokens: int, seeds: int = 4) -> dict:
  """How many of `seeds` texts each drafter leaves as plain decoding gives them under `coupled`.

  At one width they must be equal, byte by byte ("equal"). At the widths that the drafts ask for products round
  differently: "differences" holds for each first difference how close the race for that token was, as the difference of
  the two greatest logarithms of p / noise.
  """
  drafters = {"ngram": proposers.NGram(num_tokens=7),
              "noisy self": testing.NoisySelf(parents=(0, 0, 1, 2), rule="coupled"),
              "always wrong": testing.always_wrong(4, stream="noise")}
  key, params = jax.random.key(5), sampling.SamplingParams(temperature=temperature, seed=np.arange(seeds))
  run = functools.partial(drivers.generate, target, prompts=[prompt] * seeds, max_new_tokens=tokens, eos_ids=(),
                          params=params, verifier=verifiers.Coupled(), key=key)
  plain = run(proposer=FixedWidth(proposers.Plain())).token_ids
  results = {name: run(proposer=FixedWidth(drafter)) for name, drafter in drafters.items()}
  free = {name: run(proposer=drafter).token_ids for name, drafter in (drafters | {"plain": proposers.Plain()}).items()}
  count = lambda result: sum(a == b for a, b in zip(result.token_ids, plain, strict=True))
  differences = []
  for name, texts in free.items():
    for row, (text, other) in enumerate(zip(texts, plain, strict=True)):
      if text != other:
        shared = next(i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b)
        differences.append({"drafter": name, "row": row, "token": shared, "gap": _race_gap(
            target, [*prompt, *plain[row][:shared]], temperature, key, row)})
  return {"seeds": seeds, "tokens": tokens, "equal": {name: count(result) for name, result in results.items()},
          "accepted": {name: int(result.counters.accepted_tokens.sum()) for name, result in results.items()},
          "differences": differences}


def _race_gap(target, text, temperature, key, seed):
  """How close the race for the token behind `text` is: the difference of the two greatest log p / noise."""
  state = drivers.start(target, proposers.Plain(), [text], sampling.SamplingParams(temperature=temperature),
                        max_new_tokens=1)
  out = target.forward(state.context().pending[:, None], state.length[:, None] - 1, jnp.ones((1, 1, 1), bool),
                       state.cache)
  noise = keys_lib.position_noise(keys_lib.row_keys(key, jnp.asarray([seed])), state.length[:, None],
                                  target.vocab_size)
  first, second = jax.lax.top_k((target.logits(out.hidden) / temperature - jnp.log(noise))[0, 0], 2)[0]
  return float(first - second)


def failures(cases: list[dict], same: dict, real: int) -> list[str]:
  """What is not as it must be, in words. A text that the model gives otherwise than the table is a failure only beyond
  one a case: tokens at the edge of their interval may fall either way with another rounding."""
  found = [f"{case['case']}: p-values {case['p_value']:.1e} against the law, {case['p_value_against_plain']} against "
           f"plain; at least {LEAST_P} is expected" for case in cases
           if min(case["p_value"], 1.0 if case["p_value_against_plain"] is None else case["p_value_against_plain"])
           < LEAST_P]
  found += [f"{case['case']}: {case['equal_on_the_model']} of {real} texts are the same on the model itself"
            for case in cases if case["equal_on_the_model"] < real - 1]
  found += [f"coupled text depends on the drafter: {name}, {count} of {same['seeds']} equal"
            for name, count in same["equal"].items() if count < same["seeds"]]
  found += [f"coupled text differs across widths by more than rounding: {d}" for d in same["differences"]
            if not d["gap"] < GREATEST_GAP]
  if not same["accepted"]["noisy self"]:
    found.append("no draft was accepted under coupled: the comparison says nothing")
  return found
