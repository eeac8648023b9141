"""Results on disk: a file is there whole or not at all, and gives back what was put in."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

LARGEST_WRITTEN_OUT = 64  # elements; of a larger array a summary shows shape and dtype
_ARRAY = "__array__"


def plain(value: Any, leaf: Callable[[Any], Any], where: str = "result") -> Any:
  """The value in dicts, lists and leaves, as JSON knows them.

  Args:
    value: nested dicts (keys are text), lists, tuples, dataclasses, paths, text, numbers, None,
      NumPy and JAX arrays. An array without axes is a number.
    leaf: what stands for an array, a number, a text or None.
    where: name of the value in an error message.

  Raises:
    TypeError: something else is in it; the message says where.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = dataclasses.asdict(value)
  if isinstance(value, dict):
    if other := [key for key in value if not isinstance(key, str)]:
      raise TypeError(f"{where}: keys must be text, and one is {other[0]!r}")
    return {str(key): plain(item, leaf, f"{where}.{key}") for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item, leaf, f"{where}[{index}]") for index, item in enumerate(value)]
  if isinstance(value, os.PathLike):
    value = os.fspath(value)
  if isinstance(value, jax.Array | np.ndarray | np.generic):
    array = np.asarray(value)
    if array.dtype.kind not in "biufU":
      raise TypeError(f"{where}: an array of {array.dtype} cannot be stored; convert it first")
    value = array if array.ndim else array.item()
  elif not isinstance(value, str | int | float | None):
    raise TypeError(f"{where}: a {type(value).__name__} cannot be stored; return its numbers")
  return leaf(value)


def readable(value: Any) -> Any:
  """The value as strict JSON: small arrays as lists, NaN and infinities as text."""

  def leaf(item: Any) -> Any:
    if isinstance(item, np.ndarray):
      if item.size > LARGEST_WRITTEN_OUT:
        return {"shape": list(item.shape), "dtype": str(item.dtype)}
      return plain(item.tolist(), leaf)
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item

  return plain(value, leaf)


def write(path: Path, content: bytes | str) -> None:
  """Replaces the file in one step: whoever reads it, or kills this, finds the old or the new."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    with partial.open("wb") as file:
      file.write(content.encode() if isinstance(content, str) else content)
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def save(path: Path, value: Any) -> None:
  """Writes the value, arrays with their dtypes, as one .npz file, whose entries have checksums."""
  arrays: dict[str, np.ndarray] = {}

  def leaf(item: Any) -> Any:
    if not isinstance(item, np.ndarray):
      return item
    name = f"array_{len(arrays)}"
    arrays[name] = item
    return {_ARRAY: name}

  tree = json.dumps(plain(value, leaf)).encode()
  buffer = io.BytesIO()
  np.savez(buffer, tree=np.frombuffer(tree, np.uint8), **arrays)  # type: ignore[arg-type]
  write(path, buffer.getvalue())


def load(path: Path) -> Any:
  """What `save` wrote; arrays are NumPy's, tuples lists, dataclasses dicts.

  Raises:
    Exception: of many kinds, when the file is damaged.
  """
  with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
    return json.loads(
      stored["tree"].tobytes(),
      object_hook=lambda item: stored[item[_ARRAY]] if item.keys() == {_ARRAY} else item,
    )
