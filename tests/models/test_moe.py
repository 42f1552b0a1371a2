"""Mixtures of experts: routing, the product in every form, the layouts of files, and what verify passes count."""
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import specjax
from specjax import checkpoints
from specjax import decode
from specjax import proposers
from specjax import tree as tree_lib
from specjax.models import moe
from specjax.verifiers import point

FOLDERS = pathlib.Path(__file__).parents[1] / "fixtures" / "families"
GOLDEN = dict(np.load(FOLDERS.parent / "golden_families.npz"))
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")

pytestmark = pytest.mark.usefixtures("quick_compile")
product = jax.jit(moe.experts, static_argnames=("activation", "size"))


def test_routing_by_hand():
  """Shares of a softmax over all experts; divided by their sum where the family does so; the first of equal ones."""
  logits = jnp.log(jnp.asarray([[1.0, 4.0, 1.0], [6.0, 4.0, 1.0], [3.0, 2.0, 1.0]]))  # [X, N]
  share, chosen = moe.route(logits, 2, False)
  assert chosen.tolist() == [[1, 2], [0, 1], [0, 1]]
  np.testing.assert_allclose(share, [[.6, .3], [.4, .4], [1 / 3, 1 / 3]], rtol=1e-6)
  share, _ = moe.route(logits, 2, True)
  np.testing.assert_allclose(share, [[2 / 3, 1 / 3], [.5, .5], [.5, .5]], rtol=1e-6)


def silu_mixture(gate_up, down, columns, chosen, share):
  """Token by token and expert by expert, in double precision."""
  out = np.zeros(columns.shape)
  for token, experts in enumerate(chosen):
    for expert, weight in zip(experts, share[token]):
      gate, up = np.split(gate_up[expert].astype(float) @ columns[:, token], 2)
      out[:, token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
  return out


@pytest.mark.parametrize("size", [1, 3, 8, None])
@pytest.mark.parametrize("tokens, one", [(1, False), (5, False), (29, False), (9, True)])
def test_the_product_in_every_form(size, tokens, one):
  """Blocks of several sizes and the ragged product; tokens that all want the same experts; a token alone."""
  rng = np.random.default_rng(tokens)
  some = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  gate_up, down, columns = some(6, 14, 10), some(6, 10, 7), some(10, tokens)
  chosen = np.argsort(some(tokens, 6), axis=1)[:, :3].astype(np.int32)
  if one:
    chosen[:] = [5, 0, 3]
  share = rng.uniform(0.1, 1, (tokens, 3)).astype(np.float32)
  got = product(gate_up, down, columns, chosen, share, activation="silu", size=size)
  np.testing.assert_allclose(got, silu_mixture(gate_up, down, columns, chosen, share), atol=1e-4)
  alone = product(gate_up, down, columns[:, -1:], chosen[-1:], share[-1:], activation="silu", size=size)
  np.testing.assert_allclose(got[:, -1:], alone, atol=1e-5)


def every_expert(gate_up, down, columns, chosen, share):
  """The dense form: all experts for all tokens, of which those that were not chosen weigh nothing."""
  gate, up = jnp.split(jnp.einsum("xme,en->xmn", gate_up, columns), 2, axis=1)
  made = jnp.einsum("xem,xmn->xen", down, jax.nn.silu(gate) * up)
  weight = jnp.zeros((gate_up.shape[0], columns.shape[1])).at[chosen, jnp.arange(len(chosen))[:, None]].add(share)
  return jnp.einsum("xen,xn->en", made, weight)


@pytest.mark.parametrize("size", [1, 3, 8, None])
def test_gradients_of_the_product_in_every_form(size):
  """Of weights, tokens and shares, as the dense form has them; an expert without tokens gets none."""
  rng = np.random.default_rng(4)
  some = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  gate_up, down, columns, wanted = some(5, 14, 10), some(5, 10, 7), some(10, 13), some(10, 13)
  chosen = jnp.asarray(np.argsort(np.asarray(some(13, 4)), axis=1)[:, :2], jnp.int32)  # none to the fifth
  share = jax.nn.softmax(some(13, 2))
  loss = lambda form: lambda *given: (form(*given[:3], chosen, given[3]) * wanted).sum()
  form = lambda *given: moe.experts(*given, activation="silu", size=size)
  ours, theirs = (jax.jit(jax.grad(loss(f), argnums=(0, 1, 2, 3)))(gate_up, down, columns, share)
                  for f in (form, every_expert))
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-4)
  assert not ours[0][4].any() and all(float(jnp.abs(ours[0][x]).max()) > 0 for x in range(4))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_are_stored_as_one_array(name, tmp_path):
  """The layout that Transformers 5 has in memory, made from the one that it writes."""
  target = specjax.load(str(FOLDERS / name))[0]
  tensors = safetensors_numpy.load_file(FOLDERS / name / "model.safetensors")
  kept = {key: value for key, value in tensors.items() if ".experts." not in key and not key.endswith(".gate.weight")}
  for i, layer in enumerate(target.weights.layers):
    if layer.router is None:
      continue
    at = lambda text, i=i: f"model.layers.{i}.{text}"
    part, (gate, up, down) = ("block_sparse_moe.", ("w1", "w3", "w2")) if name == "mixtral" else (
        "mlp.", ("gate_proj", "up_proj", "down_proj"))
    all_of = lambda kind: np.stack([tensors[at(f"{part}experts.{x}.{kind}.weight")] for x in range(
        target.config.moe.experts)])
    kept[at("mlp.gate.weight")] = tensors[at(part + "gate.weight")]
    kept[at("mlp.experts.gate_up_proj")] = np.concatenate([all_of(gate), all_of(up)], axis=1)
    kept[at("mlp.experts.down_proj")] = all_of(down)
  write(tmp_path, FOLDERS / name, kept)
  stacked = specjax.load(str(tmp_path))[0]
  for a, b in zip(jax.tree.leaves(target.weights), jax.tree.leaves(stacked.weights), strict=True):
    np.testing.assert_array_equal(a, b)


