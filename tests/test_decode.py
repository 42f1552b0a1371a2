"""The step, with drafters that know the target: every width, batches of one and three, chains and branches.

One program of `conftest.Drafter` is the self drafter, the always-wrong one, a half-right one and plain, row by row.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget()
POINT = verifiers.Point()
NEW = 24
PROMPTS = [[1, 2, 3, 4, 5], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6]]
SEEDS = [5, 6, 7]
ASKED = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.8, top_p=0.9),
    "mixed": dict(temperature=[0.0, 0.8, 1.5], top_k=[0, 4, 0], top_p=[1.0, 1.0, 0.95], min_p=[0.0, 0.0, 0.05]),
}
pick = lambda values, row: values[row] if isinstance(values, list) else values


def run(proposer, asked, rows=(0, 1, 2), **kwargs):
  params = SamplingParams(**{name: [pick(x, row) for row in rows] for name, x in ASKED[asked].items()},
                          seed=[SEEDS[row] for row in rows])
  return drivers.generate(TARGET, proposer, [PROMPTS[row] for row in rows], params, max_new_tokens=NEW, **kwargs)


@pytest.fixture(scope="module")
def plain():
  """The plain text of each row, run alone."""
  return {asked: np.stack([run(proposers.Plain(), asked, (row,)).tokens[0] for row in range(3)]) for asked in ASKED}


@pytest.fixture(scope="module")
def make(plain, drafter):
  """`make(asked, ...)`: a table drafter that knows the plain texts."""
  return lambda asked, rows=(0, 1, 2), **kwargs: drafter(
      [PROMPTS[row] for row in rows], [plain[asked][row] for row in rows], **kwargs)


def test_plain_texts_are_worth_comparing_with(plain):
  assert not np.array_equal(plain["greedy"], plain["sampled"])
  assert all(len(set(text)) > 4 for texts in plain.values() for text in texts.tolist())


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("num_tokens", [3, 6, 15, 63])
def test_three_rows(plain, make, num_tokens, asked):
  """Widths 4 to 64, and in each batch: all right, all wrong, and one face a row."""
  steps = -(-NEW // (num_tokens + 1))
  same = run(make(asked, num_tokens=num_tokens), asked)
  np.testing.assert_array_equal(same.tokens, plain[asked])
  assert same.counters.accepted_tokens.tolist() == same.counters.drafted_tokens.tolist() == [NEW - steps] * 3
  assert same.counters.steps.tolist() == [steps] * 3
  wrong = run(make(asked, wrong_from=0, num_tokens=num_tokens), asked)
  np.testing.assert_array_equal(wrong.tokens, plain[asked])
  assert wrong.counters.accepted_tokens.tolist() == [0] * 3 and wrong.counters.steps.tolist() == [NEW] * 3
  assert (wrong.counters.drafted_tokens > NEW).all() and not wrong.drafted.any()
  # Engine bug E6: rows accept different lengths, and nobody's steps are slowed by a neighbour.
  mixed = run(make(asked, wrong_from=[99, 2, 0], num_tokens=num_tokens), asked)
  np.testing.assert_array_equal(mixed.tokens, plain[asked])
  assert mixed.counters.steps.tolist() == [steps, NEW // 3, NEW]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("num_tokens", [6, 15])
def test_one_row(plain, make, num_tokens, asked):
  """A batch of one goes other ways: the window write of the cache, drafts whatever the neighbours do."""
  for row in range(3):
    for wrong_from, accepted in ((99, num_tokens), (0, 0), (2, 2)):
      result = run(make(asked, (row,), wrong_from=wrong_from, num_tokens=num_tokens), asked, (row,))
      np.testing.assert_array_equal(result.tokens[0], plain[asked][row])
      assert result.counters.steps.tolist() == [-(-NEW // (accepted + 1))]


@pytest.mark.parametrize("asked", ASKED)
def test_drafts_of_every_length(plain, make, asked):
  """0 to 6 drafted tokens: the narrowest width that holds them is used, and the text does not notice."""
  for limit in range(7):
    result = run(make(asked, limit=limit), asked)
    np.testing.assert_array_equal(result.tokens, plain[asked])
    used = result.counters.steps_per_width.sum(0)
    width = 0 if limit == 0 else 1 if limit <= 3 else 2
    # The last step drafts less, because a draft is one short of the budget.
    assert used[width] > 0 and used[width + 1:].sum() == 0 and used[:width].sum() <= 3


def test_drafted_flags_and_counters_of_a_full_burst(make):
  """Bursts of 7 with the self drafter: six drafts and a new token; the last burst is what is left of the budget."""
  result = run(make("sampled"), "sampled")
  burst = [True] * 6 + [False]
  assert result.drafted.tolist() == [burst * 3 + [True, True, False]] * 3
  assert result.counters.accepted_per_position.tolist() == [[4, 4, 3, 3, 3, 3]] * 3
  assert result.counters.drafted_per_position.tolist() == [[4, 4, 3, 3, 3, 3]] * 3
  assert result.counters.steps_per_width.tolist() == [[0, 1, 3]] * 3


def test_counters_add_up(make):
  result = run(make("mixed", wrong_from=[3, 0, 5], limit=[6, 2, 6]), "mixed")
  c = result.counters
  assert (c.output_tokens == c.accepted_tokens + c.steps).all() and (c.output_tokens == NEW).all()
  assert (0 <= c.accepted_tokens).all() and (c.accepted_tokens <= c.drafted_tokens).all()
  assert (np.diff(c.accepted_per_position, axis=1) <= 0).all()
  assert (c.accepted_per_position.sum(1) == c.accepted_tokens).all()
  assert (c.drafted_per_position.sum(1) == c.drafted_tokens).all()
  assert (result.drafted.sum(1) == c.accepted_tokens).all()
  # Row 0 drafts 6 of which 3 are right: 4 trials a step, but for the end.
  assert c.trials_per_position[0].tolist()[:3] == c.accepted_per_position[0].tolist()[:3]
  assert c.trials_per_position[0, 3] > 0 == c.accepted_per_position[0, 3] and c.trials_per_position[0, 4] == 0


def test_the_batch_drafts_when_half_of_the_running_rows_do(plain, make):
  """Fewer, and nothing is verified, drafted or counted; rows that have ended are not among them."""
  one = run(make("sampled", limit=[6, 0, 0]), "sampled")
  np.testing.assert_array_equal(one.tokens, plain["sampled"])
  assert not one.counters.drafted_tokens.any() and one.counters.steps.tolist() == [NEW] * 3
  assert one.counters.steps_per_width.tolist() == [[NEW, 0, 0]] * 3
  two = run(make("sampled", limit=[6, 0, 6]), "sampled")
  np.testing.assert_array_equal(two.tokens, plain["sampled"])
  assert two.counters.steps.tolist() == [4, NEW, 4]
  assert two.counters.accepted_tokens.tolist() == [20, 0, 20]


def test_rows_that_have_ended_do_not_vote(make):
  params = SamplingParams(seed=SEEDS)
  result = drivers.generate(TARGET, make("greedy", limit=[6, 0, 0]), PROMPTS, params, max_new_tokens=[NEW, 1, 3])
  # Two plain steps with three and two running rows (1 of 3, then 1 of 2: half), then alone.
  assert result.counters.steps_per_width[0].sum() < NEW and result.counters.accepted_tokens[0] > 12
  assert result.counters.drafted_tokens[1:].tolist() == [0, 0]
  assert result.lengths.tolist() == [NEW, 1, 3]


def test_ended_rows_commit_nothing(make):
  """Cache, text, counters and flags of a row that ended stand still while its neighbours run on."""
  state = drivers.start(TARGET, make("greedy"), PROMPTS, SamplingParams(seed=SEEDS), max_new_tokens=[3, NEW, NEW])
  state = drivers.advance(TARGET, make("greedy"), state, np.int32(1), verifier=POINT)
  assert state.active.tolist() == [False, True, True]
  row = lambda s: jax.tree.map(lambda x: np.array(x)[0], s.replace(keys=(), proposer=()))
  before = row(state)
  state = drivers.advance(TARGET, make("greedy"), state, np.int32(2), verifier=POINT)
  assert state.length.tolist()[1] > len(PROMPTS[1]) + 12
  jax.tree.map(np.testing.assert_array_equal, row(state), before)
  assert before.length == len(PROMPTS[0]) + 3 and before.cache.length == before.length - 1


def test_the_cache_holds_all_but_the_pending_token_and_nothing_behind(make):
  """Rejected tokens were never written: slots behind the length keep the poison of an empty cache."""
  state = drivers.start(TARGET, make("greedy"), PROMPTS, SamplingParams(seed=SEEDS), max_new_tokens=NEW)
  empty = np.asarray(TARGET.init_cache(1, 1).keys[0])[0, 0, 0, 0]
  for _ in range(5):
    state = drivers.advance(TARGET, make("greedy", wrong_from=[0, 2, 4]), state, np.int32(1), verifier=POINT)
    assert state.cache.length.tolist() == (np.asarray(state.length) - 1).tolist()
    for row, length in enumerate(state.cache.length.tolist()):
      assert (np.asarray(state.cache.keys[0])[row, 0, 0, length:] == empty).all()
      assert np.asarray(state.cache.values[0])[row, 0, :length, 0].tolist() == list(range(length))
      assert not np.asarray(state.tokens)[row, length + 1:].any()


# --- branches -------------------------------------------------------------------------------------------------------


@struct.dataclass
class Branches(proposers.base.Defaults):
  """The self drafter's chain of two hidden in a tree: wrong siblings before and behind, wrong children below them."""
  max_nodes = 8
  max_depth = 2

  def init(self, target, batch, capacity):
    del target, batch, capacity
    return ()

  def propose(self, target, cache, state, context, keys):
    truth, _ = testing.SelfDrafter(2).propose(target, cache, state, context, keys)
    first, second = truth.tokens[:, 1], truth.tokens[:, 2]
    other = lambda token, shift: (token + shift) % target.vocab_size
    nodes = [context.pending, other(first, 1), first, other(first, 2), second, other(second, 3), second,
             other(second, 1)]
    parents = jnp.asarray([0, 0, 0, 0, 1, 2, 2, 2], jnp.int32)  # node 4: the right token below the wrong one
    tree = tree_lib.TokenTree(tokens=jnp.stack(nodes, 1), parents=jnp.broadcast_to(parents, (len(first), 8)),
                              size=jnp.where(truth.size == 3, 8, 1))
    return tree, state

  def observe(self, target, state, committed):
    del target
    assert committed.tokens.shape == committed.positions.shape == committed.following.shape
    return state


