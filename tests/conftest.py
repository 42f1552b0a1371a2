"""What all tests share: their order, a drafter with many faces, and cheap compilations for those that ask for them."""
import pathlib

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compiling
from specjax import tree as tree_lib
from specjax.proposers import base

# A jaxlib that multiplies wrongly makes every other failure meaningless, so its guard runs first. Then the files that
# take longest, so that processes which share the files among them end together.
FIRST = ("a_jax_guard", "benchmark", "drivers", "decode", "decoder", "smollm2", "noisy", "generate", "exactness")


def pytest_collection_modifyitems(items):
  """Files in the order of `FIRST`, and then all others in their own."""
  places = {f"test_{name}.py": place for place, name in enumerate(FIRST)}
  items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))


def forget_programs_beyond(mappings):
  """Forgets all compiled programs if this process holds more memory mappings than that.

  Each program maps memory, and a process may hold 65530 mappings on a common Linux; beyond them XLA crashes while it
  compiles.
  """
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > mappings:
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def few_programs_between_modules():
  """A module's programs are of little use to the next one: at twice as many as are left here a process takes 8 GB."""
  yield
  forget_programs_beyond(10000)


@pytest.fixture(autouse=True)
def few_programs_within_a_module():
  """Those of a module are used again, until they are so many that the process is in danger."""
  yield
  forget_programs_beyond(30000)


@struct.dataclass
class Drafter(base.Defaults):
  """Drafts from a table of texts, with a face a row, as leaves: one program is the self drafter, the wrong one, plain.

  `wrong_from` is the first wrong draft of a row (0: all are wrong, a large number: none), `limit` how many tokens a
  row drafts (0: it is plain).
  """
  texts: jax.Array       # i32[B, 512]; prompt and what plain decoding makes of it
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
    del cache, keys
    place = jnp.arange(self.num_tokens, dtype=jnp.int32)[None]
    truth = jnp.take_along_axis(self.texts, context.length[:, None] + place, axis=1)
    draft = jnp.where(place >= self.wrong_from[:, None], (truth + 1) % target.vocab_size, truth)
    count = jnp.minimum(jnp.clip(context.budget - 1, 0, self.num_tokens), self.limit)
    return tree_lib.chain(context.pending, draft, jnp.where(context.active, count, 0)), state

  def observe(self, target, state, committed):
    del target, committed
    return state


def make_drafter(prompts, outputs, wrong_from=99, limit=99, num_tokens=6):
  """A `Drafter` that knows the `outputs` of the `prompts`; numbers are for every row."""
  spread = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (len(prompts),))
  texts = np.zeros((len(prompts), 512), np.int32)
  for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
    text = [*prompt, *output]
    texts[row, :len(text)] = text
  return Drafter(texts=jnp.asarray(texts), wrong_from=spread(wrong_from), limit=spread(limit), num_tokens=num_tokens)


@pytest.fixture(scope="session")
def drafter():
  """`drafter(prompts, outputs, wrong_from=.., limit=.., num_tokens=..)` makes a `Drafter`."""
  return make_drafter


@pytest.fixture(scope="module")
def quick_compile():
  """For modules whose arithmetic is that of the integer dummy target."""
  with compiling.little_optimization():
    yield


@pytest.fixture
def quick_compile_here():
  """For one test, of logic that other tests hold under full optimization."""
  with compiling.little_optimization():
    yield
