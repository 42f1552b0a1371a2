"""Text of a stream: stop strings across tokens, characters across tokens, and what is held back."""
import itertools

import numpy as np
import pytest

from specjax.serving import text
import tiny_tokenizers

LETTERS = tiny_tokenizers.byte_level(["a", "b", "c", "ab", "abc", *[bytes([x]) for x in "한é".encode()]])
BYTES = list(range(5, 5 + len("한é".encode())))


def written(ids, stop):
  """All that is let out, the flags of it, and whether it ended."""
  writer, out = text.Writer(LETTERS, stop), []
  for place, token in enumerate(ids):
    free, ended = writer.push(token, place)
    out += free
    if ended:
      return out, True
  return out + writer.flush(), False


@pytest.mark.parametrize("stop", [("abc",), ("bc", "cab"), ("aa",), ("b",), ("cabab", "bb")])
def test_every_text_is_cut_where_its_first_stop_begins(stop):
  """All texts of five tokens of different lengths."""
  for ids in itertools.product(range(5), repeat=5):
    whole = LETTERS.decode(ids)
    # The first token that completes a stop string decides; of those that it completes, the one that begins first.
    cut = None
    for count in range(1, 6):
      seen = LETTERS.decode(ids[:count])
      found = [seen.find(s) for s in stop if s in seen]
      if found:
        cut = min(found)
        break
    out, ended = written(ids, stop)
    joined = "".join(token.piece for token in out)
    assert ended == (cut is not None) and joined == (whole if cut is None else whole[:cut]), ids
    assert [token.belongs for token in out] == list(range(len(out))) and [t.id for t in out] == list(ids[:len(out)])
    assert LETTERS.decode([token.id for token in out]).startswith(joined)


def test_nothing_is_held_back_that_cannot_become_a_stop():
  writer = text.Writer(LETTERS, ("abca",))
  assert [token.id for token in writer.push(2)[0]] == [2]
  assert writer.push(0)[0] == [] and writer.push(1)[0] == []
  free, ended = writer.push(1)  # "abb": no stop any more
  assert "".join(token.piece for token in free) == "abb" and not ended
  assert text.Writer(LETTERS).push(0)[0][0].piece == "a"


def test_characters_are_never_split():
  out, _ = written(BYTES, ())
  assert [token.piece for token in out] == ["", "", "한", "", "é"]
  out, ended = written([*BYTES, 0, 1], ("é",))
  assert ended and "".join(token.piece for token in out) == "한"
  out, _ = written(BYTES[:2], ())
  assert "".join(token.piece for token in out) == "\ufffd", "an unfinished character at the end"


def test_random_streams_keep_all_of_their_text():
  rng = np.random.default_rng(0)
  for _ in range(200):
    ids = rng.integers(0, 5, 30).tolist()
    out, _ = written(ids, ("never",))
    assert "".join(token.piece for token in out) == LETTERS.decode(ids) and len(out) == 30


@pytest.mark.parametrize("stop", [("",), (3,), ("a", "")])
def test_empty_stops_are_refused(stop):
  with pytest.raises(ValueError, match="one character or more"):
    text.Writer(LETTERS, stop)
