"""Which layers to skip: a search over sets of layers by the acceptance that each of them has on text of the target.

The target writes greedy text behind some prompts. For a set of layers that text is cut into drafts of N tokens, each
behind its root: one pass of the kept layers over all of it, teacher-forced, in which a token sees of earlier drafts the
target's own keys and values and of its own draft those of the kept layers. Up to the first token in which a draft
differs from the text this is what `LayerSkip` drafts there, so the tokens of a step are measured, not estimated from a
rate. Sampled drafts and other temperatures have another acceptance.

Draft & Verify (arXiv 2309.08168) searches by Bayesian optimisation and SWIFT (arXiv 2410.06916) while it serves. Here
the search is a seeded local one: every layer alone, the least harmful ones together, more and more of them, and then
sets that differ from the best one in a layer or two. The same seed and text give the same set.

Letters: B prompts, P prompt tokens, N drafted tokens, K drafts of a text, L layers.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from specjax import cache as cache_lib
from specjax import sampling
from specjax.models import base as models
from specjax.proposers import base
from specjax.proposers import layer_skip


@dataclasses.dataclass(frozen=True)
class Measured:
  """What skipping a set of layers brings."""
  skipped: tuple[int, ...]
  tokens_per_step: float  # accepted tokens of a draft and the new one, the mean over all drafts
  acceptance: float       # accepted of drafted tokens
  speedup: float          # predicted: tokens of a step over its cost in plain steps


@dataclasses.dataclass(frozen=True)
class Found:
  """The end of a search."""
  best: Measured               # of the greatest speedup, the first of equals; below 1 nothing is worth skipping
  tried: tuple[Measured, ...]  # in the order in which they were measured


def search(target, prompts: list[list[int]], budget: int, rounds: int, *, num_tokens: int = 3,
           verify_cost: float = 1.0, most: int | None = None, seed: int = 0, progress: bool = True) -> Found:
  """Looks for the layers whose skipping makes decoding fastest.

  A step of N drafted tokens is taken to cost N * kept / L + `verify_cost` plain steps: the head, which drafting runs as
  well, is not counted apart.

  Args:
    target: a decoder. prompts: lists of ids, of traffic like the one to come.
    budget: tokens that the target writes behind each prompt, N or more.
    rounds: sets that are measured at most; 2 L or more are useful. The program of every new number of layers is
      compiled once.
    num_tokens: N. verify_cost: of a verify pass of N + 1 nodes, in plain steps; see `length.REFERENCE_COSTS`.
    most: layers of a set; None: half of them, as without more of them next to nothing is accepted.
    seed: of the local search. progress: whether to show a bar.

  Raises:
    ValueError: for a target with fewer than two layers, with an encoder or a recurrent state, a budget below N, no
      round, a `most` out of range, or text that ends before the first draft does.
  """
  layers = base.layers_of(target, "layer skipping")
  models.decoder_only(target, "the search for layers")
  models.attends(target, "the search for layers")
  if layers < 2:
    raise ValueError(f"the target has {layers} layer; to skip one it needs two or more")
  if not 1 <= num_tokens <= budget or rounds < 1:
    raise ValueError(f"num_tokens={num_tokens}, budget={budget}, rounds={rounds}: needed are 1 <= num_tokens <= budget "
                     "and one round or more")
  most = (layers + 1) // 2 if most is None else most
  if not 1 <= most < layers:
    raise ValueError(f"most={most}: allowed are 1 to {layers - 1}, as the target has {layers} layers")
  text = write(target, prompts, budget)
  if not (text.count >= num_tokens).any():
    raise ValueError(f"the target ends all of its answers before {num_tokens} tokens; give other prompts or draft less")
  tried = {}

  with tqdm(total=rounds, desc="searching layers to skip", unit="set", leave=False, disable=not progress) as bar:

    def measure(skipped):
      skipped = tuple(sorted(skipped))
      if skipped not in tried and len(tried) < rounds:
        tried[skipped] = _measured(target, text, skipped, num_tokens, verify_cost, layers)
        bar.update()

    for layer in range(layers):
      measure((layer,))
    harmless = sorted(tried.values(), key=lambda one: -one.tokens_per_step)
    for count in range(2, min(most, len(harmless)) + 1):
      measure(sum((one.skipped for one in harmless[:count]), ()))
    rng = np.random.default_rng(seed)
    while len(tried) < rounds and (new := _untried(rng, tried, layers, most)):
      measure(new)
  return Found(best=_best(tried), tried=tuple(tried.values()))


def _best(tried):
  return max(tried.values(), key=lambda one: one.speedup)


def _untried(rng, tried, layers, most):
  """A set that was not measured yet, beside the best one that still has such neighbours; None when there is none."""
  for one in sorted(tried.values(), key=lambda one: -one.speedup):
    skipped = frozenset(one.skipped)
    beside = {tuple(sorted(skipped ^ {i, j})) for i in range(layers) for j in range(layers)}  # i = j: one layer
    new = sorted(s for s in beside if 0 < len(s) <= most and s not in tried)
    if new:
      return new[rng.integers(len(new))]
  return None


@dataclasses.dataclass(frozen=True)
class Text:
  """What the target wrote, and its keys and values of all but the last token."""
  tokens: jax.Array          # i32[B, S]; prompt and output
  start: np.ndarray          # i32[B]; prompt tokens
  count: np.ndarray          # i32[B]; output tokens, an end of sequence included
  cache: cache_lib.KVCache   # of S slots


def write(target, prompts: list[list[int]], budget: int) -> Text:
  """Greedy text of `budget` tokens behind each prompt, by plain decoding; ended by the target's own end ids."""
  start = np.asarray([len(prompt) for prompt in prompts], np.int32)
  tokens = np.zeros((len(prompts), start.max() + budget), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, :len(prompt)] = prompt
  causal = np.tril(np.ones((start.max(), start.max()), bool))
  tokens, cache = _write(target, jnp.asarray(tokens), jnp.asarray(start), causal, budget)
  output = np.asarray(tokens)[np.arange(len(start))[:, None], start[:, None] + np.arange(budget)]
  ends = np.isin(output, target.eos_ids)
  count = np.where(ends.any(1), ends.argmax(1) + 1, budget).astype(np.int32)
  return Text(tokens=tokens, start=start, count=count, cache=cache)


