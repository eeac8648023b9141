"""TRL 1.16.0: the loss types of its GRPO trainer, GMPO and RLOO.

Common to all of `GRPOTrainer._compute_loss`: no log-ratio is clamped; the KL term, off by default,
is k3 times the ratio of the policy term (use_bias_correction_kl); advantages have the std with
ddof 1 plus 1e-4; rows without a token count in the mean of rows; samples of vLLM are corrected by
the product of the ratios of a row, which drops rows above 3 (`Recipe.correction`).

Arguments:
  epsilon, epsilon_high: widths of the clip; epsilon_high=None is epsilon.
  delta: cap of the ratio where A < 0; None = none.
  beta: coefficient of the KL term.
  use_bias_correction_kl: whether k3 is weighted by the ratio; plain k3 otherwise.
  importance_sampling_level: "token" is `per_token`, "sequence" `per_sequence_geometric`.
  scale_rewards: "group" is SCALED_BY_GROUP, "batch" SCALED_BY_BATCH, "none" `group_centered`.
  entropy_coef: of the entropy bonus. TRL averages it over tokens whatever the loss type; here it
    has the weights of the loss.
  max_completion_length: the length that dr_grpo divides by; TRL's default is 512.
  sapo_temperature_pos, sapo_temperature_neg: of the gate, for A > 0 and the rest.
  vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: power and decay, by sign of A.

What multiplies the policy term is the caller's `importance_weights`: off_policy_mask_threshold is
`off_policy_mask`, top_entropy_quantile `top_entropy_mask`, vLLM's ratio `Recipe.correction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import preset_parts as parts
from jaxrl_lm.advantages import batch_scaled, group_normalized, leave_one_out
from jaxrl_lm.corrections import banded
from jaxrl_lm.kl import kl_k1, kl_k3
from jaxrl_lm.loss_weights import constant_length, sequence_mean, sequence_sum, token_mean
from jaxrl_lm.objectives import Objective
from jaxrl_lm.presets import Recipe
from jaxrl_lm.ratios import (
  clamped,
  per_sequence,
  per_sequence_geometric,
  per_token,
  with_token_gradient,
)
from jaxrl_lm.score_surrogates import cispo, vespo
from jaxrl_lm.surrogates import gmpo, sapo

Function = Callable[..., jax.Array]

SCALED_BY_GROUP = partial(group_normalized, ddof=1, eps=1e-4)
SCALED_BY_BATCH = partial(batch_scaled, ddof=1, eps=1e-4)
MEAN_OF_ROWS = partial(sequence_mean, count_empty=True)
SUM_OF_ROWS = partial(sequence_sum, count_empty=True)
# log w of VESPO: the sum of log-ratios within +-20, between log 1e-8 and 20.
VESPO_LEVEL = with_token_gradient(
  clamped(parts.after(parts.TOKEN_20, per_sequence), math.log(1e-8), 20.0)
)


def _sequence_mask(log_weights: jax.Array, mask: jax.Array) -> jax.Array:
  """vLLM's "sequence_mask" with clip_max 3: a row whose ratio is above is left out."""
  return banded(per_sequence(log_weights, mask), mask, low=0.0, high=3.0)


def _recipe(
  surrogate: Function,
  loss_weights: Function,
  level: Function,
  scale_rewards: Function,
  beta: Any,
  use_bias_correction_kl: bool,
  entropy_coef: Any,
  *,
  kl_level: Function | None = None,
) -> Recipe:
  kl = parts.of_reference(kl_k3)
  if use_bias_correction_kl:
    kl = parts.weighted_k3(level if kl_level is None else kl_level)
  objective = Objective(scale_rewards, level, surrogate, loss_weights)
  term = parts.kl_term(kl, beta)
  return Recipe(objective, entropy_coef=entropy_coef, correction=_sequence_mask, **term)


