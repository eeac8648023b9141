"""The page of figures."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.audit_rollouts.weights import SUM
from experiments.harness import figures
from experiments.harness.figures import PALETTE

_LOOK = {  # reduction -> label, colour, marker
  SUM: ("sum, constant length (= policy gradient)", "blue", "o"),
  "token mean": ("token mean of the batch", "sky", "s"),
  "group token mean": ("token mean of the group", "green", "D"),
  "sequence mean": ("mean per response, 1/n", "vermilion", "^"),
}
_SIDES = {"wrong": ("black", "-"), "correct": ("purple", "--")}


@figures.style()
def page(measured: dict[str, Any], unit: str, claim: str) -> Figure:
  """Six panels; one that the log has no columns for says so."""
  figure = Figure(figsize=(13.0, 8.2))
  (a, b, c), (d, e, f) = figure.subplots(2, 3)
  for axes, draw, part, absent in (
    (a, _push, "push", "no rewards in the log"),
    (b, _shifts, "shifts", "no rewards in the log"),
    (c, _trends, "trends", "no steps in the log (4 are needed)"),
    (d, _lengths, "lengths", "no rewards in the log"),
    (e, _groups, "groups", "no rewards in the log"),
    (f, _worth, "mismatch", "no log-probs in the log"),
  ):
    if measured.get(part) is None:
      axes.text(0.5, 0.5, absent, ha="center", va="center", transform=axes.transAxes, color="grey")
      axes.set_axis_off()
    else:
      draw(axes, measured, unit)
  figures.title(figure, claim)
  figures.legend(figure, columns=4)
  return figure


def _push(axes: Axes, measured: dict[str, Any], unit: str) -> None:
  table = measured["push"]
  axes.set_title("push per token, by length (solid: wrong, dashed: correct)")
  if "edges" not in table:
    axes.text(0.5, 0.5, "no group has signal", ha="center", transform=axes.transAxes)
    return
  edges = table["edges"]
  x = np.arange(len(edges) - 1)
  for name, (label, colour, marker) in _LOOK.items():
    for side, (_, line) in _SIDES.items():
      once = label if side == "wrong" else None
      size = 9 if name == SUM else 5  # which the token mean of one batch would hide
      options = {"marker": marker, "color": PALETTE[colour], "markersize": size}
      axes.plot(x, table[name][side], line, label=once, **options)
  bins = [f"{low:.0f}–{high:.0f}" for low, high in zip(edges, edges[1:], strict=False)]
  axes.set_xticks(x, bins, fontsize="small")
  axes.set(ylim=(0.0, None), xlabel=f"length ({unit})", ylabel="push per token / mean")


def _shifts(axes: Axes, measured: dict[str, Any], unit: str) -> None:
  table = measured["shifts"]
  axes.axhline(0.0, color="black", linewidth=0.8)
  names = [name for name in _LOOK if name != SUM]
  for i, name in enumerate(names):
    _, colour, marker = _LOOK[name]
    for place, side in enumerate(_SIDES):
      value, low, high = np.asarray(table[side][name]["shift"])
      axes.errorbar(
        place + 0.2 * (i - 1),
        value,
        [[value - low], [high - value]],
        fmt=marker,
        color=PALETTE[colour],
        capsize=3,
      )
  axes.set_xticks([0, 1], [f"{side} answers" for side in _SIDES])
  axes.set_xlim(-0.5, 1.5)
  axes.set_ylabel(f"{unit} per unit of reward")
  axes.set_title("shift of the mean length, beside the sum's")


def _trends(axes: Axes, measured: dict[str, Any], unit: str) -> None:
  table = measured["trends"]
  for side, (colour, line) in _SIDES.items():
    label = f"{side} answers"
    axes.plot(table["step"], table[side]["mean"], f".{line}", color=PALETTE[colour], label=label)
  changes = [f"{side}: {_change(table[side]['change'])}" for side in _SIDES]
  axes.text(0.03, 0.05, "\n".join(changes), transform=axes.transAxes, fontsize="small")
  axes.set(ylim=(0.0, None), xlabel="step", ylabel=f"mean length ({unit})")
  axes.set_title("lengths over the run")


def _change(estimate: Any) -> str:
  value, low, high = 100 * np.asarray(estimate)
  return f"{value:+.0f} % ({low:+.0f} to {high:+.0f})" if np.isfinite(value) else "no slope"


def _lengths(axes: Axes, measured: dict[str, Any], unit: str) -> None:
  table = measured["lengths"]
  for side, (colour, line) in _SIDES.items():
    density = table[side]["histogram"] / max(table[side]["count"], 1)
    label = f"{side} answers"
    axes.stairs(density, table["edges"], color=PALETTE[colour], linestyle=line, label=label)
  limit = measured["truncation"]["limit"]
  if limit:
    axes.axvline(limit, color=PALETTE["orange"], label="longest response that was cut off")
  axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  axes.set(xlabel=f"length ({unit})", ylabel="share of their kind")
  axes.set_title("lengths of all responses")


def _groups(axes: Axes, measured: dict[str, Any], unit: str) -> None:
  rows = {"groups: all correct": "all_correct", "groups: all wrong": "all_wrong"}
  bars = {name: measured["groups"][key] for name, key in rows.items()}
  bars |= {"groups: no signal": measured["groups"]["silent"]}
  cut = measured["truncation"]
  bars |= {"responses: cut off": cut["all"], "wrong ones: cut off": cut["wrong"]}
  for y, number in enumerate(reversed(bars.values())):
    value, low, high = np.asarray(number)
    if np.isfinite(value):
      axes.barh(y, value, color=PALETTE["sky"])
      axes.plot([low, high], [y, y], color="black", linewidth=1.2)
  axes.set_yticks(range(len(bars)), list(reversed(bars)))
  axes.set_xlim(0.0, 1.0)
  axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  axes.grid(axis="y", visible=False)
  axes.set_title("groups without signal, truncation")


def _worth(axes: Axes, measured: dict[str, Any], unit: str) -> None:
  table = measured["mismatch"]
  top = max(table["horizons"].max(), 2 * table["length"])
  x = np.geomspace(max(table["length"] / 8, 1.0), top, 100)
  value, low, high = table["variance"]
  axes.semilogx(x, np.exp(-value * x), color=PALETTE["blue"], label="predicted, exp(-v T)")
  axes.fill_between(
    x, np.exp(-high * x), np.exp(-max(low, 0.0) * x), color=PALETTE["blue"], alpha=0.2
  )
  whole, half = (table["length"], table["sequence_worth"]), table["half"]
  axes.plot(*whole, "*", color="black", label="measured, whole responses")
  axes.plot(half["length"], half["worth"], "o", color="black", label="measured, first halves")
  axes.set(ylim=(0.0, 1.05), xlabel="length (tokens)", ylabel="effective samples per response")
  axes.set_title("what a whole-response ratio leaves")
