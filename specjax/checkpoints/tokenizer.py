"""Text to ids and back, for a tokenizer that came with a checkpoint.

Encoding is the `tokenizers` package. Decoding is done here, byte by byte: each id stands for some bytes, and text is
what an incremental UTF-8 decoder makes of them. So a stream costs the same for every token, never splits a character,
and the pieces of an answer joined are the answer.
"""
import codecs
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specjax.checkpoints import chat as chat_templates
from specjax.checkpoints import gguf_vocabulary
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import GGUFHeader, read_header

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
  # GPT-2's alphabet: a printable Latin-1 character stands for itself, every other byte for the next one from 256 up.
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Tokenizer:
  """A model's tokenizer, its special ids and its chat template.

  Attributes:
    vocab_size: number of real ids, so that ids are 0 to vocab_size - 1; a model's head may have more rows.
    eos_ids: ids that end an answer, ascending.
    bos_id: id of the first token of a document, or None.
    has_chat_template: whether `chat` works.
  """

  def __init__(self, backend, *, byte_level: bool, strip: bool = False, eos_ids: Iterable[int] = (),
               bos_id: int | None = None, chat_template: str | None = None, special_tokens: Mapping[str, str] = {}):
    """Wraps a `tokenizers.Tokenizer`; see `from_gguf` and `from_folder`.

    Args:
      backend: the `tokenizers.Tokenizer`.
      byte_level: tokens are spelt in GPT-2's byte alphabet; otherwise "▁" is a space and <0xNN> a byte.
      strip: decoding drops one leading space (which encoding had added).
      eos_ids, bos_id: as the attributes.
      chat_template: Jinja source, or None.
      special_tokens: names that the template may use, with their text.
    """
    backend.no_truncation()
    backend.no_padding()
    self._backend = backend
    self._byte_level, self._strip = byte_level, strip
    self._template, self._special_tokens = chat_template, dict(special_tokens)
    added = backend.get_added_tokens_decoder()
    self._special_ids = frozenset(index for index, token in added.items() if token.special)
    self._added = {index: token.content for index, token in added.items()}
    self.vocab_size = 1 + max(max(added, default=-1), _last_id(backend))
    self.eos_ids = tuple(sorted(set(eos_ids)))
    self.bos_id = bos_id
    self._bytes = {}

  @classmethod
  def from_gguf(cls, file: GGUFHeader | str | pathlib.Path) -> "Tokenizer":
    """The tokenizer inside a GGUF file (its path or its parsed header); raises CheckpointError."""
    header = file if isinstance(file, GGUFHeader) else read_header(file)
    metadata = header.metadata
    backend, byte_level, strip = gguf_vocabulary.build(header.path, metadata)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return cls(backend, byte_level=byte_level, strip=strip, eos_ids=gguf_vocabulary.eos_ids(metadata), bos_id=bos_id,
               chat_template=metadata.get("tokenizer.chat_template"),
               special_tokens={name: tokens[index] for name, index in ids.items()
                               if index is not None and 0 <= index < len(tokens)})

  @classmethod
  def from_folder(cls, folder: str | pathlib.Path) -> "Tokenizer":
    """The tokenizer of a Hugging Face folder: tokenizer.json, and what stands beside it; raises CheckpointError."""
    from specjax.checkpoints import folder_vocabulary
    return cls(**folder_vocabulary.read(pathlib.Path(folder)))

  @property
  def has_chat_template(self) -> bool:
    return self._template is not None

  def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text.

    The spelling of a special token ("<|im_end|>") in the text becomes that token's id, as in Transformers: who passes
    on the words of strangers must remove such spellings first.

    Args:
      text: any text.
      add_special_tokens: put around it what the model's tokenizer puts around a document (often a first token).

    Returns:
      The ids.
    """
    return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

  def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
    """Ids of a conversation, laid out by the model's own template.

    Nothing is added that the template does not write. Special tokens spelt inside a message's content become special
    ids (see `encode`): a message can so end its own turn and open another, as in Transformers.

    Args:
      messages: mappings with "role" ("system", "user", "assistant") and "content".
      add_generation_prompt: end with the opening of the assistant's turn.

    Returns:
      The ids.

    Raises:
      ValueError: the model has no template, or the template refuses the messages.
    """
    return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt))

  def chat_behind(self, ids: Sequence[int], messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation that goes on behind `ids`, its prompts and answers so far.

    A text has more than one spelling in ids, and a model seldom writes the one that encoding gives: what was generated
    stays as it was, and only what the template writes behind it is encoded. Where `ids` are not the beginning of the
    text that the template writes, the ids are those of `chat`.

    Args:
      ids: the last prompt and its answer, special tokens included; [] at first.
      messages: the whole conversation, the new message last.

    Returns:
      The ids.

    Raises:
      ValueError: as `chat`.
    """
    text, ids = self.chat_text(messages), list(ids)
    known = self.decode(ids, skip_special_tokens=False)
    if ids and text.startswith(known):
      found = ids + self.encode(text[len(known):])
      if self.decode(found, skip_special_tokens=False) == text:
        return found
    return self.encode(text)

  def chat_text(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
    """The text that `chat` encodes; raises as `chat` does."""
    if self._template is None:
      raise CheckpointError("this model has no chat template: it continues text rather than answering; pass --raw "
                            "to give it the text as it is (in Python: encode(text) instead of chat(messages))")
    return chat_templates.render(self._template, messages, add_generation_prompt=add_generation_prompt,
                                 special_tokens=self._special_tokens)

  def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """Text of some ids; bytes that are not UTF-8 become U+FFFD.

    Args:
      ids: integers in [0, vocab_size): a list, a numpy or a JAX array of one axis.
      skip_special_tokens: leave control tokens out of the text.

    Raises:
      ValueError: an id outside of the vocabulary.
    """
    stream = TextStream(self, skip_special_tokens=skip_special_tokens)
    return stream.push(ids) + stream.flush()

  def pieces(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> list[str]:
    """Text that each id contributes; joined they are `decode(ids)`.

    A character made by several tokens belongs to the one that completes it; bytes left incomplete at the end, to the
    last. Arguments and errors as `decode`.
    """
    stream = TextStream(self, skip_special_tokens=skip_special_tokens)
    found = [stream.push([index]) for index in _as_list(ids)]
    if found:
      found[-1] += stream.flush()
    return found

  def tokens(self) -> list[str | None]:
    """The vocabulary as it is spelt inside, by id (None: an id that is not used); to compare two tokenizers by."""
    spelt = self._backend.get_vocab(with_added_tokens=True)
    listed = [None] * self.vocab_size
    for token, index in spelt.items():
      listed[index] = token
    return listed

  def files(self) -> dict[str, str]:
    """The texts of the files that `from_folder` reads this tokenizer from, by name."""
    from specjax.checkpoints import folder_vocabulary
    return folder_vocabulary.written(self._backend, byte_level=self._byte_level, strip=self._strip,
                                     eos_ids=self.eos_ids, chat_template=self._template,
                                     special_tokens=self._special_tokens)

  def is_special(self, index: int) -> bool:
    """Whether an id is a control token, which no text spells."""
    return index in self._special_ids

  def token_bytes(self, index: int, *, skip_special_tokens: bool = True) -> bytes:
    """The bytes that an id adds to the text; raises ValueError for an id outside of the vocabulary."""
    if skip_special_tokens and index in self._special_ids:
      return b""
    known = self._bytes.get(index)
    if known is None:
      known = self._bytes[index] = self._spell(index)
    return known

  def _spell(self, index: int) -> bytes:
    if not 0 <= index < self.vocab_size:
      raise ValueError(f"id {index} is not in the vocabulary (0 to {self.vocab_size - 1})")
    if index in self._added:
      return self._added[index].encode()
    token = self._backend.id_to_token(index) or ""
    if self._byte_level:
      if all(letter in _ALPHABET for letter in token):
        return bytes(_ALPHABET[letter] for letter in token)
      return token.encode()
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


class TextStream:
  """Turns ids into text as they come, holding back the bytes of an unfinished character. Work is constant per id."""

  def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
    """A stream at the start of a text; it keeps `tokenizer` and a few bytes."""
    self._tokenizer, self._skip = tokenizer, skip_special_tokens
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._strip = tokenizer._strip

  def push(self, ids: Iterable[int]) -> str:
    """New text, whole characters only; maybe empty. Raises ValueError for an id outside of the vocabulary."""
    raw = b"".join(self._tokenizer.token_bytes(index, skip_special_tokens=self._skip) for index in _as_list(ids))
    if self._strip and raw:
      raw, self._strip = raw.removeprefix(b" "), False
    return self._decoder.decode(raw)

  @property
  def unfinished(self) -> bool:
    """Whether bytes of a character are held back."""
    return bool(self._decoder.getstate()[0])

  def flush(self) -> str:
    """What was held back: U+FFFD for an unfinished character, else nothing. The stream may go on afterwards."""
    return self._decoder.decode(b"", final=True)


def _as_list(ids) -> list[int]:
  if isinstance(ids, list):
    return ids
  # One transfer for a JAX array, not one for each id.
  return np.asarray(ids).tolist() if hasattr(ids, "__array__") else list(map(int, ids))


def _last_id(backend) -> int:
  size = backend.get_vocab_size(with_added_tokens=False)
  # Ids of a model's own vocabulary are nearly always 0 to size - 1; only otherwise is the whole of it listed.
  if size and backend.id_to_token(size - 1) is not None and backend.id_to_token(size) is None:
    return size - 1
  return max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
