"""The peers' KL penalties, entropies, reductions and sampler corrections, composed of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import jaxrl_lm as rl
from tests.parity import other_losses as other
from tests.parity import policy_losses as losses
from tests.parity import verl_losses as verl
from tests.parity.records import Record, pad

Arrays = Mapping[str, jax.Array]


# KL penalties; the peers mask nothing and record the gradient of the sum


@partial(jax.jit, static_argnames="estimator")
def value_and_gradient_of_sum(logps: Any, ref: Any, old: Any, mask: Any, estimator: Any) -> Any:
  def total(logps: jax.Array) -> tuple[jax.Array, jax.Array]:
    kl = estimator(logps, ref, mask) if old is None else estimator(logps, ref, mask, old)
    return jnp.sum(kl), kl

  return jax.value_and_grad(total, has_aux=True)(logps)


def penalty(record: Record, estimator: Callable[..., jax.Array], old: Any = None) -> Arrays:
  x = record.inputs
  everywhere = jnp.ones(x["logps"].shape, dtype=bool)
  (_, kl), gradient = value_and_gradient_of_sum(
    pad(x["logps"]), pad(x["ref_logps"]), None if old is None else pad(old), pad(everywhere),
    estimator,
  )  # fmt: skip
  rows, width = everywhere.shape
  return {"kl": kl[:rows, :width], "grad_logps": gradient[:rows, :width]}


@cache
def clipped(estimator: Callable[..., jax.Array], low: float, high: float) -> Any:
  """An estimator whose value, and with it the gradient, is clipped."""
  return lambda logprobs, ref_logprobs, mask: jnp.clip(
    estimator(logprobs, ref_logprobs, mask), low, high
  )


@cache
def weighted_reverse_gradient(estimator: Callable[..., jax.Array]) -> Any:
  """The value of an estimator; the gradient min(rho, 10) delta."""
  straight = rl.with_reverse_kl_gradient(estimator)

  def weighted(logprobs: Any, ref_logprobs: Any, mask: Any, old: Any) -> jax.Array:
    rho = rl.truncated(rl.token_log_ratio(logprobs, old, mask), mask, cap=10.0)
    kl = straight(logprobs, ref_logprobs, mask)
    return stop_gradient(kl) + rho * (kl - stop_gradient(kl))

  return weighted


def verl_kl(record: Record) -> Arrays:
  return penalty(record, verl.verl_kl(record.settings["kl_penalty"]))


def openrlhf_kl(record: Record) -> Arrays:
  """Every estimator is clipped to [-10, 10]."""
  s = record.settings
  estimator = {"k1": rl.kl_k1, "k2": rl.kl_k2, "k3": rl.kl_k3}[s["kl_estimator"]]
  bounded = clipped(estimator, -10.0, 10.0)
  if s["unbiased_gradient"]:
    return penalty(record, weighted_reverse_gradient(bounded), record.inputs["old_logps"])
  return penalty(record, bounded)


def tunix_kl(record: Record) -> Arrays:
  s = record.settings
  estimator = {"kl": rl.kl_k1, "mse_kl": rl.kl_k2, "low_var_kl": rl.kl_k3}[s["method"]]
  bound = s["clamp_value"]
  return penalty(record, estimator if bound is None else clipped(estimator, -bound, bound))


# Reductions: the loss matrix of the peer is the negated gain


@jax.jit
def weighted_sum(matrix: Any, weights: Any, mask: Any) -> Any:
  return jax.value_and_grad(
    lambda matrix: jnp.sum(weights * rl.zero_masked(matrix, mask))
  )(matrix)  # fmt: skip


def reduction(record: Record, weights: jax.Array) -> Arrays:
  x = record.inputs
  matrix = x["loss_mat"] if "loss_mat" in x else x["adv_tok"]
  loss, gradient = weighted_sum(matrix, pad(weights, 0.0), x["mask"])
  return {"loss": loss, "grad_loss_mat": gradient}


def verl_reduction(record: Record) -> Arrays:
  return reduction(record, verl.verl_reduced(record, record.objective, record.settings))


def tunix_reduction(record: Record) -> Arrays:
  norm = record.settings.get("norm")
  return reduction(record, other.tunix_weights(record, record.objective, norm))


# Logits


@jax.jit
def mean_entropy(logits: Any, weights: Any, mask: Any) -> Any:
  def loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    entropy = rl.token_entropy(logits, mask=mask)
    return jnp.sum(weights * entropy), entropy

  return jax.value_and_grad(loss, has_aux=True)(logits)


def verl_entropy_loss(record: Record) -> Arrays:
  x = record.inputs
  weights = pad(verl.verl_reduced(record, record.settings["loss_agg_mode"], {}), 0.0)
  (loss, entropy), gradient = mean_entropy(x["logits"], weights, x["mask"])
  return {"loss": loss, "token_entropy": entropy, "grad_logits": gradient}


def verl_entropy(record: Record) -> Arrays:
  return {"token_entropy": token_entropy(record.inputs["logits"])}


def verl_logprobs(record: Record) -> Arrays:
  return {"logps": token_logprobs(record.inputs["logits"], record.inputs["labels"])}


def verl_sum_pi_squared(record: Record) -> Arrays:
  """The log-probs of all tokens, squared as probabilities and summed."""
  logits = record.inputs["logits"]
  size = logits.shape[-1]
  repeated = np.repeat(logits[..., None, :], size, axis=-2)
  logprobs = token_logprobs(repeated, np.broadcast_to(np.arange(size), logits.shape))
  return {"sum_pi_squared": jnp.sum(jnp.exp(2.0 * logprobs), axis=-1)}


token_entropy = jax.jit(rl.token_entropy)
token_logprobs = jax.jit(rl.token_logprobs)


@jax.jit
def weighted_policy_gradient(logits: Any, actions: Any, advantages: Any, weights: Any) -> Any:
  def loss(logits: jax.Array) -> jax.Array:
    gain = rl.reinforce(rl.token_logprobs(logits, actions), advantages)
    return -jnp.sum(weights * gain)

  return jax.value_and_grad(loss)(logits)


def rlax_policy_gradient(record: Record) -> Arrays:
  """A mean over all steps of weight * -A log pi."""
  x = record.inputs
  weights = losses.token_mean(np.ones(x["adv"].shape, dtype=bool)) * x["weights"]
  loss, gradient = weighted_policy_gradient(x["logits"], x["actions"], x["adv"], weights)
  return {"loss": loss, "grad_logits": gradient}


def rlax_entropy(record: Record) -> Arrays:
  """Minus the mean over all steps of weight * entropy."""
  x = record.inputs
  everywhere = np.ones(x["weights"].shape, dtype=bool)
  weights = -losses.token_mean(everywhere) * x["weights"]
  (loss, _), gradient = mean_entropy(x["logits"], weights, everywhere)
  return {"loss": loss, "grad_logits": gradient}


# Sampler against trainer


def verl_rollout_correction(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  mask = x["mask"]
  log_ratio = rl.token_log_ratio(x["old_logps"], x["rollout_logps"], mask)
  kept = verl.verl_kept(log_ratio, mask, s.get("rollout_rs"), s.get("rollout_rs_threshold"))
  outputs = {"response_mask": kept.astype(log_ratio.dtype)}
  if "rollout_is" in s:
    level = s["rollout_is"]
    weights = verl.verl_is_weights(log_ratio, mask, level, s["rollout_is_threshold"])
    if s["rollout_is_batch_normalize"]:
      mode = "token-mean" if level == "token" else "seq-mean-token-mean"
      means = pad(verl.verl_reduced(record, mode, {}), 0.0)
      weights = rl.self_normalised(weights, mask, means)
    outputs["is_weights"] = weights
  return outputs


def trl_sampler_ratio(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  mask = x["mask"]
  level, _, what = s["mode"].partition("_")
  levels = {"token": rl.per_token, "sequence": rl.per_sequence}
  log_weights = levels[level](rl.token_log_ratio(x["old_logps"], x["rollout_logps"], mask), mask)
  low, high = s["clip_min"] or 0.0, s["clip_max"]
  if what == "mask":
    ratio = rl.banded(log_weights, mask, low=low, high=high)
  else:
    ratio = rl.truncated(log_weights, mask, cap=high, floor=low)
  if level == "sequence":  # the peer keeps one value per row
    ratio = jnp.max(ratio, axis=-1, keepdims=True)
  return {"importance_sampling_ratio": ratio}
