"""The peers' advantages and returns as compositions of ours: a record -> arrays of its outputs.

Peers hold flat rows with a group id, or flat rows in groups of one size; ours hold groups as an
axis, so each composition brings rows to groups and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from tests.parity.records import ROWS, Record

Arrays = Mapping[str, jax.Array]
Estimator = Callable[..., jax.Array]  # (rewards [P, G], *, where [P, G]) -> advantages [P, G]


# One compilation per shape and ddof: constants are traced.
group_centered = jax.jit(rl.group_centered)
leave_one_out = jax.jit(rl.leave_one_out)
group_normalized = jax.jit(rl.group_normalized, static_argnames="ddof")
batch_scaled = jax.jit(rl.batch_scaled, static_argnames="ddof")
multi_reward_normalized = jax.jit(rl.multi_reward_normalized, static_argnames="ddof")
length_weighted_baseline = jax.jit(rl.length_weighted_baseline)
pass_at_k = jax.jit(rl.pass_at_k, static_argnames="k")
group_moments = jax.jit(jax.vmap(partial(rl.masked_moments, ddof=1)))
to_groups = jax.jit(rl.to_groups, static_argnames=("num_groups", "group_size"))
from_groups = jax.jit(rl.from_groups)
gae = jax.jit(rl.gae)
discounted_returns = jax.jit(rl.discounted_returns)
whiten = jax.jit(rl.whiten, static_argnames="ddof")
masked_moments = jax.jit(rl.masked_moments, static_argnames="ddof")


def over_tokens(values: Any, mask: Any) -> jax.Array:
  """One value per sequence, at each of its tokens."""
  return rl.zero_masked(jnp.broadcast_to(jnp.asarray(values)[:, None], mask.shape), mask)


def in_groups(estimator: Estimator, rewards: Any, valid: Any, size: int) -> np.ndarray:
  """Applies an estimator to flat rows in groups of one size; the rest of a [6, 8] is excluded."""
  rewards, valid = (np.asarray(x).reshape(*np.shape(x)[:-1], -1, size) for x in (rewards, valid))
  groups = rewards.shape[-2]
  widths = [(0, 0)] * (rewards.ndim - 2) + [(0, 6 - groups), (0, 8 - size)]
  values = estimator(
    np.pad(rewards, widths, constant_values=np.nan),
    where=np.pad(valid, widths, constant_values=False),
  )
  return np.asarray(values)[:groups, :size].reshape(-1)


def whitened_and_returns(advantages: Any, returns: Any, mask: Any, **how: Any) -> Arrays:
  return {"advantages": whiten(advantages, mask, **how), "returns": returns}


# verl: rows with the id of their prompt; the reward of a row is the sum of its token rewards


def grouped(record: Record, values: Any) -> rl.Groups:
  """Rows by their `index`; rows up to the common number stand in a group of their own."""
  spare = ROWS - record.rows
  return to_groups(
    np.pad(np.asarray(values)[: record.rows], (0, spare)),
    np.pad(record.inputs["index"], (0, spare), constant_values=5),
    num_groups=6,
    group_size=8,
  )


def by_prompt(record: Record, estimator: Estimator, rewards: Any = None) -> jax.Array:
  """Applies an estimator to the groups of equal `index`; one value per row."""
  if rewards is None:
    rewards = np.nansum(record.inputs["token_level_rewards"], axis=-1)  # of masked tokens too
  groups = grouped(record, rewards)
  return from_groups(estimator(groups.values, where=groups.where), groups.slots)


def raw_when_alone(estimator: Estimator, scale: float = 1.0) -> Estimator:
  """verl leaves the only sample of a group without a baseline; ours gives it 0."""

  def estimate(rewards: jax.Array, *, where: jax.Array) -> jax.Array:
    alone = jnp.sum(where, axis=-1, keepdims=True) == 1
    return jnp.where(alone, scale * rl.raw_rewards(rewards, where=where),
                     estimator(rewards, where=where))  # fmt: skip

  return estimate


def verl_grpo_estimator(record: Record) -> Estimator:
  epsilon = record.settings["epsilon"]
  if not record.settings.get("norm_adv_by_std_in_grpo", True):
    return raw_when_alone(group_centered)
  normalized = partial(group_normalized, ddof=1, eps=epsilon)
  return raw_when_alone(normalized, float(1 / (np.float32(1) + np.float32(epsilon))))


def verl_outcome(record: Record, estimator: Estimator) -> Arrays:
  return {"advantages": over_tokens(by_prompt(record, estimator), record.inputs["mask"])}


def verl_grpo(record: Record) -> Arrays:
  return verl_outcome(record, verl_grpo_estimator(record))


def verl_rloo(record: Record) -> Arrays:
  return verl_outcome(record, raw_when_alone(leave_one_out))


def verl_rloo_vectorized(record: Record) -> Arrays:
  return verl_outcome(record, leave_one_out)


def verl_opo(record: Record) -> Arrays:
  lengths = grouped(record, record.mask.sum(-1)).values

  def weighted(rewards: jax.Array, *, where: jax.Array) -> jax.Array:
    return length_weighted_baseline(rewards, lengths, where=where)

  return verl_outcome(record, raw_when_alone(weighted))


def verl_gpg(record: Record) -> Arrays:
  """The scale counts rewards that are not 0, where `signal_scaled` counts groups with spread."""
  rewards = np.nansum(record.inputs["token_level_rewards"], axis=-1)
  scale = float(np.float32(record.rows) / np.float32(max(np.count_nonzero(rewards), 1)))
  advantages = scale * by_prompt(record, raw_when_alone(group_centered))
  return {"advantages": over_tokens(advantages, record.inputs["mask"])}


def verl_passk(record: Record) -> Arrays:
  """Only the best sample: its margin over the second, i.e. max@G of the whole group."""
  epsilon, size = record.settings["epsilon"], int(np.bincount(record.inputs["index"]).max())

  def estimate(rewards: jax.Array, *, where: jax.Array) -> jax.Array:
    margin = pass_at_k(rewards, k=size, where=where) / size
    if not record.settings["norm_adv_by_std_in_grpo"]:
      return margin
    _, variance = group_moments(rewards, where)
    return margin / (jnp.sqrt(variance)[:, None] + epsilon)

  return verl_outcome(record, estimate)


def verl_gdpo(record: Record) -> Arrays:
  """Each component normalised in its group, weighted, summed, then whitened over tokens."""
  s, x = record.settings, record.inputs
  estimator = verl_grpo_estimator(record)
  if s["gdpo_reward_keys"] is None:
    total = by_prompt(record, estimator)
  else:
    components = [x["reward_components"][key] for key in s["gdpo_reward_keys"]]
    weights = s["gdpo_reward_weights"] or [1.0] * len(components)
    total = sum(
      w * by_prompt(record, estimator, r) for w, r in zip(weights, components, strict=True)
    )
  tokens = over_tokens(total, x["mask"])
  return {"advantages": whiten(tokens, x["mask"])}


def verl_reinforce_pp(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  rewards = x[s.get("rewards", "token_level_rewards")]
  returns = discounted_returns(rewards, x["mask"], discount=s["gamma"])
  return whitened_and_returns(returns, returns, x["mask"])


def verl_reinforce_pp_baseline(record: Record) -> Arrays:
  advantages = verl_outcome(record, raw_when_alone(group_centered))["advantages"]
  return {"advantages": whiten(advantages, record.inputs["mask"])}


def verl_remax(record: Record) -> Arrays:
  x = record.inputs
  returns = discounted_returns(x["token_level_rewards"], x["mask"])
  baseline = np.pad(x["reward_baselines"], (0, ROWS - record.rows))
  baseline = over_tokens(baseline, x["mask"])
  return {"advantages": returns - baseline, "returns": returns}


def verl_gae(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  mask, values = x["mask"], x["values"]
  advantages = gae(x[s["rewards"]], values, mask, discount=s["gamma"], gae_lambda=s["lam"])
  return whitened_and_returns(advantages, advantages + rl.zero_masked(values, mask), mask)


def verl_masked_stats(record: Record) -> Arrays:
  values, mask = record.inputs["values"], record.inputs["mask"]
  mean, variance = masked_moments(values, mask, ddof=1)
  whitened = whiten(values, mask)
  return {
    "mean": mean,
    "var": variance,
    "var_biased": masked_moments(values, mask, ddof=0)[1],
    "whiten": whitened,
    "whiten_noshift": whitened + mean,
    "row_mean": rl.masked_mean(values, mask, axis=-1),
  }


# TRL: rewards of several functions for rows in groups of one size; NaN = no reward


def trl_rewards(record: Record) -> tuple[np.ndarray, np.ndarray, int]:
  """Weighted sum per row, which rows have any reward, and the group size."""
  s, rewards = record.settings, record.inputs["rewards_per_func"]
  total = np.nansum(rewards * np.asarray(s["reward_weights"]), axis=-1)
  return total, ~np.isnan(rewards).all(-1), s["num_generations"]


def trl_grpo(record: Record) -> Arrays:
  s = record.settings
  if s["multi_objective_aggregation"] == "normalize_then_sum":
    return {"advantages": trl_normalize_then_sum(record)}
  estimator = {
    "group": partial(group_normalized, ddof=1, eps=1e-4),
    "batch": partial(batch_scaled, ddof=1, eps=1e-4),
    "none": group_centered,
  }[s["scale_rewards"]]
  return {"advantages": in_groups(estimator, *trl_rewards(record))}


def trl_normalize_then_sum(record: Record) -> np.ndarray:
  """Each reward normalised in its group, summed, and normalised over the batch."""
  rewards = record.inputs["rewards_per_func"].T
  _, valid, size = trl_rewards(record)
  weights = np.asarray(record.settings["reward_weights"])
  several = partial(multi_reward_normalized, weights=weights, ddof=1, eps=1e-4)
  total = in_groups(several, rewards, ~np.isnan(rewards), size)
  return in_groups(partial(group_normalized, ddof=1, eps=1e-4), total, valid, total.size)


def trl_rloo(record: Record) -> Arrays:
  """KL in the reward, a clip of it, leave-one-out, and optionally a batch normalisation."""
  s, x = record.settings, record.inputs
  rewards, valid, size = trl_rewards(record)
  if s["reward_clip_range"] is not None:
    rewards = np.clip(rewards, *s["reward_clip_range"])
  if s["beta"]:
    kl = rl.kl_k1(x["old_logps"], x["ref_logps"], x["mask"])
    rewards = rewards - s["beta"] * rl.masked_sum(kl, x["mask"], axis=-1)[: record.rows]
  advantages = in_groups(leave_one_out, rewards, valid, size)
  if s["normalize_advantages"]:  # over the rows that have another one of their group
    peers = np.repeat(valid.reshape(-1, size).sum(-1), size) > 1
    whole_batch = partial(group_normalized, ddof=1, eps=1e-4)
    advantages = in_groups(whole_batch, advantages, valid & peers, advantages.size)
  return {"advantages": advantages}


# OpenRLHF: rewards stand on the last token; every position of the row costs a discount


def openrlhf(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  mask, rewards = x["mask"], x["rewards"]
  name, size = s["estimator"], s["n_samples_per_prompt"]
  everyone = np.ones(rewards.shape, dtype=bool)
  estimator: Estimator = {
    "rloo": leave_one_out,
    "reinforce_baseline": group_centered,
    "group_norm": partial(group_normalized, ddof=1, eps=1e-9),
    "dr_grpo": group_centered,
    "flash_reinforce": group_centered,  # one group: the batch
  }.get(name, rl.raw_rewards)
  shaped = in_groups(estimator, rewards, everyone, rewards.size if "flash" in name else size)
  tokens = rl.terminal_rewards(np.pad(shaped, (0, ROWS - record.rows)), mask)
  if "kl" in x:
    tokens = rl.kl_shaped_rewards(tokens, x["kl"], mask, kl_coef=s["init_kl_coef"])
  everywhere = jnp.ones_like(mask)
  if name == "gae":
    values = rl.zero_masked(x["values"], mask)
    advantages = gae(tokens, values, everywhere, discount=s["gamma"], gae_lambda=s["lambd"])
    returns = advantages + values
  else:
    advantages = returns = discounted_returns(tokens, everywhere, discount=s["gamma"])
  if name in ("gae", "reinforce", "reinforce_baseline"):
    moments = masked_moments(advantages, mask, ddof=0)
    if s["no_std_norm"]:
      advantages = advantages - moments[0]
    else:  # the variance is clamped at 1e-8, not added to
      advantages = whiten(advantages, mask, eps=0.0,
                             moments=(moments[0], jnp.maximum(moments[1], 1e-8)))  # fmt: skip
  return {"advantages": advantages, "returns": returns}


# Tunix: flat rewards in groups of one size


def tunix_group(record: Record, estimator: Estimator) -> Arrays:
  rewards = record.inputs["rewards"]
  everyone = np.ones(rewards.shape, dtype=bool)
  return {"advantages": in_groups(estimator, rewards, everyone, record.settings["num_generations"])}


def tunix_gae(record: Record) -> Arrays:
  s, x = record.settings, record.inputs
  mask, values = x["mask"], x["values"]
  advantages = gae(x["rewards"], values, mask, discount=s["gamma"], gae_lambda=s["gae_lambda"])
  return whitened_and_returns(advantages, advantages + rl.zero_masked(values, mask), mask)


# rlax: one sequence, a discount per step (0 where an episode ends), values [T + 1]


def rlax_gae(record: Record, gae_lambda: float) -> tuple[jax.Array, jax.Array]:
  """Advantages and values; a discount of 0 ends a segment, which has nothing to bootstrap."""
  x = record.inputs
  rewards, values, discounts = jnp.asarray(x["r_t"]), jnp.asarray(x["values"]), x["discount_t"]
  ends = np.cumsum(discounts == 0.0)
  bootstrap = jnp.where(discounts == 0.0, 0.0, values[1:])
  advantages = gae(
    rewards, values[:-1], jnp.ones(rewards.shape, jnp.bool_), discount=float(discounts.max()),
    gae_lambda=gae_lambda, bootstrap_value=bootstrap,
    segment_ids=jnp.asarray(np.concatenate([[0], ends[:-1]]) + 1),
  )  # fmt: skip
  return advantages, values[:-1]


def rlax_advantages(record: Record) -> Arrays:
  return {"advantages": rlax_gae(record, record.settings["lambda_"])[0]}


def rlax_lambda_returns(record: Record) -> Arrays:
  """Advantage + value; with lambda = 1, the discounted return."""
  advantages, values = rlax_gae(record, record.settings.get("lambda_", 1.0))
  return {"returns": advantages + values}
