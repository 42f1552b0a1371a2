"""Decoders that are written: read again they are the same bits, ids, texts and settings; and what is not written."""
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint_files as files
import specjax
from specjax.checkpoints import CheckpointError, Tokenizer, load, read_folder
from specjax.checkpoints import folder_writer
from specjax.checkpoints.gguf_header import GGUFHeader
from specjax.models import decoder
from specjax.models.config import MoE

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
TEXTS = ["Hello  world", " a", "naïve ½ ﬁ 東京 😀", "line\n\n  two", ""]


def same(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_untied", "tiny_qwen2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_that_is_written_and_read_is_the_same_bit_by_bit(tmp_path, name, dtype):
  config, weights, tokenizer = load(FIXTURES / name, dtype=dtype)
  specjax.save(tmp_path, decoder.Decoder(weights=weights, config=config), tokenizer)
  again, read, other = load(tmp_path, dtype=dtype)
  assert again == config
  same(read, weights)
  assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(read))
  assert (other.eos_ids, other.bos_id, other.vocab_size) == (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size)
  for text in TEXTS:
    assert other.encode(text, add_special_tokens=True) == tokenizer.encode(text, add_special_tokens=True)
    assert other.decode(other.encode(text)) == tokenizer.decode(tokenizer.encode(text))
  talk = [{"role": "user", "content": "hi"}]
  assert other.has_chat_template == tokenizer.has_chat_template
  assert not other.has_chat_template or other.chat(talk) == tokenizer.chat(talk)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_untied", "tiny_qwen2"])
def test_the_tensors_are_those_of_the_folder_that_transformers_wrote(tmp_path, name):
  from safetensors.numpy import load_file
  config, weights = read_folder(FIXTURES / name)
  folder_writer.write_folder(tmp_path, config, weights)
  theirs, ours = (load_file(folder / "model.safetensors") for folder in (FIXTURES / name, tmp_path))
  assert ours.keys() == theirs.keys()
  for key, value in theirs.items():
    assert np.array_equal(ours[key], value), key
  known = json.loads((FIXTURES / name / "config.json").read_text())
  written = json.loads((tmp_path / "config.json").read_text())
  for key in written.keys() & known.keys() - {"rope_parameters", "eos_token_id"}:
    assert written[key] == known[key], key
  assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == config.rope_theta


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_mixture_of_experts_that_is_written_and_read_is_the_same_bit_by_bit(tmp_path, dtype):
  """Under the names, and in the shapes, of the folder that Transformers wrote."""
  from safetensors.numpy import load_file
  folder = FIXTURES / "families" / "mixtral"
  config, weights, tokenizer = load(folder, dtype=dtype)
  config = dataclasses.replace(config, windows=())  # of which the fixture has some
  specjax.save(tmp_path, decoder.Decoder(weights=weights, config=config), tokenizer)
  again, read, _ = load(tmp_path, dtype=dtype)
  assert again == config and again.moe.experts == 6
  same(read, weights)
  theirs, ours = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
  assert ours.keys() == theirs.keys()
  assert dtype != jnp.float32 or all(np.array_equal(ours[key], value) for key, value in theirs.items())
  known, written = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
  for key in ("architectures", "num_local_experts", "num_experts_per_tok", "intermediate_size", "rms_norm_eps"):
    assert written[key] == known[key], key


def test_half_precision_is_written_when_asked_for(tmp_path):
  config, weights = read_folder(FIXTURES / "tiny_llama")
  folder_writer.write_folder(tmp_path, config, weights, dtype="bfloat16")
  same(read_folder(tmp_path)[1], jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), weights))
  assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_some_layers_of_a_model_make_a_folder_of_their_own(tmp_path):
  target, tokenizer = specjax.load(str(FIXTURES / "tiny_llama"))
  specjax.save(tmp_path, target.keep((1,)), tokenizer)
  small, _ = specjax.load(str(tmp_path))
  assert small.config == dataclasses.replace(target.config, layers=1)
  same(small.weights.layers[0], target.weights.layers[1])


