"""Two drafters that know the target: the detectors that run for every proposer path and model family.

A self drafter drafts exactly what the target will emit: anything but full acceptance is a fault in positions, masks,
cache or randomness. An always-wrong drafter drafts anything but that: anything but the plain text is a fault, since
every step then depends on rejected tokens leaving no trace.

Letters: B batch rows, N drafted tokens, T nodes.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import keys as keys_lib
from specjax import processors
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import base


@struct.dataclass
class SelfDrafter(base.Stateless):
  """Drafts a chain of the target's own next tokens: the greedy ones, or the draws that the verifier will make.

  `shift` is added to every drafted token (modulo the vocabulary): 0 is the self drafter, anything else is wrong at
  every place. `rows`, if given, limits drafting to rows whose index modulo its length selects True. `stream` is what
  the verifier draws from: "token" under `point`, "noise" under `coupled`. Constraints are not known to it.
  """
  num_tokens: int = struct.field(pytree_node=False, default=4)
  shift: int = struct.field(pytree_node=False, default=0)
  rows: tuple[bool, ...] = struct.field(pytree_node=False, default=(True,))
  stream: str = struct.field(pytree_node=False, default="token")

  def propose(self, target, cache, state, context, keys):
    """Runs the target over the growing chain; slow and exact."""
    mode = context.params.mode()
    batch, width = context.length.shape[0], self.num_tokens
    truth = jnp.zeros((batch, width + 1), jnp.int32).at[:, 0].set(context.pending)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
    positions = context.length[:, None] - 1 + jnp.arange(width, dtype=jnp.int32)[None]
    purpose, rule = ((keys_lib.TOKEN, verifiers.Point()) if self.stream == "token" else
                     (keys_lib.NOISE, verifiers.Coupled()))
    uniforms = keys_lib.uniforms((purpose,), keys, context.length - 1, positions + 1, target.vocab_size)

    def extend(i, truth):
      out = target.forward(truth[:, :width], positions, mask, cache)
      prefixes = processors.Prefixes(tokens=context.tokens, length=context.length, start=context.start,
                                     eos=context.rules.eos, begin=context.inputs, path_tokens=truth[:, :width],
                                     mask=mask)
      logits = processors.adjust(target.logits(out.hidden), context.params, prefixes)
      drawn = rule.drawn(logits, context.params, uniforms, mode)
      return truth.at[:, i + 1].set(jnp.take_along_axis(drawn, jnp.full((batch, 1), i), axis=1)[:, 0])

    truth = jax.lax.fori_loop(0, width, extend, truth)
    draft = (truth[:, 1:] + self.shift) % target.vocab_size
    wanted = jnp.array([self.rows[i % len(self.rows)] for i in range(batch)])
    count = jnp.where(context.active & wanted, jnp.clip(context.budget - 1, 0, width), 0).astype(jnp.int32)
    return tree_lib.chain(context.pending, draft, count), state


def always_wrong(num_tokens: int = 4, rows=(True,), stream: str = "token") -> SelfDrafter:
  """A drafter whose every token differs from the one that will be emitted in its place."""
  return SelfDrafter(num_tokens=num_tokens, shift=1, rows=rows, stream=stream)
