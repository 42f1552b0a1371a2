"""Files of MTP modules: what they mean, by an independent transcription, and every way that they can be wrong."""
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import head_files as files
from specjax.cache import InFlight
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.models.mtp import MtpHead
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = {"mtp_speculators": "speculators", "mtp_qwen": "qwen", "mtp_mimo": "mimo"}
OURS = ("mtp.", "mtp_layers.", "model.mtp_layers.")  # of a whole model the rest is passed over
INNER = {"mtp_speculators": ["transformer_layer_config"], "mtp_qwen": ["text_config"], "mtp_mimo": []}


def open_copy(tmp_path, name, **changes):
  return load_head(files.changed(tmp_path, name, **changes), dtype=jnp.float32)


def stored(name):
  """The tensors of the module."""
  return {key: value for key, value in files.tensors_of(files.HEADS / name).items() if key.startswith(OURS)}


def computed(head, given):
  """What `head_reference.mtp` computes, by the head: T entries at once, then one a recurrent step."""
  cache = head.init_cache(1, 1)
  table, count = jnp.asarray(given["embedding"]), len(given["tokens"])
  hidden, recurring, block = head.forward(
      head.embed(table, jnp.asarray(given["tokens"])[None]), head.fused(jnp.asarray(given["hidden"])[None]),
      jnp.arange(count)[None], jnp.tril(jnp.ones((count, count), bool))[None], cache)
  found = [hidden]
  for i, token in enumerate(given["later"]):
    hidden, recurring, new = head.forward(
        head.embed(table, jnp.asarray([[token]])), recurring[:, -1:], jnp.asarray([[count + i]]),
        jnp.ones((1, 1, count + i + 1), bool), cache, before=block)
    join = lambda axis: lambda old, more: jnp.concatenate([old, more], axis)
    block = InFlight(tuple(map(join(3), block.keys, new.keys)), tuple(map(join(2), block.values, new.values)))
    found.append(hidden)
  made = jnp.concatenate(found, 1)
  return np.asarray(made)[0], np.asarray(head.logits(made, jnp.asarray(given["head"])))[0]


@pytest.mark.parametrize("name", FIXTURES)
def test_forward_is_the_published_one(name):
  head, given = load_head(files.HEADS / name, dtype=jnp.float32), files.golden(name)
  made, logits = computed(head, given)
  np.testing.assert_allclose(made, given["made"], atol=1e-4)
  np.testing.assert_allclose(logits, given["logits"], atol=1e-4)


@pytest.mark.parametrize("name, mistake", [
    ("mtp_speculators", "hidden first"), ("mtp_mimo", "hidden first"), ("mtp_speculators", "norms exchanged"),
    ("mtp_mimo", "no bias"), ("mtp_qwen", "no gate"), ("mtp_qwen", "norms as stored"), ("mtp_qwen", "all of it turned"),
    ("mtp_qwen", "gates behind all queries"), ("mtp_speculators", "what recurs is not normed"),
    ("mtp_speculators", "hidden states one token late")])
def test_a_likely_mistake_gives_other_values(name, mistake, monkeypatch):
  """The reference tells them apart: each of these a loader or an engine has done."""
  head, given = load_head(files.HEADS / name, dtype=jnp.float32), files.golden(name)
  layer = head.layer
  if mistake == "hidden first":
    head = head.replace(fuse=jnp.roll(head.fuse, 8, axis=1))
  elif mistake == "norms exchanged":
    head = head.replace(token_norm=head.feature_norm, feature_norm=head.token_norm)
  elif mistake == "no bias":
    head = head.replace(layer=layer.replace(qkv_bias=None))
  elif mistake == "no gate":
    head = head.replace(layer=layer.replace(gate=None))
  elif mistake == "norms as stored":
    head = head.replace(norm=head.norm - 1)
  elif mistake == "all of it turned":
    head = head.replace(config=head.config.__class__(**vars(head.config) | {"shape": head.config.shape.__class__(
        **vars(head.config.shape) | {"rotary_width": None})}))
  elif mistake == "gates behind all queries":
    both = jnp.asarray(stored(name)["mtp.layers.0.self_attn.q_proj.weight"], jnp.float32)
    head = head.replace(layer=layer.replace(qkv=layer.qkv.at[:16].set(both[:16]), gate=both[16:]))
  elif mistake == "what recurs is not normed":
    apply = MtpHead.apply
    def unnormed(self, *given):
      hidden, _, block = apply(self, *given)
      return hidden, apply(self.replace(norm=jnp.ones_like(self.norm)), *given)[0], block
    monkeypatch.setattr(MtpHead, "apply", unnormed)
  else:
    given = given | {"hidden": np.roll(given["hidden"], 1, axis=0)}
  assert np.abs(computed(head, given)[1] - given["logits"]).max() > 0.05


