"""Tokenizers rebuilt from GGUF metadata: splitting rules, SentencePiece by scores, ids that end an answer."""
import pathlib

import numpy as np
import pytest

from specjax.checkpoints import CheckpointError, TextStream, Tokenizer
from specjax.checkpoints.gguf_header import GGUFHeader
from specjax.checkpoints.tokenizer import _ALPHABET


def from_metadata(**values):
  keyed = {("tokenizer." if key == "chat_template" else "tokenizer.ggml.") + key: value for key, value in values.items()
           if value is not None}
  return Tokenizer.from_gguf(GGUFHeader(pathlib.Path("m.gguf"), 0, keyed, {}))


def byte_level(pre, merges=(), special=(), unused=0, **values):
  tokens = [*_ALPHABET, *("".join(merge.split(" ")) for merge in merges)]
  types = [1] * len(tokens) + [3] * len(special) + [5] * unused
  tokens += [*special, *(f"[PAD{index}]" for index in range(unused))]
  return from_metadata(model="gpt2", pre=pre, tokens=tokens, token_type=np.array(types, np.int32), merges=list(merges),
                       **values)


def spelt(tokenizer, text):
  names = tokenizer.tokens()
  return [names[index] for index in tokenizer.encode(text)]


DIGITS = ["1 2", "12 3", "3 4", "123 4"]


