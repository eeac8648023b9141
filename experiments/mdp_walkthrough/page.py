"""The episode as one page to step through, and as a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.harness import figures, storage
from experiments.harness.figures import PALETTE

TEMPLATE = Path(__file__).with_name("page.html")


def render(walk: dict[str, Any]) -> str:
  """The page: template, with the episode as JSON in it."""
  # No "<" in it, so that no text can close the element it stands in.
  data = json.dumps(storage.readable(walk), allow_nan=False).replace("<", "\\u003c")
  return TEMPLATE.read_text().replace("{{walk}}", data)


@figures.style()
def draw(walk: dict[str, Any]) -> Figure:
  """Value along the response, and the credit of each token."""
  steps = walk["steps"]
  words = [walk["token_names"][step["action"]] for step in steps]
  values = np.array([*(step["value"] for step in steps), walk["reward"]])
  advantages, whole = np.diff(values), values[-1] - values[0]
  figure = Figure(figsize=(9.0, 3.8))
  left, right = figure.subplots(1, 2)
  left.plot(range(len(values)), values, "o-", color=PALETTE["black"])
  left.set_xticks(range(len(values)), ["prompt", *words])
  left.set(ylim=(-0.03, 1.05), ylabel="V", title="probability of a right answer, after each token")
  colours = [PALETTE["green" if a > 0 else "vermilion"] for a in advantages]
  right.bar(range(len(steps)), advantages, color=colours, label="exact advantage A")
  right.axhline(0.0, color="grey", linewidth=0.8)
  right.axhline(whole, color=PALETTE["blue"], linestyle="--", label="outcome reward, r - V(x)")
  right.set_xticks(range(len(steps)), words)
  right.set(ylabel="credit", title="credit of each token")
  figures.title(
    figure, f"One response as an episode: the advantages of its tokens add up to {whole:+.3f}"
  )
  figures.legend(figure)
  return figure
