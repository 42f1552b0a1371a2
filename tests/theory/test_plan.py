"""The plan's closed forms: limits, what they add up to, and break-even points against simulated acceptance."""
import dataclasses

import numpy as np
import pytest

from specjax.models.config import MoE
from specjax.parallel import mesh as mesh_lib
from specjax.theory import closed_forms
from specjax.theory import collectives
from specjax.theory import hardware
from specjax.theory import plan
from specjax.theory import public_models
from specjax.theory import sizes

LLAMA, BIG, MIXTRAL = (public_models.find(n).config for n in ("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b"))
Mesh, Layout = collectives.Mesh, collectives.Layout
CHAIN = plan.Draft(public_models.eagle3_head(LLAMA), depth=7, nodes=7)


def deployment(model=LLAMA, chips="h100", **options):
  mesh = options.pop("mesh", Mesh())
  return plan.Deployment(model, hardware.find(chips), Layout(mesh, options.pop("attention", "heads")), **options)


ONE, EIGHT = deployment(), deployment(BIG, "8xh100", mesh=Mesh(model=8))


def test_one_device_sends_nothing_and_reads_its_weights():
  """Bound by bandwidth: weights over bytes per second, with an empty cache; by arithmetic: operations over the peak."""
  each, step = sizes.parameters(LLAMA), ONE.step(1, 0, 1)
  weights = 2 * (each.total - each.embedding)
  assert step.collectives == 0 and step.bound == "memory"
  assert step.total == step.memory == pytest.approx(weights / 3.35e12, rel=1e-12)
  wide = ONE.step(64, 100, 64)
  assert wide.bound == "arithmetic"
  assert wide.total == wide.arithmetic == pytest.approx(sizes.flops(LLAMA, 64 * 64, 100) / 989.4e12, rel=1e-12)
  assert wide.memory == pytest.approx(sizes.step_bytes(LLAMA, 64, 64, 100) / 3.35e12, rel=1e-12)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama-3.2-1b"])
def test_one_device_is_what_the_sizes_say(model):
  """Mixtures, and a head that is the embedding."""
  config = public_models.find(model).config
  step = deployment(config, "b200").step(3, 50, 4)
  assert step.memory == pytest.approx(sizes.step_bytes(config, 3, 4, 50) / 8e12, rel=1e-12)
  assert step.arithmetic == pytest.approx(sizes.flops(config, 12, 50) / 2.25e15, rel=2e-3)


def test_efficiencies_divide_their_own_terms():
  slow = deployment(memory_efficiency=0.8, flops_efficiency=0.5)
  assert slow.step(2, 9, 4).memory == pytest.approx(ONE.step(2, 9, 4).memory / 0.8)
  assert slow.step(2, 9, 4).arithmetic == pytest.approx(ONE.step(2, 9, 4).arithmetic / 0.5)


def test_weights_divide_and_key_heads_are_kept_twice_where_devices_outnumber_them():
  whole = sizes.parameters(BIG)
  eight = EIGHT.device_bytes(8, 100, 8)
  assert eight["weights"] == pytest.approx(2 * ((whole.total - whole.rest) / 8 + whole.rest))
  assert eight["cache"] == 8 * 100 * sizes.kv_bytes(BIG) // 8
  sixteen = deployment(BIG, "v5p-32", mesh=Mesh(model=16)).device_bytes(8, 100, 8)
  assert sixteen["cache"] == eight["cache"]
  assert sixteen["weights"] == pytest.approx(
      2 * ((whole.total - whole.rest - whole.keys) / 16 + whole.keys / 8 + whole.rest))
  rows = deployment(BIG, "v5p-32", mesh=Mesh(data=2, model=8)).device_bytes(8, 100, 8)
  assert rows["cache"] == eight["cache"] // 2 and rows["weights"] == eight["weights"]
  every = deployment(BIG, "8xh100", mesh=Mesh(model=8), attention="whole").device_bytes(8, 100, 8)
  assert every["cache"] == 8 * eight["cache"]
  assert every["weights"] - eight["weights"] == pytest.approx(2 * (whole.queries + whole.keys) * 7 / 8, rel=1e-6)


