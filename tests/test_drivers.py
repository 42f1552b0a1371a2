"""The drivers: what a row depends on and what not, where it ends, how often anything is compiled, what is refused."""
import functools
import re

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import stopping
from specjax import testing
from specjax import verifiers
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget()
POINT = verifiers.Point()
NEW = 24
PROMPTS = [[1, 2, 3, 4, 5], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6]]
SAMPLED = dict(temperature=[0.0, 0.8, 1.2], top_k=[0, 0, 5], top_p=[1.0, 0.9, 1.0], seed=[5, 6, 7])
FACES = [(99, 99), (0, 99), (2, 99), (99, 0)]  # wrong_from, limit: right, wrong, half right, plain


def rows_of(params, rows):
  return SamplingParams(**{name: [value[row] for row in rows] for name, value in params.items()})


@functools.cache
def plain_text(row, salt=1, new=60):
  """What plain decoding makes of a row alone; longer than what most tests ask for."""
  target = testing.DummyTarget(salt=np.uint32(salt))
  return drivers.generate(target, proposers.Plain(), [PROMPTS[row]], rows_of(SAMPLED, [row]),
                          max_new_tokens=new).tokens[0].tolist()


@pytest.fixture(scope="module")
def make(drafter):
  """`make(rows, salt=.., wrong_from=.., limit=..)`: a table drafter of 6 tokens that knows the plain texts."""
  return lambda rows=(0, 1, 2), salt=1, **kwargs: drafter(
      [PROMPTS[row] for row in rows], [plain_text(row, salt) for row in rows], **kwargs)


def run(proposer, rows=(0, 1, 2), *, salt=1, new=NEW, **kwargs):
  return drivers.generate(testing.DummyTarget(salt=np.uint32(salt)), proposer, [PROMPTS[row] for row in rows],
                          rows_of(SAMPLED, rows), max_new_tokens=new, **kwargs)


# --- rows are independent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(0, 1, 2), (2, 0, 1), (1, 1, 1), (0, 0, 2), (2,), (1,)], ids=str)
def test_a_row_keeps_its_text_in_every_batch(make, rows):
  """Permuted, duplicated, alone; the seed goes with the request."""
  for wrong_from, limit in FACES:
    result = run(make(rows, wrong_from=wrong_from, limit=limit), rows)
    assert result.tokens.tolist() == [plain_text(row)[:NEW] for row in rows]


def test_a_row_keeps_its_text_beside_a_long_neighbour(make, drafter):
  """Other chunks of prefill, and a bucket of 512 slots: one neighbour has 300 tokens."""
  long = np.random.default_rng(0).integers(0, 16, 300).tolist()
  params = rows_of(SAMPLED, [0, 1, 2])
  result = drivers.generate(TARGET, drafter([PROMPTS[0], long, PROMPTS[2]], [plain_text(0), [], plain_text(2)],
                                            wrong_from=[99, 0, 3]), [PROMPTS[0], long, PROMPTS[2]], params,
                            max_new_tokens=NEW)
  assert result.tokens[0].tolist() == plain_text(0)[:NEW] and result.tokens[2].tolist() == plain_text(2)[:NEW]
  alone = drivers.generate(TARGET, proposers.Plain(), [long], rows_of(SAMPLED, [1]), max_new_tokens=NEW)
  assert result.tokens[1].tolist() == alone.tokens[0].tolist()


def test_without_seeds_a_request_is_known_by_its_index():
  same = drivers.generate(TARGET, proposers.Plain(), [PROMPTS[0]] * 3, SamplingParams(temperature=1.0),
                          max_new_tokens=NEW)
  given = drivers.generate(TARGET, proposers.Plain(), [PROMPTS[0]] * 3, SamplingParams(temperature=1.0, seed=[0, 1, 2]),
                           max_new_tokens=NEW)
  assert np.array_equal(same.tokens, given.tokens)
  assert len({tuple(text) for text in same.tokens.tolist()}) == 3
  one = drivers.generate(TARGET, proposers.Plain(), [PROMPTS[0]] * 3, SamplingParams(temperature=1.0, seed=2),
                         max_new_tokens=NEW)
  assert one.tokens.tolist() == [same.tokens[2].tolist()] * 3


