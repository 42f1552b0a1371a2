"""Two vocabularies, token by token: equal ones, the first difference, counterparts, and texts spelt in other ids."""
import numpy as np
import pytest

import tiny_tokenizers
from specjax import checkpoints
from specjax.checkpoints import vocabulary_map

LETTERS = [" ", "a", "b", "c", "\n", " a", "ab", "bc", " ab"]
SPECIAL = ["<unk>", "<s>", "</s>"]


def bytewise(tokens=LETTERS, special=SPECIAL, **kwargs):
  return tiny_tokenizers.byte_level(tokens, special, **kwargs)


# --- the same vocabulary? -------------------------------------------------------------------------------------------


def test_equal_vocabularies():
  assert vocabulary_map.first_difference(bytewise(), bytewise()) is None
  assert vocabulary_map.require_same(bytewise(), bytewise()) is None


def test_a_space_is_a_space_however_it_is_spelt():
  pieces = tiny_tokenizers.sentencepiece(LETTERS, SPECIAL)
  assert bytewise().tokens()[5] == "Ġa" and pieces.tokens()[5] == "▁a"
  assert vocabulary_map.first_difference(bytewise(), pieces) is None


def test_a_permuted_vocabulary_of_the_same_size_is_refused_and_the_first_difference_named():
  """llama.cpp#3812, mlx-lm: the same size says nothing; drafts would be random text."""
  swapped = bytewise([*LETTERS[:6], "bc", "ab", " ab"])
  with pytest.raises(ValueError, match="id 6 is 'ab' to the target and 'bc' to the drafter"):
    vocabulary_map.require_same(bytewise(), swapped)


def test_a_special_token_is_not_the_text_that_spells_it():
  spelt = bytewise([*LETTERS, "<unk>"], SPECIAL[1:])
  found = vocabulary_map.first_difference(bytewise(), spelt)
  assert (found.index, found.target, found.drafter) == (9, "<unk>", "<unk>")


def test_a_longer_vocabulary_differs_behind_the_end_of_the_other():
  longer = bytewise(special=[*SPECIAL, "<pad>"])
  found = vocabulary_map.first_difference(longer, bytewise())
  assert found == vocabulary_map.Difference(12, "<pad>", None)
  assert str(found) == "id 12 is '<pad>' to the target and nothing to the drafter"
  assert vocabulary_map.first_difference(bytewise(), longer) == vocabulary_map.Difference(12, None, "<pad>")


def test_the_check_can_be_overridden():
  """koboldcpp#2325: a check that grew stricter must not lock out pairs that work."""
  renamed = bytewise(special=["<unk>", "<s>", "<|end|>"])
  assert vocabulary_map.require_same(bytewise(), renamed, override=True).index == 11


# --- counterparts ---------------------------------------------------------------------------------------------------


def test_counterparts_by_meaning():
  other = tiny_tokenizers.sentencepiece(["b", " ", "a", " b", "x", " a"], ["</s>", "<unk>"], byte_tokens=b"\n")
  #                                 " "  a  b   c  \n " a" ab  bc " ab" unk s  /s
  assert vocabulary_map.counterparts(bytewise(), other).tolist() == [2, 3, 1, -1, 0, 6, -1, -1, -1, 8, -1, 7]
  back = vocabulary_map.counterparts(other, bytewise()).tolist()
  assert back == [4, 2, 0, 1, -1, -1, 5, 11, 9]


def test_several_ids_of_one_meaning_count_once():
  """A letter stands for its byte token, the lower of two ids for both; no id of the drafter is used twice."""
  doubled = tiny_tokenizers.sentencepiece(["a", "b", " "], byte_tokens=b"ab")
  assert doubled.tokens()[:4] == ["<0x61>", "<0x62>", "a", "b"]
  assert vocabulary_map.counterparts(bytewise(), doubled)[1:3].tolist() == [2, 3]
  found = vocabulary_map.counterparts(doubled, bytewise())
  assert found.tolist() == [-1, -1, 1, 2, 0]
  for pair in ((bytewise(), doubled), (doubled, bytewise())):
    used = [index for index in vocabulary_map.counterparts(*pair) if index >= 0]
    assert len(set(used)) == len(used) > 0


# --- spelling -------------------------------------------------------------------------------------------------------

KOREAN = "한".encode()
HALVES = [bytes([byte]) for byte in KOREAN] + [KOREAN[:2]]
BYTES = bytewise([*LETTERS, *HALVES])
PIECES = tiny_tokenizers.sentencepiece([*LETTERS, "한", "한a"], SPECIAL, byte_tokens=bytes(range(256)))
OPENING = tiny_tokenizers.sentencepiece(LETTERS, SPECIAL, byte_tokens=KOREAN, opens=True, bos="<s>", eos="</s>")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, OPENING], ids=["bytes", "pieces", "opening"])
@pytest.mark.parametrize("data", [b"", b"abc", b" abc", b"bc a\nb", b" ", b"  ", b"\n", KOREAN, b"a" + KOREAN + b" b",
                                  KOREAN[1:] + b"ab", b" b" + KOREAN[:1], KOREAN[1:2], KOREAN[2:] + KOREAN[:2],
                                  KOREAN[:1] + KOREAN], ids=repr)
