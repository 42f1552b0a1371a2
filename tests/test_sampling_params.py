"""What a row asks for: spread over the batch, absent where nobody asks, and refused with names and rows."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.sampling_params import RowIds
from specjax.sampling_params import SamplingParams


def test_batch_spreads_scalars_and_numbers_the_requests():
  params = SamplingParams(temperature=0.5, top_k=[1, 2, 3]).batch(3)
  assert params.temperature.tolist() == [0.5] * 3 and params.top_k.tolist() == [1, 2, 3]
  assert params.top_p.tolist() == [1] * 3 and params.min_p.tolist() == [0] * 3 and params.seed.tolist() == [0, 1, 2]
  assert [x.dtype for x in jax.tree.leaves(params)] == [jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.int32]
  assert SamplingParams(seed=7).batch(2).seed.tolist() == [7, 7]


def test_what_no_row_uses_is_absent():
  """Neutral values cost nothing: the pytree is that of a request that never named them."""
  plain = jax.tree.structure(SamplingParams().batch(3))
  neutral = SamplingParams(repetition_penalty=[1, 1, 1], presence_penalty=0, frequency_penalty=[0.0] * 3, logit_bias={},
                           banned_ids=[], allowed_ids=[None] * 3, min_new_tokens=[0, 0, 0]).batch(3, vocabulary=7)
  assert jax.tree.structure(neutral) == plain and not neutral.adjusts
  for name, value in dict(repetition_penalty=[1, 1.1, 1], presence_penalty=0.5, frequency_penalty=-1,
                          logit_bias={1: 0.5}, banned_ids=[None, [3], None], allowed_ids=[4],
                          min_new_tokens=[0, 0, 2]).items():
    params = SamplingParams(**{name: value}).batch(3)
    assert params.adjusts and jax.tree.structure(params) != plain
    assert [field for field in SamplingParams().batch(3).__dict__ if getattr(params, field) is not None
            and getattr(SamplingParams().batch(3), field) is None] == [name]


def test_penalties_are_one_value_a_row():
  params = SamplingParams(repetition_penalty=[1, 1.5], presence_penalty=2, frequency_penalty=[-2, 0],
                          min_new_tokens=[0, 3]).batch(2)
  assert params.repetition_penalty.tolist() == [1, 1.5] and params.presence_penalty.tolist() == [2, 2]
  assert params.frequency_penalty.tolist() == [-2, 0] and params.min_new_tokens.tolist() == [0, 3]
  assert params.min_new_tokens.dtype == jnp.int32 and params.repetition_penalty.dtype == jnp.float32


def test_ids_for_all_rows_or_a_list_a_row():
  ids = lambda **kwargs: [row[row >= 0].tolist() for row in np.asarray(
      next(iter(SamplingParams(**kwargs).batch(2, vocabulary=50).__getattribute__(name) for name in kwargs)).ids)]
  for name in ("banned_ids", "allowed_ids"):
    assert ids(**{name: [7, 3, 7]}) == [[3, 7], [3, 7]]
    assert ids(**{name: [None, (5, 1)]}) == [[], [1, 5]]
    assert ids(**{name: np.array([[4, 2], [9, 8]])}) == [[2, 4], [8, 9]]
    assert ids(**{name: np.array([4, 2])}) == [[2, 4], [2, 4]]
    assert ids(**{name: [np.int64(4), jnp.asarray(2)]}) == [[2, 4], [2, 4]]
    assert ids(**{name: {6, 5}}) == [[5, 6], [5, 6]]
  assert ids(logit_bias={9: 1, np.int32(2): -1.0}) == [[2, 9], [2, 9]]
  assert ids(logit_bias=[{9: 1}, None]) == [[9], []]


def test_a_bias_stays_with_its_id():
  bias = SamplingParams(logit_bias=[{9: 1.5, 2: -np.inf}, {30: -3}]).batch(2).logit_bias
  assert bias.ids.dtype == jnp.int32 and bias.values.dtype == jnp.float32
  pairs = [{int(i): float(v) for i, v in zip(*row) if i >= 0} for row in zip(bias.ids, bias.values)]
  assert pairs == [{9: 1.5, 2: -np.inf}, {30: -3.0}]


@pytest.mark.parametrize("count,places", [(1, 8), (8, 8), (9, 16), (100, 128)])
def test_few_shapes(count, places):
  """Another list of about that length must not compile again."""
  params = SamplingParams(banned_ids=[range(count), None], logit_bias=dict.fromkeys(range(count), 1.0)).batch(2)
  assert params.banned_ids.ids.shape == params.logit_bias.ids.shape == params.logit_bias.values.shape == (2, places)
  assert (np.asarray(params.banned_ids.ids) >= 0).sum(-1).tolist() == [count, 0]


FULL = SamplingParams(temperature=[0.5, 0], top_k=3, seed=[4, 4], repetition_penalty=1.5, presence_penalty=[0.5, 0],
                      frequency_penalty=0.25, logit_bias=[{3: -np.inf}, None], banned_ids=[1],
                      allowed_ids=[[2, 3], None], min_new_tokens=[0, 4])


def test_batched_parameters_may_be_batched_again():
  once = FULL.batch(2, vocabulary=9)
  again = once.replace(seed=None).batch(2, vocabulary=9)
  assert again.seed.tolist() == [0, 1]
  assert jax.tree.structure(once) == jax.tree.structure(again)
  for a, b in zip(jax.tree.leaves(once.replace(seed=again.seed)), jax.tree.leaves(again)):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype
  unused = SamplingParams().batch(2)
  assert jax.tree.structure(unused.batch(2)) == jax.tree.structure(unused)
  with pytest.raises(ValueError, match="banned_ids was batched for 1 rows; this batch has 2"):
    SamplingParams(banned_ids=RowIds(ids=jnp.full((1, 8), 3))).batch(2)
  with pytest.raises(ValueError, match=r"banned_ids holds id 9 in row 1: it must be in 0 to 8, the target's ids"):
    SamplingParams(banned_ids=[[1], [9]]).batch(2).batch(2, vocabulary=9)


def test_the_text_of_parameters_is_what_was_asked_for():
  assert repr(SamplingParams()) == "SamplingParams()"
  assert repr(SamplingParams(temperature=0.5, banned_ids=[3])) == "SamplingParams(temperature=0.5, banned_ids=[3])"
  assert "repetition_penalty" not in repr(SamplingParams().batch(2))
  assert repr(SamplingParams(seed=0, min_new_tokens=2)) == "SamplingParams(seed=0, min_new_tokens=2)"


@pytest.mark.parametrize("name,value,message", [
    ("temperature", [1.0, -0.1], r"temperature=-0\.1.* in row 1: it must be 0 \(greedy\) or more"),
    ("temperature", [float("nan"), 1], r"temperature=nan in row 0"),
    ("temperature", float("inf"), r"temperature=inf in row 0"),
    ("top_k", [3, -1], r"top_k=-1 in row 1: it must be 0 \(keep all\) or more"),
    ("top_k", [1, 2.5], r"top_k=.*2\.5.*whole number"),
    ("top_p", [0.5, 0.0], r"top_p=0\.0 in row 1: it must be in \(0, 1\]"),
    ("top_p", 1.5, r"top_p=1\.5 in row 0"),
    ("top_p", [float("nan"), 1], r"top_p=nan in row 0"),
    ("min_p", [0.0, 1.01], r"min_p=1\.01 in row 1: it must be in \[0, 1\]"),
    ("min_p", -0.5, r"min_p=-0\.5 in row 0"),
    ("seed", [0, -3], r"seed=-3 in row 1: it must be 0 or more"),
    ("temperature", [1.0, 1.0, 1.0], r"temperature has shape \(3,\); allowed are one value or one a row, \(2,\)"),
    ("seed", [[1, 2]], r"seed has shape \(1, 2\)"),
    ("seed", [0, 2**32], r"seed=4294967296 in row 1"),          # as an int32 it would be the stream of seed 0
    ("temperature", [1.0, 1e39], r"temperature=1e\+39 in row 1"),  # as a float32 it would be infinite
    ("repetition_penalty", [1.0, 0.0], r"repetition_penalty=0\.0 in row 1: it must be greater than 0"),
    ("repetition_penalty", [-1.0, 1.0], r"repetition_penalty=-1\.0 in row 0"),
    ("repetition_penalty", 1e-60, r"repetition_penalty=1e-60 in row 0"),  # as a float32 it would be 0
    ("presence_penalty", [0.0, 2.1], r"presence_penalty=2\.1 in row 1: it must be in \[-2, 2\]"),
    ("frequency_penalty", -2.5, r"frequency_penalty=-2\.5 in row 0: it must be in \[-2, 2\]"),
    ("frequency_penalty", float("nan"), r"frequency_penalty=nan in row 0"),
    ("min_new_tokens", [0, -1], r"min_new_tokens=-1 in row 1: it must be 0 or more"),
    ("min_new_tokens", 1.5, r"min_new_tokens=1\.5 in row 0.*whole number"),
    ("min_new_tokens", [1, 2, 3], r"min_new_tokens has shape \(3,\); allowed are one value or one a row, \(2,\)"),
    ("logit_bias", {3: float("inf")}, r"logit_bias of id 3 is inf in row 0: it must be a finite number.*or -inf"),
    ("logit_bias", [None, {3: float("nan")}], r"logit_bias of id 3 is nan in row 1"),
    ("logit_bias", {3: 1e39}, r"logit_bias of id 3 is 1e\+39 in row 0"),
    ("logit_bias", {3: "high"}, r"logit_bias of id 3 is 'high' in row 0"),
    ("logit_bias", {-1: 1.0}, r"logit_bias holds id -1 in row 0: it must be in 0 to 19, the target's ids"),
    ("logit_bias", [{}, {20: 1.0}], r"logit_bias holds id 20 in row 1: it must be in 0 to 19"),
    ("logit_bias", {"3": 1.0}, r"logit_bias holds '3' in row 0: ids are whole numbers"),
    ("logit_bias", [{}, {}, {}], r"logit_bias for 3 rows; allowed are one mapping for all rows or one a row, 2"),
    ("logit_bias", 3.0, r"logit_bias=3\.0: it must be a mapping from id to bias"),
    ("banned_ids", [3, -4], r"banned_ids holds id -4 in row 0: it must be in 0 to 19"),
    ("banned_ids", [None, [20]], r"banned_ids holds id 20 in row 1"),
    ("banned_ids", [1.0], r"banned_ids holds 1\.0 in row 0: ids are whole numbers"),
    ("banned_ids", [True], r"banned_ids holds True in row 0"),
    ("banned_ids", [[1], [2], [3]], r"banned_ids for 3 rows; allowed are ids for all rows or one list a row, 2"),
    ("banned_ids", [[1], 2], r"banned_ids holds 2 for row 1; with a list for one row, each row needs a list or None"),
    ("banned_ids", 3, r"banned_ids=3: it must be a list of ids"),
    ("banned_ids", "ab", r"banned_ids='ab': it must be a list of ids"),
    ("banned_ids", [None, range(20)], r"the ids of row 1 are all banned.*leaves nothing to draw; ban fewer"),
    ("allowed_ids", [], r"allowed_ids=\[\] in row 0 leaves nothing to draw; give at least one id, or None"),
    ("allowed_ids", [[1], []], r"allowed_ids=\[\] in row 1 leaves nothing to draw"),
    ("allowed_ids", [[1], [25]], r"allowed_ids holds id 25 in row 1: it must be in 0 to 19"),
])
def test_batch_names_what_is_wrong_and_where(name, value, message):
  with pytest.raises(ValueError, match=message):
    SamplingParams(**{name: value}).batch(2, vocabulary=20)


@pytest.mark.parametrize("banned,bias", [([5, 6], None), ([[], [5, 6, 7]], None), (None, {5: -np.inf, 6: -np.inf}),
                                         ([None, [5]], [None, {6: -np.inf}])])
def test_a_row_whose_allowed_ids_are_all_banned(banned, bias):
  row = int(isinstance((banned or [0])[-1], list))
  with pytest.raises(ValueError, match=f"allowed_ids of row {row} are all banned, by banned_ids or a logit_bias of "
                                       "-inf, which leaves nothing to draw; ban fewer or allow more"):
    SamplingParams(allowed_ids=[5, 6], banned_ids=banned, logit_bias=bias).batch(2)
  SamplingParams(allowed_ids=[5, 6, 8], banned_ids=banned, logit_bias=bias).batch(2)


def test_ids_without_a_vocabulary_are_whole_and_not_negative():
  assert SamplingParams(banned_ids=[2**31 - 1]).batch(1).banned_ids.ids[0, 0] == 2**31 - 1
  for value in (-1, 2**31):
    with pytest.raises(ValueError, match=rf"banned_ids holds id {value} in row 0: it must be in 0 to 2147483647"):
      SamplingParams(banned_ids=[value]).batch(1)


def test_a_minimum_beyond_the_budget():
  params = SamplingParams(min_new_tokens=[3, 5]).batch(2)
  params.check_ends([1], 5)
  params.check_ends([1], [3, 5])
  with pytest.raises(ValueError, match="min_new_tokens=5 in row 1 is more than max_new_tokens=4; lower"):
    params.check_ends([1], 4)
  with pytest.raises(ValueError, match="min_new_tokens=3 in row 0 is more than max_new_tokens=2"):
    params.check_ends([1], [2, 5])
  SamplingParams().batch(2).check_ends([1], 1)


@pytest.mark.parametrize("ends", [[7, 8], np.array([[-1, -1, -1], [8, 7, -1]]), [[], [7, 8]], jnp.asarray([7, 8])],
                         ids=["all", "padded", "lists", "array"])
def test_a_minimum_that_only_end_ids_could_fill(ends):
  make = lambda **kwargs: SamplingParams(allowed_ids=[None, [7, 8, 3]], **kwargs).batch(2)
  make(min_new_tokens=1).check_ends(ends, 9)
  make(min_new_tokens=[1, 0], banned_ids=[3]).check_ends(ends, 9)
  message = r"min_new_tokens=2 in row 1: all that may be drawn are end ids \[7, 8\].*set min_new_tokens=0, or allow"
  for kwargs in (dict(banned_ids=[3]), dict(logit_bias={3: -np.inf})):
    with pytest.raises(ValueError, match=message):
      make(min_new_tokens=2, **kwargs).check_ends(ends, 9)


def test_a_minimum_where_all_but_the_end_is_banned():
  params = SamplingParams(banned_ids=[None, range(7)], min_new_tokens=1).batch(2, vocabulary=8)
  with pytest.raises(ValueError, match=r"min_new_tokens=1 in row 1: all that may be drawn are end ids \[7\]"):
    params.check_ends([7], 4, vocabulary=8)
  params.check_ends([6], 4, vocabulary=8)


def test_mode_is_the_least_work():
  mode = lambda **kwargs: int(SamplingParams(**kwargs).batch(2).mode())
  assert mode() == sampling.GREEDY
  assert mode(top_k=3, top_p=0.5, min_p=0.1) == sampling.GREEDY  # filters of greedy rows change nothing
  assert mode(temperature=[0, 0.5]) == sampling.TEMPERATURE
  assert mode(temperature=[0, 0.5], top_k=[4, 0]) == sampling.TEMPERATURE
  assert mode(temperature=[0, 0.5], top_k=[0, 4]) == sampling.FILTERED
  assert mode(temperature=1.0, top_p=0.9) == sampling.FILTERED
  assert mode(temperature=1.0, min_p=0.1) == sampling.FILTERED
