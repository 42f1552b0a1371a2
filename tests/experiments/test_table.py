"""The printed table: a line a (category, method), columns under their heads, dashes for what does not exist."""
import re

from experiments.harness import table

COLUMNS = ("category", "method", "requests", "tokens", "tok/step", "break-even", "accept", "tok/s", "speedup", "95% interval",
           "decode", "no repeats", "repeated", "TTFT ms", "p50 ms", "p95 ms", "p99 ms", "identical")


def _group(method="ngram", category="chat", language="all", **changes):
  return {"method": method, "category": category, "language": language, "batch_size": 1, "requests": 12,
          "verifier": "point", "lossless": True, "total_variation_bound": 0.0,
          "output_tokens": 1536, "tokens_per_step": 1.504, "verify_cost_ratio": 1.153, "acceptance_rate": 0.288, "tokens_per_second": 61.26,
          "speedup": 1.487, "decode_speedup": 1.619,
          "speedup_interval": [1.301, 1.666], "speedup_without_repeats": 1.402, "repeated_share": 0.0549,
          "time_to_first_token_ms": {"p50": 201.4, "p95": 300.0, "p99": 310.0},
          "latency_ms": {"p50": 2000.6, "p95": 3000.0, "p99": 4000.2}, "identical_to_plain": [11, 12]} | changes


def _plain(**changes):
  return _group("plain", acceptance_rate=None, speedup=None, speedup_interval=None, decode_speedup=None, speedup_without_repeats=None,
                identical_to_plain=None, verify_cost_ratio=1.0) | changes


def _cells(line):
  return re.split(r"\s{2,}", line.strip())


def test_heads_and_numbers():
  lines = table.render([_group()]).splitlines()
  assert tuple(_cells(lines[0])) == COLUMNS
  assert set(lines[1]) == {"-"}
  assert _cells(lines[2]) == ["chat", "ngram", "12", "1536", "1.50", "1.15", "0.29", "61.3", "1.49", "1.30 to 1.67",
                              "1.62", "1.40", "5%", "201", "2001", "3000", "4000", "11 of 12"]


def test_missing_numbers_are_dashes():
  line = table.render([_plain(time_to_first_token_ms=None, latency_ms=None, tokens_per_second=None)]).splitlines()[2]
  assert _cells(line) == ["chat", "plain", "12", "1536", "1.50", "1.00", "-", "-", "-", "-", "-", "-", "5%", "-", "-", "-", "-", "-"]


def test_zero_is_not_missing():
  line = table.render([_group(acceptance_rate=0.0, identical_to_plain=[0, 12])]).splitlines()[2]
  assert _cells(line)[6] == "0.00"
  assert _cells(line)[-1] == "0 of 12"


def test_overall_comes_last_and_categories_keep_their_order():
  groups = [_plain(category="all"), _group(category="all"), _plain(category="math"), _group(category="math"),
            _plain(category="chat"), _group(category="chat")]
  names = [line[:15].strip() for line in table.render(groups).splitlines()[2:]]
  assert names == ["math", "", "chat", "", "overall", ""]


def test_languages_have_no_lines_of_their_own():
  groups = [_group(), _group(language="ko"), _group(language="en")]
  assert len(table.render(groups).splitlines()) == 3


def test_columns_stand_under_their_heads():
  lines = table.render([_plain(), _group(), _group(category="mixed_ko_en")]).splitlines()
  assert len(lines[1]) == max(map(len, lines))
  for name in COLUMNS[2:]:
    end = f"{lines[0]} ".index(f" {name} ") + 1 + len(name)  # "tok/s" is a part of "tok/step"
    assert all(line[end - 1] != " " and line[end:end + 2].strip() == "" for line in lines[2:]), name


def test_a_long_name_widens_its_column():
  lines = table.render([_group(category="a category with a very long name"), _group(category="chat")]).splitlines()
  assert lines[0].index("method") == lines[2].index("ngram") == lines[3].index("ngram")


def test_batch_sizes_are_named_where_there_are_several():
  groups = [_group(batch_size=4), _group(batch_size=1), _group(category="all", batch_size=4),
            _group(category="all", batch_size=1)]
  names = [_cells(line)[0] for line in table.render(groups).splitlines()[2:]]
  assert names == ["chat, batch 4", "chat, batch 1", "overall, batch 4", "overall, batch 1"]
  assert _cells(table.render(groups[:1]).splitlines()[2])[0] == "chat"


def test_a_lossy_verifier_is_named_in_its_rows_and_below():
  lossy = {"lossless": False, "verifier": "lossy_typical"}
  groups = [_plain(category="all", verifier="lossy_typical"),
            _group(category="all", total_variation_bound=0.125, **lossy),
            _plain(verifier="lossy_typical"), _group(total_variation_bound=0.5, **lossy)]
  lines = table.render(groups).splitlines()
  assert [_cells(line)[-17] for line in lines[2:6]] == ["plain", "ngram, lossy_typical"] * 2
  (line,) = lines[6:]
  assert line == ("LOSSY: lossy_typical; ngram, bound per token: mean total variation 0.12, the text is not the "
                  "target's")
  assert lines[0].index("requests") + len("requests") == lines[3].index("12") + 2  # the wider column moves the others


def test_a_lossless_run_ends_with_its_rows():
  assert "LOSSY" not in table.render([_plain(), _group(verifier="block")])