def write(folder, source, tensors=None, **changes):
  """A copy of a fixture with other tensors, or other keys in its configuration."""
  for path in source.iterdir():
    (folder / path.name).write_bytes(path.read_bytes())
  if tensors is not None:
    safetensors_numpy.save_file(tensors, folder / "model.safetensors")
  config = json.loads((source / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("name, changes, named", [
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"), ("olmoe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
    ("olmoe", {"num_local_experts": 4}, "num_local_experts"), ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("mixtral", {"num_local_experts": None}, "num_local_experts"), ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"), ("qwen3", {"num_experts": 8}, "num_experts"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"), ("olmoe", {"num_experts": 9}, "router|mlp.gate")])
def test_what_is_not_supported_is_named(name, changes, named, tmp_path):
  write(tmp_path, FOLDERS / name, **changes)
  with pytest.raises(checkpoints.CheckpointError, match=named):
    specjax.load(str(tmp_path))


def test_a_missing_expert_is_named(tmp_path):
  tensors = safetensors_numpy.load_file(FOLDERS / "mixtral" / "model.safetensors")
  del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
  write(tmp_path, FOLDERS / "mixtral", tensors)
  with pytest.raises(checkpoints.CheckpointError, match="layers.1.block_sparse_moe.experts.3.w2.weight"):
    specjax.load(str(tmp_path))


def test_dense_layers_by_list_and_by_step(tmp_path):
  """Every second layer is a mixture, but for those that the list takes out."""
  config = checkpoints.safetensors.read_config
  write(tmp_path, FOLDERS / "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
  assert config(tmp_path).moe.dense == (0, 2, 3, 4)
  write(tmp_path, FOLDERS / "qwen3_moe", mlp_only_layers=[0, 1, 2])
  assert config(tmp_path).moe is None
  target = specjax.load(str(FOLDERS / "qwen3_moe"))[0]
  assert target.config.moe.dense == (1,) and target.routing.layers == 2
  assert target.keep((1, 2)).config.moe.dense == (0,) and target.keep((1, 2)).routing.layers == 1
  assert target.keep((1,)).routing is None
  assert dataclasses.asdict(target.routing) == {"layers": 2, "experts": 8, "chosen": 3, "expert_bytes": 3 * 24 * 32 * 4}


def experts_of(target, texts):
  """What the nodes of whole texts i32[B, P] go through: i32[L, B, P, k]."""
  batch, length = texts.shape
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
  positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), texts.shape)
  out = jax.jit(lambda t: t.forward(texts, positions, mask, t.init_cache(batch, 1), experts=True))(target)
  return np.asarray(out.experts)


