"""The matrix of exactness: what it covers, that it judges, and that it reports what is wrong instead of passing."""
import itertools
import json

import numpy as np
import pytest

from experiments.harness import exactness
from experiments.harness import exactness_draws
from experiments.report import exactness as page
from specjax import verifiers
from specjax.theory import drafts
from specjax.theory import wrong_rules

pytestmark = pytest.mark.usefixtures("quick_compile")

# One cell of each kind, all of one shape, so that few programs compile.
FEW = [exactness.Cell("iid", "rejection", "chain of 2", "none"),
       exactness.Cell("iid", "block", "chain of 2", "penalties"),
       exactness.Cell("without_replacement", "traversal", "three siblings", "none"),
       exactness.Cell("without_replacement", "recursive", "three siblings", "top-k, top-p"),
       exactness.Cell("iid, sparse", "kseq", "three siblings", "none"),
       exactness.Cell("top_k", "point", "three siblings", "minimum length"),
       exactness.Cell("top_k", "lossy_typical", "three siblings", "none"),
       exactness.Cell("iid", "lossy_lenient", "chain of 2", "greedy")]


def test_the_matrix_holds_everything_that_goes_together():
  cells = exactness.cells()
  assert len(cells) >= 150 and len(set(cells)) == len(cells)
  seen = lambda field: {getattr(cell, field) for cell in cells}
  assert seen("verifier") == set(exactness_draws.rules()) > set(verifiers.BY_NAME)
  assert seen("tree") == set(exactness.TREES)
  assert seen("processors") == set(exactness.PROCESSORS) and seen("draft") == set(exactness.DRAFTS)
  assert set(drafts.NAMES) <= seen("draft")
  lossless = {name for name, rule in verifiers.BY_NAME.items() if rule.lossless}
  for verifier, processors in itertools.product(lossless, exactness.PROCESSORS):
    assert any(cell.verifier == verifier and cell.processors == processors for cell in cells), (verifier, processors)
  for verifier in lossless - {"rejection", "block", "coupled", "kseq"}:  # on trees, with and without replacement
    for draft in {"iid", "without_replacement"} - ({"without_replacement"} if verifier == "greedy_multi" else set()):
      assert any(cell.verifier == verifier and cell.draft == draft and cell.tree == "branches" for cell in cells)


@pytest.fixture(scope="module")
def lines():
  return [exactness.judge(cell) for cell in FEW]


def test_lossless_cells_keep_the_law_and_lossy_ones_say_how_far_they_stray(lines):
  for cell, line in zip(FEW, lines, strict=True):
    assert {"draft", "verifier", "tree", "processors", "lossless", "max_error", "expected_accepted"} <= set(line)
    assert line["verifier"] == cell.verifier and line["lossless"] == verifiers.BY_NAME[cell.verifier]().lossless
    assert 0 <= line["expected_accepted"] <= 3
    if line["lossless"]:
      assert exactness.fits_bound(line) and line["total_variation"] < 1e-11
  assert lines[6]["total_variation"] > 0.01
  best = [line["best_possible"] for line in lines]
  # Three of three tokens without replacement: one of them is the target's for certain.
  assert best[2] == pytest.approx(1) == pytest.approx(lines[2]["expected_accepted"])
  assert lines[4]["expected_accepted"] < best[4] and best[1] is None
  # Points among siblings: p of the set, under any processors. A chain of two: more than rejection, whose best is block.
  assert best[5] == pytest.approx(lines[5]["expected_accepted"]) and lines[0]["expected_accepted"] < best[0] - 1e-3
  block = exactness.judge(exactness.Cell("iid", "block", "chain of 2", "none"))
  assert block["expected_accepted"] == pytest.approx(block["best_possible"])


def test_a_wrong_verifier_is_reported(monkeypatch):
  class Uncapped(wrong_rules.Block):
    lossless = True

  monkeypatch.setitem(verifiers.BY_NAME, "block", lambda: Uncapped(capped=False))
  line = exactness.judge(exactness.Cell("iid", "block", "chain of 2", "none"))
  assert line["max_error"] > 1e-3 and not exactness.fits_bound(line)
  block = {"cells": 1, "at_least": 1, "point_cells": 1, "equal": 1}
  failures = exactness.failures([line], [], [], [], block)
  assert len(failures) == 2 and failures[0].startswith("block with iid on chain of 2, none: error ")
  assert "accepts 1.3" in failures[1] and "more than is possible, 1.29" in failures[1]


