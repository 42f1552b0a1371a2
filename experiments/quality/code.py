"""Code: is the block finished, does Python parse it, do the tests pass.

- `fenced`: the first fenced block has its closing fence; false without a block.
- `parses`: Python's `ast` takes the first block (the whole text where there is none). Null where the request is for
  another language.
- `tests_passed`: the share of the row's tests that pass, each run alone behind the answer; `passed`: all do. Null
  without tests (see `rows.tests`), or unless code may be run. The imports of a Python block in the prompt stand before
  the answer, as in HumanEval, where it goes on from them.
"""
import ast
import re
import warnings

from experiments.quality import fences
from experiments.quality import rows
from experiments.quality import sandbox
from experiments.workloads import Request

_PYTHON = ("python", "py", "python3")
_LONGEST = 1 << 16  # characters: more is no answer, and the parser's own stack is not endless


def judge(request: Request, text: str, *, run_code: bool = False) -> dict[str, float | bool | None]:
  """See the module. `run_code` allows that the text is executed, in `sandbox`."""
  blocks, _ = fences.split(text)
  code, language = (blocks[0].body, blocks[0].language) if blocks else (text, "")
  found = {"fenced": bool(blocks) and blocks[0].closed, "parses": None, "tests_passed": None, "passed": None}
  if language not in _PYTHON and not _asks_for_python(request):
    return found
  found["parses"] = bool(code.strip()) and parse(code) is not None
  tests = rows.tests(request) if run_code else []
  if tests:
    count = sandbox.run(_imports(request) + code, tests)[1] if found["parses"] else 0
    found |= {"tests_passed": count / len(tests), "passed": count == len(tests)}
  return found


def parse(code: str) -> ast.Module | None:
  """The tree of a source, None where it has none; warnings about the source are dropped."""
  if len(code) > _LONGEST:
    return None
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
      return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
      return None


def _asks_for_python(request):
  """The prompt's own block decides over its words: a task on JavaScript may mention Python."""
  blocks, _ = fences.split(request.turns[-1])
  named = [block.language for block in blocks if block.language]
  return named[0] in _PYTHON if named else bool(re.search(r"\bpython\b", "\n".join(request.turns), re.I))


def _imports(request):
  for block in fences.split(request.turns[-1])[0]:
    tree = parse(block.body) if block.language in _PYTHON else None
    if tree is not None:
      nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
      return "".join(ast.unparse(node) + "\n" for node in nodes)
  return ""
