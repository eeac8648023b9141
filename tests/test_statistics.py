"""jaxrl_lm.statistics: sums and counts that merge exactly, over parts and over devices."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_lm.statistics import Average, EffectiveSampleSize, Extremes

NAN, INF = float("nan"), float("inf")
average, effective, extremes = (jax.jit(x.of) for x in (Average, EffectiveSampleSize, Extremes))


def batch(dtype="float32"):
  """Sixteen rows of three: uneven masks, one row of two without a token, garbage where masked."""
  rng = np.random.default_rng(5)
  x = rng.normal(0, 2.0, (16, 3)).astype(dtype)
  mask = rng.random((16, 3)) < 0.6
  mask[4:6] = False  # a whole part of two rows is empty
  return np.where(mask, x, np.asarray(NAN, dtype)), mask


def parts(x, mask, size=2):
  return [(x[i : i + size], mask[i : i + size], i * x.shape[1]) for i in range(0, len(x), size)]


# -- Average -----------------------------------------------------------------------------------


def test_mean_of_parts_is_not_the_mean_of_means():
  """1 token of entropy 1, 9 of entropy 2: (1 + 18) / 10 = 1.9; the mean of the means is 1.5."""
  one = average(jnp.array([1.0, NAN, INF]), jnp.array([True, False, False]))
  nine = average(jnp.full((9,), 2.0), jnp.ones((9,), bool))
  empty = average(jnp.full((4,), 1e30), jnp.zeros((4,), bool))
  np.testing.assert_allclose((one + nine).mean(), 1.9, rtol=1e-7)
  np.testing.assert_allclose((empty + one + empty + nine).mean(), 1.9, rtol=1e-7)
  assert int((one + nine).count) == 10
  assert float(empty.mean()) == 0.0
  assert int(empty.count) == 0


def test_count_keeps_counting():
  """In float32, 2^24 + 1 = 2^24."""
  many = Average(jnp.float32(0.0), jnp.int32(2**24))
  one = average(jnp.zeros(1), jnp.ones(1, bool))
  assert int((many + one).count) == 2**24 + 1


# -- EffectiveSampleSize -----------------------------------------------------------------------


def test_effective_sample_size_goldens():
  on = jnp.ones((4,), bool)
  # (1 + 2 + 3 + 4)^2 / (4 (1 + 4 + 9 + 16)) = 100 / 120.
  ess = effective(jnp.log(jnp.array([1.0, 2.0, 3.0, 4.0])), on)
  np.testing.assert_allclose(ess.fraction(), 100 / 120, rtol=1e-6)
  # Only the ratio of weights matters, at any size of the log weight.
  for shift in (0.0, 1e3, -1e3, 1e30, -1e30):
    np.testing.assert_allclose(effective(jnp.full((4,), shift), on).fraction(), 1.0, rtol=1e-7)
  np.testing.assert_allclose(effective(jnp.array([1e3, 0.0, -1e3, 1e2]), on).fraction(), 0.25)


def test_effective_sample_size_of_weights_that_are_0_or_infinite():
  on = jnp.ones((4,), bool)
  assert float(effective(jnp.array([0.0, 0.0, -INF, -INF]), on).fraction()) == 0.5
  assert float(effective(jnp.full((4,), -INF), on).fraction()) == 0.0
  assert float(effective(jnp.array([0.0, 0.0, INF, 0.0]), on).fraction()) == 0.25
  assert float(effective(jnp.zeros(4), ~on).fraction()) == 0.0
  assert np.isnan(effective(jnp.array([0.0, NAN, 0.0, 0.0]), on).fraction())


def test_effective_sample_size_merges_parts_of_very_different_weight():
  small, large = jnp.full((3,), -2e3), jnp.array([1e3, 1e3])
  on3, on2 = jnp.ones(3, bool), jnp.ones(2, bool)
  together = effective(jnp.concatenate([small, large]), jnp.ones(5, bool))
  np.testing.assert_allclose(together.fraction(), 2 / 5, rtol=1e-7)
  for a, b in [(effective(small, on3), effective(large, on2))]:
    np.testing.assert_allclose((a + b).fraction(), 2 / 5, rtol=1e-7)
    np.testing.assert_allclose((b + a).fraction(), 2 / 5, rtol=1e-7)


# -- Extremes ----------------------------------------------------------------------------------


def assert_extremes(found, low, low_position, high, high_position):
  np.testing.assert_array_equal(
    [found.low, found.low_position, found.high, found.high_position],
    np.float32([low, low_position, high, high_position]),
  )


def test_extremes_goldens():
  x = jnp.array([[0.5, -3.0, NAN], [7.0, 1e3, -3.0]])
  mask = jnp.array([[True, True, False], [True, False, True]])
  assert_extremes(extremes(x, mask), -3.0, 1, 7.0, 3)  # of two equal ones the first
  assert_extremes(extremes(x, jnp.ones_like(mask)), NAN, 2, NAN, 2)
  assert_extremes(extremes(x, jnp.zeros_like(mask)), INF, -1, -INF, -1)
  assert_extremes(extremes(jnp.array([-1e3, 1e3]), jnp.array([True, True])), -1e3, 0, 1e3, 1)
  # Masked infinities do not tie with counted ones.
  assert_extremes(extremes(jnp.full((3,), INF), jnp.array([False, True, True])), INF, 1, INF, 1)


def test_extremes_merge_in_any_order():
  top = extremes(jnp.array([[1.0, 2.0]]), jnp.array([[True, True]]), 0)
  bottom = extremes(jnp.array([[2.0, -5.0]]), jnp.array([[True, True]]), 2)
  empty = extremes(jnp.array([[9.0, 9.0]]), jnp.array([[False, False]]), 4)
  broken = extremes(jnp.array([[0.0, NAN]]), jnp.array([[True, True]]), 6)
  for a, b in ((top, bottom), (bottom, top)):
    assert_extremes(a.merge(b), -5.0, 3, 2.0, 1)
    assert_extremes(empty.merge(a).merge(b), -5.0, 3, 2.0, 1)
    assert_extremes(a.merge(broken).merge(b), NAN, 7, NAN, 7)
  assert_extremes(empty.merge(empty), INF, -1, -INF, -1)


# -- parts, devices, transformations -----------------------------------------------------------


def test_parts_equal_the_whole():
  x, mask = batch()
  whole = average(x, mask), effective(x, mask), extremes(x, mask)
  pieces = parts(x, mask)
  merged = (
    functools.reduce(operator.add, [average(y, m) for y, m, _ in pieces]),
    functools.reduce(operator.add, [effective(y, m) for y, m, _ in pieces]),
    functools.reduce(Extremes.merge, [extremes(y, m, offset) for y, m, offset in pieces]),
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), merged, whole)
  # In float64 with loops: nothing of it holds a mean of means.
  counted = np.float64(x[mask])
  weights = np.exp(counted)
  np.testing.assert_allclose(merged[0].mean(), counted.mean(), rtol=1e-6)
  np.testing.assert_allclose(
    merged[1].fraction(), weights.sum() ** 2 / (len(weights) * (weights**2).sum()), rtol=1e-6
  )
  assert x.flat[int(merged[2].low_position)] == counted.min()
  assert x.flat[int(merged[2].high_position)] == counted.max()


def every_statistic(x, mask, offset=0):
  return Average.of(x, mask), EffectiveSampleSize.of(x, mask), Extremes.of(x, mask, offset)


def every_reduced(x, mask):
  """On one device: its own part, reduced over all; and the plain sum of the pairs."""
  local = every_statistic(x, mask, jax.lax.axis_index("data") * x.size)
  reduced = tuple(statistic.all_reduce("data") for statistic in local)
  return reduced, jax.lax.psum(local[0], "data")


@pytest.mark.parametrize("devices", [1, 8])
def test_devices_equal_the_whole(devices):
  x, mask = batch()
  spec = PartitionSpec("data")
  mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
  sharded = jax.device_put((x, mask), NamedSharding(mesh, spec))
  on_devices = jax.shard_map(every_reduced, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
  reduced, psum = jax.jit(on_devices)(*sharded)
  whole = jax.jit(every_statistic)(x, mask)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), reduced, whole)
  np.testing.assert_allclose(psum.mean(), whole[0].mean(), rtol=1e-6)
  # The same function on sharded arrays, rows over an explicit mesh.
  explicit = jax.jit(every_statistic)(*sharded)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), explicit, whole)


def test_all_reduce_over_a_vmapped_axis():
  x, mask = batch()
  blocks = x.reshape(8, 2, 3), mask.reshape(8, 2, 3)
  reduced, _ = jax.jit(jax.vmap(every_reduced, axis_name="data"))(*blocks)
  whole = jax.jit(every_statistic)(x, mask)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-6), reduced, whole)


def test_extremes_over_devices_find_a_nan():
  x, mask = batch()
  x = np.where(mask, x, 0.0).reshape(8, 2, 3)
  mask = mask.reshape(8, 2, 3)
  row = int(np.argmax(mask[7].any(-1)))
  column = int(np.argmax(mask[7, row]))
  x[7, row, column] = NAN
  (_, ess, found), _ = jax.jit(jax.vmap(every_reduced, axis_name="data"))(np.float32(x), mask)
  assert int(found.low_position[0]) == int(found.high_position[0]) == 7 * 6 + row * 3 + column
  assert np.isnan(found.low[0])
  assert np.isnan(ess.fraction()[0])


def test_scan_carries_them():
  x, mask = batch()

  def step(carry, part):
    new = every_statistic(*part)
    return (carry[0] + new[0], carry[1] + new[1], carry[2].merge(new[2])), None

  x, mask = x.reshape(8, 2, 3), mask.reshape(8, 2, 3)
  offsets = np.arange(8) * 6
  start = every_statistic(jnp.zeros((2, 3)), jnp.zeros((2, 3), bool))
  carry, _ = jax.jit(lambda *parts: jax.lax.scan(step, start, parts))(x, mask, offsets)
  whole = jax.jit(every_statistic)(x.reshape(16, 3), mask.reshape(16, 3))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), carry, whole)


def test_precision(x64):
  x, mask = batch("float64")
  ess = effective(x, mask)
  weights = np.exp(x[mask])
  expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
  assert ess.total.dtype == average(x, mask).total.dtype == extremes(x, mask).low.dtype == "float64"
  assert ess.count.dtype == extremes(x, mask).low_position.dtype == "int32"
  np.testing.assert_allclose(
    (ess + effective(x, np.zeros_like(mask))).fraction(), expected, rtol=1e-12
  )
  assert effective(np.float32(x), mask).fraction().dtype == "float32"
