"""Launchers pass SIGINT on, so the programs that these tests start must heed it."""
import signal

import pytest


@pytest.fixture(scope="module", autouse=True)
def interrupts_are_heard():
  """All that a script starts behind an "&" ignores SIGINT, and so would every program below; a handler of ours does not
  outlive the start of a program."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)
