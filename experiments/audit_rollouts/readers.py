"""Opens a log, by the ending of its name and by what is in it."""

from __future__ import annotations

from pathlib import Path

from experiments.audit_rollouts import array_files, text_files
from experiments.audit_rollouts.chunks import Source
from experiments.audit_rollouts.faults import BadLog

_LOOKED_AT = 4096  # bytes
_ENDINGS = {
  ".jsonl": text_files.open_jsonl,
  ".ndjson": text_files.open_jsonl,
  ".json": text_files.open_jsonl,
  ".csv": text_files.open_csv,
  ".parquet": array_files.open_parquet,
  ".npz": array_files.open_npz,
}


def open_source(path: Path) -> Source:
  """A log and its columns; no row has been read yet.

  Raises:
    BadLog: it is absent, a folder, empty, of an unknown kind, or not what its name says.
  """
  if path.is_dir():
    raise BadLog(f"{path} is a folder. Name the files in it: {path}/*.jsonl")
  if not path.is_file():
    raise BadLog(f"{path} is not there.")
  if path.suffix.lower() not in _ENDINGS:
    raise BadLog(f"{path}: a log's name ends in {', '.join(_ENDINGS)}.")
  with path.open("rb") as file:
    start = file.read(_LOOKED_AT)
  if not start.removeprefix(b"\xef\xbb\xbf").strip():
    raise BadLog(f"{path} is empty.")
  return _ENDINGS[path.suffix.lower()](path, start)