def test_the_key_changes_sampled_rows_only(make):
  first, again = (run(make(), key=jax.random.key(0)).tokens for _ in range(2))
  other = run(make(), key=jax.random.key(1)).tokens
  assert np.array_equal(first, again) and first.tolist() == run(make()).tokens.tolist()
  assert np.array_equal(first[0], other[0])
  assert not np.array_equal(first[1], other[1]) and not np.array_equal(first[2], other[2])


# --- prompt lookup --------------------------------------------------------------------------------------------------

SMALL = testing.DummyTarget(vocab=4)  # with four ids lookup finds something, and is right by chance


@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_prompt_lookup_is_plain_text(rows):
  prompts = [[[1, 2, 3, 1, 2, 3, 1, 2], [0] * 7, [0, 1, 2, 3, 3, 2, 1, 0, 1, 2]][row] for row in rows]
  accepted = drafted = 0
  for seed in range(3):
    params = SamplingParams(temperature=[[0.0, 0.8, 1.3][row] for row in rows], top_p=0.95, seed=[seed] * len(rows))
    plain = drivers.generate(SMALL, proposers.Plain(), prompts, params, max_new_tokens=60)
    lookup = drivers.generate(SMALL, proposers.NGram(num_tokens=6), prompts, params, max_new_tokens=60)
    np.testing.assert_array_equal(lookup.tokens, plain.tokens)
    c = lookup.counters
    assert (c.output_tokens == c.accepted_tokens + c.steps).all()
    accepted, drafted = accepted + c.accepted_tokens.sum(), drafted + c.drafted_tokens.sum()
  assert 0 < accepted < drafted


# --- the end of the buffer ------------------------------------------------------------------------------------------

SHORT = testing.DummyTarget(max_context=300)


@functools.cache
def short_text(length):
  """A prompt of `length` tokens and its plain text up to the end of the context."""
  prompt = np.random.default_rng(length).integers(0, 16, length).tolist()
  result = drivers.generate(SHORT, proposers.Plain(), [prompt], SamplingParams(0.9, seed=3),
                            max_new_tokens=300 - length)
  assert result.lengths.tolist() == [300 - length] and result.finish_reasons == ("length",)
  return prompt, result.tokens[0].tolist()


@pytest.mark.parametrize("length", [*range(243, 258), 286, 293, 294, 295, 299])
def test_prompt_and_output_fill_the_context_exactly(drafter, length):
  """One row leaves its bucket of 256 at every alignment of its bursts, and ends in the last slot of the last one."""
  prompt, text = short_text(length)
  for wrong_from, limit in FACES:
    proposer = drafter([prompt], [text], wrong_from=wrong_from, limit=limit)
    result = drivers.generate(SHORT, proposer, [prompt], SamplingParams(0.9, seed=3), max_new_tokens=300 - length)
    assert result.tokens[0].tolist() == text
    assert result.lengths.tolist() == [300 - length] and result.finish_reasons == ("length",)


@pytest.mark.parametrize("lengths", [(243, 250, 257), (244, 249, 299), (255, 256, 247)], ids=str)
def test_several_rows_fill_the_context_exactly(drafter, lengths):
  prompts, texts = zip(*map(short_text, lengths))
  budget = [300 - length for length in lengths]
  for wrong_from in (99, 0, [99, 2, 0]):
    result = drivers.generate(SHORT, drafter(prompts, texts, wrong_from=wrong_from), prompts,
                              SamplingParams(0.9, seed=3), max_new_tokens=budget)
    assert result.lengths.tolist() == budget
    for row, text in enumerate(texts):
      assert result.tokens[row].tolist() == text + [-1] * (max(budget) - budget[row])


def test_a_draft_wider_than_the_context(drafter):
  """16 nodes for 12 slots: what does not fit is cut by the budget, not by the buffer."""
  target = testing.DummyTarget(max_context=12)
  prompts, params, budget = [[1, 2, 3]], SamplingParams(0.9), [9]
  plain = drivers.generate(target, proposers.Plain(), prompts, params, max_new_tokens=budget)
  for wrong_from in (99, 0, 5):
    proposer = drafter(prompts, plain.tokens, wrong_from=wrong_from, num_tokens=15)
    result = drivers.generate(target, proposer, prompts, params, max_new_tokens=budget)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert result.lengths.tolist() == budget


