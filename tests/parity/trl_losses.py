"""The policy losses of TRL and Liger-Kernel, which share their settings."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from tests.parity.policy_losses import (
  GSPO_TOKEN,
  SEQUENCE,
  SUM_20,
  VESPO_SUM,
  Arrays,
  advantages,
  constant_length_of_all,
  objective,
  plain,
  sequence_mean_of_all,
  sequence_sum_of_all,
  sequence_weighted_k3,
  token_mean,
  token_sum,
  token_weighted_k3,
  value_and_gradients,
)
from tests.parity.records import WIDTH, Record, pad

top_entropy_mask = jax.jit(rl.top_entropy_mask)


def trl_weights(record: Record) -> jax.Array:
  """loss_type, with all rows counted, and the division by accumulation steps."""
  s, mask = record.settings, record.mask
  steps = s.get("gradient_accumulation_steps", 1)
  match s["loss_type"]:
    case "grpo" | "sapo":
      weights = sequence_mean_of_all(mask)
    case "luspo":
      weights = sequence_sum_of_all(mask)
    case "bnpo":
      weights = token_mean(mask)
    case "dr_grpo":
      weights = constant_length_of_all(mask, length=s["max_completion_length"])
    case "dapo" | "cispo" | "vespo":
      items = s.get("num_items_in_batch")
      weights = token_mean(mask) if items is None else token_sum(mask) / items
      steps = steps / s.get("steps_per_generation", 1)
  return weights / steps


def trl_policy(record: Record) -> Arrays:
  s, mask = record.settings, record.inputs["mask"]
  weights, slots = trl_weights(record), trl_slots(record)
  if not s.get("entropy_coef"):
    return objective(record, weights=weights, **slots)
  # The bonus is averaged over its own tokens, whatever the loss_type.
  counted = jnp.asarray(mask)
  if s.get("top_entropy_quantile") is not None:
    fraction = s["top_entropy_quantile"]
    counted = top_entropy_mask(record.inputs["entropies"], mask, fraction=fraction)
  outputs = objective(record, weights=weights, **slots)
  bonus = value_and_gradients(
    record,
    lambda entropies: s["entropy_coef"] * rl.masked_mean(entropies, counted),
    "entropies",
  )
  return {
    "loss": outputs["loss"] - bonus["loss"],
    "grad_logps": outputs["grad_logps"],
    "grad_entropies": -bonus["grad_entropies"],
  }


def trl_slots(record: Record) -> dict[str, Any]:
  s = record.settings
  sequence = s.get("importance_sampling_level", "token") == "sequence"
  slots: dict[str, Any] = {"importance_weights": trl_factor(record)}
  if s.get("beta"):
    kl = plain(rl.kl_k3)
    if s.get("use_bias_correction_kl"):
      kl = sequence_weighted_k3 if sequence else token_weighted_k3
    slots |= {"kl": kl, "kl_coef": s["beta"]}
  level = SEQUENCE if sequence else rl.per_token
  band = {"clip_low": s["epsilon_low"], "clip_high": s["epsilon_high"]}
  match s["loss_type"]:
    case "cispo":  # epsilon_high is the cap itself; the score is the token's at any level
      constants = {"clip_low": 1.0, "clip_high": s["epsilon_high"] - 1.0}
      level = GSPO_TOKEN if sequence else level
      return slots | {"surrogate": rl.cispo, "constants": constants, "level": level}
    case "vespo":
      return slots | trl_vespo(record)
    case "sapo":
      taus = {f"tau_{sign}": s.get(f"sapo_temperature_{sign}", default)
              for sign, default in (("pos", 1.0), ("neg", 1.05))}  # fmt: skip
      return slots | {"surrogate": rl.sapo, "constants": taus, "level": level}
  if s.get("delta") is not None:
    constants = {**band, "ratio_cap": s["delta"]}
    return slots | {"surrogate": rl.dual_clip, "constants": constants, "level": level}
  return slots | {"surrogate": rl.ppo_clip, "constants": band, "level": level}


def trl_vespo(record: Record) -> dict[str, Any]:
  """The weight's log is a sum between log 1e-8 and 20; the gradient is the token's."""
  s, x = record.settings, record.inputs
  names = {"k_pos": "k_pos", "lam_pos": "lambda_pos", "k_neg": "k_neg", "lam_neg": "lambda_neg"}
  defaults = {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0}
  constants = {ours: s.get(f"vespo_{name}", defaults[ours]) for ours, name in names.items()}
  level = VESPO_SUM
  if "is_weights" in x:  # their logs are summed over padding too, as the peer does
    everywhere = np.broadcast_to(np.arange(WIDTH) < record.width, x["mask"].shape)
    everywhere = everywhere & (np.arange(len(everywhere)) < record.rows)[:, None]
    logs = rl.per_sequence(jnp.log(x["is_weights"]), everywhere)

    def both(log_ratio: Any, mask: Any, *, segment_ids: Any = None) -> jax.Array:
      return SUM_20(log_ratio, mask, segment_ids=segment_ids) + logs

    level = rl.with_token_gradient(rl.clamped(both, math.log(1e-8), 20.0))
  return {"surrogate": rl.vespo, "constants": constants, "level": level}


def trl_factor(record: Record) -> jax.Array | None:
  """What multiplies the policy term only: off-policy mask, top-entropy mask, sampler weights."""
  s, x = record.settings, record.inputs
  mask = x["mask"]
  if s.get("off_policy_mask_threshold") is not None:
    sampler = x.get("rollout_logps", x["old_logps"])
    log_ratio = rl.token_log_ratio(x["logps"], sampler, mask)
    threshold = s["off_policy_mask_threshold"]
    return rl.off_policy_mask(log_ratio, advantages(record), mask, threshold=threshold)
  if s.get("top_entropy_quantile") is not None:
    top = top_entropy_mask(x["entropies"], mask, fraction=s["top_entropy_quantile"])
    return top.astype(jnp.float64)
  return x.get("is_weights") if s["loss_type"] != "vespo" else None


def trl_gmpo(record: Record) -> Arrays:
  s = record.settings
  slots = {"kl": plain(rl.kl_k3), "kl_coef": s["beta"]} if s.get("beta") else {}
  band = {"clip_low": s["epsilon_low"], "clip_high": s["epsilon_high"]}
  weights = sequence_mean_of_all(record.mask)
  return objective(record, rl.gmpo, weights, constants=band, **slots)


def trl_rloo(record: Record) -> Arrays:
  """PPO's clip on the product of the ratios of a row; a mean over rows."""
  s = record.settings
  band = {"clip_low": s["epsilon_low"], "clip_high": s["epsilon_high"]}
  weights = sequence_mean_of_all(record.mask)
  return objective(record, rl.ppo_clip, weights, constants=band, level=rl.per_sequence)


