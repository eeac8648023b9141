"""Critic losses, per token, and how much of the returns a critic explains.

  value_loss              e^2 / 2,              e = V - R
  clipped_value_loss      max(e^2, e'^2) / 2,   e' = V_old + clip(V - V_old, -c, c) - R
  huber_value_loss        e^2 / 2 up to |e| = delta, then linear
  clipped_huber_value_loss  the larger of the two

Unreduced: multiply by `loss_weights` as a policy loss, sum, and add. The factor 1/2, which makes
the gradient e, is that of verl, TRL, OpenRLHF and Tunix; slime has none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks, pairs
from jaxrl_lm.statistics import Average


def value_loss(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
  r"""Squared error of the critic, halved, per token.

  loss = (V - R)^2 / 2,  d loss / d V = V - R

  Args:
    values: [..., T] V of the state before each token. Differentiated.
    returns: [..., T] target R. Constant.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0.

  Returns:
    [..., T] loss, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> value_loss(jnp.array([1.0, 9.0]), jnp.array([3.0, 0.0]), jnp.array([True, False]))
    Array([2., 0.], dtype=float32)

  Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9.
  """
  return _half_square(_error(values, returns, mask))


def clipped_value_loss(
  values: jax.Array,
  old_values: jax.Array,
  returns: jax.Array,
  mask: jax.Array,
  *,
  clip: Any = 0.2,
) -> jax.Array:
  r"""PPO's clipped squared error, halved, per token.

  loss = max((V - R)^2, (V' - R)^2) / 2,  V' = V_old + clip(V - V_old, -clip, clip)

  The larger of the two: a value that has moved towards its return by more than `clip` has no
  gradient, one that has moved away keeps the full one. `clip` has the units of the return.
  Others: TRL, Tunix, SkyRL and slime 0.2, verl and OpenRLHF 0.5.

  Args:
    values: [..., T] V of the state before each token. Differentiated.
    old_values: [..., T] V when the data were collected. Constant.
    returns: [..., T] target R. Constant.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0.
    clip: how far a value may move, >= 0.

  Returns:
    [..., T] loss, to be minimised.

  Raises:
    ValueError: shapes differ, or clip < 0.
    TypeError: the mask is not boolean.

  Example:
    >>> one, on = jnp.ones(1), jnp.array([True])
    >>> clipped_value_loss(one, 0 * one, 3 * one, on)
    Array([3.92], dtype=float32)

  Reference: the value clipping of OpenAI baselines' PPO2: Engstrom et al. 2020,
    arXiv:2005.12729, section 3.
  """
  return _half_square(_pessimistic_error(values, old_values, returns, mask, clip)[0])


def huber_value_loss(
  values: jax.Array, returns: jax.Array, mask: jax.Array, *, delta: Any
) -> jax.Array:
  r"""Huber's loss of the critic, per token: a return far off pulls no harder than `delta`.

  loss = e^2 / 2 if |e| <= delta else delta (|e| - delta / 2),  e = V - R

  Args:
    values: [..., T] V of the state before each token. Differentiated.
    returns: [..., T] target R. Constant.
    mask: [..., T] bool, True = counts; elsewhere the loss is 0.
    delta: where it becomes linear, in units of the return, > 0 (AReaL: 10).

  Returns:
    [..., T] loss, to be minimised; |d loss / d V| <= delta.

  Raises:
    ValueError: shapes differ, or delta <= 0.
    TypeError: the mask is not boolean.

  Example:
    >>> huber_value_loss(jnp.array([1.0]), jnp.array([4.0]), jnp.array([True]), delta=1.0)
    Array([2.5], dtype=float32)

  Reference: Huber 1964, "Robust estimation of a location parameter", section 3.
  """
  return _huber(_error(values, returns, mask), delta)


def clipped_huber_value_loss(
  values: jax.Array,
  old_values: jax.Array,
  returns: jax.Array,
  mask: jax.Array,
  *,
  delta: Any,
  clip: Any = 0.2,
) -> jax.Array:
  r"""`clipped_value_loss` with Huber's loss in place of the square, per token.

  loss = max(huber(V - R), huber(V' - R)),  V' = V_old + clip(V - V_old, -clip, clip)

  Args:
    values, old_values, returns, mask, clip: as in `clipped_value_loss`.
    delta: where it becomes linear, in units of the return, > 0.

  Returns:
    [..., T] loss, to be minimised.

  Raises:
    ValueError: shapes differ, clip < 0, or delta <= 0.
    TypeError: the mask is not boolean.

  Example:
    >>> one, on = jnp.ones(1), jnp.array([True])
    >>> clipped_huber_value_loss(one, 0 * one, 3 * one, on, delta=1.0).round(6)
    Array([2.3], dtype=float32)

  Reference: as `clipped_value_loss` and `huber_value_loss`.
  """
  return _huber(_pessimistic_error(values, old_values, returns, mask, clip)[0], delta)


def value_clip_fraction(
  values: jax.Array, old_values: jax.Array, returns: jax.Array, mask: jax.Array, *, clip: Any = 0.2
) -> Average:
  r"""Which part of the tokens the clip of the value loss stops.

  |V' - R| > |V - R|,  V' = V_old + clip(V - V_old, -clip, clip)

  A value outside the band whose unclipped loss is the larger one is not stopped, and not counted.

  Args:
    values, old_values, returns, mask, clip: as in `clipped_value_loss`; all constant.

  Returns:
    Average over all counted tokens.

  Raises:
    ValueError: shapes differ, or clip < 0.
    TypeError: the mask is not boolean.

  Example:
    >>> old, new, on = jnp.zeros(2), jnp.ones(2), jnp.array([True, True])
    >>> value_clip_fraction(new, old, jnp.array([3.0, -3.0]), on).mean()
    Array(0.5, dtype=float32)

  Reference: where the maximum of `clipped_value_loss` is the clipped term.
  """
  error, clipped = _pessimistic_error(values, old_values, returns, mask, clip)
  return Average.of(clipped.astype(error.dtype), jnp.asarray(mask))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExplainedVariance:
  """The share of the variance of the returns that a critic explains, still to be merged.

  Centred sums, so that parts merge exactly and returns of 1000 +- 0.01 keep their digits.

  Attributes:
    count: int32, how many tokens.
    means: [2] of the returns, and of the errors R - V.
    squares: [2] sums of (x - mean)^2 of both.
  """

  count: jax.Array
  means: jax.Array
  squares: jax.Array

  def fraction(self) -> jax.Array:
    """1 - var(R - V) / var(R): 1 is perfect, 0 no better than a constant, below 0 worse.

    0 where the returns have no spread beyond rounding, so that there is nothing to explain.
    """
    dtype = self.squares.dtype
    rounding = 4 * jnp.finfo(dtype).eps * jnp.abs(self.means[0])
    spread = self.squares[0] > self.count.astype(dtype) * jnp.square(rounding)
    share = self.squares[1] / jnp.where(spread, self.squares[0], 1)
    return jnp.where(spread, 1 - share, 0)

  def __add__(self, other: ExplainedVariance) -> ExplainedVariance:
    """The statistic over two parts."""
    count = self.count + other.count
    dtype = self.means.dtype
    share = other.count.astype(dtype) / jnp.maximum(count, 1).astype(dtype)
    apart = other.means - self.means
    between = jnp.square(apart) * (self.count.astype(dtype) * share)
    squares = self.squares + other.squares + between
    return ExplainedVariance(count, self.means + apart * share, squares)

  def all_reduce(self, axis_name: Any) -> ExplainedVariance:
    """The statistic over all devices of a mesh axis."""
    number = self.count.astype(self.means.dtype)
    count = jax.lax.psum(self.count, axis_name)
    total = jax.lax.psum(number * self.means, axis_name)
    means = total / jnp.maximum(count, 1).astype(number.dtype)
    between = number * jnp.square(self.means - means)
    return ExplainedVariance(count, means, jax.lax.psum(self.squares + between, axis_name))


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> ExplainedVariance:
  r"""How much of the variance of the returns the critic explains.

  1 - var(R - V) / var(R)

  A constant offset of the critic does not lower it: look at the loss too. A mean of the numbers
  of micro-batches is not the number of the whole: add the parts, then call `fraction`.

  Args:
    values: [..., T] V. Constant.
    returns: [..., T] R. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    ExplainedVariance over all counted tokens; `.fraction()` is the number.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> returns, on = jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.ones(4, bool)
    >>> explained_variance(0.5 * returns + 7.0, returns, on).fraction()
    Array(0.75, dtype=float32)

  Reference: the coefficient of determination of centred errors; merging: Chan, Golub and
    LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
  """
  error = -jax.lax.stop_gradient(_error(values, returns, mask))
  returns, mask = checks.masked_constant("returns", returns, mask)
  count = jnp.sum(mask, dtype=jnp.int32)
  number = jnp.maximum(count, 1).astype(error.dtype)

  def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = jnp.sum(x) / number
    rest = jnp.where(mask, x - mean, 0)
    correction = jnp.sum(rest) / number
    return mean + correction, jnp.sum(jnp.square(jnp.where(mask, rest - correction, 0)))

  means, squares = zip(moments(returns.astype(error.dtype)), moments(error), strict=True)
  return ExplainedVariance(count, jnp.stack(means), jnp.stack(squares))


def _error(values: Any, returns: Any, mask: Any) -> jax.Array:
  """V - R, 0 at masked positions."""
  values = checks.as_float("values", values)
  returns = checks.as_constant("returns", returns)
  checks.check_same_shape(values=values, returns=returns)
  mask = checks.check_mask(mask, values=values)
  return masks.zero_masked(values, mask) - masks.zero_masked(returns, mask)


def _pessimistic_error(
  values: Any, old_values: Any, returns: Any, mask: Any, clip: Any
) -> tuple[jax.Array, jax.Array]:
  """The larger of V - R and V' - R in absolute value, and where that is the second."""
  error = _error(values, returns, mask)
  old_values, mask = checks.masked_constant("old_values", old_values, mask)
  clip = pairs.number("clip", clip, error, low=0.0)
  moved = masks.zero_masked(checks.as_constant("values", values), mask) - old_values
  returns = masks.zero_masked(checks.as_constant("returns", returns), mask)
  bounded = old_values + jnp.clip(moved, -clip, clip) - returns
  # Inside the band V' is V: rounding in old + (V - old) must not cost the gradient.
  clipped = (jnp.abs(moved) > clip) & (jnp.abs(bounded) > jnp.abs(error))
  return jnp.where(clipped, bounded.astype(error.dtype), error), clipped


def _half_square(error: jax.Array) -> jax.Array:
  return 0.5 * jnp.square(error)


def _huber(error: jax.Array, delta: Any) -> jax.Array:
  delta = pairs.positive("delta", delta, error)
  size = jnp.abs(error)
  return jnp.where(size <= delta, _half_square(error), delta * (size - 0.5 * delta))
