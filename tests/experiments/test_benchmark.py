"""The benchmark from its command line to its run folder, on a tiny target: what it writes, interrupts, resumptions."""
import collections
import functools
import json
import shutil
import subprocess

from absl import flags
from absl.testing import flagsaver
import pytest

from experiments import workloads
from experiments.harness import costs as costs_lib
from experiments.harness import job
from experiments.harness import near_ties
import specjax
from specjax import checkpoints
from specjax import verifiers
import programs
import test_summary

FLAGS = [f"--target={programs.TINY}", "--draft_tokens=3", "--max_new_tokens=16"]
REQUESTS = [
    {"id": "chat-1", "category": "chat", "lang": "en", "turns": ["ab ab ab ab", "and then?", "and?"]},
    {"id": "chat-2", "category": "chat", "lang": "en", "prompt": "hello hello hello"},
    {"id": "code-1", "category": "code", "lang": "en", "prompt": "x = x + 1"},
    {"id": "code-2", "category": "code", "lang": "ko", "prompt": "안녕"},
    {"id": "left-out", "category": "code", "lang": "en", "prompt": "y"},
    {"id": "other", "category": "math", "lang": "en", "prompt": "1 + 1"},
]
# Without optimizations (see programs.py) a product of matrices takes long.
PEAKS = """
from experiments.harness import costs
costs.device_peaks = lambda: {"memory_bandwidth": 1e10, "arithmetic": 1e11}
"""
EDITED = json.loads(json.dumps(REQUESTS))
EDITED[1]["prompt"] = "something else"


def write(path, requests):
  path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
  return path


