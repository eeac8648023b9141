"""What `experiments.ratio_explosion_trained` expects, and what came out of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from configs.ratio_explosion_trained import Config
from experiments.harness.intervals import interval
from experiments.harness.run import Experiment

OWEN = "importance sampling: Owen 2013, section 9.3"
GSPO = "GSPO, arXiv:2507.18071"
LABORATORY = "experiments.ratio_explosion"
OWN = (
  "The new policy is a function of these responses: it moved each of them as its own advantage "
  "says, far more than it moved others of the same advantage."
)
WIDE = 0.5  # half an interval about 1 that decides nothing
WORTH = 1.0  # nats^2: above it the mean of the ratio is that of a few responses


def goldens(experiment: Experiment, config: Config, found: dict[str, Any], runs: list[str]) -> None:
  """What holds for any policy."""
  experiment.golden(
    "largest |log ratio| of a token before any update",
    float(found["exact"].max()),
    0.0,
    source="the program that made the old log-probs",
  )
  number = len(config.seeds) * config.updates * config.minibatch_groups * config.group_size
  worst, falls = [], []
  for name in runs:
    held = found[name]["held_out"]
    error = np.sqrt(held["ratio_variance"].mean(axis=0) / number)
    judged = (held["variance"].mean(axis=0) < WORTH) & (error > 0)
    worst.append(np.abs((held["ratio"].mean(axis=0)[judged] - 1) / error[judged]).max())
    moved = np.any(found[name]["distance"] > 0, axis=0)
    falls.append(np.diff(held["sample_size"].mean(axis=0)[moved]).max())
  experiment.golden(
    "largest |E[rho] - 1| of held-out responses, standard errors",
    max(worst),
    0.0,
    atol=4.0,
    source=OWEN,
  )
  experiment.golden(
    "effective samples per sample fall with T, after every number of updates",
    max(falls) < 0,
    True,
    source="rho is a martingale in T: E[rho^2] does not fall",
  )


def explosion(experiment: Experiment, config: Config, found: dict[str, Any], name: str) -> None:
  """Tokens against responses, and what their log-ratios' variance says."""
  held, lengths = found[name]["held_out"], np.array(config.lengths)
  mean = {key: interval(x)[0] for key, x in held.items()}
  lost = mean["sequence"] >= 0.5
  tokens = mean["token"][lost]
  experiment.hypothesis(
    f"rate {name}: tokens out of [0.8, 1.2] where half of the responses are, least and most",
    "Where half of the responses have left the band, under 1 % of the tokens have.",
    [tokens.min(), tokens.max()] if lost.any() else [np.nan],
    bool(np.all(tokens < 0.01)),
    source=LABORATORY,
    explanation="Half of the responses do not leave it at this rate."
    if not lost.any()
    else "The log-ratio of a token has itself a spread of up to "
    f"{np.sqrt(2 * mean['k3'].max()):.2f}.",
  )
  moved = _moved(found[name])
  spread, total, divergence = (held[x][:, moved] for x in ("variance", "sum_of_variances", "k3"))
  ratio, half = interval((spread / total)[..., 1:])
  experiment.hypothesis(
    f"rate {name}: Var[log rho] over the sum of its tokens' variances, largest T, by updates",
    "The log-ratios of tokens are uncorrelated: the 95 % intervals at all T and k hold 1.",
    ratio[:, -1],
    _all_one(ratio, half),
    source=LABORATORY,
    explanation=f"Between {ratio.min():.2f} and {ratio.max():.2f}: only the score is a martingale; "
    "the means, minus the KL of each state, differ between responses and add up.",
  )
  spread, _ = interval(spread / (2 * lengths * divergence))
  experiment.hypothesis(
    f"rate {name}: Var[log rho] / (2 T KL), largest T, by updates",
    "log rho has the variance 2 T KL, to 20 %.",
    spread[:, -1],
    bool(np.all(np.abs(spread[:, -1] - 1) < 0.2)),
    source=OWEN,
    explanation="That is the first order of a small shift with uncorrelated tokens.",
  )
  normal = normal_share(lengths * held["k3"]).mean(axis=0)
  error = np.abs(normal - mean["sequence"])[:, -1]
  experiment.hypothesis(
    f"rate {name}: error of the normal law on the responses out of [0.8, 1.2], largest T",
    "log rho ~ N(-T KL, 2 T KL): right to 5 % of the responses.",
    error,
    bool(error.max() < 0.05),
    source=OWEN,
    explanation="Responses are not equally far: log rho is a mixture, with long tails.",
  )
  factor, _ = interval(held["sample_size"] / np.exp(-held["variance"]))
  floor = mean["variance"] < WORTH
  experiment.hypothesis(
    f"rate {name}: effective samples per sample over exp(-Var[log rho]), variance below {WORTH:g}",
    "It is exp(-Var[log rho]), within a factor of 1.25.",
    [factor[floor].min(), factor[floor].max()],
    bool(np.all(np.abs(np.log(factor[floor])) < np.log(1.25))),
    source=OWEN,
    explanation="exp(Var) is E[rho^2] of a normal log rho only.",
  )


