"""Safetensors files of a folder: one, or shards under an index. Nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def optional_module(name: str) -> ModuleType:
  """A module of the extra `pretrained`.

  Args:
    name: of the module.

  Returns:
    The module.

  Raises:
    ImportError: it is not installed; the message says how to.
  """
  import importlib

  try:
    return importlib.import_module(name)
  except ImportError as error:
    package = name.split(".")[0]
    raise ImportError(
      f"{package} is needed for checkpoints of Hugging Face: pip install 'jaxrl_lm[pretrained]'"
    ) from error


def read_json(path: Path) -> dict[str, Any]:
  """A JSON file that holds an object.

  Args:
    path: of the file.

  Returns:
    The object.

  Raises:
    ValueError: it is not JSON; the message names the file.
  """
  try:
    value = json.loads(path.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} must hold an object, got {type(value).__name__}")
  return value


class Tensors(Mapping[str, np.ndarray]):
  """The tensors of a checkpoint by name, each read from its mapped file when asked for.

  Attributes:
    folder: where the files are.
  """

  def __init__(self, folder: Path, files: dict[str, Any]):
    self.folder = folder
    self._files = files

  def __getitem__(self, name: str) -> np.ndarray:
    """The tensor, in the dtype of the file."""
    return self._files[name].get_tensor(name)

  def __iter__(self) -> Iterator[str]:
    """Names, in the order of the files."""
    return iter(self._files)

  def __len__(self) -> int:
    """Number of tensors."""
    return len(self._files)


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
  """Opens the safetensors files of a folder.

  Args:
    folder: with `model.safetensors`, or with shards and `model.safetensors.index.json`.

  Returns:
    The tensors; they can be read until the context ends.

  Raises:
    FileNotFoundError: there is no such file, or only a pickled one; or a shard is missing.
    ValueError: a file is damaged, or index and shards disagree.
  """
  index = _index(folder)
  files: dict[str, Any] = {}
  with contextlib.ExitStack() as stack:
    for shard in sorted(set(index.values())) if index else [SINGLE]:
      file = stack.enter_context(_open(folder / shard))
      stored = set(file.keys())
      # What a shard has beside is another's: the index says whose.
      names = {name for name, place in index.items() if place == shard} if index else stored
      if lacking := names - stored:
        raise ValueError(
          f"{folder / shard} has no tensor {min(lacking)}, which {INDEX} says is there"
        )
      if index and (unlisted := stored - set(index)):
        raise ValueError(f"{folder}: tensor {min(unlisted)} is in a shard, but not in {INDEX}")
      files |= dict.fromkeys(sorted(names), file)
    yield Tensors(folder, files)


def _index(folder: Path) -> dict[str, str]:
  """Tensor -> shard; empty for a single file."""
  if (folder / SINGLE).is_file():
    return {}
  if (folder / INDEX).is_file():
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
      raise ValueError(f"{folder / INDEX} has no weight_map")
    for name, shard in index.items():
      # A file of this folder: no path that leads elsewhere.
      plain = isinstance(shard, str) and shard == Path(shard).name
      if not plain or not shard or shard == ".." or "\0" in shard:
        raise ValueError(f"{folder / INDEX}: {name} must be in a file of the folder, not {shard!r}")
    if missing := [name for name in sorted(set(index.values())) if not (folder / name).is_file()]:
      raise FileNotFoundError(f"{folder}: shard {missing[0]} of {INDEX} is missing")
    return index
  pickled = [name for name in _PICKLED if (folder / name).exists()]
  reason = f" {pickled[0]} is not read: unpickling runs code. Convert it." if pickled else ""
  raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}.{reason}")


def _open(path: Path) -> Any:
  safetensors = optional_module("safetensors")
  try:
    return safetensors.safe_open(path, framework="np")
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is damaged or truncated: {error}") from error


def write_tensors(
  folder: Path, tensors: Iterator[tuple[str, np.ndarray]], *, max_shard_bytes: int
) -> None:
  """Writes one safetensors file, or shards and their index.

  Args:
    folder: exists.
    tensors: names and contiguous arrays. Those of one shard are held at once.
    max_shard_bytes: a shard ends before it would be larger; one tensor may be.

  Returns:
    None.
  """
  save_file = optional_module("safetensors.numpy").save_file
  shards: list[list[str]] = []
  part: dict[str, np.ndarray] = {}
  total = 0

  def flush() -> None:
    save_file(part, folder / _unnumbered(len(shards)), metadata={"format": "pt"})
    shards.append(list(part))
    part.clear()

  for name, tensor in tensors:
    if part and sum(x.nbytes for x in part.values()) + tensor.nbytes > max_shard_bytes:
      flush()
    part[name] = tensor
    total += tensor.nbytes
  flush()
  if len(shards) == 1:
    (folder / _unnumbered(0)).rename(folder / SINGLE)
    return
  # How many there are is part of a shard's name, and known only now.
  weight_map: dict[str, str] = {}
  for i, names in enumerate(shards):
    final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    (folder / _unnumbered(i)).rename(folder / final)
    weight_map |= dict.fromkeys(names, final)
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _unnumbered(shard: int) -> str:
  return f"shard-{shard}.partial"
