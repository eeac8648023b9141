"""Figures of `experiments.kl_estimators`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import figures
from experiments.harness.figures import PALETTE

_VALUES = {
  "k1": ("vermilion", "o"),
  "k2": ("orange", "s"),
  "k3": ("blue", "^"),
  "abs": ("purple", "v"),
  "exact per state": ("green", "D"),
}
# (estimator, place, ratio): label, colour, line, marker.
_GRADIENTS = {
  ("k1", "loss", "none"): ("k1 in the loss", "vermilion", ":", "o"),
  ("k2", "loss", "none"): ("k2 in the loss", "orange", ":", "s"),
  ("k3", "loss", "none"): ("k3 in the loss (GRPO)", "blue", ":", "^"),
  ("exact per state", "loss", "none"): ("exact per state in the loss", "green", ":", "D"),
  ("k1", "whole", "none"): ("k1 in the reward, whole", "vermilion", "--", "o"),
  ("k1", "to go", "none"): ("k1 in the reward, to go (PPO)", "vermilion", "-", "o"),
  ("k3", "to go", "none"): ("k3 in the reward, to go", "blue", "-", "^"),
  ("k3", "live", "prefix"): ("k3 x live prefix ratio", "sky", "-", "v"),
  ("exact per state", "live", "prefix"): ("exact per state x live prefix ratio", "green", "-", "D"),
}
_OLD = {
  ("k1", "to go", "none"): ("k1 in the reward, no ratio", "vermilion", ":", "o"),
  ("k1", "to go", "token"): ("k1 in the reward, token ratio", "vermilion", "--", "o"),
  ("k1", "to go", "sequence"): ("k1 in the reward, sequence ratio", "vermilion", "-", "o"),
  ("k3", "loss", "none"): ("k3 in the loss, no ratio (GRPO)", "blue", ":", "^"),
  ("k3", "live", "token"): ("k3 x live token ratio (DeepSeek-V3.2)", "blue", "--", "^"),
  ("k3", "live", "prefix"): ("k3 x live prefix ratio", "sky", "-", "v"),
  ("k3", "live", "sequence"): ("k3 x live sequence ratio", "black", "-", "s"),
  ("exact per state", "live", "prefix"): ("exact per state x live prefix ratio", "green", "-", "D"),
}


@figures.style()
def on_policy(found: dict[str, Any]) -> Figure:
  """Value, direction and noise against the distance to the reference."""
  figure = Figure(figsize=(12.0, 5.4))
  value, along, noise = figure.subplots(1, 3)
  for name, (colour, marker) in _VALUES.items():
    row = found["value"][name]["none"]
    error = np.hypot(row["bias"], row["std"])
    value.plot(found["kl"], error, marker=marker, color=PALETTE[colour], label=f"value: {name}")
  value.set(yscale="log", ylabel="root mean squared error / KL", title="value, one response")
  _lines(along, found["kl"], found["gradient"], _GRADIENTS, "scale")
  along.set(ylabel="component along grad KL / |grad KL|", title="expected update: 1 is right")
  along.axhline(0.0, color="grey", linewidth=0.8)
  _lines(noise, found["kl"], found["gradient"], _GRADIENTS, "noise")
  noise.set(yscale="log", ylabel="variance / |grad KL|²", title="noise, one response per prompt")
  for axes in figure.axes:
    axes.set(xscale="log", xlabel="KL(policy || reference), nats per response")
  figures.title(
    figure,
    "A good estimate of the KL is not a good gradient: k1 in the loss is noise around 0, k3 in the "
    "reward pushes away from the reference",
  )
  figures.legend(figure, columns=4)
  return figure


@figures.style()
def off_policy(found: dict[str, Any]) -> Figure:
  """Bias and noise against the staleness of the samples."""
  figure = Figure(figsize=(11.0, 5.4))
  bias, noise = figure.subplots(1, 2)
  stale = found["staleness"][1:]  # the first is on-policy, which a logarithm has no place for
  _lines(bias, stale, found["gradient"], _OLD, "bias")
  bias.set(ylabel="|E g - grad KL| / |grad KL|", title="bias")
  bias.set_yscale("symlog", linthresh=1e-2)
  bias.set_ylim(-1e-3)
  _lines(noise, stale, found["gradient"], _OLD, "noise")
  noise.set(yscale="log", ylabel="variance / |grad KL|²", title="noise, one response per prompt")
  for axes in figure.axes:
    axes.set(xscale="log", xlabel="KL(old policy || policy), nats per response")
  figures.title(
    figure,
    "On old samples a live ratio of the prefix makes k3 and the exact KL unbiased at little cost; "
    "that of the token is right only with the states held fixed",
  )
  figures.legend(figure, columns=3)
  return figure


def _lines(axes: Axes, x: Any, gradient: Any, look: dict[Any, Any], which: str) -> None:
  for (estimator, place, ratio), (label, colour, line, marker) in look.items():
    y = gradient[estimator][place][ratio][which][-len(x) :]
    axes.plot(x, y, color=PALETTE[colour], linestyle=line, marker=marker, markersize=5, label=label)
