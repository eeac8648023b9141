"""Figures of `experiments.stories`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import figures
from experiments.harness.figures import PALETTE
from experiments.stories import measures
from experiments.stories.frontier import Curve

COLOURS = [PALETTE[name] for name in ("vermilion", "green", "blue", "purple", "orange", "sky")]


@figures.style()
def frontier(
  table: dict[str, Any], curve: Curve, others: list[Curve], best_of: Curve, claim: str
) -> Figure:
  """Reward against KL under the optimum: all runs, and means of equal KL."""
  figure = Figure(figsize=(11.0, 5.2))
  whole, equal = figure.subplots(1, 2, width_ratios=(1.5, 1.0), sharey=True)
  farthest = 1.05 * max(runs["kl"].mean(axis=0).max() for runs in table.values())
  for axes, end in ((whole, farthest), (equal, measures.matched_kl(table))):
    _optimum(axes, curve, others, best_of, end)
    axes.set(xlabel="KL(policy || start), nats per response", xlim=(0, end))
  kl = np.linspace(0, measures.matched_kl(table), 60)
  for (name, runs), colour in zip(table.items(), COLOURS, strict=False):
    _paths(whole, name, runs, colour)
    middle, half = measures.band(np.array([measures.reward_at(runs, x) for x in kl]).T)
    equal.plot(kl, middle, color=colour)
    equal.fill_between(kl, middle - half, middle + half, color=colour, alpha=0.12, linewidth=0)
  whole.set(ylabel="held-out reward", ylim=(0, 1.1 * curve.reward[-1]))
  whole.set_title("Runs (thin), means by step, 95 % t intervals over seeds")
  equal.set_title("Means of equal KL")
  figures.title(figure, claim)
  figures.legend(figure, columns=7)
  return figure


def _optimum(axes: Axes, curve: Curve, others: list[Curve], best_of: Curve, end: float) -> None:
  kl = np.linspace(0, end, 400)
  low, high = np.percentile([x.at(kl) for x in others], [2.5, 97.5], axis=0)
  axes.fill_between(kl, low, high, color="black", alpha=0.15, linewidth=0)
  axes.plot(kl, curve.at(kl), color="black", label="optimum")
  axes.plot(*best_of, "k.", label="best of n = 2, 4, 8 ...")


def _paths(axes: Axes, name: str, runs: dict[str, Any], colour: str) -> None:
  for kl, reward in zip(runs["kl"], runs["reward"], strict=True):
    axes.plot(kl, reward, color=colour, linewidth=0.6, alpha=0.4)
  kl, across = measures.band(runs["kl"])
  reward, up = measures.band(runs["reward"])
  look: dict[str, Any] = {"fmt": "o-", "markersize": 4, "capsize": 2, "elinewidth": 0.9}
  axes.errorbar(kl, reward, up, across, color=colour, label=name, **look)


@figures.style()
def steps(table: dict[str, Any], pairs: dict[str, Any], claim: str) -> Figure:
  """Reward and KL over the steps, and differences of all pairs at the same KL."""
  figure = Figure(figsize=(11.0, 4.4))
  reward, kl, forest = figure.subplots(1, 3)
  for axes, key in ((reward, "reward"), (kl, "kl")):
    for (name, runs), colour in zip(table.items(), COLOURS, strict=False):
      middle, half = measures.band(runs[key])
      axes.plot(runs["step"], middle, "o-", markersize=4, color=colour, label=name)
      axes.fill_between(
        runs["step"], middle - half, middle + half, color=colour, alpha=0.12, linewidth=0
      )
    axes.set(xlabel="step", ylim=(0, None))
  reward.set(ylabel="held-out reward", title="Reward, 95 % t intervals")
  kl.set(ylabel="KL(policy || start), nats per response", title="Distance")
  rows = [row["reward at matched KL"] for row in pairs.values()]
  for y, x in enumerate(reversed(rows)):
    colour = "black" if x.resolved else "grey"
    forest.errorbar(x.value, y, xerr=x.half, fmt="o", color=colour, markersize=4, capsize=2)
  forest.axvline(0.0, color="black", linewidth=0.8)
  forest.set_yticks(range(len(rows)), list(reversed(pairs)), fontsize="small")
  forest.set(xlabel="difference in held-out reward")
  forest.set_title(f"Pairs of one seed at {measures.matched_kl(table):.1f} nats")
  figures.title(figure, claim)
  figures.legend(figure, columns=5)
  return figure
