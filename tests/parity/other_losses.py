"""The policy losses of OpenRLHF, Tunix and rlax."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from tests.parity.policy_losses import (
  GSPO_TOKEN_20_10,
  SEQUENCE,
  TOKEN_20,
  Arrays,
  compiled,
  objective,
  plain,
  token_mean,
  token_sum,
)
from tests.parity.records import Record, pad
from tests.parity.verl_losses import verl_reduced

# OpenRLHF


def openrlhf_policy(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  gspo = s.get("policy_loss_type") == "gspo"
  mode = "token-mean" if s.get("token_level_loss", True) and not gspo else "seq-mean-token-mean"
  info = {k: s[k] for k in ("dp_size", "batch_num_tokens", "global_batch_size") if k in s}
  slots: dict[str, Any] = {"level": SEQUENCE if gspo else TOKEN_20}
  slots["constants"] = {name: s.get(f"clip_eps_{end}", 0.2)
                        for name, end in (("clip_low", "low"), ("clip_high", "high"))}  # fmt: skip
  if s.get("dual_clip"):
    slots["constants"]["ratio_cap"] = s["dual_clip"]
  if "rollout_logps" in x and gspo:  # the sampler stands for the old policy: no weight is left
    slots["old"] = "rollout_logps"
  elif "rollout_logps" in x:
    slots["importance_weights"] = openrlhf_correction(record)
  surrogate = rl.dual_clip if s.get("dual_clip") else rl.ppo_clip
  return objective(record, surrogate, verl_reduced(record, mode, info), **slots)


def openrlhf_correction(record: Record) -> jax.Array:
  """is_correction_*: old / sampler, capped or kept in an interval; tokens stay in the mean."""
  s, x = record.settings, record.inputs
  mask, old, sampler = x["mask"], jnp.asarray(x["old_logps"]), jnp.asarray(x["rollout_logps"])
  low, high = s["is_correction_threshold"]
  log_weights = rl.token_log_ratio(old, sampler, mask)
  level = rl.per_token if s["is_correction_level"] == "token" else rl.per_sequence_geometric
  if s.get("is_correction_mode") == "clip":
    return rl.truncated(log_weights, mask, cap=high, floor=low)
  if s.get("is_correction_gating") == "tv":
    statistic = jnp.abs(jnp.exp(old) - jnp.exp(sampler))
  elif s.get("is_correction_gating") == "binary_kl":
    statistic = rl.exact_kl(two_outcomes(sampler), two_outcomes(old), mask=mask)
  else:
    statistic, low, high = log_weights, math.log(low), math.log(high)
  kept = rl.rejected(level(statistic, mask), mask, low=low, high=high)
  return kept * rl.truncated(log_weights, mask, cap=math.inf)


def two_outcomes(logprobs: jax.Array) -> jax.Array:
  """Logits of "this token" against "any other"."""
  return jnp.stack([logprobs, jnp.log1p(-jnp.exp(logprobs))], axis=-1)


# Tunix


def tunix_weights(record: Record, mode: str, norm: float | None = None) -> jax.Array:
  if mode == "sequence-mean-token-sum-norm" and norm is not None:  # in place of the rows
    return token_sum(record.mask) / norm
  name = {
    "token-mean": "token-mean",
    "sequence-mean-token-mean": "seq-mean-token-mean",
    "sequence-mean-token-scale": "seq-mean-token-sum-norm",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "sequence-mean-token-sum-norm": "seq-mean-token-sum",
  }[mode]
  return verl_reduced(record, name, {} if norm is None else {"loss_scale_factor": norm})


TUNIX_KL = {"kl": rl.kl_k1, "mse_kl": rl.kl_k2, "low_var_kl": rl.kl_k3}


def tunix_grpo(record: Record) -> Arrays:
  s = record.settings
  level = GSPO_TOKEN_20_10 if s["loss_algo"] == "gspo-token" else TOKEN_20
  slots: dict[str, Any] = {
    "level": level, "importance_weights": record.inputs.get("is_weights"),
    "constants": {"clip_low": s["epsilon"], "clip_high": s["epsilon_high"]},
  }  # fmt: skip
  if s.get("beta"):
    slots |= {"kl": plain(TUNIX_KL[s["kl_loss_mode"]]), "kl_coef": s["beta"]}
  weights = tunix_weights(record, s["loss_agg_mode"])
  if s.get("epsilon_c"):
    slots["constants"]["ratio_cap"] = s["epsilon_c"]
  surrogate = rl.dual_clip if s.get("epsilon_c") else rl.ppo_clip
  return objective(record, surrogate, weights, **slots)


def tunix_ppo(record: Record) -> Arrays:
  s = record.settings
  constants = {"clip_low": s["epsilon_low"], "clip_high": s["epsilon_high"]}
  if s.get("epsilon_c"):
    constants["ratio_cap"] = s["epsilon_c"]
  slots = {"kl": plain(rl.kl_k1), "kl_coef": s["kl_coef"]} if s.get("kl_coef") else {}
  surrogate = rl.dual_clip if s.get("epsilon_c") else rl.ppo_clip
  return objective(record, surrogate, token_mean(record.mask), constants=constants, **slots)


# rlax


def rlax_ppo(record: Record) -> Arrays:
  """Every token counts; a mean over tokens (all rows have the same length)."""
  everywhere = np.ones(record.inputs["logps"].shape, dtype=bool)
  arrays = {
    "advantages": pad(record.inputs["adv_tok"]), "mask": pad(everywhere),
    "loss_weights": pad(token_mean(everywhere), 0.0), "importance_weights": pad(everywhere * 1.0),
  }  # fmt: skip
  epsilon = record.settings["epsilon"]
  value, gradient = compiled(
    pad(record.inputs["logps"]), None, pad(record.inputs["old_logps"]), arrays,
    {"clip_low": epsilon, "clip_high": epsilon},
    surrogate=rl.ppo_clip, level=rl.per_token, kl=None,
  )  # fmt: skip
  rows, width = everywhere.shape
  return {"loss": value, "grad_logps": gradient[:rows, :width]}
