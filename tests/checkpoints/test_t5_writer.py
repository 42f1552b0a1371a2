"""Encoder-decoders that are written: read again they are the same bits, ids and settings; and what is not written."""
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax
from specjax.checkpoints import CheckpointError
from specjax.checkpoints import t5
from specjax.checkpoints import t5_writer

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "encoder_decoder"


@pytest.mark.parametrize("name", ["t5", "t5_v11"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_that_is_written_and_read_is_the_same_bit_by_bit(tmp_path, name, dtype):
  target, tokenizer = specjax.load(str(FIXTURES / name), dtype=dtype)
  specjax.save(tmp_path, target, tokenizer)
  again, other = specjax.load(str(tmp_path), dtype=dtype)
  assert again.config == target.config and other.eos_ids == tokenizer.eos_ids
  jax.tree.map(np.testing.assert_array_equal, again.weights, target.weights)
  text = "the model drafts, then the cache"
  assert other.encode(text, add_special_tokens=True) == tokenizer.encode(text, add_special_tokens=True)


@pytest.mark.parametrize("name", ["t5", "t5_v11"])
def test_files_say_what_those_of_transformers_say(tmp_path, name):
  target, tokenizer = specjax.load(str(FIXTURES / name))
  specjax.save(tmp_path, target, tokenizer)
  theirs, ours = (load_file(folder / "model.safetensors") for folder in (FIXTURES / name, tmp_path))
  assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], value) for key, value in theirs.items())
  for file, others in (("config.json", {"dropout_rate", "tie_word_embeddings"}), ("generation_config.json", set())):
    known, written = (json.loads((folder / file).read_text()) for folder in (FIXTURES / name, tmp_path))
    for key in written.keys() & known.keys() - others:
      assert written[key] == known[key], (file, key)
  assert known["decoder_start_token_id"] == written["decoder_start_token_id"]


def test_what_is_not_written(tmp_path):
  config, weights = t5.read_folder(FIXTURES / "t5")
  write = lambda **changes: t5_writer.write_folder(tmp_path / "no", dataclasses.replace(config, **changes), weights)
  with pytest.raises(CheckpointError, match="'umt5' is not written .written: t5, mt5"):
    write(family="umt5")
  with pytest.raises(CheckpointError, match="scaled_head=False, tied=True"):
    write(scaled_head=False)
  with pytest.raises(CheckpointError, match="scaled_head=True, tied=False"):
    write(tied=False)
  with pytest.raises(CheckpointError, match="tied=True: a folder of mt5"):
    write(family="mt5", scaled_head=False)
  with pytest.raises(CheckpointError, match="activation='gelu', gated=True"):
    write(activation="gelu", gated=True)
  assert not (tmp_path / "no").exists()
