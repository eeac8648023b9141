"""The same measurement by sampling: for what couples prompts or has no small statistic.

Batches of P prompts x G samples are drawn from the exact sampler, and the library's functions see
the whole batch, as in training: a batch std, a token mean over all groups, whitening, a selection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxrl_lm.exact.backward_induction import expected_reward
from jaxrl_lm.exact.classes import group_advantages
from jaxrl_lm.exact.moments import Moments
from jaxrl_lm.exact.problem import Scoring, check_problem, target_gradient, unit_direction
from jaxrl_lm.exact.tabular import Policy
from jaxrl_lm.logprobs import sequence_logprob
from jaxrl_lm.objectives import Objective, objective_loss


class _Functions(NamedTuple):
  """What is static under jit."""

  objective: Objective
  advantages: Callable[..., Any] | None
  select: Callable[..., Any] | None
  kl: Callable[..., Any] | None
  score: Callable[..., jax.Array]
  group_size: int


def sampled_bias_variance(
  objective: Objective,
  policy: Policy,
  rewards: Any,
  *,
  group_size: int,
  samples: int,
  seed: int = 0,
  advantages: Callable[..., Any] | None = None,
  select: Callable[..., Any] | None = None,
  old_logprobs: Any = None,
  sampler_logprobs: Any = None,
  importance_weights: Any = None,
  ref_logprobs: Any = None,
  kl: Callable[..., jax.Array] | None = None,
  kl_coef: float = 0.0,
  target: Callable[..., jax.Array] = expected_reward,
  direction: Any = None,
) -> Moments:
  r"""Mean and variance of an objective's update over a batch of prompts, by Monte Carlo.

  The target stays exact. The squared bias of a sampled mean is too large by standard_error^2 in
  expectation; a bias below a few standard errors is not one.

  Args:
    objective: a row of the table, or one of your own.
    policy: P prompts, at the parameters where the gradient is taken.
    rewards: [P, N] reward of every response.
    group_size: samples per prompt G.
    samples: number of batches to draw, >= 2.
    seed: of the draws.
    advantages: (rewards [P, G], mask [P, G, T]) -> [P, G] or [P, G, T]; None =
      objective.advantages(rewards).
    select: (key, logprobs, log_ratio, advantages, mask), [P, G, T] each -> bool [P, G, T], for
      the surrogates that take `selected`.
    old_logprobs, sampler_logprobs, importance_weights, ref_logprobs, kl, kl_coef, target,
      direction: as in `bias_variance`.

  Returns:
    The moments of the whole batch's update: one entry, whose target is the mean over prompts.

  Raises:
    ValueError: as in `bias_variance`, or samples < 2.

  Example:
    >>> import jaxrl_lm as rl
    >>> from jaxrl_lm.exact import enumerate_language, first_token_reward, tabular_policy
    >>> language = enumerate_language(3, 2)
    >>> rewards = first_token_reward(language, [1, 2])
    >>> with jax.enable_x64(True):
    ...   policy = tabular_policy(language, np.zeros((2, language.num_states, 3)))
    ...   m = sampled_bias_variance(rl.RLOO, policy, rewards, group_size=4, samples=400)
    >>> bool(m.bias[0] < 3 * m.standard_error[0])
    True
  """
  if samples < 2:
    raise ValueError(f"samples must be at least 2, got {samples}")
  if group_size < 1:
    raise ValueError(f"group_size must be at least 1, got {group_size}")
  scoring = Scoring(old_logprobs, importance_weights, ref_logprobs, kl, kl_coef)
  rewards = check_problem(policy, rewards, scoring, sampler_logprobs)
  logprobs = policy.logprobs()
  sampler = next(x for x in (sampler_logprobs, old_logprobs, logprobs) if x is not None)
  mask = jnp.broadcast_to(policy.language.mask, logprobs.shape)
  log_probs = sequence_logprob(jnp.asarray(sampler), mask)
  gradient = target_gradient(policy, rewards, target).mean(axis=0, keepdims=True)
  functions = _Functions(objective, advantages, select, kl, policy.score, group_size)
  arrays = {"rewards": rewards, "log_probs": log_probs, "kl_coef": kl_coef}
  arrays |= {k: v for k, v in scoring._asdict().items() if k.endswith(("logprobs", "weights"))}
  arrays = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
  direction = unit_direction(policy, direction)
  unit = jnp.zeros_like(gradient[0]) if direction is None else ravel_pytree(direction)[0]

  keys = jax.random.split(jax.random.key(seed), samples)
  mean, square, along = _moments_of_batches(
    functions, policy.params, policy.language, arrays, keys, jnp.asarray(gradient[0]), unit
  )
  variance = np.asarray(square)[None]
  if not np.isfinite(variance).all():
    raise ValueError("the update of a sampled batch is not finite")
  return Moments(
    np.asarray(mean)[None],
    gradient,
    variance,
    None if direction is None else np.asarray(along)[None],
    np.sqrt(variance / samples),
  )


@functools.partial(jax.jit, static_argnums=0)
def _moments_of_batches(
  functions: _Functions,
  params: Any,
  language: Any,
  arrays: dict[str, jax.Array],
  keys: jax.Array,
  shift: jax.Array,
  unit: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Mean [D], total variance and variance along `unit`, over one batch per key."""

  def add(sums: Any, key: jax.Array) -> Any:
    # About the target, not about 0: fewer digits cancel.
    g = _update(functions, params, language, arrays, key) - shift
    first, second, along, along_squared = sums
    return (first + g, second + g @ g, along + g @ unit, along_squared + (g @ unit) ** 2), None

  zero = jnp.zeros((), shift.dtype)
  sums = jax.lax.scan(add, (jnp.zeros_like(shift), zero, zero, zero), keys)[0]
  first, second, along, along_squared = (x / keys.shape[0] for x in sums)
  unbiased = keys.shape[0] / (keys.shape[0] - 1)
  variance, along = second - first @ first, along_squared - along**2
  variance, along = (jnp.maximum(x, 0.0) for x in (variance, along))
  return first + shift, unbiased * variance, unbiased * along


