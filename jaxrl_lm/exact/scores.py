"""Scores of the enumerated responses, through the policy's own parameters."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxrl_lm.exact.language import Language
from jaxrl_lm.exact.tabular import Policy


@functools.partial(jax.jit, static_argnums=0)
def pull_back(
  score: Any, params: Any, language: Language, prompt: Any, cotangents: Any
) -> jax.Array:
  """sum_nt cotangent_nt grad log pi(y_nt | s_nt), for several cotangents.

  Args:
    score, params, language: of a policy.
    prompt: which prompt.
    cotangents: [B, N, T].

  Returns:
    [B, D], parameters flattened.
  """
  rows = jnp.arange(language.tokens.shape[0])
  logprobs, pull = jax.vjp(lambda x: score(x, language, prompt, rows), params)
  cotangents = jnp.where(language.mask, cotangents, 0.0).astype(logprobs.dtype)
  return jax.lax.map(lambda x: ravel_pytree(pull(x)[0])[0], cotangents)


@functools.partial(jax.jit, static_argnums=0)
def slopes(score: Any, params: Any, language: Language, prompt: Any, direction: Any) -> jax.Array:
  """Derivative of each log-prob along a direction in parameter space.

  Args:
    score, params, language: of a policy.
    prompt: which prompt.
    direction: pytree like the parameters.

  Returns:
    [N, T].
  """
  rows = jnp.arange(language.tokens.shape[0])
  slope = jax.jvp(lambda x: score(x, language, prompt, rows), (params,), (direction,))[1]
  return jnp.where(language.mask, slope, 0.0)


def score_gram(policy: Policy, prompt: int) -> jax.Array:
  """Inner products of the token scores of each response.

  Args:
    policy: the policy.
    prompt: which prompt.

  Returns:
    [N, T, T].
  """
  rows = np.arange(policy.language.tokens.shape[0])
  if policy.score_gram is not None:
    return policy.score_gram(policy.params, policy.language, prompt, rows)
  return _autodiff_gram(policy.score, policy.params, policy.language, prompt, rows)


@functools.partial(jax.jit, static_argnums=0)
def _autodiff_gram(
  score: Any, params: Any, language: Language, prompt: Any, rows: Any
) -> jax.Array:
  flat, unravel = ravel_pytree(params)

  def one(row: jax.Array) -> jax.Array:
    value = lambda x: score(unravel(x), language, prompt, row[None])[0]  # noqa: E731
    jacobian = jnp.where(jnp.asarray(language.mask)[row][:, None], jax.jacrev(value)(flat), 0.0)
    return jacobian @ jacobian.T

  return jax.lax.map(one, rows, batch_size=64)
