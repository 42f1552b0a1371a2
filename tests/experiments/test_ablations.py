"""The ablations: all that need tables only run and are judged; golden numbers, the registry, page and program."""
import dataclasses
import html.parser
import json
import re

import numpy as np
import pytest

import programs
from experiments.ablations import base
from experiments.ablations import chains
from experiments.ablations import exact
from experiments.ablations import gallery
from experiments.ablations import registry
from specjax import verifiers
from specjax.theory import tables as tables_lib

pytestmark = pytest.mark.usefixtures("quick_compile")
SIMS = [name for name, ablation in registry.ALL.items() if ablation.kind == "sim"]
# What each verdict is with seed 0. A change here is a finding: say in the ablation what it is.
DIFFER = {"draft_size", "uncapped_block", "lenience", "confidence", "batch", "draft_conditioning"}


@pytest.fixture(scope="module")
def outdir(tmp_path_factory):
  return tmp_path_factory.mktemp("ablations")


@pytest.fixture(scope="module")
def found(outdir):
  """All of them, run once."""
  done = list(gallery.run(registry.choose(["sim"]), base.Options(), outdir))
  gallery.write(done, "a <command>", outdir)
  return {one.ablation.name: one for one in done}


def test_the_registry():
  assert len(SIMS) >= 18 and len(registry.ALL) == sum(len(module.ABLATIONS) for module in registry._MODULES)
  items = {item for name in SIMS for item in registry.ALL[name].items}
  assert len(items) >= 24 and items <= set(registry.QUESTIONS)
  assert list(registry.QUESTIONS) == list(range(1, 34))
  assert {ablation.kind for ablation in registry.ALL.values()} == set(base.KINDS)
  for name, ablation in registry.ALL.items():
    assert name == ablation.name and re.fullmatch(r"[a-z0-9_]+", name) and ablation.kind in base.KINDS
    assert ablation.title and ablation.paper and ablation.answers and ablation.run.__doc__


def test_choosing():
  names = lambda *given: [ablation.name for ablation in registry.choose(given)]
  assert names("sim") == SIMS and names("all") == list(registry.ALL)
  assert names("toy") == [name for name in registry.ALL if name not in SIMS]
  assert names("tree_size", "lockstep", "tree_size") == [n for n in registry.ALL if n in ("tree_size", "lockstep")]
  assert names("sim", "tree_size") == SIMS
  for given in (["tree_sise"], [], ["sim", "nothing"]):
    with pytest.raises(ValueError, match="--run=.*allowed are all, sim, toy, "):
      registry.choose(given)


def test_every_one_is_judged(found):
  assert list(found) == SIMS
  for name, done in found.items():
    result = done.result
    assert result.verdict in base.VERDICTS and re.search(r"\d", result.why) and result.why.endswith("."), name
    assert result.curves and result.rows and len(result.columns) == len(set(result.columns)), name
    for series in result.curves:
      assert all(value is None or np.isfinite(value) for value in series.y), (name, series.label)
    assert {points.of for points in result.published} <= {None, *(series.label for series in result.curves)}, name
    assert all(len(points.source) > 10 for points in result.published), name


def test_verdicts(found):
  verdicts = {name: done.result.verdict for name, done in found.items()}
  assert {name for name, verdict in verdicts.items() if verdict == base.DIFFERS} == DIFFER
  assert {name for name, verdict in verdicts.items() if verdict == base.CANNOT_SAY} == {"parallel_drafting"}


def curve(found, name, label):
  return next(dict(zip(series.x, series.y)) for series in found[name].result.curves if series.label == label)


def test_golden_numbers(found):
  """From the papers, or enumerated by independent code."""
  at = lambda name, label, x: curve(found, name, label)[x]
  assert at("leviathan_table_1", "acceptance 0.9", 10.0) == pytest.approx(6.86, abs=.01)
  assert at("best_length", "acceptance 0.8, cost 0.05", 8.0) == pytest.approx(3.092, abs=5e-4)
  assert at("draft_count", "recursive, without replacement", 2.0) == pytest.approx(.678571, abs=1e-6)
  assert at("draft_count", "k-SEQ", 2.0) == pytest.approx(.658443, abs=1e-6)
  assert at("uncapped_block", "without the cap", 2.0) == pytest.approx(12 / 9)
  assert at("tree_size", "best tree", 64.0) == pytest.approx(4.420118, abs=1e-6)
  assert at("lockstep", "all cut to the shortest", 4.0) == pytest.approx(1.686, abs=6e-4)
  assert at("lenience", "total variation of the text", 1.0) == pytest.approx(0, abs=1e-9)
  assert at("hidden_drafts", "at the same time, 4 tokens", .25) == pytest.approx(exact.tokens(.8, 4))
  token = at("block_verification", "toy B", 2.0)
  assert token == pytest.approx(100 * ((1 + 11 / 9) / (1 + 10 / 9) - 1))


def test_a_wrong_golden_number_is_a_difference(monkeypatch):
  wrong = {("B", "Rejection"): (.7, *chains._GOLDEN["B", "Rejection"][1:])}
  monkeypatch.setattr(chains, "_GOLDEN", {**chains._GOLDEN, **wrong})
  monkeypatch.setattr(exact, "several", lambda seeds, *args, **kwargs: [
      tables_lib.random_tables(0, 3, 6, sharpness=2.0, agreement=.8)])
  assert chains.block(base.Options()).verdict == base.DIFFERS


