"""Response masks, lengths, last tokens, segments; masked totals and means without NaN.

A mask is boolean: True = the policy chose this token and it counts. What stands at a False
position is replaced before it is used, never multiplied by zero, so that NaN or 1e30 there
changes neither value nor gradient.

A segment is the set of counted tokens of one row that carry the same id: a sample of a packed
row, a turn, a reasoning step. Ids are any integers (0 = padding, by convention masked) and
need be neither consecutive nor contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


def zero_masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
  """x where the mask is True, exactly 0 elsewhere, in value and gradient.

  Args:
    x: [..., T]. Differentiated.
    mask: [..., T] bool, True = counts. None = all count.

  Returns:
    [..., T].

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> zero_masked(jnp.array([1.0, jnp.nan]), jnp.array([True, False]))
    Array([1., 0.], dtype=float32)
  """
  x = jnp.asarray(x)
  if mask is None:
    return x
  return jnp.where(checks.check_mask(mask, x=x), x, jnp.zeros((), x.dtype))


def masked_sum(x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None) -> Any:
  """Sum over the counted entries; 0 where none counts.

  Args:
    x: [..., T]. Differentiated.
    mask: [..., T] bool, True = counts.
    axis: axes to sum over; None = all.

  Returns:
    x summed over `axis`.

  Example:
    >>> masked_sum(jnp.array([1.0, 2.0, jnp.inf]), jnp.array([True, True, False]))
    Array(3., dtype=float32)
  """
  return jnp.sum(zero_masked(checks.as_float("x", x), mask), axis=axis)


def masked_mean(x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None) -> Any:
  """Mean over the counted entries; exactly 0 where none counts.

  The count is exact (no epsilon in the denominator), so the mean of [2, 2] is 2. Means of
  parts do not average to the mean of the whole: sum and count do (`diagnostics.Average`).

  Args:
    x: [..., T]. Differentiated.
    mask: [..., T] bool, True = counts.
    axis: axes to average over; None = all.

  Returns:
    x averaged over `axis`.

  Example:
    >>> masked_mean(jnp.array([1.0, 2.0, jnp.inf]), jnp.array([True, True, False]))
    Array(1.5, dtype=float32)
  """
  total = masked_sum(x, mask, axis=axis)
  count = jnp.sum(mask, axis=axis, dtype=jnp.int32)
  return total / jnp.maximum(count, 1).astype(total.dtype)


def lengths(mask: jax.Array) -> jax.Array:
  """Number of counted tokens of each row, |y|, as int32.

  Args:
    mask: [..., T] bool, True = counts.

  Returns:
    [...] int32 tokens.

  Example:
    >>> lengths(jnp.array([[True, True, False], [False, False, False]]))
    Array([2, 0], dtype=int32)
  """
  return jnp.sum(checks.check_mask(mask), axis=-1, dtype=jnp.int32)


def response_mask(
  tokens: jax.Array, *, stop_tokens: Any, within: jax.Array | None = None
) -> jax.Array:
  """Which tokens the policy emitted: all up to and including the first stop token.

  Made from the position of the first stop token, not from `tokens != pad`: the stop token
  itself is an action and is trained even where padding has the same id.

  Args:
    tokens: [..., T] int token ids.
    stop_tokens: one id or [S] ids, each of which ends a response.
    within: [..., T] bool, where the response may lie (False on the prompt, whose own stop
      tokens, the turn separators of a chat, do not end it); None = everywhere.

  Returns:
    [..., T] bool mask.

  Example:
    >>> response_mask(jnp.array([5, 2, 2, 2]), stop_tokens=2)
    Array([ True,  True, False, False], dtype=bool)
  """
  stops, within = _stops(tokens, stop_tokens, within)
  earlier = jnp.cumsum(stops, axis=-1, dtype=jnp.int32) - stops.astype(jnp.int32)
  return within & (earlier == 0)


def is_finished(
  tokens: jax.Array, *, stop_tokens: Any, within: jax.Array | None = None
) -> jax.Array:
  """Whether a response ends with a stop token; a response that does not is truncated.

  Args:
    tokens: [..., T] int token ids.
    stop_tokens: one id or [S] ids.
    within: [..., T] bool, where the response may lie; None = everywhere.

  Returns:
    [...] bool.

  Example:
    >>> is_finished(jnp.array([[5, 9, 0, 0], [5, 6, 7, 8]]), stop_tokens=[2, 9])
    Array([ True, False], dtype=bool)
  """
  return jnp.any(_stops(tokens, stop_tokens, within)[0], axis=-1)


def _stops(tokens: Any, stop_tokens: Any, within: Any) -> tuple[jax.Array, jax.Array]:
  """Where a stop token stands inside the region of the response, and that region."""
  tokens = checks.check_integer("tokens", tokens)
  stop_tokens = checks.check_integer("stop_tokens", stop_tokens).reshape(-1)
  if within is None:
    within = jnp.ones_like(tokens, dtype=jnp.bool_)
  within = checks.check_mask(within, name="within", tokens=tokens)
  table = stop_tokens.reshape((1,) * tokens.ndim + (-1,))
  return jnp.any(tokens[..., None] == table, axis=-1) & within, within


def last_token_mask(mask: jax.Array, *, segment_ids: jax.Array | None = None) -> jax.Array:
  """True at the last counted token of each row, or of each segment of a packed row.

  Args:
    mask: [..., T] bool, True = counts.
    segment_ids: [..., T] int, 0 = padding; None = a row is one segment.

  Returns:
    [..., T] bool; a row without a counted token has no last one.

  Example:
    >>> last_token_mask(jnp.array([True, False, True, False]))
    Array([False, False,  True, False], dtype=bool)
  """
  mask = checks.check_mask(mask)
  position = jnp.cumsum(jnp.ones_like(mask, dtype=jnp.int32), axis=-1)
  return mask & (position == segment_max(position, mask, segment_ids))


def segment_total(x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
  """At each counted token, the sum of x over the counted tokens of its segment.

  Args:
    x: [..., T], summed in float32 at least; integers stay integers. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    segment_ids: [..., T] int, 0 = padding; None = a row is one segment.

  Returns:
    [..., T].

  Raises:
    ValueError: shapes differ.

  Example:
    >>> segment_total(jnp.array([1.0, 2.0, 4.0]), jnp.array([True] * 3), jnp.array([1, 1, 2]))
    Array([3., 3., 4.], dtype=float32)
  """
  x = jnp.asarray(x)
  x = x if jnp.issubdtype(x.dtype, jnp.integer) else checks.as_float("x", x)
  mask = checks.check_mask(mask, x=x)
  x = zero_masked(x, mask)
  if segment_ids is None:
    total = jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True, dtype=x.dtype), x.shape)
  else:
    total = _per_segment(_segment_sum, x, mask, segment_ids)
  return zero_masked(total, mask)


def segment_mean(x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
  """At each counted token, the mean of x over the counted tokens of its segment.

  Args:
    x: [..., T], averaged in float32 at least. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    segment_ids: [..., T] int, 0 = padding; None = a row is one segment.

  Returns:
    [..., T].

  Raises:
    ValueError: shapes differ.

  Example:
    >>> segment_mean(jnp.array([1.0, 2.0, 4.0]), jnp.array([True] * 3), jnp.array([1, 1, 2]))
    Array([1.5, 1.5, 4. ], dtype=float32)
  """
  x = checks.as_float("x", x)
  if segment_ids is None:
    # Divided before it is spread over the tokens.
    mean = masked_mean(x, mask, axis=-1)[..., None]
    return zero_masked(jnp.broadcast_to(mean, x.shape), mask)
  count = jnp.maximum(segment_count(mask, segment_ids), 1).astype(x.dtype)
  return segment_total(x, mask, segment_ids) / count


def segment_max(x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
  """At each counted token, the largest x among the counted tokens of its segment.

  Args:
    x: [..., T]. Differentiated (ties share the gradient).
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    segment_ids: [..., T] int, 0 = padding; None = a row is one segment.

  Returns:
    [..., T].

  Raises:
    ValueError: shapes differ.

  Example:
    >>> segment_max(jnp.array([1.0, 2.0, 4.0]), jnp.array([True] * 3), jnp.array([1, 1, 2]))
    Array([2., 2., 4.], dtype=float32)
  """
  x = jnp.asarray(x)
  mask = checks.check_mask(mask, x=x)
  least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
  x = jnp.where(mask, x, jnp.asarray(least, x.dtype))
  if segment_ids is None:
    largest = jnp.max(x, axis=-1, keepdims=True, initial=least)
    largest = jnp.broadcast_to(largest, x.shape)
  else:
    largest = _per_segment(_segment_max, x, mask, segment_ids)
  return zero_masked(largest, mask)


def segment_count(mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
  """At each counted token, how many tokens its segment counts; 0 at masked positions.

  Args:
    mask: [..., T] bool, True = counts.
    segment_ids: [..., T] int, 0 = padding; None = a row is one segment.

  Returns:
    [..., T] int32.

  Example:
    >>> segment_count(jnp.array([True, True, False, True]), jnp.array([1, 1, 1, 2]))
    Array([2, 2, 0, 1], dtype=int32)
  """
  return segment_total(checks.check_mask(mask).astype(jnp.int32), mask, segment_ids)


def _per_segment(
  reduce: Callable[..., jax.Array], x: jax.Array, mask: jax.Array, segment_ids: Any
) -> jax.Array:
  """Reduces within the segments of each row and brings the result back to the tokens."""
  segment_ids = checks.check_integer("segment_ids", segment_ids)
  checks.check_same_shape(mask=mask, segment_ids=segment_ids)

  def one_row(x: jax.Array, ids: jax.Array) -> jax.Array:
    return reduce(x, _rank(ids))

  return checks.by_row(one_row, x, jnp.where(mask, segment_ids, 0))


def _segment_max(x: jax.Array, rank: jax.Array) -> jax.Array:
  """Each entry's largest entry of equal rank, [T]."""
  return jax.ops.segment_max(x, rank, num_segments=rank.shape[0])[rank]