def test_what_the_files_say():
  first, second, third = (load_head(files.HEADS / name) for name in FIXTURES)
  for head in (first, second, third):
    assert type(head) is MtpHead and head.ids is None and head.features == () and head.embedding is None
    assert (head.config.vocab_size, head.config.draft_vocab, head.config.max_context) == (20, 20, 64)
  assert first.layer.query_norm.shape == (4,) and first.layer.gate is None and first.layer.qkv_bias is None
  assert second.layer.gate.shape == (16, 8) and second.config.shape.rotary_width == 2
  assert third.layer.qkv_bias.shape == (32,) and third.layer.query_norm is None
  assert first.config.shape.rotary_width is None and third.config.shape.rotary_width is None
  # Stored around 0, used around 1.
  assert np.abs(np.asarray(stored("mtp_qwen")["mtp.norm.weight"], np.float32)).max() < 1 < second.norm.max()


@pytest.mark.parametrize("name", FIXTURES)
def test_written_tensors_are_those_read(tmp_path, name):
  head = load_head(files.HEADS / name, dtype=ml_dtypes.bfloat16)
  save_head(head, tmp_path / "written", FIXTURES[name])
  files.assert_written(tmp_path / "written", stored(name))
  files.assert_same(load_head(tmp_path / "written", dtype=ml_dtypes.bfloat16), head)
  # speculators' layout holds any of them, and is what is written if nothing else is asked for.
  save_head(head, tmp_path / "other")
  assert json.loads((tmp_path / "other" / "config.json").read_text())["speculators_model_type"] == "mtp"
  files.assert_same(load_head(tmp_path / "other", dtype=ml_dtypes.bfloat16), head)


def test_a_draft_vocabulary_and_layers_of_llama_are_written_and_read(tmp_path):
  head = tiny.mtp(tiny.decoder(), (1, 2, 5, 23))
  save_head(head, tmp_path / "written")
  files.assert_same(load_head(tmp_path / "written", target=tiny.decoder()), head)
  config = json.loads((tmp_path / "written" / "config.json").read_text())
  assert config["draft_vocab_size"] == 4 and config["transformer_layer_config"]["model_type"] == "llama"
  with pytest.raises(CheckpointError, match="tensor 'd2t' is missing"):
    open_copy(tmp_path, "mtp_qwen", config={"draft_vocab_size": 8})


def test_what_a_dialect_has_no_word_for_is_refused(tmp_path):
  gated, normed, biased = (load_head(files.HEADS / name) for name in ("mtp_qwen", "mtp_speculators", "mtp_mimo"))
  both = normed.replace(layer=normed.layer.replace(qkv_bias=biased.layer.qkv_bias))
  for head, dialect in ((normed, "qwen"), (biased, "qwen"), (normed, "mimo"), (gated, "mimo"), (both, "speculators"),
                        (normed.replace(config=gated.config), "speculators"), (both, None)):
    with pytest.raises(CheckpointError, match="has no word for this layer"):
      save_head(head, tmp_path / "written", dialect)
  with pytest.raises(CheckpointError, match="dialect 'vllm' is unknown; of MtpHead there are speculators, qwen, mimo"):
    save_head(gated, tmp_path / "written", "vllm")


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_is_needed_and_no_other_is(tmp_path, name):
  for key, value in stored(name).items():
    with pytest.raises(CheckpointError, match=f"tensor '{key}' is missing"):
      open_copy(tmp_path, name, drop=[key])
    with pytest.raises(CheckpointError, match=f"tensor '{key}' has shape .*; the configuration asks for "):
      open_copy(tmp_path, name, tensors={key: np.concatenate([value, value[:1]])})
  layer = next(key for key in stored(name) if key.endswith("input_layernorm.weight")).removesuffix("input_layernorm.weight")
  for extra in (layer + "self_attn.o_proj.bias", layer.replace("0", "1") + "mlp.up_proj.weight", "embed_tokens.weight"):
    with pytest.raises(CheckpointError, match=f"extra tensor '{extra}'"):
      open_copy(tmp_path, name, tensors={extra: np.ones(8, np.float32)})


