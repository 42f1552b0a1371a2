"""The adjusted logits against a loop over nodes, and each node against plain decoding behind its text."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import processors
from specjax import sampling
from specjax import tree as tree_lib
from specjax.processors import Prefixes
from specjax.sampling_params import SamplingParams

VOCAB, SLOTS, DEPTH = 13, 12, 6
adjust = jax.jit(processors.adjust)
process = jax.jit(sampling.process)

# A row: prompt, output (its last token is pending), and below it a tree with repeated tokens on and beside each path.
ROWS = [
    ([1, 2, 2, 5], [5, 7], [0, 0, 1, 2, 0, 3, 1], [7, 5, 5, 5, 2, 1, 7]),
    ([3], [], [0, 0, 1, 2, 3, 4, 5], [3, 3, 3, 3, 4, 4, 3]),       # a chain below the prompt's only token
    ([0, 12, 0], [12, 12, 0], [0, 0, 0, 0, 0, 0, 0], [0, 12, 0, 12, 1, 2, 3]),
    ([6, 6, 6, 6, 6, 6], [], [0, 0, 1, 1, 3, 3, 0], [6, 8, 9, 8, 9, 8, 9]),
]
EOS = [[4], [3, 4], [], [9]]
T = len(ROWS[0][2])


def batch_of(rows=range(len(ROWS)), allowed=None, width=T):
  """Prefixes of these rows; the slots behind a text are poisoned with a token of its own."""
  rows = list(rows)
  tokens = np.full((len(rows), SLOTS), 11, np.int32)
  length, eos = [], np.full((len(rows), 8), -1, np.int32)
  for i, row in enumerate(rows):
    prompt, output = ROWS[row][:2]
    tokens[i, :len(prompt + output)] = prompt + output
    length.append(len(prompt + output))
    eos[i, :len(EOS[row])] = EOS[row]
  parents = jnp.asarray([ROWS[row][2] for row in rows], jnp.int32)
  mask = tree_lib.ancestors(parents, DEPTH)
  return Prefixes(tokens=jnp.asarray(tokens), length=jnp.asarray(length, jnp.int32),
                  start=jnp.asarray([len(ROWS[row][0]) for row in rows], jnp.int32), eos=jnp.asarray(eos),
                  path_tokens=jnp.asarray([ROWS[row][3] for row in rows], jnp.int32)[:, :width],
                  mask=mask[:, :width, :width], allowed=allowed)


def text_at(row, node):
  """Prompt and output behind a node of a row's tree, by following the parents."""
  prompt, output, parents, tokens = ROWS[row]
  path = []
  while node:
    path.append(tokens[node])
    node = parents[node]
  return list(prompt), output + path[::-1]


def reference(logits, row, prompt, output, *, repetition=None, presence=None, frequency=None, bias=None, banned=None,
              allowed=None, constraint=None, least=None):
  """The logits of one position behind a text, id by id, in float64. Settings are one a row."""
  out = np.asarray(logits, np.float64).copy()
  text = prompt + output
  for token in range(VOCAB):
    times = text.count(token)
    if repetition is not None and times:
      factor = np.float64(np.float32(repetition[row]))
      out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    if frequency is not None:
      out[token] -= np.float64(np.float32(frequency[row])) * times
    if presence is not None and times:
      out[token] -= np.float64(np.float32(presence[row]))
    if bias is not None and token in (bias[row] or {}):
      out[token] += bias[row][token]
    if banned is not None and token in (banned[row] or ()):
      out[token] = -np.inf
    if allowed is not None and allowed[row] is not None and token not in allowed[row]:
      out[token] = -np.inf
  for forbidden in ([t for t in range(VOCAB) if constraint is not None and not constraint[t]],
                    EOS[row] if least is not None and len(output) < least[row] else []):
    masked = out.copy()
    masked[forbidden] = -np.inf
    out = masked if np.isfinite(masked).any() else out
  return out


ASKED = {
    "repetition": dict(repetition=[1.3, 0.7, 2.0, 1.0]),
    "presence": dict(presence=[0.5, -2.0, 2.0, 0.0]),
    "frequency": dict(frequency=[0.25, -1.0, 2.0, 0.0]),
    "bias": dict(bias=[{3: 1.5, 0: -np.inf}, None, {12: -4.0}, {}]),
    "banned": dict(banned=[[0, 12], None, [5], []]),
    "allowed": dict(allowed=[[2, 5, 7], None, [0, 12], None]),
    "minimum": dict(least=[4, 3, 9, 0]),
    "all": dict(repetition=[1.3, 0.7, 2.0, 1.0], presence=[0.5, -2.0, 0.1, 0.0], frequency=[0.25, -1.0, 2.0, 0.0],
                bias=[{3: 1.5}, None, {12: -4.0}, {8: 2.0}], banned=[[0, 12], None, [5], [9]],
                allowed=[[2, 5, 7, 4], None, [0, 12], None], least=[4, 3, 9, 0]),
}
NAMES = dict(repetition="repetition_penalty", presence="presence_penalty", frequency="frequency_penalty",
             bias="logit_bias", banned="banned_ids", allowed="allowed_ids", least="min_new_tokens")


