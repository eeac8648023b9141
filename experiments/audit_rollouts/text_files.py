"""JSON lines and CSV, line by line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.audit_rollouts.chunks import BYTES, ROWS, Chunk, Places, Source
from experiments.audit_rollouts.faults import BadLog, Faults

_MAGIC = {
  b"PK\x03\x04": "a zip archive, as .npz files are",
  b"PAR1": "a parquet file",
  b"\x1f\x8b": "compressed by gzip; unpack it first",
  b"(\xb5/\xfd": "compressed by zstd; unpack it first",
  b"\x93NUMPY": "a NumPy array (.npy); save named arrays as .npz",
}


def open_jsonl(path: Path, start: bytes) -> Source:
  """The columns are the keys of the first line."""
  first = _first_character(path, start, "JSON lines")
  if first == "[":
    raise BadLog(f"{path}, line 1: it is one JSON array; write one object per line.")
  if first != "{":
    raise BadLog(f"{path}, line 1: not JSON lines: it does not begin with an object.")
  number, line = next(_lines(path))
  row = _parsed(line)
  if isinstance(row, str):
    raise BadLog(f"{path}, line {number}: {row}")
  columns = dict.fromkeys(row, 0)
  heading = f"{path}, line {number}"
  return Source(
    path, heading, columns, lambda wanted, _, faults: _jsonl(path, number, wanted, faults)
  )


def open_csv(path: Path, start: bytes) -> Source:
  """The columns are named by the first line."""
  if _first_character(path, start, "CSV") in ("{", "["):
    raise BadLog(f"{path}, line 1: not CSV: it begins like JSON.")
  number, header = next(_csv_rows(path))
  if len(set(header)) < len(header):
    raise BadLog(f"{path}, line {number}: two columns have the same name: {', '.join(header)}.")
  columns, heading = dict.fromkeys(header, 0), f"{path}, line {number}"
  return Source(path, heading, columns, lambda wanted, _, faults: _csv(path, wanted, faults))


def _first_character(path: Path, start: bytes, kind: str) -> str:
  """The first one that is no blank.

  Raises:
    BadLog: the file is no text.
  """
  for magic, what in _MAGIC.items():
    if start.startswith(magic):
      raise BadLog(f"{path}, line 1: not {kind}: it is {what}.")
  if b"\0" in start:
    raise BadLog(f"{path}, line 1: not {kind}: it holds bytes that are no text.")
  return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1].decode(errors="replace")


class _Rows:
  """Rows that become chunks."""

  def __init__(self, wanted: Sequence[str]) -> None:
    self.wanted = wanted
    self._clear()

  def add(self, row: list[Any], line: int, size: int) -> bool:
    """Takes a row; True when the chunk is full."""
    self.rows.append(row)
    self.lines.append(line)
    self.size += size
    return len(self.rows) >= ROWS or self.size >= BYTES

  def chunk(self) -> Chunk:
    """What has been taken since the last one."""
    columns = zip(*self.rows, strict=True)
    chunk = Chunk(
      dict(zip(self.wanted, columns, strict=True)), Places(self.lines, "line {}".format)
    )
    self._clear()
    return chunk

  def _clear(self) -> None:
    self.rows: list[list[Any]] = []
    self.lines: list[int] = []
    self.size = 0


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
  """Lines that are not blank, with their numbers."""
  with path.open("rb") as file:
    for number, line in enumerate(file, 1):
      if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
      if not line.isspace():
        yield number, line


def _parsed(line: bytes) -> dict[str, Any] | str:
  """The object of a line, or what is wrong with it."""
  try:
    row = json.loads(line.decode())  # of bytes json would guess the encoding
  except UnicodeDecodeError as error:
    return f"not UTF-8 text ({error.reason})."
  except (ValueError, RecursionError) as error:
    if not line.endswith(b"\n"):
      return "the last line is cut off: the log was being written, or its writer was killed."
    return f"not JSON ({error})."
  return row if isinstance(row, dict) else f"a {type(row).__name__} where an object is expected."


def _jsonl(path: Path, first: int, wanted: Sequence[str], faults: Faults) -> Iterator[Chunk]:
  rows = _Rows(wanted)
  for number, line in _lines(path):
    row = _parsed(line)
    if isinstance(row, str):
      faults.add(path, f"line {number}", row)
      continue
    try:
      values = [row[name] for name in wanted]
    except KeyError as error:
      what = f"no column {error.args[0]!r}, which line {first} has."
      faults.add(path, f"line {number}", what)
      continue
    if rows.add(values, number, len(line)):
      yield rows.chunk()
  if rows.rows:
    yield rows.chunk()


def _csv(path: Path, wanted: Sequence[str], faults: Faults) -> Iterator[Chunk]:
  lines = _csv_rows(path)
  first, header = next(lines)
  places = [header.index(name) for name in wanted]
  rows = _Rows(wanted)
  for number, row in lines:
    if len(row) != len(header):
      what = f"{len(row)} fields where line {first} has {len(header)}."
      faults.add(path, f"line {number}", what)
    elif rows.add([row[place] for place in places], number, sum(map(len, row))):
      yield rows.chunk()
  if rows.rows:
    yield rows.chunk()


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
  """Rows that are not blank, the header first, with the number of their last line."""
  before = csv.field_size_limit(1 << 30)  # a response can be longer than csv's 128 KiB
  try:
    with path.open(encoding="utf-8-sig", newline="") as file:
      reader = csv.reader(file, strict=True)
      yield from ((reader.line_num, row) for row in reader if row)
  except UnicodeDecodeError:
    raise BadLog(_undecodable(path)) from None
  except csv.Error as error:  # an open quote: what follows has no rows to skip to
    raise BadLog(f"{path}, line {reader.line_num}: not CSV ({error}).") from None
  finally:
    csv.field_size_limit(before)


def _undecodable(path: Path) -> str:
  """Names the line, which a reader that decodes blocks of bytes does not know."""
  with path.open("rb") as file:
    for number, line in enumerate(file, 1):
      try:
        line.decode()
      except UnicodeDecodeError as error:
        return f"{path}, line {number}: not UTF-8 text ({error.reason})."
  return f"{path}: not UTF-8 text."
