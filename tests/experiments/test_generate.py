"""Generation at a terminal: the text of the library, streamed; colours on demand; a message at the end."""
import ast
import json
import re
import subprocess

import pytest

from specjax import checkpoints
import programs

FLAGS = [f"--target={programs.TINY}", "--draft_tokens=3", "--max_new_tokens=40"]
PROMPT = "--prompt=ab ab ab ab ab"
# Notes what the program asks of the library, and ends.
CAPTURE = """
import json
import specjax
def stream(target, proposer, prompt, params, *, tokenizer, max_new_tokens, key, verifier, logprobs):
  import jax
  key = jax.random.key_data(key).tolist()
  print(json.dumps([repr(proposer), list(map(int, prompt)), repr(params), max_new_tokens, key, repr(verifier),
                    logprobs]))
  sys.exit(0)
specjax.stream = stream
"""
INTERRUPT = """
import specjax
def stream(*_, **__):
  yield specjax.Delta(row=0, token_ids=[5], drafted=[False], pieces=["begun"], finish_reason=None)
  raise KeyboardInterrupt
specjax.stream = stream
"""
SPEAK = INTERRUPT.replace("  raise KeyboardInterrupt\n", "")


@pytest.fixture(scope="module")
def env(tmp_path_factory):
  return programs.environment(tmp_path_factory)


@pytest.fixture(scope="module")
def ended(env):
  sampled = [PROMPT, "--temperature=0.8", "--seed=5"]
  cases = {
      "plain": ([PROMPT, "--method=plain"], ""), "ngram": ([PROMPT], ""), "always": ([PROMPT, "--color=always"], ""),
      "plain always": ([PROMPT, "--method=plain", "--color=always"], ""),
      "sampled plain": ([*sampled, "--method=plain"], ""), "sampled ngram": (sampled, ""),
      "other seed": ([*sampled, "--seed=6", "--method=plain"], ""), "one token": ([PROMPT, "--max_new_tokens=1"], ""),
      "captured": ([PROMPT, "--system=Be brief.", "--temperature=0.5", "--top_k=4", "--top_p=0.5", "--min_p=0.25",
                    "--seed=9", "--max_new_tokens=17", "--repetition_penalty=1.5", "--logit_bias=7:-2.5,8:-inf",
                    "--banned_ids=5,6", "--min_new_tokens=3", "--verifier=lossy_lenient", "--lenience=0.25",
                    "--logprobs=2"], CAPTURE),
      "captured raw": ([PROMPT, "--raw"], CAPTURE),
      "logprobs": ([PROMPT, "--temperature=0.8", "--seed=5", "--logprobs=2", "--banned_ids=4"], ""),
      "lossy": ([PROMPT, "--verifier=lossy_typical", "--logprobs=0"], ""),
      "lossy plain": ([PROMPT, "--method=plain", "--verifier=lossy_typical"], SPEAK),
      "interrupted": ([PROMPT], INTERRUPT),
  }
  given = [("generate", [*FLAGS, *args], setup) for args, setup in cases.values()]
  return dict(zip(cases, programs.run_all(given, env=env), strict=True))


def _numbers(end):
  return tuple(map(int, re.search(r"(\d+) tokens in (\d+) steps, (\d+) of them accepted", end.err).groups()))


@pytest.mark.parametrize("name", ["plain", "ngram", "always", "sampled plain", "sampled ngram", "one token"])
def test_it_ends_well(ended, name):
  end = ended[name]
  assert end.code == 0, end.err
  assert end.out.strip()
  tokens, steps, accepted = _numbers(end)
  assert tokens == steps + accepted
  assert "finished by" in end.message


def test_drafting_does_not_change_the_text(ended):
  assert ended["plain"].out == ended["ngram"].out
  assert _numbers(ended["plain"])[2] == 0 < _numbers(ended["ngram"])[2]
  assert _numbers(ended["ngram"])[0] == 40


def test_a_seed_gives_the_text_of_plain_decoding(ended):
  assert ended["sampled plain"].out == ended["sampled ngram"].out
  assert ended["sampled plain"].out != ended["plain"].out
  assert ended["sampled plain"].out != ended["other seed"].out


def test_colours(ended):
  colored = ended["always"].out
  assert colored.count("\x1b[32m") == colored.count("\x1b[0m")
  assert 0 < colored.count("\x1b[32m") <= _numbers(ended["always"])[2]  # a control token has no text to colour
  assert re.sub(r"\x1b\[\d+m", "", colored) == ended["ngram"].out
  for name in ("plain", "ngram", "plain always"):  # nothing was drafted, or this is no terminal
    assert "\x1b" not in ended[name].out


