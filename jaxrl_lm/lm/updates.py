r"""One update of a policy (and a critic): rows of responses in, a new state and what it did out.

  select tokens         on the whole batch, where the objective asks for it
  gradient              summed over micro-batches, with loss weights of the whole batch
  finite everywhere?    decided on the global arrays; if not, nothing moves and it is counted
  clip, optimiser step  unless the gradient is exactly 0
  metrics               sums and counts, of the whole batch

`update` is a pure function: jit it (`compile_update`), scan it, vmap it over seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_lm import checks, masks, objectives, ratios, values
from jaxrl_lm.lm import micro_batches, optimizers, scoring, train_state, update_metrics
from jaxrl_lm.lm.gathered import Gathered
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.train_state import CriticState, TrainState
from jaxrl_lm.lm.update_config import CriticConfig, UpdateConfig
from jaxrl_lm.lm.update_metrics import Outcome, Seen, UpdateMetrics


def update(
  model: Any, config: UpdateConfig, state: TrainState, batch: Batch, key: jax.Array | None = None
) -> tuple[TrainState, UpdateMetrics]:
  r"""One optimiser step on a batch of responses.

  loss = objective_loss(objective, log pi, old_logprobs, advantages, mask, loss_weights, ...)
  critic: sum_t loss_weights_t clipped_value_loss(V(s_t), old_values_t, returns_t)

  Where a loss or an entry of a gradient is not finite, in the policy or the critic, on whichever
  device, both keep every bit of parameters and moments, and `skipped` is one more. A model whose
  gradient is exactly 0 (no group with a signal) keeps them too: no momentum, no weight decay, no
  step of the schedule.

  Args:
    model: of the policy; static under jit.
    config: static under jit, apart from numbers that are put in traced.
    state: before the update. Not donated: an alias of it stays valid.
    batch: R rows, `config.micro_batches` divides R. Constant.
    key: of random numbers, for a selection that draws.

  Returns:
    The state after the update (step and cursor as they were), and its metrics.

  Raises:
    ValueError: shapes do not match, the rows do not go into micro-batches, or what a term of the
      loss needs is missing.
    TypeError: a mask is not boolean, or the surrogate needs a selection and there is none, or the
      selection draws and there is no key.

  Reference: the objective names its own; accumulation with weights of the whole batch: the fault
    it avoids is huggingface/trl#3021.
  """
  micro_batches.check_rows(batch, config.micro_batches)
  selected = _selected(model, config, state.params, batch, key)
  loss, gradient, seen = micro_batches.summed_gradient(
    partial(_policy_loss, model, config), state.params, (batch, selected), config.micro_batches
  )
  policy = Outcome(loss, optimizers.gradient_size(gradient))
  finite = policy.size.finite & jnp.isfinite(loss)

  critic, critic_metrics = state.critic, None
  if config.critic is not None:
    loss, critic_gradient, seen_values = _critic_gradient(config, state, batch)
    critic_outcome = Outcome(loss, optimizers.gradient_size(critic_gradient))
    finite &= critic_outcome.size.finite & jnp.isfinite(loss)
    critic = CriticState(
      *_stepped(config.critic, critic_gradient, critic_outcome, state.critic, finite)
    )
    critic_metrics = update_metrics.of_critic(
      config.critic.value_clip, batch, seen_values, critic_outcome, finite
    )

  params, opt_state = _stepped(config, gradient, policy, state, finite)
  metrics = update_metrics.of_update(config, batch, selected, seen, policy, finite, critic_metrics)
  skipped = state.skipped + (~finite).astype(state.skipped.dtype)
  state = state._replace(params=params, opt_state=opt_state, critic=critic, skipped=skipped)
  return state, metrics


_update = jax.jit(update, static_argnames=("model", "config"))


def compile_update(
  model: Any, config: UpdateConfig, mesh: Mesh | None = None
) -> Callable[..., tuple[TrainState, UpdateMetrics]]:
  """`update` of one model and configuration, compiled once for all batches of one shape.

  Without a mesh, equal models and configurations share it: runs that differ in their seed compile
  once. Optimisers are equal only if they are the same object; a configuration with an array in it
  is equal to none, and compiled for itself.

  Nothing is donated, so that parameters may be shared: by a reference policy, a critic, a
  checkpoint that is still being written. It costs a second state during the update.

  Args:
    model, config: as of `update`.
    mesh: with Auto axes "data", "fsdp" and "tensor". The state lies, and stays, as
      `state_shardings` says: `jax.device_put` it before the first update. The rows of a batch,
      wherever they come from, go to where `batch_sharding` says. None = wherever the arrays are.

  Returns:
    Function of (state, batch, key=None).

  Raises:
    ValueError: the mesh has other axes, or they are not Auto.
  """
  if mesh is None:
    try:
      hash((model, config))
    except TypeError:
      return jax.jit(partial(update, model, config))
    return partial(_update, model, config)
  rows = train_state.batch_sharding(mesh)
  placed = config
  if config.critic is not None:
    critic = dataclasses.replace(config.critic, model=Gathered(config.critic.model, mesh))
    placed = dataclasses.replace(config, critic=critic)

  def on_mesh(
    state: TrainState, batch: Batch, key: jax.Array | None = None
  ) -> tuple[TrainState, UpdateMetrics]:
    batch = jax.lax.with_sharding_constraint(batch, rows)
    return update(Gathered(model, mesh), placed, state, batch, key)

  out = (train_state.state_shardings(mesh, model, config), NamedSharding(mesh, PartitionSpec()))
  return jax.jit(on_mesh, out_shardings=out)


def _selected(
  model: Any, config: UpdateConfig, params: Any, batch: Batch, key: jax.Array | None
) -> jax.Array | None:
  """[R, T] bool, chosen among all tokens that have a weight, or None."""
  if config.selection is None:
    return None

  def score(part: Batch) -> jax.Array:
    return _scores(model, config, params, part).logprobs

  logprobs = micro_batches.over_parts(score, batch, config.micro_batches)
  old = logprobs if batch.old_logprobs is None else batch.old_logprobs
  log_ratio = ratios.token_log_ratio(logprobs, old, batch.mask)
  log_ratio = config.objective.level(log_ratio, batch.mask, segment_ids=batch.segment_ids)
  used = batch.mask & (batch.loss_weights != 0)
  return config.selection(key, logprobs, log_ratio, batch.advantages, used)


def _scores(model: Any, config: UpdateConfig, params: Any, batch: Batch) -> scoring.TokenScores:
  rows = (batch.prompts, batch.prompt_mask, batch.tokens, batch.mask)
  packed = {} if batch.segment_ids is None else {"segment_ids": batch.segment_ids}
  return config.score(
    model, params, *rows, seen=batch.seen, temperature=config.temperature, **packed
  )


def _policy_loss(
  model: Any, config: UpdateConfig, params: Any, rows: tuple[Batch, jax.Array | None]
) -> tuple[jax.Array, Seen]:
  """Part of the loss that these rows add, and what was seen of them."""
  batch, selected = rows
  scores = _scores(model, config, params, batch)
  bonus = isinstance(config.entropy_coef, jax.Array) or config.entropy_coef != 0
  loss, aux = objectives.objective_loss(
    config.objective,
    scores.logprobs,
    batch.old_logprobs,
    batch.advantages,
    batch.mask,
    loss_weights=batch.loss_weights,
    importance_weights=batch.importance_weights,
    ref_logprobs=None if config.kl is None else batch.ref_logprobs,
    kl=config.kl,
    kl_coef=config.kl_coef,
    entropy=scores.entropy if bonus else None,
    entropy_coef=config.entropy_coef,
    segment_ids=batch.segment_ids,
    selected=selected,
  )
  return loss, jax.lax.stop_gradient(Seen(scores.logprobs, scores.entropy, aux.log_ratio))


def _critic_gradient(
  config: UpdateConfig, state: TrainState, batch: Batch
) -> tuple[jax.Array, Any, jax.Array]:
  """Loss of the critic, its gradient, and the values [R, T]."""
  if config.critic is None or state.critic is None:
    raise ValueError("config.critic is given but the state has no critic: see `init_state`")
  critic, params = config.critic, state.critic.params
  loss = partial(_value_loss, critic)
  return micro_batches.summed_gradient(loss, params, batch, config.micro_batches)


def _value_loss(critic: CriticConfig, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Part of the critic's loss that these rows add, and their values."""
  if batch.old_values is None or batch.returns is None:
    raise ValueError("a critic needs old_values and returns in the batch")
  rows = (batch.prompts, batch.prompt_mask, batch.tokens, batch.mask)
  found = scoring.response_values(
    critic.model, params, *rows, seen=batch.seen, segment_ids=batch.segment_ids
  )
  weights = checks.as_constant("loss_weights", batch.loss_weights)
  used = batch.mask & (weights != 0)
  loss = values.clipped_value_loss(
    found, batch.old_values, batch.returns, used, clip=critic.value_clip
  )
  return jnp.sum(masks.zero_masked(weights, used) * loss), jax.lax.stop_gradient(found)


def _stepped(
  config: UpdateConfig | CriticConfig,
  gradient: Any,
  outcome: Outcome,
  state: TrainState | CriticState | None,
  finite: jax.Array,
) -> tuple[Any, Any]:
  """Parameters and optimiser state of a model after its step, if it takes one."""
  assert state is not None
  size = outcome.size
  gradient = optimizers.clipped(gradient, size.norm, config.max_grad_norm)
  take = finite & ~size.zero
  return optimizers.step(config.optimizer, gradient, state.opt_state, state.params, take)
