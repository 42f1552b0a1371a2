"""Constraints: an automaton against a loop over its table, its states along branches, and what it refuses."""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import constraints
from specjax import tree as tree_lib
from specjax.constraints import Automaton
from specjax.sampling_params import SamplingParams

VOCAB, STATES = 9, 6
PARENTS = [[0, 0, 1, 1, 2, 0, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0, 0, 0]]  # a tree, a chain, a fan
B, T = len(PARENTS), len(PARENTS[0])


def random_table(seed, states=STATES, density=0.6):
  rng = np.random.default_rng(seed)
  table = rng.integers(0, states, (states, VOCAB)).astype(np.int32)
  return np.where(rng.uniform(size=table.shape) < density, table, -1).astype(np.int32)


def after(table, state, tokens):
  """The state behind `tokens`, token by token."""
  for token in tokens:
    state = int(table[state, token]) if state >= 0 and 0 <= token < VOCAB else -1
  return state


def path(parents, tokens, node):
  """The drafted tokens from below the root to a node."""
  above = []
  while node:
    above.append(int(tokens[node]))
    node = parents[node]
  return above[::-1]


def random_tree(seed):
  tokens = np.random.default_rng(seed).integers(0, VOCAB, (B, T)).astype(np.int32)
  return tree_lib.TokenTree(tokens=jnp.asarray(tokens), parents=jnp.asarray(PARENTS, jnp.int32),
                            size=jnp.full(B, T, jnp.int32))


@struct.dataclass
class AtMostOnce:
  """Another kind of constraint, with a state of two leaves: no id twice, and never the sum of the last one and 1."""
  vocabulary: int = struct.field(pytree_node=False, default=VOCAB)

  def init(self, batch):
    return {"seen": jnp.zeros((batch, self.vocabulary), bool), "last": jnp.full((batch,), -1, jnp.int32)}

  def advance(self, state, token):
    return {"seen": state["seen"] | (jnp.arange(self.vocabulary) == token[:, None]), "last": token}

  def allowed(self, state):
    return ~state["seen"] & (jnp.arange(self.vocabulary) != state["last"][:, None] + 1)


@pytest.mark.parametrize("seed", range(3))
def test_states_and_masks_along_branches(seed):
  table, tree = random_table(seed), random_tree(seed)
  automaton = Automaton(jnp.asarray(table))
  root = [0, 3, 5]
  states = jax.jit(constraints.node_states)(automaton, jnp.asarray(root, jnp.int32), tree)
  allowed = np.asarray(jax.jit(constraints.allowed_at)(automaton, states))
  assert states.shape == (B, T) and allowed.shape == (B, T, VOCAB) and allowed.dtype == bool
  dead = 0
  for row in range(B):
    for node in range(T):
      wanted = after(table, root[row], path(PARENTS[row], np.asarray(tree.tokens)[row], node))
      assert states[row, node] == wanted
      np.testing.assert_array_equal(allowed[row, node], table[wanted] >= 0 if wanted >= 0 else np.zeros(VOCAB, bool))
      dead += wanted < 0
  assert 0 < dead < B * T  # forbidden drafts were among them, and allowed ones


def test_a_state_of_several_leaves():
  tree, kind = random_tree(7), AtMostOnce()
  state = kind.advance(kind.init(B), tree.tokens[:, 0])
  allowed = np.asarray(constraints.allowed_at(kind, jax.jit(constraints.node_states)(kind, state, tree)))
  for row in range(B):
    tokens = np.asarray(tree.tokens)[row]
    for node in range(T):
      text = [tokens[0], *path(PARENTS[row], tokens, node)]
      assert set(np.flatnonzero(allowed[row, node])) == set(range(VOCAB)) - set(text) - {text[-1] + 1}


