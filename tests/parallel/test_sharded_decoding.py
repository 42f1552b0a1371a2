"""Decoding over several devices: the tokens of one device, whatever the mesh, and little that travels."""
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drivers
from specjax import proposers
from specjax import verifiers
from specjax.models import config as config_lib
from specjax.models import splits as splits_lib
from specjax.parallel import compiled
from specjax.parallel import layout as layout_lib
from specjax.parallel import mesh as mesh_lib
from specjax.parallel import placing
from specjax.parallel import rules as rules_lib
from specjax.serving import engine as engine_lib
from specjax.serving import requests
from specjax.testing import tiny
from specjax.training import fresh
import many_devices

pytestmark = pytest.mark.usefixtures("quick_compile")
MESHES = ("data:8", "data:4,model:2", "data:2,model:4", "model:8")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 5, 6], [9, 8], [3, 3, 3, 3], [4, 1, 2], [7, 7, 5], [1, 1], [2, 9, 2, 9, 2]]
# Half of the rows are greedy, half are drawn under filters.
PARAMS = specjax.SamplingParams(temperature=[0.0, 0.8] * 4, top_k=[0, 0, 0, 5] * 2, top_p=[1.0, 0.9] * 4)
CONFIG = config_lib.DecoderConfig(vocab_size=64, num_tokens=61, width=32, layers=2, heads=8, kv_heads=2, head_width=4,
                                  mlp_width=64, norm_eps=1e-5, rope_theta=1e4, max_context=256, eos_ids=(), tied=False)
MIXTURE = dataclasses.replace(CONFIG, family="mixtral", moe=config_lib.MoE(experts=4, chosen=2, width=16,
                                                                           renormalised=True))
NGRAM = proposers.NGram(min_ngram=1, num_tokens=3)


@functools.cache
def decoder(config=CONFIG):
  """Random weights that are large enough for text which is not always the same token."""
  target = fresh.decoder(config, 0)
  return target.replace(weights=jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, target.weights))


def generate(target, proposer, params=PARAMS, **kwargs):
  return specjax.generate(target, proposer, PROMPTS, params, max_new_tokens=20, key=jax.random.key(3), **kwargs)


@functools.cache
def alone(config=CONFIG):
  return generate(decoder(config), NGRAM)


def check_equal(found, wanted):
  assert np.array_equal(found.tokens, wanted.tokens)
  assert np.array_equal(found.counters.accepted_tokens, wanted.counters.accepted_tokens)
  assert wanted.counters.accepted_tokens.sum() > 0


@many_devices.on(8)
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_those_of_one_device(mesh):
  target = placing.shard(decoder(), mesh_lib.make(mesh))
  assert target.vocab_size == (64 if "model" in mesh else 61), "a head that is divided is padded to its rows"
  check_equal(generate(target, NGRAM), alone())


@many_devices.on(8)
@pytest.mark.parametrize("mesh", ["expert:4,model:2", "data:2,expert:2,model:2"])
def test_tokens_of_a_mixture_are_those_of_one_device(mesh):
  """Experts on several devices, and the width of each of them as well."""
  target = placing.shard(decoder(MIXTURE), mesh_lib.make(mesh))
  shape = target.weights.layers[0].experts_gate_up.sharding.shard_shape(target.weights.layers[0].experts_gate_up.shape)
  assert shape == ((1, 16, 32) if mesh.startswith("expert:4") else (2, 16, 32))
  check_equal(generate(target, NGRAM), alone(MIXTURE))


@many_devices.on(8)
@pytest.mark.parametrize("rules", [rules_lib.REPLICATED, rules_lib.TENSOR], ids=["replicated", "divided"])
def test_a_drafter_that_samples_has_rules_of_its_own(rules):
  """Its q is that of one device, and so are the verdicts; block verification reads p and q at ids and over all of V."""
  target = placing.shard(decoder(), mesh_lib.make("data:2,model:4"))
  draft = proposers.DraftModel(model=decoder().keep((0,)), num_tokens=3, drawing=proposers.Drawing(sampled=True))
  wanted = generate(decoder(), draft, verifier=verifiers.Block())
  placed = placing.drafter(draft, target, rules)
  assert placed.model.vocab_size == target.vocab_size
  whole = placed.model.weights.layers[0].qkv.sharding.is_fully_replicated
  assert whole == (rules is rules_lib.REPLICATED)
  check_equal(generate(target, placed, verifier=verifiers.Block()), wanted)


