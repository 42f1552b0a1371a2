"""Plain decoding is a proposal of the root alone."""
import jax
import jax.numpy as jnp

from specjax import decode
from specjax import proposers
from specjax import sampling
from specjax import stopping


def test_plain_proposes_the_pending_token_and_nothing_else():
  plain = proposers.Plain()
  context = proposers.Context(tokens=jnp.asarray([[4, 5, 9, 9], [6, 9, 9, 9]], jnp.int32),
                              length=jnp.asarray([2, 1], jnp.int32), start=jnp.asarray([1, 1], jnp.int32),
                              active=jnp.asarray([True, False]),
                              budget=jnp.asarray([5, 0], jnp.int32), params=sampling.SamplingParams().batch(2),
                              rules=stopping.stop_rules(2))
  tree, state = plain.propose(None, None, plain.init(None, 2, 4), context, None)
  assert tree.tokens.tolist() == [[5], [6]] and tree.size.tolist() == [1, 1]
  assert plain.observe(None, state, None) == state == ()
  assert (plain.max_nodes, plain.max_depth) == (1, 0) and decode.widths_for(plain.max_nodes) == (1,)
  assert not jax.tree.leaves(plain)
