"""What `experiments.ratio_explosion` expects, and what came out of it."""

from __future__ import annotations

from math import erf
from typing import Any

import numpy as np

from configs.ratio_explosion import Config
from experiments.harness.run import Experiment
from experiments.ratio_explosion.chains import edges, gate_length
from experiments.ratio_explosion.counting import select

OWEN = "importance sampling: Owen 2013, section 9.3"
GSPO = "GSPO, arXiv:2507.18071, eq. 7"
OUTSET = "expected at the outset of this experiment"


def moments(experiment: Experiment, config: Config, measured: list[Any]) -> None:
  """What importance sampling says of rho and log rho."""
  rates, horizon = np.array(config.chain.rates), config.chain.lengths[-1]
  experiment.golden(
    "largest |log E[rho]|",
    max(np.abs(found["log_first_moment"]).max() for found in measured),
    0.0,
    atol=1e-9,
    source=OWEN,
  )
  experiment.golden(
    "gain of log E[rho^2] per token, at each KL rate",
    [found["growth"] for found in measured],
    [found["perron"] for found in measured],
    rtol=1e-8,
    source="Perron root of mu (pi / mu)^2: Dembo & Zeitouni 1998, section 3.1",
  )
  experiment.golden(
    f"-E[log rho] / (T KL) at T = {horizon}",
    [-found["mean"][-1] for found in measured] / (rates * horizon),
    np.ones(len(rates)),
    rtol=0.02,
    source="chain rule of the KL; the first token is not stationary",
  )
  for name, key in (("Var[log rho]", "variance"), ("log E[rho^2]", "log_second_moment")):
    ratio = [found[key][-1] for found in measured] / (2 * rates * horizon)
    experiment.hypothesis(
      f"{name} / (2 T KL) at T = {horizon}, by KL rate",
      f"{name} grows by 2 KL per token.",
      ratio,
      bool(np.all(np.abs(ratio - 1) < 0.05)),
      source=OWEN,
      explanation="2 KL is the first order of a small shift; these tokens shift too far for it.",
    )
  size = np.exp(-np.array([found["log_second_moment"][-1] for found in measured]))
  experiment.hypothesis(
    f"effective sample size per sample at T = {horizon}, by KL rate",
    "It is exp(-2 KL T), within a factor of 1.5.",
    size,
    bool(np.all(np.abs(np.log(size) + 2 * rates * horizon) < np.log(1.5))),
    source=OWEN,
    explanation="An error of a few per cent in the rate is multiplied by T in the exponent.",
  )


def clipping(
  experiment: Experiment, config: Config, log_ratios: list[Any], measured: list[Any]
) -> None:
  """What bands on tokens, prefixes and responses clip."""
  chain, headline = config.chain, measured[1]
  rate = f"{chain.rates[1]:g} nats per token"
  if config.known is not None:
    experiment.golden(
      f"token ratios out of PPO's band at {rate}, at every T",
      headline["token"].max(),
      0.0,
      source="the smallest and the largest ratio of a transition are 0.95 and 1.04",
    )
    known = [
      x
      for x in zip(config.known.lengths, config.known.outside, strict=True)
      if x[0] in chain.lengths
    ]
    experiment.golden(
      f"responses out of PPO's band at {rate}, T = {' and '.join(str(x[0]) for x in known)}",
      [headline["sequence"][chain.lengths.index(length)].sum() for length, _ in known],
      [outside for _, outside in known],
      source="a histogram of log rho, propagated token by token",
    )
  law = normal_law(config, log_ratios[1])
  error = np.abs(headline["sequence"] - law).max(axis=1)
  experiment.hypothesis(
    f"error of the normal law on responses out of PPO's band, {rate}",
    "log rho ~ N(-T KL, 2 T KL): right to one per cent of the responses from T = 64 on.",
    error,
    bool(np.all(error[np.array(chain.lengths) >= 64] < 0.01)),
    source=OWEN,
  )
  late = np.array(chain.lengths) >= min(config.bands.root_length, chain.lengths[-1])
  # Of the shortest and of the longest response.
  root = np.array([found["root"].sum(axis=1)[late][[0, -1]] for found in measured])
  experiment.hypothesis(
    f"responses out of a band ~ sqrt(T), T = {np.array(chain.lengths)[late][0]} and "
    f"{chain.lengths[-1]}, by KL rate",
    "A band that grows with sqrt(T) clips and keeps the same fractions at every length, within a "
    "factor of 2.",
    root,
    bool(np.all((root[:, 1] < 2 * root[:, 0]) & (1 - root[:, 0] < 2 * (1 - root[:, 1])))),
    source="the spread of log rho grows with sqrt(T)",
    explanation="Its mean falls by KL per token and overtakes any sqrt(T): the longer the "
    "response, the more is clipped, all of it below the band.",
  )


