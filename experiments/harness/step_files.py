"""The files of a training run: a JSON line for every step, sums and counts beside the means.

A line stands for what the parameters of some step did. After a kill, lines of steps that are in no
checkpoint are dropped, and written again by the run that goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.harness import storage
from jaxrl_lm.lm.reports import Report
from jaxrl_lm.statistics import Average, EffectiveSampleSize, Extremes
from jaxrl_lm.values import ExplainedVariance


class Lines:
  """A file of JSON lines, each with the number of its step."""

  def __init__(self, path: Path, *, before: int) -> None:
    """Opens it, without the lines of steps from `before` on, and without a half-written one."""
    self.path = path
    kept = [row for row in read(path) if row["step"] < before]
    storage.write(path, "".join(map(_line, kept)))
    self._file = path.open("a")

  def append(self, rows: Iterable[dict[str, Any]]) -> None:
    self._file.write("".join(map(_line, rows)))
    self._file.flush()

  def sync(self) -> None:
    """On the disk, before a checkpoint says that the steps are done."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
  """The lines of a file, without a last one that was not written to its end."""
  if not path.exists():
    return []
  *whole, _ = path.read_text().split("\n")
  return [json.loads(line) for line in whole]


def _line(row: dict[str, Any]) -> str:
  return json.dumps(storage.readable(row), allow_nan=False) + "\n"


def step_record(report: Report) -> dict[str, Any]:
  """A report as JSON: averages as {"mean", "total", "count"}; but for seconds always the same."""
  metrics = report.metrics
  fields = report._asdict()
  for name in ("samples", "metrics"):
    del fields[name]
  if metrics is not None:
    fields |= {field.name: getattr(metrics, field.name) for field in dataclasses.fields(metrics)}
  return {k: _numbers(v) for k, v in fields.items()}


def sample_records(report: Report) -> list[dict[str, Any]]:
  """The responses that a report shows, as JSON."""
  return [{"step": report.step, **sample._asdict()} for sample in report.samples]


def _numbers(value: Any) -> Any:
  """A statistic as what it is of, and the number it becomes."""
  if isinstance(value, Average):
    return {"mean": _float(value.mean()), "total": _float(value.total), "count": int(value.count)}
  if isinstance(value, dict):
    return {k: _numbers(v) for k, v in value.items()}
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    parts = {
      field.name: _numbers(getattr(value, field.name)) for field in dataclasses.fields(value)
    }
    if isinstance(value, EffectiveSampleSize | ExplainedVariance):
      return {"fraction": _float(value.fraction()), **parts}
    if isinstance(value, Extremes):  # where the extremes stand means nothing in a merged batch
      return {"low": parts["low"], "high": parts["high"]}
    return parts
  return value


def _float(x: Any) -> float:
  return float(np.asarray(x))


class Series(NamedTuple):
  """A number of each step.

  Attributes:
    steps: [S].
    totals, counts: [S] of the average.
  """

  steps: np.ndarray
  totals: np.ndarray
  counts: np.ndarray

  @property
  def means(self) -> np.ndarray:
    """[S]; NaN where nothing was counted."""
    with np.errstate(invalid="ignore"):
      return self.totals / np.where(self.counts, self.counts, np.nan)


def series(records: list[dict[str, Any]], *path: str) -> Series:
  """The averages at a path, such as "rewards", "total", of every record that has it."""
  found = []
  for record in records:
    value: Any = record
    for name in path:
      value = (value or {}).get(name)
    if value is not None:
      found.append((record["step"], float(value["total"]), value["count"]))
  columns = np.array(found, float).reshape(-1, 3).T
  return Series(columns[0].astype(int), columns[1], columns[2])


def smoothed(numbers: Series, width: int) -> np.ndarray:
  """[S] means over the last `width` steps, of all that was counted in them."""
  totals, counts = (np.cumsum(np.append(0, x)) for x in (numbers.totals, numbers.counts))
  ends = np.arange(1, len(totals))
  starts = np.maximum(ends - width, 0)
  with np.errstate(invalid="ignore", divide="ignore"):
    return (totals[ends] - totals[starts]) / (counts[ends] - counts[starts])


class Rise(NamedTuple):
  """How much a number changed from the first quarter of the steps to the last.

  Attributes:
    first, last: means over the steps of a quarter.
    standard_error: of their difference, steps taken as independent; the trend within a quarter
      is in it, so that it is rather too large.
  """

  first: float
  last: float
  standard_error: float

  @property
  def in_standard_errors(self) -> float:
    """The difference, in standard errors; infinite where nothing varies within the quarters."""
    difference = self.last - self.first
    if self.standard_error == 0:
      return math.copysign(math.inf, difference) if difference else 0.0
    return difference / self.standard_error


def rise(numbers: Series) -> Rise | None:
  """Of the means of the steps; None if a quarter has fewer than two."""
  means = numbers.means
  size = len(means) // 4
  if size < 2:
    return None
  first, last = means[:size], means[-size:]
  variance = (first.var(ddof=1) + last.var(ddof=1)) / size
  return Rise(float(first.mean()), float(last.mean()), float(np.sqrt(variance)))
