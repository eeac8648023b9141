"""Importance weights for tokens that were sampled by another policy than the one trained.

The sampler (an inference engine, quantised or a few updates old) and the trainer give the same
token two log-probs. The exact correction is w = exp(old_logprobs - sampler_logprobs) per token,
or its product over a sequence; its variance is tamed by truncating large weights, or by
dropping what lies outside a band. Three log-probs, three roles (decoupled PPO): the weight is
old against sampler, and holds no policy update; the surrogate's ratio is current against old.

  log_weights = level(token_log_ratio(old_logprobs, sampler_logprobs, mask), mask)
  weights     = truncated(log_weights, mask, cap=2.0)
  loss        = -sum(loss_weights * weights * gain)

`level` is any of `ratios`: `per_token`, `per_sequence` (the product, which goes to 0 or
overflows with length: 2000 tokens of log-ratio -0.01 have product 2e-9) or
`per_sequence_geometric` (the mean, 0.99 there). Every weight is a constant of the loss, 0 at
masked positions, and multiplies the weights of `loss_weights`. Functions compose by `*`: a
rejection of whole sequences times a truncated token weight, say.

After a rejection the denominator is a choice, made where the loss weights are made, because
libraries differ in it and it changes the step size by the kept fraction:

  >>> from jaxrl_lm.loss_weights import token_mean
  >>> mask = jnp.array([[True, True, True, True]])
  >>> weights = rejected(jnp.array([[0.0, 0.0, 0.0, 9.0]]), mask, high=1.0)
  >>> token_mean(mask) * weights  # original tokens: a dropped token still counts in the mean
  Array([[0.25, 0.25, 0.25, 0.  ]], dtype=float32)
  >>> (token_mean(mask & (weights > 0)) * weights).round(4)  # kept tokens only
  Array([[0.3333, 0.3333, 0.3333, 0.    ]], dtype=float32)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks, ratios


def truncated(log_weights: jax.Array, mask: jax.Array, *, cap: Any, floor: Any = 0.0) -> jax.Array:
  r"""Truncated importance weights (TIS): large weights are cut to a cap.

  weights = clip(exp(log_weights), floor, cap)

  The log is cut before the exponential, so that the weight is finite for any log weight. What
  is cut stays in the loss with the weight `cap`; `banded` removes it instead. Truncation
  lowers the mean weight below 1: a bias towards 0, never an explosion.

  Args:
    log_weights: [..., T] log(old / sampler) at any level, nats. Constant.
    mask: [..., T] bool, True = counts; elsewhere the weight is 0.
    cap: largest weight, > 0, in ratio units (2 is common for tokens). inf = no cap.
    floor: smallest weight, in [0, cap].

  Returns:
    [..., T] weights in [floor, cap]. A NaN log weight stays NaN.

  Raises:
    ValueError: shapes differ, cap <= 0, floor < 0, or floor > cap.
    TypeError: the mask is not boolean.

  Example:
    >>> truncated(jnp.array([0.0, 1e3, -1e3]), jnp.array([True] * 3), cap=2.0)
    Array([1., 2., 0.], dtype=float32)

  Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; Ionides 2008, "Truncated importance sampling".
  """
  log_weights, mask = checks.masked_constant("log_weights", log_weights, mask)
  checks.check_range("cap", cap, low=0.0, open_low=True)
  checks.check_range("floor", floor, low=0.0, high=_known(cap))
  cap, floor = (jnp.asarray(x, log_weights.dtype) for x in (cap, floor))
  # One nat of slack keeps exp from overflowing and lets the clip return the cap to the bit.
  weights = jnp.clip(jnp.exp(jnp.minimum(log_weights, jnp.log(cap) + 1.0)), floor, cap)
  return masks.zero_masked(weights, mask)


def banded(log_weights: jax.Array, mask: jax.Array, *, low: Any, high: Any) -> jax.Array:
  r"""Banded importance weights (IcePop, MIS): a weight outside the band becomes 0.

  weights = w 1{low <= w <= high},  w = exp(log_weights)

  At the token level this is IcePop, at the level of sequences masked importance sampling: the
  whole sequence goes. Compared in log space, so a log weight of 1e3 gives 0 and not inf * 0.
  A NaN log weight lies in no band.

  Args:
    log_weights: [..., T] log(old / sampler) at any level, nats. Constant.
    mask: [..., T] bool, True = counts; elsewhere the weight is 0.
    low, high: ends of the band, 0 <= low <= high, in ratio units, both included (0.5 and 5
      for tokens). low = 0 or high = inf leaves that side open.

  Returns:
    [..., T] weights, 0 or in [low, high] up to the rounding of exp.

  Raises:
    ValueError: shapes differ, low < 0, or low > high.
    TypeError: the mask is not boolean.

  Example:
    >>> banded(jnp.array([0.0, 1e3, -1e3]), jnp.array([True] * 3), low=0.5, high=5.0)
    Array([1., 0., 0.], dtype=float32)

  Reference: IcePop: Ring-1T, arXiv:2510.18855. Sequences: Liu, Li et al. 2025, "When speed
    kills stability".
  """
  log_weights, mask = checks.masked_constant("log_weights", log_weights, mask)
  checks.check_range("low", low, low=0.0)
  checks.check_range("high", high, low=_known(low))
  keep = mask & (_log(low, log_weights) <= log_weights) & (log_weights <= _log(high, log_weights))
  return masks.zero_masked(jnp.exp(masks.zero_masked(log_weights, keep)), keep)


def rejected(
  statistic: jax.Array, mask: jax.Array, *, low: Any = None, high: Any = None
) -> jax.Array:
  r"""Rejection by any statistic: weight 1 inside the bounds, 0 outside.

  weights = 1{low <= statistic <= high}

  The statistic says how far sampler and trainer are apart and at which level:
  `kl_k3(sampler_logprobs, old_logprobs, mask)` per token, its sum, mean or maximum over a
  sequence through `per_sequence`, `per_sequence_geometric` or `segment_max`. Bounds are in
  the statistic's own unit, which for log weights is nats.

  Args:
    statistic: [..., T]. Constant.
    mask: [..., T] bool, True = counts; elsewhere the weight is 0.
    low, high: bounds, both included; None = no bound on that side.

  Returns:
    [..., T] of 0.0 and 1.0. A NaN statistic is rejected.

  Raises:
    ValueError: shapes differ, low > high, or neither bound is given.
    TypeError: the mask is not boolean.

  Example:
    >>> rejected(jnp.array([0.01, 0.3]), jnp.array([True, True]), high=0.1)
    Array([1., 0.], dtype=float32)

  Reference: Liu, Li et al. 2025, "When speed kills stability"; rollout correction of verl.
  """
  statistic, mask = checks.masked_constant("statistic", statistic, mask)
  if low is None and high is None:
    raise ValueError("low and high are both None: nothing would be rejected")
  low, high = (-jnp.inf if low is None else low), (jnp.inf if high is None else high)
  checks.check_range("low", low)
  checks.check_range("high", high, low=_known(low))
  low, high = (jnp.asarray(x, statistic.dtype) for x in (low, high))
  return (mask & (low <= statistic) & (statistic <= high)).astype(statistic.dtype)


def veto(
  log_weights: jax.Array, mask: jax.Array, *, low: Any, segment_ids: jax.Array | None = None
) -> jax.Array:
  r"""Drops a whole sequence if any of its tokens has a tiny weight.

  weights = 1{min over the sequence's tokens of w_t >= low},  w = exp(log_weights)

  One token that the trainer finds all but impossible says that the sampler went wrong there,
  and that what follows is conditioned on it. Meant for token weights: at a sequence level all
  tokens of a sequence carry one value.

  Args:
    log_weights: [..., T] log(old / sampler) per token, nats. Constant.
    mask: [..., T] bool, True = counts; elsewhere the weight is 0.
    low: smallest weight tolerated, >= 0, in ratio units (1e-4, say).
    segment_ids: [..., T] int, 0 = padding; None = a row is one sequence.

  Returns:
    [..., T] of 0.0 and 1.0. A NaN log weight vetoes.

  Raises:
    ValueError: shapes differ, or low < 0.
    TypeError: the mask is not boolean.

  Example:
    >>> veto(jnp.array([0.1, -12.0, 0.0]), jnp.array([True] * 3), low=1e-4)
    Array([0., 0., 0.], dtype=float32)

  Reference: Liu, Li et al. 2025, "When speed kills stability"; slime's rs_veto_threshold.
  """
  log_weights, mask = checks.masked_constant("log_weights", log_weights, mask)
  checks.check_range("low", low, low=0.0)
  bad = mask & ~(log_weights >= _log(low, log_weights))
  vetoed = masks.segment_max(bad.astype(jnp.int32), mask, segment_ids)
  return (mask & (vetoed == 0)).astype(log_weights.dtype)


def off_policy_mask(
  log_ratio: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  threshold: Any,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Off-policy sequence mask (OPSM): drops bad samples that the policy has moved away from.

  weights_t = 0 if A_t < 0 and mean over the sequence of -log_ratio > threshold, else 1

  Only mistakes are dropped: learning from its own mistakes helps a policy, from those of
  another one it may not. The mean is the k1 estimate of KL(sampler || current) per token, and
  log_ratio is current against sampler, so staleness and engine mismatch both count.

  Args:
    log_ratio: [..., T] token log(current / sampler), nats. Constant.
    advantages: [..., T] or [..., 1]. Constant; only the sign is used, token by token.
    mask: [..., T] bool, True = counts; elsewhere the weight is 0.
    threshold: largest mean, >= 0, nats per token (1e-4 to 0.5 are in use).
    segment_ids: [..., T] int, 0 = padding; None = a row is one sequence.

  Returns:
    [..., T] of 0.0 and 1.0.

  Raises:
    ValueError: shapes differ, or threshold < 0.
    TypeError: the mask is not boolean.

  Example:
    >>> log_ratio, mask = jnp.full((2, 2), -0.3), jnp.ones((2, 2), bool)
    >>> off_policy_mask(log_ratio, jnp.array([[1.0], [-1.0]]), mask, threshold=0.1)
    Array([[1., 1.],
           [0., 0.]], dtype=float32)

  Reference: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
  """
  log_ratio, mask = checks.masked_constant("log_ratio", log_ratio, mask)
  advantages = checks.spread_over_tokens("advantages", advantages, log_ratio=log_ratio)
  checks.check_range("threshold", threshold, low=0.0)
  divergence = -ratios.per_sequence_geometric(log_ratio, mask, segment_ids=segment_ids)
  dropped = (advantages < 0) & ~(divergence <= jnp.asarray(threshold, log_ratio.dtype))
  return (mask & ~dropped).astype(log_ratio.dtype)


def self_normalised(
  weights: jax.Array, mask: jax.Array, loss_weights: jax.Array, *, mean: Any = None
) -> jax.Array:
  r"""Self-normalised importance weights: divided by their mean under the loss weights.

  weights / m,  m = sum(loss_weights * weights) / sum(loss_weights)

  Keeps the total loss weight, hence the step size, whatever the weights are; biased by
  O(1 / batch). Couples the whole batch: computed once on it, never on a micro-batch. Under
  shard_map, or to see m, give `mean`.

  Args:
    weights: [..., T] importance weights, >= 0. Constant.
    mask: [..., T] bool, True = counts; elsewhere the weight is 0.
    loss_weights: [..., T] from `loss_weights`: token means weigh tokens, sequence means
      sequences. Constant.
    mean: scalar m, already reduced over the batch; None = computed from the arguments.

  Returns:
    [..., T] weights whose mean under loss_weights is 1; all 0 if all weights are 0.

  Raises:
    ValueError: shapes differ, or mean < 0.
    TypeError: the mask is not boolean.

  Example:
    >>> weights, mask = jnp.array([1.0, 3.0]), jnp.array([True, True])
    >>> self_normalised(weights, mask, jnp.array([0.5, 0.5]))
    Array([0.5, 1.5], dtype=float32)

  Reference: Owen 2013, "Monte Carlo theory, methods and examples", section 9.2.
  """
  weights, mask = checks.masked_constant("weights", weights, mask)
  loss_weights = checks.as_constant("loss_weights", loss_weights)
  checks.check_same_shape(weights=weights, loss_weights=loss_weights)
  if mean is None:
    # Relative to the largest weight, so that the sum cannot overflow; whose reciprocal, in
    # turn, must not underflow.
    weights = jnp.minimum(weights, 1.0 / jnp.finfo(weights.dtype).tiny)
    largest = jnp.max(weights, initial=0.0)
    weights = weights / jnp.where(largest > 0, largest, 1.0)
    loss_weights = masks.zero_masked(loss_weights, mask)
    total = jnp.sum(loss_weights)
    mean = jnp.sum(loss_weights * weights) / jnp.where(total == 0, 1.0, total)
  else:
    checks.check_range("mean", mean, low=0.0)
  mean = jnp.asarray(mean, weights.dtype)
  return jnp.where(mean == 0, 0.0, weights / jnp.where(mean == 0, 1.0, mean))


def interpolated_proximal(
  logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array, *, alpha: Any
) -> jax.Array:
  r"""Proximal (old) log-probs without a forward pass, between sampler and current policy.

  old_logprobs = (1 - alpha) sampler_logprobs + alpha logprobs

  With policy versions v, alpha = (v_old - v_sampler) / (v_current - v_sampler). The current
  log-probs enter as constants: the result anchors the trust region and has no gradient.

  Args:
    logprobs: [..., T] of the current policy, nats. Constant.
    sampler_logprobs: [..., T] of the policy that drew the tokens, nats. Constant.
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    alpha: number in [0, 1], or [..., T] of them; 0 = the sampler, 1 = the current policy.

  Returns:
    [..., T] log-probs, to be used as old_logprobs.

  Raises:
    ValueError: shapes differ, or a scalar alpha lies outside [0, 1].
    TypeError: the mask is not boolean.

  Example:
    >>> interpolated_proximal(jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([True]), alpha=0.5)
    Array([-1.5], dtype=float32)

  Reference: A-3PO, arXiv:2512.06547; the proximal policy: Hilton et al. 2021, arXiv:2110.00641,
    and AReaL, arXiv:2505.24298.
  """
  sampler_logprobs, mask = checks.masked_constant("sampler_logprobs", sampler_logprobs, mask)
  logprobs, _ = checks.masked_constant("logprobs", logprobs, mask)
  if jnp.ndim(alpha) == 0:
    checks.check_range("alpha", alpha, low=0.0, high=1.0)
    alpha = jax.lax.stop_gradient(jnp.asarray(alpha, logprobs.dtype))
  else:
    alpha, _ = checks.masked_constant("alpha", alpha, mask)
    checks.check_entries("alpha", alpha, low=0.0, high=1.0)
  # Two products, not sampler + alpha * difference: exact at both ends.
  return (1.0 - alpha) * sampler_logprobs + alpha * logprobs


def _log(bound: Any, like: jax.Array) -> jax.Array:
  """The log of a bound in the precision of what it is compared with; log 0 = -inf."""
  return jnp.log(jnp.asarray(bound, like.dtype))


def _known(x: Any) -> Any:
  """A bound to check another one against, or None while it is traced."""
  return None if isinstance(x, jax.core.Tracer) else x
