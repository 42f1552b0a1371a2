"""A sampled drafter that knows the target: it draws a tree from the target's own law at another temperature.

What every verifier of sampled drafts is tried on: q is exactly the law that each token was drawn from, close to p but
not equal to it, on chains and trees, by every rule of drawing siblings.

Letters: B batch rows, T nodes, V vocabulary.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_laws
from specjax import keys as keys_lib
from specjax import processors
from specjax import sampling
from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.verifiers import coupled

RULES = ("independent", "without_replacement", "coupled", "greedy_multi")


@struct.dataclass
class NoisySelf(base.Stateless):
  """Draws every node from the target's processed law at its parent, the temperature multiplied by `noise`.

  Attributes:
    noise: factor of the temperature on the draft side; 1 makes q = p. A leaf.
    parents: shape of the tree, parents first; `parents[0]` is 0.
    rule: how siblings are drawn: "independent"; "without_replacement"; "coupled", with the noise of the token's
      position, so that siblings would be equal; "greedy_multi", all but the last the most probable, the last one drawn
      from the rest.
    sparse: give q over this many ids instead of the whole vocabulary; enough for what top-k leaves. 0: dense.
  """
  noise: jax.Array | float = 1.5
  parents: tuple[int, ...] = struct.field(pytree_node=False, default=(0, 0, 1, 2))
  rule: str = struct.field(pytree_node=False, default="independent")
  sparse: int = struct.field(pytree_node=False, default=0)

  def __post_init__(self):
    if self.rule not in RULES:
      raise ValueError(f"rule={self.rule!r}: allowed are {', '.join(RULES)}")
    if not self.parents or any(not 0 <= parent < max(node, 1) for node, parent in enumerate(self.parents)):
      raise ValueError(f"parents={self.parents}: a parent comes before its children, and parents[0] is 0")
    if self.sparse < 0:
      raise ValueError(f"sparse={self.sparse}: it must be a number of ids, or 0 for a dense q")

  @property
  def max_nodes(self):
    return len(self.parents)

  @property
  def max_depth(self):
    return int(self._depths.max())

  @property
  def samples(self):
    return True

  @property
  def _depths(self):
    depths = np.zeros(len(self.parents), np.int32)
    for node in range(1, len(self.parents)):
      depths[node] = depths[self.parents[node]] + 1
    return depths

  def propose(self, target, cache, state, context, keys):
    """Runs the target over the growing tree, node by node; slow and exact."""
    batch, width = context.length.shape[0], len(self.parents)
    parents = jnp.broadcast_to(jnp.asarray(self.parents, jnp.int32), (batch, width))
    mask = tree_lib.ancestors(parents, self.max_depth)
    root = context.length - 1
    positions = root[:, None] + jnp.asarray(self._depths)
    params = context.params.replace(temperature=context.params.temperature * self.noise)
    mode = params.mode()
    tokens = jnp.zeros((batch, width), jnp.int32).at[:, 0].set(context.pending)
    q = jnp.zeros((batch, width, target.vocab_size), jnp.float32)
    for node in range(1, width):
      parent = self.parents[node]
      first = parent not in self.parents[1:node]
      if first:  # the law of a parent is computed with its first child; its path is known by then
        out = target.forward(tokens, positions, mask, cache)
        prefixes = processors.Prefixes(tokens=context.tokens, length=context.length, start=context.start,
                                       eos=context.rules.eos, begin=context.inputs, path_tokens=tokens, mask=mask)
        at = slice(parent, parent + 1)
        if params.adjusts:
          logits = processors.adjust(target.logits(out.hidden), params, prefixes)[:, at]
        else:
          logits = target.logits(out.hidden[:, at])
        q = q.at[:, parent].set(sampling.law(logits, params, mode)[:, 0])
      drawn, q = self._draw(node, tokens, q, keys, root, positions)
      tokens = tokens.at[:, node].set(drawn)
    size = jnp.where(context.active & (context.budget > 1), width, 1).astype(jnp.int32)
    if self.sparse:
      probs, ids = jax.lax.top_k(q, self.sparse)
      law = draft_laws.SparseLaw(ids=ids.astype(jnp.int32), probs=probs)
    else:
      law = draft_laws.DenseLaw(q)
    sampled = jnp.broadcast_to(jnp.asarray([node > 0 and self._is_sampled(node) for node in range(width)]),
                               (batch, width))
    return tree_lib.TokenTree(tokens=tokens, parents=parents, size=size, sampled=sampled, q=law,
                              replacement=self.rule != "without_replacement"), state

  def _is_sampled(self, node):
    return self.rule != "greedy_multi" or self.parents[node] not in self.parents[node + 1:]

  def _draw(self, node, tokens, q, keys, root, positions):
    """The token of one node, i32[B], and q, which greedy multi-draft narrows to what its top leaves."""
    parent, batch, vocabulary = self.parents[node], tokens.shape[0], q.shape[-1]
    earlier = [i for i in range(1, node) if self.parents[i] == parent]
    law = q[:, parent]
    if self.rule == "greedy_multi" and not self._is_sampled(node):
      for i in earlier:
        law = law.at[jnp.arange(batch), tokens[:, i]].set(-1)
      return sampling.argmax(law), q
    if self.rule in ("greedy_multi", "without_replacement"):
      for i in earlier:
        law = law.at[jnp.arange(batch), tokens[:, i]].set(0)
    if self.rule == "without_replacement":  # nothing left: an earlier sibling again, which no verifier accepts twice
      law = jnp.where(law.max(-1, keepdims=True) > 0, law, q[:, parent])
    if self.rule == "greedy_multi":
      mass = law.sum(-1, keepdims=True)
      law = jnp.where(mass > 0, law / jnp.where(mass > 0, mass, 1), q[:, parent])
      q = q.at[:, parent].set(law)
    if self.rule == "coupled":
      noise = keys_lib.position_noise(keys, positions[:, node:node + 1], vocabulary)[:, 0]
    else:
      noise = keys_lib.step_noise(keys, root, jnp.full((batch, 1), node), vocabulary)[:, 0]
    return coupled.race(law, noise), q
