"""The KL coefficient as a state: the next one from this one and the KL that was measured."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks


def adaptive_kl_coef(
  kl_coef: jax.Array, kl: jax.Array, *, target: Any, gain: Any = 0.1, clip: Any = 0.2
) -> jax.Array:
  r"""The next KL coefficient of a proportional controller, in log space.

  kl_coef' = kl_coef (1 + gain clip(kl / target - 1, -clip, clip))

  Too much divergence raises the coefficient, too little lowers it, by at most gain * clip a step.
  TRL, verl and OpenRLHF write the gain as n / horizon, with n the samples of the update: with 256
  of them and a horizon of 10000 it is 0.0256. There a large batch (n clip >= horizon) can turn the
  coefficient negative; here that is an error.

  Args:
    kl_coef: [...] the coefficient now (one number, or one per run). Constant.
    kl: [...] measured KL(pi || ref), in the unit of the target: nats per sequence in the paper
      (verl: per token). Constant.
    target: the KL wanted, > 0.
    gain: K_beta in the paper, >= 0.
    clip: largest relative error that is acted on, in (0, 1 / gain).

  Returns:
    [...] the next coefficient; it is 0 for ever once it is 0.

  Raises:
    ValueError: shapes differ, or a constant is out of range.

  Example:
    >>> adaptive_kl_coef(jnp.array(0.2), jnp.array(12.0), target=6.0).round(5)  # 0.2 x 1.02
    Array(0.204, dtype=float32)

  Reference: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
  """
  checks.check_range("target", target, low=0.0, open_low=True)
  checks.check_range("gain", gain, low=0.0)
  limit = None if isinstance(gain, jax.core.Tracer) or gain == 0 else 1.0 / float(gain)
  checks.check_range("clip", clip, low=0.0, high=limit, open_low=True, open_high=True)
  kl_coef, kl = checks.as_constant("kl_coef", kl_coef), checks.as_constant("kl", kl)
  checks.check_same_shape(kl_coef=kl_coef, kl=kl)
  error = jnp.clip(kl / target - 1.0, -clip, clip)
  return kl_coef * (1.0 + gain * error)
