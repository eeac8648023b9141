"""What is wrong with a run, said before anything is drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import masks
from jaxrl_lm.lm import objective_advantages, rollouts
from jaxrl_lm.lm.objective_advantages import Given
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.tasks import Task
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.returns import terminal_rewards


def check_training(
  policy: Pretrained, task: Task, config: TrainConfig, placement: Placement
) -> None:
  """The parts of a run go together.

  Args:
    policy: model and tokenizer.
    task: prompts and rewards.
    config: of the run.
    placement: of its arrays.

  Returns:
    None.

  Raises:
    ValueError: they do not.
    TypeError: the objective's advantages have a parameter that nothing is known of.
  """
  rollouts.check_rollout(policy, task, config.rollout)
  longest = max(len(prompt.tokens) for prompt in task.prompts) + config.rollout.max_new_tokens
  if config.packed is not None and config.packed < longest:
    raise ValueError(
      f"packed = {config.packed} is shorter than the longest prompt and max_new_tokens, {longest}: "
      "sequences are not cut"
    )
  needs = objective_advantages.needs(config.update.objective.advantages)
  if ("values" in needs) != (config.update.critic is not None):
    raise ValueError(
      "the objective's advantages take values, so update.critic must be given"
      if "values" in needs
      else "update.critic is given, but the objective's advantages do not take values"
    )
  _check_teaches(task, config)
  if config.rollout.rows % placement.shards:
    raise ValueError(
      f"num_prompts x group_size = {config.rollout.rows} rows do not go over the "
      f"{placement.shards} devices of the mesh's axes for rows"
    )
  if jax.process_count() > 1:
    raise ValueError(f"one process must drive all devices, this is one of {jax.process_count()}")


def _check_teaches(task: Task, config: TrainConfig) -> None:
  """Advantages of rewards that all differ, small and large: if all are 0, nothing can be learnt."""
  groups, size = config.rollout.num_prompts, config.rollout.group_size
  slot = config.update.objective.advantages
  components = len(rollouts.in_total(task, config.rollout))
  teaches = partial(_teaches, slot, components, config.rollout.max_new_tokens)
  spread = np.linspace(-1, 2, groups * size, dtype=np.float32).reshape(groups, size)
  if not any(teaches(sign * scale * spread) for scale in (1, 100, 1e4) for sign in (1, -1)):
    raise ValueError(
      f"with group_size = {size} (num_prompts = {groups}) the objective's advantages are 0 "
      "whatever the rewards: it compares a response with others of its group"
    )


@partial(jax.jit, static_argnames=("slot", "components", "length"))
def _teaches(slot: Any, components: int, length: int, rewards: jax.Array) -> jax.Array:
  """Whether an advantage of responses of one length with these rewards [P, G] is not 0."""
  mask = jnp.ones((*rewards.shape, length), jnp.bool_)
  given = Given(
    rewards=rewards,
    where=mask[..., 0],
    lengths=masks.lengths(mask),
    mask=mask,
    token_rewards=terminal_rewards(rewards, mask),
    component_rewards=jnp.broadcast_to(rewards, (components, *rewards.shape)),
    greedy_rewards=jnp.zeros(rewards.shape[0]),
    values=jnp.zeros(mask.shape),
  )
  return jnp.any(objective_advantages.advantages_of(slot, given))
