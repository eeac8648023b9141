"""OpenRLHF 0.11.2: `PolicyLoss`, with the group estimator that it calls GRPO's.

Common: the KL, k1 with coefficient 0.01, is in the reward; every KL estimate is clipped to +-10,
without a gradient beyond. The default advantage is GAE; those of group_norm have the std with ddof
1 plus 1e-9, which magnifies rounding in float32 (ours gives 0 to groups without spread).

Arguments:
  clip_eps_low, clip_eps_high: widths of the clip.
  dual_clip: cap of the ratio where A < 0; None = none.
  token_level_loss: whether all tokens of the batch weigh the same, or all non-empty rows.
  advantage_estimator: "group_norm" is GROUP_NORM, "dr_grpo" and "reinforce_baseline" (before its
    whitening) `group_centered`, "rloo" `leave_one_out`.
  init_kl_coef: of the KL in the reward, or in the loss.
  kl_estimator: "k1", "k2", "k3" are `kl_k1`, `kl_k2`, `kl_k3`.
  use_kl_loss: whether the KL is in the loss instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxrl_lm import preset_parts as parts
from jaxrl_lm.advantages import group_normalized
from jaxrl_lm.kl import kl_k1
from jaxrl_lm.loss_weights import sequence_mean, token_mean
from jaxrl_lm.objectives import Objective
from jaxrl_lm.presets import Recipe
from jaxrl_lm.ratios import per_sequence_geometric

Function = Callable[..., jax.Array]

GROUP_NORM = partial(group_normalized, ddof=1, eps=1e-9)


def _recipe(objective: Objective, kl_estimator: Function, coefficient: Any, loss: bool) -> Recipe:
  kl = parts.clipped_kl(kl_estimator)
  if loss:
    return Recipe(objective, **parts.kl_term(parts.of_reference(kl), coefficient))
  return Recipe(objective, reward_kl=kl, reward_kl_coef=coefficient)


def openrlhf_ppo(
  *,
  clip_eps_low: Any = 0.2,
  clip_eps_high: Any = 0.2,
  dual_clip: Any = None,
  token_level_loss: bool = True,
  advantage_estimator: Function = GROUP_NORM,
  kl_estimator: Function = kl_k1,
  init_kl_coef: Any = 0.01,
  use_kl_loss: bool = False,
) -> Recipe:
  """A mean over all tokens, std + 1e-9, KL k1 in the reward; log-ratios clamped to +-20.

  Source: OpenRLHF 0.11.2, `models.loss.PolicyLoss`, policy_loss_type="ppo".
  """
  surrogate = parts.clip(clip_eps_low, clip_eps_high, dual_clip)
  weights = token_mean if token_level_loss else sequence_mean
  objective = Objective(advantage_estimator, parts.TOKEN_20, surrogate, weights)
  return _recipe(objective, kl_estimator, init_kl_coef, use_kl_loss)


def openrlhf_gspo(
  *,
  clip_eps_low: Any = 0.2,
  clip_eps_high: Any = 0.2,
  advantage_estimator: Function = GROUP_NORM,
  kl_estimator: Function = kl_k1,
  init_kl_coef: Any = 0.01,
  use_kl_loss: bool = False,
) -> Recipe:
  """The geometric mean ratio of the row, at PPO's width of 0.2; always a mean per row.

  Nothing is clamped. With a sampler correction on, the sampler's log-probs replace the old ones
  and no weight is left.

  Source: OpenRLHF 0.11.2, `models.loss.PolicyLoss`, policy_loss_type="gspo".
  """
  surrogate = parts.clip(clip_eps_low, clip_eps_high)
  level = per_sequence_geometric
  objective = Objective(advantage_estimator, level, surrogate, sequence_mean)
  return _recipe(objective, kl_estimator, init_kl_coef, use_kl_loss)
