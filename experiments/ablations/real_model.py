"""What the ablations on a real model share: SmolLM2-135M with its EAGLE-3 head, requests, arms, and counts of a run.

Tokens a step and acceptance are counts: of greedy decoding they are the same in every run, and sampled they depend on
the seed alone. Every arm runs a request before the next one starts, in an order that rotates, so that the seconds which
some ablations need drift alike. The first step of a call compiles and is no part of them.

Letters: R requests, D positions of a draft.
"""
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments import workloads
from experiments.harness import statistics
import specjax
from specjax import counters as counters_lib
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import verifiers
from specjax.checkpoints import heads
from specjax.proposers import base as proposers_base
from specjax.theory import acceptance

TARGET = "smollm2-135m"
HEAD, LOOKUP, SUFFIX = "EAGLE-3 head", "prompt lookup", "suffix lookup"
SLOTS = 256  # prompt and output: one bucket of the cache, so that an arm is compiled once
_PREFILLS = ((64,), (128,), (192,))  # each further size is compiled for every arm
_COUNTED = ("steps", "output_tokens", "drafted_tokens", "accepted_tokens", "drafted_per_position",
            "trials_per_position", "accepted_per_position")


@dataclasses.dataclass(frozen=True)
class Asked:
  """A request and the ids of its prompt."""
  request: workloads.Request
  ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Model:
  """A target, its tokenizer, an EAGLE-3 head for it, and requests."""
  target: Any
  tokenizer: Any
  head: Any
  requests: tuple[workloads.Request, ...]
  prefills: tuple[tuple[int, ...], ...] = _PREFILLS

  def asked(self, new_tokens: int, kinds: Sequence[str] | None = None, each: int = 1, *,
            any_length: bool = False) -> list[Asked]:
    """The first `each` requests of every category, their first turns, that fit `SLOTS` with `new_tokens` of output.

    Args:
      kinds: categories, all by default.
      any_length: also prompts that other prefill programs than those of `prefills` read.
    """
    found, count = [], {}
    for request in self.requests:
      ids = tuple(self.tokenizer.chat([{"role": "user", "content": request.turns[0]}]))
      fits = len(ids) + new_tokens <= SLOTS and (any_length or tuple(drivers.chunks(len(ids) - 1)) in self.prefills)
      if fits and (kinds is None or request.category in kinds) and count.get(request.category, 0) < each:
        count[request.category] = count.get(request.category, 0) + 1
        found.append(Asked(request, ids))
    return found

  def chain(self, length: int, most: int = 7) -> "Within":
    """The head's greedy chain. Of one program whatever the length up to `most`."""
    return Within(proposers.Eagle(head=self.head, num_tokens=most), np.int32(length))

  def drawn(self, length: int) -> proposers.Eagle:
    """The head's chain, its tokens drawn from its law at the request's temperature."""
    return proposers.Eagle(head=self.head, num_tokens=length, drawing=proposers.Drawing(sampled=True))

  def tree(self, nodes: int, depth: int, most: int = 6) -> "Within":
    """EAGLE-2's tree of the head, of at most `depth` levels; of one program whatever these up to `most`."""
    beam = min(4, self.head.config.draft_vocab)
    return Within(proposers.EagleTree(head=self.head, nodes=nodes, depth=most, beam=beam), np.int32(depth))


@functools.cache
def load() -> Model:
  """The real one, once a process.

  Raises:
    ValueError: the model cannot be had; says why and what to do (`specjax.load`).
  """
  target, tokenizer = specjax.load(TARGET)
  head = heads.load_head(heads.shipped(TARGET, "eagle3"), target=target)
  return Model(target, tokenizer, head, tuple(workloads.read_workload(workloads.BUNDLED)))


def lookup(length: int, most: int = 7) -> "Within":
  """Prompt lookup, of one program whatever the length up to `most`."""
  return Within(proposers.NGram(num_tokens=most), np.int32(length))


def suffix(length: int, most: int = 7) -> "Within":
  """The suffix automaton's draft, likewise."""
  return Within(proposers.Suffix(num_tokens=most), np.int32(length))