@jax.jit
def compiled_fused(hidden: Any, weight: Any, ids: Any, temperature: Any, old: Any, band: Any,
                   arrays: Any) -> Any:  # fmt: skip
  surrogate = partial(rl.ppo_clip, **band)
  whole = rl.Objective(rl.raw_rewards, rl.per_token, surrogate, rl.token_sum)

  def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    logits = hidden @ weight.T
    logps = rl.token_logprobs(logits, ids, mask=arrays["mask"], temperature=temperature)
    return rl.objective_loss(whole, logps, old, kl=rl.kl_k3, **arrays)[0]

  return jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)


def liger_fused(record: Record) -> Arrays:
  """From hidden states and the unembedding, at a temperature."""
  s, x = record.settings, record.inputs
  arrays = {
    "advantages": advantages(record), "mask": x["mask"], "ref_logprobs": x["ref_logps"],
    "loss_weights": pad(trl_weights(record), 0.0), "kl_coef": s["beta"],
  }  # fmt: skip
  band = {"clip_low": s["epsilon_low"], "clip_high": s["epsilon_high"]}
  hidden = np.where(x["mask"][..., None], x["hidden"], 0.0)  # the matmul is the caller's
  value, (hidden, weight) = compiled_fused(
    hidden, x["weight"], x["selected_token_ids"], s["temperature"], x["old_logps"], band, arrays
  )
  return {"loss": value, "grad_hidden": hidden, "grad_weight": weight}
