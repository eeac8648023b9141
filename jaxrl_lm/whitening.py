"""Whitening: zero mean and unit variance over all counted tokens of the batch.

These functions couple all rows. Under shard_map, or on a part of the batch, pass `moments`, the
statistics of the whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_lm import checks
from jaxrl_lm.advantages import group_centered
from jaxrl_lm.moments import centered_moments
from jaxrl_lm.returns import discounted_returns


def masked_moments(x: jax.Array, mask: jax.Array, *, ddof: int = 1) -> tuple[jax.Array, jax.Array]:
  """Mean and variance of all counted entries, as `whiten` and `batch_scaled` take them.

  Couples all rows. Under shard_map call it on the global arrays and pass the result in, or
  reduce with psum: a mean of local variances is not the variance.

  Args:
    x: [..., T]. Constant.
    mask: [..., T] bool, True = counts.
    ddof: the variance divides by count - ddof, 0 or 1.

  Returns:
    (mean, variance), scalars. The variance is exactly 0 without spread or below two entries;
    both are 0 where nothing counts.

  Raises:
    TypeError: the mask is not boolean.
    ValueError: shapes differ, or ddof is neither 0 nor 1.

  Example:
    >>> masked_moments(jnp.array([3.0, 1.0, 100.0]), jnp.array([True, True, False]))
    (Array(2., dtype=float32), Array(2., dtype=float32))

  Reference: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
  """
  moments = centered_moments(x, mask, ddof=ddof)
  return moments.mean.reshape(()), moments.variance.reshape(())


def whiten(
  x: jax.Array,
  mask: jax.Array,
  *,
  ddof: int = 1,
  eps: float | jax.Array = 1e-8,
  moments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  r"""Zero mean and unit variance over all counted tokens of the batch.

  (x - mean) / sqrt(var + eps)

  Couples all rows, and long rows weigh more than short ones. Others: verl and slime ddof=1 and
  eps=1e-8 inside the root; Tunix ddof=1 and 1e-8; OpenRLHF and NeMo-RL ddof=0 and var clamped
  at 1e-8 from below; TRL's RLOO standardises sequences, not tokens, ddof=1 and std + 1e-4.

  Args:
    x: [..., T] advantages or returns. Constant.
    mask: [..., T] bool, True = counts.
    ddof: the variance divides by count - ddof, 0 or 1.
    eps: added to the variance, in units of x squared.
    moments: scalars (mean, variance) of the whole batch, already reduced (`masked_moments` of
      the global arrays), for shard_map or micro-batches; None = of x.

  Returns:
    [..., T]; 0 at masked positions, and everywhere if the variance is 0 (equal entries, one).

  Raises:
    TypeError: the mask is not boolean.
    ValueError: shapes differ, moments are not scalars, ddof or eps is out of range.

  Example:
    >>> whiten(jnp.array([3.0, 1.0, 100.0]), jnp.array([True, True, False]))
    Array([ 0.70710677, -0.70710677,  0.        ], dtype=float32)

  Reference: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, eq. 5.
  """
  x = checks.as_constant("x", x)
  mask = checks.check_mask(mask, x=x)
  checks.check_range("eps", eps, low=0)
  mean, variance = masked_moments(x, mask, ddof=ddof) if moments is None else moments
  checks.check_same_shape(scalar=0.0, mean=mean, variance=variance, eps=eps)
  mean, variance, eps = (
    checks.as_constant("moments", number).astype(x.dtype) for number in (mean, variance, eps)
  )
  divisor = jnp.where(variance == 0, 1, jnp.sqrt(variance + eps))
  return jnp.where(mask & (variance != 0), (x - mean) / divisor, 0)


def whitened_returns(
  rewards: jax.Array,
  mask: jax.Array,
  *,
  discount: float | jax.Array = 1.0,
  ddof: int = 1,
  eps: float | jax.Array = 1e-8,
  moments: tuple[jax.Array, jax.Array] | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Discounted returns, whitened over the batch: the advantages of REINFORCE++.

  whiten(discounted_returns(rewards, mask), mask)

  Couples all rows. The KL penalty belongs into the rewards (`kl_shaped_rewards`).

  Args:
    rewards: [..., T] reward of each token. Constant.
    mask: [..., T] bool, True = counts.
    discount, segment_ids: as in `discounted_returns`.
    ddof, eps: as in `whiten`.
    moments: scalars (mean, variance) of the returns of the whole batch; None = of these.

  Returns:
    [..., T] advantages, constant, 0 at masked positions.

  Raises:
    TypeError, ValueError: as `discounted_returns` and `whiten`.

  Example:
    >>> whitened_returns(jnp.array([[0.0, 1.0], [0.0, -1.0]]), jnp.ones((2, 2), bool), ddof=0)
    Array([[ 1.,  1.],
           [-1., -1.]], dtype=float32)

  Reference: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, eq. 4 and 5.
  """
  returns = discounted_returns(rewards, mask, discount=discount, segment_ids=segment_ids)
  return whiten(returns, mask, ddof=ddof, eps=eps, moments=moments)


def whitened_group_centered(
  rewards: jax.Array,
  mask: jax.Array,
  *,
  ddof: int = 1,
  eps: float | jax.Array = 1e-8,
  moments: tuple[jax.Array, jax.Array] | None = None,
  where: jax.Array | None = None,
) -> jax.Array:
  r"""Rewards less the mean of their group, whitened over tokens: REINFORCE++-baseline.

  whiten(group_centered(rewards) at each token, mask)

  Couples all rows. Tokens of excluded samples enter neither mean nor variance.

  Args:
    rewards: [..., G]. Constant.
    mask: [..., G, T] bool, True = counts.
    ddof, eps: as in `whiten`.
    moments: scalars (mean, variance) of the centred rewards over the tokens of the whole batch;
      None = of these.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G, T] advantages, constant, 0 at masked positions and for excluded samples.

  Raises:
    TypeError, ValueError: as `group_centered` and `whiten`; mask is not [..., G, T].

  Example:
    >>> mask = jnp.array([[[True, True], [True, True]]])
    >>> whitened_group_centered(jnp.array([[1.0, 0.0]]), mask, ddof=0)
    Array([[[ 1.,  1.],
            [-1., -1.]]], dtype=float32)

  Reference: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, eq. 6 and 7.
  """
  advantages = group_centered(rewards, where=where)
  mask = checks.check_mask(mask)
  checks.check_same_shape(**checks.row_shape(mask), rewards=advantages)
  if where is not None:
    mask &= jnp.asarray(where)[..., None]
  advantages = jnp.broadcast_to(advantages[..., None], mask.shape)
  return whiten(advantages, mask, ddof=ddof, eps=eps, moments=moments)
