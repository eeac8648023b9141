"""Rewards of a group of samples -> advantages. A group is the last axis: [P, G].

Everything returned is a constant (stop_gradient), and 0 where `where` excludes the sample. In
groups without spread (max - min <= 4 machine eps x max|r|, so also groups of one or of none)
every estimator with a baseline from the group gives exactly 0: rounding is never divided by a
standard deviation of rounding. Samples that cannot be scored (NaN, a crashed verifier) are
excluded through `where` and do not touch the rest of their group; a NaN that is not excluded
makes its whole group NaN. An advantage enters a per-token surrogate as `advantages[..., None]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_lm import checks
from jaxrl_lm.moments import CenteredMoments, centered_moments


def has_signal(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  """Which groups can teach anything: two samples or more that differ by more than rounding.

  The keep mask of dynamic sampling: it selects the prompts to keep, or multiplies loss weights
  [..., G, T] as `has_signal(rewards)[..., None, None]`. A reward of NaN that is not excluded counts
  as signal.

  Args:
    rewards: [..., G].
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [...] bool, one per group.

  Raises:
    TypeError, ValueError: `where` is not boolean or not of the shape of rewards.

  Example:
    >>> has_signal(jnp.array([[0.0, 1.0], [0.7, 0.7]]))
    Array([ True, False], dtype=bool)

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11.
  """
  return _group(*_valid(rewards, where)).has_spread[..., 0]


def raw_rewards(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  """The rewards themselves, without a baseline; 0 where excluded.

  Args:
    rewards: [..., G]. Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G].

  Example:
    >>> raw_rewards(jnp.array([1.0, jnp.nan]), where=jnp.array([True, False]))
    Array([1., 0.], dtype=float32)

  Reference: Williams 1992 (REINFORCE), "Simple statistical gradient-following algorithms".
  """
  return _valid(rewards, where)[0]


def group_centered(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  """Reward less the mean of its group: r - mean.

  The sample itself is in the mean, so the policy gradient shrinks by (G - 1) / G on average;
  `leave_one_out` undoes that.

  Args:
    rewards: [..., G]. Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G]. A group of one gives 0 (verl: the raw reward).

  Example:
    >>> group_centered(jnp.array([1.0, 0.0, 0.0, 0.0]))
    Array([ 0.75, -0.25, -0.25, -0.25], dtype=float32)

  Reference: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
  """
  return _group(*_valid(rewards, where)).centered


def group_normalized(
  rewards: jax.Array,
  *,
  ddof: int = 1,
  eps: float | jax.Array = 1e-6,
  where: jax.Array | None = None,
) -> jax.Array:
  r"""Reward standardised in its group, as in GRPO.

  (r - mean) / (std + eps)

  The division weighs prompts by 1 / std: very easy and very hard ones count more. Others: ddof=1
  and eps 1e-6 in verl and Tunix, 1e-4 in TRL, 1e-9 in OpenRLHF; NeMo-RL see
  `leave_one_out_normalized`; ddof=0 and 1e-8 in open-instruct and MaxText. A group of one gives 0
  here, NeMo-RL and TRL; the raw reward in verl; NaN in Tunix.

  Args:
    rewards: [..., G]. Constant.
    ddof: the variance divides by G - ddof, 0 or 1; for G = 2 a factor sqrt(2).
    eps: added to the standard deviation, in units of reward.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G].

  Raises:
    ValueError: ddof or eps is out of range; shapes differ.

  Example:
    >>> group_normalized(jnp.array([1.0, 0.0, 0.0, 0.0]), eps=0.0)
    Array([ 1.5, -0.5, -0.5, -0.5], dtype=float32)

  Reference: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.2.
  """
  group = _group(*_valid(rewards, where), ddof)
  return _divided(group.centered, jnp.sqrt(group.variance), eps)


def leave_one_out(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  """Reward less the mean of the other samples: (r - mean) G / (G - 1).

  The baseline does not depend on the sample, so the policy gradient is unbiased.

  Args:
    rewards: [..., G]. Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G]. A group of one gives 0 (so TRL, Tunix, NeMo-RL; verl's two versions 0 and raw).

  Example:
    >>> leave_one_out(jnp.array([1.0, 0.0, 0.0, 0.0]))
    Array([ 1.        , -0.33333334, -0.33333334, -0.33333334], dtype=float32)

  Reference: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al.
    2024 (RLOO), arXiv:2402.14740, section 2.3.
  """
  return _left_out(_group(*_valid(rewards, where)))


def leave_one_out_normalized(
  rewards: jax.Array, *, eps: float | jax.Array = 1e-6, where: jax.Array | None = None
) -> jax.Array:
  r"""Baseline and standard deviation (ddof=1) of the other samples, NeMo-RL's default.

  (r_i - mean_{j != i}) / (std_{j != i} + eps)

  Not divided where that std is 0 or has fewer than two samples, so the only success of a group
  stays at 1 while its failures are divided. Holds [..., G, G]: one variance per sample, as a
  closed form would cancel just there.

  Args:
    rewards: [..., G]. Constant.
    eps: added to the standard deviation, in units of reward.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G]. A group of one gives 0; G = 2 is `leave_one_out`.

  Raises:
    ValueError: eps is negative; shapes differ.

  Example:
    >>> leave_one_out_normalized(jnp.array([1.0, 0.0, 0.0, 0.0]), eps=0.0)
    Array([ 1.     , -0.57735, -0.57735, -0.57735], dtype=float32)

  Reference: NVIDIA NeMo-RL, `calculate_baseline_and_std_per_prompt`.
  """
  rewards, valid = _valid(rewards, where)
  size = rewards.shape[-1]
  not_self = ~jnp.eye(size, dtype=jnp.bool_).reshape((1,) * (rewards.ndim - 1) + (size, size))
  others = valid[..., None, :] & not_self
  row = jnp.broadcast_to(rewards[..., None, :], others.shape)
  std = jnp.sqrt(_group(row, others).variance[..., 0])
  advantages = _left_out(_group(rewards, valid))
  return jnp.where(std != 0, _divided(advantages, std, eps), advantages)


def batch_scaled(
  rewards: jax.Array,
  *,
  ddof: int = 1,
  eps: float | jax.Array = 1e-6,
  moments: tuple[jax.Array, jax.Array] | None = None,
  where: jax.Array | None = None,
) -> jax.Array:
  r"""Mean of the group, standard deviation of the batch: (r - mean_group) / (std_batch + eps).

  One scale for all prompts, so none is weighed by its difficulty. Couples all groups. Others:
  TRL (`scale_rewards="batch"`) ddof=1 and eps 1e-4, AReaL ddof=1 and 1e-5.

  Args:
    rewards: [..., G]. Constant.
    ddof: the variance divides by the number of samples - ddof, 0 or 1.
    eps: added to the standard deviation, in units of reward.
    moments: scalars (mean, variance) of all rewards of the batch (`masked_moments` of the
      global arrays), for shard_map; the mean is not used. None = of `rewards`.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G].

  Raises:
    ValueError: ddof or eps is out of range; shapes differ; moments are not scalars.

  Example:
    >>> batch_scaled(jnp.array([[1.0, -1.0], [3.0, 3.0]]), eps=0.0)
    Array([[ 0.522233, -0.522233],
           [ 0.      ,  0.      ]], dtype=float32)

  Reference: Liu et al. 2025 (Lite PPO), arXiv:2508.08221, section 5.
  """
  rewards, valid = _valid(rewards, where)
  if moments is None:
    variance = centered_moments(rewards, valid, ddof=ddof).variance.reshape(())
  else:
    checks.check_same_shape(scalar=0.0, variance=moments[1])
    variance = checks.as_constant("moments", moments[1]).astype(rewards.dtype)
  return _divided(_group(rewards, valid, ddof).centered, jnp.sqrt(variance), eps)


def greedy_baseline(
  rewards: jax.Array, greedy_rewards: jax.Array, *, where: jax.Array | None = None
) -> jax.Array:
  """Reward less that of the greedy response to the same prompt.

  The baseline is not from the group: equal rewards, or a group of one, are not set to 0.

  Args:
    rewards: [..., G]. Constant.
    greedy_rewards: [...] reward of the greedy response of each group. Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G].

  Raises:
    ValueError: shapes differ.

  Example:
    >>> greedy_baseline(jnp.array([[1.0, 0.0]]), jnp.array([1.0]))
    Array([[ 0., -1.]], dtype=float32)

  Reference: Li et al. 2023 (ReMax), arXiv:2310.10505.
  """
  rewards, valid = _valid(rewards, where)
  greedy_rewards = checks.as_constant("greedy_rewards", greedy_rewards)
  checks.check_same_shape(**{"rewards[..., 0]": rewards[..., 0], "greedy_rewards": greedy_rewards})
  return jnp.where(valid, rewards - greedy_rewards[..., None], 0)


def length_weighted_baseline(
  rewards: jax.Array, lengths: jax.Array, *, where: jax.Array | None = None
) -> jax.Array:
  r"""Reward less the mean of its group weighted by length.

  r_i - sum_j |y_j| r_j / sum_j |y_j|

  The baseline of least variance if the squared score grows in proportion to the length.

  Args:
    rewards: [..., G]. Constant.
    lengths: [..., G] tokens of each response, at least 0 (`masks.lengths`). Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    [..., G]. A group of one gives 0 (verl: the raw reward); without any token, centred.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> length_weighted_baseline(jnp.array([1.0, 0.0]), jnp.array([3, 1]))
    Array([ 0.25, -0.75], dtype=float32)

  Reference: Hao et al. 2025 (OPO), arXiv:2505.23585.
  """
  rewards, valid = _valid(rewards, where)
  checks.check_same_shape(rewards=rewards, lengths=lengths)
  lengths = checks.as_constant("lengths", lengths).astype(rewards.dtype)
  lengths = jnp.where(valid, lengths, 0)
  group = _group(rewards, valid)
  total = jnp.sum(lengths, axis=-1, keepdims=True)
  shift = jnp.sum(lengths * group.centered, axis=-1, keepdims=True)
  shift = shift / jnp.where(total == 0, 1, total)
  return jnp.where(valid & group.has_spread, group.centered - shift, 0)


def _valid(rewards: jax.Array, where: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Rewards with 0 in place of the excluded ones, and which count."""
  rewards = checks.as_constant("rewards", rewards)
  checks.check_rank("rewards", rewards, 1)
  if where is None:
    return rewards, jnp.ones_like(rewards, dtype=jnp.bool_)
  where = checks.check_mask(where, name="where", rewards=rewards)
  return jnp.where(where, rewards, 0), where


def _group(rewards: jax.Array, valid: jax.Array, ddof: int = 1) -> CenteredMoments:
  return centered_moments(rewards, valid, ddof=ddof, axis=-1)


def _left_out(group: CenteredMoments) -> jax.Array:
  return group.centered * group.number / jnp.maximum(group.number - 1, 1)


def _divided(x: jax.Array, std: jax.Array, eps: float | jax.Array) -> jax.Array:
  """x / (std + eps): undivided where that is 0, exactly 0 where x is, also beside a NaN."""
  checks.check_range("eps", eps, low=0)
  divisor = std + checks.as_constant("eps", eps).astype(std.dtype)
  return jnp.where(x == 0, 0, x / jnp.where(divisor == 0, 1, divisor))
