"""The report: what the page says, that it is safe to open, and that half a run is still readable."""

import html.parser
import json
import pathlib
import random
import re
import subprocess
import sys

from matplotlib import figure as mpl_figure
import pytest

from experiments import report
from experiments.report import figures, latency, outputs, page, tables, traces

HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)", "</details></pre>",
           "</span>&lt;b&gt;", "{{ 7 * 7 }}", "$\\frac{1}$", "\ud800", "\u202e"]
DASH = tables.DASH


def make_group(method="ngram", category="code", *, seed=0, **fields):
  """A complete group of `summary.json` with plausible numbers."""
  rng = random.Random(f"{method} {category} {seed}")
  plain = method == "plain"
  speedup = 1.0 if plain else round(rng.uniform(0.85, 2.4), 3)
  conditional = [] if plain else [round(rng.uniform(0.5, 0.9) * 0.97**i, 3) for i in range(7)]
  unconditional, product = [], 1.0
  for value in conditional:
    product *= value
    unconditional.append(round(product, 4))
  group = {
      "method": method, "category": category, "language": "all", "temperature": 0.0, "batch_size": 1, "requests": 12,
      "verifier": "point", "lossless": True, "total_variation_bound": 0.0,
      "prompt_tokens": 2400, "output_tokens": 1536, "steps": 1536 if plain else 700,
      "drafted_tokens": 0 if plain else 2900, "accepted_tokens": 0 if plain else 836,
      "tokens_per_step": 1.0 if plain else 2.19, "acceptance_rate": None if plain else 0.288,
      "accepted_per_position": unconditional, "conditional_per_position": conditional,
      "tokens_per_second": 41.25 * speedup, "speedup": speedup,
      "speedup_interval": None if plain else [round(speedup * 0.9, 3), round(speedup * 1.12, 3)],
      "speedup_without_repeats": None if plain else round(speedup * 0.96, 3), "repeated_share": 0.053,
      "time_to_first_token_ms": {"p50": 61.2, "p95": 80.0, "p99": 84.1},
      "time_per_output_token_ms": {"p50": 23.9 / speedup, "p95": 28.0, "p99": 30.2},
      "latency_ms": {"p50": 3120.4 / speedup, "p95": 3400.0, "p99": 3555.5},
      "draft_ms": None if plain else round(rng.uniform(0.1, 9), 2), "verify_ms": 23.9 if plain else 31.7,
      "commit_ms": 0.6, "other_ms": 0.9, "step_ms": 31.4, "utilization": {"memory_bandwidth": 0.71, "arithmetic": 0.08},
      "plain_step_ms": 24.1, "verify_cost_ratio": 1.0 if plain else 1.31,
      "predicted_speedup": None if plain else round(speedup * rng.uniform(0.9, 1.1), 3),
      "peak_memory_bytes": {"weights": 538 * 2**20, "cache": 23 * 2**20, "draft": None},
      "identical_to_plain": None if plain else [12, 12], "first_difference_gap": None, "quality": None}
  return {**group, **fields}


def make_request(identity="r0", method="ngram", category="code", *, pieces=("def", " f", "(x)", ":", "\n", " return"),
                 **fields):
  """A complete line of `requests.jsonl`."""
  drafted = [method != "plain" and i % 3 != 0 for i in range(len(pieces))]
  line = {
      "id": identity, "category": category, "language": "en", "method": method, "repeat": 0, "turn": 0,
      "prompt": f"Write a function.\nRequest {identity}.", "token_ids": list(range(100, 100 + len(pieces))),
      "pieces": list(pieces), "from_draft": drafted, "text": "".join(pieces), "finish_reason": "length",
      "counters": {"steps": 3, "drafted_tokens": 9, "accepted_tokens": sum(drafted)},
      "time_to_first_token_ms": 61.5, "latency_ms": 320.25}
  return {**line, **fields}


def make_steps(identity="code-0", category="code", methods=("plain", "ngram"), pieces=(" f", "(x", "</script>", ")")):
  """Lines of `steps.jsonl`: a text of four tokens, by single steps of plain decoding, or by two steps of a method that
  drafts: a tree of two branches, and a chain."""
  def step(method, number, tokens, parents, path, emitted, **fields):
    size = len(tokens)
    depths = [0]
    for parent in parents[1:]:
      depths.append(depths[parent] + 1)
    line = {
        "id": identity, "category": category, "language": "en", "method": method, "step": number, "tokens": tokens,
        "pieces": [f" t{token}" for token in tokens], "parents": parents, "depths": depths, "sampled": [False] * size,
        "p": [None] + [0.5] * (size - 1), "model_p": [None] + [0.4] * (size - 1), "q": [None] * size, "stop": None,
        "offered": size - 1, "path": path, "accepted": len(path) - 1, "width": 1 if size == 1 else 8,
        "emitted": [{"token": 7 + place, "piece": pieces[place],
                     "origin": "drafted" if i < len(path) - 1 else "new"} for i, place in enumerate(emitted)],
        "end": {"reason": "no_child", "node": path[-1], "u": None, "token": 7 + emitted[-1],
                "piece": pieces[emitted[-1]], "p": 0.25}, "finish_reason": None, "driver": "device"}
    line["end"] |= fields.pop("end", {})
    return {**line, **fields}

  lines = [step("plain", i, [6 + i], [0], [0], [i]) for i in range(len(pieces))]
  lines[-1]["finish_reason"] = "length"
  lines += [
      step("ngram", 0, [6, 7, 5, 8, 4], [0, 0, 0, 1, 3], [0, 1, 3], [0, 1, 2], end={"reason": "rejected", "u": 0.75},
           sampled=[False] + [True] * 4, q=[None] + [0.5] * 4, stop=[0.25, 0.0, 0.25, 0.25, 0.25]),
      step("ngram", 1, [9], [0], [0], [3], finish_reason="length", end={"u": 0.5})]
  return [line for line in lines if line["method"] in methods]


