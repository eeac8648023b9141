"""The loop with transformers: on a mesh, and with a critic."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxrl_lm as rl
from jaxrl_lm.lm import policy as policies
from jaxrl_lm.lm.optimizers import optimizer
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.tasks import Component, Prompt, Task
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.training import train
from jaxrl_lm.lm.update_config import CriticConfig, UpdateConfig

END = 7
SIZES = policies.PolicyConfig(
  vocab_size=8,
  hidden_size=16,
  intermediate_size=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  max_length=16,
)


def mean_token(responses: Any) -> np.ndarray:
  """Between 0 and 1, and almost never the same twice."""
  return (responses.tokens * responses.mask).sum(axis=1) / (7 * responses.mask.sum(axis=1))


PROMPTS = tuple(Prompt(str(i), (i,)) for i in range(4))
TASK = Task(PROMPTS, (), (Component("mean token", mean_token),))
CONFIG = TrainConfig(
  rollout=RolloutConfig(num_prompts=4, group_size=4, max_new_tokens=4, stop_tokens=(END,)),
  update=UpdateConfig(objective=rl.GRPO, optimizer=optimizer(0.02), micro_batches=2),
  steps=2,
  minibatches=2,
)
MESHES = [(4, 2, 1), (2, 2, 2)]


def network(seed: int, **changes: Any) -> tuple[Any, Any]:
  config = replace(SIZES, **changes)
  model, _ = policies.abstract_params(config)
  params = jax.jit(lambda key: policies.init(config, key)[1])(jax.random.key(seed))
  return model, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)


@pytest.fixture(scope="module")
def policy() -> Pretrained:
  return Pretrained(*network(0), None)


@pytest.fixture(scope="module")
def alone(policy: Pretrained) -> list[Any]:
  return list(train(policy, TASK, CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=["data 4, fsdp 2", "2, 2, tensor 2"])
def test_eight_devices_are_one(sizes: Any, policy: Pretrained, alone: list[Any]) -> None:
  """The same samples, the same losses and parameters.

  Partial sums of 8 devices are added in another order: a few units of float32, of losses that are
  differences of terms of size 1. Adam divides by the size of the gradient, and so the parameters
  differ by rounding relative to a step (0.02), not to themselves.
  """
  mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  spread = list(train(policy, TASK, CONFIG, mesh=mesh))
  assert len(spread) == len(alone) == 2
  for (state, report), (want, seen) in zip(spread, alone):
    assert report.samples == seen.samples
    assert report.tokens == seen.tokens
    jax.tree.map(np.testing.assert_array_equal, report.rewards, seen.rewards)
    np.testing.assert_allclose(report.metrics.loss.total, seen.metrics.loss.total, atol=1e-5)
    np.testing.assert_allclose(report.metrics.entropy.total, seen.metrics.entropy.total, rtol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-3), state.params, want.params)
    kernel = state.params["layers"][0]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (16 // sizes[1], 16 // sizes[2])
  kept = jax.tree.map(np.asarray, spread[0][0])
  ((resumed, _),) = train(policy, TASK, CONFIG, state=kept, mesh=mesh)
  jax.tree.map(np.testing.assert_array_equal, resumed, spread[1][0])


def test_rows_that_do_not_go_over_the_mesh_are_an_error(policy: Pretrained) -> None:
  mesh = jax.make_mesh((8, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  config = replace(CONFIG, rollout=replace(CONFIG.rollout, group_size=3))
  with pytest.raises(ValueError, match="12 rows do not go over the 8 devices"):
    train(policy, TASK, config, mesh=mesh)


@pytest.mark.slow
def test_a_critic_learns_beside_its_policy(policy: Pretrained) -> None:
  """PPO: values before each token, targets gae + values, resumed to the bit like everything."""
  model, params = network(1, scalar_head=True)
  critic = CriticConfig(model=model, optimizer=optimizer(0.02))
  ppo = replace(rl.PPO, advantages=partial(rl.gae, gae_lambda=0.95))
  update = replace(CONFIG.update, objective=ppo, critic=critic)
  config = replace(CONFIG, update=update, advantage_transform=rl.whiten, steps=40)
  run = list(train(policy, TASK, config, critic_params=params))
  losses = [float(report.metrics.critic.loss.mean()) for _, report in run]
  assert np.mean(losses[-5:]) < 0.1 * np.mean(losses[:5])
  kept = jax.tree.map(np.asarray, run[-2][0])
  ((resumed, _),) = train(policy, TASK, config, state=kept)
  jax.tree.map(np.testing.assert_array_equal, resumed, run[-1][0])


@pytest.mark.slow
def test_a_greedy_baseline_and_a_selection_that_draws(policy: Pretrained) -> None:
  for objective, selection in [
    (rl.REMAX, None),
    (rl.CLIP_COV, partial(rl.clip_cov_selection, fraction=0.1, cov_low=-1e9, cov_high=1e9)),
  ]:
    update = replace(CONFIG.update, objective=objective, selection=selection)
    run = [list(train(policy, TASK, replace(CONFIG, update=update))) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, run[0][-1][0], run[1][-1][0])
    assert all(report.metrics is not None for _, report in run[0])


def test_a_critic_without_an_objective_for_it(policy: Pretrained) -> None:
  critic = CriticConfig(model=policy.model, optimizer=optimizer(0.02))
  config = replace(CONFIG, update=replace(CONFIG.update, critic=critic))
  with pytest.raises(ValueError, match="do not take values"):
    train(policy, TASK, config)
