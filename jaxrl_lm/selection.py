r"""Tokens selected by a statistic of the whole batch, and the surrogates that use them.

A quantile, a ranking or a random draw over the batch is not the sum of its parts: computed on
a micro-batch it means something else. So a selection is a boolean array made once, on the
whole update batch, by a function of its own, and then cut and sharded like the tokens:

  selected = kl_cov_selection(logprobs, advantages, mask, fraction=2e-3)
  gain = kl_cov(log_ratio, advantages, mask=mask, selected=selected)

It sorts the whole batch, so on a mesh every device gathers the statistic; under shard_map
compute it outside, on the global arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, gains, masks, surrogates


def top_entropy_mask(entropy: jax.Array, mask: jax.Array, *, fraction: Any) -> jax.Array:
  r"""The tokens at which the policy is least certain: the top fraction by entropy.

  selected = mask and entropy >= quantile(entropy of counted tokens, 1 - fraction)

  Couples the whole batch. Use it for the policy term; whether the length normalisation counts
  the other tokens (TRL: yes; the paper: no) is which mask `loss_weights` is given.

  Args:
    entropy: [..., T] nats. Constant.
    mask: [..., T] bool, True = counts.
    fraction: share of tokens kept, in [0, 1]; the quantile interpolates linearly.

  Returns:
    [..., T] bool.

  Raises:
    ValueError: shapes differ, or fraction is out of range.

  Example:
    >>> top_entropy_mask(jnp.array([0.1, 0.9, 0.5, 0.2]), jnp.ones(4, bool), fraction=0.25)
    Array([False,  True, False, False], dtype=bool)

  Reference: Wang et al. 2025, arXiv:2506.01939, eq. 6 (fraction 0.2).
  """
  entropy = checks.as_constant("entropy", entropy)
  mask = checks.check_mask(mask, entropy=entropy)
  checks.check_range("fraction", fraction, low=0.0, high=1.0)
  if entropy.size == 0:
    return mask
  ascending = jnp.sort(checks.on_every_device(jnp.where(mask, entropy, jnp.inf).reshape(-1)))
  last = jnp.maximum(jnp.sum(mask, dtype=jnp.int32) - 1, 0)
  position = (1.0 - fraction) * last.astype(entropy.dtype)
  below = jnp.floor(position).astype(jnp.int32)
  low, high = ascending[below], ascending[jnp.minimum(below + 1, last)]
  threshold = jnp.where(low == high, low, low + (high - low) * (position - below))
  return mask & (jnp.where(mask, entropy, -jnp.inf) >= threshold)


def token_covariance(logprobs: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
  r"""How much each token adds to the covariance of log-prob and advantage over the batch.

  cov_t = (A_t - mean A) (log pi_t - mean log pi)

  A large positive one is a likely token that is being made likelier: where the entropy goes.
  Couples the whole batch.

  Args:
    logprobs: [..., T] nats. Constant.
    advantages: [..., T] or [..., 1]. Constant.
    mask: [..., T] bool, True = counts; the means are over counted tokens.

  Returns:
    [..., T]; 0 at masked positions.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> token_covariance(jnp.array([-1.0, -3.0]), jnp.array([1.0, -1.0]), jnp.ones(2, bool))
    Array([1., 1.], dtype=float32)

  Reference: Cui et al. 2025, arXiv:2505.22617, eq. 10.
  """
  logprobs, mask = checks.masked_constant("logprobs", logprobs, mask)
  advantages = checks.spread_over_tokens("advantages", advantages, logprobs=logprobs)
  centred = [x - masks.masked_mean(x, mask) for x in (advantages, logprobs)]
  return masks.zero_masked(centred[0] * centred[1], mask)


def kl_cov_selection(
  logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, *, fraction: Any
) -> jax.Array:
  r"""The tokens of highest covariance: max(1, floor(fraction N)) of the N counted ones.

  Couples the whole batch. Ties go to the earlier token.

  Args:
    logprobs: [..., T] nats. Constant.
    advantages: [..., T] or [..., 1]. Constant.
    mask: [..., T] bool, True = counts.
    fraction: share of the tokens, in [0, 1].

  Returns:
    [..., T] bool.

  Raises:
    ValueError: shapes differ, or fraction is out of range.

  Example:
    >>> logprobs, advantages = jnp.array([-1.0, -2.0, -6.0]), jnp.array([1.0, 1.0, -2.0])
    >>> kl_cov_selection(logprobs, advantages, jnp.ones(3, bool), fraction=0.4)
    Array([False, False,  True], dtype=bool)

  Reference: Cui et al. 2025, arXiv:2505.22617, eq. 13 (fraction 2e-3 and 2e-4).
  """
  covariance = token_covariance(logprobs, advantages, mask)
  return _highest(covariance, checks.check_mask(mask), _how_many(mask, fraction))


def clip_cov_selection(
  key: jax.Array,
  logprobs: jax.Array,
  log_ratio: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  fraction: Any,
  cov_low: Any = 1.0,
  cov_high: Any = 5.0,
  clip_low: Any = 0.2,
  clip_high: Any = 0.2,
) -> jax.Array:
  r"""Randomly drawn tokens of high covariance, to be left out of the update.

  max(1, floor(fraction N)) tokens (all, if there are fewer), drawn uniformly without
  replacement from those with cov_low < cov < cov_high that PPO does not clip already.
  Couples the whole batch.

  Args:
    key: PRNG key of the draw.
    logprobs: [..., T] nats. Constant.
    log_ratio: [..., T] of the surrogate, nats. Constant.
    advantages: [..., T] or [..., 1]. Constant.
    mask: [..., T] bool, True = counts.
    fraction: share of the counted tokens, in [0, 1].
    cov_low, cov_high: open interval of covariances to draw from.
    clip_low, clip_high: widths of PPO's band, in ratio units.

  Returns:
    [..., T] bool.

  Raises:
    ValueError: shapes differ, or a constant is out of range.
    TypeError: the key is None.

  Example:
    >>> logprobs, advantages = jnp.array([-1.0, -2.0, -6.0]), jnp.array([1.0, 1.0, -2.0])
    >>> on = jnp.ones(3, bool)
    >>> clip_cov_selection(jax.random.key(0), logprobs, jnp.zeros(3), advantages, on, fraction=0.4)
    Array([ True, False, False], dtype=bool)

  Reference: Cui et al. 2025, arXiv:2505.22617, eq. 11 (fraction 2e-4, cov in (1, 5)).
  """
  if key is None:
    raise TypeError("key is required, got None: which tokens are left out is drawn at random")
  low, high = gains.log_band(clip_low, clip_high)
  checks.check_range("cov_low", cov_low)
  if not isinstance(cov_low, jax.core.Tracer):
    checks.check_range("cov_high", cov_high, low=cov_low)
  covariance = token_covariance(logprobs, advantages, mask)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask)
  log_ratio = jax.lax.stop_gradient(log_ratio)
  clipped = ((advantages > 0) & (log_ratio > high)) | ((advantages < 0) & (log_ratio < low))
  candidates = mask & ~clipped & (covariance > cov_low) & (covariance < cov_high)
  lots = jax.random.uniform(key, covariance.shape)
  return _highest(lots, candidates, _how_many(mask, fraction))


def clip_cov(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  selected: jax.Array,
  clip_low: Any = 0.2,
  clip_high: Any = 0.2,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""PPO's clipped gain, with the selected tokens left out, per token.

  gain = 0 if selected else min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see `surrogates`.
    selected: [..., T] bool from `clip_cov_selection` on the whole batch.
    clip_low, clip_high: widths of the band, in ratio units.

  Returns:
    [..., T] gain, to be maximised.

  Raises:
    ValueError: shapes do not match, or a width is out of range.
    TypeError: selected is not boolean.

  Example:
    >>> selected = jnp.array([True, False])
    >>> clip_cov(jnp.zeros(2), jnp.ones(2), selected=selected)
    Array([0., 1.], dtype=float32)

  Reference: Cui et al. 2025, arXiv:2505.22617, eq. 12.
  """
  selected = checks.check_mask(selected, name="selected", log_ratio=log_ratio)
  mask = ~selected if mask is None else checks.check_mask(mask, log_ratio=log_ratio) & ~selected
  return surrogates.ppo_clip(
    log_ratio,
    advantages,
    clip_low=clip_low,
    clip_high=clip_high,
    mask=mask,
    old_logprobs=old_logprobs,
    segment_ids=segment_ids,
  )


