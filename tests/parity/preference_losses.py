"""Critics, reward models and preference losses of five libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from tests.parity.policy_losses import Arrays, token_mean
from tests.parity.records import Record
from tests.parity.verl_losses import verl_reduced

Pairwise = Callable[..., jax.Array]

PAIRED: dict[str, Pairwise] = {
  "sigmoid": rl.dpo_loss,
  "sigmoid_norm": rl.dpo_loss,
  "hinge": rl.hinge_dpo_loss,
  "ipo": rl.ipo_loss,
  "exo_pair": rl.exo_loss,
  "robust": rl.robust_dpo_loss,
  "nca_pair": rl.nca_loss,
  "bco_pair": rl.bco_pair_loss,
  "sppo_hard": rl.sppo_loss,
  "apo_zero": rl.apo_zero_loss,
  "apo_down": rl.apo_down_loss,
  "discopop": rl.discopop_loss,
  "aot": rl.aot_loss,
  "aot_unpaired": rl.aot_unpaired_loss,
}
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # the others ignore label_smoothing
PER_TOKEN = ("ipo", "sigmoid_norm")


def gradients(loss: Callable[..., jax.Array], **inputs: Any) -> Arrays:
  """The loss, and the gradient of its sum in every input by name."""

  def total(arrays: Any) -> tuple[jax.Array, jax.Array]:
    value = loss(**arrays)
    return jnp.sum(value), value

  arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
  (_, value), pulled = jax.value_and_grad(total, has_aux=True)(arrays)
  return {"loss": value, **{f"grad_{name}": x for name, x in pulled.items()}}


# Of token log-probs: rows [0, B / 2) are chosen, [B / 2, B) rejected.


def halves(record: Record, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  count = record.rows // 2
  return rows[:count], rows[count : 2 * count]


def score(settings: Any) -> Callable[[jax.Array], jax.Array]:
  """What TRL's f_divergence_type puts in the place of the log-ratio."""
  kind = settings.get("f_divergence_type", "reverse_kl")
  if kind == "js_divergence":
    return rl.jensen_shannon_score
  coefficient = settings.get("f_alpha_divergence_coef", 0.5)
  alpha = {"reverse_kl": 0.0, "forward_kl": 1.0, "alpha_divergence": 1.0 - coefficient}[kind]
  return partial(rl.alpha_divergence_score, alpha=alpha)


def trl_dpo(record: Record) -> Arrays:
  s = record.settings
  types = [s["loss_type"]] if isinstance(s["loss_type"], str) else s["loss_type"]
  weights = s.get("loss_weights", [1.0] * len(types))

  def loss(logps: jax.Array) -> jax.Array:
    terms = [trl_dpo_term(record, kind, logps) for kind in types]
    return sum(weight * jnp.mean(term) for weight, term in zip(weights, terms))

  return gradients(loss, logps=record.inputs["logps"])


def trl_dpo_term(record: Record, kind: str, logps: jax.Array) -> jax.Array:
  """One loss type, per pair (sft: of the batch)."""
  s, x = record.settings, record.inputs
  mask, ref = jnp.asarray(x["mask"]), jnp.asarray(x["ref_logps"])
  count = record.rows // 2
  if kind == "sft":
    return -jnp.sum(token_mean(x["mask"][:count]) * rl.zero_masked(logps[:count], mask[:count]))
  constants = {"beta": s["beta"]}
  if kind in SMOOTHED:
    constants["label_smoothing"] = s.get("label_smoothing", 0.0)
  if kind == "discopop":
    constants["tau"] = s["discopop_tau"]
  if kind == "aot":  # margins of each policy
    pair = [
      chosen - rejected
      for chosen, rejected in (halves(record, rl.sequence_logprob(y, mask)) for y in (logps, ref))
    ]
  else:
    log_ratio = rl.token_log_ratio(logps, ref, mask)
    if s.get("ld_alpha") is not None:
      shared = jnp.minimum(*halves(record, rl.lengths(mask)))
      shared = jnp.pad(jnp.tile(shared, 2), (0, mask.shape[0] - 2 * count))
      log_ratio *= rl.length_desensitized_weights(mask, shared, alpha=s["ld_alpha"])
    total = rl.mean_logprob if kind in PER_TOKEN else rl.sequence_logprob
    pair = [score(s)(y) for y in halves(record, total(log_ratio, mask))]
  loss = PAIRED[kind](*pair, **constants)
  if s.get("use_weighting"):  # recorded with log sum p^2 = -1
    chosen, rejected = halves(record, rl.wpo_weights(logps, jnp.full(mask.shape, -1.0), mask))
    loss = loss * chosen * rejected
  return loss


