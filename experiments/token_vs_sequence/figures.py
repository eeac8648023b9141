"""Figures of `experiments.token_vs_sequence`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from configs.token_vs_sequence import Config
from experiments.harness import figures
from experiments.harness.figures import PALETTE

_POLICIES = {"table": (0.16, "blue", "o"), "network": (-0.16, "vermilion", "D")}
_CLIPS = {
  "sequence ratio": ("ratio per response", "black", "-", "."),
  "token ratio": ("ratio per token", "blue", "-", "o"),
  "token clip": ("clip per token", "sky", "--", "s"),
  "sequence clip": ("clip per response", "vermilion", "--", "^"),
}
_MEANINGS = {
  "returns": ("returns: $\\gamma^{n-1-t}\\, r$", "blue", "o"),
  "objective": ("objective: $\\gamma^{n-1}\\, r$", "green", "s"),
  "prefactor": ("prefactor: $\\gamma^t\\, r$", "vermilion", "^"),
}


@figures.style()
def breakers(config: Config, found: dict[str, Any]) -> Figure:
  """The headline: what breaks the identity, and by how much."""
  figure = Figure(figsize=(12.5, 6.4))
  panels = figure.subplots(1, 3, sharey=True)
  names = list(_summary(config, found["table"]))[::-1]
  for policy, (offset, colour, marker) in _POLICIES.items():
    rows = _summary(config, found[policy])
    look = {"color": PALETTE[colour], "marker": marker, "linestyle": "none", "markersize": 5}
    for y, name in enumerate(names):
      row, variance = rows[name]
      numbers = (row["apart"], row["bias"], row["variance"] / variance)
      for axes, x in zip(panels, numbers, strict=True):
        axes.plot(x, np.full(x.shape, y + offset), label=policy, alpha=0.75, **look)
  apart, bias, variance = panels
  apart.set_yticks(range(len(names)), names)
  for axes in (apart, bias):
    axes.set_xscale("symlog", linthresh=1e-2)
    axes.set_xlim(-1e-3, 1.2)
  apart.set(title="sample by sample", xlabel="rms distance from the sequence's / its rms")
  bias.set(title="in expectation", xlabel="bias / |gradient of the target|")
  variance.axvline(1.0, color="black", linewidth=0.8)
  variance.set(title="noise", xlabel="variance / the sequence's", xscale="log")
  ticks = (0.2, 0.4, 0.6, 0.8, 1.0)
  variance.set_xticks(ticks, [f"{x:g}" for x in ticks])
  variance.set_xticks([], minor=True)
  figures.title(
    figure,
    "Token by token or as a whole, the gradient of a response is the same; each addition breaks "
    "that, with or without a bias (one mark per prompt)",
  )
  figures.legend(figure)
  return figure


def _summary(config: Config, found: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Any]]:
  """Label -> (row, variance of the sequence's update on the same target)."""
  critic, clip, discount = found["critic"], found["clip"]["random"], found["discount"]
  kl, middle = found["kl"]["gradient"], f"{config.critic.gae_lambda:g}"
  rows = {
    "identity: r - V(x)": (critic["sequence"], critic["sequence"]["variance"]),
    **{
      label: (critic[row], critic["sequence"]["variance"])
      for label, row in {
        "exact critic, λ = 1": "exact critic, lambda 1",
        f"exact critic, λ = {middle}": f"exact critic, lambda {middle}",
        "exact critic, λ = 0: A": "exact critic, lambda 0",
        f"wrong critic, λ = {middle}": f"wrong critic, lambda {middle}",
      }.items()
    },
    **{
      label: (kl[row], kl["sequence"]["variance"])
      for label, row in {
        "KL per token, to go": "token, to go",
        "KL per token, immediate": "token, immediate",
        "KL per token, k3 in the loss": "token, k3 in the loss",
      }.items()
    },
  }
  near = len(config.clip.nats) - 2
  for name in ("token ratio", "token clip", "sequence clip"):
    label = f"{_CLIPS[name][0]}, {config.clip.nats[near]:g} nats off"
    row = {key: x[near] for key, x in clip[name].items()}
    rows[label] = (row, clip["sequence ratio"]["variance"][near])
  middle_discount = len(config.discounts) // 2
  for name in _MEANINGS:
    row = {key: x[middle_discount] for key, x in discount[name].items()}
    label = f"discount {config.discounts[middle_discount]:g} in the {name}"
    rows[label] = (row, critic["sequence"]["variance"])
  return rows


@figures.style()
def clips(config: Config, found: dict[str, Any]) -> Figure:
  """Distance, direction, noise and share stopped, as the policy leaves the sampler."""
  figure = Figure(figsize=(13.0, 6.6))
  nats = config.clip.nats
  titles = {"gradient": "moved along the gradient", "random": "moved at random"}
  for row, (way, title) in zip(figure.subplots(2, 4, sharex=True), titles.items(), strict=True):
    base = found[way]["sequence ratio"]["variance"]
    for name, (label, colour, line, marker) in _CLIPS.items():
      got = found[way][name]
      look = {"color": PALETTE[colour], "linestyle": line, "marker": marker, "markersize": 5}
      apart = got["apart"].mean(axis=1)  # of the ratio per response 0, which has no logarithm
      row[0].plot(nats, np.where(apart > 1e-6, apart, np.nan), label=label, **look)
      row[1].plot(nats, got["cosine"].mean(axis=1), **look)
      row[2].plot(nats, (got["variance"] / base).mean(axis=1), **look)
      row[3].plot(nats, got["zero"].mean(axis=1), **look)
    row[0].set(title=f"{title}: distance", ylabel="rms from the ratio per response", yscale="log")
    row[0].set_ylim(5e-3, 1.2)
    row[1].set(title="direction", ylabel="cosine with grad J")
    row[2].set(title="noise", ylabel="variance / ratio per response")
    row[3].set(title="stopped", ylabel="tokens of coefficient 0")
    row[3].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    row[0].set_xscale("log")
    row[0].yaxis.set_minor_formatter(NullFormatter())
  for axes in figure.axes[-4:]:
    axes.set_xlabel("KL, nats per response")
  figures.title(
    figure,
    "Off-policy the identity ends as the root of the KL; a clip per response acts first, and where "
    "the policy has moved up the gradient both stop what moved it (means over prompts)",
  )
  figures.legend(figure)
  return figure


@figures.style()
def discounts(config: Config, found: dict[str, Any], curl: dict[str, Any]) -> Figure:
  """Weights of the tokens, direction, length and curl of the three meanings."""
  figure = Figure(figsize=(13.0, 4.2))
  weights, direction, length, turning = figure.subplots(1, 4)
  values, horizon = np.array(config.discounts), config.setting.horizon
  shown, place = values[len(values) // 2], np.arange(horizon)
  powers = {"returns": place[::-1], "objective": np.full(horizon, horizon - 1), "prefactor": place}
  for name, (label, colour, marker) in _MEANINGS.items():
    look = {"color": PALETTE[colour], "marker": marker, "markersize": 5}
    weights.plot(place + 1, shown ** powers[name], label=label, **look)
    direction.plot(values, found[name]["cosine"].mean(axis=1), **look)
    change = found[name]["drift_correct"] - found["none"]["drift_correct"]
    length.plot(values, change.mean(axis=1), **look)
    turning.plot(values, curl["table"][name], **look)
  weights.set(xlabel="token", ylabel="weight of the reward")
  weights.set_title(f"a response of {horizon} tokens, γ = {shown:g}")
  direction.set(xlabel="γ", ylabel="cosine with grad J", title="direction")
  length.axhline(0.0, color="black", linewidth=0.8)
  length.set(xlabel="γ", ylabel="tokens per unit of J, less grad J's", title="length if correct")
  turning.set(xlabel="γ", ylabel="antisymmetric / whole Jacobian", title="curl")
  figures.title(
    figure,
    "Three meanings of a discount: in the returns it favours late tokens and ascends no function, "
    "in the objective it favours none; both shorten right responses",
  )
  figures.legend(figure)
  return figure
