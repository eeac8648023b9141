"""From paths of reward and KL to numbers with intervals over seeds."""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from experiments.harness.intervals import interval
from experiments.stories.frontier import Curve


class Mean(NamedTuple):
  """A mean over seeds.

  Attributes:
    value: the mean.
    error: its standard error.
    half: of its 95 % t interval.
  """

  value: float
  error: float
  half: float

  @property
  def resolved(self) -> bool:
    """Whether the interval leaves out 0."""
    return abs(self.value) > self.half

  def __str__(self) -> str:
    return f"{self.value:.3g} +- {self.half:.2g}"


def mean(values: Any) -> Mean:
  """Of one number for each seed, at least two."""
  x = np.asarray(values, float)
  error = float(x.std(ddof=1) / np.sqrt(len(x)))
  value, half = interval(x)
  return Mean(float(value), error, float(half))


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """[E] means over the seeds [S, E] and the half widths of their intervals."""
  found = [mean(column) for column in values.T]
  return np.array([x.value for x in found]), np.array([x.half for x in found])


def stacked(paths: list[dict[str, Any]]) -> dict[str, Any]:
  """The runs of an algorithm: [S, E] of what a run has by evaluation, [S] of the rest."""
  first = paths[0]["rewards"]
  names = ("kl", "kl_k3", "length", "finished", "clipped", "cpu_seconds")
  return {
    "step": paths[0]["step"],
    "reward": np.array([path["rewards"]["total"] for path in paths]),
    "components": {x: np.array([p["rewards"][x] for p in paths]) for x in first if x != "total"},
    **{name: np.array([path[name] for path in paths]) for name in names},
  }


def reward_at(runs: dict[str, Any], kl: float) -> np.ndarray:
  """[S] reward where each run first reached a KL, on straight lines between its evaluations."""
  farthest = np.maximum.accumulate(runs["kl"], axis=1)
  pairs = zip(farthest, runs["reward"], strict=True)
  return np.array([np.interp(kl, *pair) for pair in pairs])


def steps_to(runs: dict[str, Any], reward: float) -> np.ndarray:
  """[S] steps until each run first had a reward, on straight lines; NaN if it never had."""
  highest = np.maximum.accumulate(runs["reward"], axis=1)
  return np.array([np.interp(reward, x, runs["step"], right=np.nan) for x in highest])


def exponents(runs: dict[str, Any], curve: Curve) -> np.ndarray:
  """[S] a of gain ~ KL^a, from the first evaluation after the start to the last one below 95 %.

  NaN where that is fewer than two, or a run has gained nothing.
  """
  used = (runs["step"] > 0) & (runs["reward"].mean(axis=0) < 0.95 * curve.reward[-1])
  gains, kl = runs["reward"][:, used] - curve.reward[0], runs["kl"][:, used]
  if used.sum() < 2 or min(gains.min(), kl.min()) <= 0:
    return np.full(len(gains), np.nan)
  pairs = zip(np.log(kl), np.log(gains), strict=True)
  return np.array([np.polyfit(*pair, 1)[0] for pair in pairs])


def matched_kl(table: dict[str, Any]) -> float:
  """The largest KL that every run has reached."""
  return float(min(runs["kl"].max(axis=1).min() for runs in table.values()))


def rows(table: dict[str, Any], curve: Curve) -> dict[str, dict[str, Any]]:
  """What became of each algorithm, as means over seeds."""
  kl = matched_kl(table)
  found = {}
  for name, runs in table.items():
    reward, spent = runs["reward"], runs["kl"]
    found[name] = {
      "reward at start": mean(reward[:, 0]),
      "reward at end": mean(reward[:, -1]),
      "rise": mean(reward[:, -1] - reward[:, 0]),
      "mean reward over the run": mean(reward.mean(axis=1)),
      "steps to half of the most": mean(steps_to(runs, curve.reward[-1] / 2)),
      "gain ~ KL to the power": mean(exponents(runs, curve)),
      "KL at end": mean(spent[:, -1]),
      "reward at matched KL": mean(reward_at(runs, kl)),
      "share at matched KL": mean(_share(curve, reward_at(runs, kl), kl)),
      "KL over the least for its reward": mean(spent[:, -1] / curve.least_kl(reward[:, -1])),
      "length": mean(runs["length"][:, -1]),
      "finished": mean(runs["finished"][:, -1]),
      "clipped": mean(runs["clipped"]),
    }
  return found


def _share(curve: Curve, reward: Any, kl: Any) -> Any:
  """Gain in reward over that of the best policy at the same KL."""
  return (reward - curve.reward[0]) / (curve.at(kl) - curve.reward[0])


def pairs(table: dict[str, Any]) -> dict[str, dict[str, Mean]]:
  """Differences of all pairs, of runs of the same seed: at matched KL, and at the end."""
  kl = matched_kl(table)
  found = {}
  for one, other in combinations(table, 2):
    a, b = table[one], table[other]
    found[f"{one} - {other}"] = {
      "reward at matched KL": mean(reward_at(a, kl) - reward_at(b, kl)),
      "reward at end": mean(a["reward"][:, -1] - b["reward"][:, -1]),
      "KL at end": mean(a["kl"][:, -1] - b["kl"][:, -1]),
    }
  return found
