"""Exact mean and variance of an update whose loss looks at every token that could have followed."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from experiments.kl_estimators.estimators import Row
from experiments.kl_estimators.setting import where_chosen
from jaxrl_lm.exact import Moments, Policy, kl_divergence, target_gradient
from jaxrl_lm.exact.language import Language

Factors = dict[Row, jax.Array]  # [P, N, T, V] each


class Gradients(NamedTuple):
  """Of one policy.

  Attributes:
    language: its language.
    target: [P, D] gradient of KL(policy || reference) of the responses.
    scores: per prompt, [S V, D'] gradient of the log-prob of every token after every prefix.
    used: per prompt, [D'] the parameters on which they depend.
  """

  language: Language
  target: np.ndarray
  scores: list[jax.Array]
  used: list[np.ndarray]


def gradients(policy: Policy, reference: Policy) -> Gradients:
  target = target_gradient(policy, reference.logprobs(), kl_divergence)
  scores, used = [], []
  for prompt in range(policy.num_prompts):
    score = np.asarray(_state_scores(policy.score, policy.params, policy.language, prompt))
    used.append(np.flatnonzero((score != 0).any(axis=0)))
    scores.append(jnp.asarray(score[:, used[-1]]))
  return Gradients(policy.language, target, scores, used)


@partial(jax.jit, static_argnums=0)
def _state_scores(score: Any, params: Any, language: Language, prompt: Any) -> jax.Array:
  flat, unravel = ravel_pytree(params)
  rows, where = jnp.arange(language.tokens.shape[0]), where_chosen(language)
  return jax.jacrev(lambda x: score(unravel(x), language, prompt, rows)[where])(flat)


def update_moments(factors: Factors, exact: Gradients, probs: jax.Array) -> dict[Row, Moments]:
  """Exact mean and variance of the gradient of each loss, of one response per prompt.

  A response's gradient is linear in the scores of the (state, token) pairs along it, also where
  all tokens of a state enter, as in the exact KL: `bias_variance` knows sampled tokens only.

  Args:
    factors: the coefficients of each loss.
    exact: of the policy.
    probs: [P, N] with which the responses are drawn.
  """
  stack = jnp.stack(list(factors.values()), axis=1)  # [P, R, N, T, V]
  mean = np.zeros((len(factors), *exact.target.shape))
  variance = np.zeros(mean.shape[:2])
  for prompt, (scores, used) in enumerate(zip(exact.scores, exact.used, strict=True)):
    found = _moments_of_prompt(exact.language, stack[prompt], probs[prompt], scores)
    mean[:, prompt, used], variance[:, prompt] = found
  nothing = np.zeros(len(exact.target))
  return {
    row: Moments(mean[i], exact.target, variance[i], None, nothing) for i, row in enumerate(factors)
  }


@jax.jit
def _moments_of_prompt(
  language: Language, factors: jax.Array, probs: jax.Array, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Mean [R, D'] and total variance [R] of the updates with these coefficients [R, N, T, V]."""
  tokens = jnp.arange(language.vocabulary)[None, None]
  pairs = jnp.asarray(language.states)[..., None] * language.vocabulary + tokens
  pairs = pairs.reshape(pairs.shape[0], -1)  # [N, T V]
  factors = factors.reshape(-1, *pairs.shape)
  weighted = probs[None, :, None] * factors
  mean = jnp.zeros((factors.shape[0], scores.shape[0])).at[:, pairs].add(weighted) @ scores
  within = (scores @ scores.T)[pairs[:, :, None], pairs[:, None]]  # [N, T V, T V]
  square = jnp.einsum("rni,nij,rnj->r", weighted, within, factors, optimize="optimal")
  return mean, jnp.maximum(square - jnp.sum(mean**2, axis=-1), 0.0)