def write_run(folder, groups=None, requests=None, *, config=None, environment=None, **summary):
  """A run folder; `None` for a part takes a small complete one."""
  if groups is None:
    groups = [make_group(m, c) for c in ("all", "code", "chat") for m in ("plain", "ngram", "suffix")]
  if requests is None:
    requests = [make_request(f"{c}-{i}", m, c) for c in ("code", "chat") for i in range(2)
                for m in ("plain", "ngram", "suffix")]
  folder.mkdir(parents=True, exist_ok=True)
  dump = lambda name, value: (folder / name).write_text(json.dumps(value), encoding="utf-8")
  dump("config.json", {
      "target": "smollm2-135m", "methods": ["plain", "ngram", "suffix"], "workload": "mixed-48", "temperature": 0.0,
      "max_new_tokens": 128, "date": "2026-01-02T03:04:05Z",
      "command": ["python", "-m", "experiments.benchmark", "--note=two words"],
      **(config or {})})
  dump("environment.json", {
      "packages": {"jax": "0.10.1"}, "backend": "gpu", "devices": ["NVIDIA H200", "NVIDIA H200"],
      "cpu_model": "AMD EPYC 9654", "revision": "0123abc", **(environment or {})})
  dump("summary.json", {"schema": 1, "groups": groups, **summary})
  (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests), encoding="utf-8")
  return folder


