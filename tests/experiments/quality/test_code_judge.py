"""Code: blocks, parsing, tests in the sandbox; and code that loops, forks, writes, prints, lies or leaves."""
import os
import socket
import tempfile
import time
import uuid

import pytest

from experiments.quality import code
from experiments.quality import fences
from experiments.quality import rows
from experiments.quality import sandbox
from requests_of import request

ADD = "Write a Python function `add`."
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
RIGHT = "Here:\n```python\ndef add(a, b):\n  return a + b\n```\nDone."


def judge(text, prompt=ADD, run_code=True, **fields):
  return code.judge(request(prompt, "code", **fields), text, run_code=run_code)


@pytest.mark.parametrize("text, blocks, around", [
    ("a\n```py\nx\n```\nb", [("py", "x", True)], "a\nb"),
    ("```\nx\n\ny", [("", "x\n\ny", False)], ""),
    ("~~~Python title\n```\n~~~", [("python", "```", True)], ""),
    ("````\n```\nx\n````", [("", "```\nx", True)], ""),
    ("``` a `b`\nx", [], "``` a `b`\nx"),
    ("```js\r\nx\r\n```", [("js", "x\r", True)], ""),
    ("no", [], "no")])
def test_fences(text, blocks, around):
  found, rest = fences.split(text)
  assert [(b.language, b.body, b.closed) for b in found] == blocks and rest == around


def test_a_right_answer():
  assert judge(RIGHT, tests=TESTS) == {"fenced": True, "parses": True, "tests_passed": 1.0, "passed": True}


def test_a_wrong_answer_passes_in_part():
  found = judge("```python\ndef add(a, b):\n  return 3\n```", tests=TESTS)
  assert found == {"fenced": True, "parses": True, "tests_passed": 0.5, "passed": False}


def test_code_is_not_run_unless_that_is_allowed(monkeypatch):
  monkeypatch.setattr(sandbox, "run", lambda *args: pytest.fail("it was run"))
  found = judge(RIGHT, tests=TESTS, run_code=False)
  assert found == {"fenced": True, "parses": True, "tests_passed": None, "passed": None}


@pytest.mark.parametrize("text, fenced, parses", [
    ("```python\ndef add(a, b):\n  return a +", False, False), ("```python\nx = 1", False, True),
    ("def add(a, b): return a + b", False, True), ("Sorry, no.", False, False), ("", False, False),
    ("```python\n```", True, False), ("```python\nx = '\\d'\n```", True, True),
    ("```python\nx = 1\0\n```", True, False),
    ("```python\n" + "(" * 5000 + "\n```", True, False), ("```python\n" + "x = 1\n" * 20000 + "```", True, False),
    ("```python\nx = " + "-" * 50000 + "1\n```", True, False)])
def test_blocks_and_parsing(text, fenced, parses):
  found = judge(text, tests=TESTS if not parses else [])
  assert (found["fenced"], found["parses"]) == (fenced, parses)
  assert found["tests_passed"] == (None if parses else 0)


def test_other_languages_are_not_parsed():
  answer = "```javascript\nconst x = 1;\n```"
  assert judge(answer, "Write a JavaScript function.") == {
      "fenced": True, "parses": None, "tests_passed": None, "passed": None}
  # The block of the prompt says what it is about; without one its words do.
  assert judge(answer, "As in Python, mend it:\n```js\nlet x\n```")["parses"] is None
  assert judge(answer)["parses"] is False


def test_tests_of_a_row():
  assert rows.tests(request(tests=TESTS)) == TESTS
  assert rows.tests(request(test_list=["assert 1"])) == ["assert 1"]
  check = rows.tests(request(test="def check(f):\n  assert f(1, 2) == 3", entry_point="add"))
  assert judge(RIGHT, test="def check(f):\n  assert f(1, 2) == 3", entry_point="add")["passed"] is True
  assert check == ["def check(f):\n  assert f(1, 2) == 3\ncheck(add)"]
  assert rows.tests(request("Pass these:\n\nassert f(1) == 2\n  assert f(2)==3\nassert that it holds")) == [
      "assert f(1) == 2", "assert f(2)==3"]
  assert rows.tests(request("Write it well.")) == []


