"""Figures of `experiments.length_bias_trained`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import figures
from experiments.harness.figures import PALETTE
from experiments.length_bias_trained.paths import at_level, interval, less_constant, levels
from experiments.length_bias_trained.rows import CONSTANT, LABELS, MEAN, SUM

COLOURS = {**dict(zip(LABELS, PALETTE, strict=True)), MEAN: "vermilion", SUM: "sky"}
WHICH = {"wrong": ("vermilion", "o"), "right": ("blue", "s")}


@figures.style()
def lengths(task: str, rows: dict[str, Any]) -> Figure:
  """Lengths along training, against P(right)."""
  figure = Figure(figsize=(10.0, 4.2))
  where = np.linspace(*levels(rows)[[0, -1]], 12)
  for axes, which in zip(figure.subplots(1, 2), WHICH, strict=True):
    for row, path in rows.items():
      mean, half = np.array([interval(at_level(path, which, level)) for level in where]).T
      colour = PALETTE[COLOURS[row]]
      axes.plot(where, mean, color=colour, label=LABELS[row])
      axes.fill_between(where, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="P(right), held-out prompts", ylabel=f"mean length if {which} (tokens)")
    axes.set_title(f"{which} responses, {len(path['p'])} seeds, 95 % t band")
  mean, half = interval(less_constant(rows, MEAN, "wrong").mean(axis=1))
  how = f"{abs(mean):.2f} ± {half:.2f} tokens {'longer' if mean > 0 else 'shorter'}"
  claim = f"{task}: at equal P(right) wrong responses are {how} under 1/n than under a constant"
  figures.title(figure, claim)
  figures.legend(figure, columns=3)
  return figure


@figures.style()
def differences(
  last: dict[str, Any], first: dict[str, Any], rows: dict[str, Any], told: dict[str, Any]
) -> Figure:
  """What each normalisation adds to a constant: per unit of reward at first, and after training."""
  trained = {"filler after": rows} | ({"stories": told} if told else {})
  figure = Figure(figsize=(7.0 + 3.5 * len(trained), 4.4))
  names = [x for x in LABELS if x not in (CONSTANT, SUM) and x in {*last, *rows}][::-1]
  panels = figure.subplots(1, 2 + len(trained), sharey=True)
  titles = ("first update, filler after answer", "first update, filler before answer")
  for axes, found, title in zip(panels, (last, first), titles, strict=False):
    for row in found.keys() - {CONSTANT, SUM}:
      for which in WHICH:
        added = interval(found[row][which] - found[CONSTANT][which])
        _dot(axes, names.index(row), which, added)
    axes.set(title=title, xlabel="drift (tokens per unit of P(right))")
  for axes, (task, runs) in zip(panels[2:], trained.items(), strict=True):
    for row in runs.keys() - {CONSTANT}:
      for which in WHICH:
        _dot(axes, names.index(row), which, interval(less_constant(runs, row, which).mean(axis=1)))
    axes.set_title(f"trained, equal P(right), {task}")
    axes.set_xlabel("mean length (tokens)")
  panels[0].set_yticks(range(len(names)), [LABELS[name] for name in names])
  for axes in panels:
    axes.axvline(0.0, color="black", linewidth=0.8)
  added = [interval(found[MEAN]["wrong"] - found[CONSTANT]["wrong"]) for found in (last, first)]
  after, before = (f"{mean:.2f} ± {half:.2f}" for mean, half in added)
  claim = (
    f"At first 1/n adds {after} tokens per unit of P(right) to wrong answers before filler, and "
  )
  figures.title(figure, f"{claim}{before} after it, beside a constant length (95 % t intervals)")
  figures.legend(figure)
  return figure


def _dot(axes: Axes, y: int, which: str, found: tuple[float, float]) -> None:
  mean, half = found
  colour, marker = WHICH[which]
  at = y + (0.12 if which == "wrong" else -0.12)
  style: dict[str, Any] = {"color": PALETTE[colour], "fmt": marker, "capsize": 2}
  axes.errorbar(mean, at, xerr=half, label=f"{which} responses", **style)
