"""What the presets of several libraries share: clamps, clips and KL terms as they write them.

A building block of the presets, not part of `import jaxrl_lm as rl`: everything here is one line of
the public functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import gains, ratios
from jaxrl_lm.kl import kl_k3, kl_k3_off_policy
from jaxrl_lm.ratios import clamped, per_sequence_geometric, per_token, with_token_gradient
from jaxrl_lm.surrogates import dual_clip, ppo_clip

# The clamps of verl, OpenRLHF and Tunix: of the token's log-ratio, and of GSPO-token's.
TOKEN_20 = clamped(per_token, -20.0, 20.0)
GSPO_TOKEN_10 = clamped(with_token_gradient(per_sequence_geometric), -math.inf, 10.0)


def after(inner: Callable[..., jax.Array], outer: Callable[..., jax.Array]) -> Any:
  """The level `outer` of the log-ratios that the level `inner` gives."""
  return partial(_after, inner, outer)


def _after(
  inner: Callable[..., jax.Array],
  outer: Callable[..., jax.Array],
  log_ratio: jax.Array,
  mask: jax.Array,
  *,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  log_ratio = inner(log_ratio, mask, segment_ids=segment_ids)
  return outer(log_ratio, mask, segment_ids=segment_ids)


def clip(clip_low: Any, clip_high: Any, ratio_cap: Any = None) -> Any:
  """`ppo_clip`, or `dual_clip` if a cap is given; a high width of None is the low one."""
  band = {"clip_low": clip_low, "clip_high": clip_low if clip_high is None else clip_high}
  if ratio_cap is None:
    return partial(ppo_clip, **band)
  return partial(dual_clip, **band, ratio_cap=ratio_cap)


def clipped_kl(estimator: Callable[..., jax.Array], limit: float = 10.0) -> Any:
  """An estimator within [-limit, limit]; it has no gradient beyond."""
  return partial(_clipped_kl, estimator, limit)


def _clipped_kl(
  estimator: Callable[..., jax.Array],
  limit: float,
  logprobs: jax.Array,
  ref_logprobs: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  value = estimator(logprobs, ref_logprobs, mask)
  return gains.at_most(gains.at_least(value, -limit), limit)


def with_score(estimator: Callable[..., jax.Array]) -> Any:
  """An estimator times exp(log pi - sg(log pi)): its gradient gains the value times the score."""
  return partial(_with_score, estimator)


def _with_score(
  estimator: Callable[..., jax.Array], logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array
) -> jax.Array:
  ratio = jnp.exp(ratios.on_policy_log_ratio(logprobs, mask))
  return ratio * estimator(logprobs, ref_logprobs, mask)


def weighted_k3(level: Callable[..., jax.Array]) -> Any:
  """k3 times the ratio of the policy term, which is differentiated; a `Recipe.kl`."""
  return partial(_weighted_k3, level)


def _weighted_k3(
  level: Callable[..., jax.Array],
  logprobs: jax.Array,
  ref_logprobs: jax.Array,
  mask: jax.Array,
  *,
  old_logprobs: jax.Array,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  if level is per_token:
    return kl_k3_off_policy(logprobs, ref_logprobs, mask, old_logprobs=old_logprobs)
  log_ratio = ratios.token_log_ratio(logprobs, old_logprobs, mask)
  log_ratio = level(log_ratio, mask, segment_ids=segment_ids)
  return jnp.exp(log_ratio) * kl_k3(logprobs, ref_logprobs, mask)


def of_reference(estimator: Callable[..., jax.Array]) -> Any:
  """An estimator that does not look at the old policy, as a `Recipe.kl`."""
  return partial(_of_reference, estimator)


def _of_reference(
  estimator: Callable[..., jax.Array],
  logprobs: jax.Array,
  ref_logprobs: jax.Array,
  mask: jax.Array,
  *,
  old_logprobs: jax.Array,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  return estimator(logprobs, ref_logprobs, mask)


def kl_term(kl: Callable[..., jax.Array], kl_coef: Any) -> dict[str, Any]:
  """The fields of a `Recipe`; a coefficient of 0 is no term."""
  off = not isinstance(kl_coef, jax.core.Tracer) and not kl_coef
  return {} if off else {"kl": kl, "kl_coef": kl_coef}
