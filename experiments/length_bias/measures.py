"""Bias, variance and drift of length of every reduction; nothing of it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from configs.length_bias import Difficulty, Filler
from experiments.length_bias.setting import (
  SCALINGS,
  Problem,
  drifts,
  grpo,
  lengths,
  reductions,
)
from jaxrl_lm.exact import (
  Moments,
  bias_variance,
  enumerate_language,
  first_token_reward,
  tabular_policy,
)
from jaxrl_lm.exact.problem import target_gradient

Track = Callable[[Iterable[Any]], Iterable[Any]]


def reference(problem: Problem) -> dict[str, Any]:
  """P(correct) and mean lengths [P] of the policy, and their drift along the true gradient."""
  policy = problem.policy
  gradient = target_gradient(policy, problem.rewards)
  along = drifts(problem, gradient)
  return {
    **lengths(policy.language, policy.logprobs(), problem.rewards)._asdict(),
    "drift_wrong": along.length_wrong,
    "drift_correct": along.length_correct,
  }


def decomposition(problem: Problem, alphas: tuple[float, ...], track: Track) -> dict[str, Any]:
  """Every reduction x scaling: [P] each, by the names of both.

  cosine, scale: of the expected update with grad J, per prompt. bias: |E[g] / scale - grad J| /
  |grad J|, of the rescaled update. variance: relative to (scale |grad J|)^2. drift_wrong,
  drift_correct: d length / d J along the expected update. batch_cosine: of the sum over prompts.
  """
  table: dict[str, Any] = {}
  rows = reductions(alphas, problem.policy.language.horizon)
  pairs = [(name, scaling) for name in rows for scaling in SCALINGS]
  for name, scaling in track(pairs):
    objective = grpo(rows[name], SCALINGS[scaling])
    moments = bias_variance(
      objective, problem.policy, problem.rewards, group_size=problem.group_size
    )
    table.setdefault(name, {})[scaling] = described(problem, moments)
  return table


def described(problem: Problem, moments: Moments) -> dict[str, Any]:
  along = drifts(problem, moments.mean)
  return {
    "cosine": moments.cosine,
    "scale": moments.scale,
    "bias": moments.rescaled().relative_bias,
    "variance": moments.relative_variance,
    "drift_wrong": along.length_wrong,
    "drift_correct": along.length_correct,
    "batch_cosine": moments.averaged().cosine[0],
  }


def frontier(
  problem: Problem, alphas: tuple[float, ...], groups: tuple[int, ...], track: Track
) -> dict[str, Any]:
  """Bias and variance of the whole batch's update, rescaled to the gradient's size, over alpha.

  bias, variance: [A], relative to the gradient. mse: [A, n] of the mean of n batches. best: [n]
  alpha of least MSE. crossover: [A] number of batches from which alpha = 0 has a lower MSE.
  """
  rows = []
  for alpha in track(alphas):
    objective = grpo(partial(rl.length_power, alpha=alpha))
    moments = bias_variance(
      objective, problem.policy, problem.rewards, group_size=problem.group_size
    )
    whole = moments.averaged().rescaled()
    square = float(np.sum(whole.target**2))
    rows.append((whole.relative_bias[0], whole.variance[0] / square))
  bias, variance = np.array(rows).T
  mse = bias[:, None] ** 2 + variance[:, None] / np.asarray(groups)
  saved = variance[alphas.index(0.0)] - variance
  biased = np.where(bias > 1e-6, bias, np.nan)
  return {
    "bias": bias,
    "variance": variance,
    "mse": mse,
    "best": np.asarray(alphas)[mse.argmin(axis=0)],
    "crossover": saved / biased**2,
  }


def filler_problem(settings: Filler, group_size: int) -> Problem:
  """Two first tokens, one of them right; then filler, until the end or the horizon.

  One right and one wrong branch: then "given that the response is wrong" is "within the wrong
  branch", where the reward is constant and the true gradient can change nothing. (With two wrong
  first tokens the gradient would move probability between branches of different length.)
  """
  language = enumerate_language(3, settings.horizon, end_token=2)
  first = np.log([1.0 - settings.correct, settings.correct, 1e-30])  # no response is empty
  later = np.log([(1.0 - settings.end) / 2] * 2 + [settings.end])
  logits = np.concatenate([first[None], np.tile(later, (language.num_states - 1, 1))])
  policy = tabular_policy(language, logits[None])
  return Problem(policy, first_token_reward(language, [1]), group_size)


def filler(settings: Filler, track: Track) -> dict[str, Any]:
  """Drift of length within each branch, per unit of J: {reduction: [group sizes]}."""
  names = {"sum": rl.sequence_sum, "token mean": rl.token_mean, "sequence mean": rl.sequence_mean}
  table: dict[str, Any] = {name: {"wrong": [], "correct": [], "cosine": []} for name in names}
  for size in track(settings.group_sizes):
    problem = filler_problem(settings, size)
    for name, weights in names.items():
      moments = bias_variance(grpo(weights), problem.policy, problem.rewards, group_size=size)
      along = drifts(problem, moments.mean)
      table[name]["wrong"].append(float(along.length_wrong[0]))
      table[name]["correct"].append(float(along.length_correct[0]))
      table[name]["cosine"].append(float(moments.cosine[0]))
  gradient = drifts(problem, target_gradient(problem.policy, problem.rewards))
  table["gradient"] = [float(gradient.length_wrong[0]), float(gradient.length_correct[0])]
  return table


def difficulty(problem: Problem, settings: Difficulty, track: Track) -> dict[str, Any]:
  """Size of the update in units of the gradient, measured and by formula, over P(correct).

  Of a family of one-token policies, [group sizes, P]: std (ddof 0) and its formula, leave one out,
  and the part of the groups that dynamic sampling keeps, by which it divides either. reference:
  std on the prompts of the problem.
  """
  correct = np.asarray(settings.correct)
  std = partial(rl.group_normalized, ddof=0, eps=0.0)
  language = enumerate_language(2, 1)
  logits = np.log(np.stack([1.0 - correct, correct], axis=-1))[:, None]
  policy = tabular_policy(language, logits)
  rewards = first_token_reward(language, [1] * len(correct))
  table: dict[str, Any] = {name: [] for name in ("std", "leave one out", "kept", "formula")}
  for size in track(settings.group_sizes):
    for name, advantages in (("std", std), ("leave one out", rl.leave_one_out)):
      objective = grpo(rl.sequence_sum, advantages)
      table[name].append(bias_variance(objective, policy, rewards, group_size=size).scale)
    table["formula"].append(std_weight(correct, size))
    # Groups without signal have no update: what is left is divided by the part that is kept.
    outcomes = (np.arange(size) < np.arange(size + 1)[:, None]).astype(float)
    kept = np.asarray(rl.has_signal(jnp.asarray(outcomes))).astype(float)
    table["kept"].append(_binomial(correct, size) @ kept)
  one = grpo(rl.sequence_sum, std)
  measured = bias_variance(one, problem.policy, problem.rewards, group_size=problem.group_size)
  at = np.asarray(lengths(problem.policy.language, problem.policy.logprobs(), problem.rewards)[0])
  return {
    **{name: np.stack(rows) for name, rows in table.items()},
    "reference": measured.scale,
    "reference_formula": std_weight(at, problem.group_size),
  }


def std_weight(correct: np.ndarray, size: int) -> np.ndarray:
  """w_G(p) = E_{K ~ Bin(G, p)} sqrt(K (G - K)) / (G p (1 - p))."""
  k = np.arange(size + 1)
  expected = _binomial(correct, size) @ np.sqrt(k * (size - k))
  return expected / (size * correct * (1.0 - correct))


def _binomial(correct: np.ndarray, size: int) -> np.ndarray:
  """[P, G + 1] P(K of G are correct)."""
  k, p = np.arange(size + 1), correct[:, None]
  ways = np.array([math.comb(size, int(i)) for i in k], float)
  return ways * p**k * (1.0 - p) ** (size - k)
