r"""Who may look at whom, what is remembered, and grouped-query attention.

A token attends to the tokens before it in its row that belong to its own segment, and to
itself; with a sliding window, to those fewer than `window` positions back. Padding (segment 0)
attends to nothing and nothing attends to it, wherever it stands in the row. So a row may be
left-padded, right-padded or packed, and gives the numbers of its sequences taken alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Cache(NamedTuple):
  r"""Keys and values of the tokens seen so far: a pytree of arrays, never changed in place.

  All rows are written at the same slot, so that a step of decoding is one update of a slice; a
  row that is shorter has padding there. Memory of keys and values, in bytes:

    2 L B S KV D bytes_per_number

  with L layers, B rows, S slots, KV key/value heads of D coordinates, in the compute dtype. A
  sliding window does not make it smaller.

  Attributes:
    keys: [L, B, KV, D, S] where layers are scanned, else L arrays [B, KV, D, S]. Slots are last:
      a step of decoding on CPU is then 1.3 to 1.5 times faster.
    values: [L, B, KV, S, D], or L arrays [B, KV, S, D].
    positions: [B, S] int32 position of the token in each slot.
    segment_ids: [B, S] int32 its segment, 0 = padding or not yet written.
    length: [] int32 number of slots written, the same for all rows.
  """

  keys: jax.Array | tuple[jax.Array, ...]
  values: jax.Array | tuple[jax.Array, ...]
  positions: jax.Array
  segment_ids: jax.Array
  length: jax.Array


def default_segment_ids(shape: tuple[int, ...], cache: Cache | None) -> jax.Array:
  """One segment per row: 1, or with a cache the one that the row was last in.

  Args:
    shape: (B, T).
    cache: what came before; None = nothing.

  Returns:
    [B, T] int32.
  """
  if cache is None:
    return jnp.ones(shape, jnp.int32)
  slots = jnp.arange(cache.segment_ids.shape[1])[None, :]
  latest = jnp.max(jnp.where(cache.segment_ids > 0, slots, -1), axis=1, keepdims=True)
  segment = jnp.sum(jnp.where(slots == latest, cache.segment_ids, 0), axis=1, keepdims=True)
  return jnp.broadcast_to(jnp.maximum(segment, 1), shape)


def default_positions(segment_ids: jax.Array, cache: Cache | None) -> jax.Array:
  """Counts the tokens of each segment from 0, or on from what the cache holds of the segment.

  Args:
    segment_ids: [B, T] int, 0 = padding, which does not count. A segment need not be contiguous.
    cache: what came before; None = nothing.

  Returns:
    [B, T] int32; 0 at padding.
  """
  order = jnp.arange(segment_ids.shape[1])
  earlier = (order[:, None] > order[None, :])[None]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  positions = jnp.sum(same & earlier, axis=-1, dtype=jnp.int32)
  if cache is not None:
    same = segment_ids[:, :, None] == cache.segment_ids[:, None, :]
    after = jnp.where(same, cache.positions[:, None, :] + 1, 0)
    positions = positions + jnp.max(after, axis=-1)
  return jnp.where(segment_ids > 0, positions, 0)


def attention_mask(
  positions: jax.Array, segment_ids: jax.Array, cache: Cache | None, *, window: int | None
) -> jax.Array:
  """True where a token (axis 1) may attend to another (axis 2).

  Args:
    positions: [B, T] int.
    segment_ids: [B, T] int, 0 = padding.
    cache: with these tokens already in it (`remembered`); None = they attend to themselves.
    window: sliding window in positions: a token sees itself and the window - 1 before it.

  Returns:
    [B, T, S] bool; S = T without a cache.
  """
  count = positions.shape[1]
  order = jnp.arange(count)
  if cache is None:
    key_positions, key_segments, slots = positions, segment_ids, order
  else:
    key_positions, key_segments = cache.positions, cache.segment_ids
    slots = jnp.arange(key_positions.shape[1])
    order = order + cache.length - count
  causal = (slots[None, :] <= order[:, None])[None]
  same = segment_ids[:, :, None] == key_segments[:, None, :]
  mask = causal & same & (key_segments > 0)[:, None, :]
  if window is not None:
    mask = mask & (positions[:, :, None] - key_positions[:, None, :] < window)
  return mask


def remembered(cache: Cache, positions: jax.Array, segment_ids: jax.Array) -> Cache:
  """The cache with the next tokens' positions and segments in it; keys and values follow.

  Args:
    cache: what came before.
    positions, segment_ids: [B, T] int of the tokens to come.

  Returns:
    A cache whose `length` counts them.

  Raises:
    ValueError: they do not fit, where the length is concrete.
  """
  count, slots = positions.shape[1], cache.positions.shape[1]
  used = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
  if used + count > slots:
    raise ValueError(
      f"tokens do not fit the cache: {count} of them after {used} written slots, of {slots} slots"
    )
  return cache._replace(
    positions=write(cache.positions, positions, cache.length, axis=1),
    segment_ids=write(cache.segment_ids, segment_ids, cache.length, axis=1),
    length=cache.length + count,
  )


def write(array: jax.Array, part: jax.Array, start: Any, *, axis: int) -> jax.Array:
  """The array with the slots from `start` on replaced.

  Args:
    array: what is stored.
    part: the new entries, equal to the array but for the length of the axis.
    start: first slot.
    axis: of the slots.

  Returns:
    The same shape and dtype.
  """
  return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), start, axis)


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
  r"""Grouped-query attention; keys and values are shared by a group, not repeated.

  out_t = sum_s softmax_s(q_t . k_s / sqrt(D)) v_s  over s with mask[t, s]

  Scores and softmax in float32 at least; the weights are rounded to the dtype of the values. A
  row of the mask without a True gives the plain mean of the values: finite, to be discarded.

  Args:
    queries: [B, T, H, D]; query head h uses key/value head h // (H / KV). Differentiated.
    keys: [B, KV, D, S]. Differentiated.
    values: [B, KV, S, D]. Differentiated.
    mask: [B, T, S] bool, True = attends.

  Returns:
    [B, T, H, D] in the dtype of the values.

  Reference: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
  """
  rows, count, heads, size = queries.shape
  shared, slots = keys.shape[1], keys.shape[3]
  # Two plain batched matrix products whose rows are (head of the group, time): XLA for CPU is slow
  # with the axes in another order, and in bfloat16 lacks some.
  grouped = jnp.moveaxis(queries.reshape(rows, count, shared, -1, size), 1, 3)
  wide = jnp.promote_types(queries.dtype, jnp.float32)
  scores = jnp.matmul(
    grouped.reshape(rows, shared, -1, size), keys, preferred_element_type=wide
  ).reshape(rows, shared, -1, count, slots)
  scores = jnp.where(mask[:, None, None], scores * size**-0.5, jnp.finfo(wide).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  out = jnp.matmul(
    weights.reshape(rows, shared, -1, slots), values, preferred_element_type=wide
  ).astype(values.dtype)
  out = jnp.moveaxis(out.reshape(rows, shared, -1, count, size), 3, 1)
  return out.reshape(rows, count, heads, size)
