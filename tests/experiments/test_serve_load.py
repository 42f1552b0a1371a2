"""Load tests: their sweeps, what rounds say together, the page, and the program from its command line to its folder."""
import json

from absl import flags
from absl.testing import flagsaver
import pytest

from experiments.harness import load_job
from experiments.harness import load_summary
from experiments.harness import load_sweep
from experiments.report import load_report
from experiments.report import load_tables
from specjax.serving import arrivals
from specjax.serving import load
from specjax.serving import load_metrics
from specjax.serving import requests
import programs

openai_server = pytest.importorskip("openai_server")
CONCURRENCY = load_sweep.Sweep("concurrency", (1.0, 4.0))


@pytest.fixture(autouse=True)
def parsed():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


# Sweeps.

@pytest.mark.parametrize("text, kind, values", [
    ("concurrency:4,1,2", "concurrency", (1, 2, 4)), ("rate:0.5,2", "rate", (0.5, 2)), ("burst:8", "burst", (8,)),
    ("at_once", "at_once", (0,))])
def test_sweeps_are_read(text, kind, values):
  with flagsaver.flagsaver(sweep=text):
    found = load_sweep.parse()
  assert (found.kind, found.values) == (kind, values)


@pytest.mark.parametrize("text", [
    "", "concurrency", "concurrency:", "concurrency:1.5", "concurrency:0", "rate:-1", "rate:nan", "rate:inf",
    "concurrency:1,1", "users:3", "at_once:3", "at_once:", "burst:1,x"])
def test_what_is_no_sweep_is_refused(text):
  with flagsaver.flagsaver(sweep=text), pytest.raises(ValueError, match=f"--sweep={text}: it takes concurrency:1,2,4"):
    load_sweep.parse()


def test_flags_of_another_sweep_are_refused():
  with flagsaver.flagsaver((load_sweep.BURSTINESS, 0.5)):
    flags.FLAGS["burstiness"].using_default_value = False
    refused = pytest.raises(ValueError, match="--burstiness=0.5 belongs to --sweep=rate")
    with flagsaver.flagsaver(sweep="burst:2"), refused:
      load_sweep.parse()
    with flagsaver.flagsaver(sweep="rate:2"):
      assert load_sweep.parse().arrivals(2.0, 5) == arrivals.Gamma(2.0, 0.5, 5)
  flags.FLAGS["burstiness"].using_default_value = True


def test_a_point_has_its_arrivals_and_enough_requests():
  assert CONCURRENCY.arrivals(4.0, 1) == arrivals.Closed(4) and CONCURRENCY.rows == 4
  assert (CONCURRENCY.requests(4.0), CONCURRENCY.requests(32.0), CONCURRENCY.together(4.0)) == (16, 128, 4)
  burst = load_sweep.Sweep("burst", (3.0,))
  assert burst.arrivals(3.0, 0) == arrivals.Bursts(3, 10.0) and burst.compares == "median_e2el_ms"
  assert load_sweep.Sweep("at_once", (0.0,)).arrivals(0.0, 0) == arrivals.AtOnce()
  assert load_sweep.Sweep("rate", (0.5,)).rows == 16 and CONCURRENCY.compares == "output_throughput"


@pytest.mark.parametrize("given, named", [
    (["ttft"], "'ttft' is not name:milliseconds"), (["itl:3"], "goodput itl:3"), (["ttft:1", "ttft:2"], "given twice"),
    ([], "is empty"), (["e2el:-1"], "e2el")])
def test_limits_that_mean_nothing_are_refused(given, named):
  with flagsaver.flagsaver(goodput=given), pytest.raises(ValueError, match=f"--goodput=.*{named}"):
    load_sweep.goodput()


def test_limits_are_read():
  with flagsaver.flagsaver(goodput=["ttft:500", "tpot:25.5"]):
    assert load_sweep.goodput() == {"ttft": 500.0, "tpot": 25.5}
  assert load_sweep.goodput() is None


# What rounds say together.

