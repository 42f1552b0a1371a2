"""A sweep from its command line to its page, on a tiny target; what it refuses; and its parts on made-up numbers."""
import json
import types

from absl import flags
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import pytest

from experiments import workloads
from experiments.harness import draft_view
from experiments.harness import flag_values
from experiments.harness import settings
from experiments.harness import sweep_arms
from experiments.harness import sweep_job
from experiments.harness import sweep_prompts
from experiments.harness import sweep_setting
from experiments.harness import sweep_summary
from experiments.report import sweep_report
import programs
import specjax
from specjax import checkpoints
from specjax import proposers
from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.testing import tiny

TINY = f"--target={programs.TINY}"
DRAFT = f"--draft={programs.TINY}"
REQUESTS = [
    {"id": "chat-1", "category": "chat", "lang": "en", "turns": ["ab ab ab ab", "and then?"]},
    {"id": "chat-2", "category": "chat", "lang": "en", "prompt": "hello hello hello"},
    {"id": "code-1", "category": "code", "lang": "en", "prompt": "x = x + 1"},
    {"id": "code-2", "category": "code", "lang": "ko", "prompt": "안녕"},
    {"id": "code-3", "category": "code", "lang": "en", "prompt": "y = 2"},
]
# By name: the arguments of a run, and the combinations of values that it must have.
RUNS = {
    "method": (["--vary=draft_tokens:1,3", "--methods=ngram,suffix", "--repeats=2", "--max_new_tokens=8"],
               [{"draft_tokens": 1}, {"draft_tokens": 3}]),
    "grid": (["--vary=batch_size:1,2", "--vary=temperature:0,0.8", "--max_new_tokens=6"],
             [{"batch_size": b, "temperature": t} for b in (1, 2) for t in (0.0, 0.8)]),
    "layers": (["--vary=draft_layers:1,2", "--methods=draft_model", DRAFT, "--max_new_tokens=8"],
               [{"draft_layers": 1}, {"draft_layers": 2}]),
    "template": (["--vary=chat_template:on,off", "--methods=draft_model", DRAFT, "--max_new_tokens=8"],
                 [{"chat_template": True}, {"chat_template": False}]),
    "prompts": (["--vary=prompt_tokens:40,60", "--max_new_tokens=4"], [{"prompt_tokens": 40}, {"prompt_tokens": 60}]),
}
REFUSED = {
    "nothing varied": ([], ["--vary is needed", "--vary=draft_tokens:1,2,4,8"]),
    "unknown": (["--vary=draft_tokes:1,2"], ["'draft_tokes'", "draft_tokens", "temperature", "chat_template"]),
    "a list": (["--vary=skip_layers:1,2"], ["'skip_layers'"]),
    "wrong type": (["--vary=draft_tokens:1,two"], ["'two'", "--draft_tokens"]),
    "out of range": (["--vary=draft_tokens:0,2"], ["'0'", "--draft_tokens"]),
    "no switch": (["--vary=chat_template:on,maybe", "--methods=draft_model", DRAFT], ["'maybe'", "on and off"]),
    "no such name of a rule": (["--vary=verifier:point,magic"], ["'magic'", "--verifier"]),
    "one value": (["--vary=draft_tokens:4"], ["two or more values"]),
    "no value": (["--vary=draft_tokens"], ["two or more values"]),
    "a value twice": (["--vary=draft_tokens:2,4,2"], ["stands twice"]),
    "a setting twice": (["--vary=draft_tokens:1,2", "--vary=draft_tokens:3,4"], ["--vary=draft_tokens", "twice"]),
    "three": (["--vary=draft_tokens:1,2", "--vary=top_k:1,2", "--vary=top_p:0.5,1"], ["draft_tokens, top_k, top_p"]),
    "varied and pinned": (["--vary=draft_tokens:1,2", "--draft_tokens=3"], ["--draft_tokens=3", "pins"]),
    "nobody reads it": (["--vary=tree_nodes:4,8"], ["tree_nodes=4", "none of ngram reads it"]),
    "no draft model": (["--vary=draft_layers:1,2"], ["draft_layers", "ngram", "draft_model"]),
    "no draft model, pinned": (["--vary=draft_tokens:1,2", "--draft_context=9"], ["--draft_context", "ngram"]),
    "a cut of nothing": (["--vary=draft_tokens:1,2", "--draft_cut=first"], ["--draft_cut=first", "--draft_layers"]),
    "plain": (["--vary=draft_tokens:1,2", "--methods=plain,ngram"], ["--methods=plain,ngram", "one by one"]),
    "temperature below 0": (["--vary=temperature:0,-1"], ["temperature=-1", "temperature"]),
    "too many drafted": (["--vary=draft_tokens:1,64"], ["--draft_tokens=64"]),
    "drawn drafts": (["--vary=verifier:point,kseq"], ["verifier=kseq", "ngram"]),
    "reads nothing of it": (["--vary=max_ngram:3,4", "--methods=ngram,suffix"], ["suffix", "the same"]),
    "more layers than there are": (["--vary=draft_layers:1,9", "--methods=draft_model", DRAFT],
                                   ["draft_layers=9", "2"]),
    "no system prompt": (["--vary=system_prompt:on,off", "--methods=draft_model", DRAFT], ["system_prompt=off"]),
    "no template to leave out": (["--vary=chat_template:on,off", "--methods=draft_model", DRAFT, "--raw"],
                                 ["--raw", "chat_template=off"]),
    "more context than there is": (["--vary=draft_context:9,999", "--methods=draft_model", DRAFT],
                                   ["draft_context=999"]),
    "batches that cannot be filled": (["--vary=batch_size:1,4"], ["chat", "batch_size"]),
    "room for the template only": (["--vary=prompt_tokens:3,60"], ["--prompt_tokens=3"]),
    "no room in the context": (["--vary=max_new_tokens:4,400"], ["max_new_tokens=400"]),
    "resume nowhere": (["--vary=draft_tokens:1,2", "--resume"], ["--outdir"]),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  """Runs by name: (their end, their folder)."""
  base_folder = tmp_path_factory.mktemp("sweep")
  path = base_folder / "w.jsonl"
  path.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS), encoding="utf-8")
  cases = {name: [*args, f"--outdir={base_folder / name}"] for name, (args, _) in RUNS.items()}
  cases |= {name: args if name == "resume nowhere" else [*args, f"--outdir={base_folder / name}"]
            for name, (args, _) in REFUSED.items()}
  cases["resumed"] = [*cases["method"], "--resume"]
  cases["help"] = ["--help"]
  ends = programs.run_all([("sweep", [TINY, f"--workload={path}", *args], "") for args in cases.values()],
                          env=programs.environment(tmp_path_factory), imports=["experiments.harness.sweep_job"])
  return {name: (end, base_folder / name) for name, end in zip(cases, ends)}