@many_devices.on(8)
def test_a_drafted_tree_of_a_head_and_logprobs():
  """EAGLE-3 reads the target's features, which lie with the rows; trees are judged by traversal."""
  target = placing.shard(tiny.decoder(vocab=32, max_context=256), mesh_lib.make("data:4,model:2"))
  head = tiny.eagle3(tiny.decoder(vocab=32, max_context=256), (0, 1, 2, 4, 7))
  tree = proposers.EagleTree(head=head, nodes=8, depth=3, beam=2)
  wanted = generate(tiny.decoder(vocab=32, max_context=256), tree, logprobs=3)
  found = generate(target, placing.drafter(tree, target), logprobs=3)
  assert np.array_equal(found.tokens, wanted.tokens)
  assert wanted.counters.drafted_tokens.sum() > 0
  for ours, theirs in zip(jax.tree.leaves(found.logprobs), jax.tree.leaves(wanted.logprobs)):
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@many_devices.on(8)
def test_the_two_detectors(drafter):
  target, single = placing.shard(decoder(), mesh_lib.make("data:2,model:4")), decoder()
  texts = generate(single, proposers.Plain(), None).token_ids
  wrong = generate(target, drafter(PROMPTS, texts, wrong_from=0), None)
  knows = generate(target, drafter(PROMPTS, texts), None)
  assert wrong.token_ids == knows.token_ids == texts
  assert wrong.counters.accepted_tokens.sum() == 0 < wrong.counters.drafted_tokens.sum()
  assert np.array_equal(knows.counters.accepted_tokens, knows.counters.drafted_tokens)


@many_devices.on(8)
def test_ties_are_one_decision_everywhere():
  """sglang 31071: ranks took the argmax of their own logits. Here all logits tie, and every device holds one verdict:
  the lowest id."""
  target = decoder()
  target = target.replace(weights=target.weights.replace(head=jnp.zeros_like(target.weights.head)))
  target = placing.shard(target, mesh_lib.make("data:2,model:4"))
  result = generate(target, NGRAM, None, keep=True)
  assert (result.tokens == 0).all() and result.counters.accepted_tokens.sum() > 0
  for leaf in (result.kept.length, result.kept.reason, *jax.tree.leaves(result.kept.counters)):
    shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
    assert len(shards) == 8 and all(np.array_equal(shard, shards[0]) for shard in shards)


@many_devices.on(8)
def test_caches_lie_where_the_heads_are():
  target = placing.shard(decoder(), mesh_lib.make("data:2,model:4"))
  kept = generate(target, NGRAM, None, keep=True).kept
  # 2 heads of keys and values stand twice, so that 4 devices have one each.
  assert target.layout.repeated == 2 and target.config.kv_heads == 4
  for keys, values in zip(kept.cache.keys, kept.cache.values):
    assert keys.sharding.shard_shape(keys.shape) == (4, 1, 4, 256)
    assert values.sharding.shard_shape(values.shape) == (4, 1, 256, 4)
  assert kept.tokens.sharding.shard_shape(kept.tokens.shape) == (4, 256)
  assert target.weights.embedding.sharding.shard_shape((64, 32)) == (16, 32)


@many_devices.on(8)
def test_what_does_not_divide_is_whole_and_said_so():
  odd = dataclasses.replace(CONFIG, heads=6, kv_heads=3, vocab_size=61, mlp_width=60)
  target = placing.shard(decoder(odd), mesh_lib.make("data:2,model:4"))
  assert [note.partition(" cannot")[0] for note in target.layout.notes] == ["llama: heads: 6", "llama: vocabulary: 61"]
  assert target.layout.splits.attention is None and target.layout.splits.mlp == "model"
  check_equal(generate(target, NGRAM), generate(decoder(odd), NGRAM))
  strict = dataclasses.replace(rules_lib.TENSOR, required=("heads",))
  with pytest.raises(ValueError, match="heads: 6 cannot be divided among 4 devices.*the rules require it"):
    placing.shard(decoder(odd), mesh_lib.make("data:2,model:4"), strict)


