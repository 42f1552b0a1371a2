"""Whisper from Hugging Face folders: what is refused by name, and what the decoder begins with."""
import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints import CheckpointError
from specjax.checkpoints import whisper

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures" / "encoder_decoder" / "whisper"


@pytest.fixture
def edited(tmp_path):
  """`edited(config=.., generation=.., tensors=..)`: a copy of the folder with keys changed and tensors added."""
  def make(config=None, generation=None, tensors=None):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    shutil.copytree(FOLDER, folder)
    for file, changes in (("config.json", config), ("generation_config.json", generation)):
      values = json.loads((folder / file).read_text()) | (changes or {})
      (folder / file).write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if tensors:
      save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    return str(folder)
  return make


@pytest.mark.parametrize("change, generation, named", [
    ({"scale_embedding": True}, {}, "scale_embedding is True"),
    ({"activation_function": "relu"}, {}, "activation_function is 'relu'"),
    ({"num_mel_bins": 80}, {}, r"conv1.weight' has shape \(32, 8, 3\)"),
    ({"max_source_positions": 30}, {}, "encoder.embed_positions.weight' has shape"),
    ({"decoder_attention_heads": 2}, {}, "encoder_attention_heads is 4; decoder_attention_heads is 2"),
    ({}, {"no_timestamps_token_id": None}, "no_timestamps_token_id is None"),
    ({}, {"task_to_id": None}, "task_to_id must name"),
    ({}, {"language": "german"}, r"language is 'german'; allowed are <\|en\|>, <\|de\|>"),
    ({}, {"forced_decoder_ids": [[4, 91]]}, "forced_decoder_ids is"),
    ({}, {"suppress_tokens": [96]}, r"banned_ids=\(96,\)"),
    ({}, {"begin_suppress_tokens": 5}, "begin_suppress_tokens is 5; a list of ids"),
    ({}, {"decoder_start_token_id": 89}, "decoder_start_token_id is 89; config.json says 90")])
def test_keys_that_are_refused(edited, change, generation, named):
  with pytest.raises(CheckpointError, match=named):
    specjax.load(edited(change, generation))


def test_what_the_decoder_begins_with(edited):
  """Start, language, task, no times; a model of English alone names neither language nor task."""
  target, tokenizer = specjax.load(str(FOLDER))
  assert target.opening == (90, 91, 93, 95) == whisper.opening(tokenizer) and target.config.banned_ids == (90, 94)
  german = target.with_opening(*whisper.opening(tokenizer, "de", "translate"))
  assert german.opening == (90, 92, 94, 95)
  assert whisper.opening(tokenizer, None) == (90, 95)
  with pytest.raises(ValueError, match=r"language='fr'.*no token <\|fr\|>"):
    whisper.opening(tokenizer, "fr")
  with pytest.raises(ValueError, match="task='sing'"):
    whisper.opening(tokenizer, "en", "sing")
  for config, generation, wanted in (
      ({}, {"language": "de", "task": "translate"}, (90, 92, 94, 95)), ({}, {"language": "<|de|>"}, (90, 92, 93, 95)),
      ({}, {"forced_decoder_ids": [[1, None], [2, 94]]}, (90, 91, 94, 95)),
      ({"forced_decoder_ids": [[1, 92], [2, 93], [3, 95]]}, {}, (90, 92, 93, 95)),
      ({"forced_decoder_ids": [[1, 92]]}, {"forced_decoder_ids": [[2, 94]]}, (90, 91, 94, 95))):
    assert specjax.load(edited(config, generation))[0].opening == wanted
  english = specjax.load(edited(generation={"lang_to_id": None, "task_to_id": None}))[0]
  assert english.opening == (90, 95) and target.sound == (8, 80)


def test_tensors(edited):
  """A copy of the embedding is its head; keys have no bias."""
  embedding = load_file(FOLDER / "model.safetensors")["model.decoder.embed_tokens.weight"]
  target, _ = specjax.load(edited(tensors={"proj_out.weight": embedding}))
  for layer in (*target.weights.encoder, *target.weights.layers):
    assert not layer.qkv_bias[32:64].any() and layer.qkv_bias[:32].all() and layer.qkv_bias[64:].all()
  assert all(not cross.key_value_bias[:32].any() and cross.key_value_bias[32:].all() for cross in target.weights.cross)
  with pytest.raises(CheckpointError, match="'proj_out.weight' differs"):
    specjax.load(edited(tensors={"proj_out.weight": embedding + 1}))
  with pytest.raises(CheckpointError, match="extra tensor 'model.encoder.layers.0.self_attn.k_proj.bias'"):
    specjax.load(edited(tensors={"model.encoder.layers.0.self_attn.k_proj.bias": np.ones(32, np.float32)}))
