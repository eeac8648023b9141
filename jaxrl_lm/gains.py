"""Building blocks of surrogates: checked inputs, one-sided clips, the two forms of a gain.

A new surrogate is three lines of these:

  def clip_only_high(log_ratio, advantages, *, high, mask=None, **unused):
    log_ratio, advantages, mask = inputs(log_ratio, advantages, mask)
    return ratio_gain(at_most(log_ratio, high), advantages)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks


def inputs(
  log_ratio: Any,
  advantages: Any,
  mask: Any,
  old_logprobs: Any = None,
  segment_ids: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The arguments of a surrogate, checked and made safe to compute with.

  Args:
    log_ratio: [..., T], nats.
    advantages: [..., T] or [..., 1].
    mask: [..., T] bool, or None = all count.
    old_logprobs, segment_ids: [..., T], or None. Only checked: a surrogate that has no use for
      them refuses wrong ones as the next one would.

  Returns:
    log_ratio and advantages, [..., T], float32 at least, 0 at masked positions, the
    advantages constant; and the mask.

  Raises:
    ValueError: shapes do not match.
    TypeError: the mask is not boolean, or segment_ids are not integers.
  """
  log_ratio = checks.as_float("log_ratio", log_ratio)
  checks.check_rank("log_ratio", log_ratio, 1)
  advantages = checks.spread_over_tokens("advantages", advantages, log_ratio=log_ratio)
  if mask is None:
    mask = jnp.ones_like(log_ratio, dtype=jnp.bool_)
  mask = checks.check_mask(mask, log_ratio=log_ratio)
  if old_logprobs is not None:
    old_logprobs = checks.as_float("old_logprobs", old_logprobs)
    checks.check_same_shape(log_ratio=log_ratio, old_logprobs=old_logprobs)
  if segment_ids is not None:
    segment_ids = checks.check_integer("segment_ids", segment_ids)
    checks.check_same_shape(log_ratio=log_ratio, segment_ids=segment_ids)
  return masks.zero_masked(log_ratio, mask), masks.zero_masked(advantages, mask), mask


def log_band(clip_low: Any, clip_high: Any) -> tuple[jax.Array, jax.Array]:
  """Ends of the ratio band [1 - clip_low, 1 + clip_high] as log-ratios.

  Args:
    clip_low: width below 1, in [0, 1]; 1 gives -inf, no lower end.
    clip_high: width above 1, >= 0.

  Returns:
    log(1 - clip_low), log(1 + clip_high).

  Raises:
    ValueError: a width is out of range.
  """
  checks.check_range("clip_low", clip_low, low=0.0, high=1.0)
  checks.check_range("clip_high", clip_high, low=0.0)
  return jnp.log1p(-clip_low), jnp.log1p(clip_high)


def at_most(x: jax.Array, high: Any) -> jax.Array:
  """min(x, high) whose gradient at x == high is 1 (that of jnp.minimum is 0.5).

  Args:
    x: array. Differentiated.
    high: number or array.

  Returns:
    Array like x.
  """
  return jnp.where(x > high, jnp.asarray(high, x.dtype), x)


def at_least(x: jax.Array, low: Any) -> jax.Array:
  """max(x, low) whose gradient at x == low is 1 (that of jnp.maximum is 0.5).

  Args:
    x: array. Differentiated.
    low: number or array.

  Returns:
    Array like x.
  """
  return jnp.where(x < low, jnp.asarray(low, x.dtype), x)


def ratio_gain(log_ratio: jax.Array, advantages: jax.Array) -> jax.Array:
  """A exp(log_ratio); exactly 0 where A = 0, also where the ratio overflows.

  Args:
    log_ratio: [..., T], nats. Differentiated.
    advantages: [..., T].

  Returns:
    [..., T] gain.
  """
  return advantages * jnp.exp(jnp.where(advantages == 0, 0.0, log_ratio))


def score_gain(
  weight: Any, log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, old_logprobs: Any
) -> jax.Array:
  """sg(weight) A log pi, log pi = log_ratio + old_logprobs where those are given.

  Args:
    weight: [..., T] or a number. Constant.
    log_ratio: [..., T], nats. Differentiated.
    advantages: [..., T].
    mask: [..., T] bool.
    old_logprobs: [..., T], nats, or None. Constant.

  Returns:
    [..., T] gain.

  Raises:
    ValueError: shapes do not match.
  """
  score = log_ratio
  if old_logprobs is not None:
    old_logprobs = checks.as_constant("old_logprobs", old_logprobs)
    checks.check_same_shape(log_ratio=log_ratio, old_logprobs=old_logprobs)
    score = score + masks.zero_masked(old_logprobs, mask)
  # A weight without a cap may overflow, and inf * 0 is NaN where A or log pi is 0.
  weight = jnp.where(advantages == 0, 0.0, jax.lax.stop_gradient(weight))
  weight = jnp.where(score == 0, jnp.minimum(weight, jnp.finfo(score.dtype).max), weight)
  return weight * (advantages * score)