def normal_law(config: Config, log_ratios: dict[str, Any]) -> np.ndarray:
  """[L, 2] below and above PPO's band for a normal log rho of variance 2 KL."""
  mean = log_ratios["mean"]
  z = (edges(config.bands.clip)[:, None] - mean) / np.sqrt(-2 * mean)
  cdf = 0.5 * (1 + np.vectorize(erf)(z / np.sqrt(2)))
  return np.stack([cdf[0], 1 - cdf[1]], axis=1)


def gates(experiment: Experiment, config: Config, found: list[Any]) -> None:
  """What a band on the length-normalised ratio is for long responses."""
  rates, lengths = np.array(config.chain.rates), config.chain.gate_lengths
  for name, width in (("GSPO", config.bands.gspo), ("LUSPO", config.bands.luspo)):
    beyond = rates > -edges(width)[0]
    practical = int(np.argmin(np.abs(np.array(lengths) - 4096)))
    for place in dict.fromkeys((practical, len(lengths) - 1)):
      clipped = np.array([x[name][place].sum() for x in found])
      needed = [gate_length(rate, width) for rate in rates]
      experiment.hypothesis(
        f"responses out of {name}'s band at T = {lengths[place]:,}, by KL rate",
        "As a gate the ratio is a threshold on KL per token: under 5 % or over 95 % are clipped.",
        clipped,
        bool(np.all(np.where(beyond, clipped > 0.95, clipped < 0.05))),
        source=GSPO,
        explanation="log rho / T still spreads over the edge: that takes well over 2 KL / (KL - "
        f"edge)^2 tokens, here {', '.join(f'{x:,.0f}' for x in needed)}.",
      )


def exact(experiment: Experiment, rows: list[dict[str, Any]]) -> None:
  """Estimators that are unbiased whatever the shift."""
  for name, chosen in (
    ("bias of the sequence ratio / gradient", select(rows, estimator="sequence")),
    (
      "bias of the token ratio / gradient, reward on the first token",
      select(rows, estimator="token", reward="first"),
    ),
  ):
    biases = [row["relative_bias"] for row in chosen]
    experiment.golden(f"largest {name}", max(biases), 0.0, atol=1e-9, source=OWEN)


def what_is_left(rows: list[dict[str, Any]]) -> str:
  """Why a token ratio leaves a bias: each of the other two ratios leaves one part of it."""
  left = {row["estimator"]: 1 - row["removed"] for row in rows}
  return (
    f"It leaves the error of the states that are visited and that of the rest of the response: "
    f"{left['token and rest']:.0%} and {left['prefix']:.0%} of the bias without a ratio, and "
    f"{left['token']:.0%} together, at T = {rows[0]['length']}."
  )


def token(experiment: Experiment, config: Config, rows: list[dict[str, Any]]) -> None:
  """Is a token ratio enough?"""
  rate = config.counting.rates[0]
  longest = select(rows, reward="majority", rate=rate, length=config.counting.lengths[-1])
  mild = select(rows, estimator="token", reward="majority", rate=rate)
  for shift in dict.fromkeys(row["shift"] for row in mild):
    removed = np.array([row["removed"] for row in select(mild, shift=shift)])
    experiment.hypothesis(
      f"share of the bias that a token ratio removes, {shift} shift, {rate:g} nats, by T",
      "A token ratio removes nearly all of the bias: at least 90 %.",
      removed,
      bool(np.all(removed >= 0.9)),
      source=OUTSET,
      explanation=what_is_left(select(longest, shift=shift)),
    )
  extra = np.array([row["log_variance_ratio"] for row in mild])
  experiment.hypothesis(
    f"largest log of the token ratio's variance over that of no ratio, {rate:g} nats",
    "A token ratio costs no variance: at most 1 %.",
    extra.max(),
    bool(extra.max() <= 0.01),
    source=OUTSET,
    explanation="With shared parameters the scores of a response add up. Unweighted, they have "
    "means of first order in the shift, correlated with earlier scores; weighted, they have none: "
    "the variance falls or rises.",
  )
  samples = np.exp([row["log_crossover"] for row in mild])
  experiment.hypothesis(
    f"samples from which the sequence ratio beats the token ratio, {rate:g} nats, fewest of all",
    "In mean squared error a token ratio beats the sequence ratio up to 10,000 samples.",
    samples.min(),
    bool(samples.min() >= 1e4),
    source=OUTSET,
    explanation="At short lengths or with a large remaining bias the variance of the sequence "
    "ratio is no obstacle.",
  )