def trl_grpo(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  delta: Any = None,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  importance_sampling_level: Function = per_token,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """The paper's, with std + 1e-4 and no KL; empty rows count in the mean.

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="grpo".
  """
  surrogate = parts.clip(epsilon, epsilon_high, delta)
  rest = (importance_sampling_level, scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, MEAN_OF_ROWS, *rest)


def trl_bnpo(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  delta: Any = None,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  importance_sampling_level: Function = per_token,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """A mean over the tokens of each micro-batch (here: of the whole batch).

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="bnpo".
  """
  surrogate = parts.clip(epsilon, epsilon_high, delta)
  rest = (importance_sampling_level, scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, token_mean, *rest)


def trl_dr_grpo(
  *,
  max_completion_length: Any,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  delta: Any = None,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  importance_sampling_level: Function = per_token,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """The sum over max_completion_length; keeps the std unless scale_rewards says otherwise.

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="dr_grpo".
  """
  surrogate = parts.clip(epsilon, epsilon_high, delta)
  weights = partial(constant_length, length=max_completion_length, count_empty=True)
  rest = (importance_sampling_level, scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, weights, *rest)


def trl_dapo(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  delta: Any = None,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  importance_sampling_level: Function = per_token,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """TRL's default: a mean over all tokens of the batch. No clip-higher unless epsilon_high is set.

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="dapo".
  """
  surrogate = parts.clip(epsilon, epsilon_high, delta)
  rest = (importance_sampling_level, scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, token_mean, *rest)


def trl_luspo(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  delta: Any = None,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  importance_sampling_level: Function = per_sequence_geometric,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """The ratio of the row, and a sum over its tokens: long rows weigh more.

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="luspo"; the sequence level is the one
  it is meant for, not its default, and the widths are not the paper's 2e-3 and 2.5e-3.
  """
  surrogate = parts.clip(epsilon, epsilon_high, delta)
  rest = (importance_sampling_level, scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, SUM_OF_ROWS, *rest)


def trl_cispo(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  importance_sampling_level: Function = per_token,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """The score under min(ratio, epsilon_high): a cap of 0.2 by default, so every weight is 0.2.

  epsilon_high is the cap itself, not a width (5 is meant), and falls back to epsilon. The score is
  the token's at any level.

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="cispo".
  """
  cap = epsilon if epsilon_high is None else epsilon_high
  level = importance_sampling_level
  if level is not per_token:
    level = with_token_gradient(level)
  surrogate = partial(_capped_score, cap=cap)
  rest = (scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, token_mean, level, *rest, kl_level=importance_sampling_level)


def _capped_score(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  cap: Any,
  mask: jax.Array | None = None,
  old_logprobs: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  """sg(min(r, cap)) A log pi as cap `cispo(r / cap)`, whose band may lie below 1."""
  shift = jnp.log(jnp.asarray(cap, log_ratio.dtype))
  old_logprobs = shift if old_logprobs is None else old_logprobs + shift
  old_logprobs = jnp.broadcast_to(old_logprobs, log_ratio.shape)
  return cispo(
    log_ratio - shift,
    cap * advantages,
    clip_low=1.0,
    clip_high=0.0,
    mask=mask,
    old_logprobs=old_logprobs,
    segment_ids=segment_ids,
  )


def trl_sapo(
  *,
  sapo_temperature_pos: Any = 1.0,
  sapo_temperature_neg: Any = 1.05,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  importance_sampling_level: Function = per_token,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """A smooth gate in place of the clip.

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="sapo".
  """
  surrogate = partial(sapo, tau_pos=sapo_temperature_pos, tau_neg=sapo_temperature_neg)
  rest = (importance_sampling_level, scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, MEAN_OF_ROWS, *rest)


def trl_vespo(
  *,
  vespo_k_pos: Any = 2.0,
  vespo_lambda_pos: Any = 3.0,
  vespo_k_neg: Any = 3.0,
  vespo_lambda_neg: Any = 2.0,
  beta: Any = 0.0,
  use_bias_correction_kl: bool = True,
  scale_rewards: Function = SCALED_BY_GROUP,
  entropy_coef: Any = 0.0,
) -> Recipe:
  """The score under a soft weight of the row's product ratio; a mean over tokens.

  TRL adds the log of the vLLM ratio to the log-ratio of the row (over padding too) instead of
  multiplying by it; the KL is weighted by the token's ratio.

  Source: TRL 1.16.0, `GRPOTrainer._compute_loss`, loss_type="vespo".
  """
  surrogate = partial(
    vespo,
    k_pos=vespo_k_pos,
    lam_pos=vespo_lambda_pos,
    k_neg=vespo_k_neg,
    lam_neg=vespo_lambda_neg,
  )
  rest = (scale_rewards, beta, use_bias_correction_kl, entropy_coef)
  return _recipe(surrogate, token_mean, VESPO_LEVEL, *rest, kl_level=per_token)


def trl_gmpo(
  *,
  epsilon: Any = 0.4,
  epsilon_high: Any = None,
  beta: Any = 0.0,
  scale_rewards: Function = SCALED_BY_GROUP,
) -> Recipe:
  """The geometric mean of ratios that are clipped in log space, one value per row.

  A row without a token adds its advantage to the value (not to the gradient) in TRL. The KL is
  plain k3.

  Source: TRL 1.16.0, `GMPOTrainer._compute_loss`.
  """
  high = epsilon if epsilon_high is None else epsilon_high
  surrogate = partial(gmpo, clip_low=epsilon, clip_high=high)
  return _recipe(surrogate, MEAN_OF_ROWS, per_token, scale_rewards, beta, False, 0.0)


def trl_rloo(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  beta: Any = 0.05,
) -> Recipe:
  """Leave-one-out, and a clip on the product of the ratios of the row; KL k1 in the reward.

  The KL is the sum of k1 over the row, of the log-probs before the update. normalize_advantages:
  then `group_normalized(eps=1e-4)` with the batch as one group.

  Source: TRL 1.16.0, `RLOOTrainer._compute_loss`.
  """
  surrogate = parts.clip(epsilon, epsilon_high)
  objective = Objective(leave_one_out, per_sequence, surrogate, MEAN_OF_ROWS)
  return Recipe(objective, reward_kl=kl_k1, reward_kl_coef=beta, correction=_sequence_mask)
