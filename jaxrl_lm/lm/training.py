r"""The training loop: sample, reward, score, advantages, update; one step at a time.

  policy = load("stories260K.bin")
  for state, report in train(policy, task, config):
    print(report.step, report.rewards["total"].mean())

It yields after every step, so that whoever calls it prints, saves, evaluates and stops. A run is
a function of the policy it starts from, the task and the configuration: everything random in it
depends on (seed, step, row), and the place in the data is a number in the state. `train(policy,
task, config, state=state)` goes on from any state that it has yielded, kept in memory or restored
from a file, as if it had never stopped: on CPU to the last bit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_lm.lm import batches, objective_advantages, reports, rollouts, train_checks, updates
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.reports import Report
from jaxrl_lm.lm.tasks import Task
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import TrainState, init_state
from jaxrl_lm.lm.update_metrics import UpdateMetrics


def train(
  policy: Pretrained,
  task: Task,
  config: TrainConfig,
  *,
  state: TrainState | None = None,
  critic_params: Any = None,
  mesh: Mesh | None = None,
) -> Iterator[tuple[TrainState, Report]]:
  """Trains a policy on a task.

  Args:
    policy: where the run starts, and the reference of KL terms. Not changed.
    task: prompts and rewards.
    config: of the run.
    state: to go on from; arrays may be NumPy's. None = the policy's parameters, step 0.
    critic_params: to start from, where the configuration has a critic and there is no state.
    mesh: with Auto axes "data", "fsdp" and "tensor": rows go over the first two, parameters and
      moments over the last two. None = the default device. One process drives all devices.

  Returns:
    Iterator of the state after each step and its report, up to `config.steps`.

  Raises:
    ValueError: before anything is drawn: a prompt does not fit the context, there is no stop token,
      the objective does not go with the group size or the critic, or rows not with the mesh. In a
      step: a reward fails (`tasks.RewardError`).
    TypeError: the objective's advantages ask for what there is not.
  """
  placement = Placement(mesh)
  train_checks.check_training(policy, task, config, placement)
  if state is None:
    state = init_state(config.update, policy.params, critic_params)
  state = placement.state(state, policy.model, config.update)
  reference = None
  if config.needs_reference:
    start = state._replace(params=policy.params)
    reference = placement.state(start, policy.model, config.update).params
  update = updates.compile_update(policy.model, config.update, mesh)
  return _steps(policy, task, config, state, reference, update, placement)


def _steps(
  policy: Pretrained,
  task: Task,
  config: TrainConfig,
  state: TrainState,
  reference: Any,
  update: Callable[..., Any],
  placement: Placement,
) -> Iterator[tuple[TrainState, Report]]:
  greedy = "greedy_rewards" in objective_advantages.needs(config.update.objective.advantages)
  for step in range(int(state.step), config.steps):
    times = [time.perf_counter()]
    drawn = rollouts.rollout(
      policy._replace(params=placement.sampled(policy.model, state.params)),
      task,
      config.rollout,
      seed=config.seed,
      step=step,
      cursor=int(state.cursor),
      temperature=config.update.temperature,
      greedy=greedy,
      place=placement.rows,
    )
    times.append(time.perf_counter())
    batch = batches.score_rollout(policy.model, config, state, reference, drawn, placement)
    batch = batches.with_advantages(config, batch, drawn)
    times.append(time.perf_counter())

    metrics = None
    if batches.has_signal(batch):
      for number, part in enumerate(batches.minibatches(config, batch, step, placement)):
        state, seen = update(state, part, _selection_key(config.seed, step, number))
        metrics = seen if metrics is None else _merged(metrics, seen)
    cursor = int(state.cursor) + drawn.consumed
    state = state._replace(step=jnp.int32(step + 1), cursor=jnp.int32(cursor))
    jax.block_until_ready(state)
    times.append(time.perf_counter())
    spans = (after - before for before, after in itertools.pairwise(times))
    seconds = dict(zip(("sampling", "scoring", "update"), spans, strict=True))
    yield state, reports.report(config, step, drawn, batch, metrics, seconds)


@jax.jit
def _merged(metrics: UpdateMetrics, more: UpdateMetrics) -> UpdateMetrics:
  return metrics + more


def _selection_key(seed: int, step: int, number: int) -> jax.Array:
  """Of the random numbers of an update; the sampler folds steps into the seed, never this."""
  key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(2**32 - 1))
  return jax.random.fold_in(jax.random.fold_in(key, step), number)