def others(experiment: Experiment, config: Config, rows: list[dict[str, Any]]) -> None:
  """Prefix, geometric and sequence ratios."""
  rate, large, lengths = (
    config.counting.rates[0],
    config.counting.rates[-1],
    config.counting.lengths,
  )
  majority = select(rows, reward="majority")
  mild = {x: select(majority, estimator=x, rate=rate) for x in ("token", "prefix", "geometric")}
  gain = [p["removed"] - t["removed"] for p, t in zip(mild["prefix"], mild["token"], strict=True)]
  experiment.hypothesis(
    f"bias that a prefix ratio removes beyond a token ratio, {rate:g} nats, least and most",
    "A prefix ratio, which also corrects the states, leaves less bias than a token ratio.",
    [min(gain), max(gain)],
    bool(min(gain) >= 0),
    source="per-decision ratios: Precup, Sutton & Singh 2000",
    explanation="Under a token ratio the error of the states and that of the rest of the response "
    "can cancel; a prefix ratio removes one of them alone.",
  )
  removed = np.array([row["removed"] for row in mild["geometric"]])
  times = removed * [row["length"] for row in mild["geometric"]]
  experiment.hypothesis(
    f"bias that GSPO's exponent removes, {rate:g} nats: least and most, and times T",
    "As importance sampling the exponent 1 / T corrects almost nothing: at most 5 % of the bias.",
    [removed.min(), removed.max(), times.min(), times.max()],
    bool(removed.max() <= 0.05),
    source=GSPO,
  )
  growth = []
  for shift in dict.fromkeys(row["shift"] for row in majority):
    found = select(majority, estimator="sequence", rate=large, shift=shift)
    first, last = (row["log_variance_ratio"] for row in (found[-2], found[-1]))
    growth.append((last - first) / (lengths[-1] - lengths[-2]) / (2 * large))
  experiment.hypothesis(
    f"growth of the sequence ratio's log variance over 2 KL per token, {large:g} nats, by shift",
    "Its variance grows by a factor of exp(2 KL) per token, within a factor of 2 in the rate.",
    growth,
    bool(min(growth) > 0.5 and max(growth) < 2),
    source=OWEN,
    explanation="Squared ratios dwell on other states than the behaviour visits, where the "
    "policies differ less or more; 2 KL is the rate where every state has the same KL.",
  )


def rollouts(experiment: Experiment, config: Config, real: dict[str, Any]) -> None:
  """Real token ratios: do their variances add up?"""
  settings, length = config.rollouts, config.rollouts.lengths[-1]
  for name, found in real.items():
    within = found["k1"][1] <= found["token_variance"][0] / 2 <= found["k1"][2]
    experiment.hypothesis(
      f"{name}: KL per token (k1 and its 95 % interval), and half a token's variance",
      "Var[log ratio] of a token is 2 KL.",
      [*found["k1"], found["token_variance"][0] / 2],
      bool(within),
      source=OWEN,
    )
    for key, statement, explanation in (
      (
        "spread",
        "Var[log rho] is T times the variance of a token, at every T.",
        "Stories begin alike: the first tokens are nearly certain, and their ratios nearly 1.",
      ),
      (
        "correlation",
        "Var[log rho] is the sum of its tokens' variances, at every T: they are uncorrelated.",
        "Neighbouring tokens' errors are correlated.",
      ),
    ):
      _, low, high = found[key].T
      experiment.hypothesis(
        f"{name}: observed over predicted variance of the sequence ratio ({key}), by T",
        statement,
        found[key][:, 0],
        bool(np.all((low <= 1) & (high >= 1))),
        source=OWEN,
        explanation=explanation,
      )
    outside = [found[band][-1].sum() for band in ("token", "sequence")]
    experiment.hypothesis(
      f"{name}: tokens and responses out of PPO's band, T = {length}",
      "No token leaves the band, and some responses do.",
      outside,
      bool(outside[0] == 0 < outside[1]),
      source=OUTSET,
      explanation="The mismatch is too small for these lengths; its variance grows all the same.",
    )
    predicted = np.exp(-found["token_variance"][0] * np.array([length, settings.extrapolated]))
    size = found["sample_size"][-1]
    experiment.hypothesis(
      f"{name}: effective sample size per sample at T = {length}, what exp(-T Var) says, and says "
      f"of T = {settings.extrapolated}",
      "The variance of a token predicts the effective sample size of a response to 5 %.",
      [size, *predicted],
      bool(abs(np.log(size / predicted[0])) < 0.05),
      source=OWEN,
    )