def test_ids_stand_for_exactly_these_bytes(tokenizer, data):
  speller = vocabulary_map.Speller(tokenizer)
  ids = speller.spell(data)
  assert b"".join(tokenizer.token_bytes(index) for index in ids) == data == speller.bytes_of(ids)


def test_text_is_spelt_as_the_tokenizer_encodes_it():
  for text in ("abc", " ab bc", "a\nab"):
    assert vocabulary_map.Speller(BYTES).spell(text.encode()) == BYTES.encode(text)
  spell = vocabulary_map.Speller(PIECES).spell
  assert spell(b" abc") == PIECES.encode("abc")               # the space is the tokenizer's own
  assert spell(b"abc") == PIECES.encode("\nabc")[2:]          # none is put before it
  assert spell(b"abc", opens=True) == PIECES.encode("abc")    # but at the start of a text


def test_one_odd_letter_costs_no_other_word_its_encoding():
  """The SentencePiece normaliser makes a space of "▁": that letter is spelt in bytes, the words around it as ever."""
  speller = vocabulary_map.Speller(PIECES)
  data = " ab bc▁ ab ab".encode()
  ids = speller.spell(data)
  assert speller.bytes_of(ids) == data
  assert ids.count(PIECES.tokens().index("▁ab")) == 3
  assert "▁".encode()[0] in ids  # a byte token: their ids are their bytes


def test_what_a_vocabulary_lacks_it_cannot_spell():
  assert vocabulary_map.Speller(bytewise()).spell(b"axb") is None
  assert vocabulary_map.Speller(bytewise()).spell(KOREAN) is None


# --- translation ----------------------------------------------------------------------------------------------------


def spelt(target, drafter, index, **kwargs):
  table = vocabulary_map.translation(target, drafter, **kwargs)
  assert table.begin.shape == (target.vocab_size + 1,) and (np.diff(table.begin) > 0).all()
  return [drafter.tokens()[i] for i in table.spelt[table.begin[index]:table.begin[index + 1]]]


def test_translation():
  target = bytewise([*LETTERS, "x", *HALVES], special=["<s>", "</s>", "<|user|>"], bos="<s>", eos="</s>")
  drafter = tiny_tokenizers.sentencepiece(
      ["a", "b", "c", " ", "s", "e", "r", "u", "<", "|", ">", " b", "한"], ["<unk>", "<bos>", "<eos>"],
      byte_tokens=KOREAN + b"\n", opens=True, bos="<bos>", eos="<eos>")
  index = {token: i for i, token in enumerate(target.tokens())}
  expected = {"a": ["a"], "Ġa": ["▁", "a"], "bc": ["b", "c"], "x": ["<unk>"], "Ċ": ["<0x0A>"], "<s>": ["<bos>"],
              "</s>": ["<eos>"], "<|user|>": list("<|user|>"), target.tokens()[10]: ["<0xED>"],
              target.tokens()[13]: ["<0xED>", "<0x95>"]}
  for token, ids in expected.items():
    assert spelt(target, drafter, index[token]) == ids, token
  assert spelt(target, drafter, index["<|user|>"], longest=3) == ["e", "r", "|", ">"][1:]
  table = vocabulary_map.translation(target, drafter)
  assert table.opening.tolist() == [drafter.bos_id] and table.bos == target.bos_id
  for own in np.flatnonzero(table.counterpart >= 0):
    assert table.spelt[table.begin[own]:table.begin[own + 1]].tolist() == [table.counterpart[own]]


def test_a_drafter_that_wants_no_first_token_gets_none():
  table = vocabulary_map.translation(bytewise(bos="<s>"), bytewise(bos="<s>"))
  assert table.opening.size == 0 and table.bos == -1
  assert table.counterpart.tolist() == list(range(12))


def test_real_vocabulary_of_smollm_against_a_tiny_one():
  """All 49152 tokens, halves of characters among them, in 256 byte tokens and a few words."""
  smollm = checkpoints.Tokenizer.from_gguf(checkpoints.resolve("smollm2-135m"))
  words = tiny_tokenizers.sentencepiece([" ", "t", "h", "e", "th", " th", " the"], byte_tokens=bytes(range(256)))
  table = vocabulary_map.translation(smollm, words, longest=200)
  speller, draw = vocabulary_map.Speller(words), np.random.default_rng(0)
  for index in [*draw.integers(0, 49152, 2000), *smollm.encode(" the 한👨‍👩‍👧‍👦")]:
    ids = table.spelt[table.begin[index]:table.begin[index + 1]]
    assert speller.bytes_of(ids) == smollm.token_bytes(index, skip_special_tokens=False)
  the, = smollm.encode(" the")
  assert table.spelt[table.begin[the]:table.begin[the + 1]].tolist() == [words.tokens().index("▁the")]
  ends = table.spelt[table.begin[2]:table.begin[3]]
  assert speller.bytes_of(ends) == b"<|im_end|>"  # the tiny one names nothing that ends an answer