def test_examples_of_a_prompt_are_tests():
  prompt = ('Complete it.\n```python\nimport math\n\ndef root(n):\n  """Root.\n  >>> root(4)\n  2.0\n'
            '  >>> root(9) == 3\n  >>> root(-1)\n  Traceback (most recent call last):\n  ValueError\n'
            '  >>> print(1)\n  one two\n  """\n```')
  assert rows.tests(request(prompt)) == ["assert (root(4)) == (2.0)", "assert root(9) == 3"]
  # The prompt's imports stand before the answer, and nothing else of it does.
  assert judge("```python\ndef root(n):\n  return math.sqrt(n)\n```", prompt)["passed"] is True
  assert judge("```python\nx = 1\n```", prompt)["tests_passed"] == 0
  assert rows.tests(request("Fix it.\n>>> f(1)\n2\n\nBe short.")) == ["assert (f(1)) == (2)"]
  assert rows.tests(request("   >>> f(1)\n 2\n")) == []


HOSTILE = {
    "a loop": "while True: pass", "leaves": "import os; os._exit(0)", "raises SystemExit": "raise SystemExit(0)",
    "sleeps": "import time; time.sleep(1000)", "takes memory": "x = bytearray(1 << 40)",
    "takes memory slowly": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "deep": "def f(): f()\nf()",
    "prints without end": "while True: print('x' * 10000)",
    "writes to every descriptor": "import os\nfor i in range(64):\n  try:\n    while True: os.write(i, b'x' * 65536)\n"
                                  "  except OSError: pass",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_ends_and_passes_nothing(name):
  before = time.monotonic()
  ran, passed = sandbox.run(HOSTILE[name], ["assert True"], seconds=1)
  assert not ran and passed == 0
  assert time.monotonic() - before < 60  # it ended at all: sleeping would take a thousand


def test_what_passed_before_a_loop_counts():
  assert sandbox.run("", ["assert True", "while True: pass", "assert True"], seconds=1) == (True, 1)


def test_printing_is_no_fault():
  assert sandbox.run("print('x' * 100000)", ["print('passed' * 1000)", "assert True"]) == (True, 2)


def test_a_test_does_not_see_another_ones_names():
  assert sandbox.run("", ["x = 1", "x"]) == (True, 1)


def test_no_process_is_started():
  for source in ("import os\nif not os.fork(): os._exit(0)", "import subprocess; subprocess.run(['/bin/true'])",
                 "import threading; threading.Thread(target=print).start()"):
    assert sandbox.run(source, []) == (False, 0)


def test_nothing_is_written():
  name = f"{tempfile.gettempdir()}/quality-{uuid.uuid4()}"
  source = f"for name in ('here', {name!r}):\n  with open(name, 'wb') as file: file.write(b'x')"
  assert sandbox.run(source, []) == (False, 0)
  assert not os.path.exists(name) or not os.path.getsize(name)
  assert sandbox.run("import os", ["assert os.listdir('.') == []", "os.mkdir('here')"]) == (True, 1)


def test_environment_and_packages_are_out_of_reach(monkeypatch):
  monkeypatch.setenv("A_SECRET", "x")
  assert sandbox.run("import os", ["assert 'A_SECRET' not in os.environ", "import numpy"]) == (True, 1)


def test_the_network_is_out_of_reach_where_that_is_said():
  if "NETWORK STAYS OPEN" in sandbox.describe():
    pytest.skip("no user namespaces here: the sandbox says so")
  with socket.create_server(("127.0.0.1", 0)) as server:
    source = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
    with pytest.raises(TimeoutError):
      server.settimeout(0)
      try:
        assert sandbox.run(source, []) == (False, 0)
        server.accept()
      except BlockingIOError as error:
        raise TimeoutError from error


def test_limits_cannot_be_raised():
  source = "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))"
  assert sandbox.run(source, []) == (False, 0)


def test_what_is_done_without_namespaces(monkeypatch):
  """The weaker way is taken where the stronger fails, and says what it leaves open."""
  monkeypatch.setattr(sandbox, "_ALONE", ("/nowhere/unshare",))
  sandbox._way.cache_clear()
  try:
    assert "NETWORK STAYS OPEN" in sandbox.describe()
    assert sandbox.run("", ["assert True"]) == (True, 1)
    assert sandbox.run("import os; os.fork()", []) == (False, 0)
  finally:
    sandbox._way.cache_clear()


def test_where_nothing_runs(monkeypatch):
  monkeypatch.setattr(sandbox, "_PROGRAM", "raise SystemExit")
  sandbox._way.cache_clear()
  try:
    with pytest.raises(ValueError, match="--run_code: no Python can be started"):
      sandbox.describe()
  finally:
    sandbox._way.cache_clear()
