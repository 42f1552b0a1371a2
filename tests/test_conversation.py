"""Turns behind one cache: nothing is run twice, nothing changes, and what cannot go on begins anew and says so."""
import functools
import pathlib

import numpy as np
import pytest

import every_proposer
import specjax
from specjax import drivers
from specjax import proposers
from specjax import starting
from specjax import testing
from specjax.sampling import SamplingParams
import tiny_tokenizers

pytestmark = pytest.mark.usefixtures("quick_compile")
ENTRIES = {entry.name: entry for entry in every_proposer.ENTRIES}
# Whatever a state can be made of: nothing, tables of the text, an own cache, own features, the target's.
KINDS = ("plain", "suffix tree", "recycling", "draft tree", "early exit", "EAGLE-3", "Medusa", "DSpark",
         "fallback on a head")
# Those that draft from what is committed alone: the same behind a kept state as behind a new one.
OF_THE_TEXT = {"draft tree", "early exit", "EAGLE-3", "Medusa", "DSpark"}
PROMPTS, MORE = [[1, 2, 3, 4, 5], [2, 1]], [[0, 3, 1], [5, 2, 0, 0, 4, 1]]
PARAMS = SamplingParams(temperature=[0.0, 0.9], seed=[3, 4])


def run(target, proposer, prompts, **kwargs):
  return drivers.generate(target, proposer, prompts, PARAMS, max_new_tokens=[9, 6], **kwargs)


@functools.cache
def reference(layered):
  """Plain decoding of the table target, or of the one with layers: texts of the first turn, the second turn's prompts,
  and its texts."""
  target = every_proposer.DECODER if layered else every_proposer.TARGET
  first = run(target, proposers.Plain(), PROMPTS, eos_ids=())
  following = tuple(tuple(p + ids + more) for p, ids, more in zip(PROMPTS, first.token_ids, MORE))
  return first.token_ids, following, run(target, proposers.Plain(), following, eos_ids=()).token_ids


@pytest.mark.parametrize("name", KINDS)
def test_a_kept_turn_is_the_turn(name):
  entry = ENTRIES[name]
  texts, following, answers = reference(entry.target is every_proposer.DECODER)
  first = run(entry.target, entry.proposer, PROMPTS, eos_ids=(), keep=True, verifier=entry.verifier)
  assert first.token_ids == texts and first.reused.tolist() == [0, 0]
  # All that was committed: the last token of a text waits for the next step.
  second = run(entry.target, entry.proposer, following, eos_ids=(), kept=first.kept, verifier=entry.verifier)
  assert second.token_ids == answers and second.kept is None
  assert second.reused.tolist() == [len(p) + len(ids) - 1 for p, ids in zip(PROMPTS, texts)]
  if name in OF_THE_TEXT:
    anew = run(entry.target, entry.proposer, following, eos_ids=(), verifier=entry.verifier)
    assert anew.counters.accepted_tokens.tolist() == second.counters.accepted_tokens.tolist()
    assert anew.counters.drafted_tokens.tolist() == second.counters.drafted_tokens.tolist()


def test_only_what_is_new_is_run(monkeypatch):
  """Not a count alone: the programs of the prefill are those of ten tokens, not of two hundred."""
  sizes, real = [], starting.prefill
  monkeypatch.setattr(starting, "prefill", lambda target, proposer, state, mask: sizes.append(len(mask)) or real(
      target, proposer, state, mask))
  target = every_proposer.TARGET
  kept = drivers.start(target, proposers.Plain(), [[1] * 200], max_new_tokens=3)
  assert sizes == starting.chunks(199)
  del sizes[:]
  state = drivers.start(target, proposers.Plain(), [[1] * 200 + [2] * 10], max_new_tokens=3, kept=kept)
  assert sizes == [16] and state.cache.length.tolist() == [209]


