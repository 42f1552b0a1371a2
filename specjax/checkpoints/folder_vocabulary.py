"""The small files of a Hugging Face folder: its tokenizer, its chat template and the ids that end an answer."""
import json
import pathlib
from typing import Any

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_vocabulary import END_TEXTS

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_json(path: pathlib.Path, *, required: bool = False) -> dict[str, Any]:
  """A JSON object; {} when the file is absent and not required; CheckpointError when it is damaged or missing."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError as error:
    if not required:
      return {}
    raise CheckpointError(f"{path}: is not there; a model folder holds config.json, *.safetensors and tokenizer.json"
                          ) from error
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{path}: is not readable JSON ({error}); download it again") from error
  if not isinstance(value, dict):
    raise CheckpointError(f"{path}: holds {type(value).__name__}; a JSON object is expected")
  return value


def eos_ids(folder: pathlib.Path) -> tuple[int, ...]:
  """Ids that end an answer, ascending: generation_config.json's, else config.json's; () when neither says."""
  for name in ("generation_config.json", "config.json"):
    value = read_json(folder / name).get("eos_token_id")
    if value is not None:
      values = value if isinstance(value, list) else [value]
      if not all(type(index) is int and index >= 0 for index in values):
        raise CheckpointError(f"{folder / name}: eos_token_id is {value!r}; an id or a list of ids is expected")
      return tuple(sorted(set(values)))
  return ()


def read(folder: pathlib.Path) -> dict[str, Any]:
  """The arguments of `Tokenizer` for a folder with tokenizer.json.

  Args:
    folder: of the model. Beside tokenizer.json it may hold tokenizer_config.json, special_tokens_map.json,
      chat_template.jinja, generation_config.json and config.json.

  Returns:
    Keyword arguments of `Tokenizer.__init__`. When generation_config.json does not say what ends an answer, known end
    tokens of the vocabulary do so beside the configuration's.

  Raises:
    CheckpointError: no tokenizer.json, a damaged file, or a tokenizer whose decoder is of an unknown kind.
  """
  from tokenizers import Tokenizer
  path = folder / "tokenizer.json"
  if not path.is_file() and (folder / "source.spm").is_file():
    raise CheckpointError(f"{path}: is not there; Marian's source.spm and target.spm are not read: put a tokenizer.json "
                          "beside them (the converter of transformers.js writes one)")
  if not path.is_file():
    raise CheckpointError(f"{path}: is not there; the tokenizer is read from tokenizer.json (a folder with "
                          "tokenizer.model or vocab.json alone must be saved again with Transformers)")
  try:
    backend = Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises plain Exception
    raise CheckpointError(f"{path}: cannot be read ({error}); download it again") from error
  settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
  texts = {name: _text(settings[name]) for name in _NAMED_TOKENS if settings.get(name) is not None}
  ids = {name: backend.token_to_id(text) for name, text in texts.items()}
  ends = set(eos_ids(folder)) | {ids.get("eos_token")}
  if "eos_token_id" not in read_json(folder / "generation_config.json"):
    ends |= {index for index, token in backend.get_added_tokens_decoder().items() if token.content in END_TEXTS}
  byte_level, strip = _spelling(path, json.loads(backend.decoder.__getstate__()) if backend.decoder else {})
  return {"backend": backend, "byte_level": byte_level, "strip": strip, "eos_ids": ends - {None},
          "bos_id": ids.get("bos_token"), "chat_template": _chat_template(folder, settings), "special_tokens": texts}


def written(backend, *, byte_level: bool, strip: bool, eos_ids, chat_template: str | None,
            special_tokens) -> dict[str, str]:
  """Texts of tokenizer.json, tokenizer_config.json, generation_config.json, of which `read` makes the same tokenizer.

  Arguments as of `Tokenizer`; `bos_id` follows from the special tokens.
  """
  described = json.loads(backend.to_str())
  steps = (described.get("decoder") or {}).get("decoders", [])
  # Other sources say apart from the decoder that a leading space is dropped; the file says so by a step of it.
  if strip and not byte_level and steps and not any(step["type"] == "Strip" for step in steps):
    steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}
  if chat_template is not None:
    settings["chat_template"] = chat_template
  ids = sorted(eos_ids)
  show = lambda value: json.dumps(value, ensure_ascii=False, indent=2) + "\n"
  return {"tokenizer.json": show(described), "tokenizer_config.json": show(settings),
          "generation_config.json": show({"eos_token_id": ids[0] if len(ids) == 1 else ids or None})}


def _text(token) -> str:
  return token["content"] if isinstance(token, dict) else token


def _chat_template(folder, settings) -> str | None:
  file = folder / "chat_template.jinja"
  if file.is_file():
    return file.read_text(encoding="utf-8")
  template = settings.get("chat_template")
  if isinstance(template, list):  # several by name: one for chats, others for tools or retrieval
    template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
  return template


def _spelling(path, decoder: dict) -> tuple[bool, bool]:
  """(byte_level, strip) of `Tokenizer`, from the description of the package's decoder."""
  steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
  kinds = [step.get("type") for step in steps]
  if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
    return True, False
  if kinds == ["Metaspace"] and steps[0].get("replacement", "▁") == "▁":
    return False, steps[0].get("prepend_scheme", "always") != "never"
  if kinds and kinds[0] == "Replace" and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
    replaced = steps[0].get("pattern"), steps[0].get("content")
    stripped = [(step.get("content"), step.get("start"), step.get("stop")) for step in steps if step["type"] == "Strip"]
    if replaced == ({"String": "▁"}, " ") and kinds.count("Replace") == 1 and stripped in ([], [(" ", 1, 0)]):
      return False, bool(stripped)
  raise CheckpointError(f"{path}: its decoder ({', '.join(map(str, kinds))}) is not supported: byte-level and "
                        "SentencePiece (Replace, ByteFallback, Fuse, Strip) decoders are")
