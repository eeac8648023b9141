"""Supervised losses: VAPO's mean against the reference, extremes, the gradient of DFT.

Their values and gradients on ragged rows are in `test_distillation_reference`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference_distillation as truth
from tests.ragged import LENGTHS, Checker, policies

INF = math.inf


def test_positive_nll_loss() -> None:
  """Its mean, by weights of the whole batch, is VAPO's; row 9 has reward 0, row 2 no token."""
  lp, _ = policies(29, 0.7)
  rewards = np.array([1, -1, 1, 0.5, -2, 1, 1, -1, 1, 0, 1, 2]).reshape(3, 4)
  flat = rewards.ravel().tolist()

  def loss(lp, mask, rewards):
    weights = rl.token_mean(mask & (rewards > 0)[..., None])
    return (weights * rl.positive_nll_loss(lp, rewards, mask)).sum()

  count = sum(n for n, r in zip(LENGTHS, flat, strict=True) if r > 0)
  slopes = [[-1 / count * (r > 0)] * n for n, r in zip(LENGTHS, flat, strict=True)]
  Checker(loss).scalar(truth.vapo_nll(lp, flat), {"lp": slopes}, lp=lp, rewards=rewards)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_supervised_losses_at_impossible_and_certain_tokens(dtype: str) -> None:
  """-log p is inf at p = 0, -sg(p) log p and its gradient -p are 0; both are 0 at p = 1."""
  out, on = {}, jnp.ones(5, bool)
  with jax.enable_x64(dtype == "float64"):
    x = jnp.asarray([-INF, -1e30, -1e3, -88.0, 0.0], dtype)
    for name, loss in {"sft_loss": rl.sft_loss, "dft_loss": rl.dft_loss}.items():
      value, pull = jax.vjp(lambda lp, f=loss: f(lp, on), x)
      out[name] = np.asarray(value), np.asarray(pull(jnp.ones_like(value))[0], float)
  assert out["sft_loss"][0][0] == INF
  np.testing.assert_array_equal(out["sft_loss"][0][-1], 0)
  np.testing.assert_array_equal(out["sft_loss"][1], -1)
  np.testing.assert_allclose(out["dft_loss"][0], 0, atol=1e-30)
  np.testing.assert_allclose(out["dft_loss"][1], [0, 0, 0, 0, -1], atol=1e-30)


def test_dft_has_the_gradient_of_the_probability_and_a_bound() -> None:
  x = jnp.linspace(-5.0, 0.0, 101)
  on = jnp.ones(101, bool)
  gradient = jax.grad(lambda lp: rl.dft_loss(lp, on).sum())(x)
  np.testing.assert_allclose(gradient, jax.grad(lambda lp: -jnp.exp(lp).sum())(x), rtol=1e-6)
  loss = rl.dft_loss(x, on)
  assert loss.max() == pytest.approx(1 / math.e, rel=1e-6)
  assert x[jnp.argmax(loss)] == pytest.approx(-1.0)