@many_devices.on(8)
@pytest.mark.parametrize("config", [CONFIG, MIXTURE, dataclasses.replace(CONFIG, qkv_bias=True)],
                         ids=["dense", "mixture", "biases"])
def test_what_is_taken_back_is_what_was_put_there(config):
  target = decoder(dataclasses.replace(config, qkv_bias=False)).replace(config=config)
  if config.qkv_bias:
    bias = jnp.arange(48.0)
    layers = tuple(layer.replace(qkv_bias=bias) for layer in target.weights.layers)
    target = target.replace(weights=target.weights.replace(layers=layers))
  placed = placing.shard(target, mesh_lib.make("data:2,expert:2,model:2"))
  assert not np.array_equal(placed.weights.layers[0].qkv, target.weights.layers[0].qkv), "rows have another order"
  back = placing.gathered(placed)
  assert back.config == target.config and back.layout is None
  assert jax.tree.all(jax.tree.map(np.array_equal, back.weights, target.weights))
  with pytest.raises(ValueError, match="lies on a mesh already"):
    placing.shard(placed, mesh_lib.make("data:8"))


def test_rows_of_fused_matrices_by_device():
  """By hand: 4 heads of two elements over 2 devices, with 2 key/value heads, or with one that stands twice."""
  layout = layout_lib.Layout(mesh=type("Mesh", (), {"shape": {"model": 2}})(), rules=rules_lib.TENSOR,
                             splits=splits_lib.Splits(attention="model", mlp="model"))
  config = dataclasses.replace(CONFIG, heads=4, kv_heads=2, head_width=2, mlp_width=4)
  orders = layout_lib.row_orders(config, layout)
  assert orders["qkv"].tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
  assert orders["gate_up"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
  orders = layout_lib.row_orders(dataclasses.replace(config, kv_heads=1), dataclasses.replace(layout, repeated=2))
  assert orders["qkv"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11]


@many_devices.on(8)
@pytest.mark.parametrize("params", [None, specjax.SamplingParams(temperature=0.8, top_k=20, top_p=0.9)],
                         ids=["greedy", "filtered"])
def test_no_logits_travel(params):
  """Of f[B, T, V] nothing is gathered or summed over devices: scalars, a block of 256 ids, 128 candidates of a device."""
  batch, data, model, vocab = 4, 2, 4, 32768
  config = dataclasses.replace(CONFIG, vocab_size=vocab, num_tokens=vocab - 7, layers=1)
  target = placing.shard(fresh.decoder(config, 0), mesh_lib.make(f"data:{data},model:{model}"))
  state = drivers.start(target, NGRAM, PROMPTS[:batch], params, max_new_tokens=20)
  text = drivers.advance.lower(target, NGRAM, state, np.int32(5), verifier=verifiers.Point()).compile().as_text()
  found = compiled.collectives(text)
  assert {one.kind for one in found} >= {"all-reduce", "all-gather"}
  for one in found:
    for shape in one.shapes:
      nodes = max([size for size in shape[:-1] if size in (1, 4)], default=1)  # T of the widths that are compiled
      assert math.prod(shape) < batch // data * nodes * vocab // model, one
  layers = [one for one in found if "forward/shard_map" in one.name]
  assert sorted(one.size for one in layers) == [2 * 32 * 4] * 2 + [8 * 32 * 4] * 2, "two sums of a layer at each width"


@many_devices.on(8)
def test_an_engine_serves_the_same_text():
  """Rows come and go over a target that is divided as over one device."""
  def served(target):
    engine = engine_lib.Engine(target, NGRAM, config=engine_lib.Config(rows=4, max_tokens=64, step_tokens=32))
    numbers, outputs = {}, {}
    for place, prompt in enumerate(PROMPTS[:6]):
      params = specjax.SamplingParams(temperature=0.8 * (place % 2), seed=place)
      numbers[engine.submit(requests.Request(prompt=prompt, params=params, max_new_tokens=10))] = place
    while engine.busy:
      outputs |= {numbers[update.id]: update.outcome.token_ids for update in engine.step() if update.outcome}
    return [outputs[place] for place in range(6)]

  assert served(placing.shard(decoder(), mesh_lib.make("data:2,model:4"))) == served(decoder())


PADDED = dataclasses.replace(CONFIG, vocab_size=64, num_tokens=61)


@many_devices.on(8)
def test_ids_that_only_fill_the_vocabulary_up_are_no_ids():
  """Parameters, constraints, drafters and heads are held to the ids that there are, not to the padded vocabulary."""
  mesh = mesh_lib.make("data:4,model:2")
  target = placing.shard(decoder(PADDED), mesh)
  assert (target.vocab_size, target.known_ids) == (64, 61)
  for wrong in (dict(allowed_ids=[62, 63]), dict(banned_ids=range(61)), dict(logit_bias={62: 1.0})):
    for model in (target, decoder(PADDED)):
      with pytest.raises(ValueError):
        generate(model, NGRAM, specjax.SamplingParams(**wrong))
  with pytest.raises(ValueError, match="ids of this target are 0 to 60"):
    specjax.generate(target, NGRAM, [[62]])
  other = dataclasses.replace(PADDED, num_tokens=50)
  small = placing.drafter(proposers.DraftModel(model=decoder(other), num_tokens=3), target)
  with pytest.raises(ValueError, match="the drafter has 50 token ids and the target 61"):
    generate(target, small)
  translated = placing.drafter({"model": decoder(dataclasses.replace(CONFIG, vocab_size=100, num_tokens=100))}, target)
  assert translated["model"].vocab_size == 100, "a drafter of other ids keeps its own"


@many_devices.on(8)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_heads_of_all_ids_draft_no_padding(kind):
  """Of the target's own matrix, which has rows for it, or of their own, which has not: drafts as on one device."""
  single = decoder(PADDED)
  head = getattr(tiny, kind)(single, tuple(range(61)))
  head = head.replace(ids=None) if head.ids is not None else head
  proposer = {"medusa": proposers.Medusa, "hydra": proposers.Hydra}.get(kind, proposers.Eagle)(head=head, num_tokens=3)
  target = placing.shard(single, mesh_lib.make("data:4,model:2"))
  wanted, found = generate(single, proposer), generate(target, placing.drafter(proposer, target))
  assert np.array_equal(found.tokens, wanted.tokens)
  assert np.array_equal(found.counters.accepted_tokens, wanted.counters.accepted_tokens)
  assert wanted.counters.drafted_tokens.sum() > 0


@many_devices.on(8)
def test_what_must_divide_is_divided_or_refused():
  required = lambda *names: dataclasses.replace(rules_lib.TENSOR, required=names)
  with pytest.raises(ValueError, match="normed over all heads.*require heads"):
    placing.shard(decoder().replace(config=dataclasses.replace(CONFIG, qk_norm="whole")), mesh_lib.make("model:8"),
                  required("heads"))
  with pytest.raises(ValueError, match="require experts to be divided, and there are none"):
    placing.shard(decoder(), mesh_lib.make("model:4,expert:2"), required("experts"))
  odd = decoder(dataclasses.replace(CONFIG, vocab_size=61))
  target = placing.shard(odd, mesh_lib.make("data:2,model:4"))  # its vocabulary is whole, and so are drafts' logits
  draft = placing.drafter(proposers.DraftModel(model=decoder(PADDED).keep((0,)), num_tokens=3), target, rules_lib.TENSOR)
  assert draft.model.vocab_size == 61 and draft.model.layout.rules.axis("vocab") is None
  check = generate(target, draft)
  assert np.array_equal(check.tokens, generate(odd, NGRAM).tokens)