@functools.partial(jax.jit, static_argnums=4)
def _write(target, tokens, start, causal, budget):
  batch, prompt = tokens.shape[0], causal.shape[0]
  cache = target.init_cache(batch, tokens.shape[1])
  positions = jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32), (batch, prompt))
  out = target.forward(tokens[:, :prompt], positions, jnp.broadcast_to(causal, (batch, prompt, prompt)), cache)
  cache = cache.commit(out.in_flight, start - 1)
  row, alone = jnp.arange(batch), jnp.ones((batch, 1, 1), bool)

  def step(_, carry):
    tokens, cache = carry
    place = cache.length
    out = target.forward(tokens[row, place][:, None], place[:, None], alone, cache)
    new = sampling.argmax(target.logits(out.hidden))[:, 0]
    return tokens.at[row, place + 1].set(new), cache.commit(out.in_flight, jnp.ones_like(start))

  return jax.lax.fori_loop(0, budget, step, (tokens, cache))


def _measured(target, text, skipped, num_tokens, verify_cost, layers):
  kept = layer_skip.kept_layers(target, skipped)
  drafts = int(text.count.max()) // num_tokens
  agrees = np.asarray(_agrees(target.keep(kept), text.cache.of_layers(kept), text.tokens, text.start,
                              np.arange(drafts * num_tokens, dtype=np.int32), num_tokens))
  whole = (np.arange(drafts) + 1) * num_tokens <= text.count[:, None]  # drafts that the text is long enough for
  accepted = agrees.reshape(len(whole), drafts, num_tokens).cumprod(-1).sum(-1)[whole]
  tokens = 1 + float(accepted.mean())
  return Measured(skipped=skipped, tokens_per_step=tokens, acceptance=float(accepted.mean()) / num_tokens,
                  speedup=tokens / (num_tokens * len(kept) / layers + verify_cost))


@functools.partial(jax.jit, static_argnums=5)
def _agrees(model, committed, tokens, start, place, num_tokens):
  """Whether the kept layers would draft each token of the text behind the ones before it: bool[B, K * N].

  `place` i32[K * N] counts output tokens. The node of place i is fed with the token before it.
  """
  batch, slots = tokens.shape
  positions = start[:, None] - 1 + place
  root = start[:, None] - 1 + place // num_tokens * num_tokens
  from_target = jnp.arange(slots) < root[:, :, None]
  own = (place[:, None] // num_tokens == place[None] // num_tokens) & (place[:, None] >= place[None])
  mask = jnp.concatenate([from_target, jnp.broadcast_to(own, (batch, *own.shape))], axis=2)
  pick = lambda where: jnp.take_along_axis(tokens, where, axis=1)
  out = model.forward(pick(positions), positions, mask, model.init_cache(batch, 1),
                      before=cache_lib.InFlight(keys=committed.keys, values=committed.values))
  return sampling.argmax(model.logits(out.hidden)) == pick(positions + 1)
