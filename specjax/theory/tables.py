"""Target and draft as tables over all contexts, and the laws that the real processor pipeline makes of them.

Small enough to enumerate: a vocabulary of V <= 5 and every context of at most D tokens behind the pending one. The
tables hold logits; a law is got from them by `sampling.process`, so that what compares laws judges processors.
The target's own law is taken as plain decoding takes it, every context in a tree of one node; a verifier's p is taken
from the drafted tree at once (`tree_laws`), so a wrong history or mask along a path shows as a difference.

Letters: B rows, T nodes, D depth, V vocabulary. A context of d tokens is the number that they spell to the base V.
"""
import dataclasses
import functools
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import constraints
from specjax import processors
from specjax import sampling
from specjax import sampling_params
from specjax import tree as tree_lib

LEAST_DEPTH = 3  # the least depth that a pipeline or a verifier is told, so that few programs compile
# Compiler options for programs that run once and little: they halve the time of a compilation. `draws` does without, as
# it judges what runs.
CHEAP = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_SLOTS = 16      # the least slots of a text, for the same reason
TOYS = {
    "A": ((.3, .4, .3), (.6, .3, .1)),
    "B": ((1 / 3, 2 / 3), (2 / 3, 1 / 3)),
    "C": ((.5, .3, .1, .1), (.1, .2, .3, .4)),
}

_jit = functools.partial(jax.jit, compiler_options=CHEAP)


@dataclasses.dataclass(frozen=True)
class Tables:
  """Logits after every context of 0 .. D tokens; -inf forbids a token."""
  target: tuple[np.ndarray, ...]  # f64[V ** d, V] for d = 0 .. D
  draft: tuple[np.ndarray, ...]   # the same

  @property
  def vocabulary(self) -> int:
    return self.target[0].shape[1]

  @property
  def depth(self) -> int:
    return len(self.target) - 1

  def behind(self, text: tuple[int, ...], depth: int) -> "Tables":
    """The tables as they are after a text, to a depth of their own."""
    at = functools.reduce(lambda context, token: context * self.vocabulary + token, text, 0)
    cut = lambda logits: tuple(logits[len(text) + d][at * self.vocabulary ** d:(at + 1) * self.vocabulary ** d]
                               for d in range(depth + 1))
    return Tables(cut(self.target), cut(self.draft))


@dataclasses.dataclass(frozen=True)
class Setting:
  """What the request asks for. `prompt` ends with the pending token; `eos` are the ids that `min_new_tokens` bans.

  `constraint` makes one for a vocabulary of V; it masks the target and not the draft, whose tokens it may forbid.
  """
  params: sampling.SamplingParams = sampling.SamplingParams(temperature=1.0)
  prompt: tuple[int, ...] = (0,)
  eos: tuple[int, ...] = ()
  constraint: Callable[[int], constraints.Constraint] | None = None


def random_tables(seed: int, vocabulary: int, depth: int, *, sharpness: float = 1.0, agreement: float = 0.5,
                  zeros: float = 0.0) -> Tables:
  """Tables in which every context has its own laws.

  Args:
    seed: of NumPy's generator. vocabulary: V. depth: D.
    sharpness: scale of the normal logits; 0 is uniform.
    agreement: correlation of the draft's logits with the target's.
    zeros: the chance that an id is forbidden, in either table apart; never all of a row.
  """
  rng = np.random.default_rng(seed)
  target, draft = [], []
  for d in range(depth + 1):
    shape = (vocabulary ** d, vocabulary)
    own, noise = rng.normal(size=shape), rng.normal(size=shape)
    both = [own, agreement * own + np.sqrt(1 - agreement ** 2) * noise]
    for table, logits in zip((target, draft), both, strict=True):
      banned = rng.uniform(size=shape) < zeros
      banned[np.arange(len(banned)), rng.integers(vocabulary, size=len(banned))] = False
      table.append(np.where(banned, -np.inf, sharpness * logits))
  return Tables(tuple(target), tuple(draft))


def context_free(p, q, depth: int) -> Tables:
  """The same laws `p` and `q` f[V] after every context."""
  spread = lambda law: tuple(np.tile(_log(law), (len(law) ** d, 1)) for d in range(depth + 1))
  return Tables(spread(p), spread(q))


def toy(name: str, depth: int) -> Tables:
  """The context-free toys of the golden values: "A" of Traversal verification (arXiv 2505.12398), "B" of block
  verification (arXiv 2403.10444), "C"."""
  return context_free(*TOYS[name], depth)


def conditionals(logits: tuple[np.ndarray, ...], setting: Setting, params: sampling.SamplingParams | None = None,
                 dtype=np.float64) -> tuple[np.ndarray, ...]:
  """The processed law after every context, as plain decoding has it: f64[V ** d, V] for d = 0 .. D.

  Args:
    logits: `Tables.target` or `Tables.draft`.
    setting: prompt and parameters. params: instead of the setting's, for a draft with parameters of its own.
    dtype: what the pipeline computes in.
  """
  vocabulary, prompt = logits[0].shape[1], len(setting.prompt)
  tokens = np.zeros((sum(map(len, logits)), max(_SLOTS, prompt + len(logits) - 1)), np.int32)
  tokens[:, :prompt] = setting.prompt
  length, first = np.zeros(len(tokens), np.int32), 0
  for d, table in enumerate(logits):
    rows = slice(first, first + len(table))
    tokens[rows, prompt:prompt + d] = spell(np.arange(len(table)), d, vocabulary)
    length[rows] = prompt + d
    first += len(table)
  last = np.take_along_axis(tokens, length[:, None] - 1, axis=1)
  more = lambda x: np.concatenate([x, np.repeat(x[:1], few_sizes(first) - first, axis=0)])
  allowed = None
  if setting.constraint is not None and params is None:
    allowed = _allowed_behind(setting.constraint(vocabulary), more(tokens)[:, prompt:], more(length) - prompt)
  laws = _process(more(np.concatenate(logits))[:, None], setting.params if params is None else params, setting,
                  more(tokens), more(length), more(last), np.ones((few_sizes(first), 1, 1), bool), dtype,
                  allowed=allowed)
  return tuple(np.split(laws[:first, 0], np.cumsum([len(table) for table in logits])[:-1]))


