"""Heads for targets whose layers are not Llama's."""
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import proposers
from specjax.training import dflash
from specjax.training import eagle
from specjax.training import eagle3
from specjax.training import hydra
from specjax.training import starting_layers

FAMILIES = pathlib.Path(__file__).parents[1] / "fixtures" / "families"
IDS = np.arange(4, 90, 2)

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_layers_of_llama_are_taken_as_they_are():
  target = specjax.load(str(FAMILIES / "llama3"))[0]
  assert starting_layers.last(target, 2) == target.weights.layers[-2:]


@pytest.mark.parametrize("name", ["gemma3", "olmo2", "gpt2", "gpt_neox", "qwen3"])
def test_heads_begin_and_draft_for_every_kind_of_target(name):
  target = specjax.load(str(FAMILIES / name))[0]
  key, prompts = jax.random.key(0), [[5, 6, 7, 8, 9], [7, 7, 7]]
  made = [proposers.Eagle(head=eagle3.init(target, IDS, (1,), key), num_tokens=2),
          proposers.Eagle(head=eagle.init(target, IDS, key), num_tokens=2),
          proposers.Hydra(head=hydra.init(target, IDS, 2, prefix=True), num_tokens=2),
          proposers.DFlash(head=dflash.init(target, IDS, (1,), layers=2, block=3, mask_id=3, key=key), num_tokens=2)]
  plain = specjax.generate(target, proposers.Plain(), prompts, max_new_tokens=8)
  for proposer in made[:1] if name != "gemma3" else made:
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(proposer.head) if x.dtype.kind == "f")
    drafted = specjax.generate(target, proposer, prompts, max_new_tokens=8)
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    assert drafted.counters.drafted_tokens.sum() > 0


def test_a_drawn_layer_has_the_targets_sizes():
  target = specjax.load(str(FAMILIES / "gemma3"))[0]
  layer, = starting_layers.last(target)
  c = target.config
  assert layer.qkv.shape == ((c.heads + 2 * c.kv_heads) * c.head_width, c.width)
  assert layer.gate_up.shape == (2 * c.mlp_width, c.width) and layer.down.shape == (c.width, c.mlp_width)
  plain = dataclasses.replace(c, post_norm=False, qk_norm="", activation="silu", pre_norm=True)
  assert plain.plain_layers and not c.plain_layers
