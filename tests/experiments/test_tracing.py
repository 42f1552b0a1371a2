"""The trace: its text is the measured one, its numbers are those of the laws, and it says why every path ended."""
import json
import types

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from experiments.harness import job
from experiments.harness import measure
from experiments.harness import run_folder
from experiments.harness import tracing
from specjax import proposers
from specjax import testing
from specjax import verifiers
import test_measure

FIELDS = {"id", "category", "language", "method", "step", "tokens", "pieces", "parents", "depths", "sampled", "p",
          "model_p", "q", "stop", "offered", "path", "accepted", "end", "emitted", "finish_reason", "width", "driver"}
tokenizer = test_measure.tokenizer


@pytest.fixture(autouse=True)
def parsed_flags():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def plan_of(tokenizer, requests, methods, **kwargs):
  return test_measure.make_plan(tokenizer, requests, methods=methods, raw=True, **kwargs)


def measured(plan):
  return [record for batch in measure.measure(plan) for record in batch]


def traced(plan, records, requests=1):
  differing = []
  steps = list(tracing.trace(plan, records, requests, differing))
  return steps, differing


def text(steps, method, name):
  own = [step for step in steps if (step["method"], step["id"]) == (method, name)]
  return [token["token"] for step in own for token in step["emitted"]]


def ended_rightly(step):
  """Whether the reason agrees with the tree and what was emitted."""
  end = step["end"]
  follows = end["node"] in step["parents"][1:]
  reasons = {"rejected": follows, "no_child": not follows, "stop": step["finish_reason"] == "stop",
             "budget": step["finish_reason"] == "length"}
  whole = len(step["emitted"]) == step["accepted"] + 1
  return reasons[end["reason"]] and whole == (end["reason"] in ("rejected", "no_child"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_traced_text_is_the_measured_one(tokenizer, temperature):
  """Whatever was drafted, in a batch whose rows end at different steps; the counters are the measured ones, too."""
  requests = [test_measure.request(name, "abab" * (i + 1)) for i, name in enumerate("ab")]
  methods = {"plain": proposers.Plain(), "noisy": testing.NoisySelf(), "ngram": proposers.NGram(num_tokens=3)}
  with flagsaver.flagsaver(temperature=temperature):
    plan = plan_of(tokenizer, requests, methods, batch_size=2)
    records = measured(plan)
    steps, differing = traced(plan, records, requests=2)
  assert not differing
  for record in records:
    own = [step for step in steps if (step["method"], step["id"]) == (record["method"], record["id"])]
    assert text(own, record["method"], record["id"]) == record["token_ids"]
    assert "".join(token["piece"] for step in own for token in step["emitted"]) == record["text"]
    assert [token["origin"] == "drafted" for step in own for token in step["emitted"]] == record["from_draft"]
    assert [step["step"] for step in own] == list(range(record["counters"]["steps"]))
    assert sum(len(step["tokens"]) - 1 for step in own) == record["counters"]["drafted_tokens"]
    assert own[-1]["finish_reason"] == record["finish_reason"] and not own[0]["finish_reason"]
    assert all(set(step) == FIELDS and ended_rightly(step) and step["width"] >= len(step["tokens"]) for step in own)
    assert all((step["end"]["u"] is None) == (temperature == 0) for step in own)
  assert any(step["accepted"] for step in steps) and any(step["end"]["reason"] == "rejected" for step in steps)


def test_the_numbers_are_those_of_the_laws(tokenizer):
  """p, q, and where the path ends, of sampled chains, against the models' own laws."""
  methods, rule = {"noisy": testing.NoisySelf()}, verifiers.Rejection()
  with flagsaver.flagsaver(temperature=0.8, seed=3):
    plan = plan_of(tokenizer, [test_measure.request("a", "abab")], methods, verifier=rule, max_new_tokens=8)
    records = measured(plan)
    steps, differing = traced(plan, records)
  assert not differing  # a rule whose draws belong to steps is held against nothing
  drawn = [step for step in steps if any(step["sampled"])]
  assert drawn
  for step in drawn:
    size = len(step["tokens"])
    accept = [min(1, step["p"][i] / step["q"][i]) for i in range(1, size)] + [0]
    reach = np.cumprod([1, *accept[:-1]])
    np.testing.assert_allclose(step["stop"], reach * (1 - np.array(accept)), atol=2e-4)
    assert 0 < step["end"]["p"] <= 1 and 0 < step["end"]["u"] < 1 and step["sampled"] == [False] + [True] * (size - 1)


def test_a_text_that_differs_is_told(tokenizer):
  plan = plan_of(tokenizer, [test_measure.request("a", "abab")], {"plain": proposers.Plain()}, max_new_tokens=6)
  records = measured(plan)
  records[0]["token_ids"][4] += 1
  _, differing = traced(plan, records)
  assert list(map(str, differing)) == ["request a under plain: the traced text leaves the measured one at output token 4"]
  assert differing[0].greedy and differing[0].shared == records[0]["token_ids"][:4]
  assert differing[0].prompt == records[0]["prompt_ids"]


@pytest.mark.parametrize("lead, faults", [(5e-5, 0), (2e-4, 1)])
def test_a_near_tie_is_told_and_is_no_fault(tokenizer, monkeypatch, capsys, lead, faults):
  plan = plan_of(tokenizer, [test_measure.request("a", "abab")], {"plain": proposers.Plain()}, max_new_tokens=6)
  records = measured(plan)
  records[0]["token_ids"][4] += 1
  run = types.SimpleNamespace(plan=plan, folder=types.SimpleNamespace(records=lambda: records,
                                                                      write_lines=lambda name, lines: list(lines)))
  monkeypatch.setattr(job.near_ties, "gap", lambda target, prompt, output: lead)
  assert len(job.Job.trace(run, 1)) == faults
  assert ("at a near tie: the two best logits are 5.0e-05 apart" in capsys.readouterr().err) == (not faults)


def test_the_first_requests_of_each_category_are_traced_and_no_more(tokenizer, monkeypatch):
  requests = [test_measure.request(f"{category}{i}", "ab", category=category) for category in ("x", "y")
              for i in range(3)]
  plan = plan_of(tokenizer, requests, {"plain": proposers.Plain()}, max_new_tokens=2)
  records = measured(plan)
  steps, _ = traced(plan, records, requests=2)
  assert list(dict.fromkeys(step["id"] for step in steps)) == ["x0", "x1", "y0", "y1"]
  monkeypatch.setattr(tracing, "MAX_BYTES", 1)
  steps, _ = traced(plan, records, requests=2)
  assert {step["id"] for step in steps} == {"x0"}  # a request is whole, and the next one too much


def test_lines_are_written_whole_or_not_at_all(tmp_path):
  folder = run_folder.RunFolder(str(tmp_path / "run"), overwrite=False, resume=False, config={})
  folder.open()
  folder.write_lines(run_folder.STEPS, ({"step": i} for i in range(3)))
  path = tmp_path / "run" / "steps.jsonl"
  assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]

  def broken():
    yield {"step": 9}
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    folder.write_lines(run_folder.STEPS, broken())
  assert path.read_text().count("\n") == 3
