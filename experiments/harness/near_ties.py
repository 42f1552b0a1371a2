"""Where two greedy texts part: a near tie that rounding decided, or a fault.

Across widths and batches a sum may be rounded otherwise, which moves the best of two logits that are as good as equal.
"""
import jax
import jax.numpy as jnp

from experiments.harness import settings
from specjax import drivers
from specjax import processors
from specjax import proposers

NEAR_TIE = 1e-4  # two best logits as near as this may change places by rounding


def first_difference(one: list[int], other: list[int]) -> int:
  """How many tokens two texts share from their beginning."""
  return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def gap(target, prompt: list[int], output: list[int]) -> float:
  """The top-2 logit gap behind `prompt` and `output`, computed as decoding does: prefill, then the pending token."""
  params = settings.sampling_params()
  left = max(0, params.min_new_tokens - len(output))  # all of the text counts as a prompt here
  state = drivers.start(target, proposers.Plain(), [prompt], params.replace(min_new_tokens=left),
                        max_new_tokens=max(1, left), written=[output])
  return float(_top_two_gap(target, state))


@jax.jit
def _top_two_gap(target, state):
  """Of the adjusted logits: penalties and biases decide with the model's own which token is the greatest."""
  pending, one = state.context().pending[:, None], jnp.ones((1, 1, 1), bool)
  out = target.forward(pending, state.length[:, None] - 1, one, state.cache)
  logits = processors.adjust(target.logits(out.hidden), state.params, processors.Prefixes(
      tokens=state.tokens, length=state.length, start=state.start, eos=state.rules.eos, path_tokens=pending, mask=one,
      begin=state.context().inputs))
  first, second = jax.lax.top_k(logits[0, 0], 2)[0]
  return first - second
