"""The programs with a target that has an encoder: what it reads, its share of the time, and stored values."""
import pytest

from experiments.harness import parity
from experiments.harness import summary as summary_lib
from experiments.report import tables
import programs
import test_benchmark
import test_summary

T5 = "tests/fixtures/encoder_decoder/t5"
DRAFT = "tests/fixtures/encoder_decoder/t5_v11"
REQUESTS = [
    {"id": "short", "category": "translation", "lang": "en", "prompt": "the model drafts"},
    {"id": "turns", "category": "chat", "lang": "en", "turns": ["the small model " * 3, "then the cache"]}]
FLAGS = [f"--target={T5}", "--draft_tokens=3", "--max_new_tokens=12"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  env = programs.environment(tmp_path_factory)
  base = tmp_path_factory.mktemp("runs")
  workload = test_benchmark.write(base / "w.jsonl", REQUESTS)
  cases = {
      "benchmark": ("benchmark", [*FLAGS, "--methods=plain,draft_model", f"--draft={DRAFT}", "--nocosts",
                                  f"--workload={workload}", f"--outdir={base / 'run'}"],
                    ""),
      "costs": ("benchmark", [*FLAGS, "--methods=plain", "--categories=chat", f"--workload={workload}",
                              f"--outdir={base / 'costs'}"], test_benchmark.PEAKS),
      "no head": ("benchmark", [*FLAGS, "--methods=eagle", "--eagle_head=tests/fixtures/heads/eagle_deep",
                                f"--workload={workload}", f"--outdir={base / 'no'}"], ""),
      "generate": ("generate", [*FLAGS, "--prompt=the model drafts", "--method=plain"], ""),
      "system": ("generate", [*FLAGS, "--prompt=the model drafts", "--system=Be brief.", "--method=plain"], ""),
  }
  return dict(zip(cases, programs.run_all(cases.values(), env=env), strict=True)), base / "run"


def test_the_benchmark_measures_the_encoder(ended):
  end, folder = ended[0]["benchmark"], ended[1]
  assert end.code == 0, end.err
  records = test_benchmark.lines(folder)
  assert all(0 < r["encode_seconds"] < r["seconds"] - r["decode_seconds"] for r in records.values())
  for (name, turn, _, method), record in records.items():
    assert record["token_ids"] == records[name, turn, 0, "plain"]["token_ids"], method
  # Each turn is read alone, and </s> ends it.
  prompts = [records["turns", turn, 0, "plain"]["prompt_ids"] for turn in (0, 1)]
  assert prompts[0][-1] == prompts[1][-1] == 1 and len(prompts[0]) > len(prompts[1])
  groups = {(g["method"], g["category"]): g for g in test_benchmark.load(folder, "summary.json")["groups"]}
  for group in groups.values():
    assert not set(test_summary.SCHEMA) - set(group)
    assert 0 < group["encoder_share"] < 1 and group["encoder_ms"] > 0
  assert groups["draft_model", "all"]["drafted_tokens"] > 0
  assert "Share of all time that the target" in (folder / "report.html").read_text()


def test_parts_of_a_step_are_timed(ended):
  assert ended[0]["costs"].code == 0, ended[0]["costs"].err
  for group in test_benchmark.load(ended[1].parent / "costs", "summary.json")["groups"]:
    assert group["verify_ms"] > 0 and group["commit_ms"] > 0


def test_the_other_programs(ended):
  generated = ended[0]["generate"]
  assert generated.code == 0 and "finished by stop" in generated.err, generated.err
  assert "reads the prompt alone with an encoder" in ended[0]["system"].message
  assert ended[0]["no head"].code and "EncoderDecoder reads prompts with an encoder" in ended[0]["no head"].message


def test_the_encoders_share_by_length_of_inputs():
  records = [test_summary.record("plain", name, prompt_tokens=size, encode_seconds=spent, seconds=0.2)
             for name, size, spent in (("a", 5, 0.02), ("b", 40, 0.04), ("c", 63, 0.08))]
  group = summary_lib.summarize(records)["groups"][0]
  assert group["encoder_ms"] == pytest.approx(140 / 3) and group["encoder_share"] == pytest.approx(0.14 / 0.6)
  assert group["encoder_share_by_inputs"] == pytest.approx({"16": 0.1, "32": 0.3})
  cell = tables.ENCODER.cell(group)
  assert cell.text == "23.3%" and cell.note == "46.7 ms"
  without = summary_lib.summarize([test_summary.record("plain")])["groups"][0]
  assert without["encoder_ms"] is without["encoder_share"] is without["encoder_share_by_inputs"] is None


def test_acceptance_by_language_pair_and_by_length_of_the_output():
  record = lambda name, category, drafted, accepted, **changes: test_summary.record(
      "ngram", name, category=category, drafted=drafted, accepted=accepted, encode_seconds=0.01, **changes)
  records = [record("tico/en-ar/1:2", "translation", (4,), (3,), tokens=8, steps=4),
             record("tico/en-ar/7", "translation", (4,), (1,), tokens=20, steps=16),
             record("react/ko-en/7", "translation", (0,), (0,), tokens=9, steps=9),
             record("a/en-ko/7", "chat", (2,), (1,), tokens=33, steps=11), record("b", "translation", (1,), (1,))]
  group = summary_lib.summarize(records)["groups"][0]
  assert group["by_language_pair"] == {
      "en-ar": {"requests": 2, "tokens_per_step": 1.4, "acceptance_rate": 0.5},
      "ko-en": {"requests": 1, "tokens_per_step": 1.0, "acceptance_rate": None}}
  lengths = {key: (row["requests"], row["tokens_per_step"]) for key, row in group["by_output_length"].items()}
  assert lengths == {"8": (3, 25 / 17), "16": (1, 1.25), "32": (1, 3.0)}
  table = tables.breakdown([group], ["ngram"])
  assert [section.title for section in table.sections] == [
      "en-ar", "ko-en", "outputs of 8 tokens and more", "outputs of 16 tokens and more", "outputs of 32 tokens and more"]
  assert [[cell.text for cell in cells] for _, cells in table.sections[0].rows + table.sections[1].rows] == [
      ["2", "1.40", "50.0%"], ["1", "1.00", tables.DASH]]
  without = summary_lib.summarize([test_summary.record("plain", "tico/en-ar/1", category="translation")])["groups"][0]
  assert without["by_language_pair"] is without["by_output_length"] is None


@pytest.mark.usefixtures("quick_compile")
def test_stored_values_are_met():
  folder, golden = parity.stored()["t5_v11"]
  row = parity.against_stored("t5_v11", folder, golden)
  assert row.met and row.equal == row.texts == 3 and set(row.errors) == {"whole", "chunks", "one by one"}
  moved = golden | {"inputs": golden["inputs"] + (golden["inputs"] > 0)}
  assert not parity.against_stored("t5_v11", folder, moved).met