def test_a_prompt_that_departs_begins_anew():
  _, following, _ = reference(False)
  kept = run(every_proposer.TARGET, proposers.Plain(), PROMPTS, eos_ids=(), keep=True).kept
  other = [list(following[0]), [3, *following[1][1:]]]
  second = run(every_proposer.TARGET, proposers.Plain(), other, eos_ids=(), kept=kept)
  assert second.reused.tolist() == [0, 0]  # one row cannot, so none does
  assert second.token_ids == run(every_proposer.TARGET, proposers.Plain(), other, eos_ids=()).token_ids


def test_a_state_of_another_size_begins_anew():
  """A drafter's own cache has the slots of the first turn; the target's becomes larger."""
  target = testing.DummyTarget(vocab=6, order=2)
  model = testing.DummyTarget(vocab=6, order=2, salt=np.uint32(4))
  for proposer, wanted in ((proposers.NGram(num_tokens=3), 4), (proposers.DraftModel(model=model, num_tokens=3), 0)):
    kept, spent = drivers.start(target, proposer, [PROMPTS[0]], max_new_tokens=3), {}
    prompt = PROMPTS[0] + [1] * 252
    state = drivers.start(target, proposer, [prompt], max_new_tokens=3, kept=kept, spent=spent)
    assert spent["reused"].tolist() == [wanted]
    assert state.cache.length.tolist() == [256] and state.tokens.shape == (1, 512)


def test_another_number_of_rows_is_refused():
  kept = run(every_proposer.TARGET, proposers.Plain(), PROMPTS, eos_ids=(), keep=True).kept
  with pytest.raises(ValueError, match="2 rows, and 1 prompts"):
    drivers.generate(every_proposer.TARGET, proposers.Plain(), PROMPTS[:1], kept=kept)


# --- conversations --------------------------------------------------------------------------------------------------

TEMPLATE = ("{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<e>{% endfor %}"
            "{% if add_generation_prompt %}<a>{% endif %}")
TRIMMED = TEMPLATE.replace("m.content", "(m.content | replace('a', '') if m.role == 'assistant' else m.content)")


def letters(template=TEMPLATE, **kwargs):
  tokens = [*"abcdef", "ab", "cd", b"\xc3", b"\xa9"]
  return tiny_tokenizers.byte_level(tokens, ["<s>", "<u>", "<a>", "<e>"], eos="<e>", chat_template=template, **kwargs)


def user(*words):
  return [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]


def test_a_next_prompt_keeps_the_ids_that_were_written():
  """Encoding gives "ab" one id, and a model may write two; a turn that reached its length has no end yet."""
  tokenizer = letters()
  first = tokenizer.chat_behind([], user("ab"))
  assert first == tokenizer.chat(user("ab"))
  a, b, end = (tokenizer.encode(text)[0] for text in ("a", "b", "<e>"))
  behind = tokenizer.encode("<u>c<e><a>")
  for answer, closing in (([a, b, end], []), ([a, b], [end])):
    assert tokenizer.chat_behind(first + answer, user("ab", "ab", "c")) == first + answer + closing + behind
  assert tokenizer.chat(user("ab", "ab", "c")) != first + [a, b, end] + behind


def test_a_template_that_rewrites_an_answer_is_followed():
  tokenizer = letters(TRIMMED)
  first = tokenizer.chat(user("ab"))
  answer = tokenizer.encode("abe<e>")
  assert tokenizer.chat_behind(first + answer, user("ab", "abe", "c")) == tokenizer.chat(user("ab", "abe", "c"))
  kept = first + [tokenizer.encode(letter)[0] for letter in ("c", "d", "<e>")]
  assert tokenizer.chat_behind(kept, user("ab", "cd", "c"))[:len(kept)] == kept  # where it changes nothing, ids stay


def test_half_a_character_stays_half():
  """A turn that ended within a character: its bytes stand, and what a reader saw of them is the message."""
  tokenizer = letters()
  half = tokenizer.encode("é")[:1]
  known = tokenizer.chat(user("ab")) + half
  seen = tokenizer.decode(half)
  assert seen == "\N{REPLACEMENT CHARACTER}"
  found = tokenizer.chat_behind(known, user("ab", seen, "c"))
  assert found[:len(known)] == known and found[len(known):] == tokenizer.encode("<e><u>c<e><a>")


