r"""Surrogates: (log_ratio, advantages) -> gain per token, to be maximised.

Every one has the gradient c A grad(log_ratio) with a coefficient c that depends on the ratio
and the sign of the advantage; that coefficient is all they differ in:

  reinforce            1
  importance_weighted  r
  ppo_clip             r inside [1 - low, 1 + high] or on its way back there, else 0
  dual_clip            the same, and 0 for A < 0, r > ratio_cap
  sapo                 r times a smooth bump around r = 1
  gmpo                 geometric mean of the sequence's clipped ratios; 0 for clipped tokens
  cispo                sg(clip(r, 1 - low, 1 + high))
  topr                 1 if A > 0, else sg(min(r, 1))
  vespo                sg(r^k exp(lam (1 - r)))
  dppo_tv, dppo_kl     sg(min(r, cap)) inside a band of probabilities instead of ratios, else 0
  dro                  1 - beta log r / A
  clip_cov, kl_cov     ppo_clip and importance_weighted, minus chosen high-covariance tokens

The first six are here, those whose weight is a constant of the gradient in
`score_surrogates`, the last two in `selection`. A new one is three lines of `gains`.

One signature serves all, so that any of them fits the slot of an `Objective`:

  surrogate(log_ratio, advantages, *, mask, old_logprobs, segment_ids, <constants>) -> gain

  log_ratio: [..., T], nats, at any level (`ratios`). Differentiated.
  advantages: [..., T], or [..., 1] for one value per sequence. Constant.
  mask: [..., T] bool, True = counts; elsewhere gain and gradient are 0. None = all count.
  old_logprobs: [..., T] with log_ratio + old_logprobs = the token's log-prob, nats. Constant.
    `dppo_*` need it as probability; the score-form surrogates (reinforce, cispo, vespo, topr,
    dppo_*, dro) use it for their value only: A log pi instead of A log r. The gradient is the same.
  segment_ids: [..., T] int; used by `gmpo`, which couples the tokens of a sequence.

No surrogate clamps a log-ratio. Where the published gain is bounded, value and gradient are
finite for every log-ratio; where it is not (importance weights; PPO for A < 0) a gain may
overflow to inf, never to NaN (though inf - inf, in a sum, is NaN: reject such tokens). The
gradient at the very edge of a clip band is the unclipped one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, gains, masks


def reinforce(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Score-function gain A log pi, per token.

  gain = A (log_ratio + old_logprobs),  d gain / d log_ratio = A

  It ignores the ratio: on tokens of another policy it is biased.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.

  Returns:
    [..., T] gain, to be maximised; without old_logprobs its value is A log_ratio.

  Raises:
    ValueError: shapes do not match.

  Example:
    >>> reinforce(jnp.array([0.0]), jnp.array([2.0]), old_logprobs=jnp.array([-1.5]))
    Array([-3.], dtype=float32)

  Reference: Williams 1992, "Simple statistical gradient-following algorithms", theorem 1.
  """
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  return gains.score_gain(1.0, log_ratio, advantages, mask, old_logprobs)


