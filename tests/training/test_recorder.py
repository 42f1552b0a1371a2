"""Features that are kept while a target answers are those that a second pass over its texts computes."""
import jax
import numpy as np
import pytest

import specjax
from specjax import proposers
from specjax.testing import tiny
from specjax.training import corpus
from specjax.training import features
from specjax.training import recorder

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = tiny.decoder(layers=2, max_context=512)
LAYERS = (1, 0, 2)
PROMPTS = [[3, 5, 7], [2] * 70, [9]]  # one of two prefill chunks, one of a single token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_recorder_keeps_what_a_second_pass_computes(tmp_path, temperature):
  params = specjax.SamplingParams(temperature=temperature, seed=[1, 2, 3])
  args = dict(max_new_tokens=[12, 9, 1], key=jax.random.key(0))
  whole = specjax.generate(TARGET, proposers.Plain(), PROMPTS, params, eos_ids=(), **args)
  args["eos_ids"] = whole.token_ids[0][4:5] if temperature else ()  # a row may end before the others
  result = specjax.generate(TARGET, recorder.Recorder(LAYERS), PROMPTS, params, **args)
  plain = specjax.generate(TARGET, proposers.Plain(), PROMPTS, params, **args)
  assert result.token_ids == plain.token_ids  # it looks on, and changes nothing
  assert (len(result.token_ids[0]) < 12) == (temperature > 0)
  texts = [[*prompt, *answer][:-1] for prompt, answer in zip(PROMPTS, result.token_ids)]
  corpus.write(tmp_path, 0, corpus.pack([(text, 1) for text in texts]))
  features.compute(TARGET, tmp_path, LAYERS, 384)
  wanted = features.read(tmp_path, 0, LAYERS)
  kept = recorder.recorded(TARGET, result.proposer_state)
  assert [len(file.top) for file in kept] == [len(file.values) for file in kept] == list(map(len, texts))
  values = np.concatenate([file.values for file in kept])
  np.testing.assert_allclose(values.astype(np.float32), np.asarray(wanted.values, np.float32), rtol=2e-3, atol=2e-4)
  logits = TARGET.logits(np.asarray(wanted.values[:, -TARGET.config.width:], np.float32))
  best = np.take_along_axis(np.asarray(logits), np.concatenate([file.top for file in kept])[:, None], 1)[:, 0]
  np.testing.assert_allclose(best, logits.max(-1), atol=5e-3)