def made(method, point, round_, throughput, *, drafts=(), steady=True, e2el=100.0, category="chat"):
  """A run of `runs.json` with this throughput: a real summary of one request, its numbers replaced."""
  found = requests.Speculation(10, len(drafts), 3 * len(drafts), sum(drafts), tuple(
      sum(accepted > place for accepted in drafts) for place in range(3)))
  tokens = 10 + sum(drafts)
  outcome = requests.Outcome(0, category, [1] * tokens, "x", "length", 5, 0, found, 0.0, 0.0, 2.0,
                             ((1.0, 1), (2.0, tokens - 1)))
  metrics = load_metrics.summarize(load.Run((load.Served(0, category, 0.0, outcome),), 0.0, 2.0))
  numbers = {"output_throughput": throughput, "median_e2el_ms": e2el}
  window = {"duration": 1.0, **numbers} if steady else None
  return {"method": method, "point": point, "round": round_, "metrics": metrics | numbers | {
      "steady": window, "completed": 30}}


def record(method, index, ids, *, point=1.0, round_=0, reason="length"):
  return {"method": method, "point": point, "round": round_, "index": index, "token_ids": ids, "text": str(ids),
          "finish_reason": reason}


def test_speedups_are_ratios_within_rounds():
  """The machine is half as fast in the second round: the ratio of medians would be 1.5, no round says so."""
  runs = [made("plain", 1.0, 0, 100), made("ngram", 1.0, 0, 120), made("plain", 1.0, 1, 50), made("ngram", 1.0, 1, 60),
          made("plain", 1.0, 2, 50), made("ngram", 1.0, 2, 105)]
  summary = load_summary.summarize(runs, [], load_sweep.Sweep("concurrency", (1.0,)), None)
  plain, ngram = summary["points"]
  assert plain["method"] == "plain" and ngram["rounds"] == 3
  assert ngram["speedup"] == {"median": 1.2, "low": 1.2, "high": 2.1, "rounds": [1.2, 1.2, 2.1]}
  assert plain["speedup"]["rounds"] == [1, 1, 1] and summary["basis"] == "steady"
  assert ngram["metrics"]["output_throughput"] == 105 and ngram["spread"]["output_throughput"] == [60, 120]


def test_where_clients_set_the_pace_latencies_are_compared():
  runs = [made("plain", 2.0, 0, 100, e2el=300.0), made("ngram", 2.0, 0, 100, e2el=200.0)]
  summary = load_summary.summarize(runs, [], load_sweep.Sweep("rate", (2.0,)), None)
  assert summary["points"][1]["speedup"]["median"] == pytest.approx(1.5) and summary["compares"] == "median_e2el_ms"


def test_without_a_steady_window_everywhere_whole_runs_are_compared():
  runs = [made("plain", 1.0, 0, 100), made("ngram", 1.0, 0, 130, steady=False)]
  runs[0]["metrics"]["steady"]["output_throughput"] = 1000.0
  summary = load_summary.summarize(runs, [], load_sweep.Sweep("concurrency", (1.0,)), None)
  assert summary["basis"] == "whole" and summary["points"][1]["speedup"]["median"] == pytest.approx(1.3)
  assert summary["points"][1]["steady"] is None
  assert any("1 of 2 runs have no steady window" in warning for warning in summary["warnings"])


def test_without_plain_decoding_there_is_no_speedup():
  summary = load_summary.summarize([made("ngram", 1.0, 0, 130)], [], load_sweep.Sweep("concurrency", (1.0,)), None)
  assert summary["points"][0]["speedup"] is None and summary["break_even"] == {"ngram": []}
  assert load_tables.break_even(summary) == []


def test_drafts_are_pooled_over_rounds():
  runs = [made("ngram", 1.0, 0, 1, drafts=[3]), made("ngram", 1.0, 1, 1, drafts=[0, 1, 1])]
  (point,) = load_summary.summarize(runs, [], load_sweep.Sweep("concurrency", (1.0,)), None)["points"]
  assert point["metrics"]["spec_decode_draft_tokens"] == 12 and point["metrics"]["spec_decode_accepted_tokens"] == 5
  assert point["metrics"]["spec_decode_acceptance_rate"] == pytest.approx(100 * 5 / 12)
  assert point["metrics"]["spec_decode_per_position_acceptance_rates"] == [0.75, 0.25, 0.25]
  assert point["categories"]["chat"]["spec_decode_acceptance_length"] == pytest.approx(1 + 5 / 4)


