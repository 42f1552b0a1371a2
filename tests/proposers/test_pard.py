"""PARD: one pass over the text and masks behind it. Its drafts, step by step, are in `test_model_drafters`."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
from specjax import checkpoints
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import starting
from specjax import verifiers
from specjax.testing import tiny
import verified_texts

pytestmark = pytest.mark.usefixtures("quick_compile")
BIG = verified_texts.TARGET
MODEL = BIG.replace(salt=np.uint32(5))
DRAWN = proposers.Pard(model=MODEL, mask_id=1, num_tokens=3, drawing=proposers.Drawing(sampled=True))
TARGET = tiny.decoder(vocab=24, max_context=256)
PROMPTS = [[5, 1, 0, 7], [3, 9, 2, 11, 4, 4, 8, 1, 0, 6, 13, 22, 17], [14]]


def plain_laws(model, tokens):
  """The law behind every token of one text, in one ordinary pass over all of it: f[T, V]."""
  tokens = jnp.asarray([tokens], jnp.int32)
  place, mask = jnp.arange(tokens.shape[1])[None], jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
  return np.asarray(jax.nn.softmax(model.logits(model.forward(tokens, place, mask, model.init_cache(1, 1)).hidden)))[0]


def test_laws_are_those_of_an_ordinary_pass_over_text_and_masks():
  """Behind prompts of unlike lengths, and where the cache holds some of the text; the mask is a row behind the ids."""
  wide = tiny.decoder(vocab=26, max_context=256).keep((0, 1))
  model = wide.replace(config=dataclasses.replace(wide.config, num_tokens=24))
  proposer = proposers.Pard(model=model, mask_id=25, num_tokens=4, drawing=proposers.Drawing(sampled=True))
  state = drivers.start(TARGET, proposer, PROMPTS, sampling.SamplingParams(temperature=1.0), max_new_tokens=20,
                        verifier=verifiers.Rejection())
  for _ in range(3):
    tree, own = starting.draft(TARGET, proposer, state)
    assert own.cache.length.tolist() == state.length.tolist()  # of what was committed, and of no mask
    for row, length in enumerate(state.length.tolist()):
      text = np.asarray(state.tokens[row, :length]).tolist()
      wanted = plain_laws(model, text + [25] * 3)[-4:]
      size = int(tree.size[row])
      assert size > 1
      np.testing.assert_allclose(np.asarray(tree.q.dense(24))[row, :size - 1], wanted[:size - 1], atol=2e-5)
    state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Rejection())


def test_sampled_drafts_leave_the_law_of_the_target():
  result, texts = verified_texts.run(DRAWN, (verifiers.Rejection(), verifiers.Block(), verifiers.Traversal()))
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()
  assert min(min(verified_texts.p_values(text)) for text in texts) > 1e-3


def test_q_is_the_law_that_was_drawn_from():
  """Of every depth: that behind the text and as many masks, whatever was drawn above."""
  rows, params = 2048, sampling.SamplingParams(temperature=1.4, top_k=3)
  state = drivers.start(BIG, DRAWN, [[1, 2, 3]] * rows, params, max_new_tokens=9, verifier=verifiers.Block())
  tree, _ = starting.draft(BIG, DRAWN, state)
  q, tokens = np.asarray(tree.q.dense(BIG.vocab)), np.asarray(tree.tokens)
  for depth in range(3):
    law = dummy_law.law(MODEL, [1, 2, 3] + [1] * depth, 3, temperature=1.4, top_k=3)[0]
    np.testing.assert_allclose(q[:12, depth], law[None].repeat(12, 0), atol=1e-5)
    assert dummy_law.p_value(np.bincount(tokens[:, depth + 1], minlength=BIG.vocab), law) > 1e-3


def test_the_mask_token_of_a_published_folder(tmp_path):
  path = tmp_path / "config.json"
  path.write_text(json.dumps({"model_type": "qwen2", "pard_token": 151665, "spd_type": "pard"}))
  assert checkpoints.pard_token(tmp_path) == 151665
  for values, message in (({}, "'pard_token' is None"), ({"pard_token": -1}, "'pard_token' is -1"),
                          ({"pard_token": 5, "spd_type": "pard2"}, "'spd_type' is 'pard2'"),
                          ({"pard_token": 5, "pard2": True}, "'pard2' is True")):
    path.write_text(json.dumps(values))
    with pytest.raises(checkpoints.CheckpointError, match=message):
      checkpoints.pard_token(tmp_path)
  (tmp_path / "model.gguf").write_bytes(b"GGUF")
  with pytest.raises(checkpoints.CheckpointError, match="a GGUF file does not say"):
    checkpoints.pard_token(tmp_path / "model.gguf")