@pytest.mark.parametrize("kind", ["automaton", "several leaves"])
def test_only_emitted_tokens_move_the_state(kind):
  table = random_table(4, density=0.9)
  constraint = Automaton(jnp.asarray(table), start=2) if kind == "automaton" else AtMostOnce()
  emitted = np.random.default_rng(5).integers(0, VOCAB, (5, 4)).astype(np.int32)
  count = [0, 1, 2, 3, 4]
  out = jax.jit(constraints.advance_by)(constraint, constraint.init(5), jnp.asarray(emitted),
                                        jnp.asarray(count, jnp.int32))
  assert jax.tree.structure(out) == jax.tree.structure(constraint.init(5))
  for row in range(5):
    said = emitted[row, :count[row]].tolist()
    if kind == "automaton":
      assert out[row] == after(table, 2, said)
    else:
      assert set(np.flatnonzero(out["seen"][row])) == set(said) and out["last"][row] == (said[-1] if said else -1)


def test_nothing_is_allowed_behind_a_forbidden_token():
  automaton = Automaton(jnp.asarray([[0, -1, 0], [1, 1, 1]], jnp.int32))
  state = automaton.advance(automaton.init(5), jnp.asarray([0, 1, -1, 3, 2**31 - 1], jnp.int32))
  assert state.tolist() == [0, -1, -1, -1, -1]
  assert automaton.allowed(state).tolist() == [[True, False, True]] + [[False] * 3] * 4
  assert automaton.advance(state, jnp.zeros(5, jnp.int32)).tolist() == [0, -1, -1, -1, -1]


def test_a_start_a_row():
  """So a row without a grammar stands beside rows with one: its state allows everything and leads to itself."""
  automaton = Automaton(jnp.asarray([[1, -1], [-1, 0], [2, 2]], jnp.int32), start=jnp.asarray([0, 2, 1]))
  assert automaton.allowed(automaton.init(3)).tolist() == [[True, False], [True, True], [False, True]]
  automaton.check(2, [1], np.zeros(3, np.int32))


def test_another_grammar_compiles_nothing():
  traces = []

  @jax.jit
  def run(automaton, state, tree):
    traces.append(1)
    return constraints.allowed_at(automaton, constraints.node_states(automaton, state, tree))

  outs = [run(Automaton(jnp.asarray(random_table(seed)), jnp.int32(seed)), jnp.zeros(B, jnp.int32), random_tree(0))
          for seed in range(2)]
  assert len(traces) == 1 and (outs[0] != outs[1]).any()


# --- what is refused ------------------------------------------------------------------------------------------------

# A number of two digits or more, and an end: 0 -> 1 -> 2, where the end is possible, and more digits. Id 3 ends.
DIGITS = np.array([[1, 1, 1, -1], [2, 2, 2, -1], [2, 2, 2, 3], [-1, -1, -1, -1]], np.int32)
# As much, but after two digits only the end may come.
SHORT = np.where(np.arange(4)[:, None] == 2, [[-1, -1, -1, 3]], DIGITS).astype(np.int32)


def refuse(table, eos=(3,), least=(0,), start=0, **params):
  rows = len(least)
  Automaton(jnp.asarray(table), start).check(
      4, eos, np.asarray(least, np.int32), SamplingParams(**params).batch(rows, 4) if params else None)


def test_a_sound_grammar_passes():
  refuse(DIGITS)
  refuse(DIGITS, least=[0, 50])  # more digits may always come
  refuse(SHORT, least=[0, 2])
  refuse(DIGITS, banned_ids=[0, 1])
  refuse(DIGITS, eos=np.array([[3, -1, -1], [-1, 3, 2]]), least=[0, 0])
  refuse(SHORT, eos=[3, 2])  # an end that comes earlier leads nowhere
  refuse(np.array([[0, 0, 0, 1], [-1, -1, -1, -1]], np.int32))
  unreached = np.vstack([DIGITS, -np.ones((1, 4), np.int32)])
  refuse(unreached)


