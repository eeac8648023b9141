r"""Exact bias and variance of any group estimator against the true policy gradient.

An update of a group of G samples is the gradient of the library's own loss,

  g = -grad loss = sum_i sum_t kappa_it grad log pi(y_it | s_it)

with coefficients kappa that depend on the other samples through their class only
(`classes`). So E[g] and E|g|^2 over all N^G groups are finite sums over multisets of classes:

  E[g]     = sum_m P(m) sum_c k_c mu_c(m)
  E|g|^2   = sum_m P(m) [ |sum_c k_c mu_c(m)|^2 + sum_c k_c (q_c(m) - |mu_c(m)|^2) ]

where mu_c(m) and q_c(m) are the mean and the mean square of a member's term kappa . score, over
the members of class c. Nothing is sampled, and no estimator is written a second time:
`advantages`, `loss_weights` and the derivative of `objective_loss` are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxrl_lm.exact.backward_induction import expected_reward, response_probs
from jaxrl_lm.exact.classes import (
  Classes,
  Kinds,
  classify,
  enumerate_groups,
  group_probs,
  kinds_of_groups,
)
from jaxrl_lm.exact.coefficients import Patterns, loss_of_prompt, patterns_of_prompt
from jaxrl_lm.exact.language import Language
from jaxrl_lm.exact.problem import Scoring, check_problem, target_gradient, unit_direction
from jaxrl_lm.exact.scores import pull_back, score_gram, slopes
from jaxrl_lm.exact.tabular import Policy
from jaxrl_lm.objectives import Objective

_NUMBERS = 2**28  # most numbers in the mean terms of the patterns


class Moments(NamedTuple):
  """Mean and variance of an update, beside the gradient it estimates; one entry per prompt.

  Attributes:
    mean: [P, D] E[g], parameters flattened as `ravel_pytree` does.
    target: [P, D] gradient of the target.
    variance: [P] total variance E|g - E[g]|^2 of one group's update.
    directional_variance: [P] variance of the component along `direction`; None without one.
    standard_error: [P] of |mean|: how far a sampled mean may be off, root of variance / samples;
      0 when nothing was sampled.
  """

  mean: np.ndarray
  target: np.ndarray
  variance: np.ndarray
  directional_variance: np.ndarray | None
  standard_error: np.ndarray

  @property
  def bias(self) -> np.ndarray:
    """[P] |E[g] - target|."""
    return np.linalg.norm(self.mean - self.target, axis=-1)

  @property
  def relative_bias(self) -> np.ndarray:
    """[P] |E[g] - target| / |target|."""
    return _quotient(self.bias, np.linalg.norm(self.target, axis=-1))

  @property
  def cosine(self) -> np.ndarray:
    """[P] cosine of the expected update with the target's gradient."""
    product = np.linalg.norm(self.mean, axis=-1) * np.linalg.norm(self.target, axis=-1)
    return _quotient((self.mean * self.target).sum(axis=-1), product)

  @property
  def scale(self) -> np.ndarray:
    """[P] <E[g], target> / |target|^2: the size of the update in units of the gradient."""
    return _quotient((self.mean * self.target).sum(axis=-1), (self.target**2).sum(axis=-1))

  @property
  def relative_variance(self) -> np.ndarray:
    """[P] variance / |scale target|^2: noise over signal, whatever the estimator's size."""
    return _quotient(self.variance, self.scale**2 * (self.target**2).sum(axis=-1))

  def mse(self, n: Any = 1) -> np.ndarray:
    """Mean squared error of the average of n groups' updates: bias^2 + variance / n.

    Args:
      n: number of groups; a number, or an array [..., 1] for several.

    Returns:
      [P], or [..., P].
    """
    return self.bias**2 + self.variance / n

  def rescaled(self) -> Moments:
    """The estimator divided by its `scale`: compares directions, not step sizes.

    Returns:
      The moments of g / scale.
    """
    size = self.scale
    along = self.directional_variance
    return self._replace(
      mean=self.mean / size[:, None],
      variance=self.variance / size**2,
      directional_variance=None if along is None else along / size**2,
      standard_error=self.standard_error / np.abs(size),
    )

  def averaged(self) -> Moments:
    """The average over prompts, each with a group of its own.

    Returns:
      The moments of the batch's update, P = 1; the target is the mean of the targets.
    """
    count = len(self.variance)
    along = self.directional_variance
    return Moments(
      self.mean.mean(axis=0, keepdims=True),
      self.target.mean(axis=0, keepdims=True),
      self.variance.sum(keepdims=True) / count**2,
      None if along is None else along.sum(keepdims=True) / count**2,
      np.sqrt((self.standard_error**2).sum(keepdims=True)) / count,
    )


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """x / y, NaN or infinite where a target or an update has no gradient."""
  with np.errstate(divide="ignore", invalid="ignore"):
    return x / y


