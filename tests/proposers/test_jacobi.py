"""Jacobi decoding against the fixed-point iteration in plain Python, and its n passes for n tokens."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import stopping
from specjax import testing
from specjax import verifiers
from specjax.proposers import jacobi

pytestmark = pytest.mark.usefixtures("quick_compile")
VOCAB, DRAFT = 6, 6
PROMPTS = [[1, 2, 3, 4, 5], [5] * 3, [3, 1]]
BUDGET = [30, 17, 24]
SEEDS = [3, 1, 2]
JACOBI = jacobi.Jacobi(num_tokens=DRAFT)
HOST = re.compile(r"callback|infeed|outfeed|host_compute|\bsend\(|\brecv\(", re.IGNORECASE)
target_of = lambda salt: testing.DummyTarget(salt=np.uint32(salt), vocab=VOCAB, order=2)


def asked(temperature):
  return sampling.SamplingParams(temperature=temperature, seed=SEEDS)


def plain(salt, temperature, ends=()):
  """Texts of plain decoding, the prompts left out."""
  return drivers.generate(target_of(salt), proposers.Plain(), PROMPTS, asked(temperature), max_new_tokens=BUDGET,
                          eos_ids=ends).token_ids


def start(salt, temperature, ends=()):
  return drivers.start(target_of(salt), JACOBI, PROMPTS, asked(temperature), max_new_tokens=BUDGET, eos_ids=ends)


@jax.jit
def one_step(target, state):
  """The step, and what it drafted and verified on the way."""
  tree, own = decode.draft(target, JACOBI, state)
  outcome = decode.verify(target, JACOBI, verifiers.Point(), state.replace(proposer=own), tree)
  return tree, outcome.drafted, decode.commit(target, JACOBI, state.replace(proposer=own), outcome)


# --- the transcription ----------------------------------------------------------------------------------------------


def most_probable(salt):
  """The greatest id behind every two tokens, V lists of V."""
  pairs = jnp.asarray([[a, b] for a in range(VOCAB) for b in range(VOCAB)], jnp.int32)
  target = target_of(salt)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (len(pairs), 2, 2))
  places = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), pairs.shape)
  logits = target.logits(target.forward(pairs, places, mask, target.init_cache(len(pairs), 1)).hidden)
  return np.argmax(np.asarray(logits)[:, 1], axis=-1).reshape(VOCAB, VOCAB).tolist()


class SlowRow:
  """One row: `guesses` by place in the text. What the target draws is known, `text`."""

  def __init__(self, salt, text, start, budget, ends):
    self.greatest, self.text, self.ends, self.limit = most_probable(salt), text, ends, start + budget
    self.length, self.guesses = start, {}

  def draft(self, filled):
    """The guesses up to an end; `filled` are the tokens for places that have no guess."""
    for i in range(DRAFT):
      self.guesses.setdefault(self.length + i, filled[i])
    draft = [self.guesses[self.length + i] for i in range(min(DRAFT, self.limit - self.length - 1))]
    return draft[:next((i for i, token in enumerate(draft) if token in self.ends), len(draft))]

  def verify(self, draft):
    """One pass: y <- argmax p(. | y), behind the text and behind every guess; what fits the text becomes text."""
    context = self.text[:self.length] + draft
    new = {place: self.greatest[context[place - 2]][context[place - 1]]
           for place in range(self.length, len(context) + 1)}
    accepted = 0
    while accepted < len(draft) and draft[accepted] == self.text[self.length + accepted]:
      accepted += 1
    self.length += accepted + 1
    self.guesses = {place: token for place, token in {**self.guesses, **new}.items() if place >= self.length}
    return accepted


@pytest.mark.parametrize("salt,temperature,ends", [(1, 0.0, ()), (2, 0.8, ()), (3, 0.8, (4,))])
def test_every_draft_is_that_of_the_transcription(salt, temperature, ends):
  texts = plain(salt, temperature, ends)
  rows = [SlowRow(salt, prompt + text, len(prompt), budget, ends)
          for text, prompt, budget in zip(texts, PROMPTS, BUDGET)]
  state = start(salt, temperature, ends)
  accepted = 0
  while running := [row for row in range(len(rows)) if rows[row].length < len(rows[row].text)]:
    assert np.flatnonzero(state.active).tolist() == running
    filled = np.asarray(jacobi.scattered(state.tokens, state.length, state.length[:, None] + jnp.arange(DRAFT)))
    tree, drafted, state = one_step(target_of(salt), state)
    wanted = [rows[row].draft(filled[row].tolist()) if row in running else [] for row in range(len(rows))]
    assert [tree.tokens[row, 1:tree.size[row]].tolist() for row in range(len(rows))] == wanted
    worth = 2 * sum(map(bool, wanted)) >= len(running)  # else the batch verifies roots only
    assert drafted.tolist() == [len(draft) if worth else 0 for draft in wanted]
    accepted += sum(rows[row].verify(wanted[row] if worth else []) for row in running)
  assert not np.asarray(state.active).any() and accepted > 1


# --- end to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8, (0.0, 0.8, 1.4)], ids=str)
def test_the_text_is_that_of_plain_decoding(temperature):
  temperature = list(temperature) if isinstance(temperature, tuple) else temperature
  accepted = 0
  for salt in range(4):
    state = start(salt, temperature)
    while np.asarray(state.active).any():
      _, _, state = one_step(target_of(salt), state)
    texts = [tokens[begin:end].tolist()
             for tokens, begin, end in zip(*map(np.asarray, (state.tokens, state.start, state.length)))]
    assert texts == plain(salt, temperature)
    accepted += int(state.counters.accepted_tokens.sum())
  assert accepted > 10


def fixed_point(greatest, prompt, block):
  """The iteration as published, of a block at rest: after each pass, how many tokens are known to be final."""
  final = []
  while not final or final[-1] < len(block):
    context = prompt + block
    new = [greatest[context[i - 2]][context[i - 1]] for i in range(len(prompt), len(context))]
    agree = next((i for i, (old, token) in enumerate(zip(block, new)) if old != token), len(block))
    final.append(min(agree + 1, len(block)))
    block = new
  return final, block


def test_a_block_of_n_tokens_takes_n_passes_or_fewer():
  """As many as the published iteration takes, pass by pass, and it ends in the greedy text."""
  length, saved = DRAFT + 1, 0
  for salt in range(6):
    state = drivers.start(target_of(salt), JACOBI, PROMPTS, asked(0.0), max_new_tokens=length)
    first = jacobi.scattered(state.tokens, state.length, state.length[:, None] + jnp.arange(DRAFT)).tolist()
    emitted = []
    while np.asarray(state.active).any():
      _, _, state = one_step(target_of(salt), state)
      emitted.append((state.length - state.start).tolist())
    for row, prompt in enumerate(PROMPTS):
      final, text = fixed_point(most_probable(salt), prompt, first[row] + [0])
      assert [step[row] for step in emitted[:len(final)]] == final and emitted[-1][row] == length
      assert state.tokens[row, len(prompt):len(prompt) + length].tolist() == text
      assert len(final) <= length
      saved += length - len(final)
  assert saved > 10


# --- state and edges ------------------------------------------------------------------------------------------------


@jax.jit
def observe(state, count, drafted, node_ids):
  path = jnp.zeros((len(state), DRAFT + 1), jnp.int32)
  return JACOBI.observe(None, state, proposers.Committed(
      tokens=path, following=path, positions=path, hidden=None, count=count, path=path, drafted=drafted,
      node_ids=node_ids))


@pytest.mark.parametrize("count,drafted,wanted", [
    (1, 6, [11, 12, 13, 14, 15, 16]),  # nothing accepted: behind the first, wrong, guess and all others
    (3, 6, [13, 14, 15, 16, -1, -1]),  # two accepted
    (7, 6, [-1] * 6),                  # all accepted: nothing is known of what comes
    (1, 2, [11, 12, 23, 24, 25, -1]),  # a draft of two: other guesses move up
    (1, 0, [21, 22, 23, 24, 25, -1]),  # no draft was verified
    (3, 0, [23, 24, 25, -1, -1, -1]),  # nor this one's, but another proposer's was accepted
    (0, 0, [20, 21, 22, 23, 24, 25]),  # the row has ended
])
def test_guesses_move_up_with_the_text(count, drafted, wanted):
  """Guess i of the state is 20 + i; behind node i of the chain the target says 10 + i. The second row is idle."""
  ids = np.full((2, 8, 1), -1, np.int32)
  ids[:, :drafted + 1, 0] = 10 + np.arange(drafted + 1)
  state = jnp.asarray([20 + np.arange(DRAFT)] * 2, jnp.int32)
  new = observe(state, jnp.asarray([count, 0], jnp.int32), jnp.asarray([drafted, 0], jnp.int32), jnp.asarray(ids))
  assert new.tolist() == [wanted, state[1].tolist()]


def test_prefill_changes_nothing():
  state = JACOBI.init(None, 2, 8)
  assert JACOBI.observe(None, state, proposers.Committed(tokens=None, following=None, positions=None, hidden=None,
                                                         count=None, path=None)) is state


@jax.jit
def propose_jit(state, tokens, length, active, budget, eos):
  rules = stopping.StopRules(eos=eos, sequences=jnp.full((len(tokens), 1, 1), -1, jnp.int32))
  context = proposers.Context(tokens=tokens, length=length, start=length, active=active, budget=budget,
                              params=sampling.SamplingParams(), rules=rules)
  return JACOBI.propose(None, None, state, context, None)


def propose(guesses, *, active=True, budget=100, eos=(), text=(7, 8, 9)):
  """Drafts of three rows with the same guesses and text, and the state."""
  spread = lambda x, dtype: jnp.asarray(np.broadcast_to(np.asarray(x), (3,)), dtype)
  poison = [1] * (16 - len(text))
  tree, state = propose_jit(jnp.asarray([guesses] * 3, jnp.int32), jnp.asarray([[*text, *poison]] * 3, jnp.int32),
                            spread(len(text), jnp.int32), spread(active, bool), spread(budget, jnp.int32),
                            stopping.stop_rules(3, eos).eos)
  assert tree.tokens[:, 0].tolist() == [text[-1]] * 3 and tree.parents.tolist() == [[0, *range(DRAFT)]] * 3
  return [row[1:size] for row, size in zip(tree.tokens.tolist(), tree.size.tolist())], state.tolist()


GUESSES = [3, 4, 3, 5, 6, 3]


def test_drafts_end_where_a_row_ends():
  """Before an end-of-sequence id, one token short of the budget, at once in a row that has ended."""
  assert propose(GUESSES) == ([GUESSES] * 3, [GUESSES] * 3)
  assert propose(GUESSES, eos=(5, 6))[0] == [GUESSES[:3]] * 3
  assert propose(GUESSES, eos=(3,))[0] == [[]] * 3
  assert propose(GUESSES, budget=[0, 1, 3])[0] == [[], [], GUESSES[:2]]
  assert propose(GUESSES, active=[True, False, True])[0] == [GUESSES, [], GUESSES]


def test_places_without_a_guess_take_tokens_of_the_text():
  drafts, state = propose([3, -1, -1, -1, -1, -1])
  assert drafts == state and drafts[0] == drafts[1] and drafts[0][0] == 3
  assert set(drafts[0][1:]) <= {7, 8, 9} and len(set(drafts[0])) > 2  # never what stands behind the text
  assert propose([-1] * DRAFT, text=(5,))[0] == [[5] * DRAFT] * 3


def test_nothing_leaves_the_device():

  def both(state, node_ids):
    _, own = JACOBI.propose(None, None, state.proposer, state.context(), state.keys)
    return observe(own, state.length, state.length, node_ids)

  assert not HOST.search(jax.jit(both).lower(start(1, 0.0), jnp.zeros((3, 8, 1), jnp.int32)).compile().as_text())


def test_sizes_and_errors():
  proposer = jacobi.Jacobi(num_tokens=63)
  assert (proposer.max_nodes, proposer.max_depth, proposer.node_ids) == (64, 63, 1)
  assert not jax.tree.leaves(proposer) and proposer.remember(None, []) is proposer
  with pytest.raises(ValueError, match="num_tokens=0: it must be 1 or more"):
    jacobi.Jacobi(num_tokens=0)
