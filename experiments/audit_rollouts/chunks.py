"""Rows of a log by column, each with its place; what a file looks like before it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.audit_rollouts.faults import Faults

ROWS, BYTES = 8192, 1 << 23  # of a chunk at most: texts and log-probs are held no longer than that
GROUP = "(row of the array)"  # stands for a column: rows of [P, G] arrays are groups


@dataclasses.dataclass(frozen=True)
class Places(Sequence[str]):
  """Where rows stand: numbers that become text, "line 3", when one is asked for."""

  numbers: Sequence[int]
  name: Callable[[int], str]

  def __len__(self) -> int:
    return len(self.numbers)

  def __getitem__(self, index: Any) -> Any:
    return self.name(int(self.numbers[index]))


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Rows of one file, by column.

  Attributes:
    columns: name -> one value per row.
    places: where each row stands.
  """

  columns: dict[str, Sequence[Any]]
  places: Places


@dataclasses.dataclass(frozen=True)
class Source:
  """A file whose columns are known.

  Attributes:
    path: of the file.
    heading: where the columns are named: the path, with the line if it has lines.
    columns: name -> axes beyond the first; 0 where rows stand one after another.
    chunks: (wanted columns, axes of the rows, faults) -> chunks.
  """

  path: Path
  heading: str
  columns: dict[str, int]
  chunks: Callable[[Sequence[str], int, Faults], Iterator[Chunk]]
