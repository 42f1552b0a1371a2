"""Every family of targets over several devices: its logits are those of one device."""
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import proposers
from specjax.models.decoder import Decoder
from specjax.parallel import mesh as mesh_lib
from specjax.parallel import placing
import many_devices

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
DECODERS = sorted(path.parent.name for path in (FIXTURES / "families").glob("*/config.json"))
OTHERS = ["encoder_decoder/t5_v11", "encoder_decoder/bart", "recurrent/mamba2"]


@jax.jit
def logits(target, tokens, cache):
  """Of a chain behind an empty cache: f32[B, T, V]."""
  width = tokens.shape[1]
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (*tokens.shape, width))
  positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
  return target.logits(target.forward(tokens, positions, mask, cache).hidden)


@many_devices.on(8)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_one_device(name):
  """Norms, biases, windows, learned positions, experts and what else a family has, each on two devices."""
  single = specjax.load(str(FIXTURES / "families" / name))[0]
  assert isinstance(single, Decoder)
  target = placing.shard(single, mesh_lib.make("data:2,expert:2,model:2"))
  splits = target.layout.splits
  assert splits.mlp == "model" and (splits.attention == "model") != (single.config.qk_norm == "whole")
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, single.config.num_tokens, (4, 12)), jnp.int32)
  found = logits(target, tokens, target.init_cache(4, 16))
  wanted = logits(single, tokens, single.init_cache(4, 16))
  assert found.shape[-1] == target.vocab_size >= single.vocab_size
  np.testing.assert_allclose(found[..., :single.vocab_size], wanted, rtol=2e-4, atol=2e-4)
  assert np.isneginf(found[..., single.config.num_tokens:]).all(), "what fills the vocabulary up is never emitted"


@many_devices.on(8)
@pytest.mark.parametrize("name", OTHERS)
def test_other_targets_are_divided_by_the_compiler(name):
  """Encoder-decoders and a recurrent model: weights by their names, text as on one device."""
  single = specjax.load(str(FIXTURES / name))[0]
  target = placing.shard(single, mesh_lib.make("data:2,model:4"))
  rng = np.random.default_rng(1)
  prompts = [rng.integers(3, single.vocab_size, size).tolist() for size in (9, 5, 7, 3)]
  run = functools.partial(specjax.generate, proposer=proposers.NGram(min_ngram=1, num_tokens=3), prompts=prompts,
                          max_new_tokens=12)
  whole = [x.sharding.is_fully_replicated for x in jax.tree.leaves(target.weights)]
  assert not all(whole), "some weights are divided"
  assert np.array_equal(run(target).tokens, run(single).tokens)


@many_devices.on(8)
@pytest.mark.parametrize("name", [*(f"families/{name}" for name in DECODERS), *OTHERS])
def test_what_is_read_into_parts_is_what_is_divided_later(name):
  """Fused rows in the order of devices, key/value heads that stand twice, experts: straight from the file."""
  for axes in ("data:2,expert:2,model:2", "model:8"):
    mesh = mesh_lib.make(axes)
    read, _ = placing.load(str(FIXTURES / name), mesh)
    divided = placing.shard(specjax.load(str(FIXTURES / name))[0], mesh)
    assert read.layout == divided.layout and read.config == divided.config
    for ours, theirs in zip(jax.tree.leaves(read.weights), jax.tree.leaves(divided.weights), strict=True):
      assert ours.sharding == theirs.sharding and np.array_equal(ours, theirs)
