"""Two-pass statistics of a batch or of its groups.

Everything returned is a constant (stop_gradient): the gradient of a standard deviation at zero
variance is NaN, and no estimator wants it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


class CenteredMoments(NamedTuple):
  """What `centered_moments` returns; all but `centered` keep the reduced axes with length 1.

  Attributes:
    number: counted entries, as a float.
    mean: of the counted entries; 0 where none counts.
    variance: sum of squares / (number - ddof); exactly 0 without spread.
    centered: x - mean, of the shape of x; exactly 0 where not counted or without spread.
    has_spread: two entries or more, and max - min > 4 machine eps x max|x|.
  """

  number: jax.Array
  mean: jax.Array
  variance: jax.Array
  centered: jax.Array
  has_spread: jax.Array


def centered_moments(
  x: jax.Array, mask: jax.Array, *, ddof: int = 1, axis: int | tuple[int, ...] | None = None
) -> CenteredMoments:
  """Count, mean, variance, x - mean and whether x varies at all, over the counted entries.

  Two passes: x is centred, and centred again, before anything is squared, so that precision is
  relative to the spread (1000 +- 0.01 in float32), and rounding is never taken for spread:
  where max - min <= 4 machine eps x max|x|, `centered` and `variance` are exactly 0.

  Args:
    x: array. Constant.
    mask: bool of the shape of x, True = counts.
    ddof: the variance divides by count - ddof, 0 or 1.
    axis: axes to reduce; None = all.

  Returns:
    CenteredMoments; `centered` is 0 where the mask is False. A NaN or infinity that counts gives
    NaN: it is not taken for a lack of spread.

  Raises:
    TypeError: the mask is not boolean.
    ValueError: shapes differ, or ddof is neither 0 nor 1.

  Example:
    >>> centered_moments(jnp.array([3.0, 1.0, 9.0]), jnp.array([True, True, False])).centered
    Array([ 1., -1.,  0.], dtype=float32)

  Reference: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
  """
  x = checks.as_constant("x", x)
  mask = checks.check_mask(mask, x=x)
  checks.check_range("ddof", ddof, low=0, high=1)
  number = jnp.sum(mask, axis=axis, keepdims=True, dtype=jnp.int32).astype(x.dtype)

  def mean_of(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, x, 0), axis=axis, keepdims=True) / jnp.maximum(number, 1)

  spread = jnp.max(x, axis=axis, keepdims=True, where=mask, initial=-jnp.inf) - jnp.min(
    x, axis=axis, keepdims=True, where=mask, initial=jnp.inf
  )
  magnitude = jnp.max(jnp.abs(x), axis=axis, keepdims=True, where=mask, initial=0.0)
  equal = jnp.isfinite(spread) & (spread <= 4 * jnp.finfo(x.dtype).eps * magnitude)
  has_spread = (number >= 2) & ~equal
  mean = mean_of(x)
  remainder = mean_of(x - mean)
  centered = jnp.where(mask & has_spread, x - mean - remainder, 0)
  squares = jnp.sum(centered**2, axis=axis, keepdims=True)
  variance = squares / jnp.maximum(number - ddof, 1)
  return CenteredMoments(number, mean + remainder, variance, centered, has_spread)