def test_crossings_are_found_between_points():
  """Halved with every doubling of the load: 2, 1.33, .89 at 1, 4, 16; on a logarithmic scale 1 lies at 3/4 from 4."""
  point = lambda load, speedup: {"point": load, "speedup": {"median": speedup}}
  (down,) = load_summary.crossings([point(1.0, 2.0), point(4.0, 1.3), point(16.0, 0.9)])
  assert down == {"at": pytest.approx(4 * 4 ** 0.75), "pays": "below"}
  assert load_summary.crossings([point(2.0, 0.5), point(8.0, 1.5)]) == [{"at": pytest.approx(4.0), "pays": "above"}]
  assert load_summary.crossings([point(1.0, 2.0), point(2.0, 1.5)]) == []


def test_outputs_are_compared_within_rounds_and_where_both_ended():
  records = [record("plain", 0, [1, 2]), record("ngram", 0, [1, 2]), record("plain", 1, [1]), record("ngram", 1, [2]),
             record("plain", 2, [5]), record("ngram", 2, [], reason="cancelled"), record("ngram", 0, [1, 2], round_=1)]
  runs = [made("plain", 1.0, 0, 1), made("ngram", 1.0, 0, 1)]
  summary = load_summary.summarize(runs, records, load_sweep.Sweep("concurrency", (1.0,)), None)
  assert [p["identical_to_plain"] for p in summary["points"]] == [None, [1, 2]]


def test_refusals_and_compilations_are_said():
  run = made("plain", 1.0, 0, 1)
  run["metrics"] |= {"failed": 3, "completed": 4, "engine": {"programs": 1}}
  found = load_summary.summarize([run], [], load_sweep.Sweep("concurrency", (1.0,)), None)["warnings"]
  assert [w.split()[0] for w in found] == ["3", "In", "Some"]


def test_methods_take_turns():
  cells = load_job._cells(["a", "b"], (1.0, 2.0), 2)
  assert [(c.method, c.point, c.round) for c in cells] == [
      ("a", 1, 0), ("b", 1, 0), ("b", 2, 0), ("a", 2, 0), ("b", 1, 1), ("a", 1, 1), ("a", 2, 1), ("b", 2, 1)]


# The page.

@pytest.fixture
def folder(tmp_path):
  """A run folder of made-up runs in which ngram ceases to pay."""
  runs = [made(method, point, round_, speed * point ** 0.5 * (1 + round_), drafts=[2] if method == "ngram" else ())
          for round_ in range(2) for point, speeds in ((1.0, (10, 15)), (4.0, (10, 8)))
          for method, speed in zip(("plain", "ngram"), speeds)]
  summary = load_summary.summarize(runs, [], CONCURRENCY, {"ttft": 500.0})
  config = {"target": "<b>", "methods": ["plain", "ngram"], "command": "python -m x", "max_new_tokens": 8}
  for name, value in (("summary.json", summary), ("config.json", config),
                      ("environment.json", {"backend": "cpu", "packages": {"jax": "1"}})):
    (tmp_path / name).write_text(json.dumps(value, allow_nan=False))
  return tmp_path


def test_the_page(folder):
  html = load_report.write_report(folder).read_text()
  assert "pays below 2.69 requests in flight" in html and "ttft 500 ms" in html and "Measured on a CPU" in html
  assert "<b>" not in html and "&lt;b&gt;" in html and "http" not in html.replace("http-equiv", "")
  assert {p.name for p in (folder / "plots").iterdir()} == {
      "throughput.png", "speedup.png", "trade_off.png", "first_token.png", "acceptance.png"}  # no turns: no occupancy


def test_the_table_of_the_terminal(folder):
  text = load_tables.render(json.loads((folder / "summary.json").read_text()))
  rows = [row.split() for row in text.splitlines()]
  assert rows[0][:2] == ["concurrency", "method"] and "ngram: pays below 2.69 requests in flight" in text
  assert sum("ngram" in row for row in rows) == 2 and "0.80×" in text


def test_a_folder_of_something_else_is_refused(folder):
  (folder / "summary.json").write_text('{"schema": 1, "groups": []}')
  with pytest.raises(ValueError, match="is of no load test"):
    load_report.write_report(folder)
  (folder / "summary.json").unlink()
  with pytest.raises(ValueError, match="summary.json cannot be read"):
    load_report.write_report(folder)


# The program.

