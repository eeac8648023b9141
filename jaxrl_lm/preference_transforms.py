r"""What goes in front of a preference loss, or multiplies it: scores, token and pair weights.

other divergences  dpo_loss(alpha_divergence_score(chosen, alpha=1.0), the same of rejected)
LD-DPO             sequence_logprob(length_desensitized_weights(...) * token_log_ratio(...), mask)
WPO                wpo_weights(of chosen) * wpo_weights(of rejected) * dpo_loss(...)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks, pairs
from jaxrl_lm import logprobs as lp


def alpha_divergence_score(log_ratio: jax.Array, *, alpha: Any) -> jax.Array:
  r"""f'(pi / ref) of an alpha-divergence, which takes the place of the log-ratio in DPO.

  score = (1 - exp(-alpha u)) / alpha,  u = log_ratio

  One family: alpha = 0 is u itself (reverse KL, DPO), alpha = 1 is 1 - exp(-u) (forward KL; the
  constant cancels in a margin). Every score is 0 with slope 1 at u = 0. TRL's coefficient is
  1 - alpha. Of mean log-probs it is the reward of AlphaPO. It grows exponentially on one side,
  up to a quarter of the largest float, so that a margin may be inf but not NaN.

  Args:
    log_ratio: [B] log pi / ref, nats. Differentiated.
    alpha: any number, in [0, 1] between the two KLs. Constant.

  Returns:
    [B] score, increasing in log_ratio.

  Raises:
    ValueError: alpha is not one number, or log_ratio has no axis.

  Example:
    >>> alpha_divergence_score(jnp.log(jnp.array([0.5, 1.0, 2.0])), alpha=1.0)
    Array([-1. ,  0. ,  0.5], dtype=float32)

  Reference: Wang et al. 2023 (f-DPO), arXiv:2309.16240, table 1; Gupta et al. 2025 (AlphaPO),
    arXiv:2501.03884.
  """
  (log_ratio,) = pairs.same_rows(log_ratio=log_ratio)
  return _alpha_score(log_ratio, pairs.number("alpha", alpha, log_ratio))


def jensen_shannon_score(log_ratio: jax.Array) -> jax.Array:
  r"""f'(pi / ref) of the Jensen-Shannon divergence, in place of the log-ratio in DPO.

  score = log(2 r / (1 + r)) = log 2 + log sig(u),  r = exp(u),  u = log_ratio

  At most log 2, and u + log 2 far below: it does not reward a response beyond twice its odds.

  Args:
    log_ratio: [B] log pi / ref, nats. Differentiated.

  Returns:
    [B] score, increasing in log_ratio, 0 at 0.

  Raises:
    ValueError: log_ratio has no axis.

  Example:
    >>> jensen_shannon_score(jnp.array([-2.0, 0.0, 1e3])).round(4)
    Array([-1.4338,  0.    ,  0.6931], dtype=float32)

  Reference: Wang et al. 2023 (f-DPO), arXiv:2309.16240, table 1.
  """
  (log_ratio,) = pairs.same_rows(log_ratio=log_ratio)
  return jnp.log(jnp.asarray(2.0, log_ratio.dtype)) - pairs.logistic_loss(log_ratio)


def length_desensitized_weights(
  mask: jax.Array, shared_lengths: jax.Array, *, alpha: Any
) -> jax.Array:
  r"""Token weights of LD-DPO: what a response says beyond the length of its rival counts less.

  w_t = 1 for the first n counted tokens, alpha for the others, n = shared_lengths

  alpha = 1 is DPO; alpha = 0 compares both responses up to the shorter one's length. Multiply the
  token log-ratios, then sum. n = `minimum(lengths(chosen_mask), lengths(rejected_mask))`.

  Args:
    mask: [..., T] bool, True = counts.
    shared_lengths: [...] int, tokens of the shorter response of the pair.
    alpha: weight of the rest, in [0, 1].

  Returns:
    [..., T] weights, constant, 0 at masked positions.

  Raises:
    ValueError: shapes differ, or alpha is outside [0, 1].
    TypeError: the mask is not boolean, or shared_lengths are not integers.

  Example:
    >>> mask = jnp.array([[True, False, True, True]])
    >>> length_desensitized_weights(mask, jnp.array([2]), alpha=0.5)
    Array([[1. , 0. , 1. , 0.5]], dtype=float32)

  Reference: Liu et al. 2024 (LD-DPO), arXiv:2409.06411, section 3.
  """
  mask = checks.check_mask(mask)
  shared_lengths = checks.check_integer("shared_lengths", shared_lengths)
  checks.check_same_shape(**checks.row_shape(mask), shared_lengths=shared_lengths)
  one = jnp.ones((), jnp.result_type(float))
  alpha = pairs.number("alpha", alpha, one, low=0.0, high=1.0)
  position = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
  shared = position <= shared_lengths[..., None]
  return jnp.where(mask, jnp.where(shared, one, alpha), 0.0)


def log_collision_probability(
  logits: jax.Array, *, mask: jax.Array | None = None, temperature: Any = 1.0
) -> jax.Array:
  r"""log sum_v p_v^2 of the next-token distribution: how likely two draws agree.

  Args:
    logits: [..., T, V]. Differentiated. A logit of -inf adds nothing.
    mask: [..., T] bool, True = counts; elsewhere the result is 0. None = all count.
    temperature: the sampler's temperature, > 0.

  Returns:
    [..., T] nats, in [-log V, 0].

  Raises:
    ValueError: shapes do not match, or temperature <= 0.
    TypeError: the mask is not boolean.

  Example:
    >>> log_collision_probability(jnp.array([[0.0, 0.0, -jnp.inf]]))
    Array([-0.6931472], dtype=float32)

  Reference: the negative order-2 entropy of Renyi 1961, "On measures of entropy and information".
  """
  logprobs = jax.nn.log_softmax(checks.scaled_logits(logits, mask, temperature))
  return masks.zero_masked(jax.nn.logsumexp(2.0 * logprobs, axis=-1), mask)


def wpo_weights(logprobs: jax.Array, collision_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""WPO's weight of a response that another policy wrote: how likely this one is to write it.

  w = exp((1 / |y|) sum_t (log pi_t - log sum_v pi_t[v]^2))

  About 1 for a response as likely as the policy's own samples, whatever its entropy. The weight
  of a pair is the product of both; multiply the loss. open-instruct's weight is another:
  differentiated, and without the sum of squares.

  Args:
    logprobs: [..., T] of the current policy, nats. Constant.
    collision_logprobs: [..., T] `log_collision_probability` of the same positions. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    [...] weights, > 0; 1 for an empty response.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> halves = jnp.log(jnp.array([0.5, 0.25]))
    >>> wpo_weights(halves, jnp.log(jnp.array([0.5, 0.5])), jnp.array([True, True])).round(4)
    Array(0.7071, dtype=float32)

  Reference: Zhou et al. 2024 (WPO), arXiv:2406.11827, eq. 2.
  """
  logprobs, mask = checks.masked_constant("logprobs", logprobs, mask)
  collision, _ = checks.masked_constant("collision_logprobs", collision_logprobs, mask)
  return jnp.exp(lp.mean_logprob(logprobs - collision, mask))


@jax.custom_jvp
def _alpha_score(log_ratio: jax.Array, alpha: jax.Array) -> jax.Array:
  limit = jnp.finfo(log_ratio.dtype).max / 4
  score = -jnp.expm1(-alpha * log_ratio) / jnp.where(alpha == 0, 1.0, alpha)
  return jnp.where(alpha == 0, log_ratio, jnp.clip(score, -limit, limit))


@_alpha_score.defjvp
def _alpha_score_jvp(primals: Any, tangents: Any) -> Any:
  # Bounded too, as 0 times an infinite slope would be NaN. Alpha is a constant.
  (log_ratio, alpha), (tangent, _) = primals, tangents
  limit = jnp.finfo(log_ratio.dtype).max / 4
  slope = jnp.minimum(jnp.exp(-alpha * log_ratio), limit)
  return _alpha_score(log_ratio, alpha), slope * tangent
