"""An interrupt that Python drops is heeded at the next turn of a loop."""
import os
import signal

import pytest

from experiments.harness import interrupt


class Finalized:
  """Is interrupted while it is thrown away, where exceptions are dropped."""

  def __del__(self):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # long enough for the handler to run in here
      pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_finalizer_is_not_lost():
  before = signal.getsignal(signal.SIGINT)
  try:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.remember()
    interrupt.heed()  # nothing was asked for
    value = Finalized()
    del value  # dropped here
    with pytest.raises(KeyboardInterrupt):
      interrupt.heed()
    interrupt.heed()  # once only
  finally:
    signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_stays_ignored():
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    interrupt.remember()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, before)