SMALL = [f"--target={programs.TINY}", "--max_new_tokens=8"]
DRAFTS = ["--draft_tokens=3"]
REQUESTS = [{"id": f"{c}-{i}", "category": c, "lang": "en", "prompt": f"{c} {i} ab ab ab ab"} for c in ("chat", "code")
            for i in range(3)] + [{"id": "two", "category": "chat", "lang": "en", "turns": ["hello", "and then?"]}]
REFUSED = {
    "unknown": (["--methods=plain,nothing"], "unknown method 'nothing'"),
    "all": (["--methods=all"], "--methods=all: name the methods to serve"),
    "twice": (["--methods=plain,plain"], "name each method once"),
    "unused base": (["--methods=plain", "--adaptive_base=suffix"], "--adaptive_base=suffix is an option of adaptive"),
    "plain base": (["--methods=adaptive", "--adaptive_base=plain"], "--adaptive_base=plain: it takes methods that"),
    "unread": (["--methods=plain,suffix", "--max_ngram=4"], "--max_ngram=4 is an option of ngram"),
    "too long": (["--methods=plain", "--max_new_tokens=250"], "are more than the target's context of 256"),
    "sweep": (["--sweep=rate:0"], "--sweep=rate:0: it takes"),
    "model": (["--model=x"], "add --base_url"),
    "one server short": (["--base_url=http://a,http://b", "--methods=x"], "one server for each"),
    "server's": (["--base_url=http://a", "--methods=x", "--draft_tokens=3"], "--draft_tokens=3 is of engines"),
    "nobody": (["--base_url=http://127.0.0.1:9", "--methods=x"], "is the server running there?"),
    "resume": (["--resume"], "--resume needs the run's folder"),
}


def load_json(path):
  return json.loads(path.read_text(encoding="utf-8"))


