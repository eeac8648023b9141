"""The audit as tables and sentences, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from experiments.audit_rollouts.findings import FOUND, UNDECIDED, Finding
from experiments.audit_rollouts.weights import REDUCTIONS

_COLOURS = {FOUND: "bold red", UNDECIDED: "yellow"}


def show(
  measured: dict[str, Any], found: Sequence[Finding], unit: str, notes: Sequence[str]
) -> None:
  """Prints it: what was read, the weights, the findings."""
  console = Console(markup=False, highlight=False, emoji=False)
  parts = [Text(note) for note in notes]
  if measured.get("push") is not None:
    parts += [_weights(measured, unit)]
  parts += [_findings(found), *map(Text, sentences(found))]
  console.print(Group(*parts))


def sentences(found: Sequence[Finding]) -> list[str]:
  """What was found, and which rules could not be decided."""
  seen = [row for row in found if row.status == FOUND]
  lines = [f"{row.kind.upper()}, {row.name}: {row.sentence}" for row in seen]
  if not any(row.kind == "fault" for row in seen):
    lines.insert(0, "No fault found.")
  if undecided := [row.name for row in found if row.status == UNDECIDED]:
    lines.append(f"Not decided: {', '.join(undecided)}.")
  return lines


def _weights(measured: dict[str, Any], unit: str) -> Table:
  push, shifts = measured["push"], measured["shifts"]
  table = Table(
    title=f"{push['groups']} groups with signal: push per token over the mean, shift of lengths "
    f"({unit} per unit of reward)"
  )
  for name in ("reduction", "wrong: shortest, longest", "correct: shortest, longest"):
    table.add_column(name)
  for side in ("wrong", "correct"):
    table.add_column(f"shift, {side}", justify="right")
  for name in REDUCTIONS:
    ends = ["no signal"] * 2
    if name in push:
      ends = [
        f"{push[name][side][0]:.2f}, {push[name][side][-1]:.2f}" for side in ("wrong", "correct")
      ]
    moved = [_number(shifts[side][name]["shift"]) for side in ("wrong", "correct")]
    table.add_row(name, *ends, *moved)
  return table


def _findings(found: Sequence[Finding]) -> Table:
  table = Table("rule", "number", "status", title="rules and numbers", show_lines=True)
  for row in found:
    number = _number(100 * row.number if row.unit == "%" else row.number)
    unit = "" if row.unit == "x" else f" {row.unit}"
    status = Text(row.status, style=_COLOURS.get(row.status, "green"))
    table.add_row(f"{row.name}: {row.rule}", number + unit, status)
  return table


def _number(estimate: Any) -> str:
  value, low, high = np.asarray(estimate, float)
  return f"{value:.3g} ({low:.3g} to {high:.3g})" if np.isfinite(value) else "not defined"