def test_bucket():
  assert [drivers.bucket(n, 4096) for n in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 1024]
  assert [drivers.bucket(n, 300) for n in (256, 257, 300)] == [256, 300, 300]
  assert drivers.bucket(10, 40) == 40  # no more than the context


# --- where a row ends -----------------------------------------------------------------------------------------------


def cut_at(result, row, end, reason, text):
  """Ids, length, flags, counters and reason of a row that ends behind its first `end` tokens."""
  assert result.lengths[row] == end and result.finish_reasons[row] == reason
  assert result.tokens[row, :end].tolist() == text[:end] and (result.tokens[row, end:] == -1).all()
  assert not result.drafted[row, end:].any()
  c = jax.tree.map(lambda x: x[row], result.counters)
  assert c.output_tokens == end
  assert c.accepted_tokens == result.drafted[row].sum() == c.accepted_per_position.sum()
  cut_on_a_draft = int(result.drafted[row, end - 1])
  assert c.output_tokens == c.accepted_tokens + c.steps - cut_on_a_draft


@pytest.mark.parametrize("face", FACES, ids=["right", "wrong", "half right", "plain"])
def test_end_of_sequence_at_every_place_of_a_burst(make, face):
  seen = set()
  for salt in (1, 2, 3):
    text = plain_text(0, salt)
    for place in range(14):
      if text[place] in text[:place]:
        continue
      proposer = make([0], salt, wrong_from=face[0], limit=face[1])
      result = run(proposer, [0], salt=salt, eos_ids=(text[place],))
      cut_at(result, 0, place + 1, "stop", text)
      seen.add(place % 7)
      if face == (99, 99):
        assert result.counters.steps.tolist() == [place // 7 + 1]
        assert result.drafted[0, :place + 1].tolist() == [i % 7 < 6 for i in range(place + 1)]
  assert seen == set(range(7))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_stop_sequences_at_every_place_of_a_burst(make, size):
  """They end at any place and may span two bursts; as ids they never match the prompt."""
  text = plain_text(1)
  for end in range(size, 22):
    sequence = text[end - size:end]
    first = next(i for i in range(size, 60) if text[i - size:i] == sequence)
    for wrong_from in (99, 0, 3):
      result = run(make([1], wrong_from=wrong_from), [1], stop_sequences=[[15, 0, 15, 0], sequence])
      cut_at(result, 0, first, "stop", text)


def test_the_prompt_is_no_part_of_a_stop_sequence(make):
  text = plain_text(0)
  sequence = [PROMPTS[0][-1], text[0]]
  assert all(text[i:i + 2] != sequence for i in range(NEW - 1))
  result = run(make([0]), [0], stop_sequences=[sequence])
  cut_at(result, 0, NEW, "length", text)


def test_rows_end_for_themselves(make):
  texts = [plain_text(row) for row in range(3)]
  sequences = [[texts[0][9:13]], [], [[15, 15, 15, 15, 15], texts[2][3:7]]]
  for wrong_from in (99, 0, [2, 99, 0]):
    result = run(make(wrong_from=wrong_from), stop_sequences=sequences, new=[NEW, 17, NEW])
    cut_at(result, 0, 13, "stop", texts[0])
    cut_at(result, 1, 17, "length", texts[1])
    cut_at(result, 2, 7, "stop", texts[2])
    assert result.tokens.shape == result.drafted.shape == (3, NEW)


@pytest.mark.parametrize("face", FACES, ids=["right", "wrong", "half right", "plain"])
def test_budgets(make, face):
  """Every budget from one token to over two bursts, per row: exactly that many tokens are delivered."""
  texts = [plain_text(row) for row in range(3)]
  for budget in range(1, 17):
    budgets = [budget, 17 - budget, budget + 1]
    result = run(make(wrong_from=face[0], limit=face[1]), new=budgets)
    for row in range(3):
      cut_at(result, row, budgets[row], "length", texts[row])
    assert result.tokens.shape[1] == max(budgets)


def test_a_stop_beyond_the_budget_never_happened(make):
  text = plain_text(0)
  place = next(i for i in range(3, 20) if text[i] not in text[:i])
  cut_at(run(make([0]), [0], new=place, eos_ids=(text[place],)), 0, place, "length", text)
  cut_at(run(make([0]), [0], new=place + 1, eos_ids=(text[place],)), 0, place + 1, "stop", text)


def test_the_end_ids_of_the_target_are_the_default(make):
  text = plain_text(0)
  target = testing.DummyTarget(eos_ids=(text[4],))
  first = text.index(text[4])
  by_default = drivers.generate(target, proposers.Plain(), [PROMPTS[0]], rows_of(SAMPLED, [0]), max_new_tokens=NEW)
  cut_at(by_default, 0, first + 1, "stop", text)
  ignored = drivers.generate(target, proposers.Plain(), [PROMPTS[0]], rows_of(SAMPLED, [0]), max_new_tokens=NEW,
                             eos_ids=())
  cut_at(ignored, 0, NEW, "length", text)


# --- the two drivers ------------------------------------------------------------------------------------------------


def collect(deltas, rows):
  out = [dict(ids=[], drafted=[], finish=None, text="") for _ in range(rows)]
  for delta in deltas:
    row = out[delta.row]
    assert row["finish"] is None and len(delta.token_ids) == len(delta.drafted) > 0
    row["ids"] += delta.token_ids
    row["drafted"] += delta.drafted
    row["text"] += delta.text
    row["finish"] = delta.finish_reason
  return out


@pytest.mark.parametrize("rows", [(0,), (0, 1, 2)], ids=str)
def test_stream_is_generate(make, rows):
  texts = [plain_text(row) for row in rows]
  kwargs = dict(max_new_tokens=[NEW, 9, 13][:len(rows)], stop_sequences=[texts[0][8:11]])
  for wrong_from in (99, 0, 2):
    proposer = make(rows, wrong_from=wrong_from)
    prompts, params = [PROMPTS[row] for row in rows], rows_of(SAMPLED, rows)
    whole = drivers.generate(TARGET, proposer, prompts, params, **kwargs)
    parts = collect(drivers.stream(TARGET, proposer, prompts, params, **kwargs), len(rows))
    for row, part in enumerate(parts):
      length = whole.lengths[row]
      assert part["ids"] == whole.tokens[row, :length].tolist()
      assert part["drafted"] == whole.drafted[row, :length].tolist()
      assert part["finish"] == whole.finish_reasons[row] and part["text"] == ""


def test_stream_yields_one_delta_a_step(make):
  deltas = list(drivers.stream(TARGET, make([0]), PROMPTS[0], rows_of(SAMPLED, [0]), max_new_tokens=NEW))
  assert [len(delta.token_ids) for delta in deltas] == [7, 7, 7, 3]
  assert [delta.finish_reason for delta in deltas] == [None] * 3 + ["length"]


def test_stream_crosses_a_bucket(drafter):
  prompt, text = short_text(243)
  deltas = drivers.stream(SHORT, drafter([prompt], [text]), prompt, SamplingParams(0.9, seed=3), max_new_tokens=57)
  assert collect(deltas, 1)[0]["ids"] == text


class Halves:
  """A tokenizer stub: every id is one byte, most of them part of a character."""
  _strip = False
  _BYTES = "aé漢\U0001F600ß".encode() + b"bc "

  def token_bytes(self, index, *, skip_special_tokens):
    assert skip_special_tokens
    return self._BYTES[index:index + 1]

  def decode(self, ids):
    return b"".join(self._BYTES[i:i + 1] for i in ids).decode("utf-8", "replace")


def test_stream_gives_text_in_whole_characters(make):
  deltas = list(drivers.stream(TARGET, make(), PROMPTS, rows_of(SAMPLED, [0, 1, 2]), max_new_tokens=[NEW, 9, 13],
                               tokenizer=Halves()))
  for part in collect(deltas, 3):
    assert part["text"] == Halves().decode(part["ids"])


def test_timings_and_types(make):
  result = run(make())
  assert 0 < result.timings.first_token <= result.timings.total
  assert isinstance(result.tokens, np.ndarray) and result.tokens.dtype == np.int32
  assert result.lengths.dtype == np.int32 and result.drafted.dtype == bool
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(result.counters))


