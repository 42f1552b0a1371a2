"""The pair that needs no download: its parts fit together, drafts are sometimes right, and text comes out."""
import numpy as np

from specjax import drivers
from specjax import proposers
from specjax.testing import tiny


def test_the_pair_drafts_and_keeps_the_text():
  target, drafter, tokenizer = tiny.pair()
  assert tokenizer.vocab_size == target.vocab_size == drafter.vocab_size and tokenizer.eos_ids == (23,)
  prompts = [tokenizer.encode(text) for text in ("abcab", "k", "hello".replace("o", "a"))]
  plain = drivers.generate(target, proposers.Plain(), prompts, max_new_tokens=40, eos_ids=tokenizer.eos_ids)
  result = drivers.generate(target, proposers.DraftModel(model=drafter, num_tokens=3), prompts, max_new_tokens=40,
                            eos_ids=tokenizer.eos_ids)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()


def test_text_goes_both_ways():
  tokenizer = tiny.tokenizer()
  assert tokenizer.decode(tokenizer.encode("wabc")) == "wabc" and max(tokenizer.encode("wabc")) == 22
