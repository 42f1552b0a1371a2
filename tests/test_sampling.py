"""The processor pipeline against a sort-based reference, and the draw against the law by integration over u."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.sampling import SamplingParams

VOCAB, NODES = 11, 6
process = jax.jit(sampling.process)
draw = jax.jit(sampling.draw)
invert = jax.jit(sampling.invert)
TINY, NEAR_ONE = np.float32(2.0 ** -24), np.float32(1 - 2.0 ** -24)


def reference(logits, temperature, top_k, top_p, min_p):
  """The law of one position in float64, with a sort; every filter keeps what ties with the last one kept."""
  logits = np.asarray(logits, np.float64)
  if temperature == 0:
    return np.eye(len(logits))[np.argmax(logits)]
  weights = np.exp((logits - logits.max()) / np.float64(np.float32(temperature)))
  if top_k > 0:
    weights = np.where(weights >= np.sort(weights)[::-1][min(top_k, len(weights)) - 1], weights, 0)
  if top_p < 1:
    order = np.sort(weights)[::-1]
    last = np.argmax(np.cumsum(order) >= np.float64(np.float32(top_p)) * order.sum())
    weights = np.where(weights >= order[last], weights, 0)
  weights = np.where(weights >= min_p, weights, 0)
  return weights / weights.sum()


def check(logits, temperature, top_k, top_p, min_p):
  """One batch of rows with these parameters (lists), against the reference row by row."""
  params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).batch(len(temperature))
  law = np.asarray(process(jnp.asarray(logits, jnp.float32), params))
  assert np.isfinite(law).all() and law.dtype == np.float32
  for row, asked in enumerate(zip(temperature, top_k, top_p, min_p, strict=True)):
    for node in range(logits.shape[1]):
      wanted = reference(logits[row, node], *asked)
      np.testing.assert_allclose(law[row, node], wanted, atol=2e-6, err_msg=f"{asked} row {row} node {node}")
      np.testing.assert_array_equal(law[row, node] > 0, wanted > 1e-30, err_msg=f"{asked} row {row} node {node}")
  return law


MIXES = list(itertools.product([0.0, 0.3, 1.0, 2.0], [0, 1, 3, 50], [1.0, 0.9, 0.4], [0.0, 0.1]))


@pytest.mark.parametrize("seed", range(2))
def test_process_is_the_reference_for_every_mix(seed):
  rng = np.random.default_rng(seed)
  check(rng.normal(0, 2, (len(MIXES), NODES, VOCAB)).astype(np.float32), *map(list, zip(*MIXES)))


def test_process_with_ties():
  rng = np.random.default_rng(2)
  logits = rng.integers(0, 4, (len(MIXES), NODES, VOCAB)).astype(np.float32)  # many equal ones
  keep = [mix[2] for mix in MIXES]
  law = check(logits, [mix[0] for mix in MIXES], [mix[1] for mix in MIXES], keep, [mix[3] for mix in MIXES])
  for row, (temperature, top_k, _, _) in enumerate(MIXES):
    if temperature == 0:  # the lowest id on ties
      assert (law[row].argmax(-1) == logits[row].argmax(-1)).all() and (law[row].max(-1) == 1).all()
    if temperature > 0 and top_k == 1:  # all that tie with the best are kept, with equal chances
      best = logits[row] == logits[row].max(-1, keepdims=True)
      np.testing.assert_allclose(law[row], best / best.sum(-1, keepdims=True), atol=1e-6)


def test_process_with_banned_ids():
  rng = np.random.default_rng(3)
  logits = rng.normal(0, 2, (len(MIXES), NODES, VOCAB)).astype(np.float32)
  logits[:, 0, 0] = -np.inf
  logits[:, 1, -1] = -np.inf
  logits[:, 2, [0, 1, -2, -1]] = -np.inf
  logits[:, 3, 1:] = -np.inf     # one id is left
  logits[:, 4, :-1] = -np.inf
  law = check(logits, *map(list, zip(*MIXES)))
  assert (law[~np.isfinite(logits)] == 0).all()
  assert (law[:, 3, 0] == 1).all() and (law[:, 4, -1] == 1).all()


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_extreme_parameters(scale):
  """None of them may give NaN, an empty support or more than was asked for."""
  asked = [(0.0, 0, 1.0, 0.0), (1e-6, 0, 1.0, 0.0), (1e-6, 3, 0.5, 0.5), (2.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0),
           (1.0, 10**6, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 1.0), (2.0, 1, 1e-9, 1.0),
           (1.0, VOCAB, 1.0, 0.0), (1e30, 0, 1.0, 0.0), (1.0, 0, np.nextafter(np.float32(1), np.float32(0)), 0.0)]
  logits = (np.random.default_rng(4).normal(0, 2, (len(asked), NODES, VOCAB)) * scale).astype(np.float32)
  params = SamplingParams(*map(list, zip(*asked))).batch(len(asked))
  law = np.asarray(process(jnp.asarray(logits), params))
  assert np.isfinite(law).all()
  np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
  best = logits.argmax(-1)
  for row in (0, 1, 2, 4, 6, 7, 8):  # each of these leaves only the best
    assert (law[row].argmax(-1) == best[row]).all() and (law[row] > 0).sum() == NODES, asked[row]
  if scale == 1.0:
    assert (law[[3, 5, 9, 10, 11]] > 0).all()  # and these keep everything
    np.testing.assert_allclose(law[10], 1 / VOCAB, atol=1e-6)


def test_temperatures_below_the_normal_floats():
  logits = np.random.default_rng(14).normal(0, 2, (3, NODES, VOCAB)).astype(np.float32)
  logits[:, 0, 0] = -np.inf
  params = SamplingParams(temperature=[1e-37, 1e-40, 1e-45]).batch(3)
  law = np.asarray(process(jnp.asarray(logits), params))
  np.testing.assert_array_equal(law, np.eye(VOCAB)[logits.argmax(-1)])
  drawn = draw(jnp.asarray(logits), params, jnp.full((3, NODES), 0.5, jnp.float32), params.mode())
  np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_greedy_and_sampled_rows_in_one_batch():
  """Engine bugs E1 and E2: the greedy rows of a mixed batch went through the division."""
  logits = np.random.default_rng(5).normal(0, 2, (4, NODES, VOCAB)).astype(np.float32)
  params = SamplingParams(temperature=[0, 0.7, 0, 1.3], top_p=[1, 0.8, 0.5, 1], top_k=[0, 0, 2, 3]).batch(4)
  law = np.asarray(process(jnp.asarray(logits), params))
  one = lambda row: jax.tree.map(lambda x: x[row:row + 1], params)
  for row in range(4):
    np.testing.assert_array_equal(law[row], np.asarray(process(jnp.asarray(logits[row:row + 1]), one(row)))[0])
  assert np.array_equal(law[[0, 2]], np.eye(VOCAB)[logits[[0, 2]].argmax(-1)])


def test_low_precision_logits_are_read_exactly():
  logits = jnp.asarray(np.random.default_rng(6).normal(0, 2, (2, NODES, VOCAB)), jnp.bfloat16)
  params = SamplingParams(temperature=[0.0, 0.7], top_p=0.9).batch(2)
  np.testing.assert_array_equal(process(logits, params), process(logits.astype(jnp.float32), params))


def test_a_large_vocabulary():
  rng = np.random.default_rng(7)
  logits = rng.normal(0, 3, (3, 1, 49152)).astype(np.float32)
  temperature, top_k, top_p, min_p = [0.8, 1.0, 1.5], [0, 50, 1000], [0.95, 1.0, 0.9], [0.0, 0.0, 0.01]
  params = SamplingParams(temperature, top_k, top_p, min_p).batch(3)
  law = np.asarray(process(jnp.asarray(logits), params))
  for row in range(3):
    wanted = reference(logits[row, 0], temperature[row], top_k[row], top_p[row], min_p[row])
    # The mass of 40000 float32 weights decides where top-p ends: a token of weight near the edge may fall either way.
    assert abs(int((law[row] > 0).sum()) - int((wanted > 0).sum())) <= (2 if top_p[row] < 1 else 0)
    np.testing.assert_allclose(law[row, 0], wanted, atol=2e-5)
  points = 512
  grid = (np.arange(points, dtype=np.float32) + 0.5) / points
  drawn = np.asarray(invert(jnp.asarray(np.broadcast_to(law[1], (points, 49152)).copy()), jnp.asarray(grid)))
  counts = np.bincount(drawn, minlength=49152)
  assert (abs(counts / points - law[1, 0]) < 1.01 / points).all() and (law[1, 0][drawn] > 0).all()


@pytest.mark.parametrize("size", [1, 11, 255, 256, 257, 1000])
def test_argmax_takes_the_lowest_id_on_ties(size):
  """Ties inside a block, across blocks and at both ends; nothing that fills up the last block may win."""
  rng = np.random.default_rng(size)
  logits = rng.integers(-3, 1, (64, size)).astype(np.float32)
  logits[0], logits[1] = -np.inf, -5.0
  logits[2], logits[2, -1] = -np.inf, -1e30
  logits[3, [0, -1]] = 9.0
  for dtype in (jnp.float32, jnp.bfloat16):
    best = jax.jit(sampling.argmax)(jnp.asarray(logits, dtype))
    assert best.dtype == jnp.int32
    np.testing.assert_array_equal(best, logits.argmax(-1))


# --- thresholds from a short list, and where it does not reach -------------------------------------------------------

def last_kept(weights, top_k, top_p):
  """The least weight kept, by sorting, for weights whose sums are exact in any order."""
  order = np.sort(weights.astype(np.float64))[::-1]
  kept_k = order[top_k - 1] if 0 < top_k < len(order) else 0.0
  if top_p == 1:
    return kept_k
  order = order[order >= kept_k]
  return order[np.argmax(np.cumsum(order) >= np.float64(np.float32(top_p)) * order.sum())]


LONG = 1500
FILTERS = [(50, 1.0), (0, 0.75), (50, 0.75), (300, 1.0), (300, 0.5), (LONG + 5, 1.0), (LONG - 1, 0.875), (1, 1.0),
           (0, 1e-9), (128, 1.0), (129, 1.0), (0, 0.9999), (129, 0.9999), (3, 0.5)]


@pytest.mark.parametrize("listed", [128, 5])
def test_the_list_and_the_bisection_find_what_a_sort_finds(listed, monkeypatch):
  """Whatever part of the thresholds the list gives: none, some or all of them."""
  rng = np.random.default_rng(20)
  shape = (len(FILTERS), 2, LONG)
  kinds = {"peaked": 2.0 ** -rng.integers(0, 11, shape) * (rng.uniform(size=shape) < 0.02),
           "flat": rng.integers(900, 1000, shape) / 1024, "equal": np.ones(shape),
           "distinct": rng.permuted(np.broadcast_to(np.arange(LONG) / 2048, shape), axis=-1),
           "ties": rng.integers(0, 5, shape) / 4,  # about 300 with each value
           "two values": np.where(rng.uniform(size=shape) < 0.1, 1.0, 2.0 ** -10)}
  monkeypatch.setattr(sampling, "_LISTED", listed)
  top_k, top_p = (np.array(x) for x in zip(*FILTERS))
  keep = jnp.asarray(np.where(top_k < LONG, top_k, 0), jnp.int32)
  share = jnp.asarray(np.where(top_p < 1, top_p, 0), jnp.float32)[:, None, None]
  find = jax.jit(lambda *args: sampling._last_kept(*args))
  for kind, weights in kinds.items():
    weights = weights.astype(np.float32)
    weights[..., 700] = 1
    kept = np.asarray(find(jnp.asarray(weights), keep, share))
    for row, asked in enumerate(FILTERS):
      for node in range(2):
        wanted = weights[row, node] >= last_kept(weights[row, node], *asked)
        np.testing.assert_array_equal(weights[row, node] >= kept[row, node], wanted, err_msg=f"{kind} {asked}")


def test_the_bisection_answers_only_where_the_list_does_not():
  """So that no row depends on what its neighbours ask for, not even by rounding."""
  listed = jnp.full((3, 2, 1), 0.25, jnp.float32)
  beyond = jnp.asarray([[0, 0], [0, 1], [1, 0]], bool)[..., None]
  kept = sampling._threshold(listed, listed, beyond, lambda t: t <= 0.7)
  np.testing.assert_array_equal(kept, jnp.where(beyond, np.float32(0.7), 0.25))
  never = sampling._threshold(listed, listed, beyond, lambda t: t < 0)
  np.testing.assert_array_equal(never, jnp.where(beyond, 0, 0.25))


def test_a_neighbour_that_needs_the_bisection_changes_no_row():
  rng = np.random.default_rng(21)
  logits = rng.normal(0, 1, (3, 2, 6000)).astype(np.float32)
  logits[0] *= 8
  params = SamplingParams(temperature=[0.8, 1.0, 1.0], top_k=[50, 0, 500], top_p=[0.9, 0.97, 0.9]).batch(3)
  law = np.asarray(process(jnp.asarray(logits), params))
  assert ((law > 0).sum(-1) > 128).any(-1).tolist() == [False, True, True]
  peaked = jnp.asarray(np.broadcast_to(logits[:1], logits.shape))
  same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), params)
  np.testing.assert_array_equal(law[0], np.asarray(process(peaked, same))[0])


def test_law_is_process_in_every_mode_that_honours_the_rows():
  logits = jnp.asarray(np.random.default_rng(22).normal(0, 2, (3, NODES, 600)), jnp.float32)
  law = jax.jit(sampling.law)
  for asked in (dict(), dict(temperature=[0, 1, 0.5], top_k=[3, 0, 3], top_p=0.9)):
    params = SamplingParams(**asked).batch(3)
    for mode in range(int(params.mode()), 3):
      np.testing.assert_allclose(law(logits, params, jnp.int32(mode)), process(logits, params), atol=1e-7)


def test_float64_is_computed_in_float64():
  """Laws that differ by less than float32 can tell, thresholds between such weights, and the draw."""
  rng = np.random.default_rng(23)
  mixes = MIXES[1::7]
  logits = rng.normal(0, 2, (len(mixes), NODES, VOCAB))
  logits[:, 0] = 1e-9 * rng.permutation(VOCAB)
  temperature, top_k, top_p, min_p = map(list, zip(*mixes))
  with jax.enable_x64(True):
    params = SamplingParams(temperature, top_k, top_p, min_p).batch(len(mixes))
    law = np.asarray(process(jnp.asarray(logits), params))
    assert law.dtype == np.float64
    assert jax.eval_shape(sampling.law, jnp.asarray(logits), params, jnp.int32(2)).dtype == np.float64
    drawn = np.asarray(draw(jnp.asarray(logits), params, jnp.full(logits.shape[:2], 0.3), jnp.int32(2)))
    kept = sampling._threshold(jnp.asarray([[[1.0, 0.5 + 1e-15, 0.5]]]), jnp.zeros((1, 1, 1)),
                               jnp.ones((1, 1, 1), bool), lambda t: t <= 0.5 + 1e-15)
    assert kept.item() == 0.5 + 1e-15
  for row, asked in enumerate(mixes):
    for node in range(NODES):
      wanted = reference(logits[row, node], *asked)
      if 0 < asked[3] and asked[0] > 0:  # min_p is a float32
        wanted = reference(logits[row, node], *asked[:3], np.float64(np.float32(asked[3])))
      np.testing.assert_allclose(law[row, node], wanted, atol=1e-14, err_msg=f"{asked}")
      np.testing.assert_array_equal(law[row, node] > 0, wanted > 0, err_msg=f"{asked}")
      below = np.cumsum(wanted)
      assert drawn[row, node] == np.argmax(below > 0.3)


def test_a_draw_keeps_two_arrays_beside_the_logits():
  """Widest vocabularies have sizes that no block divides; copies that fill them up would cost as much as the draw."""
  shape = (1, 8, 151936)
  logits = jax.ShapeDtypeStruct(shape, jnp.float32)
  params = SamplingParams(0.8, 50, 0.9).batch(1)
  for function, *args in ((sampling.draw, params, jnp.zeros(shape[:2])), (sampling.law, params)):
    memory = jax.jit(function).lower(logits, *args, jnp.int32(2)).compile().memory_analysis()
    if memory is not None:
      assert memory.temp_size_in_bytes < 2.2 * 4 * np.prod(shape), function


# --- the draw -------------------------------------------------------------------------------------------------------

POINTS = 4096
GRID = (np.arange(POINTS, dtype=np.float32) + 0.5) / POINTS


@pytest.mark.parametrize("temperature,top_k,top_p,min_p", [
    (0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.9, 0, 1.0, 0.2),
    (1.1, 4, 0.9, 0.05)])
def test_draw_has_the_law_of_process(temperature, top_k, top_p, min_p):
  """Integrated over u, the draw's law is `process`: no filter may hold for one and not for the other."""
  logits = np.random.default_rng(8).normal(0, 2, (2, 1, VOCAB)).astype(np.float32)
  logits[1, 0, [0, -1]] = -np.inf
  params = SamplingParams(temperature, top_k, top_p, min_p).batch(2)
  law = np.asarray(process(jnp.asarray(logits), params))[:, 0]
  repeated = jnp.broadcast_to(jnp.asarray(logits), (2, POINTS, VOCAB))
  for mode in range(int(params.mode()), 3):  # a neighbour may ask for more work: the draw stays the same
    drawn = np.asarray(draw(repeated, params, jnp.broadcast_to(GRID, (2, POINTS)), jnp.int32(mode)))
    for row in range(2):
      share = np.bincount(drawn[row], minlength=VOCAB) / POINTS
      # An interval of length p holds between p * POINTS - 1 and p * POINTS + 1 points of the grid.
      assert (abs(share - law[row]) < 1.01 / POINTS).all()
      assert (law[row][drawn[row]] > 0).all()


