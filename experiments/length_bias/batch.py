"""What couples the groups of a batch: a std, or a token mean, over all of them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from experiments.length_bias.measures import Track, described
from experiments.length_bias.setting import Problem, grpo, one_prompt
from jaxrl_lm.exact import Moments, expected_update, sampled_bias_variance
from jaxrl_lm.exact.problem import target_gradient


def batch(problem: Problem, samples: int, track: Track) -> dict[str, Any]:
  """What couples the prompts: a std, or a token mean, over the groups of the whole batch.

  Its mean is exact: given a prompt's own group, the other groups enter through one number (their
  correct responses, their tokens), whose distribution is a convolution. `sampled` is the same
  update by Monte Carlo on whole batches: its size along the gradient of the batch, with the
  standard error.
  """
  table = {}
  for name, (objective, given_others) in track(_coupled(problem).items()):
    means = np.stack([_coupled_mean(problem, p, *given_others) for p in range(_prompts(problem))])
    gradient = target_gradient(problem.policy, problem.rewards)
    moments = Moments(
      means, gradient, np.zeros(len(means)), None, np.zeros(len(means))
    )  # the mean only
    row = {k: v for k, v in described(problem, moments).items() if k != "variance"}
    if samples:
      row["sampled"] = _sampled(problem, objective, moments.averaged(), samples)
    table[name] = row
  return table


def _coupled(problem: Problem) -> dict[str, Any]:
  """Name -> (objective on a batch, (its loss weights, its advantages) given the other groups)."""
  rows: dict[str, Any] = {
    f"{name}, batch std": (
      grpo(reduction, partial(rl.batch_scaled, eps=0.0)),
      (reduction, _batch_std_given_others),
    )
    for name, reduction in (("sum", rl.sequence_sum), ("sequence mean", rl.sequence_mean))
  }
  rows["token mean over the batch"] = (grpo(rl.token_mean), (None, None))
  return rows


def _coupled_mean(problem: Problem, prompt: int, loss_weights: Any, advantages: Any) -> np.ndarray:
  """[D] expected update of one prompt's group, averaged over what the other groups are."""
  policy, size = problem.policy, problem.group_size
  probs = np.asarray(np.exp(np.asarray(policy.logprobs()).sum(-1)))
  if loss_weights is None:
    tokens = np.broadcast_to(np.asarray(policy.language.lengths), probs.shape)
    loss_weights = partial(
      _token_mean_given_others,
      others=tuple(_of_others(probs, tokens, prompt, size)),
      prompts=policy.num_prompts,
    )
    advantages = rl.group_centered
  else:
    others = tuple(_of_others(probs, problem.rewards.astype(int), prompt, size))
    advantages = partial(advantages, others=others, prompts=policy.num_prompts)
  one = one_prompt(policy, prompt)
  update = expected_update(
    grpo(loss_weights, advantages), one, problem.rewards[[prompt]], group_size=size
  )
  return np.asarray(ravel_pytree(jax.jit(update)(one.params))[0])


def _of_others(probs: np.ndarray, number: np.ndarray, prompt: int, size: int) -> np.ndarray:
  """Distribution of the total of a number per response over the groups of the other prompts."""
  total = np.ones(1)
  for p in range(len(probs)):
    if p != prompt:
      for _ in range(size):
        total = np.convolve(total, np.bincount(number[p], probs[p]))
  return total


def _batch_std_given_others(rewards: Any, *, others: tuple[float, ...], prompts: int) -> Any:
  """Expectation of `batch_scaled` given the own group; others: P(number of correct ones)."""
  samples = prompts * rewards.shape[-1]
  correct = jnp.sum(rewards) + jnp.arange(len(others))
  variance = correct * (samples - correct) / (samples * (samples - 1.0))
  scaled = jax.vmap(lambda v: rl.batch_scaled(rewards, eps=0.0, moments=(jnp.zeros(()), v)))
  return jnp.tensordot(jnp.asarray(others), scaled(variance), axes=1)


def _token_mean_given_others(mask: Any, *, others: tuple[float, ...], prompts: int) -> Any:
  """Expectation of `token_mean` given the own group; others: P(number of tokens).

  Times the number of prompts, as the batch's update is a mean over prompts elsewhere.
  """
  own = jnp.sum(mask)
  shrink = jnp.sum(jnp.asarray(others) * own / (own + jnp.arange(len(others))))
  return rl.token_mean(mask) * shrink * prompts


def _prompts(problem: Problem) -> int:
  return problem.policy.num_prompts


def _sampled(
  problem: Problem, objective: rl.Objective, exact: Moments, samples: int
) -> dict[str, Any]:
  """Size along the batch's gradient: sampled, its standard error, exact."""
  policy = problem.policy
  unravel = ravel_pytree(policy.params)[1]
  moments = sampled_bias_variance(
    objective,
    policy,
    problem.rewards,
    group_size=problem.group_size,
    samples=samples,
    direction=unravel(jnp.asarray(exact.target[0])),
  )
  size = np.linalg.norm(moments.target[0])
  along = moments.directional_variance
  assert along is not None
  return {
    "scale": moments.scale[0],
    "scale_error": math.sqrt(along[0] / samples) / size,
    "exact": exact.scale[0],
    "variance": moments.relative_variance[0],
  }
