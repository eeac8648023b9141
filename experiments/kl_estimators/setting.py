"""Three policies of `experiments.kl_estimators`: the reference, the one that learns, an old one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from configs.kl_estimators import Config
from configs.policies import Network, Table
from experiments.harness.shared_policy import reference_policy
from jaxrl_lm.exact import (
  Policy,
  enumerate_language,
  kl_divergence,
  modular_sum_reward,
  response_probs,
  target_gradient,
)
from jaxrl_lm.exact.language import Language


class Start(NamedTuple):
  """The reference, and unit directions [D] in its parameters: of the policy, of the old one."""

  reference: Policy
  gradient: np.ndarray
  stale: np.ndarray


class Responses(NamedTuple):
  """Log-probs of every token that could follow, along every response: [P, N, T, V] nats.

  Attributes:
    policy: of the policy that learns.
    reference: of the reference.
    old: of the policy that draws the samples.
    tokens: [P, N, T] the token that did follow.
    mask: [P, N, T] bool.
  """

  policy: jax.Array
  reference: jax.Array
  old: jax.Array
  tokens: jax.Array
  mask: jax.Array

  def chosen(self, table: jax.Array) -> jax.Array:
    """[P, N, T] of the tokens themselves, 0 at masked positions."""
    logprobs = jnp.take_along_axis(table, self.tokens[..., None], axis=-1)[..., 0]
    return jnp.where(self.mask, logprobs, 0.0)


def starting_point(config: Config, settings: Table | Network) -> Start:
  """The reference; the policy leaves it along grad J, the old policy in a random direction."""
  setting = config.setting
  language = enumerate_language(
    setting.vocabulary, setting.horizon, end_token=setting.vocabulary - 1
  )
  reference = reference_policy(
    settings,
    language,
    prompts=len(setting.targets),
    seed=setting.seed,
    concentration=setting.concentration,
  )
  rewards = modular_sum_reward(language, setting.targets)
  gradient = target_gradient(reference, rewards).mean(axis=0)
  random = np.random.default_rng(config.direction_seed).normal(size=gradient.shape)
  return Start(reference, *(x / np.linalg.norm(x) for x in (gradient, random)))


def policy_at(start: Start, level: float) -> Policy:
  """The policy at KL(policy || reference) = level."""
  reference = start.reference.logprobs()
  return _along(
    start.reference,
    start.gradient,
    lambda logprobs: kl_divergence(start.reference.language, logprobs, reference),
    level,
  )


def old_policy_at(start: Start, policy: Policy, level: float) -> Policy:
  """An old policy at KL(old || policy) = level; the policy itself at 0."""
  if level == 0:
    return policy
  current = policy.logprobs()
  return _along(
    policy, start.stale, lambda logprobs: kl_divergence(policy.language, logprobs, current), level
  )


def _along(
  policy: Policy, direction: np.ndarray, divergence: Callable[..., jax.Array], level: float
) -> Policy:
  """The policy moved along a direction until a divergence, mean over prompts, is the level."""
  flat, unravel = ravel_pytree(policy.params)

  def moved(distance: float) -> tuple[Any, float]:
    params = unravel(flat + distance * direction)
    return params, float(divergence(policy.logprobs(params)).mean())

  low, high = 0.0, 1.0
  while moved(high)[1] < level:
    high *= 2.0
    if high > 1e6:
      raise ValueError(f"no policy in this direction has a divergence of {level} nats")
  for _ in range(50):
    middle = 0.5 * (low + high)
    low, high = (low, middle) if moved(middle)[1] > level else (middle, high)
  return policy._replace(params=moved(0.5 * (low + high))[0])


def responses(policy: Policy, reference: Policy, old: Policy) -> Responses:
  """What the estimators see of every response."""
  language = policy.language
  tables = (next_logprobs(language, x.logprobs()) for x in (policy, reference, old))
  shape = (policy.num_prompts, *language.tokens.shape)
  return Responses(
    *tables, jnp.broadcast_to(language.tokens, shape), jnp.broadcast_to(language.mask, shape)
  )


@jax.jit
def next_logprobs(language: Language, logprobs: jax.Array) -> jax.Array:
  """[P, N, T, V] of all tokens that could follow each prefix, from those [P, N, T] that do."""
  rows, times = where_chosen(language)
  states = logprobs[:, rows, times].reshape(-1, language.num_states, language.vocabulary)
  return states[:, jnp.asarray(language.states)]


def where_chosen(language: Language) -> tuple[jax.Array, jax.Array]:
  """(response, time) [S V] at which each state chooses each token, one of several."""
  pairs = language.num_states * language.vocabulary
  number = jnp.asarray(language.states) * language.vocabulary + jnp.asarray(language.tokens)
  number = jnp.where(jnp.asarray(language.mask), number, pairs)  # sorted behind the others
  first = jnp.unique(number, return_index=True, size=pairs)[1]
  return jnp.divmod(first, language.horizon)


def sampling_probs(policy: Policy) -> jax.Array:
  """[P, N] of every response."""
  return response_probs(policy.language, policy.logprobs())
