"""A tokenizer for a model that is trained from nothing: byte-level BPE, learned from the texts (arXiv 1508.07909).

Every text has ids, since all 256 bytes are tokens. Ids are laid out as T5's are: 0 fills up and is what a decoder
behind an encoder begins with, 1 ends a text, and the last ones, counted from the end, stand for spans that are cut out.
"""
from collections.abc import Iterable

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.tokenizer import Tokenizer

PAD, EOS = 0, 1
PAD_TOKEN, _EOS = "<pad>", "</s>"


def train(texts: Iterable[str], vocab: int, sentinels: int = 0) -> Tokenizer:
  """Learns merges from `texts`.

  Args:
    vocab: ids, the special ones included.
    sentinels: of them that stand for spans, <extra_id_0> and so on. With any, encoding with special tokens ends in
      </s>, as inputs of T5 do.

  Raises:
    CheckpointError: fewer ids than bytes and special tokens, or texts that have too few pairs to merge.
  """
  import tokenizers
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  least = len(alphabet) + 2 + sentinels
  if vocab < least:
    raise CheckpointError(f"a vocabulary of {vocab} ids is too small: bytes and special tokens alone are {least}")
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
      vocab_size=vocab - sentinels, special_tokens=[PAD_TOKEN, _EOS], initial_alphabet=sorted(alphabet),
      show_progress=False))
  if sentinels:
    backend.add_special_tokens([_sentinel(i) for i in reversed(range(sentinels))])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {_EOS}", pair=f"$A {_EOS} $B {_EOS}", special_tokens=[(_EOS, EOS)])
  found = backend.get_vocab_size(with_added_tokens=True)
  if found != vocab:
    raise CheckpointError(f"the texts give {found} ids, not {vocab}: ask for so many, or give more text")
  return Tokenizer(backend, byte_level=True, eos_ids=[EOS], special_tokens={"pad_token": PAD_TOKEN, "eos_token": _EOS})


def sentinels(tokenizer: Tokenizer) -> tuple[int, ...]:
  """The ids of <extra_id_0>, <extra_id_1> and so on, as far as a tokenizer has them."""
  known, found = {token: index for index, token in enumerate(tokenizer.tokens())}, []
  while _sentinel(len(found)) in known:
    found.append(known[_sentinel(len(found))])
  return tuple(found)


def _sentinel(index):
  return f"<extra_id_{index}>"
