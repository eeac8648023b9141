"""A run with packed rows is the run without, and as reproducible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxrl_lm as rl
from jaxrl_lm.lm import batches, rollouts, step_rows
from jaxrl_lm.lm import policy as policies
from jaxrl_lm.lm.optimizers import optimizer
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.tasks import Component, Prompt, Task
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import init_state
from jaxrl_lm.lm.training import train
from jaxrl_lm.lm.update_config import CriticConfig, UpdateConfig
from tests.bigram import Bigram

END, VOCABULARY, LENGTH = 7, 8, 12
PARAMS = jax.random.normal(jax.random.key(3), (VOCABULARY, VOCABULARY))
POLICY = Pretrained(Bigram(VOCABULARY), PARAMS, None)


def mean_token(responses: Any) -> np.ndarray:
  return (responses.tokens * responses.mask).sum(axis=1) / (7 * responses.mask.sum(axis=1))


PROMPTS = tuple(Prompt(str(i), tuple(range(1, i + 1))) for i in range(1, 5))
TASK = Task(PROMPTS, (), (Component("mean token", mean_token),))
CONFIG = TrainConfig(
  rollout=RolloutConfig(num_prompts=4, group_size=4, max_new_tokens=6, stop_tokens=(END,)),
  update=UpdateConfig(
    objective=rl.GSPO, optimizer=optax.sgd(0.5), micro_batches=2, kl=rl.kl_k2, kl_coef=0.1
  ),
  steps=3,
  epochs=2,
  minibatches=2,
  reward_kl=rl.kl_k1,
  reward_kl_coef=0.1,
)
PACKED = replace(CONFIG, packed=LENGTH)


@pytest.fixture(scope="module")
def packed() -> list[Any]:
  return list(train(POLICY, TASK, PACKED))


def test_a_run_is_that_without_packing(packed: list[Any]) -> None:
  plain = list(train(POLICY, TASK, CONFIG))
  for (state, report), (want, seen) in zip(packed, plain, strict=True):
    assert report.samples == seen.samples
    assert report.tokens == seen.tokens
    # float32 sums in another order, three steps long.
    np.testing.assert_allclose(state.params, want.params, atol=2e-6)
    assert int(report.metrics.entropy.count) == int(seen.metrics.entropy.count)
    for name in ("loss", "grad_norm", "entropy"):
      found, expected = (getattr(x.metrics, name).mean() for x in (report, seen))
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
  assert (packed[-1][0].params != PARAMS).any()


def test_a_run_that_goes_on_is_the_straight_run(packed: list[Any]) -> None:
  kept = jax.tree.map(np.asarray, packed[0][0])
  resumed = list(train(POLICY, TASK, PACKED, state=kept))
  jax.tree.map(np.testing.assert_array_equal, resumed[-1][0], packed[-1][0])


def prepared(config: TrainConfig, step: int = 0) -> tuple[Any, Any]:
  drawn = rollouts.rollout(POLICY, TASK, config.rollout, seed=config.seed, step=step, cursor=0)
  state = init_state(config.update, PARAMS)._replace(step=jnp.int32(step))
  batch = batches.score_rollout(Bigram(VOCABULARY), config, state, PARAMS, drawn, Placement())
  return drawn, batches.with_advantages(config, batch, drawn)


@pytest.mark.parametrize("drop", [False, True])
def test_scores_are_of_the_rows_that_are_learnt_from(drop: bool) -> None:
  """In another row log-probs are the same to rounding only: a ratio of 1 would not be 1."""
  config = replace(PACKED, rollout=replace(CONFIG.rollout, drop_unfinished=drop))
  drawn, batch = prepared(config, step=5)
  _, plain = prepared(replace(config, packed=None), step=5)
  for name in ("old_logprobs", "ref_logprobs", "advantages"):
    np.testing.assert_allclose(getattr(batch, name), getattr(plain, name), atol=2e-6)
  learnt = list(batches.minibatches(config, batch, 5, Placement()))
  assert len(learnt) == 4
  scored = []

  def score(rows: Any, parts: int) -> Any:
    scored.append((rows[0][2], rows[1]["segment_ids"]))
    return np.zeros(rows[0][2].shape)

  unscored = batch._replace(mask=drawn.samples.mask, seen=None)
  step_rows.scorer(config, unscored, 5, Placement())(score)
  for (tokens, ids), part in zip(scored, learnt[:2], strict=True):
    np.testing.assert_array_equal(tokens, part.tokens)
    np.testing.assert_array_equal(ids, part.segment_ids)
  for epoch in (learnt[:2], learnt[2:]):
    assert sum(int(part.mask.sum()) for part in epoch) == batch.mask.sum()
    assert all(len(part.tokens) % 2 == 0 for part in epoch)


def test_rows_that_are_too_short_are_an_error_before_anything_is_drawn() -> None:
  with pytest.raises(ValueError, match=r"packed = 9 is shorter than .* max_new_tokens, 10"):
    train(POLICY, TASK, replace(CONFIG, packed=9))
  with pytest.raises(ValueError, match="packed"):
    replace(CONFIG, packed=0)
  with pytest.raises(TypeError, match="packed"):
    replace(CONFIG, packed=12.0)


# ------------------------------------------------------------------------------------ transformers

SIZES = policies.PolicyConfig(
  vocab_size=VOCABULARY,
  hidden_size=16,
  intermediate_size=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  max_length=10,
)


def network(**changes: Any) -> tuple[Any, Any]:
  model, params = policies.init(replace(SIZES, **changes), jax.random.key(0))
  return model, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_first_update_is_on_policy(dtype: Any) -> None:
  """Of the whole sequence, as GSPO takes it; its band is 3e-4 wide."""
  policy = Pretrained(*network(compute_dtype=dtype), None)
  config = replace(PACKED, steps=1, epochs=1, minibatches=1)
  ((_, report),) = train(policy, TASK, config)
  extremes = report.metrics.log_ratio_extremes
  assert max(abs(float(x)) for x in (extremes.low, extremes.high)) < 1e-6


@pytest.mark.slow
def test_a_critic_on_eight_devices() -> None:
  """PPO on a mesh, packed, is PPO on one device, not packed."""
  policy = Pretrained(*network(), None)
  critic, critic_params = network(scalar_head=True)
  update = UpdateConfig(
    rl.PPO, optax.sgd(0.1), critic=CriticConfig(critic, optax.sgd(0.1)), entropy_coef=0.01
  )
  config = replace(CONFIG, update=update, steps=2, reward_kl=None, reward_kl_coef=0.0)
  axes, types = ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 2, 2), axes, axis_types=types)
  plain = list(train(policy, TASK, config, critic_params=critic_params))
  spread = replace(config, packed=LENGTH)
  found = list(train(policy, TASK, spread, critic_params=critic_params, mesh=mesh))
  for (state, report), (want, seen) in zip(found, plain, strict=True):
    assert report.samples == seen.samples
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
    jax.tree.map(close, (state.params, state.critic.params), (want.params, want.critic.params))


@pytest.mark.slow
def test_packed_runs_learn_in_few_shapes() -> None:
  shapes = set()
  config = replace(PACKED, steps=12, update=replace(CONFIG.update, optimizer=optimizer(0.05)))
  run = list(train(POLICY, TASK, config))
  for step in range(12):
    _, batch = prepared(config, step)
    shapes |= {part.tokens.shape for part in batches.minibatches(config, batch, step, Placement())}
  assert len(shapes) <= 3
  rewards = [float(report.rewards["total"].mean()) for _, report in run]
  assert np.mean(rewards[-3:]) > np.mean(rewards[:3])