# --- what is compiled -----------------------------------------------------------------------------------------------


TRACES = []


@struct.dataclass
class Traced(proposers.base.Defaults):
  """Prompt lookup that counts how often its Python runs."""
  inner: proposers.NGram = struct.field(pytree_node=False, default=proposers.NGram(num_tokens=3))
  max_nodes = 4
  max_depth = 3

  def init(self, *args):
    return self.inner.init(*args)

  def propose(self, *args):
    TRACES.append("propose")
    return self.inner.propose(*args)

  def observe(self, *args):
    TRACES.append("observe")
    return self.inner.observe(*args)


def test_nothing_is_traced_twice():
  """Within a bucket, prompts, parameters, seeds, keys, rules, budgets and weights are values."""
  go = lambda salt=1, prompts=PROMPTS, new=NEW, params=None, **kwargs: drivers.generate(
      testing.DummyTarget(salt=np.uint32(salt), vocab=5), Traced(), [[t % 5 for t in p] for p in prompts], params,
      max_new_tokens=new, **kwargs)
  go()
  before, size, prefills = len(TRACES), drivers.advance._cache_size(), drivers.prefill._cache_size()
  assert before > 0
  go(prompts=[[1], [2, 3], [4] * 17])
  go(new=[1, 2, 3])
  go(new=200)
  go(params=SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=9))
  go(params=SamplingParams(temperature=[0, 1, 2], top_p=[1.0, 0.5, 0.9], seed=[4, 4, 4]), key=jax.random.key(8))
  go(eos_ids=(3,), stop_sequences=[[1, 2], [3, 4, 0]])
  go(eos_ids=(), stop_sequences=[[[1]], [], [[2], [3, 3]]])
  texts = [go(salt=salt).tokens.tolist() for salt in (1, 2)]
  assert texts[0] != texts[1]
  list(drivers.stream(testing.DummyTarget(salt=np.uint32(7), vocab=5), Traced(), [[1], [2], [3, 4]], max_new_tokens=5))
  assert len(TRACES) == before and drivers.advance._cache_size() == size and drivers.prefill._cache_size() == prefills


