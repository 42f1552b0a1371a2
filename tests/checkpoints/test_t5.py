"""T5 from Hugging Face folders: what is refused by name, and which of several spellings means what."""
import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints import CheckpointError

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "encoder_decoder"


@pytest.fixture
def edited(tmp_path):
  """`edited(name, config=.., tensors=.., generation=..)`: a copy of a folder with some keys and tensors changed; None
  removes one."""
  def make(name, config=None, tensors=None, generation=None):
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    for file, changes in (("config.json", config), ("generation_config.json", generation)):
      values = json.loads((folder / file).read_text()) | (changes or {})
      (folder / file).write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if tensors:
      held = load_file(folder / "model.safetensors") | tensors
      save_file({k: v for k, v in held.items() if v is not None}, folder / "model.safetensors")
    return str(folder)
  return make


@pytest.mark.parametrize("change, named", [
    ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj is 'gated-tanh'"),
    ({"dense_act_fn": "silu"}, "dense_act_fn is 'silu'"),
    ({"is_gated_act": True}, "is_gated_act is True"),
    ({"is_encoder_decoder": False}, "is_encoder_decoder is False"),
    ({"quantization_config": {"bits": 8}}, "quantization_config"),
    ({"relative_attention_num_buckets": 7}, "buckets=7"),
    ({"relative_attention_max_distance": 3}, "max_distance=3"),
    ({"d_kv": 0}, "d_kv is 0"),
    ({"model_type": "umt5"}, "model_type is 'umt5'.*t5, mt5"),
    ({"model_type": "mt5"}, "tie_word_embeddings is None.*mt5"),
    ({"num_layers": 3}, r"tensor 'encoder.block.2.layer.0.layer_norm.weight' is missing"),
    ({"decoder_start_token_id": 96}, r"opening=\(96,\): ids are 0 to 95")])
def test_keys_that_are_refused(edited, change, named):
  generation = {key: value for key, value in change.items() if key == "decoder_start_token_id"}
  with pytest.raises(CheckpointError, match=named):
    specjax.load(edited("t5", change, generation=generation))


def test_tokens_that_decoding_is_made_to_begin_with(edited):
  with pytest.raises(CheckpointError, match="forced_bos_token_id is 5"):
    specjax.load(edited("t5", generation={"forced_bos_token_id": 5}))


@pytest.mark.parametrize("config, generation, named", [
    (0, 3, "decoder_start_token_id is 3; config.json says 0"), (None, None, "decoder_start_token_id is None; an id")])
def test_the_token_that_decoding_begins_with(edited, config, generation, named):
  with pytest.raises(CheckpointError, match=named):
    specjax.load(edited("t5", {"decoder_start_token_id": config}, generation={"decoder_start_token_id": generation}))


def test_tensors(edited, tmp_path):
  embedding = load_file(FIXTURES / "t5" / "model.safetensors")["shared.weight"]
  unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
  copies = {"encoder.embed_tokens.weight": embedding, "lm_head.weight": embedding, unused: np.ones((8, 4), np.float32)}
  target, _ = specjax.load(edited("t5", tensors=copies))
  assert target.weights.head is None and target.config.scaled_head
  shutil.rmtree(tmp_path / "t5")
  with pytest.raises(CheckpointError, match="'decoder.embed_tokens.weight' differs from 'shared.weight'"):
    specjax.load(edited("t5", tensors={"decoder.embed_tokens.weight": embedding + 1}))
  shutil.rmtree(tmp_path / "t5")
  with pytest.raises(CheckpointError, match="'lm_head.weight' differs from 'shared.weight'"):
    specjax.load(edited("t5", tensors={"lm_head.weight": embedding + 1}))
  shutil.rmtree(tmp_path / "t5")
  with pytest.raises(CheckpointError, match="extra tensor 'decoder.block.0.layer.1.EncDecAttention.q.bias'"):
    specjax.load(edited("t5", tensors={"decoder.block.0.layer.1.EncDecAttention.q.bias": np.ones(32, np.float32)}))


def test_a_head_of_its_own(edited, tmp_path):
  """As published, as Transformers 5 writes it, and as mT5 has it."""
  head = load_file(FIXTURES / "t5_v11" / "model.safetensors")["lm_head.weight"]
  for change in ({}, {"tie_word_embeddings": True, "scale_decoder_outputs": False}, {"model_type": "mt5"}):
    target, _ = specjax.load(edited("t5_v11", change))
    assert np.array_equal(target.weights.head, head) and not target.config.scaled_head and not target.config.tied
    shutil.rmtree(tmp_path / "t5_v11")
  with pytest.raises(CheckpointError, match="'lm_head.weight' is missing"):
    specjax.load(edited("t5_v11", tensors={"lm_head.weight": None}))


def test_the_tokenizer_ends_inputs_and_spells_outputs():
  target, tokenizer = specjax.load(str(FIXTURES / "t5"))
  ids = tokenizer.encode("the model drafts, then the cache", add_special_tokens=True)
  assert ids[-1] == 1 and target.eos_ids == (1,) and tokenizer.decode(ids) == "the model drafts, then the cache"
  assert "".join(tokenizer.pieces(ids)) == "the model drafts, then the cache"
  assert tokenizer.decode([95]) == "" and tokenizer.decode([95], skip_special_tokens=False) == "<extra_id_0>"
