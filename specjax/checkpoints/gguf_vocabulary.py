"""The tokenizer that a GGUF file carries: how many ids, which of them end an answer, and the `tokenizers` object.

Two kinds: "gpt2", byte-level BPE with merges and one of several splitting rules (`tokenizer.ggml.pre`), and "llama",
SentencePiece BPE given by scores, whose merges are rebuilt here. Token types: 1 normal, 2 unknown, 3 control, 4 user
defined, 5 unused (padding), 6 byte.
"""
import numpy as np

from specjax.checkpoints.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
# Control tokens that end a turn or a document in every vocabulary that has them.
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")
# Ends a document too, but only where the file names it in one of these roles (in SmolLM2 it is the unknown token).
_DOCUMENT_END, _DOCUMENT_END_ROLES = "<|endoftext|>", ("bos_token_id", "padding_token_id")

_QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# tokenizer.ggml.pre -> (regular expression to split by, or None for GPT-2's; digits apart; NFC first; whole words
# looked up before merging). "default" means that the converter did not know the rule: GPT-2's is taken.
_SPLITS = {
  "smollm": (None, True, False, False),
  "qwen2": (_QWEN2, False, True, False),
  "llama-bpe": (_LLAMA3, False, False, True),
  "gpt-2": (None, False, False, False),
  "default": (None, False, False, False),
}
_BOS_BY_DEFAULT = ("llama-bpe",)


def token_count(metadata) -> int:
  """Number of ids that mean something: padding entries at the end of the list are left out; 0 without a tokenizer."""
  tokens = metadata.get(_PREFIX + "tokens", ())
  types = metadata.get(_PREFIX + "token_type")
  if types is None or len(types) != len(tokens):
    return len(tokens)
  real = np.flatnonzero(np.asarray(types) != _UNUSED)
  return int(real[-1]) + 1 if real.size else 0


def eos_ids(metadata) -> tuple[int, ...]:
  """Ids that end an answer, ascending: those that the file names (eos, eot, eom) and its known control tokens."""
  found = {metadata.get(f"{_PREFIX}{role}_token_id") for role in ("eos", "eot", "eom")} - {None}
  tokens = metadata.get(_PREFIX + "tokens", ())
  types = metadata.get(_PREFIX + "token_type")
  if types is not None and len(types) == len(tokens):
    for index in np.flatnonzero(np.asarray(types) == _CONTROL).tolist():
      named = index in [metadata.get(_PREFIX + role) for role in _DOCUMENT_END_ROLES]
      if tokens[index] in END_TEXTS or (tokens[index] == _DOCUMENT_END and named):
        found.add(index)
  return tuple(sorted(index for index in found if 0 <= index < len(tokens)))


def build(path, metadata):
  """Makes the `tokenizers` object of a GGUF file.

  Args:
    path: of the file, for messages.
    metadata: of its header.

  Returns:
    (tokenizer, byte_level, strip): the `tokenizers.Tokenizer`; whether its tokens are spelt in the byte-level alphabet
    (otherwise with "▁" for a space and <0xNN> for a byte); whether decoding drops one leading space.

  Raises:
    CheckpointError: no tokenizer, or one of a kind that is not supported.
  """
  tokens = metadata.get(_PREFIX + "tokens")
  if not isinstance(tokens, list):
    raise CheckpointError(f"{path}: has no tokenizer (key {_PREFIX + 'tokens'!r} is absent); use a file that has one")
  count = token_count(metadata)
  tokens = tokens[:count]
  types = np.asarray(metadata.get(_PREFIX + "token_type", np.full(count, _NORMAL)))[:count]
  if len(types) != count:
    raise CheckpointError(f"{path}: {count} tokens but {len(types)} token types: the file is damaged")
  ids = {token: index for index, token in enumerate(tokens)}
  if len(ids) != count:
    twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
    raise CheckpointError(f"{path}: token {twice!r} is listed twice, so its id is not defined: the file is damaged")
  kind = metadata.get(_PREFIX + "model")
  if kind == "gpt2":
    tokenizer, byte_level, strip = *_byte_level(path, metadata, ids), False
  elif kind == "llama":
    tokenizer, byte_level, strip = *_sentencepiece(path, metadata, ids, tokens, types), _adds_space(metadata)
  else:
    raise CheckpointError(f"{path}: tokenizer kind {kind!r} ({_PREFIX}model) is not supported ('gpt2' and 'llama' are)")
  _add_special(path, tokenizer, metadata, tokens, types, default_bos=kind == "llama")
  return tokenizer, byte_level, strip


