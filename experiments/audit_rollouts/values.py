"""Values of a chunk to NumPy arrays; a value that cannot be read marks its row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Mark = Callable[[int, str], None]  # (row of the chunk, what is wrong with it)

_KINDS = {int: "a number", float: "a number", bool: "true or false", str: "text"}
_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_CUT_OFF = _WORDS | {"length": 1.0, "stop": 0.0}  # reasons to finish
_ROUNDING = 0.01  # nats by which the log of a probability may exceed 0
_SHOWN = 40  # characters of a value in a message


class Reader:
  """Reads the columns of one file, each of which keeps to one kind of value."""

  def __init__(self) -> None:
    self.kinds: dict[str, str] = {}

  def numbers(
    self, name: str, values: Sequence[Any], mark: Mark, words: dict[str, float] = _WORDS
  ) -> np.ndarray:
    """[N] float64, NaN where nothing stands. Numbers written as text are numbers."""
    if isinstance(values, np.ndarray):
      if values.dtype.kind in "biuf" and values.ndim == 1:
        return values.astype(np.float64)
      values = values.tolist()
    types = set(map(type, values))
    kinds = {_KINDS.get(x, f"a {x.__name__}") for x in types if x is not type(None)}
    kind = self._kind(name, values)
    if kinds <= {kind} and kind in ("a number", "true or false", "text"):
      try:
        return np.array(values, dtype=np.float64)  # None becomes NaN
      except (ValueError, OverflowError):
        pass  # to find out which, one by one
    numbers = np.full(len(values), np.nan)
    for i, value in enumerate(values):
      if value is None:
        continue
      if not self._keeps(name, value, kind, mark, i):
        continue
      try:
        numbers[i] = _number(value, words)
      except (ValueError, TypeError, OverflowError):
        mark(i, f"{name} is no number: {_short(value)}.")
    return numbers

  def whole(self, name: str, values: Sequence[Any], mark: Mark, least: int) -> np.ndarray:
    """[N] int64, not below `least`."""
    numbers = self.numbers(name, values, mark)
    with np.errstate(invalid="ignore"):
      bad = ~((numbers >= least) & (numbers < 2**53) & (numbers == np.floor(numbers)))
    for i in np.flatnonzero(bad):
      mark(int(i), f"{name} must be a whole number, at least {least}: {_short(values[i])}.")
    return np.where(bad, 0, numbers).astype(np.int64)

  def flags(self, name: str, values: Sequence[Any], mark: Mark) -> np.ndarray:
    """[N] bool."""
    numbers = self.numbers(name, values, mark, _CUT_OFF)
    for i in np.flatnonzero(~np.isin(numbers, (0.0, 1.0))):
      mark(int(i), f"{name} must be true or false, or length or stop: {_short(values[i])}.")
    return numbers == 1.0

  def ids(self, name: str, values: Sequence[Any], mark: Mark) -> np.ndarray:
    """[N] int64, equal for equal ids: whole numbers themselves, the rest by a 64-bit hash."""
    values = values.tolist() if isinstance(values, np.ndarray) else values
    kind = self._kind(name, values)
    if kind == "a number" and set(map(type, values)) == {int}:
      return np.array([_folded(value) for value in values], np.int64)
    if kind == "a number":
      return self.whole(name, values, mark, -(2**53))
    if kind == "text" and set(map(type, values)) == {str} and "" not in values:
      return np.fromiter(map(hash, values), np.int64, len(values))
    keys = []
    for i, value in enumerate(values):
      if value is None or value == "":
        mark(i, f"no {name}.")
      elif self._keeps(name, value, kind, mark, i):
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)
        keys.append(hash(text))
        continue
      keys.append(0)
    return np.array(keys, np.int64)

  def characters(self, name: str, values: Sequence[Any], mark: Mark) -> np.ndarray:
    """[N] int64 lengths of texts; of a list of messages, of what the messages say."""
    lengths = np.zeros(len(values), np.int64)
    for i, value in enumerate(values):
      text = value
      if isinstance(value, list):
        text = "".join(str(x.get("content") or "") for x in value if isinstance(x, dict))
      if isinstance(text, str):
        lengths[i] = len(text)
      else:
        mark(i, f"{name} is no text: {_short(value)}.")
    return lengths

  def _kind(self, name: str, values: Sequence[Any]) -> str:
    """Of the column, which its first value decides."""
    first = next((value for value in values if value is not None), None)
    if first is None:
      return self.kinds.get(name, "a number")
    return self.kinds.setdefault(name, _kind(first))

  def _keeps(self, name: str, value: Any, kind: str, mark: Mark, i: int) -> bool:
    if _kind(value) == kind:
      return True
    mark(i, f"{name} is {_kind(value)} here, {_short(value)}, and {kind} before.")
    return False


def logprobs(name: str, values: Sequence[Any], mark: Mark) -> list[np.ndarray]:
  """One array of float64 per row, log-probs in nats; CSV has them as JSON lists."""
  rows = []
  for i, value in enumerate(values):
    row = _list(value)
    if row is None or row.ndim != 1:
      mark(i, f"{name} is no list of numbers: {_short(value)}.")
      row = np.zeros(0)
    rows.append(row)
  return rows


def masks(name: str, values: Sequence[Any], mark: Mark) -> list[np.ndarray]:
  """One boolean array per row."""
  rows = logprobs(name, values, mark)
  for i, row in enumerate(rows):
    if not np.isin(row, (0.0, 1.0)).all():
      mark(i, f"{name} must hold true and false, or 1 and 0: {_short(values[i])}.")
  return [row == 1.0 for row in rows]


def check_logprobs(name: str, rows: Sequence[np.ndarray], mark: Mark) -> None:
  """Marks rows whose counted tokens have an impossible log-prob."""
  for i, row in enumerate(rows):
    with np.errstate(invalid="ignore"):
      bad = ~((row <= _ROUNDING) & (row > -np.inf))
    if bad.any():
      token = int(np.argmax(bad))
      mark(i, f"{name} of token {token + 1} is {row[token]:g}: it must be finite, and at most 0.")


def _list(value: Any) -> np.ndarray | None:
  try:
    return np.asarray(json.loads(value) if isinstance(value, str) else value, np.float64)
  except (ValueError, TypeError, OverflowError):
    return None


def _number(value: Any, words: dict[str, float]) -> float:
  if isinstance(value, str):
    text = value.strip().lower()
    if not text:
      return math.nan
    return words[text] if text in words else float(text)
  return float(value)


def _folded(value: int) -> int:
  """Itself, or by a hash where 64 bits do not hold it."""
  return value if -(2**63) <= value < 2**63 else hash(str(value))


def _kind(value: Any) -> str:
  return _KINDS.get(type(value), f"a {type(value).__name__}")


def _short(value: Any) -> str:
  text = repr(value.item() if isinstance(value, np.generic) else value)
  return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
