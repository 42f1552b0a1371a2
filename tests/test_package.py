"""The package as a whole: its public names, and imports that go down its floors and never up."""
import ast
import collections
import pathlib
import re

import pytest

import specjax

ROOT = pathlib.Path(specjax.__file__).parent
# Ground, models and verifiers, proposers, the step, its drivers. Names not listed are unbound. Theory judges verifiers,
# and its wrong rules are made of the same parts.
FLOORS = dict(tree=0, draft_laws=0, sampling=0, sampling_params=0, processors=0, constraints=0, keys=0, logprobs=0,
              stopping=0, counters=0, expert_counters=0, cache=0, vocabulary=0, models=1, verifiers=1, theory=1, checkpoints=1,
              proposers=2, decode=3, starting=4, drivers=4, training=5, serving=5, parallel=5, loading=4, testing=6)


def test_public_names():
  assert len(set(specjax.__all__)) == len(specjax.__all__) > 0
  for name in specjax.__all__:
    assert getattr(specjax, name) is not None
  assert specjax.__version__.count(".") == 2


def imported(path):
  """Names directly below `specjax`, `experiments` and `tests` that a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      parts = node.module.split(".")
      yield from (parts[:1] + [alias.name] if len(parts) == 1 else parts for alias in node.names)
    elif isinstance(node, ast.Import):
      yield from (alias.name.split(".") for alias in node.names)


FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path):
  here = path.parts[0].removesuffix(".py")
  for parts in imported(ROOT / path):
    assert parts[0] not in ("experiments", "tests"), f"{path} imports {parts}"
    if parts[0] != "specjax" or len(parts) < 2:
      continue
    assert parts[1] != "testing" or here == "testing", f"{path}: only tests and experiments may import testing"
    if here in FLOORS and parts[1] in FLOORS:
      assert FLOORS[parts[1]] <= FLOORS[here], f"{path} imports specjax.{parts[1]}, which stands above it"


@pytest.mark.parametrize("page", ["README.md", "BUILD.md"])
def test_links_and_names_in_the_pages_exist(page):
  """A feature row links to the test that holds it: a link, or a named file, that is not there is a broken promise."""
  root = pathlib.Path(__file__).parent.parent
  text = (root / page).read_text(encoding="utf-8")
  links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
  named = re.findall(r"`((?:tests|specjax|experiments|launch)/[\w./]+)`", text)
  assert links or named
  for name in {*links, *named}:
    assert (root / name.split("#")[0]).exists(), f"{page} names {name}"


def test_no_two_test_files_share_a_name():
  """Test folders are no packages: one process that collects two files of a name refuses the second of them, which
  shows only when both are collected by the same worker."""
  tests = pathlib.Path(__file__).parent
  names = collections.Counter(path.name for path in tests.rglob("*.py") if path.name != "conftest.py")
  assert [name for name, files in names.items() if files > 1] == []
