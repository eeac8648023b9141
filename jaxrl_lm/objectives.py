r"""Named algorithms as one table: each is four functions of this library.

An `Objective` names the functions an algorithm uses; `objective_loss` composes them. The
composition is a convenience. These lines are the library (GRPO, written out):

  advantages = group_normalized(rewards)[..., None]           # [P, G, 1], once, whole groups
  weights    = sequence_mean(mask)                            # [P, G, T], once, whole batch
  log_ratio  = per_token(token_log_ratio(logprobs, old_logprobs, mask), mask)
  gain       = ppo_clip(log_ratio, advantages, clip_low=0.2, clip_high=0.2, mask=mask)
  loss       = -jnp.sum(weights * gain)

An ablation is `dataclasses.replace` of one slot: replace(GRPO, loss_weights=token_mean). The
advantages slot names the function; the caller calls it, with the arguments it needs. A KL
term, an entropy bonus and sampler corrections are arguments of `objective_loss`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, masks, ratios
from jaxrl_lm.advantages import (
  greedy_baseline,
  group_centered,
  group_normalized,
  leave_one_out,
  length_weighted_baseline,
  raw_rewards,
)
from jaxrl_lm.loss_weights import constant_length, sequence_mean, sequence_sum, token_mean
from jaxrl_lm.ratios import per_sequence, per_sequence_geometric, per_token, with_token_gradient
from jaxrl_lm.returns import gae
from jaxrl_lm.reward_transforms import signal_scaled
from jaxrl_lm.score_surrogates import cispo, dppo_kl, dppo_tv, dro, topr, vespo
from jaxrl_lm.selection import clip_cov, kl_cov
from jaxrl_lm.surrogates import dual_clip, gmpo, ppo_clip, reinforce, sapo
from jaxrl_lm.whitening import whitened_group_centered, whitened_returns


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """The functions an algorithm is made of.

  Objectives with equal parts are equal and hash alike, partials included, so that as a static
  argument of jit they share a compilation.

  Attributes:
    advantages: rewards -> advantages, called by the user on whole groups.
    level: token log-ratios -> log-ratios (`ratios`).
    surrogate: (log_ratio, advantages) -> gain (`surrogates`).
    loss_weights: mask -> weights of the tokens (`loss_weights`), called by the user on the
      whole update batch.
  """

  advantages: Callable[..., Any]
  level: Callable[..., jax.Array]
  surrogate: Callable[..., jax.Array]
  loss_weights: Callable[..., jax.Array]

  def _parts(self) -> tuple[Any, ...]:
    return tuple(_parts(getattr(self, field.name)) for field in dataclasses.fields(self))

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Objective) and self._parts() == other._parts()

  def __hash__(self) -> int:
    return hash(self._parts())


def _parts(function: Any) -> Any:
  """A partial as a tuple of its parts: functools compares partials by identity."""
  if isinstance(function, partial):
    keywords = tuple((name, _parts(x)) for name, x in sorted(function.keywords.items()))
    return (_parts(function.func), tuple(map(_parts, function.args)), keywords)
  return function


# The table. A comment says what differs from GRPO (or from the row named), then the source;
# where paper and released code part, it says so.

# KL term of the paper: kl_k3 with coefficient 0.04. The paper prints no clip width; 0.2 is every
# code's. arXiv:2402.03300, eq. 3.
GRPO = Objective(
  advantages=group_normalized,
  level=per_token,
  surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.2),
  loss_weights=sequence_mean,
)


# No std in the advantage, and a constant in place of the length. arXiv:2503.20783, section 3.2.
def dr_grpo(length: int) -> Objective:
  """Dr. GRPO, a function of the constant length it divides by.

  Args:
    length: the longest response allowed, tokens; a constant of the run.

  Returns:
    The objective.

  Example:
    >>> dr_grpo(4).loss_weights(jnp.array([[True, True, False]]))
    Array([[0.25, 0.25, 0.  ]], dtype=float32)

  Reference: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
  """
  weights = partial(constant_length, length=length)
  return replace(GRPO, advantages=group_centered, loss_weights=weights)


# Clip-higher, and a mean over tokens (the paper: of each group, `group_token_mean`; its code and
# all others: of the batch). With `has_signal` and `overlong_penalty`. arXiv:2503.14476, eq. 8.
DAPO = replace(
  GRPO, surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.28), loss_weights=token_mean
)

# A mean over tokens: TRL's "bnpo", which takes it of each local batch (our weights: the whole
# one). The paper of that name normalises rewards by a Beta density. arXiv:2506.02864.
BNPO = replace(GRPO, loss_weights=token_mean)

# The ratio of the sequence, its geometric mean per token, and a narrow band.
# arXiv:2507.18071, eq. 5-7, widths of section 5.1.
GSPO = replace(
  GRPO,
  level=per_sequence_geometric,
  surrogate=partial(ppo_clip, clip_low=3e-4, clip_high=4e-4),
)

# GSPO's ratio with each token's own gradient; the same gradient as GSPO unless advantages vary
# within a response. arXiv:2507.18071, eq. 13-14.
GSPO_TOKEN = replace(GSPO, level=with_token_gradient(per_sequence_geometric))

# GSPO times the length of the response, with a wider band. arXiv:2602.05261, eq. 7.
LUSPO = replace(
  GSPO, surrogate=partial(ppo_clip, clip_low=2e-3, clip_high=2.5e-3), loss_weights=sequence_sum
)

# The geometric mean of token ratios, each clipped in log space. arXiv:2507.20673, eq. 4.
GMPO = replace(GRPO, surrogate=partial(gmpo, clip_low=0.4, clip_high=0.4))

# The score under a clipped constant ratio, mean over tokens. The paper prints no width; 5 as the
# largest ratio is arXiv:2510.13786's. arXiv:2506.13585, eq. 4-5.
CISPO = replace(
  GRPO, surrogate=partial(cispo, clip_low=1.0, clip_high=4.0), loss_weights=token_mean
)

# A smooth gate in place of the clip. arXiv:2511.20347, eq. 5-6.
SAPO = replace(GRPO, surrogate=partial(sapo, tau_pos=1.0, tau_neg=1.05))

# The token scores under a soft constant weight of the sequence's full ratio; mean over tokens as
# in TRL. arXiv:2602.10693, eq. 20.
VESPO = replace(
  GRPO,
  level=with_token_gradient(per_sequence),
  surrogate=partial(vespo, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0),
  loss_weights=token_mean,
)

# No ratio, no clip; the centred reward scaled up for groups without signal (verl counts rewards
# that are not 0 instead). arXiv:2504.02546, eq. 5-7.
GPG = replace(GRPO, advantages=signal_scaled, surrogate=reinforce, loss_weights=token_mean)

# A band of probability differences in place of ratios; no std. verl also caps the weight at 20.
# arXiv:2602.04879, eq. 12-13.
DPPO_TV = replace(
  GRPO,
  advantages=group_centered,
  surrogate=partial(dppo_tv, clip_low=0.2, clip_high=0.2, ratio_cap=float("inf")),
  loss_weights=token_mean,
)

# The same with a band of binary KL. arXiv:2602.04879, eq. 12 and 14.
DPPO_KL = replace(
  DPPO_TV, surrogate=partial(dppo_kl, clip_low=0.05, clip_high=0.05, ratio_cap=float("inf"))
)

# Random tokens of high covariance are left out; select with `clip_cov_selection`.
# arXiv:2505.22617, eq. 10-12.
CLIP_COV = replace(
  GRPO, surrogate=partial(clip_cov, clip_low=0.2, clip_high=0.2), loss_weights=token_mean
)

# No clip; the tokens of highest covariance are held back; select with `kl_cov_selection`. verl's
# default coefficient is 0.1. arXiv:2505.22617, eq. 13-14.
KL_COV = replace(GRPO, surrogate=partial(kl_cov, kl_coef=1.0), loss_weights=token_mean)

# The policy gradient itself: no baseline, no ratio, sum over tokens. Williams 1992, theorem 1.
REINFORCE = replace(GRPO, advantages=raw_rewards, surrogate=reinforce, loss_weights=sequence_sum)

# REINFORCE against the mean of the other samples; codes add a ratio (TRL: `per_sequence`, clipped).
# arXiv:2402.14740, section 2.3.
RLOO = replace(REINFORCE, advantages=leave_one_out)

# REINFORCE against the reward of the greedy response. arXiv:2310.10505.
REMAX = replace(REINFORCE, advantages=greedy_baseline)

# REINFORCE against the length-weighted mean of the group. arXiv:2505.23585.
OPO = replace(REINFORCE, advantages=length_weighted_baseline)

# Positive examples in full, negative ones under a truncated ratio of the sequence; rewards of +-1
# without a baseline. arXiv:2503.14286, eq. 7-8.
TOPR = replace(
  GRPO, advantages=raw_rewards, level=with_token_gradient(per_sequence), surrogate=topr
)

# The score of the response and a quadratic pull to the old policy; neither paper prints the
# strength (0.1 is ROLL's), verl squares per token. arXiv:2405.19107, eq. 8; Kimi k1.5,
# arXiv:2501.12599, eq. 3.
DRO = replace(GRPO, advantages=group_centered, level=per_sequence, surrogate=partial(dro, beta=0.1))

# Returns whitened over all tokens of the batch, with k1 in the reward (`kl_shaped_rewards`).
# arXiv:2501.03262, eq. 4-5.
REINFORCE_PP = replace(GRPO, advantages=whitened_returns, loss_weights=token_mean)

# The group mean as baseline, then whitened; KL term: kl_k2. arXiv:2501.03262, eq. 6-8.
REINFORCE_PP_BASELINE = replace(REINFORCE_PP, advantages=whitened_group_centered)

# A critic: per-token advantages by GAE. arXiv:1707.06347, eq. 7; arXiv:1506.02438, eq. 16.
PPO = replace(GRPO, advantages=gae, loss_weights=token_mean)

# PPO, bounded for A < 0 too. arXiv:1912.09729, eq. 5.
DUAL_CLIP_PPO = replace(
  PPO, surrogate=partial(dual_clip, clip_low=0.2, clip_high=0.2, ratio_cap=3.0)
)


class ObjectiveAux(NamedTuple):
  """What `objective_loss` saw on the way, [..., T] each, for `diagnostics`.

  Attributes:
    log_ratio: at the objective's level, nats.
    gain: of the surrogate, unweighted.
    kl: of the KL term, nats, or None.
  """

  log_ratio: jax.Array
  gain: jax.Array
  kl: jax.Array | None


def objective_loss(
  objective: Objective,
  logprobs: jax.Array,
  old_logprobs: jax.Array | None,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  loss_weights: jax.Array,
  importance_weights: jax.Array | None = None,
  ref_logprobs: jax.Array | None = None,
  kl: Callable[..., jax.Array] | None = None,
  kl_coef: Any = 0.0,
  entropy: jax.Array | None = None,
  entropy_coef: Any = 0.0,
  segment_ids: jax.Array | None = None,
  selected: jax.Array | None = None,
) -> tuple[jax.Array, ObjectiveAux]:
  r"""Loss of a named algorithm on (a part of) an update batch.

  loss = -sum(w iw gain) + kl_coef sum(w kl) - entropy_coef sum(w entropy),  w = loss_weights

  The reduction is the weights: computed once on the whole batch and cut like the tokens,
  parts of the batch sum to the whole. Importance weights multiply the policy term only. A
  token of weight 0 is left out of the surrogate (and so of GMPO's mean, not of the level),
  so that one rejected for its extreme ratio cannot overflow. Score-form terms report the
  log-prob of the token, at every level.

  Args:
    objective: a row of the table, or one of your own. Static under jit.
    logprobs: [..., T] of the current policy, nats. Differentiated.
    old_logprobs: [..., T] of the policy the ratio is taken against (proximal). Constant. None =
      on-policy: the ratio is exactly 1.
    advantages: [..., T], or [..., 1] for one value per sequence. Constant.
    mask: [..., T] bool, True = counts.
    loss_weights: [..., T] from `objective.loss_weights` on the whole batch. Constant.
    importance_weights: [..., T] or [..., 1] from `corrections`. Constant. None = 1.
    ref_logprobs: [..., T] of the reference policy. Constant. Goes with `kl`.
    kl: estimator of (logprobs, ref_logprobs, mask), such as `kl_k2`. Differentiated.
    kl_coef: weight of the KL term.
    entropy: [..., T] of `token_entropy`, nats. Differentiated.
    entropy_coef: weight of the entropy bonus.
    segment_ids: [..., T] int of packed rows, 0 = padding. None = a row is one sequence.
    selected: [..., T] bool of `selection`, for the surrogates that take it.

  Returns:
    loss, a scalar to be minimised, and `ObjectiveAux`.

  Raises:
    ValueError: shapes differ; `kl` without `ref_logprobs` or the reverse; a coefficient whose
      term is missing.
    TypeError: the mask is not boolean; the surrogate needs `selected`, or does not take it.

  Example:
    >>> logprobs = jnp.array([[-1.0, -2.0], [-0.5, 0.0]])
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> advantages = GRPO.advantages(jnp.array([1.0, 0.0]))[..., None]
    >>> weights = GRPO.loss_weights(mask)
    >>> loss = lambda x: objective_loss(GRPO, x, None, advantages, mask, loss_weights=weights)[0]
    >>> jax.grad(loss)(logprobs).round(3)
    Array([[-0.177, -0.177],
           [ 0.354,  0.   ]], dtype=float32)

  Reference: each row of the table names its own.
  """
  logprobs = checks.as_float("logprobs", logprobs)
  mask = checks.check_mask(mask, logprobs=logprobs)
  checks.check_same_shape(logprobs=logprobs, loss_weights=loss_weights)
  _check_term("kl", kl, kl_coef, ref_logprobs=ref_logprobs)
  _check_term("entropy", entropy, entropy_coef)
  weights = checks.as_constant("loss_weights", loss_weights)
  policy_weights = _policy_weights(weights, importance_weights)
  used, counted = (mask & (w != 0) for w in (policy_weights, weights))

  old_logprobs = logprobs if old_logprobs is None else old_logprobs
  log_ratio = ratios.token_log_ratio(logprobs, old_logprobs, mask)
  log_ratio = objective.level(log_ratio, mask, segment_ids=segment_ids)
  gain = objective.surrogate(
    log_ratio,
    advantages,
    mask=used,
    # Such that log_ratio + old_logprobs is the token's log-prob, at every level.
    old_logprobs=jax.lax.stop_gradient(logprobs - log_ratio),
    segment_ids=segment_ids,
    **({} if selected is None else {"selected": selected}),
  )
  loss = -_weighted_total(policy_weights, gain, used)

  divergence = None
  if kl is not None:
    term, divergence = _kl_term(kl, kl_coef, logprobs, ref_logprobs, weights, counted)
    loss += term
  if entropy is not None:
    checks.check_same_shape(logprobs=logprobs, entropy=entropy)
    bonus = checks.as_float("entropy", entropy)
    loss -= entropy_coef * _weighted_total(weights, bonus, counted)
  return loss, ObjectiveAux(log_ratio=log_ratio, gain=gain, kl=divergence)


def _policy_weights(weights: jax.Array, importance_weights: Any) -> jax.Array:
  """Loss weights times importance weights; a factor of 0 wins over inf and NaN."""
  if importance_weights is None:
    return weights
  importance = checks.spread_over_tokens(
    "importance_weights", importance_weights, loss_weights=weights
  )
  return jnp.where((weights == 0) | (importance == 0), 0.0, weights * importance)


def _kl_term(
  kl: Callable[..., jax.Array],
  kl_coef: Any,
  logprobs: jax.Array,
  ref_logprobs: Any,
  weights: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The KL term and the KL per token. A coefficient of 0 wins over a KL of inf."""
  off = jnp.asarray(kl_coef) == 0
  # On the way in: the gradient is then 0, not 0 * inf.
  logprobs = jnp.where(off, jax.lax.stop_gradient(logprobs), logprobs)
  divergence = kl(logprobs, ref_logprobs, mask)
  return kl_coef * _weighted_total(weights, divergence, mask & ~off), divergence


def _weighted_total(weights: jax.Array, x: jax.Array, mask: jax.Array) -> jax.Array:
  """sum w x over the counted tokens; what stands elsewhere, in either, is left out."""
  # The product is masked too: then XLA reduces it as one array, without writing out its factors.
  return jnp.sum(masks.zero_masked(masks.zero_masked(weights, mask) * x, mask))


def _check_term(name: str, term: Any, coefficient: Any, **needed: Any) -> None:
  """A term, its coefficient and what it needs are given together, or not at all."""
  for other, value in needed.items():
    if (term is None) != (value is None):
      missing = name if term is None else other
      raise ValueError(f"{name} and {other} go together: {missing} is None")
  checks.check_range(f"{name}_coef", coefficient)
  traced = isinstance(coefficient, jax.core.Tracer)
  if term is None and (traced or coefficient != 0):
    raise ValueError(f"{name}_coef is given but {name} is None")
