"""BART, mBART and Marian from Hugging Face folders: what is refused by name, and which spelling means what."""
import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints import bart
from specjax.checkpoints import CheckpointError

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "encoder_decoder"


@pytest.fixture
def edited(tmp_path):
  """`edited(name, config=.., generation=.., tensors=..)`: a copy of a folder with some keys changed, where None removes
  one, and with `tensors` made of what it held."""
  def make(name, config=None, generation=None, tensors=None):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    shutil.copytree(FIXTURES / name, folder)
    for file, changes in (("config.json", config), ("generation_config.json", generation)):
      values = json.loads((folder / file).read_text()) | (changes or {})
      (folder / file).write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if tensors:
      save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return str(folder)
  return make


@pytest.mark.parametrize("name, change, named", [
    ("bart", {"normalize_before": True}, "normalize_before is True"),
    ("bart", {"activation_function": "tanh"}, "activation_function is 'tanh'"),
    ("bart", {"encoder_attention_heads": 5}, "encoder_attention_heads is 5; decoder_attention_heads is 4"),
    ("bart", {"decoder_ffn_dim": 32}, "encoder_ffn_dim is 64; decoder_ffn_dim is 32"),
    ("bart", {"encoder_attention_heads": 5, "decoder_attention_heads": 5}, "d_model=32 must be a multiple"),
    ("bart", {"max_position_embeddings": 99}, r"embed_positions.weight' has shape \(102, 32\).*\(101, 32\)"),
    ("bart", {"encoder_layers": 4}, "'model.encoder.layers.3.self_attn.q_proj.weight' is missing"),
    ("bart", {"quantization_config": {"bits": 8}}, "quantization_config"),
    ("mbart", {"force_bos_token_to_be_generated": True}, "say which by forced_bos_token_id"),
    ("mbart", {"add_final_layer_norm": False}, "add_final_layer_norm is False"),
    ("mbart", {"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
    ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings is False"),
    ("marian", {"decoder_vocab_size": 90}, "decoder_vocab_size is 90.*vocab_size=96"),
    ("marian", {"static_position_embeddings": False}, "static_position_embeddings is False"),
    ("marian", {"model_type": "pegasus"}, "model_type is 'pegasus'.*bart, mbart, marian")])
def test_keys_that_are_refused(edited, name, change, named):
  with pytest.raises(CheckpointError, match=named):
    specjax.load(edited(name, change))


def test_a_mask_behind_the_rows_is_no_id(edited):
  """As facebook/bart-large-cnn has it: the tokenizer's last id, a control token, has no row."""
  folder = pathlib.Path(edited("bart", {"vocab_size": 95, "extra_pos_embeddings": 0}, tensors=lambda tensors: {
      name: value[..., :95] if name == "final_logits_bias" else value[:95] if value.shape[0] == 96 else value
      for name, value in tensors.items()}))
  target, tokenizer = specjax.load(str(folder))
  assert (target.vocab_size, tokenizer.vocab_size) == (95, 96) and tokenizer.is_special(95)
  path = folder / "tokenizer.json"
  described = json.loads(path.read_text())
  described["added_tokens"] = [token | {"special": token["id"] != 95} for token in described["added_tokens"]]
  path.write_text(json.dumps(described))
  with pytest.raises(CheckpointError, match="96 tokens and the embedding only 95 rows"):
    specjax.load(str(folder))


@pytest.mark.parametrize("name, change, named", [
    ("bart", {"forced_bos_token_id": [2]}, "forced_bos_token_id is None; an id is expected"),
    ("bart", {"decoder_start_token_id": 3}, "decoder_start_token_id is 3; config.json says 1"),
    ("marian", {"bad_words_ids": [[4, 5]]}, r"bad_words_ids .*not \[\[4, 5\]\]"),
    ("marian", {"suppress_tokens": [4]}, r"suppress_tokens is \[4\]"),
    ("marian", {"bad_words_ids": [[96]]}, r"banned_ids=\(96,\): ids are 0 to 95")])
def test_generation_keys_that_are_refused(edited, name, change, named):
  with pytest.raises(CheckpointError, match=named):
    specjax.load(edited(name, generation=change))


def test_what_a_family_is():
  configs = {name: specjax.load(str(FIXTURES / name))[0].config for name in bart.FAMILIES}
  assert {name: config.opening for name, config in configs.items()} == {"bart": (1, 2), "mbart": (95,), "marian": (0,)}
  assert [configs[name].banned_ids for name in ("bart", "mbart", "marian")] == [(), (), (0,)]
  assert [configs[name].post_norm for name in ("bart", "mbart", "marian")] == [True, False, True]
  assert configs["bart"].embedding_scale == 1.0 and configs["mbart"].embedding_scale == 32 ** 0.5
  assert configs["marian"].eos_ids == (1,) and configs["marian"].activation == "silu"


def test_older_files(edited):
  """Without a prefix, with copies of the embedding, with sinusoids, or without a bias of the logits."""
  embedding = load_file(FIXTURES / "bart" / "model.safetensors")["model.shared.weight"]
  bare = lambda held: {k.removeprefix("model."): v for k, v in held.items() if k != "final_logits_bias"} | {
      "encoder.embed_tokens.weight": embedding, "lm_head.weight": embedding, "encoder.version": np.ones(1, np.float32)}
  target, _ = specjax.load(edited("bart", tensors=bare))
  assert target.weights.logits_bias is None and np.array_equal(target.weights.embedding, embedding)
  renamed = lambda held: {("model.decoder.embed_tokens.weight" if "shared" in k else k): v for k, v in held.items()}
  assert np.array_equal(specjax.load(edited("bart", tensors=renamed))[0].weights.embedding, embedding)
  with pytest.raises(CheckpointError, match="'lm_head.weight' differs from 'model.shared.weight'"):
    specjax.load(edited("bart", tensors=lambda held: held | {"lm_head.weight": embedding + 1}))
  own = edited("bart", {"tie_word_embeddings": False}, tensors=lambda held: held | {"lm_head.weight": embedding + 1})
  assert np.array_equal(specjax.load(own)[0].weights.head, embedding + 1)
  sinusoids = bart.sinusoids(100, 32)
  given = lambda held: held | {f"model.{stack}.embed_positions.weight": sinusoids + i
                               for i, stack in enumerate(("encoder", "decoder"))}
  target, _ = specjax.load(edited("marian", tensors=given))
  assert np.array_equal(target.weights.encoder_positions, sinusoids)
  assert np.array_equal(target.weights.positions, sinusoids + 1)


def test_a_folder_with_two_sentencepiece_files_only(edited):
  folder = pathlib.Path(edited("marian"))
  (folder / "tokenizer.json").unlink()
  (folder / "source.spm").write_bytes(b"")
  with pytest.raises(CheckpointError, match="source.spm and target.spm.*tokenizer.json"):
    specjax.load(str(folder))