def test_what_a_device_holds_is_added_up():
  """The draft's weights are whole on every device, or divided; the total is of all parts."""
  plain, with_head = EIGHT.device_bytes(8, 100, 8), EIGHT.device_bytes(8, 100, 8, dataclasses.replace(
      CHAIN, config=public_models.eagle3_head(BIG)))
  assert plain["draft_weights"] == plain["draft_cache"] == 0
  assert with_head["draft_weights"] == 2 * 1_403_027_456
  assert with_head["total"] == sum(size for name, size in with_head.items() if name != "total")
  divided = EIGHT.device_bytes(8, 100, 8, plan.Draft(public_models.eagle3_head(BIG), 7, 7, divided=True))
  assert divided["draft_weights"] == pytest.approx(2 * 1_403_027_456 / 8, rel=1e-3)
  assert EIGHT.fits(int(0.9 * 80e9)) and not EIGHT.fits(int(0.9 * 80e9) + 1)
  assert not ONE.fits(deployment(BIG).device_bytes(1, 1, 1)["total"])


def test_collectives_by_kind():
  """Two sums of f[B, T, E] a layer and one of the embedding; of logits one candidate a device, never f[B, T, V]."""
  residual = 4 * 8 * 4096 * 2
  sent = lambda **given: collectives.collective_bytes(LLAMA, Mesh(model=4, data=2), 8, 8, **given)
  layers, nodes = (2 * 32 + 1) * residual, 4 * 8
  assert sent() == {"all-reduce": layers + 2 * nodes * 4}
  assert sent(itemsize=4)["all-reduce"] == 2 * layers + 2 * nodes * 4
  sums = 4 * -(-LLAMA.vocab_size // 4 // 256)
  assert sent(draw="sampled") == {"all-reduce": layers + nodes * (1 + 256) * 4, "all-gather": nodes * sums * 4}
  assert sent(draw="filtered") == {"all-reduce": layers + nodes * (2 + 256) * 4,
                                   "all-gather": nodes * (sums + 4 * 128) * 4}
  assert sent(draw="filtered")["all-gather"] < nodes * LLAMA.vocab_size * 4 / 100
  with pytest.raises(ValueError, match="draw='mirostat': allowed are greedy, sampled, filtered"):
    sent(draw="mirostat")
  assert collectives.collective_bytes(LLAMA, Mesh(data=8), 8, 8) == {}
  whole = collectives.collective_bytes(LLAMA, Layout(Mesh(model=4), "whole"), 4, 8)
  assert whole["all-reduce"] == (32 + 1) * residual + 2 * nodes * 4


def test_collectives_of_experts():
  """Their outputs are summed over both axes at once, in place of the feed-forward's sum; shared ones are apart."""
  found = {each.what: each for each in collectives.collectives(MIXTRAL, Mesh(model=2, expert=4), 1, 4)}
  assert found["experts"].axes == ("model", "expert") and found["experts"].count == 32
  assert "feed-forward" not in found and found["attention"].axes == ("model",)
  only = {each.what for each in collectives.collectives(MIXTRAL, Mesh(expert=4), 1, 4)}
  assert only == {"experts"}
  shared = dataclasses.replace(MIXTRAL, moe=MoE(8, 2, 14336, True, dense=(0, 1), shared=64))
  found = {each.what: each.count for each in collectives.collectives(shared, Mesh(model=2), 1, 4)}
  assert found["experts"] == 30 and found["feed-forward"] == 2 + 30


def test_collective_seconds_add_up():
  """On eight chips under a switch, by hand; none on one chip; and over each axis its own chips."""
  found = collectives.collectives(BIG, Mesh(model=8), 4, 8)
  chips = hardware.find("8xh100")
  by_hand = 161 * 2 * (4 * 8 * 8192 * 2 * 7 / 8 / 450e9 + 5e-6) + 2 * 2 * (4 * 8 * 4 * 7 / 8 / 450e9 + 5e-6)
  assert collectives.seconds(found, Mesh(model=8), chips) == pytest.approx(by_hand, rel=1e-12)
  assert collectives.seconds(found, Mesh(), hardware.find("h100")) == 0
  experts = collectives.Collective("all-reduce", "", ("model", "expert"), 3, 10**6)
  assert collectives.seconds([experts], Mesh(model=2, expert=4), chips) == pytest.approx(
      3 * chips.all_reduce_seconds((8,), 10**6))


def test_a_step_never_gets_cheaper_with_more_to_do():
  for where in (ONE, EIGHT, deployment(MIXTRAL, "8xh100", mesh=Mesh(model=2, expert=4))):
    for grown in ([where.step(b, 100, 4) for b in (1, 2, 16, 512)], [where.step(2, s, 4) for s in (0, 10, 10**5)],
                  [where.step(2, 100, w) for w in (1, 4, 16, 64)]):
      totals = [time.total for time in grown]
      assert all(a <= b for a, b in zip(totals, totals[1:])) and grown[0].arithmetic < grown[-1].arithmetic
      assert all(time.total >= max(time.memory, time.arithmetic) + time.collectives - 1e-15 for time in grown)


def test_a_draft_is_its_passes():
  """A lookup is free, a head reads its weights D times and fuses once, a tree's passes are wider, a divided head
  sends."""
  assert ONE.draft(dataclasses.replace(CHAIN, config=None), 1, 100).total == 0
  each = sizes.eagle3_parameters(CHAIN.config)
  read = 2 * (7 * each.total - 6 * each.fuse) + 7 * 100 * 2 * 8 * 128 * 2
  found = ONE.draft(CHAIN, 1, 100)
  assert found.memory == pytest.approx(read / 3.35e12) and found.collectives == 0
  tree = ONE.draft(dataclasses.replace(CHAIN, nodes=63), 1, 100)
  assert tree.memory == found.memory and tree.arithmetic > found.arithmetic
  model = ONE.draft(dataclasses.replace(CHAIN, config=public_models.find("llama-3.2-1b").config), 1, 0)
  assert model.memory == pytest.approx(7 * 2 * 1_235_814_400 / 3.35e12, rel=1e-6)
  head = public_models.eagle3_head(BIG)
  whole, divided = (EIGHT.draft(plan.Draft(head, 7, 7, divided), 1, 100) for divided in (False, True))
  assert divided.memory == pytest.approx(whole.memory / 8, rel=1e-2)
  per_pass = 3 * 2 * (8192 * 2 * 7 / 8 / 450e9 + 5e-6) + 2 * 2 * (4 * 7 / 8 / 450e9 + 5e-6)
  # The target's embedding is divided, wherever the head is.
  assert whole.collectives == pytest.approx(7 * 2 * 5e-6 + (6 + 8) * 2 * 8192 * 2 * 7 / 8 / 450e9, rel=1e-6)
  assert divided.collectives > 7 * per_pass
  assert divided.collectives == pytest.approx(
      7 * per_pass + 2 * 5e-6 + (7 * (3 * 2 * 8192 * 2 + 2 * 2 * 4) + 8 * 2 * 8192 * 2) * 7 / 8 / 450e9, rel=1e-6)


@pytest.mark.parametrize("tokens, depth", [(1.5, 1), (2.0, 3), (3.36, 4), (7.9, 7)])
def test_the_acceptance_that_is_needed_gives_the_tokens(tokens, depth):
  alpha = plan.acceptance_for(tokens, depth)
  assert 1 + closed_forms.expected_accepted(alpha, depth) == pytest.approx(tokens, rel=1e-9)


def test_the_ends_of_what_acceptance_gives():
  assert plan.acceptance_for(0.7, 4) == plan.acceptance_for(1.0, 4) == 0
  assert plan.acceptance_for(5.0, 4) == pytest.approx(1) and plan.acceptance_for(5.001, 4) is None


def test_break_even_is_where_simulated_drafts_break_even():
  """Chains whose positions are accepted at the needed rate give, by counting, what a plain step gives in that time."""
  found = EIGHT.speculation(plan.Draft(public_models.eagle3_head(BIG), 5, 5), 8, 1000, 8)
  alpha = found.acceptance_needed
  assert 0 < alpha < 1 and found.speedup(alpha) == pytest.approx(1)
  taken = np.random.default_rng(0).random((200000, 5)) < alpha
  tokens = 1 + np.cumprod(taken, axis=1).sum(axis=1)
  rate = tokens.mean() / (found.verify.total + found.draft.total) * found.plain.total
  assert rate == pytest.approx(1, abs=4 * tokens.std() / len(tokens) ** 0.5)
  assert found.speedup(0) == pytest.approx(1 / found.tokens_needed) and found.speedup(1) == pytest.approx(
      6 / found.tokens_needed)


@pytest.mark.parametrize("mesh, chips", [(Mesh(), "h100"), (Mesh(data=4), "4xh100")])
def test_the_batch_from_which_drafting_loses(mesh, chips):
  where = deployment(mesh=mesh, chips=chips)
  at = where.break_even_batch(CHAIN, 500, 0.7)
  assert at % mesh.data == 0
  before, behind = (where.speculation(CHAIN, batch, 500).speedup(0.7) for batch in (at - mesh.data, at))
  assert behind <= 1 < before


def test_drafts_that_always_or_never_pay():
  """Over a very long text the cache is all that counts, and is read once whatever the width."""
  free = dataclasses.replace(CHAIN, config=None)
  assert ONE.break_even_batch(free, 10**5, 0.9) is None
  assert ONE.break_even_batch(CHAIN, 500, 0.0) == 1


def test_a_roofline_that_was_worked_out_apart_is_met():
  """An 8B on one H100 of which 80% of the bandwidth and half of the arithmetic are reached, over 1024 tokens: speedups
  of chains of 4 at acceptance 0.8 whose drafts cost 0.03 steps a token, and of trees of 60 that give 4.5 tokens."""
  where = deployment(memory_efficiency=0.8, flops_efficiency=0.5)
  ratio = lambda batch, width: where.step(batch, 1024, width).total / where.step(batch, 1024, 1).total
  chain = [(1 + closed_forms.expected_accepted(0.8, 4)) / (ratio(batch, 5) + 4 * 0.03) for batch in (32, 64, 128, 256)]
  assert chain == pytest.approx([3.0, 2.7, 1.88, 1.45], rel=0.02)
  tree = [4.5 / ratio(batch, 61) for batch in (1, 2, 4, 8, 16, 32)]
  assert tree == pytest.approx([4.5, 4.5, 3.52, 1.82, 0.97, 0.54], rel=0.05)


def test_a_mesh_is_written_as_it_is_read():
  for mesh in (Mesh(2, 4), Mesh(1, 8), Mesh(3, 1, 2)):
    assert Mesh(**mesh_lib.parse(mesh.text)) == mesh


@pytest.mark.parametrize("make, message", [
    (lambda: deployment(mesh=Mesh(model=4)), "has 4 devices, and h100 has 1"),
    (lambda: deployment(chips="8xh100", mesh=Mesh(data=2, model=4)).step(3, 9, 1),
     "batch_size=3 does not divide over data:2; give a multiple of 2 rows"),
    (lambda: deployment(chips="6xh100", mesh=Mesh(model=6)).step(3, 9, 1), "8 key/value heads do not divide"),
    (lambda: deployment(chips="6xh100", mesh=Mesh(model=6), attention="whole").step(3, 9, 1),
     "mlp_width=14336 does not divide over model:6"),
    (lambda: deployment(chips="4xh100", mesh=Mesh(expert=4)).step(3, 9, 1), "no experts"),
    (lambda: deployment(MIXTRAL, "3xh100", mesh=Mesh(expert=3)).step(3, 9, 1), "experts=8 does not divide"),
    (lambda: deployment(memory_efficiency=0.0), "memory_efficiency=0.0"),
    (lambda: deployment(flops_efficiency=1.1), "flops_efficiency=1.1"),
    (lambda: deployment(attention="some"), "allowed are 'heads' and 'whole'"),
    (lambda: plan.Draft(None, 0, 0), "at least one token"),
    (lambda: plan.Draft(None, 4, 3), "as many nodes"),
    (lambda: EIGHT.draft(plan.Draft(dataclasses.replace(public_models.eagle3_head(BIG), draft_vocab=31999), 3, 3, True),
                         1, 9), "draft_vocab=31999 does not divide")])
def test_what_does_not_fit_together_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
