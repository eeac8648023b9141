"""What `experiments.ratio_explosion_trained` measures: one rollout, scored after each update."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_lm as rl
from configs.ratio_explosion_trained import Config
from experiments.ratio_explosion_trained.policies import Start, train_config, update_config
from jaxrl_lm.lm import batches, rollouts, updates
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.rollouts import Rollout
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import TrainState, init_state

OBJECTIVES = {"GRPO": rl.GRPO, "GSPO": rl.GSPO}
CAP = rl.CISPO.surrogate.keywords["clip_high"]  # type: ignore[attr-defined]
PLACE = Placement()


def measure(config: Config, start: Start, seed: int) -> dict[str, Any]:
  """The statistics of one seed: {rate: {"held_out": [K, L], "trained": [L], "distance": [K]}}.

  K numbers of updates, L lengths. Two halves of equal size, of the same prompts: one to be trained
  on and one held out, whose responses no update has seen. "cold" is one update at the first rate
  with moments that have seen nothing.
  """
  groups = config.updates * config.minibatch_groups
  settings = train_config(config, 0.0, seed, groups=groups)
  halves = [_half(settings, start, step) for step in (0, 1)]
  old = [batch.old_logprobs for _, batch in halves]
  again = [_logprobs(settings, start, start.state, drawn) for drawn, _ in halves]
  exact = [float(np.abs(a - b).max()) for a, b in zip(again, old, strict=True)]
  sampler = float(np.abs(old[1] - halves[1][1].sampler_logprobs).max())
  found: dict[str, Any] = {
    "exact": max(exact),
    "sampler": sampler,
    "reward": float(halves[0][0].scores.total.mean()),
    "silent": 1 - float(np.mean([drawn.signal.mean() for drawn, _ in halves])),
  }
  run = partial(_run, config, settings, start, halves)
  for rate in config.rates:
    found[f"{rate:g}"] = run(rate, start.state, config.staleness)
  fresh = init_state(update_config(config.rates[0]), start.state.params)
  found["cold"] = run(config.rates[0], fresh, (1,))
  return found


def _half(settings: TrainConfig, start: Start, step: int) -> tuple[Rollout, Batch]:
  """Responses of the start, with its log-probs of them and their advantages."""
  policy = start.policy._replace(params=start.state.params)
  drawn = rollouts.rollout(
    policy, start.task, settings.rollout, seed=settings.seed, step=step, cursor=0
  )
  batch = batches.score_rollout(policy.model, settings, start.state, None, drawn, PLACE)
  return drawn, batches.with_advantages(settings, batch, drawn)


def _logprobs(settings: TrainConfig, start: Start, state: TrainState, drawn: Rollout) -> Any:
  """By the program that makes old log-probs, so that without an update the ratio is 1."""
  return batches.score_rollout(start.policy.model, settings, state, None, drawn, PLACE).old_logprobs


def _run(
  config: Config,
  settings: TrainConfig,
  start: Start,
  halves: list[tuple[Rollout, Batch]],
  rate: float,
  state: TrainState,
  staleness: tuple[int, ...],
) -> dict[str, Any]:
  """Updates at a rate from a state, up to the largest staleness, and statistics after some."""
  (seen, training), (fresh, held_out) = halves
  model, by_update, distances, first = start.policy.model, [], [], 0.0
  parts = itertools.islice(batches.minibatches(settings, training, 0, PLACE), staleness[-1])
  for number, part in enumerate(parts, 1):
    state, metrics = _updated(model, rate, state, part)
    if number == 1:
      extremes = metrics.log_ratio_extremes
      first = float(jnp.maximum(-extremes.low, extremes.high))
    if number in staleness:
      current = _logprobs(settings, start, state, fresh)
      by_update.append(_statistics(config.lengths, current, held_out))
      moved = jax.tree.map(jnp.subtract, state.params, start.state.params)
      distances.append(float(optax.tree.norm(moved)))
  held = {name: np.stack([x[name] for x in by_update]) for name in by_update[0]}
  found = {"held_out": held, "distance": np.array(distances), "first": first}
  if staleness[-1] == config.updates:
    last = _logprobs(settings, start, state, seen)
    found["trained"] = _statistics(config.lengths, last, training)
  return found


@partial(jax.jit, static_argnames="model")
def _updated(model: Any, rate: Any, state: TrainState, batch: Batch) -> Any:
  return updates.update(model, update_config(rate), state, batch)


def _statistics(lengths: tuple[int, ...], logprobs: Any, batch: Batch) -> dict[str, np.ndarray]:
  """{name: [L]} of the first T tokens of responses, for every T."""
  arrays = (logprobs, batch.old_logprobs, batch.advantages)
  rows = [_of_prefix(*(jnp.asarray(x[:, :length]) for x in arrays)) for length in lengths]
  return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


@jax.jit
def _of_prefix(logprobs: Any, old_logprobs: Any, advantages: Any) -> dict[str, jax.Array]:
  mask = jnp.ones(logprobs.shape, bool)
  token = rl.token_log_ratio(logprobs, old_logprobs, mask)
  sequence = rl.per_sequence(token, mask)
  levels = {"token": token, "prefix": rl.per_prefix(token, mask), "sequence": sequence}
  log_rho, rho, drift = (
    sequence[:, 0],
    jnp.exp(sequence[:, 0]),
    rl.policy_drift(logprobs, old_logprobs, mask),
  )
  extremes = rl.ratio_extremes(token, mask)
  found = {name: _outside(x, mask, rl.GRPO) for name, x in levels.items()}
  for name, objective in OBJECTIVES.items():
    level, widths = objective.level(token, mask), objective.surrogate.keywords
    clipped = rl.clip_fractions(level, advantages, mask, **widths)["clipped"]
    found[f"{name} leaves out"] = clipped.mean()
  return found | {
    "GSPO": _outside(rl.GSPO.level(token, mask), mask, rl.GSPO),
    "CISPO caps": rl.average(token > jnp.log1p(CAP), mask).mean(),
    "k1": drift["k1"].mean(),
    "k3": drift["k3"].mean(),
    "lowest": extremes.low,
    "highest": extremes.high,
    "mean": log_rho.mean(),
    "variance": log_rho.var(ddof=1),
    "sum_of_variances": token.var(axis=0, ddof=1).sum(),
    "ratio": rho.mean(),
    "ratio_variance": rho.var(ddof=1),
    "sample_size": rl.sequence_effective_sample_size(sequence, mask).fraction(),
    "pull": jnp.mean(advantages[:, 0] * log_rho),
  }


def _outside(log_ratio: jax.Array, mask: jax.Array, objective: rl.Objective) -> jax.Array:
  """Share out of the objective's band, on either side, whatever the advantage."""
  low, high = (objective.surrogate.keywords[key] for key in ("clip_low", "clip_high"))  # type: ignore[attr-defined]
  outside = (log_ratio < jnp.log1p(-low)) | (log_ratio > jnp.log1p(high))
  return rl.average(outside, mask).mean()


def crossing(lengths: tuple[int, ...], values: np.ndarray, level: float) -> np.ndarray:
  """[K] the length at which each row of [K, L] crosses the level, log-linear between two lengths.

  NaN where it does not.
  """
  beyond = (values < level) != (values[:, :1] < level)
  where = np.full(len(values), np.nan)
  for row in np.flatnonzero(beyond.any(axis=1)):
    after = int(np.argmax(beyond[row]))
    pair = slice(after - 1, after + 1)
    share = (level - values[row, after - 1]) / np.ptp(values[row, pair])
    x = np.log(lengths[pair])
    where[row] = np.exp(x[0] + abs(share) * (x[1] - x[0]))
  return where
