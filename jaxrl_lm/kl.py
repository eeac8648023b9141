"""KL estimators, exact KL over the vocabulary, and which gradient each one really has.

An estimator of KL(pi || ref) from one sampled token has a value and a gradient, and a good
value does not make a good gradient. With delta = log pi - log ref and tokens drawn from pi,

  estimator                     value E   expected gradient of its mean, placed in a loss
  k1  delta                     KL        0: no regularisation, only noise
  k2  delta^2 / 2               ~ KL      the gradient of KL(pi || ref), per state
  k3  exp(-delta) - 1 + delta   KL        the gradient of the forward KL(ref || pi)
  |delta|                       -         no KL's

all with the visited states held fixed. `with_reverse_kl_gradient` keeps a value and gives it
the gradient of k2; `kl_k3_off_policy` is right off-policy too. In the reward
(`returns.kl_shaped_rewards`) the estimator is a constant and k1 is the right one.

Sources: Schulman 2020, "Approximating KL divergence"; arXiv:2506.09477, arXiv:2512.21852.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import categorical, checks, masks
from jaxrl_lm.divergences import reverse_kl_terms


def kl_k1(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""k1 estimate of KL(pi || ref) per token: delta = log pi - log ref.

  Unbiased and of either sign. Its gradient, the score, has mean zero on-policy: in a loss it
  does not regularise. Right as a penalty in the reward.

  Args:
    logprobs: [..., T] log pi of tokens drawn from pi, nats. Differentiated.
    ref_logprobs: [..., T] log ref of the same tokens. Constant.
    mask: [..., T] bool, True = counts; elsewhere the estimate is 0.

  Returns:
    [..., T] estimate in nats, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> kl_k1(jnp.array([-0.5]), jnp.array([-1.5]), jnp.array([True]))
    Array([1.], dtype=float32)

  Reference: Schulman 2020, "Approximating KL divergence", k1.
  """
  return _delta(logprobs, ref_logprobs, mask)


