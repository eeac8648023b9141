r"""Score-form surrogates: a constant weight times A log pi, per token.

gain = sg(weight) A log pi,  d gain / d log_ratio = sg(weight) A

Signature, shapes and the meaning of old_logprobs are those of `surrogates`. The value is what
verl and TRL report for these losses when old_logprobs are given; without them log pi is read
as log_ratio, which changes the value and not the gradient. At a sequence level use
`with_token_gradient(level)`, so that the weight of the sequence multiplies the tokens' scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, gains, masks


def cispo(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  clip_low: Any = 1.0,
  clip_high: Any = 4.0,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""CISPO's gain: the score weighted by a clipped, constant ratio, per token.

  gain = sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi

  Clipping bounds the weight and silences no token. The widths are offsets from 1, as in
  `ppo_clip` (and verl, slime, NeMo-RL); TRL and Liger write the upper end itself: their
  epsilon_high = 5 is clip_high = 4. clip_low = 1 means no lower end.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.
    clip_low, clip_high: widths of the band [1 - low, 1 + high], in ratio units.

  Returns:
    [..., T] gain, to be maximised; without old_logprobs log pi is read as log_ratio.

  Raises:
    ValueError: shapes do not match, a width is negative, or clip_low > 1.

  Example:
    >>> gradient = jax.grad(lambda x: cispo(x, jnp.array([1.0])).sum())
    >>> gradient(jnp.log(jnp.array([9.0])))
    Array([5.], dtype=float32)

  Reference: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4-5; the paper prints no widths,
    5 is the cap of ScaleRL, arXiv:2510.13786.
  """
  low, high = gains.log_band(clip_low, clip_high)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  weight = jnp.exp(gains.at_most(gains.at_least(log_ratio, low), high))
  return gains.score_gain(weight, log_ratio, advantages, mask, old_logprobs)


