"""Advantages for another goal than the mean reward: max@k, likelihood, several rewards at once.

The same conventions as in `advantages`: a group is the last axis, results are constants, samples
excluded by `where` and groups without spread give exactly 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks
from jaxrl_lm.advantages import group_centered, group_normalized, has_signal, raw_rewards


def pass_at_k(rewards: jax.Array, *, k: int, where: jax.Array | None = None) -> jax.Array:
  r"""Advantages for the best of k samples: unbiased for E[max of k rewards].

  A_i = n / C(n, k) * sum over k-subsets I with i in I of (max_I r - max_{I without i} r)

  Only what a sample adds to the best of the others counts, so advantages are never negative.
  Written as sum_j w_j max(r_i - r_j, 0), where w_j counts the subsets whose second best is j: no
  binomial overflows, ties are exact. Holds [..., G, G] and [..., G, k]. For k = G only the best
  sample gets G (best - second best); divided by G (std + eps) that is verl's `grpo_passk`.

  Args:
    rewards: [..., G], 0 and 1 for pass@k, any number for max@k. Constant.
    k: samples of which the best counts, 2 <= k <= G (1 is `leave_one_out`).
    where: [..., G] bool, True = the sample counts; None = all. n is their number per group.

  Returns:
    [..., G], for a mean over samples (the paper's is for a sum: without n). A group with fewer
    than k samples gives 0.

  Raises:
    TypeError: k is not an int.
    ValueError: k is below 2 or above G; shapes differ.

  Example:
    >>> pass_at_k(jnp.array([1.0, 0.0, 0.0, 0.0]), k=2)
    Array([2., 0., 0., 0.], dtype=float32)

  Reference: Walder and Karkhanis 2025 (PKPO), arXiv:2505.15201, eq. 33 ("loo-1").
  """
  signal = has_signal(rewards, where=where)[..., None]
  rewards = raw_rewards(rewards, where=where)
  size = rewards.shape[-1]
  if not isinstance(k, int):
    raise TypeError(f"k must be a Python int, got {type(k).__name__}")
  if not 2 <= k <= size:
    raise ValueError(f"k must lie in [2, G], got k = {k} and rewards of shape {rewards.shape}")
  valid = jnp.ones_like(rewards, dtype=jnp.bool_) if where is None else jnp.asarray(where)
  count = jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.int32).astype(rewards.dtype)
  one, other = rewards[..., :, None], rewards[..., None, :]

  # Samples below each one; equal ones are ordered by their place, which ties make irrelevant.
  before = jnp.tril(jnp.ones((size, size), jnp.bool_), -1)
  before = before.reshape((1,) * (rewards.ndim - 1) + before.shape)
  below = valid[..., None, :] & ((other < one) | ((other == one) & before))
  rank = jnp.sum(below, axis=-1, dtype=jnp.int32).astype(rewards.dtype)

  # n C(rank, k - 2) / C(n, k), as a product of k - 2 factors.
  t = jnp.arange(k - 2, dtype=rewards.dtype).reshape((1,) * rewards.ndim + (-1,))
  factors = (rank[..., None] - t) / jnp.maximum(count[..., None] - 2 - t, 1)
  weight = k * (k - 1) / jnp.maximum(count - 1, 1) * jnp.prod(factors, axis=-1)
  weight = jnp.where(valid, weight, 0)
  advantages = jnp.sum(weight[..., None, :] * jnp.maximum(one - other, 0), axis=-1)
  return jnp.where(valid & signal & (count >= k), advantages, 0)


def mean_normalized(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  """Reward relative to the mean of its group: (r - mean) / mean; 0 where the mean is <= 0.

  With rewards 0 and 1, unbiased for the gradient of log P(success) cut after G - 1 terms of its
  series in (1 - P), where the mean reward has only the first. Meant for rewards >= 0. SkyRL adds
  1e-6 to the mean.

  Args:
    rewards: [..., G]. Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G].

  Raises:
    ValueError: shapes differ.

  Example:
    >>> mean_normalized(jnp.array([1.0, 0.0, 0.0, 0.0]))
    Array([ 3., -1., -1., -1.], dtype=float32)

  Reference: Tajwar et al. 2026 (MaxRL), arXiv:2602.02710, eq. 9, theorem 5.
  """
  centered = group_centered(rewards, where=where)
  rewards = raw_rewards(rewards, where=where)
  valid = jnp.ones_like(rewards, dtype=jnp.bool_) if where is None else jnp.asarray(where)
  mean = masks.masked_mean(rewards, valid, axis=-1)[..., None]
  return jnp.where((mean <= 0) | (centered == 0), 0, centered / jnp.where(mean <= 0, 1, mean))


def signal_scaled(
  rewards: jax.Array,
  *,
  signal_fraction: float | jax.Array | None = None,
  where: jax.Array | None = None,
) -> jax.Array:
  r"""Centred rewards, scaled up for the groups that teach nothing.

  (r - mean) * samples / samples in groups with spread

  Restores the size of the update when many groups are solved or hopeless. Couples all groups.
  verl's `gpg` counts non-zero rewards instead of samples in groups with spread.

  Args:
    rewards: [..., G]. Constant.
    signal_fraction: scalar share of the samples of the batch in groups with spread, already
      reduced, for shard_map; None = of `rewards`.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G].

  Raises:
    ValueError: shapes differ, or signal_fraction is not a scalar in [0, 1].

  Example:
    >>> signal_scaled(jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[ 1., -1.],
           [ 0.,  0.]], dtype=float32)

  Reference: Chu et al. 2025 (GPG), arXiv:2504.02546, eq. 6 and 7.
  """
  centered = group_centered(rewards, where=where)
  if signal_fraction is None:
    valid = jnp.ones_like(centered, dtype=jnp.bool_) if where is None else jnp.asarray(where)
    signal = has_signal(rewards, where=where)[..., None].astype(centered.dtype)
    signal_fraction = masks.masked_mean(jnp.broadcast_to(signal, valid.shape), valid)
  else:
    checks.check_range("signal_fraction", signal_fraction, low=0, high=1)
  fraction = checks.as_constant("signal_fraction", signal_fraction).astype(centered.dtype)
  return centered / jnp.where(fraction == 0, 1, fraction)


def multi_reward_normalized(
  rewards: jax.Array,
  *,
  weights: jax.Array,
  ddof: int = 1,
  eps: float | jax.Array = 1e-6,
  where: jax.Array | None = None,
) -> jax.Array:
  r"""Several rewards, each standardised in its group before they are summed.

  sum_k w_k (r_k - mean_k) / (std_k + eps)

  A rare reward is not drowned by one of large variance, as it is when the sum is standardised.
  GDPO standardises the result once more over the batch: over tokens in verl (`whiten` after
  broadcasting, eps 1e-8 inside the root), over rows in NeMo-RL (no eps) and TRL (std + 1e-4).

  Args:
    rewards: [K, ..., G], K rewards of each sample. Constant.
    weights: [K]. Constant.
    ddof, eps: as in `group_normalized`.
    where: [K, ..., G] bool, True = this reward of this sample counts; None = all.

  Returns:
    [..., G].

  Raises:
    ValueError: rewards have no leading axis K, weights are not [K]; as `group_normalized`.

  Example:
    >>> rewards = jnp.array([[1.0, 0.0], [0.0, 9.0]])
    >>> multi_reward_normalized(rewards, weights=jnp.array([2.0, 1.0]), eps=0.0)
    Array([ 0.70711, -0.70711], dtype=float32)

  Reference: Liu et al. 2026 (GDPO), arXiv:2601.05242, eq. 4 and 7.
  """
  checks.check_rank("rewards", rewards, 2)
  advantages = group_normalized(rewards, ddof=ddof, eps=eps, where=where)
  weights = checks.as_constant("weights", weights).astype(advantages.dtype)
  if weights.shape != advantages.shape[:1]:
    raise ValueError(
      f"weights must be [K], one per reward: weights are {weights.shape}, "
      f"rewards [K, ..., G] are {advantages.shape}"
    )
  return jnp.sum(weights.reshape((-1,) + (1,) * (advantages.ndim - 1)) * advantages, axis=0)
