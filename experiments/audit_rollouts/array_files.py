"""NumPy archives, whose arrays are read whole, and parquet, batch by batch."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.audit_rollouts.chunks import GROUP, ROWS, Chunk, Places, Source
from experiments.audit_rollouts.faults import BadLog

# What NumPy raises for files of other kinds and for damaged ones.
_DAMAGED = (
  *(ValueError, OSError, EOFError, AttributeError, TypeError, NotImplementedError),
  *(zipfile.BadZipFile, zlib.error),
)
_BATCH = 1024  # rows of parquet, whose texts are not counted


def open_npz(path: Path, start: bytes) -> Source:
  """The columns are the arrays that have an axis: [N, ...] or [P, G, ...]."""
  try:
    # Opened here: NumPy leaves a damaged file open.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
      arrays = {name: stored[name] for name in stored.files}
  except _DAMAGED as error:
    raise BadLog(f"{path} is not an .npz file, or a damaged one: {error}") from None
  # Other files of a zip archive come as bytes.
  columns = {name: np.ndim(array) - 1 for name, array in arrays.items() if np.ndim(array)}
  return Source(path, str(path), columns, lambda wanted, axes, _: _npz(path, arrays, wanted, axes))


def open_parquet(path: Path, start: bytes) -> Source:
  """The columns are those of the schema."""
  if not start.startswith(b"PAR1"):
    raise BadLog(f"{path} is not a parquet file: it does not begin with PAR1.")
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise BadLog(
      f"{path}: parquet is read with pyarrow, which is not installed; or convert it to JSON lines."
    ) from None
  try:
    names = parquet.read_schema(path).names
  except (pyarrow.ArrowException, OSError) as error:
    raise BadLog(f"{path}: the parquet file is damaged or cut off ({error}).") from None
  columns = dict.fromkeys((name for name in names if not name.startswith("__index")), 0)
  return Source(path, str(path), columns, lambda wanted, *_: _parquet(path, wanted))


def _parquet(path: Path, wanted: Sequence[str]) -> Iterator[Chunk]:
  import pyarrow
  from pyarrow import parquet

  done = 0
  try:
    with parquet.ParquetFile(path) as file:
      for batch in file.iter_batches(batch_size=_BATCH, columns=list(wanted)):
        columns = {name: batch.column(name).to_pylist() for name in wanted}
        rows = range(done + 1, done + 1 + batch.num_rows)
        yield Chunk(columns, Places(rows, "row {}".format))
        done += batch.num_rows
  except (pyarrow.ArrowException, OSError) as error:
    raise BadLog(f"{path}, after row {done}: the parquet file is damaged ({error}).") from None


def _npz(
  path: Path, arrays: dict[str, np.ndarray], wanted: Sequence[str], axes: int
) -> Iterator[Chunk]:
  if axes > 2:
    raise BadLog(f"{path}: rewards, or log-probs of a token, must be [N] or [P, G].")
  taken = {name: arrays[name] for name in wanted if name != GROUP}
  shape = max((array.shape[:axes] for array in taken.values()), key=len)
  rows = {}
  for name, array in taken.items():
    if array.shape == shape[:1]:  # one per group
      array = np.broadcast_to(array.reshape(-1, *[1] * (axes - 1)), shape)
    if array.shape[:axes] != shape:
      shapes = ", ".join(f"{key} {value.shape}" for key, value in taken.items())
      raise BadLog(f"{path}: the arrays do not have the same rows: {shapes}.")
    rows[name] = array.reshape(-1, *array.shape[axes:])
  if GROUP in wanted:
    rows[GROUP] = np.repeat(np.arange(shape[0]), shape[1])

  def place(row: int) -> str:
    return f"entry [{', '.join(str(index) for index in np.unravel_index(row, shape))}]"

  total = int(np.prod(shape))
  for begin in range(0, total, ROWS):
    part = range(begin, min(begin + ROWS, total))
    chunk = {name: array[begin : part.stop] for name, array in rows.items()}
    yield Chunk(chunk, Places(part, place))
