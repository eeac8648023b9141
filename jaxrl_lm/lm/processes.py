"""What the processes of one run must agree on: a branch before a collective, and when to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def every_process(text: str) -> list[str]:
  """The text of each process, the same list in all of them.

  Where processes decide one by one (one finds a damaged file, one is told to stop), the others wait
  for ever in the next collective. A decision on what this returns is the same everywhere.

  Args:
    text: of this process. Every process calls, at the same place of its program.

  Returns:
    Texts in the order of the processes; of one process, without a collective, its own.
  """
  if jax.process_count() == 1:
    return [text]
  own = np.frombuffer(text.encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([own.size], np.int32)).reshape(-1)
  padded = np.zeros(max(1, int(sizes.max())), np.uint8)
  padded[: own.size] = own
  rows = multihost_utils.process_allgather(padded)
  return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


class GracefulExit:
  """SIGTERM and SIGINT become a question that the loop asks, so that it can save before it ends.

      with GracefulExit() as leave:
        for step in steps:
          ...
          if leave.requested():
            break

  A second SIGINT raises KeyboardInterrupt at once. Leaving the context restores the handlers that
  were there. Python delivers signals to the main thread only: entered in another one, this changes
  nothing and is never told to stop.

  Attributes:
    received: the first signal, None before.
  """

  def __init__(self) -> None:
    self.received: signal.Signals | None = None
    self._interrupted = False
    self._previous: dict[signal.Signals, Any] = {}

  def __enter__(self) -> GracefulExit:
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._receive)
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    for number, handler in self._previous.items():
      # None is a handler that was not set from Python, and cannot be set from it.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    self._previous.clear()

  def requested(self) -> bool:
    """Whether any process has received a signal; every process asks, after the same step."""
    return any(every_process(self.received.name if self.received else ""))

  def _receive(self, number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
      if self._interrupted:
        raise KeyboardInterrupt
      self._interrupted = True
    self.received = self.received or signal.Signals(number)