def test_the_work_asked_for_by_a_neighbour_changes_no_draw():
  logits = jnp.asarray(np.random.default_rng(9).normal(0, 2, (3, 512, 600)), jnp.float32)
  uniforms = jnp.asarray(np.random.default_rng(10).uniform(1e-6, 1 - 1e-6, (3, 512)), jnp.float32)
  alone = SamplingParams(temperature=[0.0, 0.8, 1.0]).batch(3)
  assert int(alone.mode()) == sampling.TEMPERATURE
  beside = alone.replace(top_k=jnp.asarray([0, 0, 5], jnp.int32))
  assert int(beside.mode()) == sampling.FILTERED
  a = np.asarray(draw(logits, alone, uniforms, alone.mode()))
  b = np.asarray(draw(logits, beside, uniforms, beside.mode()))
  np.testing.assert_array_equal(a[:2], b[:2])
  assert (a[2] != b[2]).any()
  greedy = SamplingParams(temperature=0.0).batch(3)
  np.testing.assert_array_equal(a[0], np.asarray(draw(logits, greedy, uniforms, greedy.mode()))[0])


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 600])
@pytest.mark.parametrize("u", [0.0, TINY, 0.5, NEAR_ONE], ids=["0", "2^-24", "half", "1-2^-24"])
def test_invert_draws_only_what_is_possible(size, u):
  """First and last ids banned, whole blocks empty, a single id left, tiny and huge totals; u at both ends."""
  rng = np.random.default_rng(size)
  rows = 40
  weights = rng.uniform(0, 1, (rows, size)).astype(np.float32)
  weights *= rng.uniform(0, 1, weights.shape) < rng.uniform(0.02, 1, (rows, 1))
  weights[: rows // 2, 0] = 0
  weights[rows // 4: 3 * rows // 4, -1] = 0
  weights *= 10.0 ** rng.integers(-20, 4, (rows, 1)).astype(np.float32)
  for row in range(rows):
    if not weights[row].any():
      weights[row, rng.integers(size)] = 1.0
  drawn = np.asarray(invert(jnp.asarray(weights), jnp.full(rows, u, jnp.float32)))
  assert drawn.dtype == np.int32
  assert (np.take_along_axis(weights, drawn[:, None], 1) > 0).all()
  for row in range(rows):
    possible = np.flatnonzero(weights[row])
    if u <= TINY and weights[row, possible[0]] > 1e-4 * weights[row].sum():
      assert drawn[row] == possible[0]
    if u == NEAR_ONE and weights[row, possible[-1]] > 1e-4 * weights[row].sum():
      assert drawn[row] == possible[-1]


def test_invert_at_the_edges_of_blocks_and_ids():
  """u where a cumulative sum ends, and its neighbours: rounding there must not lead to an id of weight 0."""
  rng = np.random.default_rng(13)
  size, rows = 2048, 4000
  weights = (rng.uniform(0, 1, (rows, size)) ** 6).astype(np.float32)
  weights[:, ::2] = 0  # the first id of every block is banned, and so is each one behind a possible one
  sums = np.cumsum(weights.astype(np.float64), -1)
  edge = rng.integers(0, size // 256, rows) * 256 + rng.choice([0, 1, 255, 31], rows)
  u = (sums[np.arange(rows), edge] / sums[:, -1]).astype(np.float32)
  for neighbour in (u, np.nextafter(u, np.float32(0)), np.nextafter(u, np.float32(1))):
    inside = np.clip(neighbour, TINY, NEAR_ONE)
    drawn = np.asarray(invert(jnp.asarray(weights), jnp.asarray(inside)))
    assert (weights[np.arange(rows), drawn] > 0).all()


@pytest.mark.parametrize("size", [5, 257])
def test_invert_has_the_exact_law(size):
  rng = np.random.default_rng(11)
  weights = (rng.uniform(0, 1, (2, size)) ** 4).astype(np.float32)
  weights[0, 0] = weights[1, -1] = 0
  for row in weights:
    drawn = np.asarray(invert(jnp.broadcast_to(row, (POINTS, size)), jnp.asarray(GRID)))
    assert (np.diff(drawn) >= 0).all()  # an inverse of a cumulative sum is monotone
    counts = np.bincount(drawn, minlength=size)
    wanted = row.astype(np.float64) / row.sum(dtype=np.float64)
    assert (abs(counts / POINTS - wanted) < 1.01 / POINTS).all()


def test_invert_ignores_the_scale_of_the_weights():
  weights = np.random.default_rng(12).uniform(0, 1, (POINTS, 5)).astype(np.float32)
  run = lambda scale: np.asarray(invert(jnp.asarray(weights * np.float32(scale)), jnp.asarray(GRID)))
  a, b = run(1), run(64)
  np.testing.assert_array_equal(a, b)
