"""verl 0.9.1: the policy losses of `core_algos`, with its GRPO's advantages.

verl keeps loss and advantages apart: its default estimator is GAE, that of its GRPO the std with
ddof 1 plus 1e-6, where the only sample of a group keeps its raw reward. Rows without a token are
left out of the mean of rows. KL and entropy are added to any loss by `verl_with_terms`, both off by
default. Setting clip_ratio alone has no effect there: clip_ratio_low and _high are what is read.

Arguments:
  clip_ratio_low, clip_ratio_high: widths of the clip.
  clip_ratio_c: cap of the ratio where A < 0, always on; DPPO: cap of the weight. DPPO's docs say
    20, which its configuration, 3, overrides.
  loss_agg_mode: "token-mean" is `token_mean`, "seq-mean-token-mean" `sequence_mean`,
    "seq-mean-token-sum" `sequence_sum`, "token-sum" `token_sum`, "seq-mean-token-sum-norm"
    `constant_length`, whose length is loss_scale_factor or the padded width.
  adv_estimator: "grpo" is GRPO_ADVANTAGES, with norm_adv_by_std_in_grpo=False CENTERED_ADVANTAGES,
    "rloo" RLOO_ADVANTAGES, "gpg" GPG_ADVANTAGES, "gae" `gae`.
  tau_pos, tau_neg: temperatures of SAPO's gate.
  dro_beta: strength of DRO's pull.
  clip_cov_ratio, clip_cov_lb, clip_cov_ub, kl_cov_ratio: of the selection; ppo_kl_coef: of KL-Cov.
  recipe: one of the above. kl_loss_coef, kl_loss_type: "low_var_kl" or "k3" is LOW_VAR_KL, "k1"
    `kl_k1`, "k2" `kl_k2`, "abs" `kl_abs`; with "+", `with_reverse_kl_gradient` of it.
  entropy_coeff: of the entropy bonus.

rollout_is_weights are the caller's `importance_weights`; in geo_mean their geometric mean per row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import preset_parts as parts
from jaxrl_lm.advantages import group_centered, group_normalized, leave_one_out, raw_rewards
from jaxrl_lm.kl import kl_k3
from jaxrl_lm.loss_weights import sequence_mean, token_mean
from jaxrl_lm.objectives import Objective
from jaxrl_lm.presets import Recipe
from jaxrl_lm.ratios import per_token
from jaxrl_lm.score_surrogates import cispo, dppo_kl, dppo_tv, dro
from jaxrl_lm.selection import clip_cov, clip_cov_selection, kl_cov, kl_cov_selection
from jaxrl_lm.surrogates import gmpo, reinforce, sapo

Function = Callable[..., Any]


def _raw_when_alone(
  estimator: Function, scale: float, rewards: jax.Array, *, where: jax.Array | None = None
) -> jax.Array:
  """The only sample of a group keeps its reward, where our estimators give 0."""
  valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
  alone = jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.int32) == 1
  raw = raw_rewards(rewards, where=where)
  return jnp.where(alone, scale * raw, estimator(rewards, where=where))


def _gpg_advantages(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
  """The scale counts rewards that are not 0, where `signal_scaled` counts groups with spread."""
  raw = raw_rewards(rewards, where=where)
  count = jnp.asarray(raw.size if where is None else jnp.sum(where, dtype=jnp.int32), raw.dtype)
  scale = count / jnp.maximum(jnp.sum(raw != 0, dtype=jnp.int32), 1)
  return scale * CENTERED_ADVANTAGES(rewards, where=where)


GRPO_ADVANTAGES = partial(
  _raw_when_alone, partial(group_normalized, ddof=1, eps=1e-6), 1.0 / (1.0 + 1e-6)
)
CENTERED_ADVANTAGES = partial(_raw_when_alone, group_centered, 1.0)
RLOO_ADVANTAGES = partial(_raw_when_alone, leave_one_out, 1.0)
GPG_ADVANTAGES = _gpg_advantages
LOW_VAR_KL = parts.clipped_kl(kl_k3)


def verl_with_terms(
  recipe: Recipe,
  *,
  kl_loss_coef: Any = 0.001,
  kl_loss_type: Function = LOW_VAR_KL,
  entropy_coeff: Any = 0.0,
) -> Recipe:
  """The recipe with a KL (use_kl_loss=True: k3 clipped to 10) and an entropy bonus in the loss.

  Source: verl 0.9.1, `workers.utils.losses.ppo_loss`, `core_algos.kl_penalty`.
  """
  term = parts.kl_term(parts.of_reference(kl_loss_type), kl_loss_coef)
  return recipe._replace(entropy_coef=entropy_coeff, **term)


def verl_vanilla(
  *,
  clip_ratio_low: Any = 0.2,
  clip_ratio_high: Any = 0.2,
  clip_ratio_c: Any = 3.0,
  loss_agg_mode: Function = token_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """A mean over all tokens; bounded at ratio 3 for A < 0; no KL; log-ratios clamped to +-20.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_vanilla`.
  """
  surrogate = parts.clip(clip_ratio_low, clip_ratio_high, clip_ratio_c)
  return Recipe(Objective(adv_estimator, parts.TOKEN_20, surrogate, loss_agg_mode))


def verl_gspo(
  *,
  clip_ratio_low: Any = 0.2,
  clip_ratio_high: Any = 0.2,
  loss_agg_mode: Function = sequence_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """GSPO-token at PPO's width of 0.2, its log-ratio at most 10.

  The mean per row is the function's default; a run passes the configuration's token-mean.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_gspo`.
  """
  surrogate = parts.clip(clip_ratio_low, clip_ratio_high)
  return Recipe(Objective(adv_estimator, parts.GSPO_TOKEN_10, surrogate, loss_agg_mode))


def verl_sapo(
  *, tau_pos: Any = 1.0, tau_neg: Any = 1.05, adv_estimator: Function = GRPO_ADVANTAGES
) -> Recipe:
  """A smooth gate in place of the clip; always a mean per row.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_sapo`, which ignores loss_agg_mode.
  """
  surrogate = partial(sapo, tau_pos=tau_pos, tau_neg=tau_neg)
  return Recipe(Objective(adv_estimator, parts.TOKEN_20, surrogate, sequence_mean))


def verl_cispo(
  *,
  clip_ratio_low: Any = 0.2,
  clip_ratio_high: Any = 0.2,
  loss_agg_mode: Function = token_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """The score under a ratio clipped to [0.8, 1.2], both widths from 1; a mean over tokens.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_cispo`.
  """
  surrogate = partial(cispo, clip_low=clip_ratio_low, clip_high=clip_ratio_high)
  return Recipe(Objective(adv_estimator, per_token, surrogate, loss_agg_mode))


def verl_geo_mean(
  *,
  clip_ratio_low: Any = 0.2,
  clip_ratio_high: Any = 0.2,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """GMPO: a geometric mean of ratios clipped in log space, at half the paper's width; per row.

  Rows without a token count in the mean, and loss_agg_mode is ignored.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_geo_mean`.
  """
  surrogate = partial(gmpo, clip_low=clip_ratio_low, clip_high=clip_ratio_high)
  weights = partial(sequence_mean, count_empty=True)
  return Recipe(Objective(adv_estimator, per_token, surrogate, weights))


def verl_dppo_tv(
  *,
  clip_ratio_low: Any = 0.2,
  clip_ratio_high: Any = 0.2,
  clip_ratio_c: Any = 3.0,
  loss_agg_mode: Function = token_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """A band of probability differences, and the ratio, at most 3, as a constant weight.

  The band is around the old policy; the paper's is around the sampler.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_dppo_tv`.
  """
  band = {"clip_low": clip_ratio_low, "clip_high": clip_ratio_high}
  surrogate = partial(dppo_tv, **band, ratio_cap=clip_ratio_c)
  return Recipe(Objective(adv_estimator, per_token, surrogate, loss_agg_mode))


def verl_dppo_kl(
  *,
  clip_ratio_low: Any = 0.2,
  clip_ratio_high: Any = 0.2,
  clip_ratio_c: Any = 3.0,
  loss_agg_mode: Function = token_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """A band of the KL of token against rest, and the ratio, at most 3, as a constant weight.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_dppo_kl`.
  """
  band = {"clip_low": clip_ratio_low, "clip_high": clip_ratio_high}
  surrogate = partial(dppo_kl, **band, ratio_cap=clip_ratio_c)
  return Recipe(Objective(adv_estimator, per_token, surrogate, loss_agg_mode))


def verl_gpg(
  *, loss_agg_mode: Function = token_mean, adv_estimator: Function = GPG_ADVANTAGES
) -> Recipe:
  """No ratio: the score, under centred rewards times samples over rewards that are not 0.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_gpg`, `compute_gpg_outcome_advantage`.
  """
  return Recipe(Objective(adv_estimator, per_token, reinforce, loss_agg_mode))


def verl_dro(
  *,
  dro_beta: Any,
  loss_agg_mode: Function = token_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """The score, and a quadratic pull to the old policy per token in place of the clip.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_dro`; dro_beta has no default.
  """
  surrogate = partial(dro, beta=dro_beta)
  return Recipe(Objective(adv_estimator, per_token, surrogate, loss_agg_mode))


def verl_clip_cov(
  *,
  clip_ratio_low: Any = 0.2,
  clip_ratio_high: Any = 0.2,
  clip_cov_ratio: Any = 2e-4,
  clip_cov_lb: Any = 1.0,
  clip_cov_ub: Any = 5.0,
  loss_agg_mode: Function = token_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """Random tokens of high covariance are left out, at least one; a mean over all tokens.

  verl selects in each micro-batch; `Recipe.selection` takes a random key.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_clip_cov`.
  """
  band = {"clip_low": clip_ratio_low, "clip_high": clip_ratio_high}
  bounds = {"cov_low": clip_cov_lb, "cov_high": clip_cov_ub}
  objective = Objective(adv_estimator, per_token, partial(clip_cov, **band), loss_agg_mode)
  selection = partial(clip_cov_selection, fraction=clip_cov_ratio, **bounds, **band)
  return Recipe(objective, selection=selection)


def verl_kl_cov(
  *,
  kl_cov_ratio: Any = 2e-4,
  ppo_kl_coef: Any = 0.1,
  loss_agg_mode: Function = token_mean,
  adv_estimator: Function = GRPO_ADVANTAGES,
) -> Recipe:
  """No clip; the tokens of highest covariance, at least one, pay for their log-ratio; per token.

  verl selects in each micro-batch.

  Source: verl 0.9.1, `core_algos.compute_policy_loss_kl_cov`.
  """
  objective = Objective(
    adv_estimator, per_token, partial(kl_cov, kl_coef=ppo_kl_coef), loss_agg_mode
  )
  return Recipe(objective, selection=partial(kl_cov_selection, fraction=kl_cov_ratio))