def load(folder, name):
  return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_a_sweep_has_every_value_of_every_category(ended, name):
  end, folder = ended[name]
  assert end.code == 0, end.err
  sweep, wanted = load(folder, "sweep.json"), RUNS[name][1]
  assert (sweep["schema"], sweep["kind"], sweep["categories"]) == (1, "sweep", ["all", "chat", "code"])
  of_request = {s["name"] for s in sweep["vary"] if s["of"] == "request"}
  for category in sweep["categories"]:
    for method in sweep["methods"]:
      values = [p["values"] for p in sweep["points"] if (p["method"], p["category"]) == (method, category)]
      assert sorted(values, key=str) == sorted(wanted, key=str)
    plain = [p["values"] for p in sweep["points"] if (p["method"], p["category"]) == ("plain", category)]
    assert {tuple(v.items()) for v in plain} == {tuple((k, v) for k, v in w.items() if k in of_request) for w in wanted}
  for point in sweep["points"]:
    assert set(point) == {
        "method", "values", "category", "batch_size", "requests", "prompt_tokens", "output_tokens", "tokens_per_step",
        "acceptance_rate", "tokens_per_second", "speedup", "speedup_interval", "decode_speedup", "latency_ms",
        "time_to_first_token_ms", "time_per_output_token_ms", "peak_memory_bytes", "identical_to_plain",
        "repeated_share", "verifier", "lossless", "intervals"}
    assert (point["speedup"] is None) == (point["method"] == "plain")
    same = point["identical_to_plain"]
    assert same is None or same[0] == same[1] > 0
  assert {one["category"] for one in sweep["best"]} == {"all", "chat", "code"}
  assert not {s["name"] for s in sweep["vary"]} & set(sweep["pinned"])
  config = load(folder, "config.json")
  assert all(config[key] == value for key, value in sweep["pinned"].items()) and config["vary"]
  assert "pinned:" in end.out and f"target={programs.TINY}" in end.out and "Best per kind of request" in end.out