def importance_weighted(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Unclipped importance-sampling gain r A, per token.

  gain = r A,  r = exp(log_ratio)

  Unbounded both ways: overflows to inf at a log-ratio of 89 in float32.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.

  Returns:
    [..., T] gain, to be maximised.

  Raises:
    ValueError: shapes do not match.

  Example:
    >>> importance_weighted(jnp.log(jnp.array([1.5])), jnp.array([2.0]))
    Array([3.], dtype=float32)

  Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 6.
  """
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  return gains.ratio_gain(log_ratio, advantages)


def ppo_clip(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  clip_low: Any = 0.2,
  clip_high: Any = 0.2,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Clipped surrogate gain of PPO, per token.

  gain = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),  r = exp(log_ratio)

  One exp of the clipped log-ratio: finite wherever the gain is bounded. It is unbounded for
  A < 0 as r grows; `dual_clip` bounds that side too. clip_high > clip_low is "clip-higher".

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.
    clip_low, clip_high: widths of the band [1 - low, 1 + high], in ratio units.

  Returns:
    [..., T] gain, to be maximised.

  Raises:
    ValueError: shapes do not match, a width is negative, or clip_low > 1.

  Example:
    >>> ppo_clip(jnp.log(jnp.array([1.5])), jnp.array([1.0]))
    Array([1.2], dtype=float32)

  Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip-higher: Yu et al. 2025 (DAPO),
    arXiv:2503.14476, eq. 10.
  """
  low, high = gains.log_band(clip_low, clip_high)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  clipped = jnp.where(
    advantages >= 0, gains.at_most(log_ratio, high), gains.at_least(log_ratio, low)
  )
  return gains.ratio_gain(clipped, advantages)


def dual_clip(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  clip_low: Any = 0.2,
  clip_high: Any = 0.2,
  ratio_cap: Any = 3.0,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""PPO's clipped gain, bounded for negative advantages too, per token.

  gain = max(ppo, ratio_cap A) if A < 0 else ppo,  ppo = min(r A, clip(r, ...) A)

  For A < 0 and r > ratio_cap the gradient is 0: bounded gain and gradient everywhere. The
  two-sided clip `min(r, delta)` of INTELLECT-2 is the same function, delta = ratio_cap.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.
    clip_low, clip_high: widths of the band [1 - low, 1 + high], in ratio units.
    ratio_cap: largest ratio that still pushes down, > 1.

  Returns:
    [..., T] gain, to be maximised.

  Raises:
    ValueError: shapes do not match, a width is negative, clip_low > 1, or ratio_cap <= 1.

  Example:
    >>> log_ratio = jnp.log(jnp.full(3, 5.0))
    >>> dual_clip(log_ratio, jnp.array([1.0, -1.0, 0.0])).round(5)
    Array([ 1.2, -3. ,  0. ], dtype=float32)

  Reference: Ye et al. 2020, arXiv:1912.09729, eq. 5; Prime Intellect 2025 (INTELLECT-2),
    arXiv:2505.07291.
  """
  low, high = gains.log_band(clip_low, clip_high)
  checks.check_range("ratio_cap", ratio_cap, low=1.0, open_low=True)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  negative = gains.at_most(gains.at_least(log_ratio, low), jnp.log(ratio_cap))
  clipped = jnp.where(advantages >= 0, gains.at_most(log_ratio, high), negative)
  return gains.ratio_gain(clipped, advantages)


def sapo(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  tau_pos: Any = 1.0,
  tau_neg: Any = 1.05,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""SAPO's softly gated gain, per token.

  gain = A (4 / tau) sigmoid(tau (r - 1)),  tau = tau_pos if A > 0 else tau_neg

  Its coefficient is r at r = 1 and decays smoothly on both sides, faster with larger tau. At
  r = 1 the value is 2 A / tau, not A.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.
    tau_pos, tau_neg: temperatures of the gate, > 0.

  Returns:
    [..., T] gain, to be maximised; |gain| <= 4 |A| / tau.

  Raises:
    ValueError: shapes do not match, or a temperature is <= 0.

  Example:
    >>> sapo(jnp.array([0.0, 100.0]), jnp.array([1.0, 1.0]))
    Array([2., 4.], dtype=float32)

  Reference: Gao et al. 2025 (SAPO), arXiv:2511.20347, eq. 5-6.
  """
  checks.check_range("tau_pos", tau_pos, low=0.0, open_low=True)
  checks.check_range("tau_neg", tau_neg, low=0.0, open_low=True)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  tau = jnp.where(advantages > 0, tau_pos, tau_neg)
  # Exact: at r = exp(20) the sigmoid is 1 and its slope 0 to the last bit.
  excess = jnp.exp(gains.at_most(log_ratio, 20.0)) - 1.0
  return advantages * (4.0 / tau) * jax.nn.sigmoid(tau * excess)


def gmpo(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  clip_low: Any = 0.4,
  clip_high: Any = 0.4,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""GMPO's gain: A times the geometric mean of the sequence's clipped token ratios.

  gain_t = A exp((1 / |y|) sum_u c_u),  c_u = min(lr_u, high) if A > 0 else max(lr_u, -low)

  It takes token log-ratios (level `per_token`) and couples the tokens of a sequence itself,
  because the clip comes before the mean. The advantage must be constant within a sequence.
  The widths are in LOG space: the ratio band is [exp(-low), exp(high)].

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.
    clip_low, clip_high: widths of the band [-low, high], in nats.

  Returns:
    [..., T] gain, to be maximised, equal at all tokens of a sequence.

  Raises:
    ValueError: shapes do not match, or a width is negative.

  Example:
    >>> gmpo(jnp.array([0.1, 0.9]), jnp.array([1.0, 1.0])).round(6)
    Array([1.284025, 1.284025], dtype=float32)

  Reference: Zhao et al. 2025 (GMPO), arXiv:2507.20673, eq. 4.
  """
  checks.check_range("clip_low", clip_low, low=0.0)
  checks.check_range("clip_high", clip_high, low=0.0)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  clipped = jnp.where(
    advantages > 0, gains.at_most(log_ratio, clip_high), gains.at_least(log_ratio, -clip_low)
  )
  return gains.ratio_gain(masks.segment_mean(clipped, mask, segment_ids), advantages)
