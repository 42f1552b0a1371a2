"""Sizes from configurations alone: counted against published totals, and against weights that exist."""
import dataclasses
import pathlib

import jax
import pytest

from specjax import checkpoints
from specjax.testing import tiny
from specjax.theory import experts
from specjax.theory import public_models
from specjax.theory import sizes

FAMILIES = pathlib.Path(__file__).parents[1] / "fixtures" / "families"
LLAMA, MIXTRAL, QWEN = (public_models.find(name).config for name in ("llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b"))


@pytest.mark.parametrize("name", public_models.MODELS)
def test_parameters_are_the_published_ones(name):
  found = public_models.find(name)
  assert sizes.parameters(found.config).total == found.parameters and found.source


def test_an_unknown_model_is_refused():
  assert public_models.find("LLaMA-3.1-8B").config is LLAMA
  with pytest.raises(ValueError, match="'gpt-5' is not in the table; known are llama-3.2-1b, llama-3.1-8b"):
    public_models.find("gpt-5")


@pytest.mark.parametrize("folder", sorted(path.name for path in FAMILIES.iterdir() if path.is_dir()))
def test_every_family_has_as_many_weights_as_are_counted(folder):
  """Biases, norms, positions, experts and all."""
  config, weights, _ = checkpoints.load(FAMILIES / folder)
  assert sizes.parameters(config).total == sum(x.size for x in jax.tree.leaves(weights))


def test_a_head_has_as_many_weights_as_are_counted():
  target = tiny.decoder()
  head = jax.eval_shape(lambda: tiny.eagle3(target, tuple(range(0, 24, 2))))
  leaves = sum(x.size for x in jax.tree.leaves(head)) - head.ids.size
  assert sizes.eagle3_parameters(head.config).total == leaves
  named = public_models.eagle3_head(public_models.find("llama-3.1-70b").config)
  assert sizes.eagle3_parameters(named).total == 1_403_027_456  # 8192 wide, 28672 inside, 32000 draft ids


def test_the_cache_is_as_large_as_one_that_exists():
  assert sizes.kv_bytes(LLAMA) == 2 * 32 * 8 * 128 * 2 == 131072
  target = tiny.decoder()
  cache = target.init_cache(3, 40)
  held = sum(x.nbytes for x in jax.tree.leaves((cache.keys, cache.values)))
  assert held == 3 * sizes.cache_bytes(target.config, 40, itemsize=4)
  assert held == 3 * 40 * sizes.kv_bytes(target.config, itemsize=4)


def test_a_window_bounds_what_its_layers_hold():
  windowed = dataclasses.replace(LLAMA, windows=(100, None) * 16)
  assert sizes.cached_tokens(windowed, 60) == 32 * 60
  assert sizes.cached_tokens(windowed, 1000) == 16 * 100 + 16 * 1000


def test_a_token_is_multiplied_with_its_own_experts():
  """Two operations a weight: 12.9 billion of Mixtral's 46.7 and 3.3 of Qwen's 30.5 are active, embedding apart."""
  assert sizes.parameters(MIXTRAL).active == pytest.approx(12.88e9 - 32000 * 4096, rel=1e-3)
  assert sizes.parameters(QWEN).active == pytest.approx(3.35e9 - 151936 * 2048, rel=2e-2)
  each = sizes.parameters(LLAMA)
  assert sizes.flops(LLAMA, 5) == 5 * sizes.flops(LLAMA, 1) == 5 * 2 * (each.total - each.embedding - each.rest)
  assert sizes.flops(LLAMA, 2, 100) - sizes.flops(LLAMA, 2) == 2 * 32 * 4 * 32 * 128 * 100


def test_a_step_reads_the_experts_that_it_goes_through():
  each = sizes.parameters(MIXTRAL)
  assert sizes.step_bytes(MIXTRAL, 1, 1, 0) == pytest.approx(2 * each.active)  # k of X for one token
  more = sizes.step_bytes(MIXTRAL, 2, 4, 0) - sizes.step_bytes(MIXTRAL, 1, 1, 0)
  assert more == pytest.approx(2 * each.experts * (experts.expected_distinct(8, 2, 8) - 2) / 8)
  dense = sizes.parameters(LLAMA)
  assert sizes.step_bytes(LLAMA, 4, 8, 100) == 2 * (dense.total - dense.embedding) + 4 * 100 * sizes.kv_bytes(LLAMA)