def _update(
  functions: _Functions, params: Any, language: Any, arrays: dict[str, jax.Array], key: jax.Array
) -> jax.Array:
  """[D]: minus the gradient of the loss of one sampled batch."""
  prompts = jnp.arange(arrays["rewards"].shape[0])
  draw, pick = jax.random.split(key)
  shape = (functions.group_size, prompts.shape[0])
  rows = jax.random.categorical(draw, arrays["log_probs"], axis=-1, shape=shape).T  # [P, G]
  take = jax.vmap(lambda x, rows: x[rows])
  given = {k: take(x, rows) for k, x in arrays.items() if x.ndim > 1}
  mask = jnp.asarray(language.mask)[rows]
  advantages = group_advantages(functions.objective, functions.advantages, given["rewards"], mask)
  weights = functions.objective.loss_weights(mask)

  def gain(params: Any) -> jax.Array:
    score = jax.vmap(functions.score, in_axes=(None, None, 0, 0))
    logprobs = jnp.where(mask, score(params, language, prompts, rows), 0.0)
    old = given.get("old_logprobs")
    extra = {} if functions.kl is None else {"kl_coef": arrays["kl_coef"]}
    if functions.select is not None:
      log_ratio = logprobs * 0 if old is None else logprobs - old
      extra["selected"] = functions.select(pick, logprobs, log_ratio, advantages, mask)
    loss, _ = objective_loss(
      functions.objective,
      logprobs,
      old,
      advantages,
      mask,
      loss_weights=weights,
      importance_weights=given.get("importance_weights"),
      ref_logprobs=given.get("ref_logprobs"),
      kl=functions.kl,
      **extra,
    )
    return -loss

  return ravel_pytree(jax.grad(gain)(params))[0]
