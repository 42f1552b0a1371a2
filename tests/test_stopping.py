"""Where a burst is cut: ends at every place, across bursts, beyond the budget, in rows that take no part."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import stopping

BURST, WIDTH = 6, 8
EOS = 3
cut_jit = jax.jit(stopping.cut)


def cut(emitted, count=None, history=(), budget=100, rules=None, **kwargs):
  """One burst, or a list of bursts, padded with poison (an id that ends the row) behind what counts."""
  rows = emitted if isinstance(emitted[0], (list, tuple)) else [emitted]
  spread = lambda x: [x] * len(rows) if np.ndim(x) == 0 else list(x)
  count = spread(count) if count is not None else [len(row) for row in rows]
  histories = history if history and isinstance(history[0], (list, tuple)) else [history] * len(rows)
  rules = rules or stopping.stop_rules(len(rows), **kwargs)
  table = np.full((len(rows), BURST), EOS, np.int32)
  past = np.full((len(rows), rules.sequences.shape[-1] - 1), -1, np.int32)
  for i, row in enumerate(rows):
    table[i, :len(row)] = row
    if histories[i]:
      past[i, -len(histories[i]):] = histories[i]
  kept, reason = cut_jit(jnp.asarray(table), jnp.asarray(count, jnp.int32), jnp.asarray(past),
                         jnp.asarray(spread(budget), jnp.int32), rules)
  assert kept.dtype == jnp.int32 and reason.dtype == jnp.int32
  answer = [(int(k), stopping.REASONS[int(r)]) for k, r in zip(kept, reason)]
  return answer if rows is emitted else answer[0]


@pytest.mark.parametrize("place", range(1, BURST + 1))
def test_eos_at_every_place(place):
  burst = [10 + i for i in range(BURST)]
  burst[place - 1] = EOS
  assert cut(burst, eos_ids=(EOS,)) == (place, "stop")
  assert cut(burst, eos_ids=(77, EOS, 78)) == (place, "stop")
  assert cut(burst) == (BURST, None)  # no rule: the id means nothing
  if place < BURST:
    burst[-1] = EOS
    assert cut(burst, eos_ids=(EOS,)) == (place, "stop")  # the first of several


@pytest.mark.parametrize("size", [1, 2, 3, WIDTH])
@pytest.mark.parametrize("place", range(1, BURST + 1))
def test_stop_sequences_at_every_place_and_across_bursts(size, place):
  """A sequence that ends at place p may begin before the burst: in the history, or it does not stop at all."""
  sequence = list(range(50, 50 + size))
  burst = [10 + i for i in range(BURST)]
  inside = min(size, place)
  burst[place - inside:place] = sequence[size - inside:]
  history = [1, 2] + sequence[:size - inside]
  assert cut(burst, history=history[-(WIDTH - 1):], sequences=[[90, 91], sequence]) == (place, "stop")
  if size > inside:
    wrong = history[:-1] + [99]
    assert cut(burst, history=wrong[-(WIDTH - 1):], sequences=[[90, 91], sequence]) == (BURST, None)
    assert cut(burst, history=[], sequences=[sequence]) == (BURST, None)  # the prompt is no part of the history


def test_stop_inside_the_budget_beats_the_length_cap():
  """Engine bug C3 as a pure case: the cap was tested first, and what stands behind the stop leaked."""
  burst = [10, 11, EOS, 20, 21, 22]
  assert cut(burst, budget=5, eos_ids=(EOS,)) == (3, "stop")
  assert cut(burst, budget=5, sequences=[[EOS]]) == (3, "stop")
  assert cut(burst, budget=3, eos_ids=(EOS,)) == (3, "stop")    # both at once: it did stop
  assert cut(burst, budget=2, eos_ids=(EOS,)) == (2, "length")  # a stop beyond the budget never happened
  assert cut(burst, budget=1, sequences=[[11, EOS]]) == (1, "length")


@pytest.mark.parametrize("budget", range(1, BURST + 3))
def test_the_budget_alone(budget):
  burst = [10] * 5
  assert cut(burst, budget=budget) == (min(5, budget), "length" if budget <= 5 else None)


def test_what_does_not_count_does_not_stop():
  # The table behind `count` is full of EOS; a sequence may not be finished by it either.
  assert cut([10, 11], eos_ids=(EOS,)) == (2, None)
  assert cut([10, 11], sequences=[[11, EOS]]) == (2, None)
  assert cut([10, 11, EOS, 12], count=2, eos_ids=(EOS,)) == (2, None)


def test_rows_that_take_no_part():
  answer = cut([[EOS, 1, 2], [EOS, 1, 2], [1, EOS, 2]], count=[0, 3, 0], budget=[5, 5, 0], eos_ids=(EOS,))
  assert answer == [(0, None), (1, "stop"), (0, None)]


def test_padding_matches_nothing():
  """No rule at all, and an empty history of -1, which is also what fills unused places of the rules."""
  rules = stopping.stop_rules(1)
  assert (np.asarray(rules.eos) == -1).all() and (np.asarray(rules.sequences) == -1).all()
  assert cut([0, 1, 2], rules=rules) == (3, None)
  assert cut([0, 1, 2], sequences=[[0, 1, 2, 3]]) == (3, None)


def test_rows_have_their_own_rules_history_and_budget():
  answer = cut([[5, 6, 7], [5, 6, 7], [5, 6, 7]], history=[[4], [9], [4]], budget=[9, 2, 9],
               sequences=[[[4, 5]], [[4, 5]], [[6, 7], [5, 6]]])
  assert answer == [(1, "stop"), (2, "length"), (2, "stop")]


def test_the_earliest_end_of_several_rules():
  assert cut([5, 6, 7, EOS], eos_ids=(EOS,), sequences=[[6, 7], [5, 6, 7, EOS]]) == (3, "stop")
  assert cut([5, EOS, 7], eos_ids=(EOS,), sequences=[[EOS, 7]]) == (2, "stop")


def test_overlapping_starts_of_a_sequence():
  assert cut([1, 1, 1, 2], sequences=[[1, 1, 2]]) == (4, "stop")
  assert cut([1, 2, 1], history=[2, 1], sequences=[[1, 2, 1]]) == (3, "stop")
  assert cut([2, 1], history=[1, 2, 1], sequences=[[1, 2, 1]]) == (2, "stop")


def test_shapes_do_not_change_with_the_rules():
  """Within the places kept, other rules are the same program; more are taken when needed, never cut off."""
  shapes = lambda **kwargs: jax.tree.map(jnp.shape, stopping.stop_rules(2, **kwargs))
  assert shapes() == shapes(eos_ids=(1, 2)) == shapes(sequences=[[1] * 8, [2], [3], [4]])
  assert stopping.stop_rules(2, sequences=[[1] * 9]).sequences.shape == (2, 4, 9)
  assert stopping.stop_rules(2, sequences=[[i] for i in range(6)]).sequences.shape == (2, 6, 8)
  assert stopping.stop_rules(1, eos_ids=range(11)).eos.shape == (1, 11)
  assert cut([5, 9, 7], eos_ids=range(9, 20)) == (2, "stop")


def test_sequences_are_aligned_to_the_right():
  rules = stopping.stop_rules(2, eos_ids=(9, 4), sequences=[[1, 2], [7]])
  assert rules.sequences[1, 0].tolist() == [-1] * 6 + [1, 2]
  assert rules.sequences[0, 1].tolist() == [-1] * 7 + [7]
  assert rules.eos[0].tolist() == [4, 9] + [-1] * 6


def test_one_list_for_all_rows_or_a_list_each():
  one = stopping.stop_rules(2, sequences=[[1, 2], [3]])
  each = stopping.stop_rules(2, sequences=[[[1, 2], [3]], [[1, 2], [3]]])
  jax.tree.map(np.testing.assert_array_equal, one, each)
  none = stopping.stop_rules(2, sequences=[[[1, 2]], []])
  assert (np.asarray(none.sequences[1]) == -1).all() and none.sequences[0, 0, -1] == 2


@pytest.mark.parametrize("kwargs,message", [
    (dict(sequences=[[1], []]), r"\[1\], \[\].*at least one id"),
    (dict(sequences=[[1, -1]]), r"-1.*0 or greater"),
    (dict(eos_ids=(-1,)), r"\(-1,\).*0 or greater"),
    (dict(sequences=[[[1]], [[2]], [[3]]]), "for 3 rows, but the batch has 2"),
])
def test_errors(kwargs, message):
  with pytest.raises(ValueError, match=message):
    stopping.stop_rules(2, **kwargs)


def test_numpy_ids_are_ids():
  rules = stopping.stop_rules(1, eos_ids=np.asarray([5]), sequences=[np.asarray([1, 2]).tolist()])
  assert cut([1, 2, 4], rules=rules) == (2, "stop")


def test_an_array_is_a_sequence():
  """A tokenizer may hand out arrays: they must be read as sequences, and not as something else."""
  rules = stopping.stop_rules(1, sequences=[np.asarray([1, 2])])
  assert cut([1, 2, 4], rules=rules) == (2, "stop")