def test_plain_decoding_counts_the_experts_of_its_text():
  """Two rows in step: a pass has a node of each, and goes through what either does."""
  target, prompts = specjax.load(str(FOLDERS / "qwen3_moe"))[0], GOLDEN["qwen3_moe_ids"]
  result = specjax.generate(target, proposers.Plain(), prompts.tolist(), max_new_tokens=12)
  found = experts_of(target, np.concatenate([prompts, result.tokens], axis=1).astype(np.int32))[:, :, 23:35]
  counted = result.counters.experts
  for row in range(2):
    for layer in range(2):
      wanted = np.bincount(found[layer, row].ravel(), minlength=8)
      assert counted.loads[row, layer].tolist() == wanted.tolist()
  distinct = [sum(len(set(found[layer, :, step].ravel())) for step in range(12)) for layer in range(2)]
  assert counted.touched.sum(0).tolist() == [distinct]
  assert counted.passes.sum(0).tolist() == [12] and counted.nodes.sum(0).tolist() == [24]
  assert max(distinct) > 12 * 3  # the rows differ


class Watched:
  """A target that keeps what its pass went through; for passes that are not traced."""

  def __init__(self, inner):
    self.inner, self.seen = inner, None

  def __getattr__(self, name):
    return getattr(self.inner, name)

  def forward(self, *args, **kwargs):
    out = self.inner.forward(*args, **kwargs)
    self.seen = out.experts
    return out


def test_a_tree_counts_its_nodes_and_padding_adds_no_expert():
  """Branches and rows of other sizes in one pass; every valid node goes through what its path, alone, does."""
  target, prompts = specjax.load(str(FOLDERS / "olmoe"))[0], GOLDEN["olmoe_ids"]
  proposer = proposers.NGram(num_tokens=7)
  state = specjax.drivers.start(target, proposer, prompts.tolist(), max_new_tokens=20)
  tree = tree_lib.TokenTree(
      tokens=jnp.asarray([[prompts[0, -1], 11, 12, 13, 14, 0, 0, 0],
                          [prompts[1, -1], 21, 22, 0, 0, 0, 0, 0]], jnp.int32),
      parents=jnp.asarray([[0, 0, 0, 1, 3, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]], jnp.int32), size=jnp.asarray([5, 3]))
  paths = [[[], [11], [12], [11, 13], [11, 13, 14]], [[], [21], [21, 22]]]
  watched = Watched(target)
  *_, loads = decode.verify_at(watched, point.Point(), 7, 8, 0, (), state, tree, state.params.mode())
  wanted = np.zeros((2, 2, 7), int)
  for row, drafts in enumerate(paths):
    for path in drafts:
      for layer, chosen in enumerate(experts_of(target, np.asarray([[*prompts[row], *path]], np.int32))[:, 0, -1]):
        wanted[row, layer, chosen] += 1
  assert loads.tolist() == wanted.tolist()
  everything = np.asarray(watched.seen)  # [L, B, T, k], padding included
  for layer in range(2):
    for row in range(2):
      assert set(everything[layer, row].ravel()) == set(np.flatnonzero(wanted[row, layer]))


def test_layers_that_a_drafter_has_run_count_nothing():
  target = specjax.load(str(FOLDERS / "olmoe"))[0]
  result = specjax.generate(target, proposers.EarlyExit(exit_layer=1), GOLDEN["olmoe_ids"][:1].tolist(),
                            max_new_tokens=8)
  assert result.counters.drafted_tokens.sum() > 0
  first, second = result.counters.experts.loads[0].sum(-1)
  assert first == 0 < second == 2 * result.counters.experts.nodes.sum()


def test_other_targets_count_no_experts():
  target = specjax.load(str(FOLDERS / "qwen3"))[0]
  assert target.routing is None
  assert specjax.drivers.start(target, proposers.Plain(), [[5, 6]]).counters.experts is None
