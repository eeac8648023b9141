"""Building blocks of preference losses: checked pairs, constants, the logistic loss.

A new loss of paired responses is three lines of these:

  def squared_hinge_loss(chosen_log_ratio, rejected_log_ratio, *, beta=0.1):
    x = scaled_margin(chosen_log_ratio, rejected_log_ratio, beta)
    return jnp.square(jnp.maximum(1.0 - x, 0.0))
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


def same_rows(**arrays: Any) -> tuple[jax.Array, ...]:
  """Arrays with one entry per pair, or per response: checked, float32 at least.

  Args:
    **arrays: name=array; all of one shape, of one axis at least.

  Returns:
    The arrays, widened.

  Raises:
    ValueError: shapes differ, or an array has no axis; the message names the argument.
    TypeError: an array is missing (None), complex or not numeric.
  """
  widened = {name: checks.as_float(name, required(name, x)) for name, x in arrays.items()}
  checks.check_same_shape(**widened)
  for name, x in widened.items():
    checks.check_rank(name, x, 1)
  return tuple(widened.values())


def required(name: str, x: Any) -> Any:
  """The argument, which must not be None.

  Args:
    name: what to call the argument in an error.
    x: what was given.

  Returns:
    x.

  Raises:
    TypeError: x is None.
  """
  if x is None:
    raise TypeError(f"{name} is required, got None")
  return x


def number(name: str, value: Any, like: jax.Array, **limits: Any) -> jax.Array:
  """A constant of a loss: one number, in a range, of the dtype of the data.

  Args:
    name: what to call the argument in an error.
    value: number, or array of no axes.
    like: array whose dtype the number takes.
    **limits: as `checks.check_range` takes them.

  Returns:
    Scalar without a gradient.

  Raises:
    ValueError: the value has axes, is outside the range, or is NaN.
    TypeError: the value is None.
  """
  checks.check_range(name, value, **limits)
  return jax.lax.stop_gradient(jnp.asarray(value, like.dtype))


def scaled_margin(chosen_log_ratio: Any, rejected_log_ratio: Any, beta: Any) -> jax.Array:
  """beta (chosen - rejected), of checked arguments.

  Args:
    chosen_log_ratio, rejected_log_ratio: [B] nats. Differentiated.
    beta: > 0.

  Returns:
    [B] margin.

  Raises:
    ValueError: shapes differ, or beta <= 0.
  """
  chosen, rejected = same_rows(
    chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio
  )
  return positive("beta", beta, chosen) * (chosen - rejected)


def positive(name: str, value: Any, like: jax.Array) -> jax.Array:
  """`number` that is > 0.

  Args:
    name: what to call the argument in an error.
    value: number, or array of no axes.
    like: array whose dtype the number takes.

  Returns:
    Scalar without a gradient.

  Raises:
    ValueError: the value has axes, is <= 0, or is NaN.
    TypeError: the value is None.
  """
  return number(name, value, like, low=0.0, open_low=True)


def smoothing(value: Any, like: jax.Array, *, open_low: bool = False) -> jax.Array:
  """A label smoothing: the probability that a label is wrong.

  Args:
    value: in [0, 0.5); at 0.5 the labels would say nothing.
    like: array whose dtype the number takes.
    open_low: 0 is outside.

  Returns:
    Scalar without a gradient.

  Raises:
    ValueError: the value is outside.
  """
  limits = {"low": 0.0, "high": 0.5, "open_low": open_low, "open_high": True}
  return number("label_smoothing", value, like, **limits)


def logistic_loss(x: jax.Array) -> jax.Array:
  """-log sigmoid(x): linear, not inf, far below 0, with the gradient -sigmoid(-x).

  Args:
    x: array. Differentiated.

  Returns:
    Array like x, >= 0.
  """
  return -jax.nn.log_sigmoid(x)


def smoothed_logistic_loss(x: jax.Array, label_smoothing: jax.Array) -> jax.Array:
  """The logistic loss of labels that are wrong with a probability.

  Args:
    x: array. Differentiated.
    label_smoothing: scalar.

  Returns:
    Array like x.
  """
  return (1.0 - label_smoothing) * logistic_loss(x) + label_smoothing * logistic_loss(-x)


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
  """1 / (1 + exp(-x)), whose derivative sig(x) sig(-x) does not round to 0 for x > 17.

  Args:
    x: array. Differentiated.

  Returns:
    Array like x, in [0, 1].
  """
  return jax.nn.sigmoid(x)


@sigmoid.defjvp
def _sigmoid_jvp(primals: Any, tangents: Any) -> Any:
  (x,), (tangent,) = primals, tangents
  return sigmoid(x), sigmoid(x) * sigmoid(-x) * tangent
