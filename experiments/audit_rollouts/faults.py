"""What is wrong with a log, and where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

SHOWN = 5


class BadLog(Exception):  # noqa: N818
  """A log that cannot be audited; the message names the file, the line and what to do."""


@dataclasses.dataclass
class Faults:
  """Rows that cannot be read: the first one is an error, or all are left out and counted."""

  skip: bool
  count: int = 0
  first: list[str] = dataclasses.field(default_factory=list)

  def add(self, path: Path, place: str, what: str) -> None:
    """Notes a bad row.

    Raises:
      BadLog: bad rows are not to be skipped.
    """
    message = f"{path}, {place}: {what}"
    if not self.skip:
      raise BadLog(f"{message}\n(--skip-bad-rows leaves such rows out and counts them.)")
    self.count += 1
    if len(self.first) < SHOWN:
      self.first.append(message)
