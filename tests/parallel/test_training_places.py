"""Training over several devices: the losses of one device, on any mesh, also behind a resumption on another one."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import config as config_lib
from specjax.parallel import mesh as mesh_lib
from specjax.parallel import training_places
from specjax.testing import tiny
from specjax.training import batches
from specjax.training import eagle3
from specjax.training import fresh
from specjax.training import loop
from specjax.training import packed
from specjax.training import pretrain
from specjax.training import shifts
import many_devices

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = config_lib.DecoderConfig(vocab_size=32, num_tokens=32, width=16, layers=2, heads=4, kv_heads=2, head_width=4,
                                  mlp_width=32, norm_eps=1e-5, rope_theta=1e4, max_context=64, eos_ids=(), tied=False)
MIXTURE = dataclasses.replace(CONFIG, family="mixtral", moe=config_lib.MoE(experts=4, chosen=2, width=8,
                                                                           renormalised=True))


def rows_of(step, count=5):
  """Five rows: no mesh here divides them, so that some are filled up."""
  rng = np.random.default_rng(step)
  return packed.Rows(tokens=rng.integers(0, 32, (count, 12), np.int32), document=np.ones((count, 12), np.int32))


def train_decoder(folder, mesh=None, config=CONFIG, accumulate=1, batch=rows_of, report=None):
  places = None if mesh is None else training_places.Places(mesh_lib.make(mesh))
  params = loop.run(folder, fresh.decoder(config, 0), lambda p, rows: pretrain.next_token(p, rows, 0.1), batch,
                    loop.Schedule(steps=4, learning_rate=0.01, accumulate=accumulate), save_every=2, places=places,
                    report=report)
  return params, [row["loss"] for row in loop.read_metrics(folder)]


@many_devices.on(8)
@pytest.mark.parametrize("mesh, config", [("data:2,fsdp:2,model:2", CONFIG), ("fsdp:8", CONFIG),
                                          ("data:2,expert:2,model:2", MIXTURE)], ids=["all", "fsdp", "experts"])
def test_losses_are_those_of_one_device(mesh, config, tmp_path):
  params, losses = train_decoder(tmp_path / "mesh", mesh, config=config)
  _, wanted = train_decoder(tmp_path / "one", config=config)
  np.testing.assert_allclose(losses, wanted, rtol=2e-5)
  qkv, sizes = params.weights.layers[0].qkv, mesh_lib.parse(mesh)
  assert qkv.sharding.shard_shape(qkv.shape) == (32 // sizes.get("model", 1), 16 // sizes.get("fsdp", 1))


@many_devices.on(8)
def test_a_run_goes_on_on_another_mesh(tmp_path):
  """Weights and optimizer come back from the checkpoint into the parts of the new mesh."""
  def cut(row):
    if row["step"] == 2:  # one step behind the checkpoint
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    train_decoder(tmp_path / "moved", "data:2,fsdp:2,model:2", report=cut)
  params, losses = train_decoder(tmp_path / "moved", "data:4,model:2")
  _, wanted = train_decoder(tmp_path / "one")
  np.testing.assert_allclose(losses, wanted, rtol=2e-5)
  embedding = params.weights.embedding
  assert embedding.sharding.shard_shape(embedding.shape) == (16, 16)


@many_devices.on(8)
def test_a_head_is_trained_beside_a_target_that_is_divided(tmp_path):
  target = tiny.decoder(vocab=32)
  ids, rng = np.arange(0, 32, 2), np.random.default_rng(0)
  head = eagle3.init(target, ids, (1, 2, 3), jax.random.key(0)).replace(ids=None)
  floats = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  batch = batches.Batch(tokens=rng.integers(0, 32, (6, 10), np.int32), length=np.full(6, 10, np.int32),
                        start=np.full(6, 3, np.int32), features=floats(6, 10, 48), hidden=floats(6, 10, 16),
                        top=rng.integers(0, 32, (6, 10), np.int32))

  def losses(name, mesh):
    places = None if mesh is None else training_places.Places(mesh_lib.make(mesh))
    loop.run(tmp_path / name, head, lambda p, *given: eagle3.loss(p, *given, eagle3.Recipe(passes=2)),
             lambda step: batch, loop.Schedule(steps=3, learning_rate=0.01),
             arguments=(shifts.frozen(target, ids), jnp.asarray(ids)), places=places)
    return [row["loss"] for row in loop.read_metrics(tmp_path / name)]

  np.testing.assert_allclose(losses("mesh", "data:2,fsdp:2,model:2"), losses("one", None), rtol=2e-5)


def test_gradients_of_several_batches_are_those_of_one(tmp_path):
  """Four rows as two batches of two: the same weights."""
  halves = lambda index: jax.tree.map(lambda x: x[2 * (index % 2):][:2], rows_of(index // 2, 4))
  parts, losses = train_decoder(tmp_path / "parts", accumulate=2, batch=halves)
  whole, wanted = train_decoder(tmp_path / "whole", batch=lambda step: rows_of(step, 4))
  np.testing.assert_allclose(losses, wanted, rtol=1e-5)
  for ours, theirs in zip(jax.tree.leaves(parts), jax.tree.leaves(whole)):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
