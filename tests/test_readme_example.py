"""The proposer that README shows is the whole of one: it drafts, it is exact, and one line lists it."""
import pathlib
import re
import sys
import types

from absl import flags
import numpy as np
import pytest

from experiments.harness import methods
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax.sampling import SamplingParams

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Add a proposer")[1].split("\n## ")[0]
CODE, LINE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def bigram(monkeypatch):
  module = types.ModuleType("specjax.proposers.bigram")
  monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setattr(proposers, "bigram", module, raising=False)
  exec(compile(CODE, "README.md", "exec"), module.__dict__)
  return module


def test_it_fits_on_a_page():
  assert len(CODE.splitlines()) <= 40 and max(map(len, CODE.splitlines())) <= 120


def test_it_drafts_and_keeps_the_text(bigram):
  target = testing.DummyTarget(vocab=12, order=1)
  prompts, new = [[1, 2, 3], [4, 5, 6, 7, 4, 5], [2]], [40, 33, 20]
  for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=[3, 4, 5])):
    plain = drivers.generate(target, proposers.Plain(), prompts, params, max_new_tokens=new)
    result = drivers.generate(target, bigram.Bigram(), prompts, params, max_new_tokens=new)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert result.counters.accepted_tokens.sum() > 0
  greedy = drivers.generate(target, bigram.Bigram(), prompts, max_new_tokens=new)
  assert (greedy.counters.steps < np.asarray(new) * 0.75).all()


def test_one_line_lists_it(bigram):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  imported, entry = LINE.strip().splitlines()
  names = dict(vars(methods))
  exec(imported, names)
  listed = eval("{" + entry + "}", names)
  assert list(listed) == ["bigram"]
  given = methods.Given(target=testing.DummyTarget(), tokenizer=None, name="dummy")
  assert listed["bigram"].build(given) == bigram.Bigram(num_tokens=3)