def test_swapped_weights_on_the_device_do_not_compile(make):
  texts, sizes = [], []
  for salt in (1, 4, 5):
    target = testing.DummyTarget(salt=jnp.uint32(salt))
    texts.append(drivers.generate(target, make(), PROMPTS, rows_of(SAMPLED, [0, 1, 2]), max_new_tokens=NEW).tokens[0])
    sizes.append(drivers.compiled_programs())
  assert sizes[0] == sizes[1] == sizes[2] and texts[0].tolist() == plain_text(0)[:NEW]
  assert texts[1].tolist() == plain_text(0, 4)[:NEW] != texts[2].tolist()


def test_a_warm_start_compiles_nothing():
  """`warm_up` reaches every bucket that the batch can reach, and the chunks of its prefill."""
  target = testing.DummyTarget(vocab=6, max_context=700)
  prompts = [[1, 2, 3], [4] * 70]
  proposer = proposers.Plain()
  drivers.warm_up(target, proposer, prompts, max_new_tokens=500)
  programs = drivers.compiled_programs()
  result = drivers.generate(target, proposer, prompts, SamplingParams(temperature=0.5), max_new_tokens=500)
  assert result.lengths.tolist() == [500, 500]  # 570 slots: buckets of 256, 512 and 700
  assert drivers.compiled_programs() == programs
  drivers.generate(target, proposer, [p + [5] for p in prompts], max_new_tokens=[3, 500])
  assert drivers.compiled_programs() == programs


def test_chunks_hold_the_prompt():
  for tokens in range(0, 600):
    sizes = drivers.chunks(tokens)
    assert set(sizes) <= set(drivers.CHUNKS) and sum(sizes) >= tokens
    assert sum(sizes[:-1]) < max(tokens, 1)  # none is wholly empty
  assert drivers.chunks(0) == [] and drivers.chunks(1) == [16] and drivers.chunks(16) == [16]


def test_leaves_of_a_proposer_are_values_and_its_configuration_is_not(make):
  run(make())
  size = drivers.advance._cache_size()
  run(make(wrong_from=1, limit=5))
  assert drivers.advance._cache_size() == size


