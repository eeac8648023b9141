"""Log-probs -> log-ratios, and the level at which they are taken.

A level is a partition of a row's tokens: every token by itself, the prefix up to it, the whole
sequence, or (through `segment_ids`) each sample of a packed row, each turn, each step. A level
maps token log-ratios to log-ratios of the same shape, one value per counted token:

  per_token                 lr_t
  per_prefix                sum_{u <= t} lr_u         ratio of reaching and taking token t
  per_sequence              sum_u lr_u                the exact importance ratio of the response
  per_sequence_geometric    (1 / |y|) sum_u lr_u      GSPO's; near 1, but no importance ratio

Log-ratios, not ratios, travel through the library: an exponential is taken once, at the end,
of a number the surrogate has already bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, gains, masks

Level = Callable[..., jax.Array]


def token_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""log pi(y_t | s_t) - log pi_old(y_t | s_t) of each token.

  Where ratios begin, and where padding becomes 0. Nothing is clamped. Both arguments must use
  the library's alignment: index t speaks of token t.

  Args:
    logprobs: [..., T] of the current policy, nats. Differentiated.
    old_logprobs: [..., T] of the policy the ratio is taken against, nats. Constant.
    mask: [..., T] bool, True = counts; elsewhere the log-ratio is 0.

  Returns:
    [..., T] log-ratio in nats.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> token_log_ratio(
    ...   jnp.array([-1.0, jnp.nan]), jnp.array([-1.5, 0.0]), jnp.array([True, False])
    ... )
    Array([0.5, 0. ], dtype=float32)

  Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 6.
  """
  logprobs = checks.as_float("logprobs", logprobs)
  old_logprobs = checks.as_constant("old_logprobs", old_logprobs)
  checks.check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
  mask = checks.check_mask(mask, logprobs=logprobs)
  return masks.zero_masked(logprobs - old_logprobs, mask)


