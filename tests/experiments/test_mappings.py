"""A process that nears the limit of memory mappings ends with a reason."""
import pytest

from experiments.harness import mappings
from experiments.harness import measure
from specjax import proposers
from specjax import testing


def files(tmp_path, held, allowed):
  (tmp_path / "maps").write_text("line\n" * held)
  (tmp_path / "most").write_text(f"{allowed}\n")
  return tmp_path / "maps", tmp_path / "most"


def test_far_from_the_limit_nothing_happens(tmp_path):
  mappings.check(*files(tmp_path, 95, 100))
  mappings.check(tmp_path / "none", tmp_path / "none")
  mappings.check()


def test_near_the_limit_it_says_what_to_change(tmp_path):
  with pytest.raises(ValueError, match="hold 96 of the 100 memory mappings.*max_map_count=.*fewer methods"):
    mappings.check(*files(tmp_path, 96, 100))


def test_compiling_looks_at_it(monkeypatch):
  """The loop that compiles a measurement's programs asks before each."""
  asked = []
  monkeypatch.setattr(measure.mappings, "check", lambda: asked.append(1))
  monkeypatch.setattr(measure.drivers, "warm_up", lambda *args, **kwargs: asked.append(2))
  monkeypatch.setattr(measure, "_first_prompt", lambda plan, request: [1] * 9)
  monkeypatch.setattr(measure.settings, "sampling_params", lambda: None)
  monkeypatch.setattr(measure.settings, "random_key", lambda: None)
  plan = measure.Plan(target=testing.DummyTarget(), tokenizer=None, batches=[[None]], repeats=1, max_new_tokens=2,
                      methods={"plain": proposers.Plain(), "ngram": proposers.NGram()})
  measure.warm_up(plan)
  assert asked == [1, 2, 1, 2]
