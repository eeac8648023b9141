"""jaxrl_lm.whitening: goldens, one token, no token, masks, parts of a batch and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_lm import advantages, masks, returns, whitening

compiled = jax.jit(whitening.whiten, static_argnames="ddof")
ON = np.array([True, True, False])


def close(actual, expected, rtol=1e-6, atol=0.0):
  np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


def batch(rows=8):
  rng = np.random.default_rng(0)
  return rng.normal(2, 3, (rows, 5)).astype(np.float32), rng.random((rows, 5)) > 0.3


def test_golden():
  """[3, 1, masked]: mean 2, squares 2; variance 1 (ddof 0) or 2 (ddof 1)."""
  x = np.array([3.0, 1.0, 100.0], np.float32)
  close(whitening.whiten(x, ON, ddof=0), [1.0, -1.0, 0.0])
  close(whitening.whiten(x, ON), [0.5**0.5, -(0.5**0.5), 0.0])  # .707107
  # eps is inside the root: 1 / sqrt(1 + 3).
  close(whitening.whiten(x, ON, ddof=0, eps=3.0), [0.5, -0.5, 0.0])


def test_scale_only_is_a_composition():
  # [6, 2]: variance 4 with ddof 0; scaled by 1/2 without a shift: [3, 1].
  x, on = jnp.array([6.0, 2.0]), np.ones(2, bool)
  _, variance = whitening.masked_moments(x, on, ddof=0)
  close(whitening.whiten(x, on, moments=(0.0, variance), eps=0.0), [3.0, 1.0])


@pytest.mark.parametrize("x", [[5.0, 0.0, 0.0], [np.nan] * 3])
def test_one_token_or_none(x):
  mask = np.array([np.isfinite(x[0]), False, False])
  for ddof in (0, 1):
    np.testing.assert_array_equal(compiled(np.array(x, np.float32), mask, ddof=ddof), 0.0)
  mean, variance = whitening.masked_moments(np.array(x, np.float32), mask)
  assert (mean, variance) == (np.nan_to_num(x[0]), 0.0)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_values_are_zero(eps):
  """Rounding divided by sqrt(1e-8) would be 6e-4."""
  x = np.full((3, 5), 0.7, np.float32)
  np.testing.assert_array_equal(compiled(x, np.ones_like(x, bool), eps=eps), 0.0)


def test_mean_and_variance_of_the_result():
  x, mask = batch()
  y = np.asarray(compiled(x, mask, eps=0.0), np.float64)
  assert not np.any(y[~mask])
  close(y[mask].mean(), 0.0, atol=1e-6)
  close(y[mask].var(ddof=1), 1.0, rtol=1e-6)


def test_masked_positions_are_not_read():
  x, mask = batch()
  clean = compiled(np.where(mask, x, 0), mask)
  for garbage in (np.nan, np.inf, -1e30):
    dirty = compiled(np.where(mask, x, garbage).astype(np.float32), mask)
    np.testing.assert_array_equal(dirty, clean)


def test_parts_sum_to_the_whole_with_moments():
  x, mask = batch()
  moments = whitening.masked_moments(x, mask)
  whole = compiled(x, mask)
  parts = [compiled(x[i : i + 2], mask[i : i + 2], moments=moments) for i in range(0, 8, 2)]
  np.testing.assert_array_equal(np.concatenate(parts), whole)
  close(jax.vmap(lambda x, m: whitening.whiten(x, m, moments=moments))(x, mask), whole)


def test_result_is_a_constant():
  x, mask = batch(2)

  def total(x, mean, variance, eps):
    return jnp.sum(whitening.whiten(x, mask, moments=(mean, variance), eps=eps) ** 2)

  arguments = (jnp.asarray(x), jnp.float32(0.5), jnp.float32(2.0), jnp.float32(0.1))
  for gradient in jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*arguments):
    np.testing.assert_array_equal(gradient, 0.0)
  constant = jax.grad(lambda x: jnp.sum(whitening.whiten(x, mask) ** 2))
  np.testing.assert_array_equal(constant(jnp.full_like(arguments[0], 0.7)), 0.0)


def test_types(x64):
  x, mask = batch(2)
  for given, kept in [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]:
    assert jax.eval_shape(whitening.whiten, jnp.asarray(x, given), mask).dtype == kept
    for number in jax.eval_shape(whitening.masked_moments, jnp.asarray(x, given), mask):
      assert number.dtype == kept


def test_whitened_returns():
  # Returns 1, 1 | -1, -1 | 3, masked: mean .6, squares 2 * .16 + 2 * 2.56 + 5.76 = 11.2.
  rewards = np.array([[0.0, 1.0], [0.0, -1.0], [3.0, np.nan]], np.float32)
  mask = np.array([[True, True], [True, True], [True, False]])
  result = whitening.whitened_returns(rewards, mask, eps=0.0)
  close(result, np.array([[0.4, 0.4], [-1.6, -1.6], [2.4, 0.0]]) / 2.8**0.5, rtol=1e-6)
  expected = whitening.whiten(returns.discounted_returns(rewards, mask, discount=0.5), mask, ddof=0)
  actual = whitening.whitened_returns(rewards, mask, discount=0.5, ddof=0)
  np.testing.assert_array_equal(actual, expected)
  # Packed: the second sample of a row has its own returns.
  packed = whitening.whitened_returns(
    np.array([[0.0, 1.0, 0.0, -1.0, 3.0]]),
    np.ones((1, 5), bool),
    eps=0.0,
    segment_ids=np.array([[1, 1, 2, 2, 3]]),
  )
  close(packed[0], np.asarray(result)[mask], rtol=1e-6)


def test_whitened_group_centered():
  # Centred 1/2, -1/2 with 3 tokens and 1: mean 1/4, squares 3/16 + 9/16 = 3/4, variance 1/4.
  rewards = np.array([[1.0, 0.0]], np.float32)
  mask = np.array([[[True, True, True], [False, True, False]]])
  result = whitening.whitened_group_centered(rewards, mask, eps=0.0)
  close(result, [[[0.5, 0.5, 0.5], [0.0, -1.5, 0.0]]])
  # An excluded sample is not in the statistics of the tokens either.
  rewards, where = np.array([[1.0, 0.0, np.nan]], np.float32), np.array([[True, True, False]])
  mask = np.concatenate([mask, np.ones((1, 1, 3), bool)], axis=1)
  wide = whitening.whitened_group_centered(rewards, mask, eps=0.0, where=where)
  np.testing.assert_array_equal(wide[:, :2], result)
  assert not np.any(wide[:, 2])


def test_whitened_group_centered_is_the_composition():
  rewards, _ = batch(3)
  mask = np.random.default_rng(4).random((3, 5, 4)) > 0.3
  tokens = np.broadcast_to(np.asarray(advantages.group_centered(rewards))[..., None], mask.shape)
  actual = whitening.whitened_group_centered(rewards, mask, ddof=0, eps=1e-4)
  np.testing.assert_array_equal(actual, whitening.whiten(tokens, mask, ddof=0, eps=1e-4))


def test_moments_under_shard_map():
  mesh = jax.make_mesh((8,), ("data",))
  x, mask = batch()
  expected = compiled(x, mask)
  rows = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, mask)]
  split = functools.partial(jax.shard_map, mesh=mesh, out_specs=P("data"))

  def given(x, mask, moments):
    return whitening.whiten(x, mask, moments=moments)

  def reduced(x, mask):
    number = jax.lax.psum(jnp.sum(mask), "data")
    mean = jax.lax.psum(masks.masked_sum(x, mask), "data") / number
    squares = jax.lax.psum(masks.masked_sum((x - mean) ** 2, mask), "data")
    return whitening.whiten(x, mask, moments=(mean, squares / (number - 1)))

  outside = split(given, in_specs=(P("data"), P("data"), P()))
  close(jax.jit(outside)(*rows, whitening.masked_moments(x, mask)), expected, rtol=1e-6)
  close(jax.jit(split(reduced, in_specs=P("data")))(*rows), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "axis_type",
  [
    pytest.param(jax.sharding.AxisType.Auto, marks=pytest.mark.slow),
    jax.sharding.AxisType.Explicit,
  ],
  ids=str,
)
def test_sharded_rows_agree(axis_type):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
  x, mask = batch()
  with jax.set_mesh(mesh):
    rows = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, mask)]
    close(compiled(*rows), whitening.whiten(x, mask), rtol=1e-5, atol=1e-6)


X, M = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda: whitening.whiten(X, M[:1]), ValueError, r"mask.*\(1, 3\)"),
    (lambda: whitening.whiten(X, X), TypeError, "mask must be boolean"),
    (lambda: whitening.whiten(X, M, ddof=2), ValueError, "ddof"),
    (lambda: whitening.whiten(X, M, eps=-1e-8), ValueError, "eps"),
    (lambda: whitening.whiten(X, M, eps=X), ValueError, "eps"),
    (lambda: whitening.whiten(X, M, moments=(X, 1.0)), ValueError, "mean"),
    (lambda: whitening.whiten(X, M, moments=(0.0, X[0])), ValueError, "variance"),
    (lambda: whitening.masked_moments(X, M, ddof=-1), ValueError, "ddof"),
    (lambda: whitening.whitened_returns(X, M[0]), ValueError, "mask"),
    (lambda: whitening.whitened_group_centered(X, M), ValueError, "rewards"),
    (lambda: whitening.whitened_group_centered(X[0], M), ValueError, r"rewards.*\(3,\)"),
  ],
)
def test_bad_inputs(call, error, message):
  with pytest.raises(error, match=message):
    call()
