"""A folder that one run at a time writes to."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


class FolderLock:
  """A lock on a folder itself: no file in it, and gone with its process, however that ends.

  Where the file system or the system knows no such locks (some network file systems), every one is
  free.
  """

  def __init__(self, folder: Path):
    """Takes nothing yet.

    Args:
      folder: that exists when the lock is acquired.
    """
    self.folder = folder
    self._descriptor: int | None = None

  def acquire(self, attempts: int = 1) -> bool:
    """Takes the lock, unless it has it already.

    Args:
      attempts: a tenth of a second apart: who only opens the folder holds it for a moment.

    Returns:
      False if another process, or another lock of this one, holds it.
    """
    if self._descriptor is not None:
      return True
    try:
      descriptor = os.open(self.folder, os.O_RDONLY)
    except OSError:
      return True  # whoever writes there will say what is wrong
    for attempt in range(attempts):
      time.sleep(0.1 * (attempt > 0))
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        continue
      except OSError:
        pass  # no such locks here
      self._descriptor = descriptor
      return True
    os.close(descriptor)
    return False

  def release(self) -> None:
    """Gives it back, if it has it."""
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None
