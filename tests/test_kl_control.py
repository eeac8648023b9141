"""The adaptive KL coefficient: its numbers, its bounds, and that it finds its target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference_distillation as truth


def test_against_the_reference():
  rng = np.random.default_rng(1)
  coef, kl = rng.uniform(0.01, 1, 30), rng.uniform(0, 20, 30)
  got = rl.adaptive_kl_coef(coef, kl, target=6.0, gain=0.3, clip=0.5)
  want = [truth.adaptive_kl_coef(*x, 6.0, 0.3, 0.5) for x in zip(coef, kl, strict=True)]
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_worked_by_hand():
  """beta 0.2, target 6, KL 12: error 1, clipped to 0.2; 0.2 (1 + 0.1 x 0.2) = 0.204. KL 5.4: error
  -0.1; 0.2 x 0.99 = 0.198. With n / horizon = 256 / 10000: 0.2 (1 + 0.0256 x 0.2) = 0.201024."""
  step = lambda kl, **rest: float(rl.adaptive_kl_coef(jnp.array(0.2), kl, target=6.0, **rest))
  assert step(12.0) == pytest.approx(0.204)
  assert step(5.4) == pytest.approx(0.198)
  assert step(12.0, gain=256 / 10_000) == pytest.approx(0.201024)
  assert step(jnp.inf) == pytest.approx(0.204)
  assert np.isnan(step(jnp.nan))


def test_a_large_batch_cannot_turn_the_sign():
  """n / horizon = 60000 / 10000 with clip 0.2: a factor of 1 - 1.2, which the formula allows."""
  with pytest.raises(ValueError, match=r"clip must lie in \(0.0, 0.1666"):
    rl.adaptive_kl_coef(jnp.array(0.2), 0.0, target=6.0, gain=6.0)
  assert float(rl.adaptive_kl_coef(jnp.array(0.2), 0.0, target=6.0, gain=6.0, clip=0.1)) > 0


def test_it_finds_its_target_inside_a_scan():
  """A policy whose KL is 1 / beta: from 0.01 and from 10 to beta = 1 / 6, as a state of a scan,
  one per run."""

  def step(coef, _):
    coef = rl.adaptive_kl_coef(coef, 1.0 / coef, target=6.0)
    return coef, coef

  end, _ = jax.lax.scan(step, jnp.array([0.01, 10.0]), length=400)
  np.testing.assert_allclose(end, 1 / 6, rtol=1e-4)