def test_everything_that_must_not_be_is_a_failure():
  block = {"cells": 2, "at_least": 2, "point_cells": 1, "equal": 1}
  fine = dict(verifier="point", draft="iid", tree="chain of 1", processors="none", lossless=True, max_error=1e-8,
              max_error_x64=1e-16)
  draw, steps = dict(verifier="point", tree="t", max_error=1e-8), dict(verifier="point", max_error=1e-15)
  caught = dict(name="x", max_error=0.1, right_twin=1e-9)
  assert exactness.failures([fine, fine | {"lossless": False, "max_error": 1}], [draw], [steps], [caught], block) == []
  for wrong in ([fine | {"max_error": 2e-6}], [fine | {"max_error_x64": 2e-12}], [fine | {"max_error": np.nan}]):
    assert len(exactness.failures(wrong, [draw], [steps], [caught], block)) == 1
  assert len(exactness.failures([fine], [draw | {"max_error": 1e-5}], [steps], [caught], block)) == 1
  assert len(exactness.failures([fine], [draw | {"standard_errors": 6}], [steps], [caught], block)) == 1
  assert exactness.failures([fine], [draw | {"max_error": 1e-3, "standard_errors": 3}], [steps], [caught], block) == []
  more = fine | {"expected_accepted": 0.8, "best_possible": 0.7}
  assert len(exactness.failures([more], [draw], [steps], [caught], block)) == 1
  assert len(exactness.failures([fine], [draw], [steps | {"max_error": 1e-9}], [caught], block)) == 1
  assert len(exactness.failures([fine], [draw], [steps], [caught | {"max_error": 1e-4}], block)) == 1
  assert len(exactness.failures([fine], [draw], [steps], [caught | {"right_twin": 1e-3}], block)) == 1
  assert len(exactness.failures([fine], [draw], [steps], [caught], block | {"at_least": 1})) == 1
  assert len(exactness.failures([fine], [draw], [steps], [caught], block | {"equal": 0})) == 1


def test_block_is_compared_with_rejection_in_the_same_cell():
  line = lambda verifier, draft, accepted, tree="chain of 2": dict(verifier=verifier, draft=draft, tree=tree,
                                                                   processors="none", expected_accepted=accepted)
  lines = [line("rejection", "iid", 1.0), line("block", "iid", 1.1), line("rejection", "argmax", 0.5),
           line("block", "argmax", 0.5), line("rejection", "iid", 1.0, "chain of 3"),
           line("block", "iid", 0.9, "chain of 3"), line("traversal", "iid", 0.1)]
  assert exactness.block_against_rejection(lines) == {"cells": 3, "at_least": 2, "point_cells": 1, "equal": 1}


def test_groups_and_page(lines, tmp_path):
  groups = exactness.groups(lines)
  assert [group["cells"] for group in groups] == [1] * len(FEW)
  assert "LOSSY" in exactness.line_of(groups[6]) and "LOSSY" not in exactness.line_of(groups[0])
  result = {"cells": lines, "negatives": [{"name": "<b>wrong</b>", "max_error": 0.1, "right_twin": 1e-9}],
            "draws": [{"verifier": "block", "tree": "chain of 3", "max_error": 1e-8},
                      {"verifier": "coupled", "tree": "counted", "max_error": 1e-3, "standard_errors": 1.5}],
            "two_steps": [{"verifier": "block", "max_error": 1e-16}], "failures": ["something is <off>"],
            "seconds": 1.0}
  page.write(tmp_path / "exactness.html", json.loads(json.dumps(result)), groups)
  html = (tmp_path / "exactness.html").read_text(encoding="utf-8")
  assert "&lt;b&gt;wrong&lt;/b&gt;" in html and "something is &lt;off&gt;" in html and "<b>wrong" not in html
  assert "(1.5 standard errors)" in html
  for name in (*{cell.verifier for cell in FEW}, *{cell.draft for cell in FEW}):
    assert name in html


def test_a_seed_reaches_what_is_drawn(monkeypatch):
  monkeypatch.setattr(exactness_draws, "RACES", 2 ** 16)
  race = lambda seed: list(exactness_draws.races(seed))
  exact, counted = race(3)
  assert exact["max_error"] < 1e-12 and 0 < counted["standard_errors"] < exactness.CHANCE
  assert race(4)[1]["max_error"] != counted["max_error"]
  seeds = {line["tree"].rpartition(" ")[2] for line in itertools.islice(exactness.other_seeds(3), 4)}
  assert seeds == {"4"}
