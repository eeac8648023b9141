r"""From responses to the rows that an update learns from.

  score        old log-probs, by the update's own scorer, never the sampler's; reference; values
  reward       less a KL penalty where it is configured
  advantages   once, on whole groups
  weights      of the loss, once for each minibatch, before it is cut into micro-batches
  pack         the rows of a minibatch, where the config says so; scored in the same rows

Arrays are NumPy's between these steps: they are small, and an update puts its rows where it wants
them. Minibatches are made of whole groups, so that each has its own baselines in it, and weights
that are taken per group are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import masks, ratios
from jaxrl_lm.lm import objective_advantages, step_rows
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.objective_advantages import Given
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.rollouts import Rollout
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import TrainState
from jaxrl_lm.returns import kl_shaped_rewards, terminal_rewards


def score_rollout(
  model: Any,
  config: TrainConfig,
  state: TrainState,
  ref_params: Any,
  rollout: Rollout,
  placement: Placement,
) -> Batch:
  """The rows of a step, before there are advantages and weights: both are 0.

  Args:
    model: of the policy.
    config: of the run.
    state: the parameters that drew the responses, and those of the critic; its step.
    ref_params: of the reference policy; used if the loss or the reward has a KL term.
    rollout: the responses.
    placement: of the rows.

  Returns:
    Batch of N rows. The mask holds what the loss counts: of samples that could be scored, and if
    the config says so only of finished ones.
  """
  update, drawn = config.update, rollout.samples
  nothing: Any = np.zeros(drawn.tokens.shape, np.float32)
  rows: tuple[Any, ...] = (rollout.prompts, rollout.prompt_mask, drawn.tokens, drawn.mask)
  batch = Batch(
    prompts=rows[0],
    prompt_mask=rows[1],
    tokens=rows[2],
    mask=rows[3],
    advantages=nothing,
    loss_weights=nothing,
  )
  scored = step_rows.scorer(config, batch, int(state.step), placement)

  def logprobs(params: Any) -> Any:
    policy = placement.scored(model)
    return scored(partial(step_rows.logprobs, policy, update.score, params, update.temperature))

  ref_logprobs: Any = None
  old_values: Any = None
  if config.needs_reference:
    ref_logprobs = logprobs(ref_params)
  if update.critic is not None and state.critic is not None:
    critic = placement.scored(update.critic.model)
    old_values = scored(partial(step_rows.values, critic, state.critic.params))
  return batch._replace(
    mask=counted(config, rollout),
    old_logprobs=logprobs(state.params),
    sampler_logprobs=drawn.logprobs,
    ref_logprobs=ref_logprobs,
    old_values=old_values,
    # Rows are packed alike for scores and updates, whatever the loss leaves out.
    seen=None if config.packed is None else rows[3],
  )


def counted(config: TrainConfig, rollout: Rollout) -> Any:
  """[N, T] the tokens that the loss counts.

  Args:
    config: of the run.
    rollout: the responses.

  Returns:
    The mask.
  """
  rows = rollout.scorable
  if config.rollout.drop_unfinished:
    rows &= rollout.samples.finished
  return rollout.samples.mask & rows[:, None]


def with_advantages(config: TrainConfig, batch: Batch, rollout: Rollout) -> Batch:
  """The rows with advantages, the critic's targets and importance weights.

  Args:
    config: of the run.
    batch: of `score_rollout`.
    rollout: the responses it is of.

  Returns:
    The batch; the weights of the loss are still 0.

  Raises:
    ValueError: what `config.importance` returns is not finite, or of another shape.
  """
  scored: Any = rollout.scorable
  arrays = _Arrays(
    rewards=np.where(scored, rollout.scores.total, 0),
    where=scored,
    drawn=rollout.samples.mask,
    components=np.where(scored[:, None], rollout.component_rewards, 0),
    old_logprobs=batch.old_logprobs,
    ref_logprobs=batch.ref_logprobs,
    old_values=batch.old_values,
    greedy_rewards=rollout.greedy_rewards,
  )
  slots = (config.update.objective.advantages, config.advantage_transform, config.reward_kl)
  groups = (config.rollout.num_prompts, config.rollout.group_size)
  made: Any = jax.tree.map(np.asarray, _advantages(slots, groups, arrays, config.reward_kl_coef))
  advantages, returns = made
  batch = batch._replace(advantages=advantages, returns=returns)
  if config.importance is None:
    return batch
  old, sampler, mask = (
    jnp.asarray(x) for x in (batch.old_logprobs, batch.sampler_logprobs, batch.mask)
  )
  weights: Any = np.asarray(config.importance(ratios.token_log_ratio(old, sampler, mask), mask))
  _check_importance(weights, batch.mask)
  return batch._replace(importance_weights=weights)


def _check_importance(weights: Any, mask: Any) -> None:
  rows, length = mask.shape
  if weights.shape not in ((rows, length), (rows, 1)):
    raise ValueError(
      f"importance must return [N, T] {mask.shape} or [N, 1], got shape {weights.shape}"
    )
  if odd := np.flatnonzero((mask & ~np.isfinite(weights)).any(axis=1)).tolist():
    raise ValueError(f"importance must return finite weights, and in rows {odd[:8]} it does not")


def has_signal(batch: Batch) -> bool:
  """Whether there is anything to learn: an advantage that is not 0, at a token that counts.

  Args:
    batch: of `with_advantages`.

  Returns:
    True if so.
  """
  return bool(np.any((np.asarray(batch.advantages) != 0) & np.asarray(batch.mask)))


def minibatches(
  config: TrainConfig, batch: Batch, step: int, placement: Placement
) -> Iterator[Batch]:
  """The updates of a step: every epoch visits all groups once, in an order of its own.

  Args:
    config: of the run.
    batch: of `with_advantages`. Its old log-probs are those of all of its minibatches.
    step: of the run.
    placement: of the rows.

  Returns:
    Iterator of batches with the weights of the loss, of N / minibatches rows each; more, if empty
    rows are needed for equal parts; fewer, if they are packed.
  """
  size = config.rollout.group_size
  for epoch in range(config.epochs):
    for rows in step_rows.minibatch_rows(config, step, epoch):
      part = step_rows.taken(batch, rows)
      mask = part.mask.reshape(len(rows) // size, size, -1)
      weights: Any = np.asarray(_loss_weights(config.update.objective.loss_weights, mask))
      part = part._replace(loss_weights=weights.reshape(part.mask.shape))
      yield step_rows.filled(config, part, placement)


class _Arrays(NamedTuple):
  """What advantages are made of, a row per sample, [N, ..]; greedy rewards are [P]."""

  rewards: Any
  where: Any
  drawn: Any
  components: Any
  old_logprobs: Any
  ref_logprobs: Any
  old_values: Any
  greedy_rewards: Any


@partial(jax.jit, static_argnames=("slots", "groups"))
def _advantages(
  slots: tuple[Any, Any, Any], groups: tuple[int, int], arrays: _Arrays, kl_coef: Any
) -> tuple[jax.Array, jax.Array | None]:
  """Advantages [N, T or 1] and the critic's targets [N, T] or None."""
  advantages_slot, transform, reward_kl = slots
  greedy_rewards = arrays.greedy_rewards
  rows = arrays._replace(greedy_rewards=None)
  grouped = jax.tree.map(lambda x: x.reshape(*groups, *x.shape[1:]), rows)
  mask = grouped.drawn & grouped.where[..., None]
  rewards, token_rewards = grouped.rewards, terminal_rewards(grouped.rewards, mask)
  if reward_kl is not None:
    kl = reward_kl(grouped.old_logprobs, grouped.ref_logprobs, mask)
    token_rewards = kl_shaped_rewards(token_rewards, kl, mask, kl_coef=kl_coef)
    rewards -= kl_coef * masks.masked_sum(kl, mask, axis=-1)
  given = Given(
    rewards=rewards,
    where=grouped.where,
    lengths=masks.lengths(grouped.drawn),
    mask=mask,
    token_rewards=token_rewards,
    component_rewards=jnp.moveaxis(grouped.components, -1, 0),
    greedy_rewards=greedy_rewards,
    values=grouped.old_values,
  )
  advantages, returns = objective_advantages.advantages_of(advantages_slot, given), None

  def by_row(x: jax.Array) -> jax.Array:
    return x.reshape(arrays.where.shape[0], -1)

  if given.values is not None:
    returns = by_row(advantages + given.values)
  if transform is not None:
    advantages = transform(jnp.broadcast_to(advantages, mask.shape), mask)
  return by_row(advantages), returns


@partial(jax.jit, static_argnames="slot")
def _loss_weights(slot: Any, mask: jax.Array) -> jax.Array:
  return slot(mask)