def kl_cov(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  selected: jax.Array,
  kl_coef: Any = 1.0,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Importance-weighted gain, with a penalty on the move of the selected tokens, per token.

  gain = r A - kl_coef |log_ratio| 1[selected]

  No ratio is clipped. The penalty is the |log-ratio| of the released code; the paper's
  equation writes a KL.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see `surrogates`.
    selected: [..., T] bool from `kl_cov_selection` on the whole batch.
    kl_coef: strength of the penalty, >= 0.

  Returns:
    [..., T] gain, to be maximised.

  Raises:
    ValueError: shapes do not match, or kl_coef is negative.
    TypeError: selected is not boolean.

  Example:
    >>> log_ratio, selected = jnp.log(jnp.array([2.0, 2.0])), jnp.array([True, False])
    >>> kl_cov(log_ratio, jnp.ones(2), selected=selected).round(4)
    Array([1.3069, 2.    ], dtype=float32)

  Reference: Cui et al. 2025, arXiv:2505.22617, eq. 14.
  """
  checks.check_range("kl_coef", kl_coef, low=0.0)
  selected = checks.check_mask(selected, name="selected", log_ratio=log_ratio)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  drift = masks.zero_masked(log_ratio, selected)
  penalty = kl_coef * drift * jax.lax.stop_gradient(jnp.sign(drift))  # |drift|, gradient 0 at 0
  return gains.ratio_gain(log_ratio, advantages) - penalty


def _how_many(mask: Any, fraction: Any) -> jax.Array:
  """max(1, floor(fraction N)) as a traced integer."""
  checks.check_range("fraction", fraction, low=0.0, high=1.0)
  number = jnp.sum(mask, dtype=jnp.int32).astype(jnp.result_type(float))
  return jnp.maximum(jnp.floor(fraction * number).astype(jnp.int32), 1)


def _highest(scores: jax.Array, candidates: jax.Array, number: jax.Array) -> jax.Array:
  """The `number` candidates of highest score, over all axes, ties to the earlier one."""
  flat = checks.on_every_device(jnp.where(candidates, -scores, jnp.inf).reshape(-1))
  order = jnp.argsort(flat, stable=True)
  rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
  return candidates & (rank.reshape(scores.shape) < number)
