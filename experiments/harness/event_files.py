"""Lines of a training run as event files of TensorBoard, by the package tensorboardX."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def writer(folder: Path, *, before: int) -> Any:
  """A writer; what the folder holds of steps from `before` on is hidden by TensorBoard.

  Raises:
    ImportError: the package is not there.
  """
  try:
    module = importlib.import_module("tensorboardX")
  except ImportError:
    raise ImportError("event files need the package tensorboardX: pip install it") from None
  return module.SummaryWriter(str(folder), purge_step=before)


def scalars(record: dict[str, Any], name: str = "") -> Iterator[tuple[str, float]]:
  """The numbers of a line, averages by their means: ("rewards/total", 0.5), ..."""
  for key, value in record.items():
    path = f"{name}/{key}".lstrip("/")
    if isinstance(value, dict):
      short = next((value[k] for k in ("mean", "fraction") if k in value), None)
      yield from scalars(value, path) if short is None else [(path, float(short))]
    elif isinstance(value, int | float) and key != "step":
      yield path, float(value)
