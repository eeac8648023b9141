"""Every peer's function by name -> what computes the same from `jaxrl_lm`.

A composition is the function that maps a record to our outputs, one line that says how it
reads, and how close float64 must come: 1e-9, or 1e-7 where the peer adds 1e-8 to a
denominator or clamps a log-ratio that ours lets be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jaxrl_lm as rl
from tests.parity import distillation_losses as distillation
from tests.parity import estimators as est
from tests.parity import other_losses as other
from tests.parity import preference_losses as preference
from tests.parity import token_terms as term
from tests.parity import trl_losses as trl
from tests.parity import verl_losses as verl
from tests.parity.records import Record

EXACT, LOOSE, SINGLE = 1e-9, 1e-7, 2e-5


@dataclass(frozen=True)
class Composition:
  run: Callable[[Record], Mapping[str, Any]]
  reads: str
  rtol: float = EXACT

  def tolerance(self, record: Record) -> float:
    return SINGLE if record.dtype == "float32" else self.rtol


# What has no counterpart here, by function.
NO_FUNCTION = {
  "rlax.vtrace": "V-trace",
  "rlax.vtrace_td_error_and_advantage": "V-trace",
  "rlax.leaky_vtrace": "V-trace",
  "rlax.n_step_bootstrapped_returns": "n-step returns",
  "core_algos.compute_optimal_token_baseline_advantage": "optimal token baseline",
  "core_algos.compute_multi_turn_optimal_token_baseline_advantage": "optimal token baseline",
  "LigerFusedLinearCosineSimilarityFunction.distillation_loss_fn": "cosine similarity",
}


def of(record: Record) -> Composition | None:
  """The composition of a record; None where there is no function here."""
  if record.function in NO_FUNCTION:
    return None
  table = TABLE[record.peer]
  for key in (f"{record.function}/{record.objective}", record.function, record.objective):
    if key in table:
      return table[key]
  raise KeyError(f"{record.id}: no composition of {record.function} / {record.objective}")


VERL_GROUP = "(raw reward in a group of one) "
VERL_LOSS = "-Σ weights · is_weights · "
VERL = {
  "vanilla": Composition(verl.verl_policy, VERL_LOSS + "`dual_clip` at `clamped(per_token, ±20)`"),
  "gspo": Composition(
    verl.verl_policy,
    VERL_LOSS + "`ppo_clip` at `clamped(with_token_gradient(per_sequence_geometric), max 10)`",
  ),
  "sapo": Composition(
    verl.verl_policy, VERL_LOSS + "`sapo` at `clamped(per_token, ±20)`, always `sequence_mean`"
  ),
  "cispo": Composition(verl.verl_policy, VERL_LOSS + "`cispo`", LOOSE),
  "geo_mean": Composition(
    verl.verl_policy, VERL_LOSS + "`gmpo`, always `sequence_mean(count_empty=True)`", LOOSE
  ),
  "dppo_tv": Composition(verl.verl_policy, VERL_LOSS + "`dppo_tv`", LOOSE),
  "dppo_kl": Composition(verl.verl_policy, VERL_LOSS + "`dppo_kl`", LOOSE),
  "core_algos.compute_policy_loss_gpg": Composition(verl.verl_policy, VERL_LOSS + "`reinforce`"),
  "dro": Composition(verl.verl_policy, VERL_LOSS + "`dro`"),
  "clip_cov": Composition(
    verl.verl_policy, VERL_LOSS + "`clip_cov(selected=clip_cov_selection(...))`"
  ),
  "kl_cov": Composition(verl.verl_policy, VERL_LOSS + "`kl_cov(selected=kl_cov_selection(...))`"),
  "bypass_mode": Composition(
    verl.verl_bypass,
    "vanilla, or `reinforce` with `truncated` weights, the sampler as the old policy and "
    "`token_mean` of the kept tokens",
  ),
  "vanilla+kl+entropy": Composition(
    verl.verl_combined,
    "vanilla with `kl`, `kl_coef`, `entropy`, `entropy_coef`",
  ),
  "core_algos.kl_penalty": Composition(
    term.verl_kl,
    "`kl_k1`, `kl_k2`, `kl_abs`, clip(`kl_k3`, ±10); with +, `with_reverse_kl_gradient` of it",
  ),
  "core_algos.agg_loss": Composition(term.verl_reduction, "Σ weights · loss"),
  "core_algos.compute_entropy_loss": Composition(
    term.verl_entropy_loss, "Σ weights · `token_entropy`"
  ),
  "torch_functional.entropy_from_logits": Composition(term.verl_entropy, "`token_entropy`"),
  "logprobs": Composition(term.verl_logprobs, "`token_logprobs`"),
  "sum_pi_squared": Composition(
    term.verl_sum_pi_squared, "Σ_v exp(2 · `token_logprobs` of token v)"
  ),
  "masked_stats": Composition(
    est.verl_masked_stats, "`masked_moments`, `whiten`, `masked_mean`", LOOSE
  ),
  "rollout_correction": Composition(
    term.verl_rollout_correction,
    "`truncated` or `banded` at `clamped(level, ±20)`, `self_normalised`; `rejected` of `kl_k1`, "
    "`kl_k2` or `kl_k3`, at `per_token`, `per_sequence`, `per_sequence_geometric` or `segment_max`",
  ),
  "grpo": Composition(est.verl_grpo, VERL_GROUP + "`group_normalized` or `group_centered`"),
  "grpo_vectorized": Composition(
    est.verl_grpo, VERL_GROUP + "`group_normalized` or `group_centered`", SINGLE
  ),
  "grpo_passk": Composition(est.verl_passk, "`pass_at_k(k=G)` / G, over the group's std"),
  "gdpo": Composition(
    est.verl_gdpo,
    "`whiten` over tokens of Σ_k weight · " + VERL_GROUP + "`group_normalized`",
    LOOSE,
  ),
  "rloo": Composition(est.verl_rloo, VERL_GROUP + "`leave_one_out`"),
  "rloo_vectorized": Composition(est.verl_rloo_vectorized, "`leave_one_out`"),
  "opo": Composition(est.verl_opo, VERL_GROUP + "`length_weighted_baseline`"),
  "core_algos.compute_gpg_outcome_advantage": Composition(
    est.verl_gpg, "B / #nonzero rewards · " + VERL_GROUP + "`group_centered`"
  ),
  "reinforce_plus_plus": Composition(est.verl_reinforce_pp, "`whiten(discounted_returns)`", LOOSE),
  "reinforce_plus_plus_baseline": Composition(
    est.verl_reinforce_pp_baseline,
    "`whiten` over tokens of " + VERL_GROUP + "`group_centered`",
    LOOSE,
  ),
  "remax": Composition(est.verl_remax, "`discounted_returns` - baseline"),
  "gae": Composition(est.verl_gae, "`whiten(gae)`; returns = `gae` + values", LOOSE),
}

TRL_LOSS = "-Σ weights · factor · "
TRL_LEVEL = " at `per_token` or `per_sequence_geometric`"
TRL = {
  "grpo/grpo": Composition(trl.trl_policy, TRL_LOSS + "`ppo_clip` or `dual_clip`" + TRL_LEVEL),
  "grpo/bnpo": Composition(trl.trl_policy, TRL_LOSS + "`ppo_clip`" + TRL_LEVEL),
  "grpo/dr_grpo": Composition(trl.trl_policy, TRL_LOSS + "`ppo_clip`" + TRL_LEVEL),
  "grpo/dapo": Composition(trl.trl_policy, TRL_LOSS + "`ppo_clip` or `dual_clip`" + TRL_LEVEL),
  "grpo/luspo": Composition(trl.trl_policy, TRL_LOSS + "`ppo_clip` or `dual_clip`" + TRL_LEVEL),
  "grpo/sapo": Composition(trl.trl_policy, TRL_LOSS + "`sapo`" + TRL_LEVEL),
  "grpo/cispo": Composition(
    trl.trl_policy,
    TRL_LOSS + "`cispo` at `per_token` or `with_token_gradient(per_sequence_geometric)`",
  ),
  "grpo/vespo": Composition(
    trl.trl_policy,
    TRL_LOSS + "`vespo` at `with_token_gradient(clamped(per_sequence, log 1e-8, 20))` of "
    "`clamped(per_token, ±20)`",
  ),
  "gmpo": Composition(trl.trl_gmpo, "-Σ `sequence_mean(count_empty=True)` · `gmpo`"),
  "rloo": Composition(
    trl.trl_rloo, "-Σ `sequence_mean(count_empty=True)` · `ppo_clip` at `per_sequence`"
  ),
  "grpo_advantages": Composition(
    est.trl_grpo,
    "`group_normalized`, `batch_scaled` (eps=1e-4) or `group_centered`; normalize_then_sum: "
    "`multi_reward_normalized`, then `group_normalized` with the batch as one group",
  ),
  "rloo_advantages": Composition(
    est.trl_rloo,
    "`leave_one_out` of clip(rewards) - beta Σ `kl_k1`; normalize_advantages: then "
    "`group_normalized` with the batch as one group",
  ),
  "vllm_is_ratio": Composition(
    term.trl_sampler_ratio, "`truncated` or `banded` at `per_token` or `per_sequence`"
  ),
}

LIGER = {
  **{key: value for key, value in TRL.items() if key.startswith("grpo/")},
  "LigerFusedLinearGRPOLoss": Composition(
    trl.liger_fused, "as above, of `token_logprobs(hidden @ weight.T)`"
  ),
}

OPENRLHF = {
  "models.loss.PolicyLoss": Composition(
    other.openrlhf_policy,
    "-Σ weights · factor · `ppo_clip` or `dual_clip` of "
    "`clamped(per_token, ±20)` or `per_sequence_geometric`",
    LOOSE,
  ),
  "models.utils.compute_approx_kl": Composition(
    term.openrlhf_kl,
    "`clip(kl_k*, ±10)`; unbiased_gradient: that value, `truncated(cap=10)` · the "
    "gradient of `with_reverse_kl_gradient`",
  ),
  "RemoteExperienceMaker.compute_advantages_and_returns": Composition(
    est.openrlhf,
    "a group estimator, `terminal_rewards`, `kl_shaped_rewards`, "
    "`discounted_returns` or `gae` with a mask of ones, `whiten(ddof=0)`",
    LOOSE,
  ),
}

TUNIX = {
  "rl.algo_core.grpo_loss_fn": Composition(
    other.tunix_grpo,
    "-Σ weights · `ppo_clip` or `dual_clip` of `clamped(per_token, ±20)`, or of "
    "`clamped(with_token_gradient(per_sequence_geometric), max 10)`",
  ),
  "rl.algo_core.ppo_policy_loss_fn": Composition(
    other.tunix_ppo, "-Σ `token_mean` · `ppo_clip` or `dual_clip`", LOOSE
  ),
  "rl.common.aggregate_loss": Composition(term.tunix_reduction, "Σ weights · loss"),
  "rl.common.compute_kl_divergence": Composition(term.tunix_kl, "`kl_k1`, `kl_k2`, `kl_k3`"),
  "adv/grpo": Composition(
    lambda r: est.tunix_group(r, partial(rl.group_normalized, ddof=1, eps=1e-6)),
    "`group_normalized`",
  ),
  "adv/rloo": Composition(lambda r: est.tunix_group(r, rl.leave_one_out), "`leave_one_out`"),
  "adv/drgrpo": Composition(lambda r: est.tunix_group(r, rl.group_centered), "`group_centered`"),
  "adv/gae": Composition(est.tunix_gae, "`whiten(gae)`; returns = `gae` + values", LOOSE),
}

RLAX = {
  "gae": Composition(est.rlax_advantages, "`gae(bootstrap_value)`, a discount of 0 ends a segment"),
  "lambda_returns": Composition(est.rlax_lambda_returns, "`gae(bootstrap_value)` + values"),
  "discounted_returns": Composition(
    est.rlax_lambda_returns, "`gae(gae_lambda=1, bootstrap_value)` + values"
  ),
  "ppo_clip": Composition(other.rlax_ppo, "-Σ `token_mean` · `ppo_clip`, mask of ones"),
  "pg": Composition(term.rlax_policy_gradient, "-Σ `token_mean` · weight · `reinforce`"),
  "entropy": Composition(term.rlax_entropy, "-Σ `token_mean` · weight · `token_entropy`"),
}

PAIR_LOSS = "mean of "
PAIRS_OF_SEQUENCES = Composition(
  preference.paired_logprobs,
  PAIR_LOSS + "`conservative_dpo_loss` or the loss of its name, of log-prob minus reference; "
  "SimPO: of chosen - gamma / beta; ORPO: beta · `orpo_loss`",
  LOOSE,
)
VERL["core_algos.compute_value_loss"] = Composition(
  preference.critic, "Σ weights · `clipped_value_loss`; `value_clip_fraction`", LOOSE
)
TRL |= {
  "DPOTrainer._compute_loss": Composition(
    preference.trl_dpo,
    PAIR_LOSS + "the loss of its name, of `sequence_log_ratio`; ipo, sigmoid_norm: of "
    "`mean_log_ratio`; f_divergence_type: of its score; use_weighting: times `wpo_weights`",
  ),
  "KTOTrainer._compute_loss": Composition(
    preference.trl_kto,
    PAIR_LOSS + "`kto_loss(baseline=kto_baseline)`; apo_zero_unpaired: `baseline=0`",
  ),
  "CPOTrainer.cpo_loss": Composition(
    preference.trl_cpo,
    "`simpo_loss`, `conservative_dpo_loss`, `hinge_dpo_loss` or `ipo_loss` of log-probs; alpha: of "
    "`alpha_divergence_score` of them",
  ),
  "ORPOTrainer.odds_ratio_loss": Composition(preference.trl_orpo, "-beta · `orpo_loss`"),
  "RewardTrainer.compute_loss": Composition(
    preference.trl_reward_model,
    PAIR_LOSS + "`bradley_terry_loss` + coefficient · `reward_centering_loss`",
  ),
}
LIGER |= {
  **{
    f"LigerFusedLinear{name}Function.preference_loss_fn": PAIRS_OF_SEQUENCES
    for name in ("DPO", "CPO", "SimPO", "ORPO")
  },
  "LigerFusedLinearKTOFunction.preference_loss_fn": Composition(
    preference.liger_kto, PAIR_LOSS + "`kto_loss(baseline=kl)`"
  ),
}
OPENRLHF |= {
  "models.loss.DPOLoss": PAIRS_OF_SEQUENCES,
  **{
    f"models.loss.{name}": Composition(
      preference.openrlhf_reward_model, PAIR_LOSS + "`bradley_terry_loss`"
    )
    for name in ("PairWiseLoss", "LogExpLoss")
  },
  "models.loss.GPTLMLoss": Composition(
    preference.openrlhf_likelihood, "Σ `token_mean` · `sft_loss` of `next_token_logprobs`"
  ),
  "models.loss.ValueLoss": Composition(
    preference.critic, "Σ weights · `clipped_value_loss` or `value_loss`", LOOSE
  ),
}
TUNIX |= {
  "sft.dpo.dpo_trainer.dpo_loss_fn": Composition(
    preference.tunix_dpo,
    PAIR_LOSS + "`conservative_dpo_loss`; orpo: lambda · `orpo_loss` of `sequence_logprob` (both "
    "ways, by label_smoothing) - `mean_logprob` of chosen",
  ),
  "rl.algo_core.ppo_value_loss_fn": Composition(
    preference.critic, "Σ `token_mean` · `clipped_value_loss`", LOOSE
  ),
}

JSD = "`jensen_shannon`; at the ends 0 and 1 `forward_kl` and `exact_kl`"
SDPO = "experimental.sdpo.loss_utils.compute_"
TRL |= {
  "GKDTrainer.generalized_jsd_loss": Composition(distillation.trl_gkd, "Σ weights · " + JSD),
  SDPO + "full_logit_self_distillation_loss": Composition(distillation.trl_self_distillation, JSD),
  SDPO + "topk_self_distillation_loss": Composition(
    distillation.trl_self_distillation,
    JSD + ", of `top_k_with_tail` of the student's ids; add_tail false: without its last bucket",
  ),
}
LIGER["LigerFusedLinearJSDFunction.distillation_loss_fn"] = Composition(
  distillation.liger_jsd, "Σ " + JSD
)
OPENRLHF["models.loss.SFTLoss"] = Composition(
  distillation.openrlhf_sft, "Σ `token_mean` or `sequence_mean` · `sft_loss`", LOOSE
)

TABLE = {
  "verl": VERL,
  "trl": TRL,
  "openrlhf": OPENRLHF,
  "liger": LIGER,
  "tunix": TUNIX,
  "rlax": RLAX,
}
