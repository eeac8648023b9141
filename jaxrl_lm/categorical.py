"""Distributions over a vocabulary as log-probs [..., V]: what the divergences are made of.

A token of log-prob -inf is impossible: it adds 0 wherever its probability is a factor, in value
and in gradient. Building blocks of `kl`, `distillation` and `online_preferences`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


def two_logprobs(
  logits: Any, mask: Any, temperature: Any, **constant: Any
) -> tuple[jax.Array, jax.Array]:
  """Log-probs of a policy and of a constant distribution; masked rows become uniform.

  Args:
    logits: [..., T, V]. Differentiated.
    mask: [..., T] bool, or None = all count.
    temperature: divides both, > 0.
    **constant: exactly one name=logits, [..., T, V]. Constant.

  Returns:
    Both as [..., T, V], float32 at least.

  Raises:
    ValueError: shapes differ, or temperature <= 0.
  """
  ((name, other),) = constant.items()
  other = checks.as_constant(name, other)
  checks.check_same_shape(**{"logits": logits, name: other})
  policy, constant_logprobs = (
    jax.nn.log_softmax(checks.scaled_logits(x, mask, temperature)) for x in (logits, other)
  )
  return policy, constant_logprobs


def divergence(logprobs: jax.Array, other: jax.Array) -> jax.Array:
  """KL(p || q) = sum p (log p - log q); +inf where q excludes what p allows.

  Args:
    logprobs: [..., V] log p. Differentiated.
    other: [..., V] log q. Differentiated.

  Returns:
    [...] nats.
  """
  return jnp.sum(kl_terms(logprobs, other), axis=-1)


def kl_terms(logprobs: jax.Array, other: jax.Array) -> jax.Array:
  """p (log p - log q), elementwise; 0 where p excludes.

  Args:
    logprobs: log p. Differentiated.
    other: log q. Differentiated.

  Returns:
    Array like logprobs.
  """
  possible = ~jnp.isneginf(logprobs)
  logprobs, other = (jnp.where(possible, x, 0.0) for x in (logprobs, other))
  return jnp.where(possible, jnp.exp(logprobs) * (logprobs - other), 0.0)


def mixture_kl_terms(logprobs: jax.Array, other: jax.Array, share: Any) -> jax.Array:
  """p (log p - log(share p + (1 - share) q)), elementwise: at most -p log(share).

  Args:
    logprobs: log p. Differentiated.
    other: log q. Differentiated.
    share: of p in the mixture, in (0, 1).

  Returns:
    Array like logprobs.
  """
  possible = ~jnp.isneginf(logprobs)
  logprobs, other = (jnp.where(possible, x, 0.0) for x in (logprobs, other))
  return jnp.where(possible, -jnp.exp(logprobs) * _log_mixture(logprobs - other, share), 0.0)


def rest_logprob(logprobs: jax.Array, kept: jax.Array) -> jax.Array:
  """Log of the total probability of all tokens that are not kept.

  Args:
    logprobs: [..., V]. Differentiated.
    kept: [..., V] bool.

  Returns:
    [..., 1]; -inf if nothing is left.
  """
  rest = jnp.where(kept, -jnp.inf, logprobs)
  empty = jnp.all(jnp.isneginf(rest), axis=-1, keepdims=True)
  total = jax.nn.logsumexp(jnp.where(empty, 0.0, rest), axis=-1, keepdims=True)
  return jnp.where(empty, -jnp.inf, total)


def _log_mixture(x: jax.Array, share: Any) -> jax.Array:
  """log(share + (1 - share) exp(-x)), finite for every x, exact to rounding around x = 0 too."""
  share = jnp.asarray(share, x.dtype)
  positive = x >= 0
  size = jnp.where(positive, x, -x)
  # The larger of the two exponentials is taken out; `fading` weighs the other one.
  fading = jnp.where(positive, 1.0 - share, share)
  lasting = jnp.maximum(jnp.where(positive, share, 1.0 - share), jnp.finfo(x.dtype).tiny)
  near = size < 0.5
  small, large = jnp.where(near, size, 0.0), jnp.where(near, 1.0, size)
  rest = jnp.where(
    near,
    jnp.log1p(fading * jnp.expm1(-small)),
    jnp.log(lasting + fading * jnp.exp(-large)),
  )
  return jnp.where(positive, 0.0, size) + rest
