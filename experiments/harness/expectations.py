"""What an experiment expects: goldens, which must come out, and hypotheses, which may not."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

_COLOURS = {"matched": "green", "confirmed": "green", "missed": "bold red"}
_LONGEST_SHOWN = 8  # numbers


@dataclasses.dataclass(frozen=True)
class Expectation:
  """One row of the table: expected against measured, and what became of it."""

  name: str
  kind: str  # golden or hypothesis
  expected: str
  measured: Any
  status: str  # matched or missed; confirmed, contradicted or undecided
  source: str = ""
  explanation: str = ""


class Expectations:
  """The expectations of one run, in the order in which they were stated."""

  def __init__(self) -> None:
    self.rows: list[Expectation] = []

  def golden(
    self,
    name: str,
    measured: Any,
    expected: Any,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    source: str = "",
  ) -> None:
    """A number that must come out; a run that misses one exits with status 1.

    Args:
      name: what is measured.
      measured: a number or an array. NaN matches nothing.
      expected: of the same shape. Numbers written as text, "0.0175", are right to the digits
        written: within half a unit of the last one. Other numbers are exact.
      rtol, atol: allowed besides: atol + rtol |expected|.
      source: where the number is from.
    """
    got, target = np.asarray(measured, float), np.asarray(expected)
    half: Any = 0.0
    if target.dtype.kind == "U":
      units = [float(f"1e{Decimal(text).as_tuple().exponent}") for text in target.ravel()]
      # The slack: 0.0175 - 0.01745 is a little more than 0.00005 in binary.
      half = np.reshape(units, target.shape) * 0.5 * (1 + 1e-9)
    near = target.astype(float)
    matches = got.shape == near.shape and np.isclose(got, near, rtol, atol + half).all()
    status = "matched" if matches else "missed"
    self._add(Expectation(name, "golden", shown(target), measured, status, source))

  def hypothesis(
    self,
    name: str,
    statement: str,
    measured: Any,
    holds: Any,
    *,
    source: str,
    explanation: str = "",
  ) -> None:
    """A published claim: confirmed or contradicted is a result either way.

    Args:
      name: what is measured.
      statement: the claim, as one sentence.
      measured: the numbers that decide. A NaN among them leaves the claim undecided.
      holds: bool; None when the numbers do not decide.
      source: who claims it.
      explanation: one sentence, shown when it is not confirmed: why it did not hold here.
    """
    undecided = holds is None or np.isnan(np.asarray(measured, float)).any()
    status = "undecided" if undecided else "confirmed" if holds else "contradicted"
    self._add(Expectation(name, "hypothesis", statement, measured, status, source, explanation))

  def table(self, title: str) -> Table:
    """Expected against measured."""
    table = Table("expectation", "expected", "measured", "status", title=title, show_lines=True)
    for row in self.rows:
      status = Text(row.status, style=_COLOURS.get(row.status, "yellow"))
      table.add_row(row.name, row.expected, shown(row.measured), status)
    return table

  def _add(self, row: Expectation) -> None:
    if row.name in {other.name for other in self.rows}:
      raise ValueError(f"expectation {row.name!r} is stated twice")
    self.rows.append(row)


def shown(numbers: Any) -> str:
  """The first numbers, text as it is written and others to six digits."""
  flat = np.asarray(numbers).ravel()
  if flat.dtype.kind != "U":
    flat = np.array([f"{number:.6g}" for number in flat.astype(float)])
  first = flat[:_LONGEST_SHOWN].tolist()
  return " ".join(first + ["..."] * (flat.size > _LONGEST_SHOWN))