class Page(html.parser.HTMLParser):
  """The elements of a page as a browser would see them, its text, and the rows of its tables."""

  VOID = {"meta", "img", "source", "br", "link", "input"}

  def __init__(self, text):
    super().__init__(convert_charrefs=True)
    self.elements, self.stack, self.rows, self.unbalanced = [], [], [], []
    self.pieces, self.visible = [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in self.VOID:
      self.stack.append((tag, dict(attrs)))
    if tag == "tr":
      self.rows.append([])
    if tag in ("td", "th"):
      self.rows[-1].append("")
    if self._in_token():
      self.pieces.append("")

  def handle_endtag(self, tag):
    if not self.stack or self.stack[-1][0] != tag:
      self.unbalanced.append(tag)
    else:
      self.stack.pop()

  def handle_data(self, data):
    tags = [tag for tag, _ in self.stack]
    if "style" in tags or "script" in tags:
      return
    self.visible.append(data)
    if "td" in tags or "th" in tags:
      self.rows[-1][-1] += " ".join(data.split())
    if self._in_token():
      self.pieces[-1] += data

  def _in_token(self):
    return bool(self.stack) and self.stack[-1][0] == "span" and self.stack[-1][1].get("title", "").startswith("id ")

  def named(self, tag):
    return [attrs for name, attrs in self.elements if name == tag]

  @property
  def text(self):
    return "".join(self.visible)

  def row(self, *start):
    """The first row whose cells begin so."""
    return next(row for row in self.rows if tuple(row[:len(start)]) == start)


def render(folder):
  """Writes the report and parses it."""
  path = report.write_report(folder)
  assert path == folder / "report.html"
  parsed = Page(path.read_text(encoding="utf-8"))
  assert not parsed.unbalanced and not parsed.stack, "the page's elements must nest"
  return parsed


def assert_safe(parsed):
  """Only the page's own script runs, and nothing is loaded from elsewhere."""
  assert len([attrs for attrs in parsed.named("script") if attrs.get("type") != "application/json"]) <= 1
  for tag, attrs in parsed.elements:
    assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
    for name in ("src", "href", "srcset", "data", "action", "poster"):
      assert (attrs.get(name) or "data:").startswith("data:"), (tag, attrs)
  assert not {"iframe", "object", "embed", "link", "base", "form"} & {tag for tag, _ in parsed.elements}


@pytest.fixture
def no_plots(monkeypatch):
  """For the tests that are not about plots: drawing is most of the time."""
  monkeypatch.setattr(figures, "draw_all", lambda *args: [])
  monkeypatch.setattr(latency, "draw_all", lambda *args: [])


def test_table_shows_every_cell_of_the_summary(tmp_path, no_plots):
  groups = [make_group("plain", "all"), make_group(
      "ngram", "all", requests=48, output_tokens=6144, tokens_per_step=2.194, acceptance_rate=0.3051,
      tokens_per_second=61.04, speedup=1.5, speedup_interval=[1.2, 1.8], speedup_without_repeats=1.41,
      repeated_share=0.05, time_to_first_token_ms={"p50": 61.23}, time_per_output_token_ms={"p50": 7.128},
      latency_ms={"p50": 1234.5, "p95": 2000, "p99": 2400}, identical_to_plain=[47, 48], first_difference_gap=3.2e-5)]
  parsed = render(write_run(tmp_path, groups))
  assert parsed.row("method", "requests") == ["method"] + [column.title for column in tables.RESULTS]
  assert parsed.row("ngram", "48") == [
      "ngram", "48", "6,144", "2.19", "1.31", "30.5%", "61.0", "1.50×[1.20, 1.80]", "1.41×", "5.0%", "61.2", "7.13",
      "1,234 / 2,000 / 2,400", "47 of 48", "3.2e-05"]
  assert "ngram: 47 of 48 greedy outputs are identical to plain decoding" in parsed.text


def test_fewer_tokens_a_step_than_break_even_are_marked():
  cell = lambda tokens, **changes: tables.break_even_cell(make_group(
      "ngram", "all", **{"tokens_per_step": tokens, "verify_cost_ratio": 1.31} | changes))
  assert (cell(1.30).tone, cell(1.32).tone) == ("bad", "")
  assert cell(1.30, verify_cost_ratio=None) == tables.Cell(DASH)
  assert tables.break_even_cell(make_group("plain", "all")).tone == ""


def test_rows_are_grouped_by_category_with_the_overall_rows_first_and_plain_on_top(tmp_path, no_plots):
  groups = [make_group(m, c) for c in ("code", "chat", "all") for m in ("suffix", "plain")]
  parsed = render(write_run(tmp_path, groups))
  first = next(i for i, row in enumerate(parsed.rows) if row == ["all categories", ""])
  assert [row[0] for row in parsed.rows[first:first + 9]] == [
      "all categories", "plain", "suffix", "code", "plain", "suffix", "chat", "plain", "suffix"]


def test_header_names_the_run(tmp_path, no_plots):
  text = render(write_run(tmp_path)).text
  for fact in ("smollm2-135m", "plain, ngram, suffix", "mixed-48", "2 × NVIDIA H200", "AMD EPYC 9654", "0.10.1",
               "0123abc", "2026-01-02T03:04:05Z", "python -m experiments.benchmark '--note=two words'",
               "at most 128 a request; 4,608 over all methods"):
    assert fact in text
  assert "Measured on a CPU" not in text and "Random weights" not in text and "Partial" not in text


def test_nulls_are_dashes(tmp_path):
  groups = []
  for method in ("plain", "ngram"):
    group = dict.fromkeys(make_group(), None)
    groups.append({**group, "method": method, "category": "all", "language": "all"})
  groups.append({"method": "suffix", "category": "code"})  # every metric missing
  groups.append(make_group("ngram", "chat", tokens_per_second=float("nan"), accepted_per_position=[0.5, None],
                           latency_ms={"p50": 10.0, "p95": None}))
  parsed = render(write_run(tmp_path, groups))
  assert [row for row in parsed.rows if row[0] == "suffix" and len(row) == 15] == [["suffix"] + [DASH] * 14]
  chat = parsed.row("ngram", "12")
  assert chat[6] == DASH and chat[12] == f"10.0 / {DASH} / {DASH}"
  assert not re.search(r"\b(None|nan|NaN|null)\b", " ".join(sum(parsed.rows, [])))


def test_hostile_text_stays_text(tmp_path):
  method, category = 'ev<script>alert(2)</script>"il', '"><img src=x onerror=alert(3)> $x_1$'
  requests = [make_request(f"r-{HOSTILE[0]}", m, category, pieces=HOSTILE, prompt="\n".join(HOSTILE),
                           finish_reason=HOSTILE[1], language=HOSTILE[2]) for m in ("plain", method)]
  requests.append(make_request("text-only", method, category, pieces=(), text="".join(HOSTILE)))
  groups = [make_group(m, c, language=language) for m in ("plain", method) for c in ("all", category)
            for language in ("all", HOSTILE[0])]
  folder = write_run(tmp_path, groups, requests, config={"target": HOSTILE[0], "workload": HOSTILE[1],
                     "command": ["run", HOSTILE[0]]}, environment={"cpu_model": HOSTILE[1], "warnings": [HOSTILE[3]]})
  parsed = render(folder)
  assert_safe(parsed)
  assert len(parsed.named("script")) == 1
  assert all((attrs.get("src") or "").startswith("data:image/svg+xml;base64,") for attrs in parsed.named("img"))
  assert method in parsed.text and category in parsed.text
  for piece in HOSTILE[:7]:
    assert parsed.pieces.count(piece) == 2, piece
  assert "49" not in "".join(parsed.pieces)
  titles = [attrs["title"] for attrs in parsed.named("span") if "title" in attrs]
  assert titles[:2] == ["id 100, token 0", "id 101, token 1"]


def test_page_stands_alone_and_its_plots_are_written(tmp_path):
  folder = write_run(tmp_path)
  parsed = render(folder)
  assert_safe(parsed)
  policy = next(attrs["content"] for attrs in parsed.named("meta") if "http-equiv" in attrs)
  assert policy.startswith("default-src 'none'; img-src data:;") and "unsafe-inline'; script-src 'sha256-" in policy
  style = re.search(r"<style>(.*?)</style>", (folder / "report.html").read_text(encoding="utf-8"), re.S).group(1)
  assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
  written = {path.name for path in (folder / "plots").iterdir()}
  assert written == {"speedup.png", "acceptance_overall.png", "acceptance_by_category.png", "predicted.png",
                     "step_cost.png", "latency.png"}
  assert len(parsed.named("img")) == len(parsed.named("source")) == 6
  assert all((folder / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in written)


def test_two_renders_are_equal(tmp_path):
  folder = write_run(tmp_path, [make_group(m, "all") for m in ("plain", "ngram")])
  first = report.write_report(folder).read_bytes()
  assert report.write_report(folder).read_bytes() == first


def test_tokens_show_where_they_came_from(tmp_path, no_plots):
  parsed = render(write_run(tmp_path, requests=[make_request(pieces=("a", " b", "\n", "", "c"))]))
  spans = [attrs for attrs in parsed.named("span") if attrs.get("title", "").startswith("id ")]
  assert [attrs.get("class") for attrs in spans] == [None, "d", "d", None, "d"]
  assert "3 of 5 tokens from the draft" in parsed.text and "finish: length" in parsed.text
  assert "steps 3 · drafted tokens 9 · accepted tokens 3" in parsed.text and "latency 320 ms" in parsed.text
  assert "↵\n" in parsed.text and "∅" in parsed.text  # blank pieces have something to colour
  style = (pathlib.Path(report.__file__).parent / "report.css").read_text(encoding="utf-8")
  assert re.search(r"\.d \{[^}]*background[^}]*text-decoration: underline", style)


def test_outputs_fall_back_to_text(tmp_path, no_plots):
  short = make_request("b")
  short["from_draft"].pop()
  bare = make_request("a", text="only <b>text</b>")
  del bare["pieces"]
  parsed = render(write_run(tmp_path, requests=[bare, short]))
  assert "only <b>text</b>" in parsed.text and "no token pieces recorded: text only" in parsed.text
  assert "token ids, pieces and origins differ in number: text only" in parsed.text
  assert not parsed.named("b") and not parsed.pieces


def test_outputs_are_compared_with_plain(tmp_path, no_plots):
  other = make_request("r0", "suffix", token_ids=[100, 101, 999, 103, 104, 105])
  longer = make_request("r0", "longer", pieces=("def", " f", "(x)", ":", "\n", " return", " x"))
  parsed = render(write_run(tmp_path, requests=[other, make_request("r0", "plain"), make_request("r0"), longer]))
  assert parsed.text.count("same tokens as plain") == 1
  assert "differs from plain from token 2 on" in parsed.text and "differs from plain from token 6 on" in parsed.text
  assert len([attrs for attrs in parsed.named("details") if attrs.get("class") == "request"]) == 1


def test_only_the_first_repeat_and_at_most_sixty_requests_are_shown(tmp_path, no_plots):
  requests = [make_request(f"code-{i}", "ngram", "code", repeat=r) for i in range(70) for r in (0, 1)]
  requests += [make_request(f"chat-{i}", "ngram", "chat", turn=i) for i in range(5)]
  parsed = render(write_run(tmp_path, requests=requests))
  shown = [attrs for attrs in parsed.named("details") if attrs.get("class") == "request"]
  assert len(shown) == outputs.MAX_REQUESTS == 60
  assert "60 requests shown, 15 left out." in parsed.text
  assert [attrs["data-category"] for attrs in shown].count("1") == 5  # the small category is not crowded out
  assert ["open" in attrs for attrs in shown] == [True] * 3 + [False] * 57
  assert [attrs["value"] for attrs in parsed.named("option")] == ["", "0", "1"]


def test_long_outputs_are_limited_by_tokens():
  lines = [make_request(f"r{i}") for i in range(5)]
  shown, left_out = outputs.select(lines, ["ngram"], max_tokens=13)
  assert [request.id for request in shown] == ["r0", "r1"] and left_out == 3
  shown, left_out = outputs.select(lines, ["ngram"], max_tokens=1)
  assert len(shown) == 1 and left_out == 4


def test_a_broken_last_line_is_skipped_and_said(tmp_path, no_plots):
  folder = write_run(tmp_path, requests=[make_request("r0"), make_request("r1")])
  path = folder / "requests.jsonl"
  path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
  parsed = render(folder)
  assert "1 request shown." in parsed.text
  assert "Partial run: 1 unreadable line(s) of requests.jsonl skipped (line 2)." in parsed.text


def test_missing_companions_are_said(tmp_path, no_plots):
  folder = write_run(tmp_path)
  for name in ("config.json", "environment.json", "requests.jsonl"):
    (folder / name).unlink()
  parsed = render(folder)
  for name in ("config.json", "environment.json", "requests.jsonl"):
    assert f"{name} is missing" in parsed.text
  assert "This run holds no outputs to show." in parsed.text and not parsed.named("select")


@pytest.mark.parametrize("kind, message", [
    ({"config": {"random_weights": True}}, "Random weights: shapes only."),
    ({"environment": {"backend": "cpu"}}, "Measured on a CPU"),
    ({"partial": True}, "Partial run: it ended before all of its requests were done."),
    ({"config": {"methods": ["plain", "eagle"]}}, "Partial run: no results for eagle."),
    ({"groups": [make_group("plain", requests=4), make_group(requests=3)]},
     "Partial run: ngram has fewer requests than other methods"),
    ({"groups": [make_group("typical_lossy")]}, "typical_lossy is lossy"),
    ({"environment": {"warnings": ["the clock was throttled"]}}, "the clock was throttled"),
    ({"groups": [make_group(speedup_interval=None, requests=4)]}, "too few requests (fewer than 3)"),
])
def test_warnings(tmp_path, no_plots, kind, message):
  assert message in render(write_run(tmp_path, **kind)).text


def make_lossy_groups(**fields):
  lossy = {"lossless": False, "verifier": "lossy_typical", **fields}
  return [make_group("plain", c, verifier="lossy_typical") for c in ("all", "code")] + [
      make_group("ngram", "all", total_variation_bound=0.0625, **lossy),
      make_group("ngram", "code", total_variation_bound=0.75, **lossy)]


def test_a_lossy_run_says_so_wherever_it_is_looked_at(tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(figures, "draw_all", lambda groups, methods, *args: drawn.append(methods) or [])
  requests = [make_request("r0", m, verifier="lossy_typical", counters={"steps": 3, "strayed": 1.25})
              for m in ("plain", "ngram")]
  parsed = render(write_run(tmp_path, make_lossy_groups(), requests, config={"verifier": "lossy_typical"}))
  banner = "LOSSY: lossy_typical; ngram, bound per token: mean total variation 0.062, the text is not the target's"
  assert banner in parsed.text
  place = next(i for i, (tag, attrs) in enumerate(parsed.elements) if attrs.get("class") == "lossy")
  assert place < next(i for i, (tag, _) in enumerate(parsed.elements) if tag == "main")
  names = {row[0] for row in parsed.rows if row and row[0].startswith(("plain", "ngram"))}
  assert names == {"plain", "ngram, lossy_typical"}  # plain decoding is judged by nobody
  assert parsed.row("method", "requests")[-1] == "total variation"
  assert [row[-1] for row in parsed.rows if row[0] == "ngram, lossy_typical" and len(row) == 16] == ["0.062", "0.75"]
  (meaning,) = (line for line in parsed.text.splitlines() if "total_variation_bound: the most" in line)
  assert "mean over output tokens" in meaning
  assert drawn == [{"plain": "plain", "ngram": "ngram, lossy_typical"}]
  assert "strayed 1.25" in parsed.text and "ngram, lossy_typical" in parsed.text.split("Outputs")[1]


def test_a_lossless_run_has_no_banner_and_no_column_of_zeros(tmp_path, no_plots):
  old = {k: v for k, v in make_group("suffix", "all").items() if k not in ("verifier", "lossless")}
  groups = [make_group("plain", "all"), make_group("ngram", "all", verifier="block"), old]
  parsed = render(write_run(tmp_path, groups, config={"verifier": "block"}))
  assert "LOSSY" not in parsed.text and "total variation" not in parsed.text
  assert not [attrs for _, attrs in parsed.elements if attrs.get("class") == "lossy"]
  assert {row[0] for row in parsed.rows if len(row) > 12} == {"method", "plain", "ngram", "suffix"}
  assert "verifierblock" in parsed.text.replace("\n", "")


def test_figure_legends_name_a_lossy_verifier(tmp_path):
  groups = [figures_ready(group) for group in make_lossy_groups()]
  labels = {method: tables.label(method, tables.lossy(groups)) for method in ("plain", "ngram")}
  styles = figures.Styles(labels)
  for draw in (figures.speedup_bars, figures.acceptance_overall, figures.acceptance_by_category,
               figures.predicted_and_measured):
    fig = mpl_figure.Figure()
    assert draw(fig, groups, styles)
    assert fig.legends[0].get_texts()[0].get_text() == "ngram, lossy_typical"
  fig = mpl_figure.Figure()
  assert figures.step_cost(fig, groups, styles)
  assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["plain", "ngram, lossy_typical"]
  assert figures.Styles({"x" * 50: "x" * 50 + ", cascade"}).label("x" * 50).endswith("…, cascade")
  assert len(figures.draw_all(groups, labels, tmp_path)) == 5


def test_random_weights_hide_the_bound_of_a_lossy_run(tmp_path):
  parsed = render(write_run(tmp_path, make_lossy_groups(), config={"random_weights": True}))
  assert f"mean total variation {DASH}, the text" in parsed.text


def test_random_weights_print_no_rate(tmp_path):
  folder = write_run(tmp_path, config={"random_weights": True})
  parsed = render(folder)
  assert "random weights: shapes only" in parsed.text and "×" not in parsed.text.replace("2 × NVIDIA", "")
  assert parsed.row("ngram", "12") == ["ngram", "12", "1,536"] + [DASH] * 10 + ["12 of 12", DASH]
  assert not parsed.named("img") and not (folder / "plots").exists()


def test_a_run_of_plain_decoding_only(tmp_path):
  folder = write_run(tmp_path, [make_group("plain", c) for c in ("all", "code")], [make_request("r0", "plain")])
  parsed = render(folder)
  assert "No drafting method in this run" in parsed.text
  assert {path.name for path in (folder / "plots").iterdir()} == {"step_cost.png", "latency.png"}
  assert parsed.row("plain", "12")[6] == "41.2"


def test_languages_have_their_own_table(tmp_path, no_plots):
  groups = [make_group(m, "all", language=language) for m in ("plain", "ngram") for language in ("all", "de", "en")]
  parsed = render(write_run(tmp_path, groups))
  assert "all · de" in parsed.text and "all · en" in parsed.text
  folds = [attrs for attrs in parsed.named("details") if "languages" in attrs.get("class", "")]
  assert len(folds) == 1 and "open" not in folds[0]


def test_experts_have_a_line_for_every_width(tmp_path, no_plots):
  """What belongs to the method stands in each of its lines; a target without experts has no such table."""
  by_width = [{"width": width, "passes": 10.0 * width, "nodes": nodes, "distinct_per_layer": [low, high],
               "distinct": (low + high) / 2, "at_random": 3.5} for width, nodes, low, high in (
                   (1, 1.0, 2.0, 2.0), (4, 3.2, 2.5, 4.5))]
  experts = {"layers": 2, "experts": 8, "chosen": 2, "expert_bytes": 1024, "by_width": by_width, "imbalance": 1.75,
             "imbalance_per_layer": [1.5, 2.0], "load_per_expert": [[0.125] * 8] * 2, "bytes_per_step": 3 * 2**20,
             "bytes_per_token": 2**20}
  groups = [make_group(method, category, experts=experts if method == "ngram" else None)
            for category in ("all", "code") for method in ("plain", "ngram")]
  rows = render(write_run(tmp_path / "mixture", groups)).rows
  behind = ["1.75", "3.00 MiB", "1.00 MiB"]
  assert ["ngram", "1", "10", "1.00", "2.00[2.00, 2.00]", "3.50", *behind] in rows
  assert ["ngram", "4", "40", "3.20", "3.50[2.50, 4.50]", "3.50", *behind] in rows
  assert sum(row[-3:] == behind for row in rows) == 2
  cost = {"bias": 3.0, "dense": 0.5, "expert": 0.25, "grouped": 0.0, "scale": 1.02, "ridge": 16, "chosen": 2,
          "error": 0.04, "points": [{"kind": "text", "tokens": t, "distinct": 2.0, "milliseconds": 4.0, "fitted": 4.1}
                                    for t in (1, 4, 8, 16, 32, 64)]}
  fitted = [group | {"experts": group["experts"] and group["experts"] | {"cost": cost}} for group in groups]
  sentence = render(write_run(tmp_path / "fitted", fitted)).text
  assert "3.00 ms + 0.50 ms · G(t) + 0.25 ms · N" in sentence and "1.02^t up to 16 tokens" in sentence
  assert "median error of 4.0%" in sentence
  titles = ["method", *(column.title for column in tables.EXPERTS)]
  assert titles in rows and titles not in render(write_run(tmp_path / "dense")).rows


def test_each_setting_has_its_own_section_and_plots(tmp_path):
  groups = [make_group(m, "all", temperature=t, predicted_speedup=None, accepted_per_position=[],
                       conditional_per_position=[]) for m in ("plain", "ngram") for t in (0.8, 0.0)]
  folder = write_run(tmp_path, groups)
  parsed = render(folder)
  text = parsed.text
  assert text.index("Results: temperature 0, batch size 1") < text.index("Results: temperature 0.8, batch size 1")
  assert {path.name for path in (folder / "plots").iterdir()} == {
      f"{plot}_t{t}_b1.png" for plot in ("speedup", "step_cost") for t in ("0", "0.8")}


def test_a_smaller_batch_in_one_category_does_not_split_the_run(tmp_path, no_plots):
  groups = [make_group(m, c, batch_size=b) for m in ("plain", "ngram") for c, b in (("all", 8), ("code", 3))]
  lines = [make_request("r0", m, temperature=0.0, batch_size=b) for m, b in (("plain", 8), ("ngram", 3))]
  parsed = render(write_run(tmp_path, groups, lines))
  assert "Results: " not in parsed.text and "3, 8" in parsed.text
  assert "1 request shown." in parsed.text and "batch size 3 ·" in parsed.text


def test_findings_name_the_best_and_worst_category():
  groups = [make_group(category=c, speedup=s, speedup_interval=i) for c, s, i in (
      ("all", 1.2, [1.1, 1.3]), ("code", 2.0, None), ("chat", 0.9, None), ("math", None, None))]
  finding, none = tables.findings(groups, ["ngram", "suffix"])
  assert finding == tables.Finding("ngram", tables.Cell("1.20×", "[1.10, 1.30]", "good"), "0.90× chat", "2.00× code")
  assert none == tables.Finding("suffix", tables.Cell(DASH), DASH, DASH)


@pytest.mark.parametrize("interval, tone", [([1.01, 1.5], "good"), ([0.9, 1.1], ""), ([0.7, 0.99], "bad")])
def test_a_speedup_has_a_tone_only_where_its_interval_leaves_out_one(interval, tone):
  assert tables.speedup_cell(make_group(speedup=1.0, speedup_interval=interval)).tone == tone


def test_bars_lines_and_marks_hold_the_numbers_of_the_summary():
  groups = [figures_ready(group) for group in (
      make_group("plain", "all"), make_group("ngram", "code", speedup=2.0, speedup_interval=[1.5, 2.25]),
      make_group("ngram", "all", speedup=1.25, speedup_interval=None, predicted_speedup=1.5,
                 accepted_per_position=[0.75, None, 0.25], conditional_per_position=[0.75, None, 0.5]))]
  styles = figures.Styles(["plain", "ngram"])

  bars = mpl_figure.Figure()
  assert figures.speedup_bars(bars, groups, styles)
  axes = bars.axes[0]
  assert [bar.get_height() for bar in axes.patches] == [1.25, 2.0]
  assert [label.get_text() for label in axes.get_xticklabels()] == ["all", "code"]
  ends = [segment[:, 1].tolist() for lines in axes.collections for segment in lines.get_segments()]
  assert ends == [[1.5, 2.25]]
  assert any(list(line.get_ydata()) == [1, 1] for line in axes.lines)

  lines = mpl_figure.Figure()
  assert figures.acceptance_overall(lines, groups, styles)
  values = [[round(float(y), 6) for y in axes.lines[0].get_ydata()] for axes in lines.axes]
  assert str(values) == "[[0.75, nan, 0.25], [0.75, nan, 0.5]]"

  marks = mpl_figure.Figure()
  assert figures.predicted_and_measured(marks, groups[:1] + groups[2:], styles)
  assert (1.5, 1.25) in [tuple(map(float, (*line.get_xdata(), *line.get_ydata()))) for line in marks.axes[0].lines
                         if len(line.get_xdata()) == 1]

  costs = mpl_figure.Figure()
  assert figures.step_cost(costs, groups[:1], styles)
  assert [bar.get_width() for bar in costs.axes[0].patches] == pytest.approx([0, 23.9, 0.6, 0.9])
  negative = mpl_figure.Figure()
  assert figures.step_cost(negative, [{**groups[0], "other_ms": -0.5}], styles)
  assert negative.axes[0].patches[-1].get_width() == 0 and negative.axes[0].texts[0].get_text() == "24.0"


def test_many_methods_and_categories_draw(tmp_path):
  methods = ["plain"] + [f"_method-{i}" for i in range(9)]
  groups = [make_group(m, c) for m in methods for c in ["all"] + [f"a long category {i}" for i in range(4)]]
  plots = figures.draw_all([figures_ready(group) for group in groups], methods, tmp_path / "plots")
  assert len(plots) == 5
  styles = figures.Styles(methods)
  looks = {(styles.colour(m), styles.marker(m), styles.hatch(m)) for m in methods[1:]}
  assert len(looks) == 9


def test_the_best_method_of_a_category_is_plain_where_none_is_faster():
  cell = lambda method, category, speedup: make_group(method, category, speedup=speedup, speedup_interval=None)
  groups = [cell("ngram", "code", 1.5), cell("suffix", "code", 1.6), cell("ngram", "all", 1.2),
            cell("plain", "all", 1.0), cell("ngram", "chat", 0.8), cell("suffix", "chat", None)]
  assert tables.best(groups, ["ngram", "suffix"]) == [
      tables.Best("all categories", "ngram", tables.Cell("1.20×")),
      tables.Best("code", "suffix", tables.Cell("1.60×")),
      tables.Best("chat", "plain", tables.Cell("1.00×"))]


def test_the_page_says_how_far_the_prediction_was(tmp_path, no_plots):
  groups = [make_group("ngram", category, speedup=2.0, predicted_speedup=predicted)
            for category, predicted in (("all", 9.0), ("code", 2.2), ("chat", 1.0), ("math", 2.0))]
  assert "differ by 10.0% in the median and 42.0% at the 90th percentile, over 3 cells" in render(
      write_run(tmp_path, groups)).text
  assert "90th percentile" not in render(write_run(tmp_path / "none", [make_group(predicted_speedup=None)])).text


def test_quality_has_a_row_for_every_method_and_metric(tmp_path, no_plots):
  given = {"parses": {"mean": 0.875, "n": 8, "difference": -0.125, "difference_interval": [-0.25, 0.0]},
           "differences": [{"id": "r1", "turn": 0, "metrics": {"parses": [True, False]}}]}
  groups = [make_group(m, c, quality=given if m == "ngram" else None) for c in ("all", "code")
            for m in ("ngram", "plain")]
  parsed = render(write_run(tmp_path, groups))
  at = parsed.rows.index(["code: parses", ""])
  assert parsed.rows[at - 1] == ["method", "mean", "n", "minus plain"]
  assert parsed.rows[at + 1] == ["ngram", "0.88", "8", "-0.125[-0.25, +0]"]
  assert parsed.rows[at + 2] == ["all categories: parses", ""]
  assert "ngram, r1: parses true → false" in parsed.text
  assert "Quality" not in render(write_run(tmp_path / "none")).text


def test_latencies_are_drawn_as_shares_of_requests():
  fig = mpl_figure.Figure()
  lines = [make_request(f"r{i}", "ngram", latency_ms=ms) for i, ms in enumerate((30.0, 10.0, 20.0, 40.0))]
  assert latency.distribution(fig, lines, figures.Styles(["plain", "ngram"]))
  (line,) = fig.axes[0].lines
  assert line.get_xdata().tolist() == [10, 10, 20, 30, 40] and line.get_ydata().tolist() == [0, 0.25, 0.5, 0.75, 1]
  assert not latency.distribution(mpl_figure.Figure(), [{"method": "ngram"}], figures.Styles(["ngram"]))


def embedded(page_text):
  """The trace as the page's script reads it: what stands up to the first end of a script."""
  data = re.search(r'<script type="application/json" id="trace-data">(.*?)</script', page_text, re.S)
  return json.loads(data.group(1))


def write_steps(folder, steps):
  (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")


def test_the_page_embeds_the_trace_whatever_its_text_holds(tmp_path, no_plots):
  folder = write_run(tmp_path, requests=[make_request("code-0", m, prompt="x" * 999 + "<!--<script>") for m in (
      "plain", "ngram")])
  hostile = ("</script><script>alert(1)</script>", "<!--<script>", "\u2028", "\ud800")
  write_steps(folder, make_steps(pieces=hostile))
  parsed = render(folder)
  assert_safe(parsed)
  assert len(parsed.named("script")) == 2
  (found,) = embedded((folder / "report.html").read_text(encoding="utf-8"))
  assert [method["name"] for method in found["methods"]] == ["plain", "ngram"]
  texts = ["".join(token["piece"] for step in method["steps"] for token in step["emitted"])
           for method in found["methods"]]
  assert texts == ["".join(hostile)] * 2
  assert found["prompt"] == "…" + "x" * (600 - 12) + "<!--<script>"
  assert found["methods"][1]["steps"][0] == {name: value for name, value in make_steps(pieces=hostile)[4].items()
                                             if name not in ("id", "category", "language", "method", "step", "driver")}


def test_a_large_trace_is_cut_request_by_request_with_every_category_in_it(tmp_path):
  write_steps(tmp_path, [line for i in range(3) for category in ("code", "chat")
                         for line in make_steps(f"{category}-{i}", category)])
  everything, none = traces.load(tmp_path, [], ["plain", "ngram"])
  assert len(json.loads(everything)) == 6 and none == 0
  text, left = traces.load(tmp_path, [], ["plain", "ngram"], max_bytes=2 * len(everything) // 5)
  assert [request["id"] for request in json.loads(text)] == ["code-0", "chat-0"] and left == 4
  text, left = traces.load(tmp_path, [], ["ngram"], max_bytes=0)
  assert [[m["name"] for m in request["methods"]] for request in json.loads(text)] == [["ngram"]] and left == 5


def test_a_run_without_a_readable_trace_has_no_explorer(tmp_path, no_plots):
  assert "Step by step" not in render(write_run(tmp_path / "none")).text
  folder = write_run(tmp_path / "broken")
  (folder / "steps.jsonl").write_text('{"id": "a"}\nhalf a li\n', encoding="utf-8")
  assert "Step by step" not in render(folder).text


def figures_ready(group):
  return {**group, "speedup_interval": group["speedup_interval"] and tuple(group["speedup_interval"])}


@pytest.mark.parametrize("content, message", [
    (None, "summary.json is missing"),
    ("{", "summary.json is not readable JSON"),
    ("[]", "must hold a JSON object, got list"),
    ('{"schema": 2, "groups": []}', "schema is 2, this report reads 1"),
    ('{"schema": 1, "groups": []}', "at least one group"),
    ('{"schema": 1, "groups": [3]}', r"groups\[0\] must be an object"),
    ('{"schema": 1, "groups": [{"method": "ngram"}]}', r"groups\[0\].category must be a string"),
    ('{"schema": 1, "groups": [{"method": "a", "category": "b", "speedup": "fast"}]}', r"groups\[0\].speedup must be"),
    ('{"schema": 1, "groups": [{"method": "a", "category": "b", "speedup_interval": [1]}]}', "must hold two numbers"),
    ('{"schema": 1, "groups": [{"method": "a", "category": "b", "latency_ms": [1]}]}', "must be an object or null"),
])
def test_a_bad_summary_is_one_clear_error(tmp_path, content, message):
  folder = write_run(tmp_path)
  (folder / "summary.json").unlink()
  if content is not None:
    (folder / "summary.json").write_text(content, encoding="utf-8")
  with pytest.raises(ValueError, match=message):
    report.write_report(folder)
  assert not (folder / "report.html").exists()


def test_a_missing_folder_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="is not a folder"):
    report.write_report(tmp_path / "nowhere")


def run_main(*args):
  root = pathlib.Path(page.__file__).parents[2]
  return subprocess.run([sys.executable, "-m", "experiments.report", *map(str, args)], cwd=root, capture_output=True,
                        text=True, check=False)


def test_command_line(tmp_path):
  folder = write_run(tmp_path, [make_group("plain", "all")], [])
  done = run_main(folder)
  assert done.returncode == 0 and done.stdout.strip() == str(folder / "report.html")
  (folder / "summary.json").unlink()
  for args in ((folder,), ()):
    failed = run_main(*args)
    assert failed.returncode == 2 and failed.stderr.startswith("report: ") and failed.stderr.count("\n") == 1
