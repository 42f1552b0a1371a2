"""A tokenizer that is learned: any text comes back, ids lie where T5's do, its files are it."""
import pytest

from specjax.checkpoints import CheckpointError
from specjax.checkpoints import new_tokenizer
from specjax.checkpoints import Tokenizer

TEXTS = ["the small model drafts a few tokens and the large model checks them all at once", "하나 둘 셋", "東京 😀"] * 3


@pytest.mark.parametrize("sentinels", [0, 5])
def test_texts_come_back_and_ids_lie_where_they_should(tmp_path, sentinels):
  tokenizer = new_tokenizer.train(TEXTS, 300, sentinels)
  assert tokenizer.vocab_size == 300 and tokenizer.eos_ids == (1,)
  for text in [*TEXTS, "naïve ½ ﬁ\n\n\tx", " other words "]:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < 300 - sentinels
    assert tokenizer.encode(text, add_special_tokens=True) == ids + [1] * bool(sentinels)
  assert len(tokenizer.encode("the small model")) < len("the small model") / 2
  assert tokenizer.tokens()[:2] == ["<pad>", "</s>"]
  assert new_tokenizer.sentinels(tokenizer) == tuple(range(299, 299 - sentinels, -1))
  assert tokenizer.decode([0, 1, 299]) == ("" if sentinels else tokenizer.decode([299]))
  for name, text in tokenizer.files().items():
    (tmp_path / name).write_text(text, encoding="utf-8")
  again = Tokenizer.from_folder(tmp_path)
  assert again.tokens() == tokenizer.tokens() and again.eos_ids == (1,)
  assert again.encode(TEXTS[0], add_special_tokens=True) == tokenizer.encode(TEXTS[0], add_special_tokens=True)
  assert new_tokenizer.sentinels(again) == new_tokenizer.sentinels(tokenizer)


def test_sizes_that_cannot_be():
  with pytest.raises(CheckpointError, match="200 ids is too small: bytes and special tokens alone are 263"):
    new_tokenizer.train(TEXTS, 200, 5)
  with pytest.raises(CheckpointError, match="the texts give .* ids, not 900"):
    new_tokenizer.train(TEXTS, 900)