def bias_variance(
  objective: Objective,
  policy: Policy,
  rewards: Any,
  *,
  group_size: int,
  advantages: Callable[..., Any] | None = None,
  statistic: Any = None,
  old_logprobs: Any = None,
  sampler_logprobs: Any = None,
  importance_weights: Any = None,
  ref_logprobs: Any = None,
  kl: Callable[..., jax.Array] | None = None,
  kl_coef: float = 0.0,
  target: Callable[..., jax.Array] = expected_reward,
  direction: Any = None,
  max_groups: int = 2_000_000,
) -> Moments:
  r"""Exact mean and variance of an objective's update, against the gradient of a target.

  Every prompt is measured by itself: the update batch is one group, drawn with replacement from
  the sampler. What couples prompts (a batch std, a token mean over several groups, a selection)
  is measured on the whole batch by `sampled_bias_variance`.

  Inside `with jax.enable_x64(True)`: a variance is a difference of two sums.

  Args:
    objective: a row of the table, or one of your own. Its gain must be a sum over responses.
    policy: P prompts, at the parameters where the gradient is taken.
    rewards: [P, N] reward of every response.
    group_size: samples per group G.
    advantages: (rewards [1, G], mask [1, G, T]) -> [1, G] or [1, G, T], for an objective whose
      advantages need more than the rewards; None = objective.advantages(rewards).
    statistic: [P, N] or [P, N, S], what of a response the other samples' weights depend on;
      None = its reward and length. That it suffices is checked.
    old_logprobs: [P, N, T] of the policy that ratios are taken against; None = on-policy.
    sampler_logprobs: [P, N, T] of the policy that drew the samples; None = the old one.
    importance_weights: [P, N, T] from `corrections`; None = 1.
    ref_logprobs: [P, N, T] of the reference, for the KL term. Goes with `kl`.
    kl: estimator of the KL term.
    kl_coef: its weight.
    target: (language, logprobs [P, N, T], rewards) -> [P]: `expected_reward`, or a partial of
      `regularised_reward` or `pass_at_k`.
    direction: pytree like the parameters; the variance along it is returned too.
    max_groups: most multisets of classes to enumerate.

  Returns:
    The moments, one entry per prompt.

  Raises:
    ValueError: a shape is wrong; the policy's probabilities do not sum to 1; there are too many
      groups, or too many different updates; the statistic does not determine the estimator; an
      update that the sampler draws, or the target's gradient, is not finite; numbers are not of 64
      bits.
    TypeError: the objective's advantages need more than the rewards.

  Example:
    >>> import jaxrl_lm as rl
    >>> from jaxrl_lm.exact import enumerate_language, modular_sum_reward, tabular_policy
    >>> language = enumerate_language(3, 3, end_token=2)
    >>> rewards = modular_sum_reward(language, [1])
    >>> with jax.enable_x64(True):
    ...   policy = tabular_policy(language, np.zeros((1, language.num_states, 3)))
    ...   grpo, rloo = (bias_variance(x, policy, rewards, group_size=4) for x in (rl.GRPO, rl.RLOO))
    >>> grpo.cosine.round(3), rloo.relative_bias.round(9)
    (array([0.961]), array([0.]))
  """
  scoring = Scoring(old_logprobs, importance_weights, ref_logprobs, kl, kl_coef)
  rewards = check_problem(policy, rewards, scoring, sampler_logprobs)
  direction = unit_direction(policy, direction)
  language, logprobs = policy.language, policy.logprobs()
  sampler = next(x for x in (sampler_logprobs, old_logprobs, logprobs) if x is not None)
  probs = np.asarray(response_probs(language, jnp.asarray(sampler)))

  classes = classify(language, rewards, statistic)
  groups = enumerate_groups(len(classes.members), group_size, limit=max_groups)
  kinds = kinds_of_groups(objective, language, rewards, classes, groups, advantages)
  gradient = target_gradient(policy, rewards, target)
  done = [
    _prompt_moments(objective, policy, p, probs[p], classes, kinds, scoring, logprobs, direction)
    for p in range(policy.num_prompts)
  ]
  mean, variance, along = (np.stack(x) for x in zip(*done, strict=True))
  return Moments(
    mean, gradient, variance, None if direction is None else along, np.zeros_like(variance)
  )


