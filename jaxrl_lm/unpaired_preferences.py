r"""Losses of single responses that are labelled desirable or undesirable: KTO and BCO.

  loss(log_ratio, desirable, *, <constants>) -> loss

  log_ratio: [B] log pi / ref of the sequence, nats (`sequence_log_ratio`). Differentiated. Any
    shape; one entry is one response.
  desirable: [B] bool, the label.

Losses are per response, so a batch of one class is as good as any. The two classes are balanced by
their weights: desirable_weight times the number of desirable ones over undesirable_weight times the
number of undesirable ones should be in [1, 4/3] for KTO.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, pairs


def kto_baseline(log_ratio: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  r"""The reference point of KTO: an estimate of KL(pi || ref), one number for the batch.

  z = max(0, mean of the log-ratios of mismatched pairs: prompt i with the response of prompt j)

  Couples all rows. Compute it once on the whole batch; under shard_map reduce the mean first:
  `jnp.maximum(average(log_ratio, where).all_reduce(axis).mean(), 0)`.

  Args:
    log_ratio: [B] log pi / ref of the mismatched sequences, nats. Constant.
    where: [B] bool, True = counts; None = all.

  Returns:
    Scalar, nats, >= 0; 0 where nothing counts.

  Raises:
    ValueError: shapes differ.
    TypeError: `where` is not boolean.

  Example:
    >>> kto_baseline(jnp.array([1.0, 2.0, -0.5])).round(6)
    Array(0.833333, dtype=float32)

  Reference: Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, section 4.
  """
  (log_ratio,) = pairs.same_rows(log_ratio=log_ratio)
  where = jnp.ones_like(log_ratio, dtype=jnp.bool_) if where is None else where
  where = checks.check_mask(where, name="where", log_ratio=log_ratio)
  total = jnp.sum(jnp.where(where, jax.lax.stop_gradient(log_ratio), 0.0))
  count = jnp.maximum(jnp.sum(where, dtype=jnp.int32), 1).astype(total.dtype)
  return jnp.maximum(total / count, 0.0)


def kto_loss(
  log_ratio: jax.Array,
  desirable: jax.Array,
  *,
  baseline: Any,
  beta: Any = 0.1,
  desirable_weight: Any = 1.0,
  undesirable_weight: Any = 1.0,
) -> jax.Array:
  r"""Kahneman-Tversky optimisation, per response.

  loss = w_D sig(-beta (s - z)) if desirable else w_U sig(beta (s - z)),  s = log_ratio

  The gradient vanishes far on either side: what is hopeless is given up like what is learnt.
  With baseline 0 it is the unpaired APO-zero.

  Args:
    log_ratio, desirable: see the module.
    baseline: z, nats, one number for the whole batch (`kto_baseline`). Constant.
    beta: how strongly the policy is held to the reference, > 0.
    desirable_weight, undesirable_weight: w_D, w_U, >= 0.

  Returns:
    [B] loss, to be minimised, in [0, w].

  Raises:
    ValueError: shapes differ, baseline is not one number, beta <= 0, or a weight is negative.
    TypeError: desirable is not boolean, or baseline is None.

  Example:
    >>> log_ratio, desirable = jnp.array([1.0, 1.0]), jnp.array([True, False])
    >>> kto_loss(log_ratio, desirable, baseline=0.5, beta=2.0).round(6)
    Array([0.268941, 0.731059], dtype=float32)

  Reference: Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, section 4.
  """
  log_ratio, sign, weight = _labelled(log_ratio, desirable, desirable_weight, undesirable_weight)
  baseline = pairs.number("baseline", baseline, log_ratio)
  x = pairs.positive("beta", beta, log_ratio) * (log_ratio - baseline)
  return weight * pairs.sigmoid(-sign * x)


def bco_loss(
  log_ratio: jax.Array,
  desirable: jax.Array,
  *,
  delta: Any,
  beta: Any = 0.1,
  desirable_weight: Any = 1.0,
  undesirable_weight: Any = 1.0,
) -> jax.Array:
  r"""Binary classifier optimisation, per response.

  loss = -w log sig(r - delta) if desirable else -w log sig(-(r - delta)),  r = beta log_ratio

  The paper's correction for prompts that differ between the classes is a weight for each
  undesirable response: multiply the result.

  Args:
    log_ratio, desirable: see the module.
    delta: reward shift, a running mean of the rewards r, kept by the caller. Constant.
    beta: how strongly the policy is held to the reference, > 0.
    desirable_weight, undesirable_weight: w of the two classes, >= 0.

  Returns:
    [B] loss, to be minimised, >= 0.

  Raises:
    ValueError: shapes differ, delta is not one number, beta <= 0, or a weight is negative.
    TypeError: desirable is not boolean, or delta is None.

  Example:
    >>> log_ratio, desirable = jnp.array([1.0, 1.0]), jnp.array([True, False])
    >>> bco_loss(log_ratio, desirable, delta=0.0, beta=1.0).round(6)
    Array([0.313262, 1.313262], dtype=float32)

  Reference: Jung et al. 2024 (BCO), arXiv:2404.04656, section 3.
  """
  log_ratio, sign, weight = _labelled(log_ratio, desirable, desirable_weight, undesirable_weight)
  delta = pairs.number("delta", delta, log_ratio)
  x = pairs.positive("beta", beta, log_ratio) * log_ratio - delta
  return weight * pairs.logistic_loss(sign * x)


def _labelled(
  log_ratio: Any, desirable: Any, desirable_weight: Any, undesirable_weight: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Log-ratios, +1 or -1 by label, and the weight of the label."""
  (log_ratio,) = pairs.same_rows(log_ratio=log_ratio)
  desirable = checks.check_mask(desirable, name="desirable", log_ratio=log_ratio)
  weights = (
    pairs.number("desirable_weight", desirable_weight, log_ratio, low=0.0),
    pairs.number("undesirable_weight", undesirable_weight, log_ratio, low=0.0),
  )
  one = jnp.ones((), log_ratio.dtype)
  return log_ratio, jnp.where(desirable, one, -one), jnp.where(desirable, *weights)