def trl_kto(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  mask, ref = jnp.asarray(x["mask"]), jnp.asarray(x["ref_logps"])
  baseline: Any = 0.0
  if s["loss_type"] == "kto":
    baseline = rl.kto_baseline(jnp.asarray(x["KL_logps"] - x["ref_KL_logps"]))
  constants = {k: s[k] for k in ("beta", "desirable_weight", "undesirable_weight")}

  def loss(logps: jax.Array) -> jax.Array:
    log_ratio = rl.sequence_log_ratio(logps, ref, mask)[: record.rows]
    return jnp.mean(rl.kto_loss(log_ratio, x["label"] > 0, baseline=baseline, **constants))

  return gradients(loss, logps=x["logps"])


def tunix_dpo(record: Record) -> Arrays:
  """Its orpo has the odds of the whole sequence, and a likelihood per token."""
  s, x = record.settings, record.inputs
  mask, ref = jnp.asarray(x["mask"]), jnp.asarray(x["ref_logps"])
  e = s.get("label_smoothing", 0.0)

  def loss(logps: jax.Array) -> jax.Array:
    if s["algorithm"] == "dpo":
      pair = halves(record, rl.sequence_log_ratio(logps, ref, mask))
      return jnp.mean(rl.conservative_dpo_loss(*pair, beta=s["beta"], label_smoothing=e))
    chosen, rejected = halves(record, rl.sequence_logprob(logps, mask))
    odds = (1 - e) * rl.orpo_loss(chosen, rejected) + e * rl.orpo_loss(rejected, chosen)
    likelihood = halves(record, rl.mean_logprob(logps, mask))[0]
    return jnp.mean(s["lambda_orpo"] * odds - likelihood)

  return gradients(loss, logps=x["logps"])


# Of log-probs of sequences.


def trl_cpo(record: Record) -> Arrays:
  """TRL's alpha of SimPO is AlphaPO's."""
  s, x = record.settings, record.inputs
  chosen, rejected = x["chosen_logps"], x["rejected_logps"]

  def losses(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    pair = [rl.alpha_divergence_score(y, alpha=s["alpha"]) for y in (chosen, rejected)]
    if s["loss_type"] == "simpo":
      return rl.simpo_loss(*pair, beta=s["beta"], gamma=s["simpo_gamma"])
    if s["loss_type"] == "sigmoid":
      return rl.conservative_dpo_loss(*pair, beta=s["beta"], label_smoothing=s["label_smoothing"])
    return PAIRED[s["loss_type"]](*pair, beta=s["beta"])

  out = gradients(losses, chosen=chosen, rejected=rejected)
  score = partial(rl.alpha_divergence_score, alpha=s["alpha"])
  rewards = {
    name: s["beta"] * score(jnp.asarray(y))
    for name, y in (("chosen_rewards", chosen), ("rejected_rewards", rejected))
  }
  return out | {"losses": out["loss"]} | rewards


def trl_orpo(record: Record) -> Arrays:
  """It returns the negative, and the trainer subtracts it."""
  beta, x = record.settings["beta"], record.inputs
  pair = {"chosen": x["chosen_logps"], "rejected": x["rejected_logps"]}
  out = gradients(lambda chosen, rejected: -beta * rl.orpo_loss(chosen, rejected), **pair)
  chosen, rejected = (jnp.asarray(y) for y in pair.values())
  loss, flipped = rl.orpo_loss(chosen, rejected), rl.orpo_loss(rejected, chosen)
  # log(1 + e^x) - log(1 + e^-x) = x
  odds = {"mean_ratio": jnp.mean(-loss), "mean_log_odds": jnp.mean(flipped - loss)}
  return out | {"losses": out["loss"]} | odds


def paired_logprobs(record: Record) -> Arrays:
  """OpenRLHF's and Liger's DPO, CPO, SimPO and ORPO."""
  s, x, name = record.settings, record.inputs, record.function
  beta, e = s["beta"], s.get("label_smoothing", 0.0)
  kind = s.get("loss_type", "ipo" if s.get("ipo") else "sigmoid")
  ref = [x.get(f"ref_{side}_logps", 0.0) for side in ("chosen", "rejected")]

  def loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    chosen, rejected = chosen - ref[0], rejected - ref[1]
    if "ORPO" in name:
      return beta * jnp.mean(rl.orpo_loss(chosen, rejected))
    if kind == "sigmoid":  # cpo and simpo too
      chosen = chosen - s.get("gamma", 0.0) / beta
      return jnp.mean(rl.conservative_dpo_loss(chosen, rejected, beta=beta, label_smoothing=e))
    constants = {"label_smoothing": e} if kind in SMOOTHED else {}
    return jnp.mean(PAIRED[kind](chosen, rejected, beta=beta, **constants))

  pair = {"chosen": x["chosen_logps"], "rejected": x["rejected_logps"]}
  rewards = {
    f"{side}_rewards": beta * (y - r) for (side, y), r in zip(pair.items(), ref, strict=True)
  }
  return gradients(loss, **pair) | rewards


def liger_kto(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  beta, desirable = s["beta"], x["label"] > 0
  baseline = 0.0 if s["kl"] is None else s["kl"][0]

  def loss(logps: jax.Array) -> jax.Array:
    losses = rl.kto_loss(logps - x["ref_logps"], desirable, baseline=baseline, beta=beta)
    return jnp.mean(losses)

  rewards = beta * (x["logps"] - x["ref_logps"])
  sums = {
    "chosen_rewards_sum": np.sum(rewards[desirable]),
    "rejected_rewards_sum": np.sum(rewards[~desirable]),
  }
  return gradients(loss, logps=x["logps"]) | sums


# Reward models, critics, likelihood.


def trl_reward_model(record: Record) -> Arrays:
  x, coefficient = record.inputs, record.settings["center_rewards_coefficient"] or 0.0

  def loss(rewards_chosen: jax.Array, rewards_rejected: jax.Array) -> jax.Array:
    pair = rewards_chosen, rewards_rejected
    losses = rl.bradley_terry_loss(*pair, margin=x.get("margin"))
    return jnp.mean(losses + coefficient * rl.reward_centering_loss(*pair))

  return gradients(loss, **{k: x[k] for k in ("rewards_chosen", "rewards_rejected")})


def openrlhf_reward_model(record: Record) -> Arrays:
  x = record.inputs

  def loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    return jnp.mean(rl.bradley_terry_loss(chosen, rejected, margin=x.get("margin")))

  return gradients(loss, chosen=x["chosen_reward"], rejected=x["reject_reward"])


def openrlhf_likelihood(record: Record) -> Arrays:
  """Labels of -100 do not count; the first token is not scored."""
  labels = record.inputs["labels"]
  mask = labels != -100
  mask[:, 0] = False

  def loss(logits: jax.Array) -> jax.Array:
    logprobs = rl.next_token_logprobs(logits, labels, mask=mask)
    return jnp.sum(token_mean(mask) * rl.sft_loss(logprobs, mask))

  return gradients(loss, logits=record.inputs["logits"])


def critic(record: Record) -> Arrays:
  """verl's, OpenRLHF's and Tunix's value loss."""
  s, x = record.settings, record.inputs
  clip = next((s[k] for k in ("cliprange_value", "clip_eps", "clip_range_value") if k in s), None)
  by_token = "token-mean" if s.get("token_level_loss", True) else "seq-mean-token-mean"
  weights = jnp.asarray(verl_reduced(record, s.get("loss_agg_mode", by_token), {}))
  mask, returns = jnp.asarray(x["mask"]), jnp.asarray(x["returns"])

  def loss(values: jax.Array) -> jax.Array:
    if clip is None:
      losses = rl.value_loss(values, returns, mask)
    else:
      losses = rl.clipped_value_loss(values, x["old_values"], returns, mask, clip=clip)
    return jnp.sum(weights * losses[: weights.shape[0], : weights.shape[1]])

  out = gradients(loss, values=x["values"])
  if clip is not None:
    fraction = rl.value_clip_fraction(x["values"], x["old_values"], returns, mask, clip=clip)
    out |= {"vf_clipfrac": fraction.mean()}
  return out