HOST = re.compile(r"callback|infeed|outfeed|host_compute|\bsend\(|\brecv\(", re.IGNORECASE)


def test_no_host_transfer_in_the_compiled_step():
  """One dispatch runs the loop to its end: the compiled text holds no way back to the host."""
  state = drivers.start(TARGET, proposers.NGram(num_tokens=3), PROMPTS, rows_of(SAMPLED, [0, 1, 2]), max_new_tokens=NEW)
  lowered = drivers.advance.lower(TARGET, proposers.NGram(num_tokens=3), state, np.int32(5), verifier=POINT)
  text = lowered.compile().as_text()
  assert "while" in text and not HOST.findall(text)
  guilty = jax.jit(lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x))
  assert HOST.findall(guilty.lower(jnp.float32(0)).compile().as_text())  # the pattern would see one


def test_one_call_runs_all_steps(make, monkeypatch):
  calls = []
  real = drivers.advance
  monkeypatch.setattr(drivers, "advance", lambda *args, **kwargs: calls.append(args[3]) or real(*args, **kwargs))
  run(make(wrong_from=0))
  assert [int(steps) for steps in calls] == [1, 2**31 - 1]  # the first step, timed, and the rest


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts,new,message", [
    ([], 5, "no prompts"),
    ([[1], []], 5, "prompt 1 is empty"),
    ([[1], [3, 16]], 5, "prompt 1 holds id 16; ids of this target are 0 to 15"),
    ([[-1, 3]], 5, "prompt 0 holds id -1"),
    ([[1], [2]], [5, 0], "max_new_tokens=0 in row 1: it must be 1 or more"),
    ([[1]], -3, "max_new_tokens=-3 in row 0"),
    ([[1], [2] * 290], [5, 11], "prompt 1 has 290 tokens and max_new_tokens=11.*context of 300.*max_new_tokens to 10"),
    ([[2] * 301], 1, "prompt 0 has 301 tokens.*to 0"),
])
def test_errors_name_the_row(prompts, new, message):
  for driver in (drivers.generate, lambda *args, **kwargs: next(drivers.stream(*args, **kwargs))):
    with pytest.raises(ValueError, match=message):
      driver(SHORT, proposers.Plain(), prompts, max_new_tokens=new)


def test_budgets_of_another_batch_are_refused():
  with pytest.raises(ValueError):
    drivers.generate(TARGET, proposers.Plain(), [[1], [2]], max_new_tokens=[1, 2, 3])


@pytest.mark.parametrize("new", [2.5, [1, 2.5]])
def test_budgets_are_whole_numbers(new):
  with pytest.raises(ValueError, match="max_new_tokens"):
    drivers.generate(TARGET, proposers.Plain(), [[1], [2]], max_new_tokens=new)


def test_prompts_are_whole_numbers():
  with pytest.raises(ValueError, match="prompt 0"):
    drivers.generate(TARGET, proposers.Plain(), [[1.5, 2.7]], max_new_tokens=2)


def test_a_text_is_no_prompt():
  with pytest.raises(ValueError, match="prompt 0"):
    drivers.generate(TARGET, proposers.Plain(), ["hello"], max_new_tokens=2)


def test_parameters_of_another_batch_are_refused(make):
  with pytest.raises(ValueError, match=r"temperature has shape \(2,\)"):
    drivers.generate(TARGET, proposers.Plain(), PROMPTS, SamplingParams(temperature=[0.1, 0.2]), max_new_tokens=3)


def test_states_are_not_shared(make):
  """`advance` donates its state: a second start is a fresh one, and the arguments of a call stay usable."""
  proposer, params = make(), rows_of(SAMPLED, [0, 1, 2])
  for _ in range(2):
    state = drivers.start(TARGET, proposer, PROMPTS, params, max_new_tokens=NEW)
    for _ in range(3):
      state = drivers.advance(TARGET, proposer, drivers.make_room(TARGET, proposer, state), np.int32(1), verifier=POINT)
    assert isinstance(state, decode.DecodeState)
    assert state.reason.tolist() == [stopping.RUNNING] * 3
    assert [text[5:26] for text in np.asarray(state.tokens).tolist()][0] == plain_text(0)[:21]
