"""Tokenizers of a few tokens: byte-level ones and SentencePiece's, spelt as the real ones spell."""
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specjax import checkpoints

# GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the letters from 256 up.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)}


def byte_level(tokens, special=(), **kwargs):
  """Ids in the order of `tokens`, str or bytes, then those of `special`; longer tokens are merged from earlier ones."""
  spelt = ["".join(_LETTERS[byte] for byte in (t.encode() if isinstance(t, str) else t)) for t in tokens]
  backend = Tokenizer(_model(spelt, special))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  return _finish(backend, special, True, **kwargs)


def sentencepiece(tokens, special=(), *, prefix=True, byte_tokens=b"", **kwargs):
  """The same with "▁" for a space, put before every text with `prefix`, and tokens <0xNN> of `byte_tokens` first."""
  spelt = [f"<0x{byte:02X}>" for byte in byte_tokens] + [token.replace(" ", "▁") for token in tokens]
  backend = Tokenizer(_model(spelt, special, unk_token=special[0] if special else None, fuse_unk=True,
                             byte_fallback=bool(byte_tokens)))
  space = normalizers.Replace(" ", "▁")
  backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
  backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
  return _finish(backend, special, False, strip=prefix, **kwargs)


def _model(spelt, special, **kwargs):
  merges = []
  for index, token in enumerate(spelt):
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    merges += [pair for pair in pairs if set(pair) <= set(spelt[:index])]
  return models.BPE({token: index for index, token in enumerate([*spelt, *special])}, merges, **kwargs)


def _finish(backend, special, spelt_in_bytes, *, opens=False, **kwargs):
  backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
  ids = {name: backend.token_to_id(kwargs.pop(name)) for name in ("bos", "eos") if name in kwargs}
  if opens:
    first = backend.id_to_token(ids["bos"])
    special = [(first, ids["bos"])]
    backend.post_processor = processors.TemplateProcessing(single=f"{first}:0 $A:0", special_tokens=special)
  return checkpoints.Tokenizer(backend, byte_level=spelt_in_bytes, bos_id=ids.get("bos"),
                               eos_ids=[ids["eos"]] if "eos" in ids else (), **kwargs)