def _prompt_moments(
  objective: Objective,
  policy: Policy,
  prompt: int,
  probs: np.ndarray,
  classes: Classes,
  kinds: Kinds,
  scoring: Scoring,
  logprobs: jax.Array,
  direction: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean [D], total variance and variance along the direction, of one prompt's update."""
  language, ids = policy.language, classes.ids[prompt]
  class_probs = np.bincount(ids, probs, len(classes.members))
  within = probs / np.where(class_probs > 0, class_probs, 1.0)[ids]
  # What the sampler never draws has no update, finite or not.
  members = [np.flatnonzero((ids == k) & (probs > 0)) for k in range(len(classes.members))]
  loss = loss_of_prompt(objective, scoring, logprobs, prompt)
  patterns = patterns_of_prompt(loss, language, members, kinds, on_policy=scoring.is_on_policy)
  if not patterns.rows:  # such as a group of one against its mean
    return np.zeros(ravel_pytree(policy.params)[0].size), np.zeros(()), np.zeros(())

  _check_size(len(patterns.rows), policy.params)
  mean = np.concatenate(
    [
      np.asarray(pull_back(policy.score, policy.params, language, prompt, cotangents))
      for cotangents in _cotangents(language, patterns, within)
    ]
  )[: len(patterns.rows)]
  gram = np.asarray(score_gram(policy, prompt))
  square = np.array(
    [
      np.einsum("n,nt,ntu,nu", within[rows], c, gram[rows], c, optimize=True)
      for rows, c in zip(patterns.rows, patterns.coefficients, strict=True)
    ]
  )
  weights = group_probs(kinds, class_probs)
  expected = _first_moment(kinds, patterns, weights) @ mean
  total = _second_moment(kinds, patterns, weights, _coordinates(mean), square)
  variance = np.maximum(total - expected @ expected, 0.0)
  if direction is None:
    return expected, variance, np.zeros(())

  slope = np.asarray(slopes(policy.score, policy.params, language, prompt, direction))
  along = [(c * slope[rows]).sum(axis=1) for rows, c in zip(*patterns[2:], strict=True)]
  pairs = list(zip(patterns.rows, along, strict=True))
  first = np.array([within[rows] @ x for rows, x in pairs])
  second = np.array([within[rows] @ x**2 for rows, x in pairs])
  total = _second_moment(kinds, patterns, weights, first[:, None], second)
  along_direction = total - (_first_moment(kinds, patterns, weights) @ first) ** 2
  return expected, variance, np.maximum(along_direction, 0.0)


def _check_size(number: int, params: Any) -> None:
  """The mean terms of all patterns are held at once."""
  size = sum(x.size for x in jax.tree.leaves(params))
  if number * size > _NUMBERS:
    raise ValueError(
      f"{number:,} different terms of {size:,} parameters each are more than the limit of "
      f"{_NUMBERS:,} numbers: give a coarser `statistic`, or sample with `sampled_bias_variance`"
    )


def _cotangents(language: Language, patterns: Patterns, within: np.ndarray) -> Any:
  """Blocks [16, N, T]: coefficients of each pattern times the members' probabilities."""
  number = len(patterns.rows)
  for start in range(0, max(number, 1), 16):
    block = np.zeros((16, *language.tokens.shape))
    for i in range(start, min(start + 16, number)):
      rows = patterns.rows[i]
      block[i - start, rows] = within[rows, None] * patterns.coefficients[i]
    yield block


def _first_moment(kinds: Kinds, patterns: Patterns, weights: np.ndarray) -> np.ndarray:
  """[R]: expected coefficient of each pattern, sum_m P(m) k_c scale."""
  pattern, scale = _of_entries(kinds, patterns)
  terms = weights[kinds.group] * kinds.copies * scale
  return np.bincount(pattern, terms, len(patterns.rows))


def _coordinates(mean: np.ndarray) -> np.ndarray:
  """[R, r]: the same vectors in the fewest axes, so that inner products are kept."""
  return mean if mean.shape[1] <= mean.shape[0] else np.asarray(np.linalg.qr(mean.T, mode="r")).T


def _second_moment(
  kinds: Kinds, patterns: Patterns, weights: np.ndarray, mean: np.ndarray, square: np.ndarray
) -> np.ndarray:
  """E|g|^2 from the patterns' mean terms [R, r] and mean squares [R]."""
  pattern, scale = _of_entries(kinds, patterns)
  own = square - (mean**2).sum(axis=1)
  total = (weights[kinds.group] * kinds.copies * scale**2) @ own[pattern]
  starts = np.searchsorted(kinds.group, np.arange(len(weights)))
  ends = np.append(starts[1:], len(pattern))
  size = max(1, 2**22 // (mean.shape[1] * int((ends - starts).max())))  # groups at once
  for first in range(0, len(weights), size):
    part = slice(starts[first], ends[min(first + size, len(weights)) - 1])
    terms = (kinds.copies * scale)[part, None] * mean[pattern[part]]
    expected = np.add.reduceat(terms, starts[first : first + size] - starts[first], axis=0)
    total = total + weights[first : first + size] @ (expected**2).sum(axis=1)
  return total


def _of_entries(kinds: Kinds, patterns: Patterns) -> tuple[np.ndarray, np.ndarray]:
  """[E] each: pattern of every entry, and the factor on it."""
  return patterns.of_kind[kinds.kind], kinds.scale * patterns.scale[kinds.kind]
