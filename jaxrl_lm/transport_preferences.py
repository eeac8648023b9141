r"""Alignment by optimal transport (AOT): the preference of one distribution over another.

DPO of the sorted batch. Each sample of one side is paired with the sample of the same rank of the
other, so the loss asks that the whole distribution of rewards dominates, not that every pair is
in order. These functions couple all rows of the batch: micro-batches do not sum to the whole, and
under shard_map they must see the global arrays. Entry k of the result is the pair of rank k, not
row k.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, pairs


def aot_loss(
  policy_margins: jax.Array,
  ref_margins: jax.Array,
  *,
  beta: Any = 0.1,
  label_smoothing: Any = 0.0,
  where: jax.Array | None = None,
) -> jax.Array:
  r"""Paired AOT: the sorted margins of the policy against the sorted margins of the reference.

  loss_k = -(1 - e) log sig(x_k) - e log sig(-x_k),  x_k = beta (policy_(k) - ref_(k))

  policy = log pi(chosen) - log pi(rejected) of each pair, ref alike; (k) is the k-th smallest.

  Args:
    policy_margins: [..., B] nats. Differentiated.
    ref_margins: [..., B] nats. Constant.
    beta: how strongly the policy is held to the reference, > 0.
    label_smoothing: e, in [0, 0.5).
    where: [..., B] bool, True = the pair counts; None = all.

  Returns:
    [..., B] loss by rank, to be minimised; the pairs that do not count are last and 0.

  Raises:
    ValueError: shapes differ, beta <= 0, or label_smoothing is outside [0, 0.5).
    TypeError: `where` is not boolean, or ref_margins is None.

  Example:
    >>> aot_loss(jnp.array([2.0, -1.0]), jnp.array([-1.0, 2.0])).round(6)
    Array([0.693147, 0.693147], dtype=float32)

  Reference: Melnyk et al. 2024 (AOT), arXiv:2406.05882, section 3.
  """
  policy, ref = pairs.same_rows(policy_margins=policy_margins, ref_margins=ref_margins)
  return _sorted_loss(policy, jax.lax.stop_gradient(ref), beta, label_smoothing, where)


def aot_unpaired_loss(
  chosen_log_ratio: jax.Array,
  rejected_log_ratio: jax.Array,
  *,
  beta: Any = 0.1,
  label_smoothing: Any = 0.0,
  where: jax.Array | None = None,
) -> jax.Array:
  r"""Unpaired AOT: the sorted log-ratios of chosen against the sorted ones of rejected.

  loss_k = -(1 - e) log sig(x_k) - e log sig(-x_k),  x_k = beta (chosen_(k) - rejected_(k))

  (k) is the k-th smallest. Chosen and rejected may be responses to different prompts.

  Args:
    chosen_log_ratio, rejected_log_ratio: [..., B] log pi / ref, nats. Differentiated.
    beta: how strongly the policy is held to the reference, > 0.
    label_smoothing: e, in [0, 0.5).
    where: [..., B] bool, True = the entry counts, of both; None = all.

  Returns:
    [..., B] loss by rank, to be minimised; the entries that do not count are last and 0.

  Raises:
    ValueError: shapes differ, beta <= 0, or label_smoothing is outside [0, 0.5).
    TypeError: `where` is not boolean.

  Example:
    >>> aot_unpaired_loss(jnp.array([3.0, 0.0]), jnp.array([-2.0, 1.0])).round(6)
    Array([0.598139, 0.598139], dtype=float32)

  Reference: Melnyk et al. 2024 (AOT), arXiv:2406.05882, section 3.
  """
  chosen, rejected = pairs.same_rows(
    chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio
  )
  return _sorted_loss(chosen, rejected, beta, label_smoothing, where)


def _sorted_loss(
  upper: jax.Array, lower: jax.Array, beta: Any, label_smoothing: Any, where: Any
) -> jax.Array:
  """Smoothed logistic loss of the differences by rank; what does not count comes last."""
  where = jnp.ones_like(upper, dtype=jnp.bool_) if where is None else where
  where = checks.on_every_device(checks.check_mask(where, name="where", rows=upper))
  counted = ~jnp.sort(~where, axis=-1)

  def ascending(x: jax.Array) -> jax.Array:
    ordered = jnp.sort(jnp.where(where, checks.on_every_device(x), jnp.inf), axis=-1)
    return jnp.where(counted, ordered, 0.0)

  x = pairs.positive("beta", beta, upper) * (ascending(upper) - ascending(lower))
  loss = pairs.smoothed_logistic_loss(x, pairs.smoothing(label_smoothing, x))
  return jnp.where(counted, loss, 0.0)
