"""Tests over several CPU devices: they run again in one process a file, which starts with so many.

The number of devices is fixed when JAX starts, and other tests want one. So a test that is decorated here,

    @many_devices.on(8)
    @pytest.mark.parametrize("mesh", [(8, 1), (4, 2)])
    def test_tokens_are_those_of_one_device(mesh): ...

does nothing but ask a second pytest, started once for all such tests of its file that are selected, how it went there.
The decorator stands outermost. Fixtures are made in the second process only. Everything else is as in any test.
"""
import functools
import inspect
import os
import subprocess
import sys
from xml.etree import ElementTree

import jax
import pytest

_CHILD = "SPECJAX_TEST_DEVICES"
_RESULTS = pytest.StashKey[dict]()


def environment(devices: int) -> dict[str, str]:
  """The environment of a process that is to have so many CPU devices, made of this one's."""
  ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
  return ours | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}


def on(devices: int):
  """Decorates a test that needs so many devices; see the module."""

  def decorate(test):
    if os.environ.get(_CHILD) == str(devices):

      @functools.wraps(test)
      def run_here(*args, **kwargs):
        assert jax.device_count() == devices
        return test(*args, **kwargs)

      return run_here

    @functools.wraps(test)
    def ask(request, **_):
      found = _results(request, devices)
      assert request.node.name in found, f"the process with {devices} devices did not run this test:\n{found['output']}"
      for outcome in found[request.node.name]:
        if outcome.tag == "skipped":
          pytest.skip(outcome.get("message"))
        if outcome.tag in ("failure", "error"):
          pytest.fail(f"on {devices} devices:\n{outcome.text}", pytrace=False)

    # What is parametrized stays a parameter, so that the tests have the same names in both processes.
    names = [name for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"
             for name in (mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0])]
    ask.__signature__ = inspect.Signature([inspect.Parameter(name.strip(), inspect.Parameter.KEYWORD_ONLY)
                                           for name in ("request", *names)])
    ask.devices = devices
    return ask

  return decorate


def _results(request, devices) -> dict:
  """Name of a test -> elements of the report on it, of all selected tests of a file that need so many devices."""
  known = request.session.stash.setdefault(_RESULTS, {})
  key = request.node.path, devices
  if key not in known:
    wanted = [item for item in request.session.items
              if item.path == request.node.path and getattr(item.function, "devices", None) == devices]
    report = request.getfixturevalue("tmp_path_factory").mktemp("devices") / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={request.config.rootpath}",
         f"--junitxml={report}", *(f"{item.path}::{item.nodeid.partition('::')[2]}" for item in wanted)],
        env=environment(devices) | {_CHILD: str(devices)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=request.config.rootpath, check=False)
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    known[key] = {"output": done.stdout[-4000:]} | {case.get("name"): list(case) for case in cases}
  return known[key]