@struct.dataclass
class Within(proposers_base.Defaults):
  """A proposer that drafts at most `levels` tokens deep. That is a leaf, so that all depths are one program.

  It tells the inner one of a smaller budget, which every proposer keeps to before it drafts: the draft is that of a
  proposer which was made that short.
  """
  inner: Any
  levels: jax.Array  # i32[]

  max_nodes = property(lambda self: self.inner.max_nodes)
  max_depth = property(lambda self: self.inner.max_depth)
  chains = property(lambda self: self.inner.chains)
  samples = property(lambda self: self.inner.samples)
  features = property(lambda self: self.inner.features)
  draft_context = property(lambda self: self.inner.draft_context)
  behind_inputs = property(lambda self: self.inner.behind_inputs)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return self.inner.init(target, batch, capacity)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    short = context.replace(budget=jnp.minimum(context.budget, self.levels + 1))
    return self.inner.propose(target, cache, state, short, keys)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    return self.inner.observe(target, state, committed)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A proposer, the rule that judges its drafts, and the temperature of the request."""
  proposer: Any
  temperature: float = 0.0
  verifier: Any = verifiers.Point()


@dataclasses.dataclass(frozen=True)
class Counts:
  """What an arm did, request by request.

  Attributes:
    asked: the R requests. texts: their outputs, as ids.
    counted: by the name of a field of `Counters`, i[R] or i[R, D].
    seconds: f[R], of decoding, behind the first step. decoded: i[R], the tokens made in them.
  """
  asked: tuple[Asked, ...]
  texts: tuple[tuple[int, ...], ...]
  counted: dict[str, np.ndarray]
  seconds: np.ndarray
  decoded: np.ndarray

  def of(self, rows: Sequence[int]) -> "Counts":
    """Those of some requests."""
    pick = lambda items: tuple(items[row] for row in rows)
    return Counts(pick(self.asked), pick(self.texts), {name: x[list(rows)] for name, x in self.counted.items()},
                  self.seconds[list(rows)], self.decoded[list(rows)])

  @property
  def ratios(self) -> dict:
    """Pooled over requests, see `counters.ratios`."""
    return counters_lib.ratios({name: x.sum(0).tolist() for name, x in self.counted.items()} | {"strayed": 0.0})

  @property
  def tokens_per_step(self) -> float:
    """Output tokens over verify passes."""
    return self.ratios["tokens_per_step"]

  @property
  def pairs(self) -> list[tuple[int, int]]:
    """(output tokens, steps) of every request, as `statistics.speedup_interval` takes them."""
    return list(zip(self.counted["output_tokens"].tolist(), self.counted["steps"].tolist()))

  @property
  def accepted(self) -> float:
    """Of drafted tokens whose predecessors were accepted, the share that is: the mean acceptance of a token."""
    return rate(self.counted["accepted_per_position"].sum(), self.counted["trials_per_position"].sum())

  @property
  def drafting(self) -> float:
    """The share of steps that drafted."""
    return rate(self.counted["drafted_per_position"][:, 0].sum(), self.counted["steps"].sum())

  @property
  def repeating(self) -> float:
    """The share of output tokens inside spans that repeat three times or more in a row."""
    return rate(sum(map(statistics.repeated_tokens, self.texts)), sum(map(len, self.texts)))

  @property
  def speed(self) -> float:
    """Tokens a second of decoding."""
    return float(self.decoded.sum() / self.seconds.sum())

  def conditional(self, first: int, last: int) -> float:
    """Acceptance at the positions from `first` to `last`, counted from 0, pooled, behind accepted tokens."""
    part = slice(first, last + 1)
    return rate(self.counted["accepted_per_position"][:, part].sum(),
                self.counted["trials_per_position"][:, part].sum())

  def predicted(self, lengths: Sequence[int], kind: str | None = None) -> list[float]:
    """Tokens a step of drafts of other lengths, by the closed form of acceptance by position.

    A step drafts as far as steps did here.

    Args:
      kind: of `acceptance.KINDS`; the one that explains the counts best by default.
    """
    tried, right = (self.counted[f"{name}_per_position"].sum(0) for name in ("trials", "accepted"))
    if not tried.sum():
      return [1.0 for _ in lengths]
    law = acceptance.fit(tried, right, kind) if kind else acceptance.best(tried, right)
    reach = self.counted["drafted_per_position"].sum(0) / self.counted["steps"].sum()
    gains = np.cumsum(reach * law.survival(len(reach)))
    return [1 + float(gains[length - 1]) if length else 1.0 for length in lengths]


def rate(part: float, whole: float) -> float:
  """A share; 0 of nothing."""
  return float(part) / float(whole) if whole else 0.0


def measure(model: Model, arms: dict[Any, Arm], asked: Sequence[Asked], *, new_tokens: int, seed: int,
            label: str) -> dict[Any, Counts]:
  """Runs every request by every arm, in turns, with a bar named `label`.

  A request has one seed in all arms; outputs have at most `new_tokens` tokens.
  """
  names, kept = list(arms), {name: [] for name in arms}
  with tqdm(total=len(arms) * len(asked), desc=label, unit="run", leave=False) as bar:
    for place, one in enumerate(asked):
      shift = place % len(names)
      for name in names[shift:] + names[:shift]:
        arm = arms[name]
        kept[name].append(drivers.generate(
            model.target, arm.proposer, [one.ids], sampling.SamplingParams(temperature=arm.temperature, seed=[place]),
            max_new_tokens=new_tokens, key=jax.random.key(seed), verifier=arm.verifier))
        bar.update()
  return {name: _counts(asked, results) for name, results in kept.items()}


def _counts(asked, results):
  times = [result.timings for result in results]
  return Counts(
      asked=tuple(asked), texts=tuple(tuple(result.token_ids[0]) for result in results),
      counted={name: np.concatenate([getattr(result.counters, name) for result in results]) for name in _COUNTED},
      seconds=np.array([time.total - time.first_token for time in times]),
      decoded=np.array([int(r.lengths[0] - r.timings.first_tokens[0]) for r in results]))


def same_texts(found: dict[Any, Counts]) -> str:
  """In words, how many requests have one text in all arms: greedy, all do but for rounding."""
  texts = list(zip(*(counts.texts for counts in found.values())))
  same = sum(len(set(each)) == 1 for each in texts)
  return f"{same} of {len(texts)} texts are the same in all {len(found)} arms"
