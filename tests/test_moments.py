"""jaxrl_lm.moments: two passes, and no spread that is only rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm import moments

compiled = jax.jit(moments.centered_moments, static_argnames=("ddof", "axis"))


@pytest.mark.parametrize("axis", [None, -1, 0, (0, 1)])
@pytest.mark.parametrize("ddof", [0, 1])
def test_against_numpy(axis, ddof):
  x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
  result = compiled(x, np.ones_like(x, bool), ddof=ddof, axis=axis)
  keep = {"axis": axis, "keepdims": True, "dtype": np.float64}
  np.testing.assert_allclose(result.mean, x.mean(**keep), rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(result.variance, x.var(**keep, ddof=ddof), rtol=1e-5)
  np.testing.assert_allclose(result.centered, x - x.mean(**keep), rtol=1e-5, atol=1e-6)
  assert np.all(result.has_spread)
  assert result.variance.shape == result.number.shape == x.sum(axis=axis, keepdims=True).shape


def test_masked_entries_are_not_read():
  x = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
  mask = np.random.default_rng(2).random((3, 5)) > 0.4
  mask[1] = False
  clean = compiled(np.where(mask, x, 0), mask, axis=-1)
  assert clean.mean[1] == clean.variance[1] == clean.number[1] == 0
  for garbage in (np.nan, np.inf, -1e30):
    dirty = compiled(np.where(mask, x, garbage).astype(np.float32), mask, axis=-1)
    for a, b in zip(dirty, clean, strict=True):
      np.testing.assert_array_equal(a, b)


def test_nothing_cancels():
  """Variance of 1000 +- 0.01 in float32: mean square less squared mean is off by 0.06."""
  x = np.float32(1e3) + np.float32(1e-2) * np.arange(5, dtype=np.float32)
  result = compiled(x, np.ones(5, bool))
  np.testing.assert_allclose(result.variance[0], np.var(x.astype(np.float64), ddof=1), rtol=1e-5)


def test_infinite_is_not_without_spread():
  for x in ([np.inf, 0.0], [np.inf, np.inf], [np.nan, np.nan]):
    result = compiled(np.array(x, np.float32), np.ones(2, bool))
    assert np.any(np.isnan(result.centered))


def test_bad_inputs():
  x = jnp.zeros((2, 3))
  with pytest.raises(ValueError, match="ddof"):
    moments.centered_moments(x, x == 0, ddof=2)
  with pytest.raises(ValueError, match=r"mask.*\(2, 2\)"):
    moments.centered_moments(x, jnp.ones((2, 2), bool))
  with pytest.raises(TypeError, match="mask must be boolean"):
    moments.centered_moments(x, x)
