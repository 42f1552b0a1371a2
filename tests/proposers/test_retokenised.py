"""Drafting through text: what the drafter reads and keeps, how drafts are encoded again, and what text comes of it."""
import dataclasses
import pathlib

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
import tiny_tokenizers
import specjax
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import verifiers
from specjax.checkpoints import vocabulary_map
from specjax.models import base as models
from specjax.proposers import retokenised
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
KOREAN = "한".encode()
# One text has many encodings: "ab" and "a b", the whole character and its parts.
OURS = tiny_tokenizers.byte_level(["a", "b", "ab", " ", " a", *[bytes([byte]) for byte in KOREAN], KOREAN[:2], KOREAN,
                                   "c"], ["</s>"], eos="</s>")
THEIRS = tiny_tokenizers.sentencepiece([" ", "c", "a", "b", "bc", " b", "ba", "<", "/", "s", ">", "한"],
                                       ["<s>", "<eos>"], byte_tokens=KOREAN, bos="<s>", eos="<eos>", opens=True)
TARGET = testing.DummyTarget(vocab=OURS.vocab_size, max_context=400)
DRAFTER = testing.DummyTarget(vocab=THEIRS.vocab_size, salt=np.uint32(5))
PROMPTS = [[0, 1, 2], [2, 4, 9, 11, 3, 1, 5] * 14, [9]]
PARAMS = SamplingParams(temperature=[0.0, 0.8, 0.8], seed=[1, 2, 3])


def make(model=DRAFTER, target=OURS, drafter=THEIRS, **options):
  return retokenised.Retokenised(model, target, drafter, **options)


def says(tokenizer, ids):
  return b"".join(tokenizer.token_bytes(int(index), skip_special_tokens=False) for index in ids)


# --- encoding a draft for the target --------------------------------------------------------------------------------


@pytest.mark.parametrize("tail,draft,found", [
    ("a b", "", ""),
    ("a b", "c", "c"),
    ("a b", " ab", "Ġ ab"),
    ("c a", "b", "b"),               # encoded with the tail "ab" would take its last token away
    ("ab a", "bc", "b c"),
    ("a b a", "cab", "c ab"),        # this tail is no encoding that the tokenizer gives: what of it is stays
], ids=repr)
def test_the_tail_comes_out_as_it_stands(tail, draft, found):
  ids = lambda text: [OURS.tokens().index(token) for token in text.split()]
  assert retokenised.retokenise(vocabulary_map.Speller(OURS), ids(tail), draft.encode()) == ids(found)


@pytest.mark.parametrize("tail,draft,found", [
    ([1], KOREAN + b"a", [9, 0]),                 # a whole character
    ([1], b"a" + KOREAN[:2], [0]),                # half a one at the end is left out
    ([1, 5], KOREAN[1:] + b"a", [6, 7, 0]),       # one that the text has begun is ended in parts
    ([5, 6, 7, 0], b"b", [1]),                    # parts in the tail that are encoded as a whole
    ([7, 0], b"b", [1]),                          # a tail that begins inside a character
], ids=repr)
def test_characters_of_several_tokens(tail, draft, found):
  assert retokenised.retokenise(vocabulary_map.Speller(OURS), tail, draft) == found


def test_what_the_target_cannot_spell_is_no_draft():
  assert retokenised.retokenise(vocabulary_map.Speller(OURS), [0], b"xa") == []


# --- what the drafter reads -----------------------------------------------------------------------------------------


def check_row(before, after, tree, row):
  """The drafter's ids spell the text; what it drafted is greedy behind them, in plain NumPy over all of its ids; the
  proposed tokens are the beginning of what that says."""
  text = np.asarray(before.tokens)[row, :int(before.length[row])]
  ids, known = np.asarray(after.ids)[row].tolist(), int(after.known[row])
  assert ids[0] == THEIRS.bos_id  # then the text, behind a space of the tokenizer's own
  assert says(THEIRS, ids[1:known]).removeprefix(b" ") == says(OURS, text).removeprefix(b" ")
  assert int(after.read[row]) == len(text)
  drafted = ids[known:int(after.cache.length[row])]
  for place, token in enumerate(drafted):
    assert token == np.argmax(dummy_law.logits(DRAFTER, [ids[:known + place]])[0])
  count = int(tree.size[row]) - 1
  proposed = says(OURS, np.asarray(tree.tokens)[row, 1:1 + count])
  following = int(np.argmax(dummy_law.logits(DRAFTER, [ids[:known + len(drafted)]])[0]))
  assert says(THEIRS, [*drafted, following]).startswith(proposed)
  return count


def test_what_is_drafted_behind_every_text():
  """Step by step, with tails that are encoded anew and caches that are cut: rows of any length, tokens that end inside
  a character, special tokens; a text that only parts of characters can spell."""
  proposer = make(num_tokens=5, look_behind=3)
  state = drivers.start(TARGET, proposer, PROMPTS, PARAMS, max_new_tokens=150, eos_ids=())
  counts, cuts = np.zeros(3, int), 0
  for _ in range(20):
    tree, after = decode.draft(TARGET, proposer, state)
    counts += [check_row(state, after, tree, row) for row in range(3)]
    cuts += int((np.asarray(after.cache.length) < np.asarray(state.proposer.cache.length)).sum())
    state = drivers.conclude(TARGET, proposer, state.replace(proposer=after), tree, verifier=verifiers.Point())
  assert (counts > 20).all() and cuts > 0
  drafted = np.asarray(state.counters.drafted_tokens)  # in a batch drafts are verified when half of the rows have one
  assert (0 < drafted).all() and (drafted <= counts).all()
  seen = {token for row, length in zip(np.asarray(state.tokens), np.asarray(state.length)) for token in row[:length]}
  assert seen == set(range(TARGET.vocab))


