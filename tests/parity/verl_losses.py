"""verl's policy losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl_lm as rl
from tests.parity.policy_losses import (
  GSPO_TOKEN_10,
  SEQUENCE,
  TOKEN_20,
  Arrays,
  advantages,
  clipped_k3,
  objective,
  plain,
  sequence_mean_of_all,
  token_mean,
)
from tests.parity.records import Record


@partial(jax.jit, static_argnames="mode")
def verl_weights(mask: Any, mode: str, width: int, info: Mapping[str, Any]) -> jax.Array:
  """loss_agg_mode; the totals of a global batch replace those of the mask."""
  length = info.get("loss_scale_factor")
  weights = {
    "token-mean": rl.token_mean,
    "token-sum": rl.token_sum,
    "seq-mean-token-sum": rl.sequence_sum,
    "seq-mean-token-sum-norm": partial(
      rl.constant_length, length=width if length is None else length
    ),
    "seq-mean-token-mean": rl.sequence_mean,
  }[mode](mask)
  if mode == "token-mean" and "batch_num_tokens" in info:
    weights = weights * (jnp.sum(mask) / info["batch_num_tokens"])
  if mode.startswith("seq-mean") and "global_batch_size" in info:
    weights = weights * (jnp.sum(rl.lengths(mask) > 0) / info["global_batch_size"])
  return weights * info.get("dp_size", 1)


def verl_reduced(record: Record, mode: str, info: Mapping[str, Any]) -> jax.Array:
  names = ("batch_num_tokens", "global_batch_size", "dp_size", "loss_scale_factor")
  return verl_weights(record.mask, mode, record.width, {k: info[k] for k in names if k in info})


clip_cov_selection = jax.jit(rl.clip_cov_selection)
kl_cov_selection = jax.jit(rl.kl_cov_selection)


def verl_slots(record: Record) -> dict[str, Any]:
  """The slots of a loss of core_algos, by its name."""
  s, x = record.settings, record.inputs
  mask = x["mask"]
  band = {"clip_low": s["clip_ratio_low"], "clip_high": s["clip_ratio_high"]}
  capped = {**band, "ratio_cap": s["clip_ratio_c"]}
  match record.objective:
    case "vanilla":
      return {"surrogate": rl.dual_clip, "constants": capped, "level": TOKEN_20}
    case "gspo":
      return {"surrogate": rl.ppo_clip, "constants": band, "level": GSPO_TOKEN_10}
    case "sapo":
      taus = {"tau_pos": s["tau_pos"], "tau_neg": s["tau_neg"]}
      return {"surrogate": rl.sapo, "constants": taus, "level": TOKEN_20}
    case "cispo":
      return {"surrogate": rl.cispo, "constants": band}
    case "geo_mean":
      return {"surrogate": rl.gmpo, "constants": band}
    case "dppo_tv":
      return {"surrogate": rl.dppo_tv, "constants": capped}
    case "dppo_kl":
      return {"surrogate": rl.dppo_kl, "constants": capped}
    case "gpg":
      return {"surrogate": rl.reinforce, "constants": {}}
    case "dro":
      return {"surrogate": rl.dro, "constants": {"beta": s["policy_loss"]["dro_beta"]}}
    case "clip_cov":
      c = s["policy_loss"]
      log_ratio = rl.token_log_ratio(x["logps"], x["old_logps"], mask)
      selected = clip_cov_selection(
        jax.random.key(0), x["logps"], log_ratio, advantages(record), mask,
        fraction=c["clip_cov_ratio"], cov_low=c["clip_cov_lb"], cov_high=c["clip_cov_ub"], **band,
      )  # fmt: skip
      return {"surrogate": rl.clip_cov, "constants": band, "selected": selected}
    case "kl_cov":
      c = s["policy_loss"]
      selected = kl_cov_selection(x["logps"], advantages(record), mask, fraction=c["kl_cov_ratio"])
      constants = {"kl_coef": c["ppo_kl_coef"]}
      return {"surrogate": rl.kl_cov, "constants": constants, "selected": selected}
  raise KeyError(record.objective)


def verl_policy(record: Record) -> Arrays:
  s, factor = record.settings, record.inputs.get("is_weights")
  # sapo ignores loss_agg_mode
  mode = "seq-mean-token-mean" if record.objective == "sapo" else s["loss_agg_mode"]
  weights = verl_reduced(record, mode, s["global_batch_info"])
  if record.objective == "geo_mean":  # a mean over all rows, and one weight per row
    weights = sequence_mean_of_all(record.mask)
    if factor is not None:
      factor = jnp.exp(SEQUENCE(jnp.log(factor), record.inputs["mask"]))
  return objective(record, weights=weights, importance_weights=factor, **verl_slots(record))


def verl_combined(record: Record) -> Arrays:
  """ppo_loss: vanilla + kl_loss_coef * KL - entropy_coeff * entropy, one aggregation."""
  s = record.settings
  return objective(
    record,
    rl.dual_clip,
    verl_reduced(record, s["loss_agg_mode"], {}),
    level=TOKEN_20,
    constants={"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": s["clip_ratio_c"]},
    kl=plain(verl_kl(s["kl_loss_type"])),
    kl_coef=s["kl_loss_coef"],
    entropy_coef=s["entropy_coeff"],
  )


@cache
def verl_kl(name: str) -> Callable[..., jax.Array]:
  """kl_penalty: k3 clipped to [-10, 10]; a "+" keeps the value and takes k2's gradient."""
  estimators = {
    "k1": rl.kl_k1, "kl": rl.kl_k1, "abs": rl.kl_abs, "k2": rl.kl_k2, "mse": rl.kl_k2,
    "k3": clipped_k3, "low_var_kl": clipped_k3,
  }  # fmt: skip
  estimator = estimators[name.removesuffix("+")]
  return rl.with_reverse_kl_gradient(estimator) if name.endswith("+") else estimator


