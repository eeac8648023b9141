"""Flat samples with group ids <-> groups as an axis, [N] <-> [P, G].

Group ids come from anywhere, in any order, and groups may be of unequal size: nothing here
reshapes. Samples that share a prompt meet in one row whatever the layout of the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks


class Groups(NamedTuple):
  """Samples by group, and the way back.

  Attributes:
    values: [P, G] one per sample; 0 in empty slots.
    where: [P, G] bool, True = a sample stands here; the `where` of the advantages.
    slots: [N] int32, place of each flat row in the flattened [P * G]; -1 = it did not fit.
  """

  values: jax.Array
  where: jax.Array
  slots: jax.Array


def to_groups(
  values: jax.Array,
  group_ids: jax.Array,
  *,
  num_groups: int,
  group_size: int,
  episode_ids: jax.Array | None = None,
) -> Groups:
  """Flat values to groups; a group is a row, in the order in which ids first appear.

  Couples all rows: call it on the whole batch. What does not fit is never dropped silently:
  with concrete ids it is an error. With traced ids the rows without a place come back from
  `from_groups` as NaN, and so does every member of a group with too many.

  Args:
    values: [N] one per flat row (rewards, lengths). Constant.
    group_ids: [N] any integers, e.g. the prompt of each row.
    num_groups: P, at least the number of different ids.
    group_size: G, at least the samples of the largest group.
    episode_ids: [N] int; rows with the same group and episode (the turns of one conversation,
      cut into several rows) are one sample and must carry the same value. None = each row is
      a sample.

  Returns:
    Groups, with `values` at least float32.

  Raises:
    TypeError: ids are not integers.
    ValueError: shapes differ; with concrete arguments also: too many groups, too many samples in
      a group, rows of one episode with different values (NaN if traced), ids beyond 32 bits
      where JAX would cut them.

  Example:
    >>> to_groups(jnp.array([1.0, 0.0, 2.0]), jnp.array([7, 3, 7]), num_groups=2, group_size=2)
    Groups(values=Array([[1., 2.],
           [0., 0.]], dtype=float32), where=Array([[ True,  True],
           [ True, False]], dtype=bool), slots=Array([0, 2, 1], dtype=int32))
  """
  values = checks.as_constant("values", values)
  ids = _ids("group_ids", group_ids, values)
  episodes = None if episode_ids is None else _ids("episode_ids", episode_ids, values)
  checks.check_range("num_groups", num_groups, low=1)
  checks.check_range("group_size", group_size, low=1)
  _check_fits(values, group_ids, episode_ids, num_groups, group_size)
  # Samples of a group may stand anywhere: on a mesh, every device gathers all of them.
  values, ids = checks.on_every_device(values), checks.on_every_device(ids)
  episodes = None if episodes is None else checks.on_every_device(episodes)

  row = jnp.arange(values.shape[0], dtype=jnp.int32)
  leader = _first_row(ids)
  sample = row if episodes is None else _first_row(ids, episodes)
  group = (jnp.cumsum(leader == row, dtype=jnp.int32) - 1)[leader]
  # The running count of samples in rows sorted by group, less that of the group's first row.
  by_group = jnp.argsort(leader, stable=True)
  count = jnp.cumsum((sample == row)[by_group], dtype=jnp.int32)
  count = jnp.zeros_like(count).at[by_group].set(count)
  member = (count - count[leader])[sample]

  fits = (group < num_groups) & (member < group_size)
  slots = jnp.where(fits, group * group_size + member, -1)
  crowded = jnp.zeros_like(fits).at[leader].max(member >= group_size)[leader]
  disagrees = (values != values[sample]) & ~(jnp.isnan(values) & jnp.isnan(values[sample]))
  spoilt = crowded | jnp.zeros_like(fits).at[sample].max(disagrees)[sample]

  size = num_groups * group_size
  place = jnp.where(fits & (sample == row), slots, size)  # `size` is out of range: dropped
  flat = (
    jnp.zeros(size, values.dtype).at[place].set(jnp.where(spoilt, jnp.nan, values), mode="drop")
  )
  taken = jnp.zeros(size, jnp.bool_).at[place].set(True, mode="drop")
  shape = (num_groups, group_size)
  return Groups(flat.reshape(shape), taken.reshape(shape), slots)


def from_groups(grouped: jax.Array, slots: jax.Array) -> jax.Array:
  """Values of the groups (advantages) back to the flat rows; the inverse of `to_groups`.

  Args:
    grouped: [P, G] one per sample. Constant.
    slots: [N] int, from `Groups.slots`.

  Returns:
    [N]; NaN where the slot is -1 or out of range.

  Raises:
    TypeError: slots are not integers.
    ValueError: grouped is not [P, G], slots are not [N].

  Example:
    >>> from_groups(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([0, 2, 1]))
    Array([1., 3., 2.], dtype=float32)
  """
  grouped = checks.as_constant("grouped", grouped)
  slots = checks.check_integer("slots", slots)
  if grouped.ndim != 2 or slots.ndim != 1:
    raise ValueError(f"grouped must be [P, G] and slots [N], got {grouped.shape}, {slots.shape}")
  grouped, slots = checks.on_every_device(grouped), checks.on_every_device(slots)
  there = (slots >= 0) & (slots < grouped.size)
  return jnp.where(there, grouped.reshape(-1)[jnp.where(there, slots, 0)], jnp.nan)


def _ids(name: str, ids: Any, values: jax.Array) -> jax.Array:
  """Integers [N] that survive the way into JAX."""
  if not isinstance(ids, jax.Array):
    ids = np.asarray(ids)
    if not np.issubdtype(ids.dtype, np.integer):
      raise TypeError(f"{name} must be integer, got {ids.dtype} of shape {ids.shape}")
    if np.any(ids != np.asarray(ids.astype(jnp.asarray(ids.ravel()[:0]).dtype))):
      raise ValueError(f"{name} hold integers beyond 32 bits; enable x64 or number them anew")
  ids = checks.check_integer(name, ids)
  if values.ndim != 1:
    raise ValueError(f"values must be flat, [N], got shape {values.shape}")
  checks.check_same_shape(**{"values": values, name: ids})
  return ids


def _first_row(*keys: jax.Array) -> jax.Array:
  """For each row, the first row with the same keys."""
  order = jnp.lexsort(keys)  # stable: equal rows stay in their order
  position = jnp.arange(order.shape[0], dtype=jnp.int32)
  new = position == 0
  for key in keys:
    new |= key[order] != jnp.roll(key[order], 1)
  first = order[jax.lax.cummax(jnp.where(new, position, 0))].astype(jnp.int32)
  return jnp.zeros_like(first).at[order].set(first)


def _check_fits(
  values: Any, group_ids: Any, episode_ids: Any, num_groups: int, group_size: int
) -> None:
  """Raises for what is known to be too much, or to contradict itself."""
  if isinstance(group_ids, jax.core.Tracer):
    return
  group_ids = np.asarray(group_ids)
  groups = len(np.unique(group_ids))
  if groups > num_groups:
    raise ValueError(f"num_groups is {num_groups}, but group_ids hold {groups} groups")
  if isinstance(episode_ids, jax.core.Tracer):
    return
  keys = group_ids[None]
  if episode_ids is not None:
    keys = np.stack([group_ids, np.asarray(episode_ids)])
  samples, sample = np.unique(keys, axis=1, return_inverse=True)
  if episode_ids is None:
    largest = int(np.max(np.unique(group_ids, return_counts=True)[1]))
  else:
    largest = int(np.max(np.unique(samples[0], return_counts=True)[1]))
  if largest > group_size:
    raise ValueError(f"group_size is {group_size}, but a group of group_ids holds {largest}")
  if episode_ids is None or isinstance(values, jax.core.Tracer):
    return
  values = np.asarray(values)
  first = values[np.unique(sample.reshape(-1), return_index=True)[1]][sample.reshape(-1)]
  if not np.array_equal(first, values, equal_nan=True):
    raise ValueError("values differ between rows of one episode: write its value on each of them")
