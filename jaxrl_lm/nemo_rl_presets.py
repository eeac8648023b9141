"""NeMo-RL (commit 7ea279abf): `ClippedPGLossFn` and its GRPO advantages.

Common: advantages are the reward against the mean of the OTHER samples over the std of the others
plus 1e-6, not divided where that is 0 (`leave_one_out_normalized`); the KL is k3 of a difference
clamped to +-20, clipped to +-10 and multiplied by exp(log pi - sg(log pi)), which gives it the
gradient of KL(pi || ref). No log-ratio of the policy is clamped. Some commits multiply by the ratio
to the sampler, or by 1: then `reference_policy_kl_type=clipped_kl(kl_k3)` of `preset_parts`.

Arguments:
  ratio_clip_min, ratio_clip_max: widths of the clip.
  ratio_clip_c: cap of the ratio where A < 0; None = none.
  reference_policy_kl_penalty: coefficient of the KL term.
  reference_policy_kl_type: an estimator; "k3" is SCORED_K3.
  token_level_loss: whether all tokens of the batch weigh the same, or all rows.
  use_leave_one_out_baseline: True is LEAVE_ONE_OUT, False `group_normalized`; takes the function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxrl_lm import preset_parts as parts
from jaxrl_lm.advantages import leave_one_out_normalized
from jaxrl_lm.kl import kl_k3
from jaxrl_lm.loss_weights import sequence_mean, token_mean
from jaxrl_lm.objectives import Objective
from jaxrl_lm.presets import Recipe
from jaxrl_lm.ratios import per_sequence_geometric, per_token
from jaxrl_lm.score_surrogates import cispo
from jaxrl_lm.surrogates import reinforce

Function = Callable[..., jax.Array]

LEAVE_ONE_OUT = partial(leave_one_out_normalized, eps=1e-6)
# Within +-10 the difference is within +-20: one clip stands for both.
SCORED_K3 = parts.with_score(parts.clipped_kl(kl_k3))


def _recipe(
  surrogate: Function,
  level: Function,
  token_level_loss: bool,
  advantages: Function,
  kl: Function,
  kl_coef: Any,
) -> Recipe:
  weights = token_mean if token_level_loss else sequence_mean
  objective = Objective(advantages, level, surrogate, weights)
  return Recipe(objective, **parts.kl_term(parts.of_reference(kl), kl_coef))


def nemo_rl_grpo(
  *,
  ratio_clip_min: Any = 0.2,
  ratio_clip_max: Any = 0.2,
  ratio_clip_c: Any = None,
  reference_policy_kl_penalty: Any = 0.01,
  reference_policy_kl_type: Function = SCORED_K3,
  token_level_loss: bool = True,
  use_leave_one_out_baseline: Function = LEAVE_ONE_OUT,
) -> Recipe:
  """A mean over all tokens; mean and std are those of the other samples; k3 with k2's gradient.

  Source: NeMo-RL, `ClippedPGLossFn` and `GRPOAdvantageEstimator`.
  """
  surrogate = parts.clip(ratio_clip_min, ratio_clip_max, ratio_clip_c)
  kl = (reference_policy_kl_type, reference_policy_kl_penalty)
  return _recipe(surrogate, per_token, token_level_loss, use_leave_one_out_baseline, *kl)


def nemo_rl_gspo(
  *,
  ratio_clip_min: Any = 0.2,
  ratio_clip_max: Any = 0.2,
  ratio_clip_c: Any = None,
  reference_policy_kl_penalty: Any = 0.01,
  reference_policy_kl_type: Function = SCORED_K3,
  use_leave_one_out_baseline: Function = LEAVE_ONE_OUT,
) -> Recipe:
  """The geometric mean ratio of the row, at PPO's width of 0.2; a mean per row; the same k3.

  Source: NeMo-RL, `ClippedPGLossFn`, sequence_level_importance_ratios=True.
  """
  surrogate = parts.clip(ratio_clip_min, ratio_clip_max, ratio_clip_c)
  kl = (reference_policy_kl_type, reference_policy_kl_penalty)
  return _recipe(surrogate, per_sequence_geometric, False, use_leave_one_out_baseline, *kl)


def nemo_rl_cispo(
  *,
  ratio_clip_min: Any = 0.2,
  ratio_clip_max: Any = 0.2,
  reference_policy_kl_penalty: Any = 0.01,
  reference_policy_kl_type: Function = SCORED_K3,
  use_leave_one_out_baseline: Function = LEAVE_ONE_OUT,
) -> Recipe:
  """The score under a ratio clipped to [0.8, 1.2], both widths from 1; per token; the same k3.

  Source: NeMo-RL, `ClippedPGLossFn`, use_cispo=True.
  """
  surrogate = partial(cispo, clip_low=ratio_clip_min, clip_high=ratio_clip_max)
  kl = (reference_policy_kl_type, reference_policy_kl_penalty)
  return _recipe(surrogate, per_token, True, use_leave_one_out_baseline, *kl)


def nemo_rl_reinforce(
  *,
  reference_policy_kl_penalty: Any = 0.01,
  reference_policy_kl_type: Function = SCORED_K3,
  token_level_loss: bool = True,
  use_leave_one_out_baseline: Function = LEAVE_ONE_OUT,
) -> Recipe:
  """No ratio: the score of the token, under the same advantages; per token; the same k3.

  Source: NeMo-RL, `ClippedPGLossFn`, disable_ppo_ratio=True.
  """
  kl = (reference_policy_kl_type, reference_policy_kl_penalty)
  return _recipe(reinforce, per_token, token_level_loss, use_leave_one_out_baseline, *kl)
