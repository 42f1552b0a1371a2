"""Parity with Transformers on tiny checkpoints of both families; see `fixtures/make_fixtures.py` for how they came."""
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decode
from specjax.sampling import SamplingParams

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"


@pytest.fixture(params=["tiny_llama", "tiny_llama_untied", "tiny_qwen2"], scope="module")
def golden(request):
  target, _ = specjax.load(str(FIXTURES / request.param), dtype=jnp.float32)
  with np.load(FIXTURES / "golden_tiny.npz") as file:
    return target, {name: file[f"{request.param}_{name}"] for name in ("ids", "logits", "continuation", "gaps")}


def test_logits(golden):
  target, wanted = golden
  ids = wanted["ids"]
  batch, width = ids.shape
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
  run = jax.jit(lambda target, ids, *args: target.logits(target.forward(ids, *args).hidden))
  logits = run(target, jnp.asarray(ids), positions, mask, target.init_cache(batch, 64))
  assert logits.shape == wanted["logits"].shape
  np.testing.assert_allclose(logits, wanted["logits"], atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("quick_compile_here")
@pytest.mark.parametrize("proposer", [specjax.proposers.Plain(), specjax.proposers.NGram(num_tokens=3, min_ngram=1)],
                         ids=["plain", "ngram"])
def test_greedy_continuation(golden, proposer):
  """Every gap between the two best logits exceeds 0.02: no rounding can excuse a difference."""
  target, wanted = golden
  assert wanted["gaps"].min() > 0.02
  result = specjax.generate(target, proposer, wanted["ids"].tolist(), max_new_tokens=16)
  np.testing.assert_array_equal(result.tokens, wanted["continuation"])
  assert len(decode.widths_for(proposer.max_nodes)) == len(result.counters.steps_per_width[0])


@pytest.mark.usefixtures("quick_compile_here")
def test_sampled_prompt_lookup_is_sampled_plain_text(golden):
  target, wanted = golden
  params = SamplingParams(temperature=0.8, top_p=0.9, seed=[11, 12])
  run = lambda proposer: specjax.generate(target, proposer, wanted["ids"].tolist(), params, max_new_tokens=60)
  plain, lookup = run(specjax.proposers.Plain()), run(specjax.proposers.NGram(num_tokens=3, min_ngram=1))
  np.testing.assert_array_equal(lookup.tokens, plain.tokens)
  assert lookup.counters.drafted_tokens.sum() > 0