def verl_bypass(record: Record) -> Arrays:
  """The sampler's log-probs stand for the old ones; rejected tokens leave the mask."""
  c, x = record.settings["rollout_correction"], record.inputs
  mask = x["mask"]
  log_ratio = rl.token_log_ratio(x["logps"], x["rollout_logps"], mask)
  kept = verl_kept(log_ratio, mask, c.get("rollout_rs"), c.get("rollout_rs_threshold"))
  weights = token_mean(kept[: record.rows])
  if c["loss_type"] == "ppo_clip":
    constants = {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 3.0}
    return objective(
      record, rl.dual_clip, weights, level=TOKEN_20, constants=constants, old="rollout_logps"
    )
  correction = verl_is_weights(log_ratio, mask, c["rollout_is"], c["rollout_is_threshold"])
  return objective(
    record, rl.reinforce, weights, constants={}, old="rollout_logps", importance_weights=correction
  )


def verl_is_weights(log_ratio: Any, mask: Any, level: str, threshold: Any) -> jax.Array:
  """rollout_is: capped weights, or "lo_hi" which zeroes those outside (IcePop)."""
  levels = {"token": rl.per_token, "sequence": rl.per_sequence}
  log_weights = rl.clamped(levels[level], -20.0, 20.0)(log_ratio, mask)
  if isinstance(threshold, str) and "_" in threshold:
    low, high = map(float, threshold.split("_"))
    return rl.banded(log_weights, mask, low=low, high=high)
  return rl.truncated(log_weights, mask, cap=float(threshold))


def verl_kept(log_ratio: Any, mask: Any, modes: str | None, thresholds: Any) -> jax.Array:
  """rollout_rs: tokens that every statistic keeps; log_ratio = trainer - sampler."""
  kept = jnp.asarray(mask)
  if modes is None:
    return kept
  zeros = jnp.zeros_like(log_ratio)
  for mode, threshold in zip(modes.split(","), str(thresholds).split(",")):
    level, _, name = mode.rpartition("_")
    estimator = {"k1": rl.kl_k1, "k2": rl.kl_k2, "k3": rl.kl_k3}[name]
    # KL(sampler || trainer): the sampler's log-probs come first.
    statistic = estimator(zeros, jnp.clip(log_ratio, -20.0, 20.0), mask)
    statistic = {
      "token": rl.per_token,
      "seq_sum": rl.per_sequence,
      "seq_mean": rl.per_sequence_geometric,
      "seq_max": rl.segment_max,
    }[level](statistic, mask)
    low, high = verl_bounds(name, threshold)
    kept = kept & (rl.rejected(statistic, mask, low=low, high=high) > 0)
  return kept


def verl_bounds(name: str, threshold: str) -> tuple[float | None, float]:
  """k1 = -log_ratio lies between the logs of two ratios; k2 and k3 lie below a number."""
  if name != "k1":
    return None, float(threshold)
  ratios = [float(value) for value in threshold.split("_")]
  low, high = ratios if len(ratios) == 2 else (1.0 / ratios[0], ratios[0])
  return math.log(low), math.log(high)
