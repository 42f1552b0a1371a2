"""Runs side by side: what is paired, what is called a regression, what ends the gate with which code."""

import json

from absl import flags
from absl.testing import flagsaver
import pytest

from experiments import compare
from experiments.harness import cli
from experiments.harness import comparing
import test_report


@pytest.fixture(autouse=True)
def parsed_flags():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def write(folder, factors, *, seconds=1.0, tokens=20, methods=("plain", "ngram"), **config):
  """A run of a request a factor of its time, under each method: all are of category code but the last half, of chat."""
  folder.mkdir(parents=True)
  lines = []
  for i, factor in enumerate(factors):
    for method in methods:
      ids = list(range(tokens))
      lines.append(test_report.make_request(
          f"r{i}", method, "code" if i < len(factors) / 2 else "chat", token_ids=ids, batch=f"r{i}", batch_size=1,
          seconds=(seconds + 0.01 * i) * (factor if method != "plain" else 1),
          counters={"steps": 10, "output_tokens": tokens}))
  test_report.write_run(folder, [test_report.make_group("plain", "all")], lines, config=config)
  return folder


def cells(base, other, threshold=0.03):
  runs = [comparing.load(str(base)), comparing.load(str(other))]
  return {(cell.method, cell.category): cell for cell in comparing.compare(runs, threshold)}


def test_a_slower_run_is_a_regression_past_the_threshold_only(tmp_path):
  base, other = write(tmp_path / "a", [1.0] * 20), write(tmp_path / "b", [1.25] * 20)
  found = cells(base, other)
  assert set(found) == {(method, category) for method in ("plain", "ngram") for category in ("all", "code", "chat")}
  cell = found["ngram", "all"]
  assert (cell.requests, cell.same_texts, cell.verdict) == (20, 20, comparing.REGRESSION)
  assert cell.ratio == pytest.approx(0.8) and cell.interval == pytest.approx([0.8, 0.8]) and cell.steps == (2, 2)
  assert cell.base == pytest.approx(20 * 20 / sum(1 + 0.01 * i for i in range(20)))
  assert found["plain", "all"].verdict == comparing.SAME
  assert cells(base, other, threshold=0.21)["ngram", "all"].verdict == comparing.SLOWER
  assert cells(other, base)["ngram", "code"].verdict == comparing.FASTER


def test_what_varies_more_than_it_lost_is_no_regression(tmp_path):
  base = write(tmp_path / "a", [1.0] * 20)
  other = write(tmp_path / "b", [0.6, 1.5] * 10)
  cell = cells(base, other)["ngram", "all"]
  assert cell.ratio < 0.97 and cell.interval[0] < 1 < cell.interval[1] and cell.verdict == comparing.SAME


def test_below_three_requests_there_is_no_verdict(tmp_path):
  cell = cells(write(tmp_path / "a", [1.0] * 2), write(tmp_path / "b", [3.0] * 2))["ngram", "all"]
  assert cell.interval is None and cell.verdict == comparing.TOO_FEW
  noisy = cells(write(tmp_path / "c", [1.0] * 3), write(tmp_path / "d", [0.5, 0.9, 1.1]))["ngram", "all"]
  assert noisy.verdict == comparing.SAME


def test_only_common_requests_count_and_the_rest_is_told(tmp_path):
  base, other = write(tmp_path / "a", [1.0] * 10, seed=1), write(tmp_path / "b", [1.0] * 12, methods=("plain",), seed=2)
  runs = [comparing.load(str(base)), comparing.load(str(other))]
  found = comparing.compare(runs, 0.03)
  assert {cell.method for cell in found} == {"plain"} and found[0].requests == 10
  told = comparing.notes(runs)
  assert f"{other}: seed is 2, and 1 in {base}" in told
  assert any("left out are 10 requests" in note and "2 that only" in note for note in told)
  with pytest.raises(ValueError, match="no request under one method in common"):
    comparing.compare([runs[1], comparing.load(str(write(tmp_path / "c", [1.0], methods=("ngram",))))], 0.03)


def test_other_texts_are_counted(tmp_path):
  base, other = write(tmp_path / "a", [1.0] * 8), write(tmp_path / "b", [1.0] * 8, tokens=25)
  cell = cells(base, other)["ngram", "all"]
  assert cell.same_texts == 0 and cell.ratio == pytest.approx(1.25) and cell.steps == (2, 2.5)


@pytest.mark.parametrize("change, message", [
    (lambda folder: (folder / "summary.json").unlink(), "summary.json is missing"),
    (lambda folder: (folder / "requests.jsonl").write_text(""), "holds no records"),
    (lambda folder: (folder / "requests.jsonl").write_text(json.dumps(test_report.make_request())), "has no 'seconds'"),
])
def test_a_folder_that_cannot_be_compared_is_named(tmp_path, change, message):
  folder = write(tmp_path / "a", [1.0])
  change(folder)
  with pytest.raises(ValueError, match=message):
    comparing.load(str(folder))


def run_main(*folders, **given):
  """The exit code of the program."""
  with flagsaver.flagsaver(**given), pytest.raises(SystemExit) as ended:
    compare.main([str(folder) for folder in folders])
  return ended.value.code


def test_the_gate_ends_with_one_past_the_threshold(tmp_path, capsys):
  base, slow = write(tmp_path / "a", [1.0] * 20), write(tmp_path / "b", [1.25] * 20)
  assert run_main(base, slow) == 1
  shown = capsys.readouterr()
  assert "regression: ngram, all: 0.800 of the throughput" in shown.err and "plain" not in shown.err
  assert any(line.split()[:3] == ["ngram", "all", "20"] and line.endswith("REGRESSION")
             for line in shown.out.splitlines())
  assert run_main(base, slow, threshold=0.5) == 0
  assert not capsys.readouterr().err


def test_one_run_or_one_named_twice_is_refused(tmp_path):
  folder = write(tmp_path / "a", [1.0])
  for folders, message in (([folder], "at least two are needed"), ([folder, folder], "named twice")):
    with pytest.raises(ValueError, match=message):
      compare.main([str(name) for name in folders])


def test_the_page_has_a_table_for_every_run(tmp_path):
  folders = [write(tmp_path / name, [factor] * 20) for name, factor in (("<i>a", 1.0), ("b", 1.25), ("c", 1.0))]
  assert run_main(*folders, outdir=str(tmp_path / "page")) == 1
  parsed = test_report.Page((tmp_path / "page" / "compare.html").read_text(encoding="utf-8"))
  assert not parsed.unbalanced and not parsed.stack and not parsed.named("i")
  test_report.assert_safe(parsed)
  assert parsed.rows.count(list(comparing.COLUMNS)) == 2 and "3 regressions" in " ".join(parsed.text.split())
  assert parsed.row("ngram", "all")[-1] == comparing.REGRESSION


def test_other_programs_still_refuse_arguments(monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["program", "stray"])
  with pytest.raises(SystemExit) as ended:
    cli.run(lambda: None)
  assert ended.value.code == 2 and "unexpected argument 'stray'" in capsys.readouterr().err