def _segment_sum(x: jax.Array, rank: jax.Array) -> jax.Array:
  """Each entry's sum over the entries of equal rank, [T], to the rounding of one addition.

  A scatter adds one by one: 10^5 equal terms lose 1e-3 of their sum. So the bulk of each term
  is added as a whole number of units, exactly, and only what is left over is rounded.
  """
  size = rank.shape[0]

  def total(x: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x, rank, num_segments=size)[rank]

  if jnp.issubdtype(x.dtype, jnp.integer):
    return total(x)
  # Units of a power of two, such that no sum of them leaves the integers of 30 bits.
  constant = jax.lax.stop_gradient(x)
  largest = _segment_max(jnp.abs(constant), rank)
  finite = jnp.isfinite(largest)
  largest = jnp.where(finite & (largest > 0), largest, 1.0)
  power_of_two = largest / (2.0 * jnp.frexp(largest)[0])
  unit = jnp.maximum(power_of_two * 2.0 ** (size.bit_length() - 29), jnp.finfo(x.dtype).tiny)
  whole = jnp.where(finite, jnp.round(constant / unit), 0.0).astype(jnp.int32)
  return total(whole).astype(x.dtype) * unit + total(x - whole.astype(x.dtype) * unit)


def _rank(ids: jax.Array) -> jax.Array:
  """Any integers [T] -> how many of them are smaller: a segment number that is below T."""
  # One array sorted and searched: a sort that carries a second array is ten times slower on a CPU,
  # and jnp.searchsorted does not take rows that are sharded over an Explicit mesh.
  size = ids.shape[0]
  ascending = jax.lax.sort(ids, is_stable=False)

  def bisect(rank: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
    further = jnp.minimum(rank + step, size)
    return jnp.where(ascending[further - 1] < ids, further, rank), None

  steps = 2 ** jnp.arange(size.bit_length(), dtype=jnp.int32)[::-1]
  # ids * 0, not zeros: sharded as the rows are.
  return jax.lax.scan(bisect, ids.astype(jnp.int32) * 0, steps)[0]