def on_policy_log_ratio(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""log pi - stop_gradient(log pi): the value 0 with the gradient of the log-prob.

  For one update per rollout: no old log-probs are needed, and the ratio is exactly 1 (a
  separate scoring pass would differ from the training pass by rounding).

  Args:
    logprobs: [..., T] of the current policy, nats. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere value and gradient are 0.

  Returns:
    [..., T] zeros that carry a gradient.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean.

  Example:
    >>> on_policy_log_ratio(jnp.array([-1.0]), jnp.array([True]))
    Array([0.], dtype=float32)
  """
  return token_log_ratio(logprobs, logprobs, mask)


def per_token(
  log_ratio: jax.Array, mask: jax.Array, *, segment_ids: jax.Array | None = None
) -> jax.Array:
  r"""The log-ratio of each token by itself.

  Args:
    log_ratio: [..., T] token log-ratios, nats. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    segment_ids: [..., T] int, accepted as by every level; a token needs no segment.

  Returns:
    [..., T] log-ratio in nats.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> per_token(jnp.array([0.1, 0.3]), jnp.array([True, True]))
    Array([0.1, 0.3], dtype=float32)

  Reference: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3.
  """
  log_ratio, _ = _checked(log_ratio, mask, segment_ids)
  return log_ratio


def per_prefix(
  log_ratio: jax.Array, mask: jax.Array, *, segment_ids: jax.Array | None = None
) -> jax.Array:
  r"""The log-ratio of the response up to and including each token.

  out_t = sum_{u <= t} lr_u

  Its exponential is the importance weight under which the gradient of token t alone is
  unbiased; the sequence ratio also weighs in all that comes later.

  Args:
    log_ratio: [..., T] token log-ratios, nats. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    segment_ids: [..., T] int, 0 = padding: samples of a packed row, turns or steps. None = a
      row is one segment.

  Returns:
    [..., T] log-ratio in nats.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> per_prefix(jnp.array([1.0, 2.0, 4.0]), jnp.array([True, False, True]))
    Array([1., 0., 5.], dtype=float32)

  Reference: Precup, Sutton & Singh 2000, "Eligibility traces for off-policy policy
    evaluation", per-decision importance sampling.
  """
  log_ratio, mask = _checked(log_ratio, mask, segment_ids)
  if segment_ids is None:
    return masks.zero_masked(jnp.cumsum(log_ratio, axis=-1), mask)
  ids = jnp.where(mask, segment_ids, 0)
  return masks.zero_masked(checks.by_row(_prefix_sums_of_row, log_ratio, ids), mask)


def _prefix_sums_of_row(x: jax.Array, ids: jax.Array) -> jax.Array:
  """Running sums [T] within the segments, whose tokens are brought together first, in order."""
  order = jax.lax.sort((ids, jnp.arange(ids.shape[0], dtype=jnp.int32)), num_keys=1)[1]
  x, ids = x[order], ids[order]

  def step(carry: Any, token: Any) -> Any:
    before, error, last_id = carry
    x, segment = token
    before, error = (jnp.where(segment == last_id, y, 0.0) for y in (before, error))
    # Kahan's summation: what rounding took from one step is given back in the next.
    total = before + (x - error)
    error = jax.lax.stop_gradient((total - before) - (x - error))
    error = jnp.where(jnp.isfinite(total), error, 0.0)
    return (total, error, segment), total

  # A running sum that restarts, not a difference of two: nothing leaks between samples.
  zero = jnp.zeros_like(x, shape=())
  total = jax.lax.scan(step, (zero, zero, jnp.zeros_like(ids, shape=())), (x, ids))[1]
  # A permutation, so that every entry of x * 0 is replaced; sharded as the rows are.
  return (x * 0).at[order].set(total)


def per_sequence(
  log_ratio: jax.Array, mask: jax.Array, *, segment_ids: jax.Array | None = None
) -> jax.Array:
  r"""The log-ratio of the whole response, at each of its tokens.

  out_t = sum_u lr_u = log pi(y | x) - log pi_old(y | x)

  The exact importance ratio of a response; its variance grows exponentially with length.

  Args:
    log_ratio: [..., T] token log-ratios, nats. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    segment_ids: [..., T] int, 0 = padding: samples of a packed row, turns or steps. None = a
      row is one segment.

  Returns:
    [..., T] log-ratio in nats, equal at all tokens of a segment.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> per_sequence(jnp.array([1.0, 2.0, 4.0]), jnp.array([True, False, True]))
    Array([5., 0., 5.], dtype=float32)

  Reference: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, section 3.2: the response is one
    action.
  """
  log_ratio, mask = _checked(log_ratio, mask, segment_ids)
  return masks.segment_total(log_ratio, mask, segment_ids)


def per_sequence_geometric(
  log_ratio: jax.Array, mask: jax.Array, *, segment_ids: jax.Array | None = None
) -> jax.Array:
  r"""The mean log-ratio per token of the response: log of the geometric mean of the ratios.

  out_t = (1 / |y|) sum_u lr_u

  GSPO's level. The length is divided out here, once: use it with loss weights that sum to one
  per sequence (`sequence_mean`), or the row is weighted by its length again (LUSPO).

  Args:
    log_ratio: [..., T] token log-ratios, nats. Differentiated.
    mask: [..., T] bool, True = counts; elsewhere the result is 0.
    segment_ids: [..., T] int, 0 = padding: samples of a packed row, turns or steps. None = a
      row is one segment.

  Returns:
    [..., T] log-ratio in nats per token, equal at all tokens of a segment.

  Raises:
    ValueError: shapes differ.

  Example:
    >>> per_sequence_geometric(jnp.array([1.0, 2.0, 4.0]), jnp.array([True, False, True]))
    Array([2.5, 0. , 2.5], dtype=float32)

  Reference: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7.
  """
  log_ratio, mask = _checked(log_ratio, mask, segment_ids)
  return masks.segment_mean(log_ratio, mask, segment_ids)


def with_token_gradient(level: Level) -> Level:
  r"""The value of a level with the gradient of each token's own log-ratio.

  out_t = lr_t - sg(lr_t) + sg(level(lr)_t)

  GSPO-token for `per_sequence_geometric`: the same gradient as GSPO as long as advantage and
  weight are constant within the row, and a per-token advantage where they are not. For a
  score-form surrogate (`vespo`, `topr`) it makes a sequence weight multiply token scores.

  Args:
    level: a level function.

  Returns:
    A level, a `functools.partial`: it compares by its parts inside an `Objective`.

  Example:
    >>> level = with_token_gradient(per_sequence_geometric)
    >>> level(jnp.array([1.0, 3.0]), jnp.array([True, True]))
    Array([2., 2.], dtype=float32)

  Reference: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 14.
  """
  return partial(_with_token_gradient, level)


def _with_token_gradient(
  level: Level, log_ratio: jax.Array, mask: jax.Array, *, segment_ids: jax.Array | None = None
) -> jax.Array:
  value = jax.lax.stop_gradient(level(log_ratio, mask, segment_ids=segment_ids))
  token, _ = _checked(log_ratio, mask, segment_ids)
  return _with_gradient_of(token, value)


@jax.custom_jvp
def _with_gradient_of(source: jax.Array, value: jax.Array) -> jax.Array:
  """The value, to the bit, with the gradient of the source, which is not read for it."""
  return value


@_with_gradient_of.defjvp
def _with_gradient_of_jvp(primals: Any, tangents: Any) -> Any:
  return primals[1], tangents[0]


def clamped(level: Level, low: Any, high: Any) -> Level:
  r"""A level whose result is clamped to [low, high], with no gradient outside.

  Nothing in the library clamps silently; this is how a caller writes a clamp, such as the
  +-20 of verl and OpenRLHF. A token that leaves the interval stops learning.

  Args:
    level: a level function.
    low, high: ends of the interval, in nats; at an end itself the gradient is 1.

  Returns:
    A level, a `functools.partial`: it compares by its parts inside an `Objective`.

  Raises:
    ValueError: low > high.

  Example:
    >>> clamped(per_token, -20.0, 20.0)(jnp.array([90.0, 0.5]), jnp.array([True, True]))
    Array([20. ,  0.5], dtype=float32)
  """
  checks.check_range("low", low)
  checks.check_range("high", high)
  if not any(isinstance(end, jax.core.Tracer) for end in (low, high)):
    checks.check_range("high", high, low=low)
  return partial(_clamped, level, low, high)


def _clamped(
  level: Level,
  low: Any,
  high: Any,
  log_ratio: jax.Array,
  mask: jax.Array,
  *,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  value = level(log_ratio, mask, segment_ids=segment_ids)
  # Not jnp.clip, whose gradient is 0.5 exactly at an end.
  return masks.zero_masked(gains.at_most(gains.at_least(value, low), high), mask)


def _checked(log_ratio: Any, mask: Any, segment_ids: Any) -> tuple[jax.Array, jax.Array]:
  """Log-ratios in float32 at least, zeros at masked positions; shapes and dtypes checked."""
  log_ratio = checks.as_float("log_ratio", log_ratio)
  mask = checks.check_mask(mask, log_ratio=log_ratio)
  if segment_ids is not None:
    checks.check_integer("segment_ids", segment_ids)
    checks.check_same_shape(log_ratio=log_ratio, segment_ids=segment_ids)
  return masks.zero_masked(log_ratio, mask), mask
