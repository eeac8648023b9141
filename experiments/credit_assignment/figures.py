"""Figures of `experiments.credit_assignment`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.credit_assignment import Config
from experiments.credit_assignment.measures import squared_error
from experiments.harness import figures
from experiments.harness.figures import PALETTE

TITLES = {"sum": "reward on the sum of all tokens", "first": "reward on the first token"}
ASSIGNMENTS = {
  "none": "none: r",
  "V(x)": "prompt: r - V(x)",
  "b*(x)": "best constant: r - b*(x)",
  "V(s)": "critic, λ = 1: r - V(s)",
  "A": "exact A (critic, λ = 0)",
  "A - c*(s)": "A - best state baseline",
}
CRITICS = {
  "exact critic": ("exact critic", "blue", "o"),
  "wrong critic": ("wrong critic", "orange", "s"),
  "uninformative critic": ("uninformative critic: V(x) everywhere", "vermilion", "^"),
}


@figures.style()
def advantages(config: Config, found: dict[str, Any]) -> Figure:
  """The headline: who gets the credit, on average and in single responses."""
  figure = Figure(figsize=(11.5, 7.6))
  grid = figure.subplots(2, 2, width_ratios=(1.0, 1.5))
  for (left, right), (reward, row) in zip(grid, found.items(), strict=True):
    given = row["advantages"]
    tokens = given["tokens"].mean(axis=0)
    positions = np.arange(1, len(tokens) + 1)
    left.bar(positions, tokens, color=PALETTE["blue"], label="exact A of the token")
    for prompt in given["tokens"]:
      left.plot(positions, prompt, ".", color=PALETTE["black"], markersize=5)
    left.plot([], [], ".", color=PALETTE["black"], label="one prompt")
    whole = given["response"].mean()
    left.axhline(whole, color=PALETTE["vermilion"], ls="--", label="r - V(x), for every token")
    left.set_xticks(positions)
    left.set(xlabel="token", ylabel="mean size of the credit", title=TITLES[reward])
    left.grid(axis="x", visible=False)
    _responses(right, given["shown"])
    value = given["correct"][config.shown_prompt]
    right.set_title(f"A along responses to prompt {config.shown_prompt + 1}, V(x) = {value:.3f}")
  figures.title(
    figure,
    "The exact advantages of the tokens add up to r - V(x), the credit that a group baseline gives "
    "to each of them",
  )
  figures.legend(figure, columns=3)
  return figure


def _responses(axes: Axes, shown: dict[str, Any]) -> None:
  """One row per response: its tokens, coloured by their advantage, and the sum beside it."""
  credit, tokens = np.asarray(shown["advantages"]), np.asarray(shown["tokens"])
  largest = np.abs(credit).max()
  axes.imshow(credit, cmap="PuOr", vmin=-1.5 * largest, vmax=1.5 * largest, aspect="auto")
  for (row, column), value in np.ndenumerate(credit):
    text = f"{tokens[row, column]}\n{np.round(value, 3) + 0.0:+.3f}"
    axes.text(column, row, text, ha="center", va="center", fontsize=7.5)
  totals, outcomes = credit.sum(axis=1), (shown["rewards"], shown["probs"])
  names = [f"r = {reward:.0f}, p = {p:.2g}" for reward, p in zip(*outcomes, strict=True)]
  axes.set_yticks(range(len(names)), names, fontsize="small")
  beside = axes.secondary_yaxis("right")
  beside.set_yticks(range(len(names)), [f"Σ {total:+.3f}" for total in totals], fontsize="small")
  axes.set_xticks(range(tokens.shape[1]), [f"token {t + 1}" for t in range(tokens.shape[1])])
  for ticks in (axes, beside):
    ticks.tick_params(length=0)
  axes.grid(visible=False)
  for side in axes.spines.values():
    side.set_visible(False)


@figures.style()
def variance(found: dict[str, Any]) -> Figure:
  """What each assignment leaves, over what a prompt baseline leaves."""
  figure = Figure(figsize=(11.5, 4.6))
  names = [name for name in ASSIGNMENTS if name != "V(x)"][::-1]
  for axes, reward in zip(figure.subplots(1, 2, sharey=True), TITLES, strict=True):
    for policy, (offset, marker) in {"table": (0.15, "o"), "network": (-0.15, "D")}.items():
      rows = found[policy][reward]["rows"]
      for y, assignment in enumerate(names):
        ratios = rows[assignment]["variance"] / rows["V(x)"]["variance"]
        for prompt, (x, colour) in enumerate(zip(ratios, PALETTE.values(), strict=False)):
          label = f"{policy}, prompt {prompt + 1}"
          look = {"color": colour, "marker": marker, "markersize": 6, "linestyle": "none"}
          axes.plot(x, y + offset, label=label, alpha=0.8, **look)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="variance / variance of r - V(x)", title=TITLES[reward])
    axes.set_yticks(range(len(names)), [ASSIGNMENTS[name] for name in names])
  figures.title(
    figure,
    "All are unbiased. Exact advantages beat r - V(x) on every prompt; V(x) does not always beat "
    "no baseline, nor a critic at λ = 1 V(x)",
  )
  figures.legend(figure)
  return figure


@figures.style()
def gae(config: Config, found: dict[str, Any]) -> Figure:
  """Bias, variance and error of the batch's update over lambda, by critic."""
  figure = Figure(figsize=(12.0, 7.2))
  lambdas = np.array(config.lambdas)
  few = config.samples[len(config.samples) // 2]
  for row, (reward, title) in zip(figure.subplots(2, 3, sharex=True), TITLES.items(), strict=True):
    for critic, (label, colour, marker) in CRITICS.items():
      grid = found[reward]["grids"][critic]
      look = {"color": PALETTE[colour], "marker": marker, "markersize": 5}
      row[0].plot(lambdas, grid["batch_raw_bias"], label=label, **look)
      row[1].plot(lambdas, grid["batch_variance"], **look)
      row[2].plot(lambdas, np.sqrt(squared_error(grid, [few])[:, 0]), **look)
    discount = found[reward]["grids"]["discount"]["batch_raw_bias"]
    row[0].plot(lambdas, discount, ":", color="black", label="discount in place of λ")
    row[0].set(ylabel="bias / |grad J|", title=title)
    row[1].set(ylabel="variance / (size |grad J|)²", title="noise over signal", yscale="log")
    row[2].set(ylabel="RMSE / |grad J|", title=f"{few:,} responses per prompt", yscale="log")
  for axes in figure.axes[-3:]:
    axes.set_xlabel("λ of GAE")
  figures.title(
    figure,
    "An exact critic is unbiased at every λ, any critic at λ = 1; without a critic λ only decays "
    "the credit of early tokens, like a discount",
  )
  figures.legend(figure)
  return figure