def drift(experiment: Experiment, config: Config, found: dict[str, Any], name: str) -> None:
  """How far the updates carry."""
  held, distance = found[name]["held_out"], found[name]["distance"]
  slope, half = interval(_exponents(config, distance, held["k3"][..., -1]))
  length, _ = interval(_exponents(config, distance, distance**2))
  experiment.hypothesis(
    f"rate {name}: exponent of the KL in the number of updates, and its 95 % interval",
    "Updates drift in one direction, exponent 2, and do not diffuse, exponent 1.",
    [slope, slope - half, slope + half],
    None if abs(slope - 2) < half > abs(slope - 1) else bool(abs(slope - 2) < half),
    source="a sum of equal steps, all alike or all independent",
    explanation=f"The squared distance of the parameters grows with the power {length:.2f}; far "
    "from the start the KL is no longer quadratic in it.",
  )
  size, _ = interval(held["sample_size"])
  experiment.hypothesis(
    f"rate {name}: effective samples per sample at the largest T, by updates",
    "It falls with every further update.",
    size[:, -1],
    bool(np.all(np.diff(size[:, -1]) < 0)),
    source="a rollout that grows stale",
    explanation="The policy can come nearer again.",
  )


def rules(experiment: Experiment, config: Config, found: dict[str, Any], name: str) -> None:
  """What clips leave out, and what training on a response does to its ratio."""
  held = {key: interval(x)[0][:, -1] for key, x in found[name]["held_out"].items()}
  with np.errstate(divide="ignore"):
    ratio = held["GSPO leaves out"] / held["GRPO leaves out"]
  experiment.hypothesis(
    f"rate {name}: share of the tokens that GSPO's clip leaves out over GRPO's, by updates",
    "GSPO clips two orders of magnitude more tokens than GRPO: 30 to 300 times as many.",
    ratio,
    bool(np.all((ratio > 30) & (ratio < 300))),
    source=f"{GSPO}, section 5.2",
    explanation=f"GRPO leaves out {held['GRPO leaves out'].min():.2%} to "
    f"{held['GRPO leaves out'].max():.2%}, GSPO {held['GSPO leaves out'].min():.0%} to "
    f"{held['GSPO leaves out'].max():.0%} at any distance: the factor is a matter of staleness.",
  )
  trained = found[name]["trained"]
  ratio, half = interval(trained["ratio"])
  experiment.hypothesis(
    f"rate {name}: E[rho] of the responses that were trained on, by T",
    "E[rho] = 1 on them, too: the 95 % intervals at all T hold it.",
    ratio,
    _all_one(ratio, half),
    source="what a monitor of the mean ratio assumes",
    explanation=OWN if np.any(np.abs(ratio - 1) > half) else "The intervals are too wide.",
  )
  spread, half = interval(
    trained["variance"][:, -1] / found[name]["held_out"]["variance"][:, -1, -1]
  )
  experiment.hypothesis(
    f"rate {name}: Var[log rho], trained on over held out, and its 95 % interval",
    "Stale responses that were trained on have the ratios of fresh ones: 1.",
    [spread, spread - half, spread + half],
    _all_one(spread, half),
    source="measuring staleness on the training batch",
    explanation=OWN,
  )
  own, own_half = interval(trained["pull"][:, -1])
  other, other_half = interval(found[name]["held_out"]["pull"][:, -1, -1])
  experiment.hypothesis(
    f"rate {name}: mean of advantage x log rho, trained on and held out, nats per response",
    "It is as large on held-out responses: what was learned holds for others.",
    [own, other],
    None if abs(own - other) < own_half + other_half else bool(own < other),
    source="the surrogate's estimate of its own improvement",
    explanation=OWN,
  )


def cold(experiment: Experiment, found: dict[str, Any], name: str) -> None:
  """The first update of an optimiser that has seen nothing."""
  moved = found[name]["distance"][:, 0] > 0
  divergences = (found[x]["held_out"]["k3"][moved, 0, -1] for x in ("cold", name))
  ratio, half = interval(np.divide(*divergences)) if moved.sum() > 1 else (np.nan, np.nan)
  experiment.hypothesis(
    f"rate {name}: KL of the first update of a fresh Adam over one with moments, 95 % interval",
    "What an update does depends on its learning rate, not on the moments: the ratio is 1.",
    [ratio, ratio - half, ratio + half],
    _all_one(ratio, half),
    source="staleness counted in updates",
    explanation="With empty moments every parameter moves by the whole learning rate; later noise "
    "cancels in the mean of gradients, not in that of their squares.",
  )


def normal_share(divergence: np.ndarray) -> np.ndarray:
  """Share of a normal log rho of mean -KL and variance 2 KL out of [0.8, 1.2]."""
  spread = np.sqrt(2 * np.maximum(divergence, 1e-12))
  below, above = special.ndtr(
    [(np.log(0.8) + divergence) / spread, -(np.log(1.2) + divergence) / spread]
  )
  return below + above


def _exponents(config: Config, distance: np.ndarray, values: np.ndarray) -> np.ndarray:
  """[S] of values [S, K] ~ k^a, k updates from the last one that was idle at the beginning on."""
  after, slopes = np.array(config.staleness), []
  for moved, y in zip(distance > 0, values, strict=True):
    k = after[moved] - after[~moved].max(initial=0)
    slopes.append(np.polyfit(np.log(k), np.log(y[moved]), 1)[0] if len(k) > 1 else np.nan)
  return np.array(slopes)


def _moved(found: dict[str, Any]) -> np.ndarray:
  """[K] whether every seed has moved: an update whose groups have equal rewards is idle."""
  return np.all(found["distance"] > 0, axis=0)


def _all_one(values: Any, half: Any) -> bool | None:
  """Whether all intervals hold 1; None if they do and say little."""
  if np.any(np.abs(values - 1) > half):
    return False
  return None if np.any(half > WIDE) else True