@pytest.mark.parametrize("pre, expected", [
  ("smollm", ["1", "2", "3", "4"]), ("qwen2", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"]), ("gpt-2", ["1234"]),
  ("default", ["1234"])])
def test_digits_by_rule(pre, expected):
  assert spelt(byte_level(pre, DIGITS), "1234") == expected


@pytest.mark.parametrize("pre, expected", [
  ("qwen2", ["I", "'LL", "x"]), ("llama-bpe", ["I", "'LL", "x"]),  # a contraction in any case stands alone
  ("gpt-2", ["I", "'", "L", "Lx"]), ("smollm", ["I", "'", "L", "Lx"])])
def test_capital_contractions_by_rule(pre, expected):
  assert spelt(byte_level(pre, ["L x", "' L", "'L L"]), "I'LLx") == expected


@pytest.mark.parametrize("pre, expected", [
  ("qwen2", ["a", ".b"]), ("llama-bpe", ["a", ".b"]), ("gpt-2", ["a", ".", "b"]), ("smollm", ["a", ".", "b"])])
def test_marks_before_words_by_rule(pre, expected):
  assert spelt(byte_level(pre, [". b"]), "a.b") == expected


@pytest.mark.parametrize("pre, ids", [("qwen2", 2), ("llama-bpe", 3), ("gpt-2", 3)])
def test_accents_are_composed_for_qwen_only(pre, ids):
  assert len(byte_level(pre).encode("e\u0301")) == ids


def test_whole_words_are_looked_up_before_merging():
  # Merging takes "b c" first, after which nothing makes "abc": only looking the word up finds it.
  merges = ["b c", "a b", "ab c"]
  assert spelt(byte_level("llama-bpe", merges), "abc") == ["abc"]
  assert spelt(byte_level("gpt-2", merges), "abc") == ["a", "bc"]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_any_text_comes_back(pre):
  tokenizer = byte_level(pre, DIGITS)
  for text in ["  two\r\n\r\n lines\t", "한국어 👩🏽‍💻", "x=1234; 'LL ١٢٣", "\x00\x7f\ufffd"]:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("values, expected", [
  ({}, ()), ({"eos_token_id": 257}, (257,)), ({"eos_token_id": 257, "eot_token_id": 259}, (257, 259)),
  ({"eos_token_id": 257, "bos_token_id": 256}, (256, 257)),       # Qwen: the document end is named
  ({"eos_token_id": 257, "unknown_token_id": 256}, (257,)),       # SmolLM2: it is only the unknown token
  ({"eos_token_id": 9999}, ())])
def test_ids_that_end_an_answer(values, expected):
  tokenizer = byte_level("qwen2", special=["<|endoftext|>", "</s>", "<s>", "<|other|>"], **values)
  assert tokenizer.eos_ids == expected


@pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
def test_known_end_texts_count_without_being_named(text):
  assert byte_level("qwen2", special=["<s>", text]).eos_ids == (257,)


def test_padding_entries_are_not_ids():
  assert byte_level("qwen2", special=["<s>"], unused=7).vocab_size == 257


@pytest.mark.parametrize("pre, value, first", [("qwen2", None, False), ("qwen2", True, True), ("llama-bpe", None, True),
                                               ("llama-bpe", False, False)])
def test_first_token(pre, value, first):
  tokenizer = byte_level(pre, special=["<s>"], bos_token_id=256, add_bos_token=value)
  assert (tokenizer.encode("a", add_special_tokens=True)[0] == 256) == first
  assert tokenizer.encode("a")[0] != 256


@pytest.mark.parametrize("change, says", [
  ({"model": "bert"}, "'bert'"), ({"pre": "tekken"}, "'tekken'.*smollm, qwen2"), ({"pre": None}, "None"),
  ({"merges": None}, "merges"), ({"merges": ["a zz"]}, "merges do not fit"), ({"tokens": None}, "no tokenizer"),
  ({"tokens": ["a", "a"], "token_type": None}, "'a' is listed twice"), ({"token_type": np.ones(3)}, "token types"),
  ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id")])
def test_unsupported_is_refused_by_name(change, says):
  values = {"model": "gpt2", "pre": "qwen2", "tokens": list(_ALPHABET), "token_type": None, "merges": []} | change
  with pytest.raises(CheckpointError, match=says):
    from_metadata(**values)


# ---- SentencePiece

LETTERS = "abc▁"


def sentencepiece(pieces=(), scores=(), bytes_too=True, letters=LETTERS, **values):
  tokens, types = ["<unk>", "<s>", "</s>"], [2, 3, 3]
  if bytes_too:
    tokens, types = tokens + [f"<0x{byte:02X}>" for byte in range(256)], types + [6] * 256
  score = [0.0] * len(tokens) + list(scores) + [-1000.0 - index for index in range(len(letters))]
  tokens = tokens + list(pieces) + list(letters)
  types += [1] * (len(tokens) - len(types))
  return from_metadata(model="llama", tokens=tokens, token_type=np.array(types), scores=np.array(score, np.float32),
                       bos_token_id=1, eos_token_id=2, **values)


def by_definition(text, scores):
  """SentencePiece BPE as defined: join, again and again, the adjacent pair that makes the piece of the best score."""
  symbols = list("▁" + text.replace(" ", "▁"))
  while True:
    pairs = [(-scores[a + b], index) for index, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in scores]
    if not pairs:
      return symbols
    index = min(pairs)[1]
    symbols[index:index + 2] = [symbols[index] + symbols[index + 1]]


def test_merges_by_score_equal_the_definition():
  draw = np.random.default_rng(0)
  for _ in range(20):
    pieces = sorted({"".join(draw.choice(list(LETTERS), draw.integers(2, 5))) for _ in range(25)})
    scores = dict(zip(pieces, (-draw.permutation(len(pieces))).astype(float)))
    tokenizer = sentencepiece(pieces, scores.values())
    for _ in range(20):
      text = "".join(draw.choice(list("abc "), 12))
      assert spelt(tokenizer, text) == by_definition(text, scores), (pieces, text)


def test_bytes_stand_in_for_unknown_characters():
  tokenizer = sentencepiece()
  assert spelt(tokenizer, "a한") == ["▁", "a", "<0xED>", "<0x95>", "<0x9C>"]
  ids = tokenizer.encode("a한b")
  assert tokenizer.decode(ids) == "a한b"
  assert tokenizer.pieces(ids) == ["", "a", "", "", "한", "b"]


def test_added_space_is_dropped_once():
  tokenizer = sentencepiece()
  for text in ["a b", " a", "  a", "", "b a "]:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.pieces(ids)) == text
    assert tokenizer.decode([1, *ids]) == text
    stream = TextStream(tokenizer)
    assert "".join(stream.push([index]) for index in ids) + stream.flush() == text
  plain = sentencepiece(add_space_prefix=False)
  assert spelt(plain, "a b") == ["a", "▁", "b"] and plain.decode(plain.encode(" a")) == " a"


def test_first_token_by_default():
  assert sentencepiece().encode("a", add_special_tokens=True)[0] == 1
  assert sentencepiece(add_bos_token=False).encode("a", add_special_tokens=True)[0] != 1


def test_unknown_without_bytes_and_special_texts():
  tokenizer = sentencepiece(bytes_too=False)
  assert spelt(tokenizer, "a한") == ["▁", "a", "<unk>"]
  assert spelt(tokenizer, "a</s>") == ["▁", "a", "</s>"]
  assert tokenizer.eos_ids == (2,)


def test_scores_are_required():
  with pytest.raises(CheckpointError, match="one score for each"):
    from_metadata(model="llama", tokens=["<unk>", "a"], scores=None)