def kl_k2(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""k2 estimate of KL(pi || ref) per token: delta^2 / 2, delta = log pi - log ref.

  Biased in value, but on-policy its gradient, delta times the score, is that of
  KL(pi || ref) in every state: the right estimator for a loss.

  Args:
    logprobs: [..., T] log pi of tokens drawn from pi, nats. Differentiated.
    ref_logprobs: [..., T] log ref of the same tokens. Constant.
    mask: [..., T] bool, True = counts; elsewhere the estimate is 0.

  Returns:
    [..., T] estimate, >= 0, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> kl_k2(jnp.array([-0.5]), jnp.array([-1.5]), jnp.array([True]))
    Array([0.5], dtype=float32)

  Reference: Schulman 2020, "Approximating KL divergence", k2; gradient: arXiv:2506.09477.
  """
  return 0.5 * jnp.square(_delta(logprobs, ref_logprobs, mask))


def kl_k3(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""k3 estimate of KL(pi || ref) per token: exp(-delta) - 1 + delta.

  Unbiased in value, never negative, less noisy than k1 near ref. Its expected gradient is
  that of the forward KL(ref || pi), and grows like exp(-delta) where pi has lost a token of
  ref. Nothing is clamped: it may overflow to inf, never to NaN.

  Args:
    logprobs: [..., T] log pi of tokens drawn from pi, nats. Differentiated.
    ref_logprobs: [..., T] log ref of the same tokens. Constant.
    mask: [..., T] bool, True = counts; elsewhere the estimate is 0.

  Returns:
    [..., T] estimate, >= 0, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> kl_k3(jnp.array([-0.5]), jnp.array([-1.5]), jnp.array([True])).round(6)
    Array([0.367879], dtype=float32)

  Reference: Schulman 2020, "Approximating KL divergence", k3; arXiv:2402.03300, eq. 4.
  """
  return _k3(_delta(logprobs, ref_logprobs, mask))


def kl_abs(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""|log pi - log ref| per token: a robust penalty, not an estimate of any KL.

  Args:
    logprobs: [..., T] log pi of tokens drawn from pi, nats. Differentiated (sign(delta)).
    ref_logprobs: [..., T] log ref of the same tokens. Constant.
    mask: [..., T] bool, True = counts; elsewhere the penalty is 0.

  Returns:
    [..., T] penalty, >= 0, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> kl_abs(jnp.array([-1.5]), jnp.array([-0.5]), jnp.array([True]))
    Array([1.], dtype=float32)

  Reference: the "abs" penalty of PPO for RLHF codes; no paper derives it.
  """
  delta = _delta(logprobs, ref_logprobs, mask)
  return delta * jax.lax.stop_gradient(jnp.sign(delta))  # jnp.abs has gradient 1 at 0


def kl_k3_off_policy(
  logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, *, old_logprobs: jax.Array
) -> jax.Array:
  r"""k3 weighted by the token ratio: right in value and gradient on tokens of an old policy.

  rho (exp(-delta) - 1 + delta),  rho = exp(log pi - log pi_old);  d / d log pi = rho delta

  The two exponentials of the gradient cancel exactly, which leaves the gradient of
  KL(pi || ref) in every state, states held fixed, also off-policy. The weight is the token's
  ratio whatever level the surrogate clips at.

  Args:
    logprobs: [..., T] log pi of tokens drawn from the old policy, nats. Differentiated.
    ref_logprobs: [..., T] log ref of the same tokens. Constant.
    mask: [..., T] bool, True = counts; elsewhere the estimate is 0.
    old_logprobs: [..., T] log-probs of the policy that drew the tokens. Constant.

  Returns:
    [..., T] estimate, >= 0, to be minimised.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> minus_one, on = jnp.array([-1.0]), jnp.array([True])
    >>> kl_k3_off_policy(minus_one, minus_one - 1.0, on, old_logprobs=minus_one).round(6)
    Array([0.367879], dtype=float32)

  Reference: DeepSeek-V3.2, arXiv:2512.02556, eq. 7.
  """
  delta = _delta(logprobs, ref_logprobs, mask)
  log_ratio = _delta(logprobs, old_logprobs, mask, other="old_logprobs")
  return _weighted_k3(log_ratio, delta)


def with_reverse_kl_gradient(estimator: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  r"""The value of an estimator with the gradient of KL(pi || ref), i.e. that of k2.

  value = estimator(...),  d / d log pi = delta

  The gradient is per state with the visited states held fixed: unlike a KL in the reward it
  does not credit a token for the divergence of the states it leads to.

  Args:
    estimator: `kl_k1`, `kl_k3`, `kl_abs`, or any function of the same arguments.

  Returns:
    A function of (logprobs, ref_logprobs, mask), a `functools.partial`. Partials compare by
    identity: bind it to a name once to pass it to jit as a static argument.

  Example:
    >>> estimator, on = with_reverse_kl_gradient(kl_k3), jnp.array([True])
    >>> jax.grad(lambda x: estimator(x, jnp.array([-1.5]), on)[0])(jnp.array([-0.5]))
    Array([1.], dtype=float32)

  Reference: arXiv:2506.09477; arXiv:2510.01555.
  """
  return partial(_reverse_kl_gradient, estimator)


def _reverse_kl_gradient(
  estimator: Callable[..., jax.Array], logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array
) -> jax.Array:
  value = jax.lax.stop_gradient(estimator(logprobs, ref_logprobs, mask))
  delta = _delta(logprobs, ref_logprobs, mask)
  # delta - sg(delta) is exactly 0, so that the value keeps all its bits.
  return value + jax.lax.stop_gradient(delta) * (delta - jax.lax.stop_gradient(delta))


def exact_kl(
  logits: jax.Array,
  ref_logits: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""KL(pi || ref) of the next-token distributions, summed over the vocabulary.

  KL_t = sum_v pi_t[v] (log pi_t[v] - log ref_t[v])

  The Rao-Blackwellised estimator per state: no sampling noise of the token, and its gradient
  is that of the reverse KL with the states held fixed. A token that both exclude (-inf) adds 0;
  where ref excludes a token that pi allows the KL is +inf by definition, and has no gradient
  (what comes back is not finite).

  Args:
    logits: [..., T, V]. Differentiated.
    ref_logits: [..., T, V]. Constant.
    mask: [..., T] bool, True = counts; elsewhere the KL is 0. None = all count.
    temperature: divides both logits, > 0.

  Returns:
    [..., T] KL in nats, >= 0 up to rounding, to be minimised.

  Raises:
    ValueError: shapes differ, or temperature <= 0.

  Example:
    >>> exact_kl(jnp.array([[1.0, 0.0, -jnp.inf]]), jnp.array([[0.0, 0.0, -jnp.inf]])).round(6)
    Array([0.110944], dtype=float32)

  Reference: Amini et al. 2025, arXiv:2504.10637 (the estimator and its gradient).
  """
  both = categorical.two_logprobs(logits, mask, temperature, ref_logits=ref_logits)
  return masks.zero_masked(jnp.sum(reverse_kl_terms(*both), axis=-1), mask)


def top_k_kl(
  logits: jax.Array,
  ref_logits: jax.Array,
  *,
  k: int,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""KL(pi || ref) over the policy's k likeliest tokens and one bucket for all others.

  KL = sum_{v in top-k} pi[v] log(pi[v] / ref[v]) + pi[rest] log(pi[rest] / ref[rest])

  A lower bound of `exact_kl` (merging outcomes cannot raise a KL), equal to it when k = V or
  when pi and ref agree up to a factor on the rest. The k ids are found by a sort: the
  vocabulary axis must not be sharded.

  Args:
    logits: [..., T, V]. Differentiated, for fixed ids.
    ref_logits: [..., T, V]. Constant.
    k: number of tokens kept, 1 <= k <= V.
    mask: [..., T] bool, True = counts; elsewhere the KL is 0. None = all count.
    temperature: divides both logits, > 0.

  Returns:
    [..., T] KL in nats, >= 0 up to rounding, to be minimised.

  Raises:
    ValueError: shapes differ, k is out of range, or temperature <= 0.

  Example:
    >>> logits, ref = jnp.array([[2.0, 1.0, 0.0]]), jnp.zeros((1, 3))
    >>> bool(top_k_kl(logits, ref, k=1)[0] < exact_kl(logits, ref)[0])
    True

  Reference: the tail bucket is that of TRL's distillation losses; the bound is the
    data-processing inequality (Cover & Thomas, theorem 2.8.1).
  """
  logprobs, ref_logprobs = categorical.two_logprobs(
    logits, mask, temperature, ref_logits=ref_logits
  )
  checks.check_range("k", k, low=1, high=logprobs.shape[-1])
  ids = jax.lax.top_k(jax.lax.stop_gradient(logprobs), k)[1]
  kept = [jnp.take_along_axis(x, ids, axis=-1) for x in (logprobs, ref_logprobs)]
  if k == logprobs.shape[-1]:
    return masks.zero_masked(categorical.divergence(*kept), mask)
  tails = [_tail_logprob(x, ids) for x in (logprobs, ref_logprobs)]
  buckets = [jnp.concatenate(pair, axis=-1) for pair in zip(kept, tails, strict=True)]
  return masks.zero_masked(categorical.divergence(*buckets), mask)


def _delta(logprobs: Any, constant: Any, mask: Any, other: str = "ref_logprobs") -> jax.Array:
  """log pi - log of a constant policy, with zeros at masked positions."""
  logprobs = checks.as_float("logprobs", logprobs)
  constant = checks.as_constant(other, constant)
  checks.check_same_shape(**{"logprobs": logprobs, other: constant})
  mask = checks.check_mask(mask, logprobs=logprobs)
  return masks.zero_masked(logprobs, mask) - masks.zero_masked(constant, mask)


@jax.custom_jvp
def _k3(delta: jax.Array) -> jax.Array:
  """exp(-x) - 1 + x: >= 0 in rounding too, +inf (not inf - inf) when it overflows."""
  # Above 100, expm1 alone is exact to rounding, and inf stays inf; near 0 the sum would cancel.
  value = jnp.where(delta < -100.0, jnp.expm1(-delta), jnp.expm1(-delta) + delta)
  near = jnp.abs(delta) < 0.1
  small = jnp.where(near, delta, 0.0)
  series = jnp.ones_like(small)
  for n in (8, 7, 6, 5, 4, 3):
    series = 1.0 - small / n * series
  return jnp.where(near, 0.5 * jnp.square(small) * series, value)


@_k3.defjvp
def _k3_jvp(primals: Any, tangents: Any) -> Any:
  # 1 - exp(-x), without the cancellation of differentiating the formula term by term.
  (delta,), (tangent,) = primals, tangents
  return _k3(delta), -jnp.expm1(-delta) * tangent


@jax.custom_jvp
def _weighted_k3(log_ratio: jax.Array, delta: jax.Array) -> jax.Array:
  """exp(log_ratio) k3(delta); never 0 * inf where one factor underflows and the other overflows."""
  # Where k3 is about exp(-delta) the two exponents are joined first.
  lost = jnp.exp(log_ratio - delta) * (1.0 + (delta - 1.0) * jnp.exp(delta))
  k3 = _k3(delta)
  return jnp.where(delta < -20.0, lost, jnp.where(k3 == 0, 0.0, jnp.exp(log_ratio) * k3))


@_weighted_k3.defjvp
def _weighted_k3_jvp(primals: Any, tangents: Any) -> Any:
  # Both arguments move with log pi, by the same tangent: the exponentials of delta cancel.
  (log_ratio, delta), (tangent, _) = primals, tangents
  ratio = jnp.exp(log_ratio)
  ratio = jnp.where(delta == 0, jnp.minimum(ratio, jnp.finfo(ratio.dtype).max), ratio)
  return _weighted_k3(log_ratio, delta), ratio * delta * tangent


def _tail_logprob(logprobs: jax.Array, ids: jax.Array) -> jax.Array:
  """Log of the total probability of all tokens but `ids`, [..., 1]; -inf if it is 0."""

  def one_row(logprobs: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.zeros_like(logprobs, dtype=jnp.bool_).at[ids].set(True)

  return categorical.rest_logprob(logprobs, checks.by_row(one_row, logprobs, ids))