def _byte_level(path, metadata, ids):
  from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
  rule = metadata.get(_PREFIX + "pre")
  if rule not in _SPLITS:
    raise CheckpointError(f"{path}: splitting rule {rule!r} ({_PREFIX}pre) is not supported (supported: "
                          f"{', '.join(_SPLITS)}); convert the model again, or use its Hugging Face folder")
  pattern, digits, nfc, whole_words = _SPLITS[rule]
  merges = metadata.get(_PREFIX + "merges")
  if not isinstance(merges, list):
    raise CheckpointError(f"{path}: a byte-level tokenizer needs merges (key {_PREFIX + 'merges'!r}), which are absent")
  try:
    model = models.BPE(ids, [tuple(merge.split(" ", 1)) for merge in merges], ignore_merges=whole_words)
  except Exception as error:  # the package raises plain Exception
    raise CheckpointError(f"{path}: the tokenizer's merges do not fit its tokens: {error}") from error
  tokenizer = Tokenizer(model)
  if nfc:
    tokenizer.normalizer = normalizers.NFC()
  steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
  if pattern:
    steps.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
  if digits:
    steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer, True


def _sentencepiece(path, metadata, ids, tokens, types):
  from tokenizers import Tokenizer, decoders, models, normalizers
  scores = metadata.get(_PREFIX + "scores")
  if scores is None or len(scores) < len(tokens):
    raise CheckpointError(f"{path}: a SentencePiece tokenizer needs one score for each of its {len(tokens)} tokens "
                          f"(key {_PREFIX + 'scores'!r})")
  # A piece of score s can be made from any two pieces that spell it, before every piece of a lower score. Pairs that
  # make the same piece rank by the order of their parts, as in the converter of Transformers.
  merges = []
  for index in np.flatnonzero(types == _NORMAL).tolist():
    token = tokens[index]
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids]
    pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    merges += [(-float(scores[index]), index, pair) for pair in pairs]
  merges.sort(key=lambda merge: merge[:2])
  unknown = np.flatnonzero(types == _UNKNOWN)
  tokenizer = Tokenizer(models.BPE(
    ids, [pair for _, _, pair in merges], unk_token=tokens[unknown[0]] if unknown.size else None, fuse_unk=True,
    byte_fallback=bool((types == _BYTE).any())))
  space = normalizers.Replace(" ", "▁")
  tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if _adds_space(metadata) else space
  tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
  return tokenizer, False


def _adds_space(metadata) -> bool:
  return bool(metadata.get(_PREFIX + "add_space_prefix", True))


def _add_special(path, tokenizer, metadata, tokens, types, *, default_bos):
  from tokenizers import AddedToken, processors
  special = [tokens[index] for index in np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist()]
  tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
  user = [tokens[index] for index in np.flatnonzero(types == _USER).tolist()]
  tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user])
  bos = metadata.get(_PREFIX + "bos_token_id")
  default_bos = bos is not None and (default_bos or metadata.get(_PREFIX + "pre") in _BOS_BY_DEFAULT)
  if metadata.get(_PREFIX + "add_bos_token", default_bos):
    if bos is None or not 0 <= bos < len(tokens):
      raise CheckpointError(f"{path}: asks for a first token ({_PREFIX}add_bos_token) but names none "
                            f"({_PREFIX}bos_token_id = {bos})")
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{tokens[bos]}:0 $A:0", special_tokens=[(tokens[bos], bos)])
