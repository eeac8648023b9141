r"""The preference losses of TRL 1.16.0, OpenRLHF 0.11.2, Liger-Kernel 0.8.5 and Tunix 0.1.7.

  recipe = trl_simpo()
  chosen, rejected = (recipe.score(logprobs[x], mask[x]) for x in ("chosen", "rejected"))
  loss = recipe.loss_coef * recipe.loss(chosen, rejected).mean()
  loss += recipe.nll_coef * nll  # of the chosen responses, a mean over their tokens

Most loss types of TRL's and Liger's DPO are functions of `rl` at beta 0.1 and need no preset:
hinge `hinge_dpo_loss`, exo_pair `exo_loss`, robust `robust_dpo_loss`, nca_pair `nca_loss`, bco_pair
`bco_pair_loss`, sppo_hard `sppo_loss`, apo_zero `apo_zero_loss`, apo_down `apo_down_loss`, discopop
`discopop_loss`, aot `aot_loss`. Those here are the names whose meaning differs between libraries.

Arguments:
  beta: strength of the pull to the reference; in ORPO the weight of the preference half.
  label_smoothing: rate of flipped labels.
  ipo: the loss is IPO's.
  gamma, simpo_gamma: target margin of SimPO.
  alpha, cpo_alpha: weight of the likelihood of the chosen response.
  nll_loss_coef: the same, of OpenRLHF.
  lambda_orpo: weight of the preference half.
  desirable_weight, undesirable_weight: of the two classes of KTO.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxrl_lm.logprobs import mean_logprob, sequence_logprob
from jaxrl_lm.preferences import (
  conservative_dpo_loss,
  dpo_loss,
  ipo_loss,
  mean_log_ratio,
  sequence_log_ratio,
)
from jaxrl_lm.reference_free import orpo_loss, simpo_loss
from jaxrl_lm.unpaired_preferences import kto_loss


class PreferenceRecipe(NamedTuple):
  """A library's preference loss: the score of a response, the loss of scores, two weights.

  Attributes:
    score: log-probs (and those of the reference) and a mask -> one number per response.
    loss: (chosen, rejected) -> loss per pair; of KTO (log_ratio, desirable, *, baseline).
    loss_coef: weight of the mean of the losses.
    nll_coef: weight of the negative log-likelihood of the chosen responses.
  """

  score: Callable[..., jax.Array]
  loss: Callable[..., jax.Array]
  loss_coef: Any = 1.0
  nll_coef: Any = 0.0


def trl_dpo(*, beta: Any = 0.1) -> PreferenceRecipe:
  """DPO of sums; label_smoothing has no effect.

  Source: TRL 1.16.0, `DPOTrainer._compute_loss`, loss_type="sigmoid".
  """
  return PreferenceRecipe(sequence_log_ratio, partial(dpo_loss, beta=beta))


def trl_ipo(*, beta: Any = 0.1) -> PreferenceRecipe:
  """IPO of means per token: the optimal margin grows with the length.

  Source: TRL 1.16.0, `DPOTrainer._compute_loss`, loss_type="ipo".
  """
  return PreferenceRecipe(mean_log_ratio, partial(ipo_loss, beta=beta))


def trl_kto(
  *, beta: Any = 0.1, desirable_weight: Any = 1.0, undesirable_weight: Any = 1.0
) -> PreferenceRecipe:
  """KTO; its `baseline` is `kto_baseline`, 0 for loss_type="apo_zero_unpaired".

  Source: TRL 1.16.0, `KTOTrainer._compute_loss`.
  """
  weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
  return PreferenceRecipe(sequence_log_ratio, partial(kto_loss, beta=beta, **weights))


def trl_cpo(
  *, beta: Any = 0.1, label_smoothing: Any = 0.0, cpo_alpha: Any = 1.0
) -> PreferenceRecipe:
  """CPO of sums, with smoothed labels, plus the likelihood of chosen.

  Source: TRL 1.16.0, `experimental.cpo.CPOTrainer.cpo_loss`, loss_type="sigmoid".
  """
  loss = partial(conservative_dpo_loss, beta=beta, label_smoothing=label_smoothing)
  return PreferenceRecipe(sequence_logprob, loss, nll_coef=cpo_alpha)


def trl_simpo(*, beta: Any = 0.1, simpo_gamma: Any = 0.5, cpo_alpha: Any = 1.0) -> PreferenceRecipe:
  """SimPO with a likelihood term that the paper does not have, at a twentieth of its beta.

  The margin is that of the rewards, not over beta. cpo_alpha=0 is the paper's loss.

  Source: TRL 1.16.0, `experimental.cpo.CPOTrainer.cpo_loss`, loss_type="simpo".
  """
  loss = partial(simpo_loss, beta=beta, gamma=simpo_gamma)
  return PreferenceRecipe(mean_logprob, loss, nll_coef=cpo_alpha)


def trl_orpo(*, beta: Any = 0.1) -> PreferenceRecipe:
  """ORPO of means; beta is the paper's lambda.

  Source: TRL 1.16.0, `experimental.orpo.ORPOTrainer.odds_ratio_loss`, whose sign is the opposite.
  """
  return PreferenceRecipe(mean_logprob, orpo_loss, loss_coef=beta, nll_coef=1.0)


def openrlhf_dpo(
  *,
  beta: Any = 0.1,
  label_smoothing: Any = 0.0,
  ipo: bool = False,
  nll_loss_coef: Any = 0.0,
) -> PreferenceRecipe:
  """DPO with smoothed labels (cDPO), or IPO, both of sums.

  Source: OpenRLHF 0.11.2, `models.loss.DPOLoss`.
  """
  loss: Any = partial(conservative_dpo_loss, beta=beta, label_smoothing=label_smoothing)
  if ipo:
    loss = partial(ipo_loss, beta=beta)
  return PreferenceRecipe(sequence_log_ratio, loss, nll_coef=nll_loss_coef)


def liger_dpo(*, beta: Any = 0.1) -> PreferenceRecipe:
  """DPO of sums; label_smoothing has no effect, and IPO is an error.

  Source: Liger-Kernel 0.8.5, `LigerFusedLinearDPOFunction.preference_loss_fn`.
  """
  return PreferenceRecipe(sequence_log_ratio, partial(dpo_loss, beta=beta))


def liger_cpo(*, beta: Any = 0.1, label_smoothing: Any = 0.0, alpha: Any = 1.0) -> PreferenceRecipe:
  """CPO of sums, with smoothed labels, plus the likelihood of chosen.

  Source: Liger-Kernel 0.8.5, `LigerFusedLinearCPOFunction.preference_loss_fn`.
  """
  loss = partial(conservative_dpo_loss, beta=beta, label_smoothing=label_smoothing)
  return PreferenceRecipe(sequence_logprob, loss, nll_coef=alpha)


def liger_simpo(*, beta: Any = 0.1, gamma: Any = 0.5, alpha: Any = 1.0) -> PreferenceRecipe:
  """SimPO with a likelihood term that the paper does not have, at a twentieth of its beta.

  Source: Liger-Kernel 0.8.5, `LigerFusedLinearSimPOFunction.preference_loss_fn`.
  """
  return PreferenceRecipe(mean_logprob, partial(simpo_loss, beta=beta, gamma=gamma), nll_coef=alpha)


def liger_orpo(*, beta: Any = 0.1) -> PreferenceRecipe:
  """ORPO of means; beta is the paper's lambda. NaN there for a log-prob of 0.

  Source: Liger-Kernel 0.8.5, `LigerFusedLinearORPOFunction.preference_loss_fn`.
  """
  return PreferenceRecipe(mean_logprob, orpo_loss, loss_coef=beta, nll_coef=1.0)


def liger_kto(*, beta: Any = 0.1) -> PreferenceRecipe:
  """KTO without class weights; `baseline` is the given KL, or 0.

  Source: Liger-Kernel 0.8.5, `LigerFusedLinearKTOFunction.preference_loss_fn`.
  """
  return PreferenceRecipe(sequence_log_ratio, partial(kto_loss, beta=beta))


def tunix_dpo(*, beta: Any = 0.1, label_smoothing: Any = 0.0) -> PreferenceRecipe:
  """DPO with smoothed labels (cDPO), of sums.

  Source: Tunix 0.1.7, `sft.dpo.dpo_trainer.dpo_loss_fn`, algorithm="dpo".
  """
  loss = partial(conservative_dpo_loss, beta=beta, label_smoothing=label_smoothing)
  return PreferenceRecipe(sequence_log_ratio, loss)


def tunix_orpo(*, lambda_orpo: Any = 0.1, label_smoothing: Any = 0.0) -> PreferenceRecipe:
  """ORPO with the odds of whole sequences, which all vanish, and smoothed labels.

  The likelihood is a mean per response, then over responses.

  Source: Tunix 0.1.7, `sft.dpo.dpo_trainer.dpo_loss_fn`, algorithm="orpo".
  """
  loss = partial(_smoothed_orpo, label_smoothing)
  return PreferenceRecipe(sequence_logprob, loss, loss_coef=lambda_orpo, nll_coef=1.0)


def _smoothed_orpo(e: Any, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
  return (1.0 - e) * orpo_loss(chosen, rejected) + e * orpo_loss(rejected, chosen)
