"""The two gradients, as compositions of the library, and how far updates are from each other.

A token is an action of a Markov decision process, or a whole response is one action of a bandit:

  TOKEN      sum_t c_t grad log pi(y_t | s_t)      one ratio per token, summed
  SEQUENCE   c grad log pi(y | x)                  one ratio per response

On-policy, with the same credit at every token, they are the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from experiments.length_bias.setting import Problem
from jaxrl_lm.exact import (
  Language,
  Moments,
  Policy,
  expected_reward,
  kl_divergence,
)
from jaxrl_lm.exact.credit import credit_moments

TOKEN = rl.Objective(
  advantages=rl.raw_rewards,
  level=rl.per_token,
  surrogate=rl.importance_weighted,
  loss_weights=rl.sequence_sum,
)
# Every token carries the ratio of the response, so that their mean is the response's gain.
SEQUENCE = replace(TOKEN, level=rl.per_sequence, loss_weights=rl.sequence_mean)


def clipped(objective: rl.Objective, width: float) -> rl.Objective:
  """The same with PPO's clip at its own level."""
  return replace(objective, surrogate=partial(rl.ppo_clip, clip_low=width, clip_high=width))


def coefficients(
  objective: rl.Objective,
  policy: Policy,
  advantages: Any,
  *,
  old_logprobs: Any = None,
  ref_logprobs: Any = None,
  kl: Callable[..., jax.Array] | None = None,
  kl_coef: float = 0.0,
) -> np.ndarray:
  """[P, N, T] minus the derivative of the library's loss in every log-prob, one response a batch.

  Args:
    objective: the composition.
    policy: P prompts.
    advantages: [P, N, T].
    old_logprobs, ref_logprobs: [P, N, T]; None = the policy's own.
    kl, kl_coef: a KL term of the loss.
  """
  logprobs = policy.logprobs()
  given = {"logprobs": logprobs, "advantages": jnp.asarray(advantages)}
  given["old_logprobs"] = logprobs if old_logprobs is None else old_logprobs
  given["ref_logprobs"] = logprobs if ref_logprobs is None else ref_logprobs
  return np.asarray(_coefficients((objective, kl), policy.language, given, kl_coef))


@partial(jax.jit, static_argnums=0)
def _coefficients(
  functions: Any, language: Language, given: dict[str, jax.Array], kl_coef: Any
) -> jax.Array:
  objective, kl = functions

  def gain(logprobs: jax.Array, row: dict[str, jax.Array], mask: jax.Array) -> jax.Array:
    term = {} if kl is None else {"kl": kl, "kl_coef": kl_coef, "ref_logprobs": row["ref_logprobs"]}
    weights = objective.loss_weights(mask)
    old, advantages = row["old_logprobs"], row["advantages"]
    loss, _ = rl.objective_loss(
      objective, logprobs, old, advantages, mask, loss_weights=weights, **term
    )
    return -loss

  def one(row: dict[str, jax.Array], mask: jax.Array) -> jax.Array:
    row = {name: x[None] for name, x in row.items()}
    return jax.grad(gain)(row["logprobs"], row, mask[None])[0]

  over_responses = jax.vmap(one)
  return jax.vmap(over_responses, (0, None))(given, jnp.asarray(language.mask))


def largest_distance(policy: Policy, centred: np.ndarray, credit: np.ndarray) -> float:
  """Largest |token gradient - sequence gradient| over the largest |sequence gradient|.

  Of all responses to all prompts, in the policy's own parameters, by differentiating either loss.

  Args:
    policy: P prompts.
    centred: [P, N] r - V(x), for the bandit.
    credit: [P, N, T] of the library's GAE, for the tokens.
  """
  found = [
    _distances(policy.score, policy.params, policy.language, p, centred[p], credit[p])
    for p in range(policy.num_prompts)
  ]
  apart, size = (np.concatenate(x) for x in zip(*found, strict=True))
  return float(apart.max() / size.max())