@pytest.mark.parametrize("name", RUNS)
def test_pages_and_plots(ended, name):
  _, folder = ended[name]
  page = (folder / "sweep.html").read_text(encoding="utf-8")
  assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
  for setting in load(folder, "sweep.json")["vary"]:
    assert setting["name"] in page
  for metric in ("speedup", "tokens_per_step", "acceptance_rate", "tokens_per_second", "latency", "memory"):
    if metric != "acceptance_rate" or name == "layers":  # of n-grams of random text there may be no draft
      assert (folder / "plots" / f"{metric}.png").read_bytes().startswith(b"\x89PNG")
      assert "<svg" in (folder / "plots" / f"{metric}.svg").read_text(encoding="utf-8")


def test_every_arm_runs_every_request(ended):
  _, folder = ended["method"]
  lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
  found = [(r["id"], r["turn"], r["repeat"], r["method"]) for r in map(json.loads, lines)]
  arms = ["plain"] + [f"{m}, draft_tokens={n}" for n in (1, 3) for m in ("ngram", "suffix")]
  turns = [("chat-1", 0), ("chat-1", 1), ("chat-2", 0), ("code-1", 0), ("code-2", 0), ("code-3", 0)]
  assert sorted(found) == sorted((*turn, repeat, arm) for turn in turns for repeat in (0, 1) for arm in arms)
  # Interleaved: a request is over for all arms before the next one begins.
  assert list(dict.fromkeys(name for name, *_ in found)) == [r["id"] for r in REQUESTS]


def test_a_resumed_sweep_measures_nothing_again(ended):
  end, _ = ended["resumed"]
  assert end.code == 0, end.err
  assert "measuring" not in end.err
  assert load(ended["method"][1], "sweep.json")["points"]