def test_rows_beyond_the_tokenizer_are_kept(tmp_path):
  model = files.Model(vocab=128)
  source = files.write_folder(tmp_path / "model", model)
  (source / "tokenizer.json").write_bytes((FIXTURES / "tiny_llama" / "tokenizer.json").read_bytes())
  config, weights, tokenizer = load(source)
  folder_writer.write_folder(tmp_path / "again", config, weights, tokenizer)
  again, read, _ = load(tmp_path / "again")
  assert again.vocab_size == 128 and again.num_tokens == 96
  same(read, weights)


def sentencepiece(**values):
  """A tokenizer of scores, as GGUF files of llama have it: it puts a space before a text, and takes it off again."""
  tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
  types = np.array([2, 3, 3] + [6] * 256 + [1] * 5, np.int32)
  keyed = {"model": "llama", "tokens": tokens, "token_type": types, "eos_token_id": 2, "bos_token_id": 1,
           "scores": np.array([0.0] * 259 + [-9, -8, -7, -1, -2], np.float32), **values}
  named = {f"tokenizer.ggml.{key}": value for key, value in keyed.items()}
  return Tokenizer.from_gguf(GGUFHeader(pathlib.Path("m.gguf"), 0, named, {}))


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_leading_space_that_encoding_adds_is_still_taken_off(tmp_path, adds_space):
  tokenizer = sentencepiece(add_space_prefix=adds_space)
  for name, text in tokenizer.files().items():
    (tmp_path / name).write_text(text, encoding="utf-8")
  again = Tokenizer.from_folder(tmp_path)
  assert (again.eos_ids, again.bos_id) == ((2,), 1)
  for text in ["ab a", " ab", "é b"]:
    assert again.encode(text, add_special_tokens=True) == tokenizer.encode(text, add_special_tokens=True)
    assert again.decode(again.encode(text)) == text == tokenizer.decode(tokenizer.encode(text))


def test_the_default_models_tokenizer_is_the_same_from_its_files(tmp_path):
  from specjax.checkpoints import resolve, vocabulary_map
  tokenizer = Tokenizer.from_gguf(resolve("smollm2-135m"))
  for name, text in tokenizer.files().items():
    (tmp_path / name).write_text(text, encoding="utf-8")
  again = Tokenizer.from_folder(tmp_path)
  assert vocabulary_map.require_same(tokenizer, again) is None
  assert (again.eos_ids, again.bos_id) == (tokenizer.eos_ids, tokenizer.bos_id)
  talk = [{"role": "user", "content": "Name 3 rivers: naïve ½"}]
  assert again.chat(talk) == tokenizer.chat(talk)


def test_what_is_not_written(tmp_path):
  config, weights, tokenizer = load(FIXTURES / "tiny_llama")
  write = lambda config: folder_writer.write_folder(tmp_path / "no", config, weights, tokenizer)
  with pytest.raises(CheckpointError, match="'gemma'.*llama, qwen2, mixtral"):
    write(dataclasses.replace(config, family="gemma"))
  with pytest.raises(CheckpointError, match="'interleaved'"):
    write(dataclasses.replace(config, rope_layout="interleaved"))
  with pytest.raises(CheckpointError, match="96 tokens and the embedding 40 rows"):
    write(dataclasses.replace(config, vocab_size=40))
  with pytest.raises(CheckpointError, match="divides the weights of the chosen experts by their sum"):
    moe = MoE(experts=4, chosen=2, width=config.mlp_width, renormalised=False)
    write(dataclasses.replace(config, family="mixtral", moe=moe))
  assert not (tmp_path / "no").exists()
  shards = files.write_folder(tmp_path / "shards", files.Model(), shards=2)
  with pytest.raises(CheckpointError, match="in shards"):
    folder_writer.write_folder(shards, config, weights)
  (tmp_path / "file").write_text("")
  with pytest.raises(CheckpointError, match="cannot be written"):
    folder_writer.write_folder(tmp_path / "file", config, weights)