@partial(jax.jit, static_argnums=0)
def _distances(
  score: Any, params: Any, language: Language, prompt: Any, centred: Any, credit: Any
) -> tuple[jax.Array, jax.Array]:
  flat, unravel = ravel_pytree(params)

  def one(row: jax.Array) -> tuple[jax.Array, jax.Array]:
    mask = jnp.asarray(language.mask)[row][None]

    def logprobs(x: jax.Array) -> jax.Array:
      return jnp.where(mask, score(unravel(x), language, prompt, row[None]), 0.0)

    def bandit(x: jax.Array) -> jax.Array:
      return centred[row] * rl.sequence_logprob(logprobs(x), mask)[0]

    def tokens(x: jax.Array) -> jax.Array:
      weights = TOKEN.loss_weights(mask)
      loss, _ = rl.objective_loss(
        TOKEN, logprobs(x), None, credit[row][None], mask, loss_weights=weights
      )
      return -loss

    whole, summed = jax.grad(bandit)(flat), jax.grad(tokens)(flat)
    return jnp.linalg.norm(summed - whole), jnp.linalg.norm(whole)

  return jax.lax.map(one, jnp.arange(language.tokens.shape[0]), batch_size=32)


def compare(
  problem: Problem,
  rows: Mapping[str, np.ndarray],
  against: str,
  *,
  sampler_logprobs: Any = None,
  target: Callable[..., jax.Array] = expected_reward,
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Moments]]:
  """Every update against the gradient of the target, and against one of them sample by sample.

  Args:
    problem: the policy, and the reward of the target.
    rows: name -> [P, N, T] coefficients.
    against: the row to measure distances from.
    sampler_logprobs, target: as in `credit_moments`.

  Returns:
    name -> [P] each: cosine, size, norm and bias of the expected update, relative to the target's
    gradient; variance, over its square; apart, the root mean square of the difference of two
    updates on the same response, over that of the update `against`. And the moments by name.
  """
  differences = {f"{name} less": c - rows[against] for name, c in rows.items()}
  moments = credit_moments(
    problem.policy,
    {**rows, **differences},
    problem.rewards,
    sampler_logprobs=sampler_logprobs,
    target=target,
  )
  scale = _mean_square(moments[against])
  found = {}
  for name in rows:
    m = moments[name]
    square = np.sum(m.target**2, axis=-1)
    found[name] = {
      "cosine": m.cosine,
      "size": m.scale,
      "norm": np.linalg.norm(m.mean, axis=-1) / np.sqrt(square),
      "bias": m.relative_bias,
      "variance": m.variance / square,
      "apart": np.sqrt(_mean_square(moments[f"{name} less"]) / scale),
    }
  return found, moments


def _mean_square(moments: Moments) -> np.ndarray:
  return moments.variance + np.sum(moments.mean**2, axis=-1)


def moved(policy: Policy, direction: np.ndarray, nats: float) -> Policy:
  """The policy moved along a direction until KL(old || new) per response is as asked.

  Args:
    policy: where to start.
    direction: [D], parameters flattened.
    nats: mean over prompts.
  """
  functions = policy.score, policy.num_prompts

  def excess(step: float) -> float:
    kl = _divergence(functions, policy.params, policy.language, direction, step)
    return float(kl) - nats

  high = 1e-3 / float(np.linalg.norm(direction))
  while excess(high) < 0:
    high *= 2.0
  low = 0.0
  for _ in range(60):
    middle = 0.5 * (low + high)
    low, high = (low, middle) if excess(middle) > 0 else (middle, high)
  flat, unravel = ravel_pytree(policy.params)
  return policy._replace(params=unravel(flat + high * direction))


@partial(jax.jit, static_argnums=0)
def _divergence(
  functions: Any, params: Any, language: Language, direction: Any, step: Any
) -> jax.Array:
  score, prompts = functions
  policy = Policy(language, score, params, prompts)
  flat, unravel = ravel_pytree(params)
  new = policy.logprobs(unravel(flat + step * direction))
  return jnp.mean(kl_divergence(language, policy.logprobs(), new))
