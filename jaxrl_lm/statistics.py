"""Statistics that merge: over micro-batches, over devices, over steps.

A mean of the means of parts is not the mean of the whole: one token of entropy 1 and nine of
entropy 2 average to 1.9, not to 1.5. Kept as sums and counts, parts merge exactly and become
a number last. `diagnostics` makes these from arrays; all three are pytrees.

  parts:    a + b (Extremes: a.merge(b));  an empty part changes nothing
  devices:  a.all_reduce("data") under shard_map, or vmap with that axis name
  number:   a.mean(), a.fraction()

  >>> one = Average.of(jnp.array([1.0, jnp.nan]), jnp.array([True, False]))
  >>> nine = Average.of(jnp.full((9,), 2.0), jnp.ones((9,), bool))
  >>> (one + nine).mean()
  Array(1.9, dtype=float32)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Average:
  """A mean that can still be merged: a total and how many entries it is of.

  Attributes:
    total: [...] sum of the counted entries.
    count: [...] int32, how many entries counted.
  """

  total: jax.Array
  count: jax.Array

  @classmethod
  def of(cls, x: jax.Array, mask: jax.Array) -> Average:
    """The average of the entries [...] of x at which mask [...] is True."""
    # int32: a float32 count stops growing at 2^24.
    return cls(jnp.sum(jnp.where(mask, x, jnp.zeros_like(x))), jnp.sum(mask, dtype=jnp.int32))

  def mean(self) -> jax.Array:
    """total / count; 0 where nothing was counted (`count` tells the two apart)."""
    return self.total / jnp.maximum(self.count, 1).astype(self.total.dtype)

  def __add__(self, other: Average) -> Average:
    """The average over two parts."""
    return Average(self.total + other.total, self.count + other.count)

  def all_reduce(self, axis_name: Any) -> Average:
    """The average over all devices of a mesh axis."""
    return jax.lax.psum(self, axis_name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class EffectiveSampleSize:
  """Kish's effective sample size of importance weights, still to be merged.

  The sums are relative to the largest weight: no overflow at any log weight, and no digits
  lost where the log of a sum would lose them (1e-4 at a log weight of 1e3 in float32).

  Attributes:
    log_max: log of the largest weight; -inf if empty.
    total: sum of w / max w.
    total_sq: sum of (w / max w)^2.
    count: int32, how many weights.
  """

  log_max: jax.Array
  total: jax.Array
  total_sq: jax.Array
  count: jax.Array

  @classmethod
  def of(cls, log_weights: jax.Array, mask: jax.Array) -> EffectiveSampleSize:
    """The statistic of the log weights [...] at which mask [...] is True."""
    log_weights = jnp.minimum(log_weights, jnp.finfo(log_weights.dtype).max)
    log_weights = jnp.where(mask, log_weights, -jnp.inf)
    log_max = jnp.max(log_weights, initial=-jnp.inf)
    weights = jnp.exp(log_weights - _finite(log_max))
    count = jnp.sum(mask, dtype=jnp.int32)
    return cls(log_max, jnp.sum(weights), jnp.sum(jnp.square(weights)), count)

  def fraction(self) -> jax.Array:
    """(sum w)^2 / (n sum w^2): 1 for equal weights, 1 / n if one rules, 0 if all are 0."""
    mean = self.total / jnp.maximum(self.count, 1).astype(self.total.dtype)
    return mean * self.total / jnp.where(self.total_sq == 0, 1.0, self.total_sq)

  def __add__(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
    """The statistic over two parts."""
    log_max = jnp.maximum(self.log_max, other.log_max)
    sums = jax.tree.map(jnp.add, self._sums(log_max), other._sums(log_max))
    return EffectiveSampleSize(log_max, *sums)

  def all_reduce(self, axis_name: Any) -> EffectiveSampleSize:
    """The statistic over all devices of a mesh axis."""
    log_max = jax.lax.pmax(self.log_max, axis_name)
    return EffectiveSampleSize(log_max, *jax.lax.psum(self._sums(log_max), axis_name))

  def _sums(self, log_max: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sums relative to another, larger, weight."""
    scale = jnp.exp(self.log_max - _finite(log_max))
    return self.total * scale, self.total_sq * jnp.square(scale), self.count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Extremes:
  """Smallest and largest entry and where they stand; mergeable.

  A position is a flat index (row-major) into the whole of which this is a part; of equal
  entries the first counts. NaN is more extreme than any number, in both directions.

  Attributes:
    low, high: smallest and largest counted entry; inf and -inf if empty.
    low_position, high_position: int32 flat index; -1 if empty.
  """

  low: jax.Array
  low_position: jax.Array
  high: jax.Array
  high_position: jax.Array

  @classmethod
  def of(cls, x: jax.Array, mask: jax.Array, offset: Any = 0) -> Extremes:
    """The extremes of x [...] where mask [...] is True; offset is the position of its first."""
    if x.size == 0:
      nothing = jnp.asarray(jnp.inf, x.dtype), jnp.int32(-1)
      return cls(*nothing, -nothing[0], nothing[1])
    position = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
    position = jnp.where(mask, position + jnp.asarray(offset, jnp.int32), -1)
    low, high = (jnp.where(mask, y, jnp.inf) for y in (x, -x))
    return cls(low, position, -high, position)._least(jnp.min)

  def merge(self, other: Extremes) -> Extremes:
    """The extremes of two parts, whose positions must be of the same whole."""
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), self, other)
    return both._least(partial(jnp.min, axis=0))

  def all_reduce(self, axis_name: Any) -> Extremes:
    """The extremes over all devices of a mesh axis."""
    return self._least(partial(jax.lax.pmin, axis_name=axis_name))

  def _least(self, minimum: Callable[[jax.Array], jax.Array]) -> Extremes:
    high, high_position = _least(-self.high, self.high_position, minimum)
    return Extremes(*_least(self.low, self.low_position, minimum), -high, high_position)


def _finite(log_max: jax.Array) -> jax.Array:
  """0 for the maximum of nothing, so that it can be subtracted from -inf."""
  return jnp.where(jnp.isfinite(log_max), log_max, 0.0)


def _least(
  value: jax.Array, position: jax.Array, minimum: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Least value and its first position by any minimum, over entries or devices; NaN is least."""
  nan = jnp.isnan(value)
  least = minimum(jnp.where(nan, -jnp.inf, value))
  any_nan = minimum(jnp.where(nan, 0, 1)) == 0
  found = jnp.where(any_nan, nan, value == least) & (position >= 0)
  nowhere = jnp.iinfo(jnp.int32).max
  first = minimum(jnp.where(found, position, nowhere))
  return jnp.where(any_nan, jnp.nan, least), jnp.where(first == nowhere, -1, first)
