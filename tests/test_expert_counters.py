"""Counters of experts: passes by hand, their summary, and random routing beside its formula."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import expert_counters
from specjax.models import base
from specjax.models import moe
from specjax.theory import experts as theory

ROUTING = base.Routing(layers=2, experts=4, chosen=2, expert_bytes=100)
count = jax.jit(expert_counters.count)
pytestmark = pytest.mark.usefixtures("quick_compile")


def test_two_passes_by_hand():
  """Two running rows and one that has ended, of which the pass computes the root; then one row alone."""
  valid = jnp.asarray([[1, 1, 0], [1, 0, 0], [1, 0, 0]], bool)
  chosen = (jnp.asarray([[[0, 1], [0, 2], [3, 3]], [[1, 0]] * 3, [[2, 0]] * 3]),
            jnp.asarray([[[0, 1], [1, 0], [3, 2]], [[0, 1]] * 3, [[1, 3]] * 3]))
  counters = expert_counters.zero(3, 2, ROUTING)
  loads = expert_counters.loads(chosen, valid, like=counters.loads)
  assert not expert_counters.loads((), valid, like=counters.loads).any()  # a drafter has run all of them
  alone = expert_counters.loads(chosen[1:], valid, like=counters.loads)  # it has run the first
  assert alone[:, 0].sum() == 0 and alone[:, 1].tolist() == loads[:, 1].tolist()
  assert loads.tolist() == [[[2, 1, 1, 0], [2, 2, 0, 0]], [[1, 1, 0, 0], [1, 1, 0, 0]], [[1, 0, 1, 0], [0, 1, 0, 1]]]
  counters = count(counters, active=jnp.asarray([True, True, False]), nodes=valid.sum(1), loads=loads,
                   width_index=jnp.int32(1))
  assert counters.loads.tolist() == [*loads[:2].tolist(), [[0] * 4] * 2]
  assert counters.passes.tolist() == [[0, .5], [0, .5], [0, 0]] and counters.nodes.tolist() == [[0, 2], [0, 2], [0, 0]]
  assert counters.touched.tolist() == [[[0, 0], [1.5, 1.5]]] * 2 + [[[0, 0]] * 2]
  one = jnp.zeros_like(loads).at[0, :, 3].set(1).at[0, :, 0].set(1)
  counters = count(counters, active=jnp.asarray([True, False, False]), nodes=jnp.asarray([1, 0, 0]), loads=one,
                   width_index=jnp.int32(0))
  totals = {name: np.asarray(x).sum(0).tolist() for name, x in vars(counters).items()}
  assert totals == {"loads": [[4, 2, 1, 1], [4, 3, 0, 1]], "touched": [[2, 2], [3, 3]], "nodes": [1, 4],
                    "passes": [1, 1]}
  found = expert_counters.summarize(totals, ROUTING, (1, 4), output_tokens=5)
  assert found == {
      "layers": 2, "experts": 4, "chosen": 2, "expert_bytes": 100,
      "by_width": [{"width": 1, "passes": 1, "nodes": 1, "distinct_per_layer": [2, 2], "distinct": 2},
                   {"width": 4, "passes": 1, "nodes": 4, "distinct_per_layer": [3, 3], "distinct": 3}],
      "load_per_expert": [[.5, .25, .125, .125], [.5, .375, 0, .125]],
      "imbalance_per_layer": [2, 2], "imbalance": 2, "bytes_per_step": 500, "bytes_per_token": 200}


def test_nothing_counted_is_null():
  zero = {name: np.asarray(x).sum(0) for name, x in vars(expert_counters.zero(1, 2, ROUTING)).items()}
  found = expert_counters.summarize(zero, ROUTING, (1, 4), output_tokens=0)
  assert found["by_width"] == [] and found["imbalance"] is found["bytes_per_step"] is found["bytes_per_token"] is None


@pytest.mark.parametrize("experts, chosen", [(128, 8), (8, 2)])
def test_random_routing_goes_through_as_many_experts_as_the_formula_says(experts, chosen):
  """By the router and the counters of the package; within 5%."""
  trials = 200
  like = jnp.zeros((trials, 1, experts), jnp.int32)
  for tokens in (1, 2, 4, 8, 16, 64):
    logits = jax.random.normal(jax.random.key(tokens), (experts, trials * tokens))
    index = moe.route(logits, chosen, True)[1].reshape(trials, tokens, chosen)
    loads = expert_counters.loads((index,), jnp.ones((trials, tokens), bool), like=like)
    assert np.mean(np.sum(loads > 0, -1)) == pytest.approx(theory.expected_distinct(experts, chosen, tokens), rel=0.05)


def test_known_values():
  found = [theory.expected_distinct(128, 8, t) for t in (1, 2, 4, 8, 16, 64)]
  assert found == pytest.approx([8, 15.5, 29.12, 51.62, 82.42, 125.94], abs=5e-3)
  sizes = [(8, 2), (64, 8), (128, 8), (256, 8), (60, 4)]
  assert [theory.saturating_tokens(*size) for size in sizes] == [11, 23, 47, 95, 44]
  assert theory.tokens_an_expert(8, 2, 1) == pytest.approx(1)
  assert theory.tokens_an_expert(8, 2, 400) == pytest.approx(100)
  with pytest.raises(ValueError, match="share=1"):
    theory.saturating_tokens(8, 2, 1)
