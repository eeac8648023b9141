"""Figures of `experiments.length_bias`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.length_bias import Config
from experiments.harness import figures
from experiments.harness.figures import PALETTE
from experiments.length_bias.setting import SCALINGS

LOOK = {  # colour and marker of a reduction, in all figures
  "sum": (PALETTE["blue"], "o"),
  "token mean": (PALETTE["green"], "s"),
  "sequence mean": (PALETTE["vermilion"], "^"),
}
LONG = {
  "sum": "sum over tokens (= true gradient)",
  "token mean": "token mean over the group",
  "sequence mean": "mean per response, 1/n (GRPO)",
}


@figures.style()
def bias_and_drift(table: dict[str, Any], batch: dict[str, Any]) -> Figure:
  """The headline: direction of every reduction, and what it does to lengths."""
  figure = Figure(figsize=(11.0, 4.6))
  cosines, wrong, right = figure.subplots(1, 3, width_ratios=(1.25, 1.0, 1.0))
  names = {"sum": "sum", "constant length": "sum / constant (Dr. GRPO)"}
  names |= {name: name for name in table if name not in names}
  names |= {"token mean": "token mean, group (DAPO)", "sequence mean": "1/n, mean (GRPO)"}
  rows = [(names[name], table[name]) for name in table]
  rows.insert(2, ("token mean, batch", {"centred": batch["token mean over the batch"]}))
  for y, (_, row) in enumerate(reversed(rows)):
    for scaling, marker, size, offset in zip(SCALINGS, "ox", (30, 26), (0.13, -0.13), strict=True):
      if scaling in row:
        x = np.asarray(row[scaling]["cosine"])
        colour = "black" if scaling == "centred" else PALETTE["orange"]
        cosines.scatter(
          x,
          np.full(x.shape, y + offset),
          marker=marker,
          s=size,
          color=colour,
          label="centred rewards" if scaling == "centred" else "divided by the group's std",
          zorder=3,
        )
  cosines.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
  cosines.set(xlabel="cosine of the expected update with grad J", title="direction, per prompt")
  for axes, which, what in ((wrong, "wrong", "wrong"), (right, "correct", "correct")):
    _drift(axes, table, which)
    axes.set(title=f"length of {what} responses", xlabel="prompt")
    axes.set_ylabel("drift (tokens per unit of P(correct))")
  figures.title(
    figure,
    "1/n turns the update off the policy gradient and lengthens wrong answers; dividing by the std "
    "does not",
  )
  figures.legend(figure, columns=3)
  return figure


def _drift(axes: Axes, table: dict[str, Any], which: str) -> None:
  for offset, name in zip((-0.2, 0.0, 0.2), LOOK, strict=True):
    colour, marker = LOOK[name]
    y = np.asarray(table[name]["centred"][f"drift_{which}"])
    x = np.arange(1, len(y) + 1) + offset
    axes.vlines(x, 0.0, y, color=colour, linewidth=2.5)
    axes.plot(x, y, marker, color=colour, markersize=6, label=LONG[name])
  axes.axhline(0.0, color="black", linewidth=0.8)
  axes.set_xticks(range(1, len(y) + 1))
  axes.grid(axis="x", visible=False)


@figures.style()
def flows(table: dict[str, Any]) -> Figure:
  """Lengths at equal P(correct)."""
  figure = Figure(figsize=(3.4 * len(table) + 0.8, 6.2))
  grid = figure.subplots(2, len(table), sharex=True, sharey="row", squeeze=False)
  for column, (optimiser, runs) in enumerate(table.items()):
    for row, which in enumerate(("wrong", "correct")):
      axes = grid[row, column]
      for name, run in runs.items():
        x, y = run["correct"].mean(axis=0), run[f"length_{which}"]
        colour = LOOK[name][0]
        axes.plot(x, y.mean(axis=0), color=colour, label=LONG[name])
        if len(y) > 1:
          error = 2.0 * y.std(axis=0, ddof=1) / np.sqrt(len(y))
          mean = y.mean(axis=0)
          axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.25, linewidth=0)
      if column == 0:
        axes.set_ylabel(f"mean length if {which} (tokens)")
    seeds = len(next(iter(runs.values()))["correct"])
    kind = f"{optimiser}, {seeds} seeds, ±2 s.e." if seeds > 1 else f"{optimiser}, exact update"
    grid[0, column].set_title(kind)
    grid[1, column].set_xlabel("P(correct), mean over prompts")
  figures.title(
    figure,
    "At equal P(correct) 1/n leaves wrong answers longer, but the true gradient lengthens them too",
  )
  figures.legend(figure, columns=3)
  return figure


@figures.style()
def frontier_and_filler(config: Config, frontier: Any, filler: Any) -> Figure:
  """What the bias buys, and the pure case."""
  figure = Figure(figsize=(11.0, 4.4))
  left, right = figure.subplots(1, 2)
  colours = {0.0: "blue", 0.25: "sky", 0.3: "sky", 0.5: "purple", 0.7: "orange", 0.75: "orange"}
  colours |= {1.0: "vermilion"}
  for alpha, mse in zip(config.frontier_alphas, frontier["mse"], strict=True):
    if alpha in colours:
      label = f"1/n^{alpha:g}" + {0.0: " (sum)", 1.0: " (mean)"}.get(alpha, "")
      left.loglog(
        config.frontier_groups, np.sqrt(mse), ".-", color=PALETTE[colours[alpha]], label=label
      )
  left.set(xlabel="groups per prompt that are averaged", ylabel="RMSE / |grad J|")
  left.set_title("error of the rescaled update: bias buys variance")
  left.legend(loc="lower left")
  for name, (colour, marker) in LOOK.items():
    for which, line in (("wrong", "-"), ("correct", "--")):
      y = filler[name][which]
      style = {"color": colour, "marker": marker, "linestyle": line}
      once = LONG[name] if which == "wrong" else None
      right.plot(config.filler.group_sizes, y, label=once, **style)
  right.set_xscale("log", base=2)
  right.set_xticks(config.filler.group_sizes, [str(g) for g in config.filler.group_sizes])
  right.set(xlabel="samples per group", ylabel="drift (tokens per unit of P(correct))")
  right.set_title("first token decides, rest is filler (solid: wrong, dashed: correct)")
  figures.title(
    figure,
    "1/n is less noisy, and wins while few groups are averaged; in the pure case all of its drift "
    "of length is bias",
  )
  right.legend(loc="upper right", bbox_to_anchor=(1.0, 0.93), fontsize="small")
  return figure


@figures.style()
def difficulty_and_curl(config: Config, difficulty: Any, curl: Any) -> Figure:
  """Which prompts a std favours, and which rows of the table ascend a function."""
  figure = Figure(figsize=(11.0, 5.2))
  left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.1))
  settings, colours = config.difficulty, list(PALETTE.values())
  x = np.asarray(settings.correct)
  for size, std, kept, colour in zip(
    settings.group_sizes, difficulty["std"], difficulty["kept"], colours, strict=False
  ):
    left.plot(x, std, ".-", color=colour, label=f"G = {size}")
    left.plot(x, std / kept, ":", color=colour)
  left.plot([], [], ":", color="grey", label="with dynamic sampling")
  smooth = np.geomspace(x.min(), x.max(), 200)
  limit = 1.0 / np.sqrt(smooth * (1.0 - smooth))
  left.plot(smooth, limit, color="grey", linewidth=0.8, label="1/sqrt(p (1 - p))")
  left.set(xscale="logit", yscale="log", ylim=(0.8, 100), xlabel="P(correct) of the prompt")
  left.set(ylabel="size of the update / |grad J|")
  left.set_title("division by the group's std: weight of a prompt")
  left.legend(loc="upper right", ncols=2, fontsize="small")
  names = list(curl["curl"])[::-1]
  values = np.array([curl["curl"][name] for name in names])
  flat = values < 1e-10
  right.barh(names, np.where(flat, 0.0, values), color=PALETTE["vermilion"])
  for name in np.array(names)[flat]:
    right.text(0.002, name, "0", va="center", fontsize=7, color=PALETTE["blue"], weight="bold")
  right.set(xlabel="antisymmetric part of the Jacobian / whole")
  right.tick_params(axis="y", labelsize=7)
  right.set_title("curl of the expected update (0: to rounding)")
  right.grid(axis="y", visible=False)
  figures.title(
    figure,
    "A std favours hard and easy prompts without turning their gradients; 1/n with a baseline "
    "ascends no function",
  )
  return figure


@figures.style()
def real_groups(tables: dict[str, Any]) -> Figure:
  """The push on a token of a real response, by its length."""
  figure = Figure(figsize=(4.6 * len(tables) + 1.0, 4.6))
  for axes, (name, table) in zip(
    figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True
  ):
    edges = table["edges"]
    x = np.arange(len(edges) - 1)
    for reduction in ("sum", "group token mean", "sequence mean"):
      colour, marker = LOOK.get(reduction, LOOK["token mean"])
      label = {"sum": "sum, or token mean over the batch", "sequence mean": LONG["sequence mean"]}
      axes.plot(
        x,
        table[reduction]["wrong"],
        marker=marker,
        color=colour,
        label=label.get(reduction, LONG["token mean"]),
      )
    bins = [f"{a:.0f}–{b:.0f}" for a, b in zip(edges, edges[1:], strict=False)]
    axes.set_xticks(x, bins, fontsize="small")
    axes.set_ylim(0.0)
    axes.set(xlabel="length of the response (tokens), fifths")
    axes.set_ylabel("push per token, wrong responses / all")
    axes.set_title(f"{name}, {table['groups']} groups with signal")
  figures.title(figure, "On real graded responses 1/n spares the tokens of long wrong answers")
  figures.legend(figure, columns=2)
  return figure