def topr(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""TOPR's gain: the score, tapered by a truncated constant ratio where A <= 0, per token.

  gain = A log pi if A > 0 else sg(min(r, 1)) A log pi

  Positive examples count in full however unlikely they have become, negative ones fade as
  the policy leaves them. The paper splits by the sign of the reward (+-1, no baseline) and
  uses the ratio of the sequence: level `with_token_gradient(per_sequence)`.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.

  Returns:
    [..., T] gain, to be maximised; without old_logprobs log pi is read as log_ratio.

  Raises:
    ValueError: shapes do not match.

  Example:
    >>> gradient = jax.grad(lambda x: topr(x, jnp.array([1.0, -1.0])).sum())
    >>> gradient(jnp.log(jnp.array([0.5, 0.5])))
    Array([ 1. , -0.5], dtype=float32)

  Reference: Le Roux et al. 2025 (TOPR), arXiv:2503.14286, eq. 7-8.
  """
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  weight = jnp.where(advantages > 0, 1.0, jnp.exp(gains.at_most(log_ratio, 0.0)))
  return gains.score_gain(weight, log_ratio, advantages, mask, old_logprobs)


def vespo(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  k_pos: Any = 2.0,
  lam_pos: Any = 3.0,
  k_neg: Any = 3.0,
  lam_neg: Any = 2.0,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""VESPO's gain: the score weighted by a soft, constant function of the ratio, per token.

  gain = sg(w^k exp(lam (1 - w))) A log pi,  w = exp(log_ratio)

  The weight is 1 at w = 1 and falls to 0 on both sides. The paper's w is the ratio of the whole
  sequence, its gradient that of the token: level `with_token_gradient(per_sequence)`.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.
    k_pos, lam_pos: power and decay where A >= 0, > 0.
    k_neg, lam_neg: the same where A < 0.

  Returns:
    [..., T] gain, to be maximised; without old_logprobs log pi is read as log_ratio.

  Raises:
    ValueError: shapes do not match, or a constant is <= 0.

  Example:
    >>> jax.grad(lambda x: vespo(x, jnp.array([1.0])).sum())(jnp.array([0.0]))
    Array([1.], dtype=float32)

  Reference: Shen et al. 2026 (VESPO), arXiv:2602.10693, eq. 20 (k, lam there: c1, c2).
  """
  for name, value in {
    "k_pos": k_pos,
    "lam_pos": lam_pos,
    "k_neg": k_neg,
    "lam_neg": lam_neg,
  }.items():
    checks.check_range(name, value, low=0.0, open_low=True)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  power = jnp.where(advantages >= 0, k_pos, k_neg)
  decay = jnp.where(advantages >= 0, lam_pos, lam_neg)
  # Exact: at w = exp(20) the weight is 0 to the last bit.
  log_weight = gains.at_most(log_ratio, 20.0)
  weight = jnp.exp(power * log_weight - decay * (jnp.exp(log_weight) - 1.0))
  return gains.score_gain(weight, log_ratio, advantages, mask, old_logprobs)


def dro(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  beta: Any,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""Gain of DRO and Kimi k1.5: the score, minus a quadratic pull to the old policy.

  gain = A log pi - (beta / 2) log_ratio^2,  d gain / d log_ratio = A - beta log_ratio

  The pull acts also where A = 0, and grows without bound.

  Args:
    log_ratio, advantages, mask, old_logprobs, segment_ids: see the module.
    beta: strength of the pull, >= 0 (tau in both papers).

  Returns:
    [..., T] gain, to be maximised; without old_logprobs log pi is read as log_ratio.

  Raises:
    ValueError: shapes do not match, or beta is negative.

  Example:
    >>> dro(jnp.array([2.0]), jnp.array([1.0]), beta=0.5)
    Array([1.], dtype=float32)

  Reference: Richemond et al. 2024 (DRO), arXiv:2405.19107, eq. 4 and 8; Kimi k1.5,
    arXiv:2501.12599, eq. 3.
  """
  checks.check_range("beta", beta, low=0.0)
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  gain = gains.score_gain(1.0, log_ratio, advantages, mask, old_logprobs)
  return gain - 0.5 * (beta * log_ratio) * log_ratio


def dppo_tv(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  clip_low: Any = 0.2,
  clip_high: Any = 0.2,
  ratio_cap: Any = 20.0,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""DPPO's gain with a trust region in total variation, per token.

  gain = sg(min(r, ratio_cap) keep) A log pi
  keep = (p - p_old <= clip_high) if A > 0 else (p - p_old >= -clip_low),  p = pi(y_t | s_t)

  The band is one of probability differences: a rare token may change its ratio a lot, a
  common one may not. Level `per_token` only: it compares probabilities of tokens.

  Args:
    log_ratio, advantages, mask, segment_ids: see `surrogates`.
    old_logprobs: [..., T] log p_old, nats, required. Constant.
    clip_low, clip_high: widths of the band, in probability, >= 0.
    ratio_cap: largest weight, > 0; the paper's main runs use inf.

  Returns:
    [..., T] gain, to be maximised.

  Raises:
    ValueError: shapes do not match, a width is negative, or old_logprobs is not given.

  Example:
    >>> log_ratio, advantages = jnp.log(jnp.array([2.0, 2.0])), jnp.array([1.0, 1.0])
    >>> old = jnp.log(jnp.array([0.01, 0.4]))
    >>> jax.grad(lambda x: dppo_tv(x, advantages, old_logprobs=old).sum())(log_ratio)
    Array([2., 0.], dtype=float32)

  Reference: Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 12-13.
  """
  log_ratio, advantages, mask, keep = _inside_band(
    _probability_difference,
    log_ratio,
    advantages,
    mask,
    old_logprobs,
    segment_ids,
    clip_low,
    clip_high,
  )
  weight = jnp.where(keep, _capped_ratio(log_ratio, ratio_cap), 0.0)
  return gains.score_gain(weight, log_ratio, advantages, mask, old_logprobs)


def dppo_kl(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  clip_low: Any = 0.05,
  clip_high: Any = 0.05,
  ratio_cap: Any = 20.0,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  r"""DPPO's gain with a trust region in the KL of taken against not taken, per token.

  gain = sg(min(r, ratio_cap) keep) A log pi
  keep = (kl <= clip_high or p <= p_old) if A > 0 else (kl <= clip_low or p >= p_old)
  kl = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

  Level `per_token` only: it compares probabilities of tokens.

  Args:
    log_ratio, advantages, mask, segment_ids: see `surrogates`.
    old_logprobs: [..., T] log p_old, nats, required. Constant.
    clip_low, clip_high: largest KL for A <= 0 and for A > 0, in nats, >= 0.
    ratio_cap: largest weight, > 0; the paper's main runs use inf.

  Returns:
    [..., T] gain, to be maximised.

  Raises:
    ValueError: shapes do not match, a width is negative, or old_logprobs is not given.

  Example:
    >>> log_ratio, advantages = jnp.log(jnp.array([2.0, 2.0])), jnp.array([1.0, 1.0])
    >>> old = jnp.log(jnp.array([0.01, 0.4]))
    >>> jax.grad(lambda x: dppo_kl(x, advantages, old_logprobs=old).sum())(log_ratio)
    Array([2., 0.], dtype=float32)

  Reference: Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 12 and 14.
  """
  log_ratio, advantages, mask, keep = _inside_band(
    _signed_binary_kl, log_ratio, advantages, mask, old_logprobs, segment_ids, clip_low, clip_high
  )
  weight = jnp.where(keep, _capped_ratio(log_ratio, ratio_cap), 0.0)
  return gains.score_gain(weight, log_ratio, advantages, mask, old_logprobs)


def _inside_band(
  divergence: Callable[..., jax.Array],
  log_ratio: Any,
  advantages: Any,
  mask: Any,
  old_logprobs: Any,
  segment_ids: Any,
  clip_low: Any,
  clip_high: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Checked inputs, and which tokens have not left the band in the direction A pushes them.

  `divergence` is signed: positive where the token has become likelier.
  """
  checks.check_range("clip_low", clip_low, low=0.0)
  checks.check_range("clip_high", clip_high, low=0.0)
  if old_logprobs is None:
    raise ValueError("old_logprobs is required: the trust region is one of probabilities")
  log_ratio, advantages, mask = gains.inputs(log_ratio, advantages, mask, old_logprobs, segment_ids)
  old_logprobs = checks.as_constant("old_logprobs", old_logprobs)
  old_logprobs = masks.zero_masked(old_logprobs, mask)
  moved = divergence(jax.lax.stop_gradient(log_ratio), old_logprobs)
  keep = jnp.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
  return log_ratio, advantages, mask, keep


def _capped_ratio(log_ratio: jax.Array, ratio_cap: Any) -> jax.Array:
  checks.check_range("ratio_cap", ratio_cap, low=0.0, open_low=True)
  return jnp.exp(gains.at_most(log_ratio, jnp.log(ratio_cap)))


def _probability_difference(log_ratio: jax.Array, old_logprobs: jax.Array) -> jax.Array:
  """p - p_old."""
  return jnp.exp(log_ratio + old_logprobs) - jnp.exp(old_logprobs)


def _signed_binary_kl(log_ratio: jax.Array, old_logprobs: jax.Array) -> jax.Array:
  """KL(Bernoulli(p_old) || Bernoulli(p)), with the sign of p - p_old."""
  # 1 - p as -expm1(log p): the rest of a confident token keeps its digits. A certain p leaves
  # nothing for the other outcomes: log 0, and a KL of inf.
  old_rest, rest = (
    -jnp.expm1(jnp.minimum(x, 0.0)) for x in (old_logprobs, old_logprobs + log_ratio)
  )
  certain = old_rest == 0
  other = old_rest * (jnp.log(jnp.where(certain, 1.0, old_rest)) - jnp.log(rest))
  kl = jnp.where(certain, 0.0, other) - jnp.exp(old_logprobs) * log_ratio
  return jnp.where(log_ratio > 0, kl, -kl)