def lines(path):
  return [json.loads(line) for line in (path / "requests.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  """Runs by name: (their end, their folder)."""
  env, base = programs.environment(tmp_path_factory), tmp_path_factory.mktemp("load")
  workload = base / "w.jsonl"
  workload.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))
  given = [*SMALL, f"--workload={workload}"]
  main = ["--methods=plain,ngram,adaptive", "--sweep=concurrency:1,2", "--repeats=2", "--num_requests=8", *DRAFTS,
          "--goodput=ttft:600000,e2el:600000"]
  stop = "raise KeyboardInterrupt"
  seen = ("from experiments.harness import load_job\nkeep = load_job.Job._keep\n"
          f"def f(self, *given):\n  keep(self, *given)\n  if len(self._runs) == 3: {stop}\nload_job.Job._keep = f")
  with openai_server.serving(openai_server.Server()) as url:
    cases = {
        "main": (main, ""), "interrupted": (main, seen), "resumed": ([*main, "--resume"], ""),
        "changed": ([*main, "--resume", "--seed=4"], ""),
        "rates": (["--methods=plain,ngram", "--sweep=rate:300,600", "--repeats=1", "--num_requests=20", *DRAFTS,
                   "--burstiness=0.5", "--cancel_rate=0.5", "--temperature=0.8", "--max_num_seqs=2"], ""),
        "servers": ([f"--base_url={url},{url}/v1", "--methods=plain,mine", "--sweep=at_once", "--repeats=1",
                     "--num_requests=3"], ""),
    }
    folders = {name: base / ("interrupted" if name in ("resumed", "changed") else name) for name in cases}
    starts = [([f"--outdir={folders[name]}", *args], setup) for name, (args, setup) in cases.items()]
    starts += [(args, "") for args, _ in REFUSED.values()]
    found = programs.run_all([("serve_load", [*given, *args], setup) for args, setup in starts], env=env,
                             imports=["experiments.harness.load_job"])
  return {name: (end, folders.get(name)) for name, end in zip([*cases, *REFUSED], found, strict=True)}


def test_it_ends_well(ended):
  end, folder = ended["main"]
  assert end.code == 0, end.err
  assert {p.name for p in folder.iterdir()} == {"config.json", "environment.json", "requests.jsonl", "runs.json",
                                                "summary.json", "report.html", "plots"}
  assert "1 of 7 requests are conversations" in end.err and "Traceback" not in end.err
  assert f"report: {folder / 'report.html'}" in end.out and "adaptive ngram" in end.out


def test_every_request_of_every_run_is_recorded(ended):
  records = lines(ended["main"][1])
  assert len(records) == len({(r["method"], r["point"], r["round"], r["index"]) for r in records}) == 3 * 2 * 2 * 8
  for r in records:
    counts = r["counters"]
    assert r["finish_reason"] in ("stop", "length") and r["output_tokens"] == len(r["token_ids"]) <= 8
    assert counts["accepted_tokens"] <= counts["drafted_tokens"] and (r["method"] != "plain" or not counts["drafts"])
    assert 0 <= counts["accepted_tokens"] + counts["steps"] - r["output_tokens"] <= 1
    assert r["e2el_ms"] >= r["ttft_ms"] > 0 and (r["tpot_ms"] is not None) == (r["output_tokens"] > 1)


def test_all_methods_are_asked_the_same_in_the_same_order(ended):
  asked = {}
  for r in lines(ended["main"][1]):
    asked.setdefault((r["method"], r["point"], r["round"]), []).append((r["index"], r["id"]))
  assert len({tuple(sorted(found)) for found in asked.values()}) == 1
  assert {name for _, name in next(iter(asked.values()))} == {request["id"] for request in REQUESTS}


def test_the_summary_of_a_run(ended):
  summary = load_json(ended["main"][1] / "summary.json")
  assert summary["kind"] == "serve_load" and summary["methods"] == ["plain", "ngram", "adaptive ngram"]
  assert [(p["method"], p["point"]) for p in summary["points"]] == [
      (m, v) for m in summary["methods"] for v in (1.0, 2.0)]
  for point in summary["points"]:
    assert point["rounds"] == 2 and point["metrics"]["completed"] == 8
    assert point["metrics"]["request_goodput"] == pytest.approx(point["metrics"]["request_throughput"])
    assert point["engine"]["programs"] == 0 and point["engine"]["mean_rows_running"] <= point["point"]
    assert point["identical_to_plain"] == (None if point["method"] == "plain" else [16, 16])
    assert point["speedup"]["low"] <= point["speedup"]["median"] <= point["speedup"]["high"]
    assert (point["metrics"]["spec_decode_acceptance_rate"] is None) == (not point["metrics"]["spec_decode_num_drafts"])
    assert set(point["categories"]) == {"chat", "code"}


def test_an_interrupted_test_goes_on_where_it_was(ended):
  end, folder = ended["interrupted"]
  assert end.code == 130 and f"--resume --outdir={folder}" in end.err and "Traceback" not in end.err
  assert ended["resumed"][0].code == 0, ended["resumed"][0].err
  assert not load_json(folder / "summary.json").get("partial")
  same = lambda path: {(r["method"], r["point"], r["round"], r["index"], tuple(r["token_ids"])) for r in lines(path)}
  assert same(folder) == same(ended["main"][1]) and len(load_json(folder / "runs.json")) == 12
  assert ended["changed"][0].code == 2 and "--resume: seed was 0" in ended["changed"][0].message


def test_rates_and_cancelled_requests(ended):
  end, folder = ended["rates"]
  assert end.code == 0, end.err
  records = lines(folder)
  assert {r["finish_reason"] for r in records} <= {"stop", "length", "cancelled"} and len(records) == 2 * 2 * 20
  assert any(r["finish_reason"] == "cancelled" for r in records)
  first = [[r["arrived_ms"] for r in records if (r["method"], r["point"]) == (m, 300.0)] for m in ("plain", "ngram")]
  assert first[0] == pytest.approx(first[1], abs=1e-6) and first[0] == sorted(first[0])
  summary = load_json(folder / "summary.json")
  assert summary["compares"] == "median_e2el_ms"
  # A seed gives the same text under point drafts at any temperature: what both finished is equal.
  same = [p["identical_to_plain"] for p in summary["points"] if p["method"] == "ngram"]
  assert all(equal == compared > 0 for equal, compared in same)


def test_servers(ended):
  end, folder = ended["servers"]
  assert end.code == 0, end.err
  summary = load_json(folder / "summary.json")
  assert summary["methods"] == ["plain", "mine"] and summary["points"][1]["identical_to_plain"] == [3, 3]
  assert summary["points"][0]["engine"] is None and summary["points"][0]["metrics"]["total_output_tokens"] == 15
  assert summary["points"][0]["metrics"]["spec_decode_num_drafts"] == 6


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_message(ended, name):
  end = ended[name][0]
  assert end.code == 2 and REFUSED[name][1] in end.message, end.err
  assert "Traceback" not in end.err