def params_of(asked, rows=range(len(ROWS)), **kwargs):
  rows = list(rows)
  return SamplingParams(**{NAMES[name]: [value[row] for row in rows] for name, value in asked.items()},
                        **kwargs).batch(len(rows), VOCAB)


def random_logits(seed, shape=(len(ROWS), T, VOCAB)):
  return np.random.default_rng(seed).normal(0, 3, shape).astype(np.float32)


@pytest.mark.parametrize("asked", list(ASKED))
def test_every_node_against_a_loop(asked):
  logits = random_logits(0)
  out = np.asarray(adjust(jnp.asarray(logits), params_of(ASKED[asked]), batch_of()))
  assert out.dtype == np.float32 and (out != logits).any()
  for row in range(len(ROWS)):
    for node in range(T):
      wanted = reference(logits[row, node], row, *text_at(row, node), **ASKED[asked])
      np.testing.assert_allclose(out[row, node], wanted, rtol=1e-5, atol=1e-5, err_msg=f"row {row} node {node}")


@pytest.mark.parametrize("asked", list(ASKED))
def test_a_node_is_plain_decoding_behind_its_text(asked):
  """The key property: a tree of one node whose text holds the path gives the same numbers, bit for bit."""
  logits = random_logits(1)
  params, prefixes = params_of(ASKED[asked]), batch_of()
  out = np.asarray(adjust(jnp.asarray(logits), params, prefixes))
  for node in range(T):
    tokens, length = np.full((len(ROWS), SLOTS), 10, np.int32), []
    for row in range(len(ROWS)):
      text = sum(text_at(row, node), [])
      tokens[row, :len(text)] = text
      length.append(len(text))
    plain = prefixes.replace(tokens=jnp.asarray(tokens), length=jnp.asarray(length, jnp.int32),
                             path_tokens=jnp.asarray(tokens)[np.arange(len(ROWS)), np.array(length) - 1][:, None],
                             mask=jnp.ones((len(ROWS), 1, 1), bool))
    np.testing.assert_array_equal(out[:, node], adjust(jnp.asarray(logits[:, node:node + 1]), params, plain)[:, 0],
                                  err_msg=f"node {node}")


def test_rows_do_not_meet():
  logits = random_logits(2)
  out = np.asarray(adjust(jnp.asarray(logits), params_of(ASKED["all"]), batch_of()))
  rows = [2, 0, 0, 3]
  mixed = adjust(jnp.asarray(logits[rows]), params_of(ASKED["all"], rows), batch_of(rows))
  np.testing.assert_array_equal(mixed, out[rows])


def test_tokens_that_no_path_holds_change_nothing():
  """Padding of the tree, another branch, and what lies behind the text: poisoned, also with ids that do not exist."""
  logits = jnp.asarray(random_logits(3))
  params, prefixes = params_of(ASKED["all"]), batch_of()
  out = np.asarray(adjust(logits, params, prefixes))
  beyond = jnp.arange(SLOTS)[None] >= prefixes.length[:, None]
  for poison in (0, 5, -1, VOCAB, 2**31 - 1):
    # Node 6 is a leaf of every tree.
    changed = prefixes.replace(tokens=jnp.where(beyond, poison, prefixes.tokens),
                               path_tokens=prefixes.path_tokens.at[:, 6].set(poison))
    np.testing.assert_array_equal(adjust(logits, params, changed)[:, :6], out[:, :6])
  # Ids out of range at a node itself leave its other counts alone.
  at = lambda token: np.asarray(adjust(logits, params_of(ASKED["frequency"]), prefixes.replace(
      path_tokens=prefixes.path_tokens.at[:, 6].set(token))))
  np.testing.assert_array_equal(at(-1), at(VOCAB))
  assert (at(-1)[0, 6] != at(VOCAB - 1)[0, 6]).sum() == 1


