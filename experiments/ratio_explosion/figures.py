"""The figures of `experiments.ratio_explosion`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from configs.ratio_explosion import Config
from experiments.harness import figures
from experiments.ratio_explosion.chains import edges
from experiments.ratio_explosion.counting import select, squared_error

_BANDS = {
  "sequence": ("sequence ratio", "vermilion", "-", "o"),
  "prefix": ("prefix ratio", "purple", "-", "s"),
  "root": ("sequence ratio, band growing with √T", "orange", "--", "D"),
  "GSPO": ("ratio$^{1/T}$, GSPO's band", "green", "--", "^"),
  "LUSPO": ("ratio$^{1/T}$, LUSPO's band", "sky", "--", "v"),
  "token": ("token ratio", "blue", "-", "X"),
}
_ESTIMATORS = {
  "token": ("token", "blue", "-", "X"),
  "prefix": ("prefix", "purple", "-", "s"),
  "token and rest": ("token and rest", "sky", "-.", "v"),
  "geometric": ("geometric (exponent 1/T)", "green", "--", "^"),
  "sequence": ("sequence", "vermilion", "-", "o"),
  "none": ("no ratio", "black", ":", "."),
}
_RATES = ("sky", "blue", "orange", "vermilion", "purple", "green", "black")
_PERCENT = PercentFormatter(1.0, decimals=0)


@figures.style()
def explosion(config: Config, moments: list[Any], clipping: list[Any]) -> Figure:
  """The headline: fractions out of the bands, and effective sample sizes, against T."""
  chain = config.chain
  figure = Figure(figsize=(11, 5.2))
  left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
  headline = clipping[1]
  for band, (label, colour, line, marker) in _BANDS.items():
    outside = headline[band].sum(axis=1)
    options = {"color": figures.PALETTE[colour], "linestyle": line, "marker": marker}
    left.plot(chain.lengths, outside, label=label, markersize=5, **options)
  left.set(
    ylabel="share out of its band",
    ylim=(-0.03, 1.0),
    title=f"bands, at {_nats(chain.rates[1])} per token",
  )
  left.yaxis.set_major_formatter(_PERCENT)
  for rate, found, colour in zip(chain.rates, moments, _RATES, strict=False):
    size = np.exp(-found["log_second_moment"])
    right.plot(chain.lengths, size, color=figures.PALETTE[colour], marker=".")
    right.plot(
      chain.lengths,
      np.exp(-2 * rate * np.array(chain.lengths)),
      color="grey",
      linewidth=0.8,
      ls=":",
    )
    last = np.flatnonzero(size > 1e-4)[-1]
    right.annotate(
      f"{rate:g}",
      (chain.lengths[last], size[last]),
      xytext=(7, 0),
      textcoords="offset points",
      va="center",
      color=figures.PALETTE[colour],
    )
  right.set(
    yscale="log",
    ylim=(1e-4, 1.5),
    ylabel="effective sample size per sample",
    title="by KL in nats per token (dotted: exp(-2 KL T))",
  )
  _lengths_axis(left, right)
  right.set_xlim(right=chain.lengths[-1] * 3.5)
  final = headline["sequence"][-1].sum()
  low, high = np.exp(edges(config.bands.clip))
  figures.title(
    figure,
    f"At {_nats(chain.rates[1])} per token no token ratio leaves [{low:.1f}, {high:.1f}], "
    f"yet at {chain.lengths[-1]:,} tokens {final:.0%} of the responses do",
  )
  figures.legend(figure, columns=3)
  return figure


@figures.style()
def estimators(config: Config, rows: list[dict[str, Any]]) -> Figure:
  """Bias removed, variance, squared error against n, and the crossover against T."""
  figure = Figure(figsize=(11.5, 8.6))
  (removed, variance), (error, crossover) = figure.subplots(2, 2)
  _removed(removed, config, rows)
  _variance(variance, config, rows)
  _error(error, config, rows)
  _crossover(crossover, config, rows)
  figures.title(
    figure,
    "Only the sequence ratio is unbiased, and its variance explodes; how much of the bias a token "
    "ratio removes depends on the way the policy moved",
  )
  figures.legend(figure, columns=4)
  return figure


@figures.style()
def gates(config: Config, found: list[Any]) -> Figure:
  """Fractions clipped by the bands on the length-normalised ratio."""
  chain = config.chain
  bands = config.bands
  figure = Figure(figsize=(13, 5.0))
  widths = {"sequence": bands.clip, "GSPO": bands.gspo, "LUSPO": bands.luspo}
  for axes, (name, width) in zip(figure.subplots(1, 3, sharey=True), widths.items(), strict=True):
    for rate, fractions, colour in zip(chain.rates, found, _RATES, strict=False):
      below, above = fractions[name].T
      options = {"color": figures.PALETTE[colour], "marker": "."}
      axes.plot(chain.gate_lengths, below + above, label=f"{rate:g} nats per token", **options)
      axes.plot(chain.gate_lengths, above, ls=":", **options)
    band = f"[1 - {width[0]:g}, 1 + {width[1]:g}]"
    axes.set_title(
      f"ratio in {band}" if name == "sequence" else f"ratio$^{{1/T}}$ in {band} ({name})"
    )
  figure.axes[0].set(ylabel="responses clipped (dotted: above the band)", ylim=(-0.03, 1.03))
  figure.axes[0].yaxis.set_major_formatter(_PERCENT)
  _lengths_axis(*figure.axes, step=16)
  figures.title(
    figure,
    "A band on the ratio of a response clips every long one; a band on ratio$^{1/T}$ becomes a "
    "threshold on the KL per token, but only for very long responses",
  )
  figures.legend(figure)
  return figure


@figures.style()
def rollouts(config: Config, found: dict[str, Any]) -> Figure:
  """Growth of Var log rho, and fractions out of the bands, of real responses."""
  lengths = np.array(config.rollouts.lengths)
  figure = Figure(figsize=(11, 5.0))
  left, right = figure.subplots(1, 2)
  for line, label in ((":", "T × variance of a token"), ("-", "sum of variances by position")):
    left.plot([], [], line, color="grey", label=label)
  for (name, trainer), colour in zip(found.items(), ("black", "orange"), strict=True):
    value, low, high = trainer["variance"].T
    options = {"color": figures.PALETTE[colour]}
    left.errorbar(
      lengths,
      value,
      yerr=[value - low, high - value],
      fmt="o",
      capsize=3,
      label=f"{name}, 95 % interval",
      **options,
    )
    left.plot(lengths, lengths * trainer["token_variance"][0], ":", **options)
    left.plot(lengths, value / trainer["correlation"][:, 0], "-", **options)
  left.set(
    yscale="log",
    ylabel="variance of the log ratio, nats²",
    title="growth of the variance with T",
  )
  first_name, first = next(iter(found.items()))
  for band in ("sequence", "prefix", "GSPO", "LUSPO", "token"):
    label, colour, line, marker = _BANDS[band]
    options = {"color": figures.PALETTE[colour], "linestyle": line, "marker": marker}
    right.plot(lengths, first[band].sum(axis=1), label=label, markersize=5, **options)
  right.set(ylabel="share out of its band", title=f"bands, {first_name}", ylim=(-0.03, 1.0))
  right.yaxis.set_major_formatter(_PERCENT)
  _lengths_axis(left, right)
  outside = first["sequence"][-1].sum()
  figures.title(
    figure,
    f"Real responses, sampled with weights in bfloat16: no token ratio of a float32 trainer leaves "
    f"its band, {outside:.0%} of the responses do at {lengths[-1]} tokens; variances add up",
  )
  figures.legend(figure)
  return figure


def _removed(axes: Axes, config: Config, rows: list[dict[str, Any]]) -> None:
  length, rate = config.counting.lengths[-1], config.counting.rates[0]
  chosen = select(rows, length=length, rate=rate)
  groups = [("majority", shift) for shift in _shifts(rows)] + [("first", "constant")]
  for place, (reward, shift) in enumerate(groups):
    for lane, (estimator, (_, colour, _, marker)) in enumerate(_ESTIMATORS.items()):
      (row,) = select(chosen, reward=reward, shift=shift, estimator=estimator)
      if estimator != "none":
        axes.scatter(
          row["removed"],
          place + 0.1 * (lane - 2),
          color=figures.PALETTE[colour],
          marker=marker,
          s=50,
        )
  axes.axvline(0, color="black", linestyle=":", linewidth=1.8)
  names = [f"{shift} shift" for _, shift in groups[:-1]] + ["reward on\nfirst token"]
  axes.set_yticks(range(len(groups)), names)
  axes.set(
    ylim=(len(groups) - 0.5, -0.5),
    xlabel="share of the bias that is removed (below 0: worse than no ratio)",
    title=f"bias, {length:,} tokens, {_nats(rate)} per token",
  )
  axes.xaxis.set_major_formatter(_PERCENT)


def _variance(axes: Axes, config: Config, rows: list[dict[str, Any]]) -> None:
  rate = config.counting.rates[-1]
  lengths = np.array(config.counting.lengths)
  for estimator, (label, colour, line, marker) in _ESTIMATORS.items():
    found = select(rows, reward="majority", shift="constant", rate=rate, estimator=estimator)
    ratio = np.exp([row["log_variance_ratio"] for row in found])
    options = {"color": figures.PALETTE[colour], "linestyle": line, "marker": marker}
    axes.plot(lengths, ratio, label=label, markersize=5, **options)
  axes.plot(lengths, np.exp(2 * rate * lengths), color="grey", linewidth=1, label="exp(2 KL T)")
  axes.set(
    yscale="log",
    ylabel="variance over that of no ratio",
    title=f"variance, constant shift, {_nats(rate)} per token",
  )
  _lengths_axis(axes)


def _error(axes: Axes, config: Config, rows: list[dict[str, Any]]) -> None:
  length, rate = config.counting.lengths[-1], config.counting.rates[0]
  samples = np.geomspace(1, 1e8, 121)
  for estimator, (_, colour, line, _) in _ESTIMATORS.items():
    (row,) = select(
      rows, reward="majority", shift="gradient", rate=rate, length=length, estimator=estimator
    )
    error = squared_error(row, samples)
    axes.plot(samples, error, color=figures.PALETTE[colour], linestyle=line)
  axes.set(
    xscale="log",
    yscale="log",
    xlabel="samples",
    ylabel="squared error / squared gradient",
    title=f"error, gradient shift, {length:,} tokens, {_nats(rate)} per token",
  )


def _crossover(axes: Axes, config: Config, rows: list[dict[str, Any]]) -> None:
  lengths = np.array(config.counting.lengths)
  ends = []
  for shift, marker in zip(_shifts(rows), "oDs^", strict=False):
    for rate, line in zip(config.counting.rates, ("-", "--"), strict=False):
      found = select(rows, reward="majority", shift=shift, rate=rate, estimator="token")
      samples = np.exp([row["log_crossover"] for row in found])
      kept = np.isfinite(samples) & (samples >= 1)
      axes.plot(
        lengths[kept],
        samples[kept],
        color="black" if line == "-" else "grey",
        marker=marker,
        linestyle=line,
        markersize=5,
      )
      if kept.any():
        ends.append((samples[kept][-1], lengths[kept][-1], f"{shift}, {rate:g}"))
  axes.set(
    yscale="log",
    ylabel="samples from which sequence beats token",
    title="crossover of squared error, by shift and KL in nats per token",
  )
  _lengths_axis(axes)
  axes.margins(y=0.12)
  axes.set_xlim(right=lengths[-1] * 4.5)
  ends.sort()
  heights = np.log([value for value, _, _ in ends])
  apart = 0.05 * np.ptp(np.log(axes.get_ylim()))  # a line of text
  for _ in range(200):
    push = np.maximum(apart - np.diff(heights), 0) / 2
    heights -= np.append(push, 0) - np.append(0, push)
  for height, (_, length, text) in zip(heights, ends, strict=True):
    axes.text(length * 1.1, np.exp(height), text, va="center", fontsize="small")


def _shifts(rows: list[dict[str, Any]]) -> list[str]:
  return list(dict.fromkeys(row["shift"] for row in rows))


def _lengths_axis(*all_axes: Axes, step: int = 4) -> None:
  for axes in all_axes:
    axes.set(xscale="log", xlabel="T, tokens")
    ticks = [4 * step**n for n in range(9)]
    low, high = axes.get_xlim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown], minor=False)
    axes.set_xticks([], minor=True)


def _nats(rate: float) -> str:
  return f"{rate:.2g} nats"
