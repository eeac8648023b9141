"""The figures of `experiments.ratio_explosion_trained`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from configs.ratio_explosion_trained import Config
from experiments.harness import figures
from experiments.harness.intervals import interval
from experiments.ratio_explosion_trained.measures import crossing

_COLOURS = ("sky", "blue", "green", "orange", "vermilion", "purple")
_LEVELS = (("sequence", "-", "o"), ("GSPO", "--", "^"), ("token", ":", "X"))
_NAMES = {
  "sequence": "sequence ratio",
  "GSPO": "ratio$^{1/T}$, GSPO's band",
  "token": "token ratio",
}
_PERCENT = PercentFormatter(1.0, decimals=0)


@figures.style()
def explosion(config: Config, found: dict[str, Any], run: str) -> Figure:
  """Shares out of the bands, effective sample size and variance against T, one line per k."""
  held, lengths = found[run]["held_out"], np.array(config.lengths)
  figure = Figure(figsize=(13.0, 4.8))
  bands, size, variance = figure.subplots(1, 3)
  for place, (k, colour) in enumerate(zip(config.staleness, _COLOURS, strict=False)):
    options = {"color": figures.PALETTE[colour], "markersize": 4}
    for level, line, marker in _LEVELS:
      mean, _ = interval(held[level][:, place])
      bands.plot(lengths, mean, line, marker=marker, **options)
    _with_interval(size, lengths, held["sample_size"][:, place], options)
    label = f"after {k} update{'s' * (k > 1)}"
    _with_interval(variance, lengths, held["variance"][:, place], options | {"label": label})
    predicted, _ = interval(2 * lengths * held["k3"][:, place])
    variance.plot(lengths, predicted, "--", color=options["color"], linewidth=1)
  for level, line, marker in _LEVELS:
    bands.plot([], [], line, marker=marker, markersize=4, color="grey", label=_NAMES[level])
  variance.plot([], [], "--", color="grey", linewidth=1, label="2 T KL")
  bands.set(ylabel="share out of its band", ylim=(-0.03, 1.03), title="Bands")
  bands.yaxis.set_major_formatter(_PERCENT)
  size.set(
    ylabel="effective samples per sample",
    ylim=(0, 1.03),
    title="Worth of a response (shaded: 95 %, seeds)",
  )
  variance.set(yscale="log", ylabel="variance of log ρ, nats²", title="Spread of the log-ratio")
  _lengths_axis(lengths, bands, size, variance)
  last = {name: float(interval(held[name])[0][-1, -1]) for name in ("token", "sequence", "k3")}
  figures.title(
    figure,
    f"{config.staleness[-1]} updates at a rate of {run}, {last['k3']:.2g} nats per token: of the "
    f"tokens {last['token']:.2%} have left [0.8, 1.2], of the responses of {lengths[-1]} tokens "
    f"{last['sequence']:.0%}",
  )
  figures.legend(figure, columns=5)
  return figure


@figures.style()
def staleness(config: Config, found: dict[str, Any], runs: list[str]) -> Figure:
  """Against k: KL, the lengths at which responses are lost, what clips leave out; trained on."""
  k, last = np.array(config.staleness), config.staleness[-1]
  figure = Figure(figsize=(11.5, 8.0))
  (drift, horizon), (rules, own) = figure.subplots(2, 2)
  lost = []
  for name, colour in zip(runs, ("vermilion", "blue", "green", "orange"), strict=False):
    held, label = found[name]["held_out"], f"learning rate {name}"
    options = {"color": figures.PALETTE[colour], "marker": "o", "markersize": 4}
    _with_interval(drift, k, held["k3"][:, :, -1], options | {"label": label})
    for line, key in (("-", "sequence"), ("--", "sample_size")):
      where = crossing(config.lengths, interval(held[key])[0], 0.5)
      horizon.plot(k, where, line, **options)
      lost += [(name, where[-1])] if key == "sequence" else []
    for line, key in (("-", "GSPO leaves out"), ("--", "GRPO leaves out")):
      share = interval(held[key][:, :, -1])[0]
      rules.plot(k[share > 0], share[share > 0], line, **options)
    _with_interval(own, config.lengths, held["variance"][:, -1], options)
    _with_interval(own, config.lengths, found[name]["trained"]["variance"], options, "--")
  first = interval(found[runs[0]]["held_out"]["k3"][:, :, -1])[0][0]
  for power in (1, 2):
    drift.plot(k, first * k**power, color="grey", linewidth=0.8, linestyle=":")
    drift.annotate(f" $k^{power}$", (k[-1], first * float(k[-1]) ** power), color="grey")
  drift.set(yscale="log", ylabel="KL(old || current), nats per token", title="Drift")
  horizon.set(
    yscale="log",
    ylabel="length of a response, tokens",
    title="Length at which half are out of [0.8, 1.2] (dashed: ESS 1/2)",
  )
  _lengths_axis(config.lengths, own)
  horizon.set_yticks(config.lengths, [str(length) for length in config.lengths])
  horizon.set_yticks([], minor=True)
  title = f"Left out by GSPO's clip (dashed: GRPO's), T = {config.lengths[-1]}"
  rules.set(yscale="log", ylabel="share of the tokens", title=title)
  rules.yaxis.set_major_formatter(lambda x, _: f"{100 * x:g}%")
  title = f"Held out after {last} updates (dashed: trained on)"
  own.set(yscale="log", ylabel="variance of log ρ, nats²", title=title)
  for axes in (drift, horizon, rules):
    axes.set(xscale="log", xlabel="updates since the responses were drawn")
    axes.set_xticks(k, [str(x) for x in k])
    axes.set_xticks([], minor=True)
  out = ", ".join(
    f"from {length:.0f} tokens on at a rate of {name}"
    for name, length in lost
    if np.isfinite(length)
  )
  claim = f"After {last} updates half of the responses are out of [0.8, 1.2] {out or 'nowhere'}"
  figures.title(figure, claim)
  figures.legend(figure)
  return figure


def _with_interval(
  axes: Axes, x: Any, by_seed: Any, options: dict[str, Any], line: str = "-"
) -> None:
  mean, half = interval(by_seed)
  axes.plot(x, mean, line, **options)
  low = np.maximum(mean - half, mean / 10)  # for the logarithm
  axes.fill_between(x, low, mean + half, color=options["color"], alpha=0.15, linewidth=0)


def _lengths_axis(lengths: Any, *all_axes: Axes) -> None:
  for axes in all_axes:
    axes.set(xscale="log", xlabel="T, tokens")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xticks([], minor=True)
