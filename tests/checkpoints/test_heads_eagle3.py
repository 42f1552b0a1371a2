"""Files of EAGLE-3 heads: three dialects, what they mean, and every way that they can be wrong."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import head_files as files
from specjax.cache import InFlight
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = ("eagle3_safeailab", "eagle3_specforge", "eagle3_speculators")
IDS = [0, 3, 4, 9, 10, 11, 17, 19]
LAYERS = "eagle_aux_hidden_state_layer_ids"


def load(folder, **options):
  """With a target of 8 layers where the layers must follow from it, and the meaning of norm_output said."""
  config = json.loads((folder / "config.json").read_text())
  if config["architectures"] == ["LlamaForCausalLMEagle3"] and config.get("norm_output"):
    config.setdefault("recurs_normed", False)
    (folder / "config.json").write_text(json.dumps(config))
  return load_head(folder, **options)


def open_copy(tmp_path, name, **changes):
  if name == "eagle3_safeailab":
    changes["config"] = {LAYERS: [2, 4, 5]} | changes.get("config", {})
  return load(files.changed(tmp_path, name, **changes), dtype=jnp.float32)


def logits_of(head, given):
  """What `head_reference.eagle3` computes, by the head: T entries at once, then one a recurrent step."""
  cache = head.init_cache(1, 1)
  table, count = jnp.asarray(given["embedding"]), len(given["tokens"])
  mask = jnp.tril(jnp.ones((count, count), bool))[None]
  hidden, recurring, block = head.forward(
      head.embed(table, jnp.asarray(given["tokens"])[None]), head.fused(jnp.asarray(given["features"])[None]),
      jnp.arange(count)[None], mask, cache)
  found = [head.logits(hidden)]
  for i, token in enumerate(given["later"]):
    hidden, recurring, new = head.forward(
        head.embed(table, jnp.asarray([[token]])), recurring[:, -1:], jnp.asarray([[count + i]]),
        jnp.ones((1, 1, count + i + 1), bool), cache, before=block)
    block = InFlight((jnp.concatenate([block.keys[0], new.keys[0]], 3),),
                     (jnp.concatenate([block.values[0], new.values[0]], 2),))
    found.append(head.logits(hidden))
  return np.concatenate(found, 1)[0]


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("name", FIXTURES)
def test_forward_is_the_published_one(tmp_path, name, recurs):
  head = open_copy(tmp_path, name)
  head = head.replace(config=dataclasses.replace(head.config, recurs_normed=recurs))
  given = files.golden(name)
  wanted, other = given["logits"], given["recurs_normed"]
  assert np.abs(wanted - other)[5:].max() > 0.1  # the two meanings differ in recurrent steps
  np.testing.assert_allclose(logits_of(head, given), other if recurs else wanted, atol=1e-4)


def test_norm_output_means_two_things(tmp_path):
  # speculators: what recurs is normed.
  assert load_head(files.HEADS / "eagle3_speculators").config.recurs_normed
  assert not open_copy(tmp_path, "eagle3_speculators", config={"norm_output": False}).config.recurs_normed
  assert not open_copy(tmp_path, "eagle3_speculators", without=["norm_output"]).config.recurs_normed
  # SpecForge: by its version, so it must be said.
  with pytest.raises(CheckpointError, match='norm_output is True; .* it means two things: add "recurs_normed"'):
    load_head(files.HEADS / "eagle3_specforge")
  for said in (False, True):
    folder = files.changed(tmp_path, "eagle3_specforge", config={"recurs_normed": said})
    assert load_head(folder).config.recurs_normed == said
  assert not load_head(files.changed(tmp_path, "eagle3_specforge", config={"norm_output": False})).config.recurs_normed
  assert not load_head(files.changed(tmp_path, "eagle3_specforge", without=["norm_output"])).config.recurs_normed


def test_what_the_dialects_say(tmp_path):
  first = open_copy(tmp_path, "eagle3_safeailab", config={"torch_dtype": "float16"})
  assert (first.fuse_norm, first.fuse_norms, first.embedding) == (None, None, None)
  assert (first.config.first_position, first.config.residual_normed) == (0, False)
  second = open_copy(tmp_path, "eagle3_specforge")
  assert len(second.fuse_norms) == 3 and second.fuse_norm is None and second.embedding.shape == (20, 8)
  assert (second.config.target_width, second.config.shape.width, second.config.first_position) == (6, 8, 0)
  third = open_copy(tmp_path, "eagle3_speculators")
  assert third.fuse_norm.shape == (24,) and third.fuse_norms is None and third.layer.query_norm.shape == (4,)
  assert (third.config.first_position, third.config.residual_normed) == (1, True)
  for head in (first, second, third):
    assert head.ids.tolist() == IDS and head.ids.dtype == jnp.int32
    assert (head.config.vocab_size, head.config.draft_vocab, head.config.max_context) == (20, 8, 64)


def test_layer_ids_are_inputs_or_outputs_of_layers(tmp_path):
  # Beginning with 1 inside of eagle_config: outputs of layers, so inputs of the next.
  assert open_copy(tmp_path, "eagle3_specforge").features == (2, 4, 6)
  nested = {"nested": ["eagle_config"]}
  assert open_copy(tmp_path, "eagle3_specforge", config={LAYERS: [2, 4, 5]}, **nested).features == (2, 4, 5)
  assert open_copy(tmp_path, "eagle3_speculators", config={LAYERS: [1, 3, 5]}).features == (1, 3, 5)
  folder = files.changed(tmp_path, "eagle3_safeailab", config={LAYERS: [2, 4, 6], "eagle_config": {LAYERS: [1, 3, 5]}})
  assert load_head(folder).features == (2, 4, 6)
  files.changed(tmp_path, "eagle3_safeailab", config={LAYERS: [1, 3, 5], "eagle_config": {LAYERS: [1, 3, 5]}})
  with pytest.raises(CheckpointError, match=r"\[1, 3, 5\]; eagle_config says inputs of layers \(2, 4, 6\)"):
    load_head(folder)


def test_layers_follow_from_the_target_without_ids():
  with pytest.raises(CheckpointError, match="they follow from the target's number of layers: pass target="):
    load_head(files.HEADS / "eagle3_safeailab")
  with pytest.raises(CheckpointError, match="pytorch_model.bin: the head is for a target of 20 token ids and width 8"):
    load_head(files.HEADS / "eagle3_safeailab", target=tiny.decoder(layers=8))
  target = dataclasses.replace(tiny.decoder(layers=8, vocab=20))
  small = dataclasses.replace(target.config, width=8)
  head = load_head(files.HEADS / "eagle3_safeailab", target=target.replace(config=small))
  assert head.features == (2, 4, 5)
  with pytest.raises(CheckpointError, match="needs a target of 3 layers or more; this one has 2"):
    load_head(files.HEADS / "eagle3_safeailab",
              target=target.replace(config=dataclasses.replace(small, layers=2)))


@pytest.mark.parametrize("kept", [jnp.float32, jnp.bfloat16])
def test_weights_take_the_type_asked_for(tmp_path, kept):
  folder = files.changed(tmp_path, "eagle3_speculators")
  head = load_head(folder, dtype=kept)
  assert {leaf.dtype for leaf in jax.tree.leaves(head.replace(ids=None))} == {jnp.dtype(kept)}
  assert load_head(folder).fuse.dtype == (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


@pytest.mark.parametrize("name", FIXTURES)
def test_written_tensors_are_those_read(tmp_path, name):
  dialect = name.removeprefix("eagle3_")
  source = files.tensors_of(files.HEADS / name)
  stored = source["fc.weight"].dtype
  folder = files.changed(tmp_path, name, config={LAYERS: [2, 4, 5]} if dialect == "safeailab" else {})
  head = load(folder, dtype=stored)
  save_head(head, tmp_path / "written", dialect)
  files.assert_written(tmp_path / "written", source)
  files.assert_same(load_head(tmp_path / "written", dtype=stored), head)
  # What is kept in more bits is written in fewer, when asked to, without a loss.
  save_head(load_head(folder, dtype=jnp.float32), tmp_path / "again", dialect, dtype=stored)
  files.assert_written(tmp_path / "again", source)
  assert json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == stored.name


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("features", [(2, 4, 6), (2, 3, 3), (3, 5, 6), (0, 2, 4)])
@pytest.mark.parametrize("dialect", ["safeailab", "specforge", "speculators"])
def test_written_configurations_are_those_read(tmp_path, dialect, features, recurs):
  head = open_copy(tmp_path, "eagle3_specforge")
  head = head.replace(config=dataclasses.replace(head.config, features=features, recurs_normed=recurs,
                                                 first_position=int(dialect == "speculators")))
  if dialect == "safeailab":
    if recurs:
      with pytest.raises(CheckpointError, match="no word for a normed output that recurs .norm_output."):
        save_head(head.replace(fuse_norms=None), tmp_path / "written", dialect)
      return
    head = head.replace(fuse_norms=None)
  save_head(head, tmp_path / "written", dialect)
  files.assert_same(load_head(tmp_path / "written", dtype=jnp.float32), head)


def test_the_whole_vocabulary_needs_no_map(tmp_path):
  more = {"lm_head.weight": np.random.default_rng(0).standard_normal((20, 8), np.float32)}
  config = {"draft_vocab_size": 20}
  assert open_copy(tmp_path, "eagle3_specforge", tensors=more, drop=["d2t", "t2d"], config=config).ids is None
  assert open_copy(tmp_path, "eagle3_specforge", tensors=more, drop=["d2t", "t2d"], without=["draft_vocab_size"]
                   ).ids is None
  # SpecForge writes a map even so, which then must say nothing.
  idle = {"d2t": np.zeros(20, np.int64), "t2d": np.ones(20, bool)}
  head = open_copy(tmp_path, "eagle3_specforge", tensors=more | idle, config=config)
  assert head.ids is None and head.head.shape == (20, 8)
  idle["d2t"][3] = 1
  with pytest.raises(CheckpointError, match="draft id 3 is the target's 4 by d2t and 3 by t2d"):
    open_copy(tmp_path, "eagle3_specforge", tensors=more | idle, config=config)
  save_head(head, tmp_path / "written", "speculators")
  assert not {"d2t", "t2d"} & files.tensors_of(tmp_path / "written").keys()


def test_d2t_is_an_offset_not_an_id(tmp_path):
  tensors = files.tensors_of(files.HEADS / "eagle3_specforge")
  assert (tensors["d2t"] + np.arange(8)).tolist() == IDS
  assert open_copy(tmp_path, "eagle3_specforge").ids.tolist() == IDS
  with pytest.raises(CheckpointError, match="d2t holds the target's ids; offsets are expected"):
    open_copy(tmp_path, "eagle3_specforge", tensors={"d2t": np.array(IDS)})


def test_d2t_and_t2d_must_agree(tmp_path):
  wrong = np.array(IDS) - np.arange(8)
  wrong[4] += 1
  with pytest.raises(CheckpointError, match="draft id 4 is the target's 11 by d2t and 10 by t2d"):
    open_copy(tmp_path, "eagle3_specforge", tensors={"d2t": wrong})
  mask = np.zeros(20, bool)
  mask[IDS[:-1]] = True
  with pytest.raises(CheckpointError, match="t2d marks 7 ids and there are 8 draft ids"):
    open_copy(tmp_path, "eagle3_specforge", tensors={"t2d": mask})
  with pytest.raises(CheckpointError, match="types float32 and bool; int64 and bool are expected"):
    open_copy(tmp_path, "eagle3_specforge", tensors={"d2t": (np.array(IDS) - np.arange(8)).astype(np.float32)})


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_is_needed_and_no_other_is(tmp_path, name):
  whole = files.tensors_of(files.HEADS / name)
  for key, value in whole.items():
    if key != "embed_tokens.weight":
      with pytest.raises(CheckpointError, match=f"tensor '{key}' is missing"):
        open_copy(tmp_path, name, drop=[key])
    with pytest.raises(CheckpointError, match=f"tensor '{key}' has shape .*; the configuration asks for "):
      open_copy(tmp_path, name, tensors={key: np.concatenate([value, value[:1]])})
  with pytest.raises(CheckpointError, match="extra tensor 'fc.bias' of shape .8,."):
    open_copy(tmp_path, name, tensors={"fc.bias": np.zeros(8, np.float32)})
  with pytest.raises(CheckpointError, match="tensor 'norm.weight' has type int8"):
    open_copy(tmp_path, name, tensors={"norm.weight": np.zeros(8, np.int8)})
  if name == "eagle3_specforge":
    assert open_copy(tmp_path, name, drop=["embed_tokens.weight"]).embedding is None


def test_the_layer_may_be_called_as_speculators_do(tmp_path):
  stored = files.tensors_of(files.HEADS / "eagle3_specforge")
  renamed = {name.replace("midlayer.", "layers.0."): value for name, value in stored.items()}
  old = [name for name in stored if name.startswith("midlayer.")]
  files.assert_same(open_copy(tmp_path, "eagle3_specforge", tensors=renamed, drop=old),
                    open_copy(tmp_path, "eagle3_specforge"))
  with pytest.raises(CheckpointError, match="extra tensor 'layers.0."):
    open_copy(tmp_path, "eagle3_specforge", tensors=renamed)


def test_frequencies_of_rotary_positions_are_not_read(tmp_path):
  open_copy(tmp_path, "eagle3_specforge", tensors={"midlayer.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)})


@pytest.mark.parametrize("key, value, why", [
  ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "only unscaled rotary positions"),
  ("rope_scaling", {"type": "yarn"}, "only unscaled rotary positions"),
  ("rope_parameters", {"rope_type": "default", "factor": 2.0}, "only unscaled rotary positions"),
  ("attention_bias", True, "supported: False or None"), ("mlp_bias", True, "supported: False or None"),
  ("hidden_act", "gelu", "supported: 'silu'"), ("num_hidden_layers", 2, "supported: 1"),
  ("sliding_window", 512, "only full attention"), ("layer_types", ["sliding_attention"], "only 'full_attention'"),
  ("quantization_config", {"bits": 4}, "supported: None"), ("partial_rotary_factor", 0.5, "supported: 1.0"),
  # Ignored, a head would turn all components of its queries and keys (speculators 613 and 738).
  ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "only unscaled rotary positions"),
  ("rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}, "only unscaled rotary positions"),
  ("model_type", "gpt_oss", "supported: 'llama' or 'qwen3'"), ("hidden_size", 8.0, "a positive whole number"),
  ("rms_norm_eps", 0, "a positive number"), ("vocab_size", True, "a positive whole number"),
])
@pytest.mark.parametrize("name", ["eagle3_safeailab", "eagle3_speculators"])
def test_unsupported_arithmetic_is_refused_by_name(tmp_path, name, key, value, why):
  inner = ["transformer_layer_config"] if name == "eagle3_speculators" else []
  changes = {"use_sliding_window": True} if key == "sliding_window" else {}
  folder = files.changed(tmp_path, name, config={key: value} | changes, nested=inner)
  with pytest.raises(CheckpointError, match=f"config.json: {'.'.join([*inner, key])} is .*{why}"):
    load(folder)


@pytest.mark.parametrize("name, key, value, why", [
  ("eagle3_safeailab", "architectures", ["LlamaForCausalLMEagle4"], "EAGLE-4 is not supported"),
  ("eagle3_speculators", "speculators_model_type", "dflash", "only 'eagle3', 'mtp', 'peagle' are supported"),
  ("eagle3_speculators", "fc_norm", True, "with norm_before_fc, which is true, it must be false"),
  ("eagle3_speculators", "norm_before_residual", "yes", "true or false is required"),
  ("eagle3_speculators", LAYERS, [2, -1], "a list of whole numbers from 0"),
  ("eagle3_safeailab", "eagle_config", {"use_aux_hidden_state": False}, "supported: True"),
  ("eagle3_safeailab", "eagle_config", {"moe": 3}, "nothing is known of this key"),
  ("eagle3_safeailab", "eagle_config", [1], "an object is required"),
  ("eagle3_safeailab", "draft_vocab_size", 21, "is greater than vocab_size 20"),
])
def test_unsupported_heads_are_refused_by_name(tmp_path, name, key, value, why):
  with pytest.raises(CheckpointError, match=f"{key}.*{why}"):
    load(files.changed(tmp_path, name, config={LAYERS: [2, 4, 5]} | {key: value}))


def test_a_dialect_must_be_able_to_say_it(tmp_path):
  head = open_copy(tmp_path, "eagle3_speculators")
  for dialect in ("safeailab", "specforge"):
    with pytest.raises(CheckpointError, match="no word for the norm of fused features .norm_before_fc.*'speculators'"):
      save_head(head, tmp_path / "written", dialect)
  with pytest.raises(CheckpointError, match="dialect 'vllm' is unknown; of Eagle3Head there are safeailab, specforge"):
    save_head(head, tmp_path / "written", "vllm")
  assert not (tmp_path / "written").exists()
  save_head(head, tmp_path / "written")  # the first dialect that can
  assert json.loads((tmp_path / "written" / "config.json").read_text())["speculators_model_type"] == "eagle3"
  files.assert_same(load_head(tmp_path / "written", dtype=jnp.float32), head)
  head = open_copy(tmp_path, "eagle3_specforge")
  head = head.replace(config=dataclasses.replace(head.config, features=(1, 3)))
  with pytest.raises(CheckpointError, match=r"cannot say that the layers \(1, 3\) are read"):
    save_head(head, tmp_path / "written", "specforge")
  with pytest.raises(CheckpointError, match="dict is no head that is written; PEagleHead, Eagle3Head"):
    save_head({}, tmp_path / "written")


def test_files_that_are_not_there(tmp_path):
  with pytest.raises(CheckpointError, match="is not there; pass the folder of a draft head"):
    load_head(tmp_path / "nothing")
  with pytest.raises(CheckpointError, match="config.json: is not there"):
    load_head(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(CheckpointError, match="has no tensors: one of .*model.safetensors"):
    load_head(tmp_path)
  (tmp_path / "model.safetensors").write_bytes(b"no")
  for path in (tmp_path, tmp_path / "model.safetensors"):
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
      load_head(path)
  with pytest.raises(CheckpointError, match="is not the file of a head's tensors"):
    load_head(tmp_path / "config.json")
  folder = files.changed(tmp_path, "eagle3_specforge", config={"recurs_normed": False})
  files.assert_same(load_head(folder / "model.safetensors"), load_head(folder))


def test_an_unknown_kind_is_refused(tmp_path):
  names = [name for name in files.tensors_of(files.HEADS / "eagle3_safeailab") if name.startswith("midlayer.")]
  with pytest.raises(CheckpointError, match="is no draft head of a known kind"):
    load(files.changed(tmp_path, "eagle3_safeailab", drop=names))
