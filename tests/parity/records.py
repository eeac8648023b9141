"""The recorded numbers: loading them, and the distance between two results."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
PEERS = ("verl", "trl", "openrlhf", "liger", "tunix", "rlax")
ROWS, WIDTH = 8, 12
INTEGERS = ("index", "labels", "actions", "selected_token_ids", "target")
NAMES = ("case",)


@dataclass(frozen=True, eq=False)
class Record:
  """One call of a peer's function: what went in and what came out."""

  id: str  # "<file of the recording>#<position in it>"
  peer: str
  function: str
  objective: str
  settings: Mapping[str, Any]
  batch: str
  inputs: Mapping[str, Any]  # arrays of the mask's shape are padded, see `pad`
  outputs: Mapping[str, Any]
  dtype: str  # the precision the peer computed in
  rows: int  # the shape of the recorded mask, 0 where there is none
  width: int

  @property
  def mask(self) -> np.ndarray:
    """The mask of the rows that the record has, whose number some reductions divide by."""
    return self.inputs["mask"][: self.rows]


def load(peer: str) -> list[Record]:
  """All records of one peer: `<peer>.json.gz` and `<peer>_<topic>.json.gz`."""
  found = []
  for path in sorted(DATA.glob(f"{peer}*.json.gz")):
    with gzip.open(path, "rt") as file:
      content = json.load(file)
    found += [_record(peer, raw, content["batches"]) for raw in content["records"]]
  return found


def version(peer: str) -> str:
  with gzip.open(DATA / f"{peer}.json.gz", "rt") as file:
    return json.load(file)["version"]


def _record(peer: str, raw: dict[str, Any], batches: dict[str, Any]) -> Record:
  inputs = {k: v for k, v in raw["inputs"].items() if k not in ("batch", "fields")}
  batch = raw["inputs"].get("batch", inputs.get("case", ""))
  for field in raw["inputs"].get("fields", ()):
    inputs[field] = batches[batch][field]
  inputs = {name: _array(name, value) for name, value in inputs.items()}
  rows, width = shape = inputs["mask"].shape if "mask" in inputs else (0, 0)
  for name, value in inputs.items():
    if rows and np.shape(value)[:2] == shape:
      inputs[name] = pad(value)
  return Record(
    id=raw["id"],
    peer=peer,
    function=raw["function"],
    objective=raw["objective"],
    settings=raw["settings"],
    batch=batch,
    inputs=inputs,
    outputs=raw["outputs"],
    dtype=raw["dtype"],
    rows=rows,
    width=width,
  )


def _array(name: str, value: Any) -> Any:
  if name in NAMES or value is None:
    return value
  if isinstance(value, dict):
    return {key: _array(key, each) for key, each in value.items()}
  array = np.asarray(value, dtype=np.float64)  # "nan" and "inf" are written as strings
  if name in INTEGERS:
    return array.astype(np.int32)
  return array != 0 if name == "mask" else array


def pad(x: Any, fill: float = np.nan) -> np.ndarray:
  """[B, T, ...] -> [ROWS, WIDTH, ...], so that one compilation serves all batches.

  The new positions are masked and hold NaN, or a token id that does not exist: that they change
  nothing is part of what is tested.
  """
  x = np.asarray(x)
  widths = [(0, ROWS - x.shape[0]), (0, WIDTH - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
  if x.dtype == bool or np.issubdtype(x.dtype, np.integer):
    fill = False if x.dtype == bool else -100
  return np.pad(x, widths, constant_values=fill)


def error(record: Record, name: str, ours: Any) -> float:
  """Normwise relative error max|a - b| / max|b| over the unmasked positions; inf if non-finite.

  A non-finite entry of the peer matches only itself, so that an overflow may be reproduced and a
  NaN may not.
  """
  ours, theirs = np.asarray(ours, np.float64), np.asarray(record.outputs[name], np.float64)
  if theirs.ndim and record.rows and ours.shape[:1] == (ROWS,):
    ours = ours[tuple(slice(size) for size in theirs.shape)]
  assert ours.shape == theirs.shape, f"{record.id}: {name} is {ours.shape}, not {theirs.shape}"
  if record.rows and theirs.shape[:2] == (record.rows, record.width):
    mask = record.mask[:, : record.width]
    ours, theirs = ours[mask], theirs[mask]
  finite = np.isfinite(theirs)
  if not np.array_equal(ours[~finite], theirs[~finite]) or not np.all(np.isfinite(ours[finite])):
    return np.inf
  ours, theirs = ours[finite], theirs[finite]
  difference = np.max(np.abs(ours - theirs), initial=0.0)
  if difference == 0.0:
    return 0.0
  scale = np.max(np.abs(theirs), initial=0.0)
  return float(difference / scale) if scale > 0.0 else np.inf
