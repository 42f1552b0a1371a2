"""An interrupt that is not lost.

Python drops a KeyboardInterrupt that happens to be raised in a finalizer, or in a callback of foreign code: a program that
was asked to stop then runs to its end. So it is remembered too, and loops ask for it between two turns.
"""
import signal
import threading

_asked = threading.Event()


def remember() -> None:
  """From now on an interrupt is remembered, beside what it raises."""
  def handler(number, frame):
    _asked.set()
    signal.default_int_handler(number, frame)

  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
    signal.signal(signal.SIGINT, handler)


def heed() -> None:
  """Raises KeyboardInterrupt if one was asked for since the last one that was raised here, and dropped."""
  if _asked.is_set():
    _asked.clear()
    raise KeyboardInterrupt
