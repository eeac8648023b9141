"""Digests of a checkpoint: of what its leaves hold, and of the files they are in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_lm.lm import processes

FILE = "digests.json"
# Orbax writes these after the digests; they hold the time of the commit.
UNCOVERED = ("_CHECKPOINT_METADATA", "commit_success.txt")

Bounds = str  # "0:4,0:2": where a part is in the global array; "" for an array without axes
Digests = dict[str, dict[Bounds, str]]


def leaf_digests(arrays: Mapping[str, Any]) -> Digests:
  """SHA-256 of the bytes of every array, part by part as it is spread over devices.

  Each process reads what it holds; the parts of all processes are put together.

  Args:
    arrays: by name, NumPy's or JAX's.

  Returns:
    {name: {bounds of the part: digest}}, the same in every process.
  """
  for array in arrays.values():
    if isinstance(array, jax.Array) and array.is_fully_addressable:
      array.copy_to_host_async()
  parts = [
    (name, bounds, part) for name, array in arrays.items() for bounds, part in _parts(array).items()
  ]
  with ThreadPoolExecutor() as pool:  # hashlib lets go of the interpreter
    digests = list(pool.map(lambda row: _digest(row[2]), parts))
  own: Digests = {name: {} for name in arrays}
  for (name, bounds, _), digest in zip(parts, digests, strict=True):
    own[name][bounds] = digest
  for text in processes.every_process(json.dumps(own)):
    for name, found in json.loads(text).items():
      own[name] |= found
  return own


def damaged_leaf(arrays: Mapping[str, Any], digests: Digests) -> str | None:
  """The first array that does not hold what the digests say.

  Args:
    arrays: by name; they may be spread over other devices than they were.
    digests: those of `leaf_digests`.

  Returns:
    A name, or None. In several processes, of what this one holds; a part that it does not hold in
    one piece is not looked at.
  """

  def intact(name: str) -> bool:
    array, parts = arrays[name], _parts(arrays[name])
    for bounds, digest in digests[name].items():
      if bounds not in parts and not getattr(array, "is_fully_addressable", True):
        continue
      part = parts[bounds] if bounds in parts else np.asarray(array)[_slices(bounds)]
      if _digest(part) != digest:
        return False
    return True

  with ThreadPoolExecutor() as pool:
    verdicts = list(pool.map(intact, arrays))
  return next((name for name, good in zip(arrays, verdicts, strict=True) if not good), None)


def write_file_digests(folder: Path) -> None:
  """Writes the digests of all files of a folder into it.

  Args:
    folder: of a checkpoint that is not yet visible.

  Returns:
    None.
  """
  names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
  digests = {name: _file_digest(folder / name) for name in names if name not in (FILE, *UNCOVERED)}
  (folder / FILE).write_text(json.dumps(digests, indent=1) + "\n")


def damaged_file(folder: Path) -> str | None:
  """The first file of a checkpoint that is not as it was written.

  Args:
    folder: of the checkpoint.

  Returns:
    What is wrong with which file, or None. The two files of the commit are not covered.
  """
  try:
    digests = json.loads((folder / FILE).read_text())
    wanted = {str(name): str(digest) for name, digest in digests.items()}
  except (OSError, ValueError, AttributeError) as error:
    return f"{folder / FILE} cannot be read: {error}"
  for name, digest in wanted.items():
    try:
      if _file_digest(folder / name) != digest:
        return f"{folder / name} is not as it was written ({FILE})"
    except OSError as error:
      return f"{folder / name} cannot be read: {error}"
  return None


def _file_digest(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(array: Any) -> str:
  host = np.ascontiguousarray(array)
  return hashlib.sha256(host.reshape(-1).view(np.uint8).data).hexdigest()


def _parts(array: Any) -> dict[Bounds, Any]:
  """The parts that this process holds, one of each place."""
  if not isinstance(array, jax.Array):
    return {_bounds((slice(None),) * array.ndim, array.shape): array}
  return {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
  ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
  return ",".join(f"{start}:{stop}" for start, stop, _ in ranges)


def _slices(bounds: Bounds) -> tuple[slice, ...]:
  ranges = (part.split(":") for part in bounds.split(",") if part)
  return tuple(slice(int(start), int(stop)) for start, stop in ranges)