@pytest.mark.parametrize("name", ["mtp_qwen", "mtp_mimo"])
def test_a_module_alone_is_the_one_of_the_model(tmp_path, name):
  base = [key for key in files.tensors_of(files.HEADS / name) if not key.startswith(OURS)]
  assert len(base) >= 3
  files.assert_same(open_copy(tmp_path, name, drop=base), load_head(files.HEADS / name, dtype=jnp.float32))


def test_names_within_a_model_are_as_good_in_speculators_layout(tmp_path):
  tensors = stored("mtp_speculators")
  found = open_copy(tmp_path, "mtp_speculators", drop=list(tensors),
                    tensors={f"model.{key}": value for key, value in tensors.items()})
  files.assert_same(found, load_head(files.HEADS / "mtp_speculators", dtype=jnp.float32))


@pytest.mark.parametrize("name, key, why", [
    ("mtp_qwen", "mtp.layers.0.mlp.experts.0.up_proj.weight", r"is of experts \(MoE\)"),
    ("mtp_qwen", "mtp.layers.0.mlp.gate.weight", r"is of experts \(MoE\)"),
    ("mtp_speculators", "mtp_layers.0.mlp.experts.gate_up_proj", r"is of experts \(MoE\)"),
    ("mtp_speculators", "mtp_layers.0.self_attn.kv_a_proj_with_mqa.weight", r"is of latent attention \(MLA\)"),
    ("mtp_mimo", "model.layers.61.eh_proj.weight", "is of DeepSeek's or GLM's module")])
def test_modules_that_are_not_supported_are_refused_by_name(tmp_path, name, key, why):
  with pytest.raises(CheckpointError, match=f"tensor '{key}' {why}.* not supported; MTP modules of dense layers"):
    open_copy(tmp_path, name, tensors={key: np.ones((4, 8), np.float32)})


@pytest.mark.parametrize("name, key, value, why", [
    ("mtp_speculators", "model_type", "qwen3_5_moe_text", "supported: 'llama' or 'qwen2' or 'qwen3' or 'qwen3_next'"),
    ("mtp_speculators", "attention_bias", True, "supported: False or None"),
    ("mtp_speculators", "rope_scaling", {"type": "linear", "factor": 2.0}, "only unscaled rotary positions"),
    ("mtp_speculators", "layer_types", ["sliding_attention"], "only 'full_attention'"),
    ("mtp_qwen", "model_type", "qwen3", "supported: 'qwen3_next' or 'qwen3_5_text'"),
    ("mtp_qwen", "attn_output_gate", False, "supported: True"), ("mtp_qwen", "output_gate_type", "swish", "'sigmoid'"),
    ("mtp_qwen", "mtp_num_hidden_layers", 2, "supported: 1"),
    ("mtp_qwen", "mtp_use_dedicated_embeddings", True, "supported: False"),
    ("mtp_mimo", "num_nextn_predict_layers", 3, "supported: 1"), ("mtp_mimo", "model_type", "qwen2", "supported: 'mimo'"),
    ("mtp_mimo", "attention_bias", False, "supported: True"), ("mtp_mimo", "hidden_act", "gelu", "supported: 'silu'")])
def test_unsupported_arithmetic_is_refused_by_name(tmp_path, name, key, value, why):
  with pytest.raises(CheckpointError, match=f"config.json: .*{key} is .*{why}"):
    open_copy(tmp_path, name, config={key: value}, nested=INNER[name])


@pytest.mark.parametrize("name, nested, key", [
    ("mtp_speculators", ["transformer_layer_config"], "head_dim"), ("mtp_qwen", ["text_config"], "head_dim"),
    ("mtp_qwen", ["text_config", "rope_parameters"], "partial_rotary_factor")])
def test_what_families_have_unlike_defaults_of_must_be_said(tmp_path, name, nested, key):
  with pytest.raises(CheckpointError, match=f"{key} is None; a positive"):
    open_copy(tmp_path, name, nested=nested, without=[key])


def test_a_part_of_a_head_that_has_no_pairs_is_refused(tmp_path):
  with pytest.raises(CheckpointError, match="partial_rotary_factor is 0.25; rotary_width=1: it must be even"):
    open_copy(tmp_path, "mtp_qwen", nested=["text_config", "rope_parameters"], config={"partial_rotary_factor": 0.25})


def test_a_head_for_another_target_is_refused():
  with pytest.raises(CheckpointError, match="the head is for a target of 20 token ids and width 8, .* 24 and 16"):
    load_head(files.HEADS / "mtp_mimo", target=tiny.decoder())