def test_values_of_requests_reach_their_runs(ended):
  _, folder = ended["grid"]
  records = list(map(json.loads, (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()))
  assert {r["id"] for r in records} == {"chat-1", "chat-2", "code-1", "code-2"}  # whole batches of both sizes
  for record in records:
    assert record["batch_size"] == record["values"]["batch_size"]
    assert record["temperature"] == record["values"]["temperature"]
  order = [tuple(r["values"].values()) for r in records]
  assert order.index((2, 0.8)) < len(order) - order[::-1].index((1, 0.0)) - 1  # they take turns
  assert "1 of 5 requests" in ended["grid"][0].err
  groups = load(folder, "summary.json")["groups"]
  names = [(g["method"], g["category"], g["language"]) for g in groups]
  assert len(set(names)) == len(names) and "plain, batch_size=2, temperature=0.8" in {g["method"] for g in groups}


def test_prompts_have_the_length_asked_for(ended):
  _, folder = ended["prompts"]
  for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines():
    record = json.loads(line)
    assert record["values"]["prompt_tokens"] - 4 <= record["prompt_tokens"] <= record["values"]["prompt_tokens"]
    assert record["turn"] == 0


def test_the_whole_model_drafts_right_and_less_of_it_is_accepted_less(ended):
  points = {p["values"].get("draft_layers"): p for p in load(ended["layers"][1], "sweep.json")["points"]
            if p["category"] == "all"}
  assert points[2]["acceptance_rate"] == 1 > points[1]["acceptance_rate"]
  memory = {layers: points[layers]["peak_memory_bytes"]["draft"] for layers in (1, 2)}
  assert memory[1] < memory[2]


def test_without_the_template_other_drafts_are_made(ended):
  points = {p["values"].get("chat_template"): p for p in load(ended["template"][1], "sweep.json")["points"]
            if p["category"] == "all"}
  assert points[True]["acceptance_rate"] == 1 > points[False]["acceptance_rate"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ended, name):
  end, folder = ended[name]
  assert end.code == 2 and end.message.startswith("error:"), end.err
  assert all(part in end.message for part in REFUSED[name][1]), end.message
  assert not folder.exists()


def test_help(ended):
  end, _ = ended["help"]
  assert end.code == 0 and "--vary" in end.out and "experiments.distill" in end.out


def point(value, speedup, interval=None, category="chat", method="ngram"):
  return {"category": category, "method": method, "values": {"draft_tokens": value}, "speedup": speedup,
          "speedup_interval": interval}


def test_the_best_value_and_whether_that_is_settled():
  found = sweep_summary.best([
      point(1, 1.1, [1.05, 1.15]), point(4, 1.6, [1.5, 1.7]), point(8, 1.3, [1.2, 1.45]),
      point(1, 1.2, [0.9, 1.5], "code"), point(4, 1.1, [0.8, 1.4], "code"),
      point(1, 0.8, category="math"), point(4, 0.9, category="math"),
      point(1, 1.4, [1.3, 1.5], "all"), point(None, None, category="all", method="plain")])
  assert [one["category"] for one in found] == ["all", "chat", "code", "math"]
  every, chat, code, math = found
  assert every["next"] is None and every["overlaps_next"] is None
  assert (chat["values"], chat["next"]["values"]) == ({"draft_tokens": 4}, {"draft_tokens": 8})
  assert (chat["overlaps_next"], chat["beats_plain"]) == (False, True)
  assert (code["values"], code["overlaps_next"], code["beats_plain"]) == ({"draft_tokens": 1}, True, False)
  assert (math["values"], math["overlaps_next"], math["beats_plain"]) == ({"draft_tokens": 4}, None, None)
  assert list(map(sweep_summary.verdict, found)) == [
      "no other value was measured", "apart from draft_tokens=8", "overlaps draft_tokens=4; its interval reaches 1",
      "too few requests for an interval; next draft_tokens=1; no faster than plain"]


def test_intervals_of_rates_are_over_requests():
  counters = {"output_tokens": 6, "steps": 3, "accepted_tokens": 0, "drafted_tokens": 0}
  records = [{"batch": str(i), "repeat": 0, "token_ids": [0] * 6, "seconds": 1.0 + i % 2, "counters": counters}
             for i in range(8)]
  assert sweep_summary._interval(records, "output_tokens", "steps") == [2, 2]
  low, high = sweep_summary._interval(records, "tokens", "seconds")
  assert 3 < low < 48 / 12 < high < 6
  assert sweep_summary._interval(records, "accepted_tokens", "drafted_tokens") is None
  assert sweep_summary._interval(records[:7], "output_tokens", "steps") is None


def test_plans_take_turns_by_their_shares():
  turn = lambda place, total: types.SimpleNamespace(place=place, total=total, done=0)
  order = []
  for one in sweep_job.in_turns([turn(0, 4), turn(1, 4), turn(2, 2)]):
    order.append(one.place)
    one.done += 1
  assert sorted(order) == [0] * 4 + [1] * 4 + [2] * 2
  assert order[:3] == [0, 1, 2] and order[3] == 1  # the second round begins with another one
  half = order[:5]
  assert (half.count(0), half.count(1), half.count(2)) == (2, 2, 1)


@pytest.mark.parametrize("layers, count, cut, kept", [
    (24, 6, "spread", (0, 5, 9, 14, 18, 23)), (24, 6, "first", (0, 1, 2, 3, 4, 5)), (4, 1, "spread", (0,)),
    (3, 2, "spread", (0, 2))])
def test_layers_that_are_kept(layers, count, cut, kept):
  assert sweep_arms.kept(layers, count, cut) == kept


@pytest.fixture
def parsed():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.mark.usefixtures("parsed")
def test_values_are_applied_and_taken_back():
  with flagsaver.flagsaver(vary=["temperature:0,0.5", "max_ngram:2,3"]):
    one, other = sweep_setting.parse()
  assert (one.of_request, one.values, other.of_request, other.values) == (True, (0.0, 0.5), False, (2, 3))
  for values in sweep_arms.combinations((one, other)):
    with flag_values.applied(values):
      assert settings.TEMPERATURE.value == values["temperature"]
      assert not flags.FLAGS["max_ngram"].using_default_value
  assert settings.TEMPERATURE.value == 0 and flags.FLAGS["max_ngram"].using_default_value


def test_short_prompts_get_text_in_front_and_long_ones_lose_their_middle():
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  make = lambda name, text: workloads.Request(id=name, category="c", language="en", turns=(text,), source="x:1")
  short, long = make("a", "x = 1?"), make("b", "begin " + "middle " * 40 + "end")
  for tokens in (40, 90):
    one, other = sweep_prompts.fit([short, long], [short, long], tokens, tokenizer, raw=True)
    sizes = [len(tokenizer.encode(r.turns[0], add_special_tokens=True)) for r in (one, other)]
    assert all(tokens - 4 <= size <= tokens for size in sizes), sizes
    assert one.turns[0].endswith("x = 1?") and "begin" in one.turns[0]
    assert other.turns[0].startswith("begin") and other.turns[0].endswith("end")


class ChatML:
  """A tokenizer whose ids are characters, with a template like SmolLM2's, which writes a system prompt of its own."""
  eos_ids = (ord(">"),)

  def chat(self, messages):
    return list(map(ord, "<system\nBe kind>\n" + "".join(f"<{m['role']}\n{m['content']}>\n" for m in messages) +
                    "<assistant\n"))

  def decode(self, ids, *, skip_special_tokens):
    assert not skip_special_tokens
    return "".join(map(chr, ids))


def test_what_a_template_writes():
  text = lambda ids: "".join(map(chr, ids))
  front, back = draft_view.template(ChatML())
  assert (text(front), text(back)) == ("<system\nBe kind>\n<user\n", ">\n<assistant\n")
  assert text(draft_view.system(ChatML())) == "<system\nBe kind>\n"


class Seen(base.Defaults):
  """Drafts the token behind the pending one, and keeps what it was shown."""
  max_nodes, max_depth = 2, 1

  def propose(self, target, cache, state, context, keys):
    del target, cache, state, keys
    return tree_lib.chain(context.pending, context.pending[:, None] + 1, jnp.ones(1, jnp.int32)), context


def test_a_view_leaves_tokens_out_in_front_and_behind_the_prompt():
  context = base.Context(tokens=jnp.array([[1, 2, 3, 4, 5, 6, 7, 8, 0, 0]]), length=jnp.array([8]),
                         start=jnp.array([6]), active=jnp.ones(1, bool), budget=jnp.array([2]), params=None, rules=None)
  tree, seen = draft_view.View(Seen(), 2, 1).propose(None, None, None, context, None)
  assert seen.tokens[0, :5].tolist() == [3, 4, 5, 7, 8] and (seen.length.tolist(), seen.start.tolist()) == ([5], [3])
  assert tree.tokens.tolist() == [[8, 9]]
  # Before the first output token the root is one that the drafter does not see.
  tree, seen = draft_view.View(Seen(), 2, 1).propose(None, None, None, context.replace(length=context.start), None)
  assert seen.tokens[0, :3].tolist() == [3, 4, 5] and tree.tokens.tolist() == [[6, 6]]


@pytest.mark.usefixtures("quick_compile_here")
def test_a_draft_model_with_a_view_drafts_what_it_writes_of_the_shorter_text():
  """Step by step, its own cache included: all counts are those of drafts made anew of the text that it sees."""
  target = tiny.decoder()
  prompt, new, drafted = [3, 9, 4, 17, 5, 11, 2], 10, 2
  made = lambda text, count: specjax.generate(target, proposers.Plain(), [text], max_new_tokens=count).token_ids[0]
  output = made(prompt, new)
  steps = accepted = at = 0
  while at < new:
    guess = made(prompt[2:-1] + output[:at], drafted)[:new - at - 1]
    right = next((i for i, (a, b) in enumerate(zip(guess, output[at:])) if a != b), len(guess))
    steps, accepted, at = steps + 1, accepted + right, at + right + 1
  result = specjax.generate(target, draft_view.View(proposers.DraftModel(model=target, num_tokens=drafted), 2, 1),
                            [prompt], max_new_tokens=new, key=jax.random.key(0))
  assert result.token_ids[0] == output
  assert (int(result.counters.steps[0]), int(result.counters.accepted_tokens[0])) == (steps, accepted)
  assert 0 < accepted


def test_a_folder_without_a_sweep_is_refused(tmp_path):
  with pytest.raises(ValueError, match="sweep.json cannot be read"):
    sweep_report.write_report(tmp_path)
  for name in ("sweep.json", "config.json", "environment.json"):
    (tmp_path / name).write_text("{}", encoding="utf-8")
  with pytest.raises(ValueError, match="is of no sweep"):
    sweep_report.write_report(tmp_path)