@pytest.mark.parametrize("asked", ASKED)
def test_a_tree_with_branches(plain, asked):
  """Positions, mask, path and what enters the cache when the accepted nodes are 0, 2 and 6."""
  result = run(Branches(), asked)
  np.testing.assert_array_equal(result.tokens, plain[asked])
  c = result.counters
  assert c.steps.tolist() == [8] * 3 and c.accepted_tokens.tolist() == [16] * 3
  assert c.drafted_tokens.tolist() == [56] * 3
  assert c.drafted_per_position.tolist() == c.accepted_per_position.tolist() == [[8, 8]] * 3


# --- what a proposer is told ----------------------------------------------------------------------------------------


@struct.dataclass
class Listener(proposers.base.Defaults):
  """Drafts as `Drafter` does and writes down all that it is told, by position."""
  inner: object

  @property
  def max_nodes(self):
    return self.inner.max_nodes

  @property
  def max_depth(self):
    return self.inner.max_depth

  def init(self, target, batch, capacity):
    del target
    blank = lambda dtype: jnp.full((batch, capacity), -1, dtype)
    return blank(jnp.int32), blank(jnp.int32), jnp.zeros((batch, capacity), jnp.uint32), blank(jnp.int32)

  def propose(self, target, cache, state, context, keys):
    return self.inner.propose(target, cache, (), context, keys)[0], state

  def observe(self, target, state, committed):
    del target
    tokens, following, hidden, told = state
    row = jnp.arange(tokens.shape[0])[:, None]
    real = jnp.arange(committed.tokens.shape[1])[None] < committed.count[:, None]
    place = jnp.where(real, committed.positions, tokens.shape[1])
    put = lambda old, new: old.at[row, place].set(new, mode="drop")
    return (put(tokens, committed.tokens), put(following, committed.following),
            put(hidden, committed.hidden[..., 0]), told.at[row, place].add(1, mode="drop"))


