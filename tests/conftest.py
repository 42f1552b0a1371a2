"""What all tests share: their order, a drafter with many faces, and a switch that halves the time of a compilation."""
from flax import struct
import jax
import jax.numpy as jnp
import pytest

from specjax import testing


def pytest_collection_modifyitems(items):
  """A jaxlib that multiplies wrongly makes every other failure meaningless, so its guard runs first."""
  items.sort(key=lambda item: "test_a_jax_guard" not in item.nodeid)


@struct.dataclass
class Drafter:
  """`testing.SelfDrafter` with a face a row, as leaves: one program is the self drafter, the wrong one and plain.

  It drafts what the target will emit; `wrong_from` is the first wrong draft of a row (0: all wrong, a large number:
  none), `limit` how many tokens a row drafts (0: it is plain).
  """
  wrong_from: jax.Array  # i32[B]
  limit: jax.Array       # i32[B]
  num_tokens: int = struct.field(pytree_node=False, default=6)

  @property
  def max_nodes(self):
    return self.num_tokens + 1

  @property
  def max_depth(self):
    return self.num_tokens

  def init(self, target, batch, capacity):
    del target, batch, capacity
    return ()

  def propose(self, target, cache, state, context, keys):
    tree, state = testing.SelfDrafter(self.num_tokens).propose(target, cache, state, context, keys)
    wrong = jnp.arange(tree.width)[None] > self.wrong_from[:, None]
    tokens = jnp.where(wrong, (tree.tokens + 1) % target.vocab_size, tree.tokens)
    return tree.replace(tokens=tokens, size=jnp.minimum(tree.size, self.limit + 1)), state

  def observe(self, target, state, committed):
    del target, committed
    return state


def make_drafter(rows, wrong_from=99, limit=99, num_tokens=6):
  """A `Drafter` for a batch; numbers are for every row."""
  spread = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (rows,))
  return Drafter(wrong_from=spread(wrong_from), limit=spread(limit), num_tokens=num_tokens)


@pytest.fixture(scope="session")
def drafter():
  """`drafter(rows, wrong_from=.., limit=.., num_tokens=..)` makes a `Drafter`."""
  return make_drafter


@pytest.fixture(scope="module")
def quick_compile():
  """Compiles with little optimization: for modules whose arithmetic is that of the integer dummy target."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)
