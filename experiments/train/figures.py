"""The figure of a training run."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import figures, step_files

WIDTH = 8  # steps that a line is averaged over
PALETTE = figures.PALETTE


@figures.style()
def progress(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], claim: str) -> Figure:
  """Reward, KL to the reference and length over the steps."""
  figure = Figure(figsize=(11.0, 4.0))
  reward, kl, length = figure.subplots(1, 3)
  _line(reward, steps, ("rewards", "total"), "blue", "reward")
  names = [name for name in steps[0]["rewards"] if name != "total"] if steps else []
  if len(names) > 1:
    for name, colour in zip(names, ("green", "purple", "orange") * 9, strict=False):
      _line(reward, steps, ("rewards", name), colour, f"of it {name}", points=False)
  _held_out(reward, evaluations)
  _line(kl, steps, ("ref_kl", "k3"), "vermilion", "KL")
  _line(length, steps, ("lengths",), "sky", "length")
  reward.set(xlabel="step", ylabel="reward", title=f"Reward (lines: mean of {WIDTH} steps)")
  kl.set(xlabel="step", ylabel="KL(policy || start), nats per token", title="Distance")
  length.set(xlabel="step", ylabel="tokens", title="Length of responses", ylim=(0, None))
  figures.title(figure, claim)
  figures.legend(figure, columns=6)
  return figure


def _line(
  axes: Axes,
  steps: list[dict[str, Any]],
  path: tuple[str, ...],
  colour: str,
  label: str,
  *,
  points: bool = True,
) -> None:
  found = step_files.series(steps, *path)
  if not len(found.steps):
    axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    return
  axes.plot(found.steps + 1, step_files.smoothed(found, WIDTH), color=PALETTE[colour], label=label)
  if points:
    axes.plot(found.steps + 1, found.means, ".", color=PALETTE[colour], alpha=0.3, markersize=4)


def _held_out(axes: Axes, evaluations: list[dict[str, Any]]) -> None:
  totals = [record["rewards"]["total"] for record in evaluations]
  if not totals:
    return
  means, errors = (np.array([float(x[key]) for x in totals]) for key in ("mean", "standard_error"))
  at = [record["step"] for record in evaluations]
  style = {"fmt": "o", "color": PALETTE["black"], "capsize": 3, "label": "held out, 95 %"}
  axes.errorbar(at, means, 1.96 * errors, **style)