def tree_laws(logits: np.ndarray, tokens: np.ndarray, parents: np.ndarray, depth: int, setting: Setting,
              dtype=np.float64, distort=None) -> np.ndarray:
  """The processed law at every node of drafted trees, as a step has it: f64[R, T, V].

  Args:
    logits: f64[R, T, V]. tokens, parents: i32[R, T] of trees that stand behind the prompt. depth: D.
    setting: prompt and parameters. dtype: what the pipeline computes in.
    distort: a function of `processors.Prefixes`, to show what a wrong history does.
  """
  rows = len(tokens)
  mask = np.asarray(_ancestors(parents, max(depth, LEAST_DEPTH)))
  prompt = np.tile(np.asarray(setting.prompt, np.int32), (rows, 1))
  # The slots of tokens to come hold poison.
  slots = max(_SLOTS, len(setting.prompt) + depth) - len(setting.prompt)
  prompt = np.pad(prompt, ((0, 0), (0, slots)), constant_values=logits.shape[-1] - 1)
  length = np.full(rows, len(setting.prompt), np.int32)
  allowed = None
  if setting.constraint is not None:
    allowed = _allowed_in_tree(setting.constraint(logits.shape[-1]), tokens, parents)
  return _process(logits, setting.params, setting, prompt, length, tokens, mask, dtype, distort, allowed)


def spell(contexts: np.ndarray, length: int, vocabulary: int) -> np.ndarray:
  """The tokens of contexts that are numbers to the base V: i32[B, length] from i64[B]."""
  powers = vocabulary ** np.arange(length - 1, -1, -1, dtype=np.int64)
  return (np.asarray(contexts)[:, None] // powers % vocabulary).astype(np.int32)


def few_sizes(rows: int) -> int:
  """A batch size that holds `rows`, one of few, so that few programs compile: 64, 1024, 4096, 16384, .."""
  size = 64
  while size < rows:
    size *= 16 if size == 64 else 4
  return size


def batched(params: sampling.SamplingParams, rows: int, vocabulary: int) -> sampling.SamplingParams:
  """The same parameters for all rows; they are checked once, not row by row."""
  return jax.tree.map(lambda x: jnp.asarray(np.repeat(x, rows, axis=0)), params.batch(1, vocabulary))


def joint(laws: tuple[np.ndarray, ...]) -> np.ndarray:
  """The law of D + 1 tokens, f64[V ** (D + 1)], from the law after every context."""
  mass = np.ones(1)
  for law in laws:
    mass = (mass[:, None] * law).ravel()
  return mass


def _process(logits, params, setting, tokens, length, path_tokens, mask, dtype, distort=None, allowed=None):
  rows, _, vocabulary = logits.shape
  eos = np.tile(np.asarray(setting.eos or (-1,), np.int32), (rows, 1))
  start = np.full(rows, len(setting.prompt), np.int32)
  with jax.enable_x64(dtype == np.float64):
    prefixes = processors.Prefixes(tokens=jnp.asarray(tokens), length=jnp.asarray(length), start=jnp.asarray(start),
                                   eos=jnp.asarray(eos), path_tokens=jnp.asarray(path_tokens, jnp.int32),
                                   mask=jnp.asarray(mask), allowed=allowed)
    prefixes = prefixes if distort is None else distort(prefixes)
    law = _processed(jnp.asarray(logits, dtype), _with_all(batched(params, rows, vocabulary)), prefixes)
    return np.asarray(law, np.float64)


def _with_all(params):
  """With neutral values for what is not asked for, if anything is that changes logits: one program for all settings."""
  if not params.adjusts:
    return params
  rows = params.temperature.shape[0]
  spread = lambda value, dtype: jnp.asarray(np.full(rows, value, dtype))
  none = sampling_params.RowIds(ids=jnp.asarray(np.full((rows, 8), -1, np.int32)))
  neutral = dict(repetition_penalty=spread(1, np.float32), presence_penalty=spread(0, np.float32),
                 frequency_penalty=spread(0, np.float32), min_new_tokens=spread(0, np.int32), banned_ids=none,
                 allowed_ids=none, logit_bias=none.replace(values=jnp.asarray(np.zeros((rows, 8), np.float32))))
  return params.replace(**{name: value for name, value in neutral.items() if getattr(params, name) is None})


@_jit
def _allowed_behind(rule, output, length):
  """bool[B, 1, V]: what may follow the first `length` i32[B] of the output tokens i32[B, S]."""
  return rule.allowed(constraints.advance_by(rule, rule.init(output.shape[0]), output, length))[:, None]


@_jit
def _allowed_in_tree(rule, tokens, parents):
  """bool[B, T, V]: what may follow each node of trees that stand behind the prompt."""
  tree = tree_lib.TokenTree(tokens=tokens, parents=parents, size=None)
  return constraints.allowed_at(rule, constraints.node_states(rule, rule.init(tokens.shape[0]), tree))


_ancestors = _jit(tree_lib.ancestors, static_argnums=1)


@_jit
def _processed(logits, params, prefixes):
  return sampling.process(logits, params, prefixes)


def _log(law):
  with np.errstate(divide="ignore"):
    return np.log(np.asarray(law, np.float64))