def test_a_rule_that_strays_is_not_reported_on():
  @dataclasses.dataclass(frozen=True)
  class Claims(verifiers.LossyLenient):
    lossless = True

  with pytest.raises(ValueError, match="says that it is lossless"):
    exact.accepted(Claims(.5), tables_lib.toy("B", 1), exact.iid(1))


def test_verdicts_are_computed():
  assert base.holds({"a": True}) == (base.AGREES, "")
  assert base.holds({"a": True, "b is so": False}) == (base.DIFFERS, "Not so here: b is so.")
  assert base.within([1.0, 2.2], [1.0, 2.0], .1) == (base.DIFFERS, pytest.approx(.2))
  assert base.within([1.0, 2.2], [1.0, 2.0], .11, relative=True)[0] == base.AGREES
  assert base.within([float("nan")], [1.0], .1)[0] == base.DIFFERS
  assert base.worse(base.AGREES, base.CANNOT_SAY) == base.CANNOT_SAY
  assert base.worse(base.CANNOT_SAY, base.DIFFERS) == base.DIFFERS and base.worse(base.AGREES) == base.AGREES


def test_what_does_not_fit_is_refused():
  line = base.Series("a", (1.0,), (2.0,))
  with pytest.raises(ValueError, match="2 x and 1 y"):
    base.Series("a", (1.0, 2.0), (2.0,))
  with pytest.raises(ValueError, match="how='guessed'"):
    base.Published("a", (1.0,), (2.0,), "a paper", "guessed")
  with pytest.raises(ValueError, match="verdict='maybe'"):
    base.Result("x", "y", (line,), (), "maybe", "why")
  with pytest.raises(ValueError, match="2 columns"):
    base.Result("x", "y", (line,), (), base.AGREES, "why", ("a", "b"), (("1",),))


class Page(html.parser.HTMLParser):
  """Which ids there are, what is linked, and that elements are closed in order."""

  def __init__(self):
    super().__init__()
    self.open, self.ids, self.links, self.plots, self.loads = [], [], [], [], []

  def handle_starttag(self, tag, attrs):
    self.handle_startendtag(tag, attrs)
    if tag not in ("meta",):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    given = dict(attrs)
    self.ids += [given["id"]] if "id" in given else []
    self.links += [given["href"]] if tag == "a" else []
    self.plots += [given.get("aria-label")] if tag == "svg" else []
    self.loads += [given[name] for name in ("src", "xlink:href") if name in given]

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def test_the_page_has_every_plot(found, outdir):
  text, page = (outdir / "index.html").read_text(encoding="utf-8"), Page()
  page.feed(text)
  assert not page.open and len(page.ids) == len(set(page.ids))
  titles = [done.ablation.title for done in found.values()]
  assert page.plots == titles and page.links == [f"#{name}" for name in found]
  assert set(found) <= set(page.ids)
  # Nothing comes from elsewhere, and both themes are there.
  assert all(target.startswith("#") for target in page.loads) and "prefers-color-scheme: dark" in text
  assert "a &lt;command&gt;" in text and 'name="viewport"' in text and "var(--ink)" in text


def test_files(found, outdir):
  for name, done in found.items():
    held = json.loads((outdir / name / "result.json").read_text(encoding="utf-8"))
    assert held["verdict"] == done.result.verdict and held["name"] == name and held["seed"] == 0
    assert held["curves"][0]["y"] == list(done.result.curves[0].y) and held["paper"] == done.ablation.paper
    assert (outdir / name / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (outdir / name / "plot.svg").read_text(encoding="utf-8")


def test_the_table_of_a_terminal(found):
  lines = gallery.table(list(found.values())).text().splitlines()
  assert len(lines) == 3 + len(found) and all(any(line.startswith(name) for line in lines) for name in found)
  assert "arXiv 2403.10444, Table 1" in "\n".join(lines)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  folder = tmp_path_factory.mktemp("program")
  cases = {"list": ["--list"], "bad name": ["--run=tree_sise", f"--outdir={folder / 'no'}"],
           "run": ["--run=tree_size,predicted_speedup", f"--outdir={folder / 'out'}", "--seed=3"],
           "file": ["--run=tree_size", f"--outdir={__file__}"], "bad seed": ["--seed=-1"]}
  runs = programs.run_all([("ablations", args, "") for args in cases.values()],
                          env=programs.environment(tmp_path_factory), imports=["experiments.ablations.registry"])
  return dict(zip(cases, runs)), folder


def test_the_program(ended):
  runs, folder = ended
  assert not runs["list"].code and all(name in runs["list"].out for name in registry.ALL)
  assert not runs["run"].code, runs["run"].err
  assert "predicted_speedup" in runs["run"].out and "agrees" in runs["run"].out
  assert json.loads((folder / "out/tree_size/result.json").read_text())["seed"] == 3
  assert "tree_size" in (folder / "out/index.html").read_text()


@pytest.mark.parametrize("name, says", [("bad name", "'tree_sise' is no ablation"), ("file", "is a file"),
                                        ("bad seed", "seed")])
def test_bad_input_is_one_message(ended, name, says):
  runs, folder = ended
  assert runs[name].code == 2 and says in runs[name].message and "Traceback" not in runs[name].err
  assert not (folder / "no").exists()
