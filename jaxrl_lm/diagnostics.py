"""What to log: clip fractions, drift, ratio extremes, effective sample size, gradient by length.

Every statistic comes as sums and counts that merge exactly over micro-batches and devices
(`statistics`), never as a mean of means. All of it is constant (no gradient), and costs a few
reductions per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, kl, masks
from jaxrl_lm.advantages import has_signal
from jaxrl_lm.statistics import Average, EffectiveSampleSize, Extremes


def average(x: jax.Array, mask: jax.Array) -> Average:
  """Sum and count of the counted entries: the start of every mean that is logged.

  For a statistic of whole sequences, x and mask have one entry per sequence. Count what the
  policy produced, not what the loss kept: the mean length over a mask in which dropped rows
  were zeroed is too small.

  Args:
    x: [...] numbers or booleans (a fraction). Constant.
    mask: [...] bool, True = counts.

  Returns:
    Average of scalars.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> average(jnp.array([2, 4]), jnp.array([True, True])).mean()
    Array(3., dtype=float32)

  Reference: the fault it avoids, a mean of means: huggingface/trl#7012.
  """
  x = checks.as_constant("x", x)
  return Average.of(x, checks.check_mask(mask, x=x))


def clip_fractions(
  log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, *, clip_low: Any, clip_high: Any
) -> dict[str, Average]:
  r"""Which part of the tokens the clip of PPO really stops.

  low = A < 0 and r < 1 - clip_low;  high = A > 0 and r > 1 + clip_high;  clipped = either

  Sign-aware: a ratio outside the band on the side that the minimum does not cut is not
  clipped, and has its full gradient. Compared in log space, as `ppo_clip` does.

  Args:
    log_ratio: [..., T] at the level that is clipped, nats. Constant.
    advantages: [..., T] or [..., 1]. Constant.
    mask: [..., T] bool, True = counts.
    clip_low, clip_high: widths of the band [1 - low, 1 + high], in ratio units.

  Returns:
    {"low", "high", "clipped"}: Averages over all counted tokens (of either sign).

  Raises:
    ValueError: shapes differ, clip_low outside [0, 1], or clip_high < 0.
    TypeError: the mask is not boolean.

  Example:
    >>> log_ratio = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5]))
    >>> a, mask = jnp.array([1.0, -1.0, 1.0, -1.0]), jnp.ones((4,), bool)
    >>> clip_fractions(log_ratio, a, mask, clip_low=0.2, clip_high=0.2)["clipped"].mean()
    Array(0.5, dtype=float32)

  Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7: where its minimum is the clip.
  """
  log_ratio, mask = checks.masked_constant("log_ratio", log_ratio, mask)
  advantages = checks.spread_over_tokens("advantages", advantages, log_ratio=log_ratio)
  checks.check_range("clip_low", clip_low, low=0.0, high=1.0)
  checks.check_range("clip_high", clip_high, low=0.0)
  clip_low, clip_high = (jnp.asarray(x, log_ratio.dtype) for x in (clip_low, clip_high))
  low = (advantages < 0) & (log_ratio < jnp.log1p(-clip_low))
  high = (advantages > 0) & (log_ratio > jnp.log1p(clip_high))
  clipped = {"low": low, "high": high, "clipped": low | high}
  return {name: Average.of(x.astype(log_ratio.dtype), mask) for name, x in clipped.items()}


def policy_drift(
  logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array
) -> dict[str, Average]:
  """How far an update has moved the policy: KL(old || current) per token, two estimates.

  The tokens come from the old policy, so it is the first argument of the KL and the sign is
  positive for drift. k1 is noisy and may be negative; k3 is not. Their expectations are equal:
  where they keep apart, the tokens were not drawn from `old_logprobs`.

  Args:
    logprobs: [..., T] of the current policy, nats. Constant.
    old_logprobs: [..., T] of the policy that drew the tokens, nats. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    {"k1", "k3"}: Averages in nats per token.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> drift = policy_drift(jnp.array([-1.5]), jnp.array([-1.0]), jnp.array([True]))
    >>> drift["k1"].mean(), drift["k3"].mean().round(4)
    (Array(0.5, dtype=float32), Array(0.1065, dtype=float32))

  Reference: Schulman 2020, "Approximating KL divergence".
  """
  logprobs, mask = checks.masked_constant("logprobs", logprobs, mask)
  old_logprobs, _ = checks.masked_constant("old_logprobs", old_logprobs, mask)
  estimators = {"k1": kl.kl_k1, "k3": kl.kl_k3}
  return {k: Average.of(f(old_logprobs, logprobs, mask), mask) for k, f in estimators.items()}


def perplexity_gap(
  logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array
) -> dict[str, Average]:
  """How surprised trainer and sampler are by the sampler's tokens, and the difference.

  gap = mean(sampler_logprobs - logprobs), the k1 estimate of KL(sampler || policy)

  Perplexities are exp of the means. With equal weights on both sides a gap that is not about
  0 is an engine mismatch: another temperature, filtered logits, other precision.

  Args:
    logprobs: [..., T] by the trainer, nats. Constant.
    sampler_logprobs: [..., T] as the sampler reported them, nats. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    {"policy", "sampler", "gap"}: Averages of -log-prob, and of the gap, in nats per token.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> gap = perplexity_gap(jnp.array([-1.5]), jnp.array([-1.0]), jnp.array([True]))
    >>> {name: float(part.mean()) for name, part in gap.items()}
    {'policy': 1.5, 'sampler': 1.0, 'gap': 0.5}

  Reference: the rollout-correction metrics of verl, which average over rows, not tokens.
  """
  logprobs, mask = checks.masked_constant("logprobs", logprobs, mask)
  sampler_logprobs, _ = checks.masked_constant("sampler_logprobs", sampler_logprobs, mask)
  return {
    "policy": Average.of(-logprobs, mask),
    "sampler": Average.of(-sampler_logprobs, mask),
    "gap": Average.of(sampler_logprobs - logprobs, mask),
  }


def token_effective_sample_size(log_weights: jax.Array, mask: jax.Array) -> EffectiveSampleSize:
  r"""Effective sample size over tokens: what part of the batch the weights leave.

  fraction = (sum_t w_t)^2 / (N sum_t w_t^2),  w = exp(log_weights)

  Of the raw weights it measures the mismatch, of log(`truncated(...)`) what is left of it.

  Args:
    log_weights: [..., T] log importance weights, nats; -inf is a weight of 0. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    EffectiveSampleSize of scalars.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> weights, mask = jnp.array([1e3, 1e3, -1e3, -1e3]), jnp.ones((4,), bool)
    >>> token_effective_sample_size(weights, mask).fraction()
    Array(0.5, dtype=float32)

  Reference: Kong 1992, "A note on importance sampling using standardized weights"; Elvira et
    al. 2018, arXiv:1809.04129, on what it does and does not measure.
  """
  log_weights, mask = checks.masked_constant("log_weights", log_weights, mask)
  return EffectiveSampleSize.of(log_weights, mask)


def sequence_effective_sample_size(
  log_weights: jax.Array, mask: jax.Array, *, segment_ids: jax.Array | None = None
) -> EffectiveSampleSize:
  r"""Effective sample size over sequences, each counted once whatever its length.

  fraction = (sum_i w_i)^2 / (n sum_i w_i^2) over the n non-empty sequences

  Args:
    log_weights: [..., T] log weights of a sequence level (`per_sequence`), which has the same
      value at every token of a sequence; nats. Constant.
    mask: [..., T] bool, True = counts.
    segment_ids: [..., T] int, 0 = padding; None = a row is one sequence.

  Returns:
    EffectiveSampleSize of scalars.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> weights = jnp.array([[0.0, 0.0, 0.0], [-1e3, 0.0, 0.0]])
    >>> mask = jnp.array([[True, True, True], [True, False, False]])
    >>> sequence_effective_sample_size(weights, mask).fraction()
    Array(0.5, dtype=float32)

  Reference: Kong 1992, "A note on importance sampling using standardized weights".
  """
  last = masks.last_token_mask(checks.check_mask(mask), segment_ids=segment_ids)
  return token_effective_sample_size(log_weights, last)


def ratio_extremes(log_ratio: jax.Array, mask: jax.Array, *, offset: Any = 0) -> Extremes:
  """The smallest and largest log-ratio and the tokens they belong to.

  One token can ruin a batch, and no mean shows it; the position says which one to look at:
  `numpy.unravel_index(position, shape)`. Kept as logs, so that 1e3 can be read.

  Args:
    log_ratio: [..., T] at any level, nats. Constant.
    mask: [..., T] bool, True = counts.
    offset: int, flat index in the whole of the first entry of this part; 0 = it is the whole.
      A block of rows that starts at row b has offset b T; under shard_map
      `jax.lax.axis_index(name) * log_ratio.size`.

  Returns:
    Extremes of scalars.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> found = ratio_extremes(jnp.array([[0.1, -0.2, 9.0]]), jnp.array([[True, True, False]]))
    >>> found.low, found.low_position
    (Array(-0.2, dtype=float32), Array(1, dtype=int32))

  Reference: what one far-off token does to a batch: OpenRLHF/OpenRLHF#1293.
  """
  log_ratio, mask = checks.masked_constant("log_ratio", log_ratio, mask)
  return Extremes.of(log_ratio, mask, offset)


def gradient_share_by_length(
  token_gradients: jax.Array,
  mask: jax.Array,
  *,
  edges: Sequence[Any],
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""How much gradient sequences of each length receive: length bias as a histogram.

  out_k = sum of |g_t| over the sequences with edges[k - 1] <= length < edges[k]

  Take g = d loss / d logprobs. Sums, so that parts add up; divide by their total for shares.

  Args:
    token_gradients: [..., T] gradient of the loss in each token's log-prob. Constant.
    mask: [..., T] bool, True = counts.
    edges: K increasing lengths, in tokens.
    segment_ids: [..., T] int, 0 = padding; None = a row is one sequence.

  Returns:
    [K + 1] sums; the first bin is below edges[0], the last from edges[-1] on.

  Raises:
    ValueError: shapes differ, or the edges do not increase.
    TypeError: the mask is not boolean.

  Example:
    >>> gradients, mask = jnp.full((2, 3), -0.5), jnp.array([[True] * 3, [True, False, False]])
    >>> gradient_share_by_length(gradients, mask, edges=[2])
    Array([0.5, 1.5], dtype=float32)

  Reference: the bias it shows: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.1.
  """
  gradients, mask = checks.masked_constant("token_gradients", token_gradients, mask)
  for smaller, larger in zip(edges[:-1], edges[1:], strict=True):
    checks.check_range("edges", larger, low=smaller, open_low=True)
  length = masks.segment_count(mask, segment_ids)
  bins = sum(((length >= edge).astype(jnp.int32) for edge in edges), jnp.zeros_like(length))
  sizes = jnp.abs(gradients)
  return jnp.stack([jnp.sum(jnp.where(bins == k, sizes, 0.0)) for k in range(len(edges) + 1)])


def zero_signal_groups(rewards: jax.Array, *, where: jax.Array | None = None) -> Average:
  """The part of the groups whose rewards are all equal, so that no sample has an advantage.

  Too easy or too hard prompts: compute without gradient, and the groups that dynamic sampling
  would replace. A group without a valid sample is not counted.

  Args:
    rewards: [..., G], a group is the last axis. Constant.
    where: [..., G] bool, True = a valid sample; None = all.

  Returns:
    Average over groups.

  Raises:
    ValueError: shapes differ.
    TypeError: `where` is not boolean.

  Example:
    >>> zero_signal_groups(jnp.array([[1.0, 1.0], [0.0, 1.0]])).mean()
    Array(0.5, dtype=float32)

  Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
  """
  silent = ~has_signal(rewards, where=where)
  valid = jnp.ones_like(silent) if where is None else jnp.any(jnp.asarray(where), axis=-1)
  return Average.of(silent.astype(checks.as_float("rewards", rewards).dtype), valid)