def test_a_space_that_encoding_would_add_is_not_added():
  """SentencePiece's tokenizers put a space before every text they encode: not before the rest of one."""
  template = "{% for m in messages %}{{ m.content }}.{% endfor %}"
  tokenizer = tiny_tokenizers.sentencepiece([*"abc. ", " a", " b"], ["<unk>"], chat_template=template)
  known = tokenizer.chat(user("a")) + tokenizer.encode("b")[-1:]
  found = tokenizer.chat_behind(known, user("a", "b", "c"))
  assert tokenizer.decode(found, skip_special_tokens=False) == tokenizer.chat_text(user("a", "b", "c"))


@pytest.fixture(scope="module")
def speaker():
  tokenizer = letters()
  special = [tokenizer.encode(text)[0] for text in ("<s>", "<u>", "<a>")]
  return (testing.DummyTarget(vocab=tokenizer.vocab_size, order=2, max_context=256), tokenizer,
          SamplingParams(banned_ids=special))


@pytest.mark.parametrize("proposer", [proposers.Plain(), proposers.NGram(min_ngram=1, num_tokens=3)],
                         ids=["plain", "ngram"])
def test_a_conversation_runs_every_token_once(speaker, proposer):
  target, tokenizer, params = speaker
  talk = specjax.Conversation(target, proposer, tokenizer, system="ab", params=params, max_new_tokens=7)
  computed, ids = [], []
  for word in ("cd", "ef", "ab"):
    reused, given = talk.reused, talk.prompt_tokens
    answer = "".join(delta.text for delta in talk.say(word))
    assert talk.messages[-2:] == [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]
    prompt = talk.prompt_tokens - given
    assert talk.ids[:len(ids)] == ids and talk.reused - reused == max(len(ids) - 1, 0)
    alone = drivers.generate(target, proposers.Plain(), [talk.ids[:prompt]], params, max_new_tokens=7)
    assert alone.token_ids[0] == talk.ids[prompt:]
    ids, computed = talk.ids, [*computed, prompt - (talk.reused - reused)]
  assert talk.prompt_tokens - talk.reused == sum(computed) < len(ids)
  assert talk.messages[0] == {"role": "system", "content": "ab"}


def test_a_turn_that_was_broken_off_has_not_happened(speaker):
  target, tokenizer, params = speaker
  talk = specjax.Conversation(target, proposers.Plain(), tokenizer, params=params, max_new_tokens=7)
  list(talk.say("ab"))
  before, messages = list(talk.ids), list(talk.messages)
  next(talk.say("cd"))
  assert talk.ids == before and talk.messages == messages
  list(talk.say("cd"))
  assert talk.ids[:len(before)] == before and talk.reused == 0  # its cache went with the broken turn


def test_a_conversation_needs_a_template_and_a_decoder(speaker):
  target, _, _ = speaker
  with pytest.raises(ValueError, match="no chat template"):
    specjax.Conversation(target, proposers.Plain(), letters(None))


@pytest.mark.parametrize("folder", ["families/mistral", "recurrent/mamba2"])
def test_rings_and_states_go_on_too(folder):
  """Windows of 8 tokens, and a recurrent state: what is not in them is not needed, and nothing is taken back."""
  target, _ = specjax.load(str(pathlib.Path(__file__).parent / "fixtures" / folder))
  first = drivers.generate(target, proposers.NGram(min_ngram=1, num_tokens=3), [[5, 6, 7] * 4], max_new_tokens=14,
                           eos_ids=(), keep=True)
  prompt = [5, 6, 7] * 4 + first.token_ids[0] + [9, 8, 7]
  second = drivers.generate(target, proposers.NGram(min_ngram=1, num_tokens=3), [prompt], max_new_tokens=10, eos_ids=(),
                            kept=first.kept)
  plain = drivers.generate(target, proposers.Plain(), [prompt], max_new_tokens=10, eos_ids=())
  assert second.token_ids == plain.token_ids and second.reused.tolist() == [25]