def test_settings_reach_the_library(ended):
  proposer, prompt, params, limit, key, verifier, logprobs = json.loads(ended["captured"].out)
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  assert "num_tokens=3" in proposer
  assert prompt == tokenizer.chat([{"role": "system", "content": "Be brief."},
                                   {"role": "user", "content": "ab ab ab ab ab"}])
  assert params == ("SamplingParams(temperature=0.5, top_k=4, top_p=0.5, min_p=0.25, seed=[9], "
                    "repetition_penalty=1.5, logit_bias={7: -2.5, 8: -inf}, banned_ids=[5, 6], min_new_tokens=3)")
  assert (verifier, logprobs) == ("LossyLenient(lenience=0.25)", 2)
  assert (limit, key) == (17, [0, 9])


def test_raw(ended):
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  assert json.loads(ended["captured raw"].out)[1] == tokenizer.encode("ab ab ab ab ab", add_special_tokens=True)


def test_logprobs_are_a_table_behind_the_text(ended):
  end = ended["logprobs"]
  assert end.code == 0, end.err
  lines = end.err.split("token ", 1)[1].split("\n\n")[0].splitlines()
  assert lines[0].split() == ["processed", "raw", "most", "probable,", "raw"]
  tokens = _numbers(end)[0]
  assert len(lines) == 1 + tokens
  pattern = re.compile(r"""(?P<token>'.*'|".*") +(?P<own>-?[\d.]+) +(?P<raw>-[\d.]+)  (?P<a>'.*'|".*") """
                       r"""(?P<first>-[\d.]+)  (?P<b>'.*'|".*") (?P<second>-[\d.]+)""")
  rows = [pattern.fullmatch(line) for line in lines[1:]]
  assert all(rows), lines
  text = "".join(ast.literal_eval(row["token"]) for row in rows)
  assert text.startswith(end.out[:10])
  for row in rows:
    first, second, raw, own = (float(row[name]) for name in ("first", "second", "raw", "own"))
    assert 0 > first >= second and raw <= first + 1e-3
    if row["token"] == row["a"]:
      assert raw == pytest.approx(first, abs=2e-3)
  assert any(abs(float(row["own"]) - float(row["raw"])) > 0.01 for row in rows)  # two laws, at temperature 0.8


def test_logprobs_without_alternatives(ended):
  lines = ended["lossy"].err.split("token ", 1)[1].split("\n\n")[0].splitlines()
  assert lines[0].split() == ["processed", "raw"]
  assert {line.split()[-2] for line in lines[1:]} == {"0.000"}  # greedy: the processed law is one-hot
  assert "processed" not in ended["ngram"].err


def test_a_lossy_text_is_called_so(ended):
  """Whatever came of it: typical acceptance at temperature 0 happens to be greedy matching."""
  assert ended["lossy"].code == 0, ended["lossy"].err
  assert ended["lossy"].out == ended["ngram"].out
  assert ended["lossy"].message == "LOSSY: lossy_typical; the text is not the target's"
  for name in ("lossy plain", "sampled ngram"):  # nothing was judged; a lossless rule
    assert ended[name].code == 0 and "LOSSY" not in ended[name].err


def test_an_interrupt_is_no_accident(ended):
  end = ended["interrupted"]
  assert end.out.startswith("begun")
  assert "Traceback" not in end.err
  assert end.code == 130


def test_a_real_start_streams(env, ended):
  """Text comes before the end of the process: its first byte is there while the rest is being made."""
  arguments = [*FLAGS, PROMPT, "--max_new_tokens=200"]
  # Unbuffered: `communicate` does not see what a buffer has taken from the pipe.
  with subprocess.Popen(programs.command("generate", *arguments), cwd=programs.ROOT, env=env, bufsize=0,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    first = process.stdout.read(1)
    assert process.poll() is None
    rest, err = process.communicate(timeout=120)
  assert process.returncode == 0
  assert b"finished by" in err
  assert (first + rest).decode()[:10] == ended["ngram"].out[:10]


def test_a_reader_that_goes_away_is_no_error(env):
  """`generate | head -c 1`: the reader has what it wants."""
  arguments = [*FLAGS, PROMPT, "--max_new_tokens=200"]
  with subprocess.Popen(programs.command("generate", *arguments), cwd=programs.ROOT, env=env, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE) as process:
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.wait(timeout=120)
  assert "Traceback" not in err
  assert "error:" not in err and "Exception ignored" not in err
