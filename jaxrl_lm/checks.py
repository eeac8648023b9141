"""Checks of shape, dtype and range whose message names the argument.

They look only at what is known while tracing, so they cost nothing at run time and behave the
same with and without jit. A range is checked when the constant is concrete and not when it is
traced, so that constants of an objective may be vmapped over.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

LEAST_TEMPERATURE = 1e-30  # below it, logits divided by it overflow float32


def as_float(name: str, x: Any) -> jax.Array:
  """Array of at least float32: bfloat16 and float16 are widened, float64 stays float64.

  Integers and booleans (rewards of 0 and 1) become JAX's default float.

  Args:
    name: what to call the argument in an error.
    x: array or nested list of real numbers.

  Returns:
    The same numbers, shape unchanged.

  Raises:
    TypeError: x is complex, or not numeric.
  """
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.floating):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_:
    return x.astype(jnp.result_type(float))
  raise TypeError(f"{name} must hold real numbers, got {x.dtype} of shape {x.shape}")


def as_constant(name: str, x: Any) -> jax.Array:
  """`as_float` without a gradient: the value is a constant of the loss.

  Args:
    name: what to call the argument in an error.
    x: array or nested list of real numbers.

  Returns:
    stop_gradient of the widened array.

  Raises:
    TypeError: x is complex, or not numeric.
  """
  return jax.lax.stop_gradient(as_float(name, x))


def masked_constant(name: str, x: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
  """A per-token array that is a constant of the loss, with 0 at masked positions; and its mask.

  Args:
    name: what to call the argument in an error.
    x: [..., T] real numbers.
    mask: [..., T] bool, True = counts.

  Returns:
    The widened array without a gradient, and the mask as a JAX array.

  Raises:
    TypeError: x is not real, or the mask is not boolean.
    ValueError: the shapes differ.
  """
  x = as_constant(name, x)
  mask = check_mask(mask, **{name: x})
  return jnp.where(mask, x, 0), mask


def scaled_logits(logits: Any, mask: Any, temperature: Any) -> jax.Array:
  """Logits / temperature in float32 at least; masked rows become all zeros.

  Args:
    logits: [..., T, V]. Differentiated.
    mask: [..., T] bool, or None = all count.
    temperature: >= LEAST_TEMPERATURE. Differentiated, also where a logit is -inf.

  Returns:
    [..., T, V]; a logit of -inf stays -inf.

  Raises:
    ValueError: shapes do not match, or temperature <= 0 or so small that logits overflow.
  """
  logits = as_float("logits", logits)
  check_rank("logits", logits, 2)
  check_temperature(temperature)
  if mask is not None:
    mask = check_mask(mask, **token_shape(logits))
    logits = jnp.where(mask[..., None], logits, 0.0)
  if not isinstance(temperature, jax.core.Tracer):
    # Without the selects below, which cost a CPU more than the softmax does.
    one = np.ndim(temperature) == 0 and temperature == 1
    return logits if one else logits / jnp.asarray(temperature, logits.dtype)
  # A -inf is left as it is: its quotient would have a NaN gradient in the temperature.
  excluded = jnp.isneginf(logits)
  scaled = jnp.where(excluded, 0.0, logits) / jnp.asarray(temperature, logits.dtype)
  return jnp.where(excluded, -jnp.inf, scaled)


def check_temperature(temperature: Any) -> None:
  """A temperature is above 0, and not so small that logits divided by it overflow.

  Args:
    temperature: number; a traced one is not looked at.

  Returns:
    None.

  Raises:
    ValueError: it is below LEAST_TEMPERATURE.
  """
  check_range("temperature", temperature, low=0.0, open_low=True)
  check_range("temperature", temperature, low=LEAST_TEMPERATURE)


def check_same_shape(**arrays: Any) -> None:
  """Every array has exactly the shape of the first; nothing broadcasts.

  Args:
    **arrays: name=array, or anything with a shape; the first one sets the shape.

  Returns:
    None.

  Raises:
    ValueError: the shapes differ; the message names the argument and shows both shapes.
  """
  (reference, first), *others = ((name, _shape(x)) for name, x in arrays.items())
  for name, shape in others:
    if shape != first:
      raise ValueError(
        f"{name} must have the shape of {reference}: {name} is {shape}, {reference} is {first}"
      )


def _shape(x: Any) -> tuple[int, ...]:
  return x.shape if isinstance(x, jax.ShapeDtypeStruct) else jnp.shape(x)


def row_shape(mask: jax.Array) -> dict[str, Any]:
  """[...] under the name it has in an error: the shape of what there is one of per row.

  Args:
    mask: [..., T].

  Returns:
    {"mask[..., 0]": a shape}, to be the first argument of `check_same_shape`.
  """
  return {"mask[..., 0]": jax.ShapeDtypeStruct(mask.shape[:-1], mask.dtype)}


def token_shape(logits: jax.Array) -> dict[str, Any]:
  """[..., T] under the name it has in an error; not a slice, which a sharded axis forbids.

  Args:
    logits: [..., T, V].

  Returns:
    {"logits[..., 0]": a shape}, to be the first argument of `check_same_shape`.
  """
  return {"logits[..., 0]": jax.ShapeDtypeStruct(logits.shape[:-1], logits.dtype)}


def on_every_device(x: jax.Array) -> jax.Array:
  """An array that is sharded over an Explicit mesh, whole on every device; others as they are.

  Args:
    x: array.

  Returns:
    The same array, replicated.
  """
  spec = getattr(jax.typeof(x).sharding, "spec", ())
  return x if all(axis is None for axis in spec) else jax.sharding.reshard(x, PartitionSpec())


def by_row(one_row: Callable[..., jax.Array], x: Any, *others: Any) -> jax.Array:
  """A function of one row, for every row: mapped over all leading axes.

  Each row is sorted and indexed inside `vmap`, which keeps the sharding of rows on Explicit
  meshes; batched indices do not.

  Args:
    one_row: function of arrays [T] (or [] where there is one value per row).
    x: array [..., T], or a dict of such.
    *others: arrays with the same leading axes.

  Returns:
    [..., T], or what `one_row` returns with the leading axes in front.
  """
  for _ in range(jax.tree.leaves(x)[0].ndim - 1):
    one_row = jax.vmap(one_row)
  return one_row(x, *others)


def check_rank(name: str, x: Any, minimum: int) -> None:
  """An array has at least `minimum` axes.

  Args:
    name: what to call the argument in an error.
    x: the array.
    minimum: fewest axes allowed.

  Returns:
    None.

  Raises:
    ValueError: there are fewer.
  """
  if jnp.ndim(x) < minimum:
    raise ValueError(f"{name} must have at least {minimum} axes, got shape {jnp.shape(x)}")


def check_mask(mask: Any, *, name: str = "mask", **like: Any) -> jax.Array:
  """A boolean mask, of the shape of another array where one is given.

  Args:
    mask: bool array.
    name: what to call the mask in an error.
    **like: at most one name=array, whose shape the mask must have.

  Returns:
    The mask as a JAX array.

  Raises:
    TypeError: the mask is not boolean.
    ValueError: the shapes differ, or the mask is a scalar.
  """
  mask = jnp.asarray(mask)
  if mask.dtype != jnp.bool_:
    raise TypeError(f"{name} must be boolean, got {mask.dtype} of shape {mask.shape}")
  check_rank(name, mask, 1)
  for reference, x in like.items():
    check_same_shape(**{reference: x, name: mask})
  return mask


def check_integer(name: str, x: Any) -> jax.Array:
  """An array of integers (token ids, segment ids, lengths).

  Args:
    name: what to call the argument in an error.
    x: integer array.

  Returns:
    The same as a JAX array.

  Raises:
    TypeError: another dtype.
    ValueError: a number does not fit: without x64, 2**32 + 5 would become 5.
  """
  try:
    array = jnp.asarray(x)
  except OverflowError as error:
    raise ValueError(f"{name} must fit its dtype: {error}") from error
  except (TypeError, ValueError) as error:
    raise TypeError(f"{name} must be integer: {error}") from error
  if not jnp.issubdtype(array.dtype, jnp.integer):
    raise TypeError(f"{name} must be integer, got {array.dtype} of shape {array.shape}")
  if isinstance(x, np.ndarray | np.generic) and x.dtype != array.dtype and x.size:
    bounds = np.iinfo(array.dtype)
    if x.min() < bounds.min or x.max() > bounds.max:
      raise ValueError(f"{name} must fit {array.dtype}, got numbers from {x.min()} to {x.max()}")
  return array


def check_whole(
  name: str, value: Any, *, low: int | None = None, high: int | None = None, static: bool = False
) -> Any:
  """A constant is one integer (2.0, True and "3" are none), in a range where it is concrete.

  Args:
    name: what to call the argument in an error.
    value: integer, or array of no axes.
    low, high: ends of the range; None is no end.
    static: it decides a shape, and may not be traced.

  Returns:
    A Python int; a traced value as it is.

  Raises:
    TypeError: it is not an integer, or traced where it may not be.
    ValueError: it has axes, or is outside of the range.
  """
  if isinstance(value, jax.core.Tracer):
    if static:
      raise TypeError(f"{name} must be known while tracing, got {value}")
    check_range(name, check_integer(name, value))
    return value
  if np.ndim(value):
    raise ValueError(f"{name} must be one number, got shape {np.shape(value)}")
  try:
    whole = operator.index(value)
  except TypeError:
    raise TypeError(f"{name} must be an integer, got {value!r}") from None
  if isinstance(value, bool | np.bool_):
    raise TypeError(f"{name} must be an integer, got {value!r}")
  check_range(name, whole, low=low, high=high)
  return whole


def spread_over_tokens(name: str, x: Any, **like: Any) -> jax.Array:
  """A constant of the loss per token, or per sequence and written as [..., 1], at every token.

  The only broadcasting there is: `advantages[..., None]`, written by the caller. [B] against
  [B, T] is an error even when B == T.

  Args:
    name: what to call the argument in an error.
    x: [..., T] or [..., 1] real numbers.
    **like: exactly one name=array of shape [..., T].

  Returns:
    [..., T], float32 at least, without a gradient.

  Raises:
    ValueError: another shape.
    TypeError: x is complex, or not numeric.
  """
  ((reference, other),) = like.items()
  x, shape = as_constant(name, x), jnp.shape(other)
  if x.shape not in (shape, shape[:-1] + (1,)):
    raise ValueError(
      f"{name} must have the shape of {reference}, or one value per sequence as "
      f"{name}[..., None]: {name} is {x.shape}, {reference} is {shape}"
    )
  return jnp.broadcast_to(x, shape)


def check_range(
  name: str,
  value: Any,
  *,
  low: float | None = None,
  high: float | None = None,
  open_low: bool = False,
  open_high: bool = False,
) -> None:
  """A constant is one number, and, if it is concrete, lies in a range.

  A traced number is not looked at. An array is an error: it would broadcast over the tokens.

  Args:
    name: what to call the argument in an error.
    value: number, or array of no axes.
    low, high: ends of the range; None is no end.
    open_low, open_high: the end itself is outside.

  Returns:
    None.

  Raises:
    ValueError: the value has axes, is outside, or is NaN.
    TypeError: the value is None (a required constant was not given), or text.
  """
  if value is None:
    raise TypeError(f"{name} is required, got None")
  if isinstance(value, str):
    raise TypeError(f"{name} must be a number, got {value!r}")
  if jnp.ndim(value) != 0:
    raise ValueError(f"{name} must be one number, got shape {jnp.shape(value)}")
  check_entries(name, value, low=low, high=high, open_low=open_low, open_high=open_high)


def check_entries(
  name: str,
  value: Any,
  *,
  low: float | None = None,
  high: float | None = None,
  open_low: bool = False,
  open_high: bool = False,
) -> None:
  """Every entry of a concrete array lies in a range; a traced one is not looked at.

  Args:
    name: what to call the argument in an error.
    value: number or array.
    low, high: ends of the range; None is no end.
    open_low, open_high: the end itself is outside.

  Returns:
    None.

  Raises:
    ValueError: an entry is outside, or NaN.
  """
  if isinstance(value, jax.core.Tracer):
    return
  number = np.asarray(value, dtype=np.float64)
  above = low is None or np.all(number > low if open_low else number >= low)
  below = high is None or np.all(number < high if open_high else number <= high)
  if above and below and not np.any(np.isnan(number)):
    return
  left = "(-inf" if low is None else f"{'(' if open_low else '['}{low}"
  right = "inf)" if high is None else f"{high}{')' if open_high else ']'}"
  raise ValueError(f"{name} must lie in {left}, {right}, got {value}")
