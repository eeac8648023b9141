"""Tunix 0.1.7: its GRPO, Dr. GRPO, DAPO, GSPO-token and PPO.

Common: log-ratios are clamped to +-20 per token (not in PPO); advantages have the std with ddof 1
plus 1e-6; rows without a token are left out of the mean of rows. Its default KL is k1, whose
expected gradient in a loss is 0.

Arguments:
  epsilon, epsilon_high: widths of the clip; epsilon_high=None is epsilon.
  epsilon_low: the lower width of PPO.
  epsilon_c: cap of the ratio where A < 0; None = none.
  beta, kl_coef: coefficient of the KL term.
  kl_loss_mode: "kl" is `kl_k1`, "mse_kl" `kl_k2`, "low_var_kl" `kl_k3`.
  loss_agg_mode: "token-mean" is `token_mean`, "sequence-mean-token-mean" `sequence_mean`,
    "sequence-mean-token-scale" `constant_length`, whose length is `norm` or the padded width, and
    "sequence-mean-token-sum-norm" `sequence_sum`, or `token_sum` over `norm`.
  norm: the length that sequence-mean-token-scale divides by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxrl_lm import preset_parts as parts
from jaxrl_lm.advantages import group_centered, group_normalized
from jaxrl_lm.kl import kl_k1
from jaxrl_lm.loss_weights import constant_length, sequence_mean, token_mean
from jaxrl_lm.objectives import Objective
from jaxrl_lm.presets import Recipe
from jaxrl_lm.ratios import clamped, per_sequence_geometric, per_token, with_token_gradient
from jaxrl_lm.returns import gae

Function = Callable[..., Any]

GROUP_NORMALIZED = partial(group_normalized, ddof=1, eps=1e-6)
# The mean of clamped log-ratios, with each token's own gradient, at most 10.
GSPO_TOKEN = clamped(
  with_token_gradient(parts.after(parts.TOKEN_20, per_sequence_geometric)), -math.inf, 10.0
)


def tunix_grpo(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  epsilon_c: Any = None,
  beta: Any = 0.04,
  kl_loss_mode: Function = kl_k1,
  loss_agg_mode: Function = sequence_mean,
) -> Recipe:
  """The paper's, but for KL k1, which does not regularise; log-ratios clamped to +-20.

  Source: Tunix 0.1.7, `rl.algo_core.grpo_loss_fn`, loss_algo="grpo"; `GRPOConfig`.
  """
  surrogate = parts.clip(epsilon, epsilon_high, epsilon_c)
  objective = Objective(GROUP_NORMALIZED, parts.TOKEN_20, surrogate, loss_agg_mode)
  return Recipe(objective, **parts.kl_term(parts.of_reference(kl_loss_mode), beta))


def tunix_gspo_token(
  *,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  epsilon_c: Any = None,
  beta: Any = 0.04,
  kl_loss_mode: Function = kl_k1,
  loss_agg_mode: Function = sequence_mean,
) -> Recipe:
  """GSPO-token at PPO's width of 0.2, of clamped log-ratios; KL k1.

  Source: Tunix 0.1.7, `rl.algo_core.grpo_loss_fn`, loss_algo="gspo-token"; `GRPOConfig`.
  """
  surrogate = parts.clip(epsilon, epsilon_high, epsilon_c)
  objective = Objective(GROUP_NORMALIZED, GSPO_TOKEN, surrogate, loss_agg_mode)
  return Recipe(objective, **parts.kl_term(parts.of_reference(kl_loss_mode), beta))


def tunix_dapo(*, epsilon: Any = 0.2, epsilon_high: Any = 0.28) -> Recipe:
  """Clip-higher, and a mean over all tokens of the batch; no KL.

  Its dynamic sampling is a flag without an effect, and its overlong penalty counts characters.

  Source: Tunix 0.1.7, `rl.grpo.dapo_learner.DAPOConfig`.
  """
  return tunix_grpo(epsilon=epsilon, epsilon_high=epsilon_high, beta=0.0, loss_agg_mode=token_mean)


def tunix_dr_grpo(
  *,
  norm: Any,
  epsilon: Any = 0.2,
  epsilon_high: Any = None,
  epsilon_c: Any = None,
  beta: Any = 0.04,
  kl_loss_mode: Function = kl_k1,
) -> Recipe:
  """No std, and the sum over a constant length, which Tunix takes from the padding; KL k1.

  Source: Tunix 0.1.7, `rl.grpo.drgrpo_learner.DrGRPOConfig`.
  """
  surrogate = parts.clip(epsilon, epsilon_high, epsilon_c)
  weights = partial(constant_length, length=norm)
  objective = Objective(group_centered, parts.TOKEN_20, surrogate, weights)
  return Recipe(objective, **parts.kl_term(parts.of_reference(kl_loss_mode), beta))


def tunix_ppo(
  *,
  epsilon_low: Any = 0.2,
  epsilon_high: Any = 0.2,
  epsilon_c: Any = None,
  kl_coef: Any = 0.0,
) -> Recipe:
  """A critic, and a mean over all tokens; no KL unless kl_coef is set, and then k1.

  Tunix whitens the advantages: `whiten(gae(...), mask)`, the caller's. gae_lambda is 0.95 there.

  Source: Tunix 0.1.7, `rl.algo_core.ppo_policy_loss_fn`.
  """
  surrogate = parts.clip(epsilon_low, epsilon_high, epsilon_c)
  objective = Objective(gae, per_token, surrogate, token_mean)
  return Recipe(objective, **parts.kl_term(parts.of_reference(kl_k1), kl_coef))