def test_the_root_is_counted_once():
  """It is a node of the tree and a known token; a path that repeats it counts it twice."""
  prefixes = batch_of([1])  # the prompt is [3], the draft 3, 3, 3, 4, 4, 3
  out = adjust(jnp.zeros((1, T, VOCAB)), SamplingParams(frequency_penalty=1.0).batch(1), prefixes)
  assert (-out[0, :, 3]).tolist() == [1, 2, 3, 4, 4, 4, 5]
  assert (-out[0, :, 4]).tolist() == [0, 0, 0, 0, 1, 2, 2]


def test_the_minimum_counts_output_and_path():
  """The end is forbidden as token 0 .. m - 1 of the output, and possible as token m."""
  prefixes = batch_of([1])
  for least in range(9):
    out = adjust(jnp.zeros((1, T, VOCAB)), SamplingParams(min_new_tokens=least).batch(1), prefixes)
    assert (np.isneginf(out[0, :, 3]) == (np.arange(T) < least)).all()  # a chain below a prompt without output
    assert (np.isneginf(out[0]).sum(-1) == 2 * (np.arange(T) < least)).all()  # both end ids and nothing else
  prefixes = batch_of([0])  # two output tokens, depths 0 1 2 3 1 4 2
  out = adjust(jnp.zeros((1, T, VOCAB)), SamplingParams(min_new_tokens=4).batch(1), prefixes)
  assert np.isneginf(out[0, :, 4]).tolist() == [True, True, False, False, True, False, False]


def constraint_mask(seed):
  mask = np.random.default_rng(seed).uniform(size=(len(ROWS), T, VOCAB)) < 0.4
  mask[:, :, 10] = True
  mask[:, 5] = False   # behind a forbidden token nothing is allowed
  mask[2, 0] = False
  mask[2, 0, 12] = True
  return mask


def test_a_constraint_beside_everything_else():
  logits, mask = random_logits(4), constraint_mask(5)
  asked = dict(ASKED["all"], allowed=[[2, 5, 7, 10], None, [0, 10, 12], None])
  out = np.asarray(adjust(jnp.asarray(logits), params_of(asked), batch_of(allowed=jnp.asarray(mask))))
  for row in range(len(ROWS)):
    for node in range(T):
      wanted = reference(logits[row, node], row, *text_at(row, node), constraint=mask[row, node], **asked)
      np.testing.assert_allclose(out[row, node], wanted, rtol=1e-5, atol=1e-5, err_msg=f"row {row} node {node}")
  assert np.isfinite(out).any(-1).all()
  law = np.asarray(process(jnp.asarray(logits), params_of(asked, temperature=0.8, top_p=0.9),
                           batch_of(allowed=jnp.asarray(mask))))
  np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
  possible = mask | ~mask.any(-1, keepdims=True)
  assert (law[~possible] == 0).all()


def test_a_constraint_alone():
  logits, mask = random_logits(6), constraint_mask(7)
  out = np.asarray(adjust(jnp.asarray(logits), SamplingParams().batch(4), batch_of(allowed=jnp.asarray(mask))))
  dead = ~mask.any(-1, keepdims=True)
  np.testing.assert_array_equal(out, np.where(mask | dead, logits, -np.inf))
  assert dead[:, 5].all()


def test_a_minimum_and_a_constraint_that_leave_nothing_give_no_nan():
  """Only behind a forbidden token; `check` refuses it elsewhere."""
  mask = np.zeros((4, T, VOCAB), bool)
  mask[np.arange(4), :, [4, 3, 1, 9]] = True  # of rows 0, 1 and 3 the end id
  params = SamplingParams(min_new_tokens=50, temperature=0.7).batch(4)
  law = np.asarray(process(jnp.asarray(random_logits(8)), params, batch_of(allowed=jnp.asarray(mask))))
  np.testing.assert_array_equal(law, mask)


def test_what_asks_for_nothing_gets_its_logits_back():
  logits = jnp.asarray(random_logits(9), jnp.bfloat16)
  assert processors.adjust(logits, SamplingParams(temperature=1.0, top_k=2).batch(4), batch_of()) is logits
  neutral = dict(repetition=[1, 1, 1, 2.0], presence=[0, 0, 0, 1], frequency=[0, 0, 0, 1], bias=[{}, {}, {}, {1: 3.0}],
                 banned=[[], [], [], [4]], allowed=[None, None, None, [1, 2]], least=[0, 0, 0, 50])
  logits = random_logits(10)
  out = np.asarray(adjust(jnp.asarray(logits), params_of(neutral), batch_of()))
  np.testing.assert_array_equal(out[:3], logits[:3])  # beside a row that asks for all
  assert (out[3] != logits[3]).any(-1).all()


