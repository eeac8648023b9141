"""Small languages and policies, and the moments of a group estimator by listing every group."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from jaxrl_lm.exact import Language, Policy, enumerate_language, tabular_policy

# 15 responses of 1 to 3 tokens: 3375 groups of three.
LANGUAGE = enumerate_language(3, 3, end_token=1)


def table(language: Language, *, seed: int = 0, prompts: int = 2, spread: float = 1.0) -> Policy:
  """A table of normal logits."""
  shape = (prompts, language.num_states, language.vocabulary)
  return tabular_policy(language, np.random.default_rng(seed).normal(0.0, spread, shape))


def network(
  language: Language, *, seed: int = 0, prompts: int = 2, hidden: int = 3, dtype: Any = np.float64
) -> Policy:
  """One hidden layer on a one-hot prefix and a one-hot prompt: all states share parameters."""
  rng = np.random.default_rng(seed)
  inputs = {"prefix": language.num_states, "prompt": prompts}
  params = {
    "hidden": {k: jnp.asarray(rng.normal(size=(n, hidden)), dtype) for k, n in inputs.items()},
    "out": (jnp.asarray(rng.normal(size=(hidden, language.vocabulary)), dtype),),
  }
  return Policy(language, network_score, params, prompts)


def network_score(params: Any, language: Language, prompt: Any, rows: Any) -> jax.Array:
  hidden = jnp.tanh(params["hidden"]["prefix"] + params["hidden"]["prompt"][prompt][None])
  logprobs = jax.nn.log_softmax(hidden @ params["out"][0], axis=-1)
  return logprobs[jnp.asarray(language.states)[rows], jnp.asarray(language.tokens)[rows]]


def binary_rewards(language: Language, *, seed: int = 0, prompts: int = 2) -> np.ndarray:
  shape = (prompts, language.tokens.shape[0])
  return np.random.default_rng(seed).integers(0, 2, shape).astype(float)


class LiteralMoments(NamedTuple):
  """Of one prompt's update, over every group.

  Attributes:
    mean: [D].
    variance: total.
    along: variance along the direction, scaled to length 1.
    fourth: E |g - mean|^4, for the error of a sampled variance.
  """

  mean: np.ndarray
  variance: float
  along: float
  fourth: float


def literal_moments(
  objective: rl.Objective,
  policy: Policy,
  rewards: np.ndarray,
  prompt: int,
  *,
  group_size: int,
  advantages: Any = None,
  sampler_logprobs: Any = None,
  kl: Any = None,
  kl_coef: float = 0.0,
  direction: Any = None,
  **logprobs: Any,
) -> LiteralMoments:
  """The average over all N^G groups of the gradient of `objective_loss`, and its spread."""
  number = policy.language.tokens.shape[0]
  groups = np.array(list(itertools.product(range(number), repeat=group_size)))
  sampler = next(
    x for x in (sampler_logprobs, logprobs.get("old_logprobs"), policy.logprobs()) if x is not None
  )
  total = np.where(policy.language.mask, np.asarray(sampler)[prompt], 0.0).sum(axis=-1)
  weights = np.exp(total[groups].sum(axis=1))
  arrays = {"rewards": rewards} | {k: x for k, x in logprobs.items() if x is not None}
  arrays = {name: jnp.asarray(x[prompt]) for name, x in arrays.items()}
  functions = objective, advantages, policy.score, kl
  g = _updates(functions, policy.params, policy.language, prompt, groups, arrays, kl_coef)
  g = np.asarray(g, np.float64)
  mean = weights @ g
  square = ((g - mean) ** 2).sum(axis=1)
  slope = np.zeros(len(g))
  if direction is not None:
    unit = np.asarray(ravel_pytree(direction)[0])
    slope = (g - mean) @ unit / np.linalg.norm(unit)
  return LiteralMoments(mean, weights @ square, weights @ slope**2, weights @ square**2)


@functools.partial(jax.jit, static_argnums=0)
def _updates(
  functions: Any,
  params: Any,
  language: Any,
  prompt: Any,
  groups: Any,
  arrays: dict[str, jax.Array],
  kl_coef: Any,
) -> jax.Array:
  objective, advantages, score, kl = functions

  def one(rows: jax.Array) -> jax.Array:
    mask = jnp.asarray(language.mask)[rows][None]
    given = {name: x[rows][None] for name, x in arrays.items()}
    rewards = given.pop("rewards")
    a = objective.advantages(rewards) if advantages is None else advantages(rewards, mask)
    old = given.pop("old_logprobs", None)
    if kl is not None:
      given |= {"kl": kl, "kl_coef": kl_coef}

    def loss(params: Any) -> jax.Array:
      logprobs = jnp.where(mask, score(params, language, prompt, rows)[None], 0.0)
      weights = objective.loss_weights(mask)
      a_t = a if a.ndim == 3 else a[..., None]
      value, _ = rl.objective_loss(
        objective, logprobs, old, a_t, mask, loss_weights=weights, **given
      )
      return value

    return -ravel_pytree(jax.grad(loss)(params))[0]

  return jax.vmap(one)(groups)
