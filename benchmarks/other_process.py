"""A process that is asked for measurements, a line of JSON at a time."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class OtherProcess:
  """A process that answers each line of JSON with another.

  Another library is timed in one of its own: neither its threads nor its memory are then part of
  what is measured next, and it may live in another environment.
  """

  def __init__(self, command: list[str]):
    self.process = subprocess.Popen(
      command,
      cwd=Path(__file__).parents[1],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )

  def answer(self) -> Any:
    """The next answer, or None if the process has ended."""
    assert self.process.stdout is not None
    line = self.process.stdout.readline()
    return json.loads(line) if line else None

  def ask(self, question: Any = None) -> Any:
    assert self.process.stdin is not None
    self.process.stdin.write(json.dumps(question) + "\n")
    self.process.stdin.flush()
    return self.answer()

  def close(self) -> None:
    assert self.process.stdin is not None
    self.process.stdin.close()
    self.process.wait()
