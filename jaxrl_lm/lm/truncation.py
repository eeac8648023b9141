r"""Truncated distributions: logits [..., V] -> logits whose excluded tokens are -inf.

Tokens are ordered by their logit, the larger first, and equal ones by their id, the smaller first
(as argmax does):

  keep_top_k   the first k of the order
  keep_top_p   the shortest beginning of the order whose probability reaches p
  keep_min_p   every token at least min_p times as probable as the first

The first token of the order is always kept, and so is a NaN: a row that has one stays visibly
broken. The order of application is the caller's;
`sampling.sample` divides by the temperature and then applies top-k, top-p and min-p, each to what
the one before it left, as Hugging Face transformers does. The kept sets are those of transformers
too, except that its top-k keeps every token that is equal to the k-th, and here k are kept.

Nothing is sorted: the last logit that is kept is found by bisection over the float32 numbers
themselves, in 32 passes over V, and exactly.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


def keep_top_k(logits: jax.Array, k: Any) -> jax.Array:
  """The k likeliest tokens; of equal ones those with the smaller ids.

  Args:
    logits: [..., V]. Constant.
    k: tokens kept, 1 <= k <= V; may be traced.

  Returns:
    [..., V] logits, float32, -inf where excluded.

  Raises:
    ValueError: k is outside of [1, V].
    TypeError: k is not an integer.

  Example:
    >>> keep_top_k(jnp.array([3.0, 2.0, 2.0, 2.0, 1.0]), 2)
    Array([  3.,   2., -inf, -inf, -inf], dtype=float32)

  Reference: Fan et al. 2018, arXiv:1805.04833, section 5.
  """
  logits = checks.as_constant("logits", logits).astype(jnp.float32)
  checks.check_whole("k", k, low=1, high=logits.shape[-1])
  return _keep_until(logits, jnp.ones_like(logits), k)


def keep_top_p(logits: jax.Array, p: Any) -> jax.Array:
  r"""The nucleus: the fewest likeliest tokens that together have probability p or more.

  A token is kept if those before it in the order have less than p. p = 0 keeps the first token,
  p = 1 all that are possible, up to rounding: a tail of 1e-7 may go.

  Args:
    logits: [..., V]. Constant.
    p: probability to reach, in [0, 1]; may be traced.

  Returns:
    [..., V] logits, float32, -inf where excluded.

  Raises:
    ValueError: p is outside of [0, 1].

  Example:
    >>> keep_top_p(jnp.log(jnp.array([0.5, 0.3, 0.2])), 0.6)
    Array([-0.6931472, -1.2039728, -inf], dtype=float32)

  Reference: Holtzman et al. 2020, arXiv:1904.09751, section 3.1.
  """
  logits = checks.as_constant("logits", logits).astype(jnp.float32)
  checks.check_range("p", p, low=0.0, high=1.0)
  return _keep_until(logits, jax.nn.softmax(logits, axis=-1), p)


def keep_min_p(logits: jax.Array, min_p: Any) -> jax.Array:
  r"""Every token whose probability is at least min_p times the largest one.

  p_v >= min_p max_w p_w,  that is  z_v >= max_w z_w + log min_p

  Args:
    logits: [..., V]. Constant.
    min_p: in [0, 1]; 0 keeps all, 1 the likeliest and those equal to it. May be traced.

  Returns:
    [..., V] logits, float32, -inf where excluded.

  Raises:
    ValueError: min_p is outside of [0, 1].

  Example:
    >>> keep_min_p(jnp.log(jnp.array([0.5, 0.3, 0.2])), 0.5)
    Array([-0.6931472, -1.2039728, -inf], dtype=float32)

  Reference: Nguyen et al. 2024, arXiv:2407.01082, section 3.
  """
  logits = checks.as_constant("logits", logits).astype(jnp.float32)
  checks.check_range("min_p", min_p, low=0.0, high=1.0)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  near = (logits - largest >= jnp.log(min_p)) | (logits == largest)  # inf - inf is NaN
  return jnp.where(near | jnp.isnan(logits), logits, -jnp.inf)


def keep_valid(logits: jax.Array, valid_vocab: Any) -> jax.Array:
  """The ids that exist: a head that is padded to a round size has rows for more.

  Args:
    logits: [..., V]. Differentiated.
    valid_vocab: number of ids that exist, <= V; may be traced. None = V.

  Returns:
    [..., V] logits, -inf from `valid_vocab` on.

  Raises:
    ValueError: valid_vocab is outside of [1, V].
    TypeError: it is not an integer.

  Example:
    >>> keep_valid(jnp.array([2.0, 1.0, 0.0, 0.0]), 3)
    Array([  2.,   1.,   0., -inf], dtype=float32)
  """
  if valid_vocab is None:
    return logits
  checks.check_whole("valid_vocab", valid_vocab, low=1, high=logits.shape[-1])
  # An iota and not a slice, so that the vocabulary may be sharded.
  ids = jax.lax.broadcasted_iota(
    jnp.int32, (1,) * (logits.ndim - 1) + logits.shape[-1:], logits.ndim - 1
  )
  return jnp.where(ids < valid_vocab, logits, -jnp.inf)


def _keep_until(logits: jax.Array, weights: jax.Array, target: Any) -> jax.Array:
  """The shortest beginning of the order whose weights sum to the target; at least one token.

  Equal logits must have equal weights.
  """

  def weight_above(threshold: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(logits > threshold, weights, 0.0), axis=-1, keepdims=True)

  def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds
    # The mean of two integers, rounded down, whose sum may overflow.
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    enough = weight_above(_from_ordinal(middle)) >= target
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

  # The weight above `low` reaches the target, above `high` it does not; in the end they are
  # neighbours, and `high` is the last logit kept. (If all that is possible does not reach the
  # target, it is -inf.)
  high = _ordinal(jnp.max(logits, axis=-1, keepdims=True))
  low = jnp.full_like(high, _ordinal(jnp.float32(-jnp.inf)))
  last = _from_ordinal(jax.lax.fori_loop(0, 32, halve, (low, high))[1])
  # Of the tokens that are equal to the last one, as many as are needed.
  equal = logits == last
  each = jnp.max(jnp.where(equal, weights, 0.0), axis=-1, keepdims=True)
  missing = jnp.ceil((target - weight_above(last)) / jnp.where(each > 0, each, 1.0))
  room = jnp.maximum(missing, 1.0).astype(jnp.int32)
  first = jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room
  kept = (logits > last) | (equal & first) | jnp.isnan(logits)
  return jnp.where(kept, logits, -jnp.inf)


def _ordinal(x: jax.Array) -> jax.Array:
  """A float32 as an int32 such that larger numbers have larger integers."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _from_ordinal(ordinal: jax.Array) -> jax.Array:
  """The float32 of an `_ordinal`."""
  bits = jnp.where(ordinal < 0, -ordinal | jnp.int32(-(2**31)), ordinal)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
