"""A conversation at a terminal: what was kept is said, drafts change nothing, the input's end is the end."""
import re

import pytest

import programs

FLAGS = [f"--target={programs.TINY}", "--draft_tokens=3", "--max_new_tokens=12"]
# What the program reads; a blank line is no message.
TYPED = "import io\nsys.stdin = io.StringIO('ab ab ab\\n\\nab ab\\nba')"
CASES = {
    "plain": ([*FLAGS, "--method=plain"], TYPED), "ngram": (FLAGS, TYPED), "always": ([*FLAGS, "--color=always"], TYPED),
    "lossy": ([*FLAGS, "--verifier=lossy_typical"], TYPED), "silent": (FLAGS, "import io\nsys.stdin = io.StringIO('')"),
    "all": ([*FLAGS, "--method=all"], TYPED), "long": ([*FLAGS, "--max_new_tokens=200"], TYPED),
    "encoder": (["--target=tests/fixtures/encoder_decoder/t5", "--method=plain"], TYPED),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  env = programs.environment(tmp_path_factory)
  return dict(zip(CASES, programs.run_all([("chat", *case) for case in CASES.values()], env=env), strict=True))


def _kept(end):
  return [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) prompt tokens were kept", end.err)]


def test_every_turn_says_what_was_kept(ended):
  for name in ("plain", "ngram"):
    end = ended[name]
    assert end.code == 0, end.err
    first, second, third = _kept(end)
    assert first[0] == 0 < second[0] < second[1] < third[1] and second[0] > first[1]
  assert ended["plain"].out == ended["ngram"].out and _kept(ended["plain"]) == _kept(ended["ngram"])


def test_colours_and_a_lossy_rule(ended):
  colored = ended["always"].out
  assert colored.count("\x1b[32m") == colored.count("\x1b[0m") > 0
  assert re.sub(r"\x1b\[\d+m", "", colored) == ended["ngram"].out
  assert "LOSSY" in ended["lossy"].err and "LOSSY" not in ended["ngram"].err


def test_no_message_is_no_turn(ended):
  assert (ended["silent"].code, ended["silent"].out, ended["silent"].err.strip()) == (0, "", "")


@pytest.mark.parametrize("name, said", [("all", "a conversation has one method"), ("long", "context of 256"),
                                        ("encoder", "a conversation is for decoders")])
def test_bad_input_is_one_message(ended, name, said):
  end = ended[name]
  assert end.code == 2 and said in end.message and "Traceback" not in end.err