@pytest.mark.parametrize("table,kwargs,message", [
    (DIGITS[:, :3], {}, r"transitions have shape \(4, 3\).*of shape \(states, 4\)"),
    (DIGITS[0], {}, r"transitions have shape \(4,\)"),
    (DIGITS[:0], {}, r"transitions have shape \(0, 4\)"),
    (DIGITS.astype(np.float32), {}, r"dtype float32; they must be whole numbers"),
    (np.where(DIGITS == 3, 4, DIGITS), {}, r"transitions\[2, 3\]=4: it must be a state in 0 to 3, or -1"),
    (np.where(DIGITS == 3, -2, DIGITS), {}, r"transitions\[2, 3\]=-2"),
    (DIGITS, dict(start=4), r"start=4 in row 0: it must be a state in 0 to 3"),
    (DIGITS, dict(start=np.array([0, -1]), least=[0, 0]), r"start=-1 in row 1"),
    (DIGITS, dict(start=np.array([0, 1]), least=[0]), r"start=\[0, 1\]: it must be one state, or one a row, 1"),
    # The end id leads to a state without successors; as an ordinary token it would leave nothing to draw.
    (DIGITS, dict(eos=()), r"state 3, reached after 3 tokens in row 0, allows no id: nothing would be left to draw "
                           r"there; give it a transition, or an end id of the row \(it has none\)"),
    (DIGITS, dict(eos=[[3], [2]], least=[0, 0]), r"state 3, reached after 3 tokens in row 1, allows no id"),
    (DIGITS, dict(banned_ids=[None, [0, 1, 2]], least=[0, 0]),
     r"state 0, reached after 0 tokens in row 1, allows no id that banned_ids, allowed_ids and logit_bias leave.*"
     r"ban fewer ids"),
    (SHORT, dict(allowed_ids=[0, 1]), r"state 2, reached after 2 tokens in row 0, allows no id that banned_ids"),
    (SHORT, dict(logit_bias={3: -np.inf}), r"state 2, reached after 2 tokens in row 0, allows no id that banned_ids"),
    (SHORT, dict(least=[2, 3]), r"state 2, reached after 2 tokens in row 1, allows end ids only, but min_new_tokens=3 "
                                r"forbids them before; lower min_new_tokens to 2 or less, or give the state another"),
    (DIGITS, dict(eos=[[3], [3]], least=[9, 9], banned_ids=[[], []], start=np.array([0, 3])),
     r"state 3, reached after 0 tokens in row 1, allows no id"),
    (DIGITS, dict(eos=[0, 1, 2], least=[1]), r"state 0, reached after 0 tokens in row 0, allows end ids only, but "
                                             r"min_new_tokens=1"),
])
def test_what_would_leave_nothing_to_draw_is_refused(table, kwargs, message):
  with pytest.raises(ValueError, match=message):
    refuse(table, **kwargs)


@pytest.mark.parametrize("seed", range(60))
def test_what_passes_never_runs_dry(seed):
  """Against every text: refused exactly when some text of allowed tokens stands before its end with nothing to draw."""
  rng = np.random.default_rng(seed)
  states, vocabulary = 4, 4
  table = np.where(rng.uniform(size=(states, vocabulary)) < 0.5, rng.integers(0, states, (states, vocabulary)), -1)
  least, ends, banned = int(rng.integers(0, 4)), {3, int(rng.integers(0, 4))}, [int(rng.integers(0, 4))]
  params = SamplingParams(banned_ids=banned).batch(1, vocabulary)

  def dry(state, said):
    if said > states + least:  # every state was seen by then, at every length that the minimum tells apart
      return False
    may = {token for token in range(vocabulary) if table[state, token] >= 0} - set(banned)
    may -= ends if said < least else set()
    return not may or any(dry(int(table[state, token]), said + 1) for token in may - ends)

  automaton = Automaton(jnp.asarray(table.astype(np.int32)))
  if dry(0, 0):
    with pytest.raises(ValueError, match="row 0"):
      automaton.check(vocabulary, list(ends), np.array([least]), params)
  else:
    automaton.check(vocabulary, list(ends), np.array([least]), params)