def lines(folder):
  """The records of a run, by (id, turn, repeat, method), each there once."""
  found = [json.loads(line) for line in (folder / "requests.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
  records = {(r["id"], r["turn"], r["repeat"], r["method"]): r for r in found}
  assert len(records) == len(found), "a request stands in the run twice"
  return records


def keys(repeats=2, methods=("plain", "ngram"), selected=("chat-1", "chat-2", "code-1", "code-2")):
  turns = {r["id"]: len(r.get("turns", [1])) for r in REQUESTS}
  return {(name, turn, repeat, method) for name in selected for turn in range(turns[name]) for repeat in range(repeats)
          for method in methods}


def load(folder, name):
  return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def env(tmp_path_factory):
  return programs.environment(tmp_path_factory)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
  """The arguments of the main run, --outdir apart."""
  path = tmp_path_factory.mktemp("workload")
  write(path / "all.jsonl", REQUESTS)
  return [*FLAGS, f"--workload={path / 'all.jsonl'}", "--categories=chat,code", "--limit=2", "--repeats=2", "--nocosts"]


@pytest.fixture(scope="module")
def main(tmp_path_factory, env, arguments):
  """The main run: its end and its folder."""
  folder = tmp_path_factory.mktemp("main") / "run"
  return programs.run("benchmark", *arguments, f"--outdir={folder}", env=env), folder


@pytest.fixture(scope="module")
def more(tmp_path_factory, env, arguments, main):
  """Further runs by name: (their end, their folder)."""
  base = tmp_path_factory.mktemp("more")
  workload = write(base / "w.jsonl", REQUESTS[:5])
  edited = write(base / "edited.jsonl", EDITED)

  def copied(name, change=lambda folder: None):
    shutil.copytree(main[1], base / name)
    for left in ("summary.json", "report.html"):
      (base / name / left).unlink()
    change(base / name)

  def cut(folder):  # as a kill while the last request is being written: whole lines of it, and a broken one
    data = (folder / "requests.jsonl").read_bytes().split(b"\n")
    (folder / "requests.jsonl").write_bytes(b"\n".join(data[:-3]) + b"\n" + data[-3][:40])

  copied("cut", cut)
  copied("whole")
  copied("other settings")
  copied("edited")
  config = load(base / "edited", "config.json")  # as if the file had been edited in its place
  (base / "edited" / "config.json").write_text(json.dumps(config | {"workload": str(edited)}))
  # The longest text that fits: the target's context is 256, the template takes 19 of it.
  edge = write(base / "edge.jsonl", [REQUESTS[2] | {"prompt": "x" * 233}])
  stop = "raise KeyboardInterrupt"
  cases = {
      "sampled": (["--temperature=0.8", "--top_p=0.95", "--seed=3", "--nocosts", f"--workload={workload}"], ""),
      "sampled again": (["--temperature=0.8", "--top_p=0.95", "--seed=4", "--nocosts", "--methods=plain",
                         f"--workload={workload}"], ""),
      "coupled": (["--verifier=coupled", "--temperature=0.8", "--repetition_penalty=1.2", "--min_new_tokens=16",
                   "--banned_ids=5", "--categories=chat", "--nocosts", f"--workload={workload}"], ""),
      "lossy": (["--verifier=lossy_typical", "--typical_epsilon=0.001", "--temperature=0.8", "--categories=chat",
                 "--nocosts", f"--workload={workload}"], ""),
      "batch": (["--batch_size=2", "--methods=ngram", "--nocosts", f"--workload={workload}"], ""),
      "one method": (["--methods=ngram", "--nocosts", "--limit=1", "--trace=1", f"--workload={workload}"], ""),
      "experts": (["--target=tests/fixtures/families/mixtral", "--limit=1", f"--workload={workload}"], PEAKS),
      "windows": (["--target=tests/fixtures/families/gemma3", "--nocosts", "--limit=1", f"--workload={workload}"], ""),
      "raw": (["--methods=plain", "--raw", "--nocosts", "--languages=ko", f"--workload={workload}"], ""),
      "edge": (["--max_new_tokens=4", f"--workload={edge}"], PEAKS),
      "cut": ([*arguments[3:], "--resume"], ""),
      "whole": ([*arguments[3:], "--costs", "--resume"], PEAKS),
      "other settings": ([*arguments[3:], "--resume", "--top_k=5"], ""),
      "edited": ([*arguments[3:], f"--workload={edited}", "--resume"], ""),
      "interrupted costs": ([f"--workload={workload}", "--limit=1", "--categories=code"],
                            f"from experiments.harness import costs\ndef f(*_): {stop}\ncosts.device_peaks = f"),
      "interrupted load": ([f"--workload={workload}"], f"import specjax\ndef f(*_): {stop}\nspecjax.load = f"),
      "interrupted warm-up": ([f"--workload={workload}"],
                              f"from specjax import drivers\ndef f(*_, **__): {stop}\ndrivers.warm_up = f"),
      "overwrite": (["--overwrite", "--methods=plain", "--nocosts", "--limit=1", f"--workload={workload}"], ""),
  }
  shutil.copytree(main[1], base / "overwrite")
  given = [("benchmark", [*FLAGS, f"--outdir={base / name}", *args], setup) for name, (args, setup) in cases.items()]
  return {name: (end, base / name) for name, end in zip(cases, programs.run_all(given, env=env), strict=True)}


def test_it_ends_well(main):
  end, folder = main
  assert end.code == 0, end.err
  assert {p.name for p in folder.iterdir()} == {"config.json", "environment.json", "requests.jsonl", "summary.json",
                                                "report.html", "plots"}
  assert "error" not in end.err.lower()
  assert f"report: {folder / 'report.html'}" in end.out


def test_the_table(main):
  rows = [line for line in main[0].out.splitlines() if line.strip()]
  assert rows[0].split()[:4] == ["category", "method", "requests", "tokens"]
  body = [row.split() for row in rows[2:-1]]
  assert [row[0] for row in body] == ["chat", "ngram", "code", "ngram", "overall", "ngram"]
  assert [row[row.index("ngram") + 1] if "ngram" in row else row[2] for row in body] == ["2", "2", "2", "2", "4", "4"]
  assert [" ".join(row[-3:]) for row in body if "ngram" in row] == ["2 of 2", "2 of 2", "4 of 4"]
  assert "\x1b" not in main[0].out


def test_every_request_is_recorded_once(main):
  assert set(lines(main[1])) == keys()


def test_records(main):
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  wanted = {r["id"]: r for r in REQUESTS}
  for (name, turn, _, method), record in lines(main[1]).items():
    request = wanted[name]
    assert record["category"] == request["category"] and record["language"] == request["lang"]
    assert record["text"] == tokenizer.decode(record["token_ids"])
    assert record["finish_reason"] == ("length" if len(record["token_ids"]) == 16 else "stop")
    counts = record["counters"]
    assert counts["output_tokens"] == len(record["token_ids"])
    assert counts["accepted_tokens"] <= counts["drafted_tokens"] <= 3 * counts["steps"]
    assert counts["steps"] + counts["accepted_tokens"] == counts["output_tokens"]
    if method == "plain":
      assert not counts["drafted_tokens"] and counts["steps"] == counts["output_tokens"]
    messages = []
    for i, said in enumerate(request.get("turns", [request.get("prompt")])[:turn + 1]):
      messages.append({"role": "user", "content": said})
      if i < turn:
        messages.append({"role": "assistant", "content": lines(main[1])[name, i, 0, "plain"]["text"]})
    assert record["prompt_ids"] == tokenizer.chat(messages)


def test_greedy_arms_and_repeats_give_one_text(main):
  texts = collections.defaultdict(set)
  for (name, turn, _, _), record in lines(main[1]).items():
    texts[name, turn].add(tuple(record["token_ids"]))
  assert all(len(found) == 1 for found in texts.values())


def test_the_summary_is_that_of_the_records(main):
  summary = load(main[1], "summary.json")
  assert summary["schema"] == 1
  groups = {(g["method"], g["category"], g["language"]): g for g in summary["groups"]}
  assert {key[1:] for key in groups} == {("all", "all"), ("chat", "all"), ("code", "all"), ("code", "en"),
                                         ("code", "ko")}
  for (method, category, language), group in groups.items():
    assert not set(test_summary.SCHEMA) - set(group)
    mine = [r for (_, _, repeat, m), r in lines(main[1]).items() if m == method and not repeat
            and category in ("all", r["category"]) and language in ("all", r["language"])]
    assert group["requests"] == len({r["id"] for r in mine})
    assert group["output_tokens"] == sum(len(r["token_ids"]) for r in mine)
    assert group["prompt_tokens"] == sum(r["prompt_tokens"] for r in mine)
    for name in ("steps", "drafted_tokens", "accepted_tokens"):
      assert group[name] == sum(r["counters"][name] for r in mine)
    assert group["temperature"] == 0 and group["batch_size"] == 1
    assert group["quality"] is None
    assert (group["speedup_interval"] is None) == (method == "plain" or group["requests"] < 3)
    if method == "ngram":
      assert group["identical_to_plain"] == [group["requests"]] * 2
      assert group["first_difference_gap"] is None
      assert group["speedup"] > 0
  assert any(g["drafted_tokens"] for g in groups.values())


def test_costs_are_measured(main, more):
  for group in load(more["whole"][1], "summary.json")["groups"]:
    for name in ("draft_ms", "verify_ms", "commit_ms", "plain_step_ms", "verify_cost_ratio"):
      assert group[name] > 0, name
    assert isinstance(group["other_ms"], float)
    assert (group["predicted_speedup"] is None) == (group["method"] == "plain")
    assert set(group["peak_memory_bytes"]) == {"weights", "cache", "draft"}
    assert group["peak_memory_bytes"]["weights"] >= 80_000
    assert {"memory_bandwidth", "arithmetic"} <= set(group["utilization"])
  for group in load(main[1], "summary.json")["groups"]:
    for name in ("draft_ms", "verify_ms", "commit_ms", "other_ms", "utilization", "predicted_speedup"):
      assert group[name] is None, name


def test_config_and_environment(main, arguments):
  config = load(main[1], "config.json")
  assert config["request_ids"] == ["chat-1", "chat-2", "code-1", "code-2"]
  assert config["repeats"] == 2 and config["limit"] == 2 and config["categories"] == ["chat", "code"]
  assert all(argument in config["command"] for argument in arguments)
  environment = load(main[1], "environment.json")
  assert {"python", "packages", "devices", "xla_flags", "cpu_model", "revision"} <= set(environment)
  assert {"jax", "jaxlib", "numpy"} <= set(environment["packages"])


def test_a_later_turn_runs_only_what_is_new(main):
  """Greedy, all methods have one text: each goes on behind its own cache, and only the last token is run again."""
  records, found = lines(main[1]), []
  for (name, turn, repeat, method), record in records.items():
    wanted = 0
    if turn:
      before = records[name, turn - 1, repeat, method]
      known = before["prompt_ids"] + before["token_ids"]
      wanted = len(known) - 1 if record["prompt_ids"][:len(known)] == known else 0
    assert record["reused_tokens"] == wanted
    found.append(wanted)
  assert max(found) > 0
  group = next(g for g in load(main[1], "summary.json")["groups"] if (g["method"], g["category"]) == ("plain", "all"))
  assert group["reused_tokens"] == sum(r["reused_tokens"] for key, r in records.items() if key[2:] == (0, "plain"))


def test_the_report_shows_the_run(main):
  page = (main[1] / "report.html").read_text(encoding="utf-8")
  assert all(name in page for name in ("chat-1", "ngram", "code"))


@pytest.mark.parametrize("name", ["sampled", "coupled", "lossy", "batch", "one method", "experts", "windows", "raw",
                                  "whole", "cut", "overwrite"])
def test_other_runs_end_well(more, name):
  end, folder = more[name]
  assert end.code == 0, end.err
  assert (folder / "report.html").exists()


def test_a_seed_gives_the_text_of_plain_decoding_at_any_temperature(more):
  records = lines(more["sampled"][1])
  for (name, turn, repeat, method), record in records.items():
    if method == "ngram":
      assert record["token_ids"] == records[name, turn, repeat, "plain"]["token_ids"]
  assert sum(r["counters"]["drafted_tokens"] for r in records.values())
  groups = load(more["sampled"][1], "summary.json")["groups"]
  assert {g["identical_to_plain"] is None for g in groups} == {True}
  assert {g["temperature"] for g in groups} == {0.8}


def test_another_verifier_and_more_parameters_reach_every_arm(more):
  """Coupled draws have a text of their own, the same for plain and drafted; and it is at least as long as asked."""
  records, other = lines(more["coupled"][1]), lines(more["sampled"][1])
  assert len(records) == 2 * 4
  for (name, turn, repeat, _), record in records.items():
    assert record["token_ids"] == records[name, turn, repeat, "plain"]["token_ids"]
    assert len(record["token_ids"]) == 16 and 5 not in record["token_ids"]
    assert (record["verifier"], record["lossless"]) == ("coupled", True)
  assert any(record["token_ids"] != other[key]["token_ids"] for key, record in records.items())
  assert "LOSSY" not in more["coupled"][0].out
  for group in load(more["coupled"][1], "summary.json")["groups"]:
    assert (group["verifier"], group["lossless"], group["total_variation_bound"]) == ("coupled", True, 0)


def test_a_lossy_run_says_so(more):
  end, folder = more["lossy"]
  records = lines(folder)
  groups = {g["method"]: g for g in load(folder, "summary.json")["groups"] if g["category"] == "all"}
  drafted = groups["ngram"]
  mine = [r for key, r in records.items() if key[3] == "ngram"]
  assert (drafted["verifier"], drafted["lossless"]) == ("lossy_typical", False)
  assert drafted["accepted_tokens"] and drafted["total_variation_bound"] == pytest.approx(
      sum(r["counters"]["strayed"] for r in mine) / sum(len(r["token_ids"]) for r in mine))
  assert 0 < drafted["total_variation_bound"] < 1
  assert (groups["plain"]["lossless"], groups["plain"]["total_variation_bound"]) == (True, 0)
  assert "ngram, lossy_typical" in end.out and "LOSSY: lossy_typical; ngram, bound per token" in end.out
  page = (folder / "report.html").read_text(encoding="utf-8")
  assert "LOSSY: lossy_typical; ngram" in page and "ngram, lossy_typical" in page
  assert {r["verifier"] for r in records.values()} == {"lossy_typical"}


def test_temperature_and_seed_have_an_effect(main, more):
  text = lambda folder: [r["token_ids"] for key, r in lines(folder).items() if key[2:] == (0, "plain")]
  assert text(more["sampled"][1]) != text(more["sampled again"][1])
  assert lines(more["sampled"][1])["chat-2", 0, 0, "plain"]["token_ids"] != (
      lines(main[1])["chat-2", 0, 0, "plain"]["token_ids"])


def test_a_batch_gives_the_texts_of_its_rows_alone(main, more):
  records = lines(more["batch"][1])
  rows = collections.defaultdict(set)
  for (name, _, _, _), record in records.items():
    rows[record["batch"]].add(name)
  assert sorted(map(sorted, rows.values())) == [["chat-1", "chat-2"], ["code-1", "code-2"], ["left-out"]]
  alone = lines(main[1])
  for key, record in records.items():
    if key in alone:
      assert record["token_ids"] == alone[key]["token_ids"]
  a, b = (records[name, 0, 0, "ngram"] for name in ("chat-1", "chat-2"))
  assert a["latency_ms"] == b["latency_ms"] == pytest.approx(1e3 * (a["seconds"] + b["seconds"]))
  sizes = {(g["category"], g["batch_size"]): g["requests"] for g in load(more["batch"][1], "summary.json")["groups"]
           if g["language"] == "all"}
  assert sizes == {("all", 2): 4, ("all", 1): 1, ("chat", 2): 2, ("code", 2): 2, ("code", 1): 1}


def test_without_plain_there_is_nothing_to_compare(more):
  for group in load(more["one method"][1], "summary.json")["groups"]:
    assert group["method"] == "ngram"
    assert group["speedup"] is None and group["identical_to_plain"] is None


def test_a_trace_holds_the_steps_of_what_was_measured(more):
  """A line a step of the first turn, and the page shows them; without the flag there is no such file."""
  folder = more["one method"][1]
  steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
  for (name, turn, _, method), record in lines(folder).items():
    own = [step for step in steps if step["id"] == name]
    if not turn:
      assert {step["method"] for step in own} == {method} and len(own) == record["counters"]["steps"]
      assert [token["token"] for step in own for token in step["emitted"]] == record["token_ids"]
  assert "Step by step" in (folder / "report.html").read_text(encoding="utf-8")
  assert not (more["raw"][1] / "steps.jsonl").exists()


def test_a_mixture_of_experts_reports_its_experts(more):
  """What every pass went through is in the records, the summary and the report; other targets have no such section."""
  folder = more["experts"][1]
  groups = {(g["method"], g["category"]): g for g in load(folder, "summary.json")["groups"]}
  plain, ngram = (groups[method, "all"]["experts"] for method in ("plain", "ngram"))
  assert (plain["layers"], plain["experts"], plain["chosen"]) == (2, 6, 2)
  assert [row["width"] for row in plain["by_width"]] == [1]
  counters = [r["counters"] for r in lines(folder).values() if r["method"] == "ngram"]
  assert sum(row["passes"] for row in ngram["by_width"]) == pytest.approx(sum(c["steps"] for c in counters))
  assert sum(row["passes"] * row["nodes"] for row in ngram["by_width"]) == pytest.approx(
      sum(c["steps"] + c["drafted_tokens"] for c in counters))
  for experts in (plain, ngram):
    assert experts["bytes_per_step"] == pytest.approx(experts["expert_bytes"] * sum(
        row["passes"] * sum(row["distinct_per_layer"]) for row in experts["by_width"]) / sum(
            row["passes"] for row in experts["by_width"]))
    assert all(2 <= row["distinct"] <= 6 for row in experts["by_width"]) and 1 <= experts["imbalance"] <= 6
  page = (folder / "report.html").read_text(encoding="utf-8")
  assert "What verify passes went through" in page and "the terms of MoESD" in page
  cost = plain["cost"]
  assert [(p["kind"], p["tokens"]) for p in cost["points"]] == [("text", 1)] + [
      (kind, width) for width in (4, 8, 16, 32, 64) for kind in ("text", "one token")]
  assert all(2 <= p["distinct"] <= 6 and p["milliseconds"] > 0 for p in cost["points"])
  text, copies = ({p["tokens"]: p["distinct"] for p in cost["points"] if p["kind"] == kind} for kind in (
      "text", "one token"))
  assert text[1] == 2 and text[64] > copies[64]
  assert (folder / "plots" / "experts.png").exists()
  dense = load(more["raw"][1], "summary.json")["groups"]
  assert all(group["experts"] is None for group in dense)
  assert "What verify passes went through" not in (more["raw"][1] / "report.html").read_text(encoding="utf-8")


def test_windows_are_in_the_summary_and_the_report(more):
  """How many layers have one, how much of the text was behind it, and what rings save."""
  folder = more["windows"][1]
  config = specjax.load(str(programs.ROOT / "tests/fixtures/families/gemma3"))[0].config
  sizes = {window for window in config.windows if window is not None}
  for group in load(folder, "summary.json")["groups"]:
    records = [r for r in lines(folder).values() if r["method"] == group["method"]
               and group["category"] in ("all", r["category"])]
    behind = sum(r["prompt_tokens"] + place > min(sizes) for r in records for place in range(len(r["token_ids"])))
    assert group["windows"] == {"layers": sum(w is not None for w in config.windows), "of_layers": config.layers,
                                "tokens": sorted(sizes), "beyond": pytest.approx(behind / group["output_tokens"])}
    memory = group["peak_memory_bytes"]
    assert memory["cache"] < memory["cache_without_rings"]
  assert "beyond windows" in (folder / "report.html").read_text(encoding="utf-8")
  assert load(more["raw"][1], "summary.json")["groups"][0]["windows"] is None


def test_raw_prompts(more):
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  record = lines(more["raw"][1])["code-2", 0, 0, "plain"]
  assert record["prompt_ids"] == tokenizer.encode("안녕", add_special_tokens=True)


def test_a_request_as_long_as_the_context_is_summarised(more):
  """Prompt and new tokens fill the context to its last slot, so there is no room behind them to time a step in."""
  end, folder = more["edge"]
  assert end.code == 0, end.message
  (record,) = [r for key, r in lines(folder).items() if key[3] == "plain"]
  assert record["prompt_tokens"] + 4 == 256
  assert load(folder, "summary.json")["groups"]


def test_overwrite_leaves_nothing_of_the_old_run(more):
  assert {key[3] for key in lines(more["overwrite"][1])} == {"plain"}


def test_a_resumed_whole_run_measures_nothing_again(main, more):
  assert (more["whole"][1] / "requests.jsonl").read_bytes() == (main[1] / "requests.jsonl").read_bytes()


def test_a_run_that_was_killed_while_writing_is_completed(main, more):
  """Some lines of the last request are whole, one is broken: afterwards everything is there, and there once."""
  records = lines(more["cut"][1])
  assert set(records) == keys()
  assert {key: r["token_ids"] for key, r in records.items()} == {k: r["token_ids"] for k, r in lines(main[1]).items()}


def test_resume_with_another_setting_names_it(main, more):
  end, folder = more["other settings"]
  assert end.code == 2
  assert "--resume: top_k was 0" in end.message and "is 5 now" in end.message
  assert (folder / "requests.jsonl").read_bytes() == (main[1] / "requests.jsonl").read_bytes()


def test_resume_with_an_edited_workload_is_refused(more):
  """Its ids are the same, its prompts are not: the finished requests answer questions that nobody asks any more."""
  end, _ = more["edited"]
  assert end.code == 2
  assert "--resume" in end.message


@pytest.mark.parametrize("name", ["interrupted load", "interrupted warm-up", "interrupted costs"])
def test_an_interrupt_at_any_time_is_one_message(more, name):
  end, folder = more[name]
  assert "Traceback" not in end.err
  assert end.code == 130
  if folder.exists():
    assert f"--resume --outdir={folder}" in end.message
  if name == "interrupted costs":
    assert len(lines(folder)) == 2


def test_interrupt_and_resume(tmp_path, env):
  """SIGINT to a running benchmark: valid records, exit code 130, the way to go on; then --resume does only the rest."""
  names = [f"r{i:03}" for i in range(40)]
  write(tmp_path / "w.jsonl", [{"id": n, "category": "chat", "lang": "en", "prompt": f"hello {n}"} for n in names])
  folder = tmp_path / "run"
  args = [*FLAGS, "--max_new_tokens=60", f"--workload={tmp_path / 'w.jsonl'}", "--repeats=2", "--nocosts",
          f"--outdir={folder}"]
  records = folder / "requests.jsonl"
  with programs.interruptible():
    process = subprocess.Popen(programs.command("benchmark", *args), cwd=programs.ROOT, env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  with process:
    programs.interrupt_when(process, lambda: records.exists() and records.stat().st_size)
    out, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert "Traceback" not in err
  assert f"--resume --outdir={folder}" in err
  assert not out
  before = records.read_bytes()
  done = {key[0] for key in lines(folder)}
  assert before.endswith(b"\n") and 0 < len(done) < len(names)
  wanted = lambda ids: {(n, 0, repeat, m) for n in ids for repeat in range(2) for m in ("plain", "ngram")}
  assert set(lines(folder)) == wanted(done)
  summary = load(folder, "summary.json")  # of what there is, and it says so
  assert summary["partial"] is True
  assert {g["requests"] for g in summary["groups"]} == {len(done)}

  end = programs.run("benchmark", *args, "--resume", env=env)
  assert end.code == 0, end.err
  assert records.read_bytes().startswith(before)
  assert set(lines(folder)) == wanted(names)
  summary = load(folder, "summary.json")
  assert not summary.get("partial")
  assert {g["requests"] for g in summary["groups"]} == {len(names)}


def make_job(tmp_path, names=("plain",), **given):
  """A job of two requests in one batch, of which nothing is run."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  requests = [workloads.Request(id=n, category="chat", language="en", turns=("hello",), source="x:1") for n in "ab"]
  return job.Job(str(programs.ROOT / programs.TINY), list(names), requests, batch_size=2, repeats=1,
                 raw=False, outdir=str(tmp_path / "run"), overwrite=False, resume=False, config={"request_ids": []},
                 **given)


def record(name):
  """A record of one of them."""
  return test_summary.record("plain", name, batch="a", batch_size=2, prompt_ids=[5] * 100)


def test_numbers_among_the_leaves_of_a_proposer_are_counted_as_memory(tmp_path):
  """Rules and thresholds are plain numbers until they are traced: a run must not end in their lack of a shape."""
  run = make_job(tmp_path, names=("plain", "auto_lookup"))
  memory = [run._memory(proposer, [record("a")])["draft"] for proposer in run.plan.methods.values()]
  assert memory[0] == 0 < memory[1] < 10_000


def test_a_second_interrupt_summarises_all_that_there_is(tmp_path):
  """Of a resumed run the summary of the first interrupt stands in the folder: it must not stay."""
  run = make_job(tmp_path)
  run.interrupted()
  assert not (tmp_path / "run" / "summary.json").exists()  # nothing was measured
  for count, name in enumerate("ab", 1):
    run.folder.append([record(name)])
    run.interrupted()
    summary = load(tmp_path / "run", "summary.json")
    assert {g["requests"] for g in summary["groups"]} == {count}
    assert summary["partial"] is True


class _Seen(Exception):
  """Raised by a stand-in once it has seen what it was given."""


def test_costs_are_those_of_the_batch(tmp_path, monkeypatch):
  """Step times of a batch of two are taken apart by parts that were timed with two rows, or not at all."""
  run = make_job(tmp_path, verifier=verifiers.Block())
  run.folder.append([record("a"), record("b")])
  rows = []

  def start(target, proposer, prompts, params, **kwargs):
    rows.append(len(prompts))
    assert (params.temperature, kwargs["verifier"]) == (0.7, verifiers.Block())
    raise _Seen

  monkeypatch.setattr(costs_lib.drivers, "start", start)
  monkeypatch.setattr(costs_lib, "device_peaks", lambda: {"memory_bandwidth": 1e9, "arithmetic": 1e9})
  try:
    with flagsaver.flagsaver(temperature=0.7):
      (group, *_) = run.finish(costs=True)["groups"]
    assert group["verify_ms"] is None and group["other_ms"] is None
  except _Seen:
    assert rows == [2]


@pytest.mark.usefixtures("quick_compile_here")
def test_the_gap_is_that_of_the_adjusted_logits(tmp_path):
  """With a bias on one id that id leads by it; before the minimum of tokens no end of sequence can lead."""
  target = make_job(tmp_path).plan.target
  gap = functools.partial(near_ties.gap, target)
  prompt, output = [5, 6, 7], [8, 9]
  free = gap(prompt, output)
  assert gap(prompt + output, []) == pytest.approx(free, abs=1e-4)  # wherever the prompt ends
  (end, *_) = target.eos_ids
  with flagsaver.flagsaver(logit_bias=["11:500"]):
    assert gap(prompt, output) > 400 > free
  with flagsaver.flagsaver(min_new_tokens=3, logit_bias=[f"{end}:1000"]):
    assert gap(prompt, output) == pytest.approx(free, abs=1e-4)
    assert gap(prompt, [*output, 10]) > 900