def test_a_proposer_is_told_every_committed_token_once(make):
  """Prompt and output through one door: each with its position, the token that follows and the target's features."""
  proposer = Listener(make("greedy", wrong_from=[99, 0, 3]))
  state = drivers.start(TARGET, proposer, PROMPTS, SamplingParams(seed=SEEDS), max_new_tokens=NEW)
  state = drivers.advance(TARGET, proposer, state, np.int32(1000), verifier=POINT)
  tokens, following, hidden, told = map(np.asarray, state.proposer)
  for row, length in enumerate(np.asarray(state.length)):
    text = np.asarray(state.tokens)[row, :length]
    assert tokens[row, :length - 1].tolist() == text[:-1].tolist()
    assert following[row, :length - 1].tolist() == text[1:].tolist()
    assert told[row, :length - 1].tolist() == [0] * (length - 1)  # -1 and once more
    assert (told[row, length - 1:] == -1).all()
    start = len(PROMPTS[row])
    greedy = np.asarray(TARGET.logits(jnp.asarray(hidden[row:row + 1, start - 1:length - 1, None])))[0].argmax(-1)
    assert greedy.tolist() == text[start:].tolist()  # the features at each token are those that chose the next one


# --- the static sizes -----------------------------------------------------------------------------------------------


def test_widths_for():
  assert decode.widths_for(1) == (1,)
  assert [decode.widths_for(n) for n in (2, 4, 5, 8, 9, 16, 17, 32, 33, 64)] == [
      (1, 4), (1, 4), (1, 4, 8), (1, 4, 8), (1, 8, 16), (1, 8, 16), (1, 16, 32), (1, 16, 32), (1, 32, 64), (1, 32, 64)]
  for nodes in range(1, 65):
    widths = decode.widths_for(nodes)
    assert widths[0] == 1 and widths[-1] >= nodes and len(widths) <= 3 and list(widths) == sorted(set(widths))
  with pytest.raises(ValueError, match="65 nodes.*widest step, 64"):
    decode.widths_for(65)