def test_extreme_values_in_one_batch():
  """Divisions by almost nothing, biases of 1e38, logits of 0 and -inf: no NaN, and a law at every node."""
  logits = random_logits(11)
  logits[:, :, 5] = 0
  logits[:, :, 2] = -np.inf
  logits[:, 1] *= 1e30
  params = SamplingParams(temperature=[0.0, 1e-6, 2.0, 1.0], top_k=[0, 10**6, 3, 0], top_p=[1e-9, 1.0, 0.9, 0.5],
                          min_p=[0, 1.0, 0.0, 0.1], repetition_penalty=[2e-38, 1e38, 1e-30, 5.0],
                          presence_penalty=[2, -2, 0, 2], frequency_penalty=[-2, 2, 2, -2],
                          logit_bias=[{0: 3e38, 12: 3e38, 1: -3e38}, {3: -np.inf}, dict.fromkeys(range(VOCAB), -3e38),
                                      dict.fromkeys(range(VOCAB), 3e38)]).batch(4, VOCAB)
  out = np.asarray(adjust(jnp.asarray(logits), params, batch_of()))
  assert not np.isnan(out).any() and not np.isposinf(out).any()
  assert np.isneginf(out[:, :, 2]).all() and np.isneginf(out[1, :, 3]).all()
  assert np.isfinite(np.delete(out[[0, 2, 3]], 2, -1)).all()
  law = np.asarray(process(jnp.asarray(logits), params, batch_of()))
  np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
  np.testing.assert_array_equal(law[0], np.eye(VOCAB)[out[0].argmax(-1)])
  drawn = np.asarray(sampling.draw(jnp.asarray(out), params, jnp.full((4, T), 0.5), params.mode()))
  assert (np.take_along_axis(law, drawn[:, :, None], -1) > 0).all()


def test_process_is_adjust_and_then_the_filters():
  logits = random_logits(12)
  params = params_of(ASKED["all"], temperature=[0.7, 0, 1.2, 1.0], top_k=[0, 0, 2, 0], top_p=[0.8, 1, 1, 0.6])
  adjusted = adjust(jnp.asarray(logits), params, batch_of())
  bare = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p).batch(4)
  np.testing.assert_array_equal(process(jnp.asarray(logits), params, batch_of()), process(adjusted, bare))
  for name, value in ASKED["all"].items():
    with pytest.raises(ValueError, match="need the text before each node; give prefixes"):
      sampling.process(jnp.asarray(logits), params_of({name: value}))


@pytest.mark.parametrize("dtype,wanted", [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)])
def test_low_precision_is_read_exactly(dtype, wanted):
  logits = jnp.asarray(random_logits(13), dtype)
  out = adjust(logits, params_of(ASKED["all"]), batch_of())
  assert out.dtype == wanted
  np.testing.assert_array_equal(out, adjust(logits.astype(jnp.float32), params_of(ASKED["all"]), batch_of()))


def test_float64():
  logits = random_logits(14).astype(np.float64)
  with jax.enable_x64(True):
    out = np.asarray(adjust(jnp.asarray(logits), params_of(ASKED["all"]), batch_of()))
  assert out.dtype == np.float64
  for row in range(len(ROWS)):
    for node in range(T):
      wanted = reference(logits[row, node], row, *text_at(row, node), **ASKED["all"])
      np.testing.assert_allclose(out[row, node], wanted, rtol=1e-14, atol=1e-14)


def test_other_values_compile_nothing():
  traces = []

  @jax.jit
  def run(logits, params, prefixes):
    traces.append(1)
    return processors.adjust(logits, params, prefixes)

  for scale in (1, 2):
    run(jnp.asarray(random_logits(15)), SamplingParams(
        repetition_penalty=1 + scale / 10, presence_penalty=scale / 10, logit_bias={scale: 1.0, 2 * scale + 1: 2.0},
        banned_ids=[[scale]] * 4, allowed_ids=range(3, 5 + scale), min_new_tokens=scale).batch(4), batch_of())
  assert len(traces) == 1


def test_penalties_hold_no_array_of_counts():
  """At the width of a step and a real vocabulary: beside the logits and what comes out, nothing of that size."""
  shape = (1, 16, 49152)
  arg = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)
  prefixes = Prefixes(tokens=arg(1, 256), length=arg(1), start=arg(1), eos=arg(1, 8), path_tokens=arg(1, 16),
                      mask=arg(1, 16, 16, dtype=bool))
  params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1).batch(1)
  lowered = jax.jit(processors.adjust).lower(arg(*shape, dtype=jnp.float32), params, prefixes)
  memory = lowered.compile().memory_analysis()
  if memory is not None:
    assert memory.temp_size_in_bytes < 1.3 * 4 * np.prod(shape)