def test_the_text_is_plain():
  """Greedy and at temperature 0.8, by the same seeds; ragged rows, penalties, end ids, budgets."""
  asked = dict(max_new_tokens=[120, 100, 120], eos_ids=(11,))
  params = PARAMS.replace(frequency_penalty=0.02, min_new_tokens=80)
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, params, **asked)
  result = drivers.generate(TARGET, make(), PROMPTS, params, **asked)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert result.finish_reasons == plain.finish_reasons and result.driver == "host"
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()
  assert 0 < result.timings.draft_seconds < result.timings.total


@struct.dataclass
class Renamed:
  """The dummy target with its ids renamed, and one before every text that it does not count."""
  names: jax.Array
  inner: testing.DummyTarget

  def __getattr__(self, name):
    return getattr(self.inner, name)

  def forward(self, tokens, *args, **kwargs):
    return self.inner.forward(self.names[tokens], *args, **kwargs)

  def logits(self, hidden):
    return self.inner.logits(hidden)[..., self.names]


def test_a_renamed_self_is_accepted_whole():
  """With one encoding a text, drafts through text are right when the model is: the cache is never out of step."""
  letters, order = list("abcdef"), [3, 0, 5, 1, 4, 2]
  ours, theirs = (tiny_tokenizers.byte_level(tokens) for tokens in (letters, [letters[i] for i in order]))
  target = testing.DummyTarget(vocab=6)
  proposer = make(Renamed(jnp.asarray(order), target), ours, theirs)
  result = drivers.generate(target, proposer, [[1, 2, 3], [0] * 90], max_new_tokens=37)
  assert result.counters.accepted_tokens.tolist() == result.counters.drafted_tokens.tolist() == [30, 30]


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_text_that_outgrows_the_drafter_is_drafted_no_further():
  proposer = make(dataclasses.replace(DRAFTER, max_context=80))
  prompts = [[0, 3, 10] * 10, [0] * 78, [10] * 30]
  plain, result = (drivers.generate(TARGET, way, prompts, PARAMS, max_new_tokens=100, eos_ids=()) for way in
                   (proposers.Plain(), proposer))
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  c = result.counters
  assert (c.drafted_tokens[[0, 2]] > 0).all() and (c.drafted_tokens < 250).all()
  assert (c.steps_beyond_draft_context > 0).all()


def test_a_drafter_that_cannot_spell_a_text_leaves_it_alone():
  """Nor is it asked again in every step, except where half a character is missing; its neighbours draft as ever."""
  proposer = make(testing.DummyTarget(vocab=4), drafter=tiny_tokenizers.byte_level(["c", "b", "a", "bc"]))
  state = drivers.start(TARGET, proposer, [[0, 1, 10], [0, 3, 1], [0, 1, 5]], max_new_tokens=20)
  tree, after = decode.draft(TARGET, proposer, state)
  assert tree.size[0] > 1 and tree.size[1:].tolist() == [1, 1]
  assert after.known.tolist() == [int(after.cache.length[0]) - 4, after.ids.shape[1], 0]


def test_a_first_token_that_the_drafter_does_not_know_is_not_read_as_text():
  ours = tiny_tokenizers.byte_level(["a", "b", "<", ">", "s"], ["<s>"], bos="<s>")
  target = testing.DummyTarget(vocab=6)
  for theirs, ids in ((THEIRS, [THEIRS.bos_id, *THEIRS.encode("ab")]),
                      (tiny_tokenizers.byte_level(["a", "b", "<", ">", "s"]), [0, 1])):
    proposer = make(dataclasses.replace(DRAFTER, vocab=theirs.vocab_size), ours, theirs)
    state = drivers.start(target, proposer, [[5, 0, 1]], max_new_tokens=20)
    after = decode.draft(target, proposer, state)[1]
    assert np.asarray(after.ids)[0, :int(after.known[0])].tolist() == ids


@pytest.mark.parametrize("options,message", [
    (dict(num_tokens=0), "num_tokens=0"), (dict(look_behind=-1), "look_behind=-1"),
    (dict(expansion=-1.0), "expansion=-1.0")])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    make(**options)


@pytest.mark.parametrize("folder, message", [("recurrent/mamba2", "carries a state on"),
                                             ("families/mistral", "keep the last 8 tokens only")])
def test_drafters_that_cannot_take_tokens_back_are_refused(folder, message):
  """What was drafted and rejected would stay in a state, or in the place of older tokens of a ring."""
  model, tokenizer = specjax.load(str(pathlib.Path(__file__).parents[1] / "fixtures" / folder))
  proposer = make(model, tokenizer, tokenizer, num_tokens=3)
  target = testing.DummyTarget(vocab=tokenizer.vocab_size)
  with pytest.raises(ValueError, match=message):
    proposer.init(target, 1, 256)
  if folder == "families/mistral":  # a text within the window is as in any other cache
    models.takes_back(model, 8, "this")


def test_tokenizers_of_other_models_are_refused():
  for target, model, who in ((dataclasses.replace(TARGET, vocab=8), DRAFTER, "target has 8 ids and its tokenizer 12"),
                             (TARGET, dataclasses.replace(DRAFTER, vocab=9), "drafter has 9 ids and its tokenizer")):
    with pytest.raises(ValueError, match=who):
      drivers.start(target, make(model), [[1]], max_new_tokens=4)
  with pytest.raises(ValueError, match="KSeq needs sampled drafts"):
    drivers.start(TARGET, make(), [[1]], max_new_tokens=4, verifier=verifiers.KSeq())
