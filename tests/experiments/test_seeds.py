"""The count over seeds: its table answers as the model does, it accepts what is exact and notices what is not."""
from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from experiments.harness import context_table
from experiments.harness import seeds
from experiments.harness import settings
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import testing
from specjax import verifiers

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET, PROMPT = testing.DummyTarget(vocab=12, sharpness=1.5), [3, 1, 4]


@pytest.fixture(scope="module")
def counted():
  return seeds.Counted(TARGET, PROMPT, temperature=0.9, top_k=3, noise=1.6)


def test_the_table_gives_the_texts_of_the_model(counted):
  table = context_table.tabulate(TARGET, PROMPT, 3, 3)
  assert table.table.shape == (1 + 3 + 9, 12)
  run = lambda target: drivers.generate(target, proposers.Plain(), [PROMPT] * 64, max_new_tokens=3, eos_ids=(),
                                        params=sampling.SamplingParams(temperature=0.9, top_k=3)).tokens
  np.testing.assert_array_equal(run(table), run(TARGET))
  for name in ("plain", "traversal"):
    assert counted.on_the_real_model(name, 16) == 16


def test_what_is_exact_passes_and_what_is_not_is_noticed(counted, monkeypatch):
  plain = counted.run("plain", 2000, 500)
  assert plain["p_value"] > 1e-3 and plain["impossible_texts"] == 0 and plain["p_value_against_plain"] is None
  good = counted.run("traversal", 2000, 500)
  assert min(good["p_value"], good["p_value_against_plain"]) > 1e-3 and good["accepted_per_step"] > 0.5
  _, shape, rule = seeds.CASES["traversal"]
  monkeypatch.setitem(seeds.CASES, "traversal", (verifiers.LossyTypical(), shape, rule))
  bad = counted.run("traversal", 2000, 500)
  assert bad["p_value"] < 1e-6 and bad["p_value_against_plain"] < 1e-2


def test_an_impossible_text_is_no_fit():
  assert seeds._goodness(np.array([50.0, 50, 1]), np.array([50.5, 50.5, 0])) == 0


def test_the_law_is_that_of_plain_decoding(counted):
  law = counted._law
  assert len(law) == 27 and sum(law.values()) == pytest.approx(1)


def test_coupled_texts_of_all_drafters_are_equal():
  same = seeds.coupled_texts(TARGET, PROMPT, 0.8, 12, seeds=3)
  assert set(same["equal"].values()) == {3} and same["differences"] == []
  assert same["accepted"]["noisy self"] > 0 and same["accepted"]["always wrong"] == 0


def test_failures_name_what_is_wrong():
  case = {"case": "block", "p_value": 0.5, "p_value_against_plain": 0.5, "equal_on_the_model": 8}
  same = {"seeds": 4, "equal": {"ngram": 4}, "accepted": {"noisy self": 3}, "differences": [{"gap": 1e-5}]}
  assert seeds.failures([case], same, 8) == []
  assert seeds.failures([case | {"p_value_against_plain": None}], same, 8) == []
  for wrong in ({"p_value": 1e-9}, {"p_value_against_plain": 1e-9}, {"equal_on_the_model": 5}):
    assert len(seeds.failures([case | wrong], same, 8)) == 1
  for wrong in ({"equal": {"ngram": 3}}, {"accepted": {"noisy self": 0}}, {"differences": [{"gap": 0.1}]}):
    assert len(seeds.failures([case], same | wrong, 8)) == 1


def test_flags_that_nothing_reads_are_refused():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  settings.uses_only(settings.TARGET)
  with flagsaver.flagsaver(top_k=5):
    flags.FLAGS["top_k"].using_default_value = False
    with pytest.raises(ValueError, match="--top_k=5: this experiment makes no use of it.*takes --target, --temperature"):
      settings.uses_only(settings.TARGET, settings.TEMPERATURE)
    settings.uses_only(settings.TARGET, settings.TOP_K)
