"""What a command line names becomes functions; what is wrong lists what there is."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

import experiments.train
import jaxrl_lm as rl
from configs.train import CONFIGS, DEFAULT, Config, Mesh
from experiments.harness import names
from experiments.train import building, policies
from jaxrl_lm import corrections, kl, objectives, ratios
from jaxrl_lm.lm import policy, scoring
from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.pretrained import Pretrained

KEPT = replace(DEFAULT, max_new_tokens=8)


def made(config: Config) -> Any:
  return building.train_config(config, (0,), None, None)


# ------------------------------------------------------------------------------------------ names


def find(written: str, module: Any, **options: Any) -> Any:
  return names.find(written, [module], kind="thing", accepts=callable, **options)


def test_what_is_complete_is_called_and_what_is_not_is_bound() -> None:
  assert find("kl_k3", kl) is kl.kl_k3
  truncated = find("truncated(cap=2.0)", corrections)
  assert isinstance(truncated, partial)
  assert truncated.func is corrections.truncated
  assert truncated.keywords == {"cap": 2.0}
  composed = find("with_reverse_kl_gradient(kl_k3)", kl)
  delta = np.array([-1.0]), np.array([-0.5]), np.array([True])
  np.testing.assert_allclose(composed(*delta), kl.kl_k3(*delta))
  assert find("dr_grpo(length=7)", objectives) == rl.dr_grpo(7)
  assert find("dr_grpo", objectives, given={"length": 9, "other": 1}) == rl.dr_grpo(9)
  clamped = find("clamped(per_sequence, low=-1, high=inf)", ratios)
  assert clamped.args == (ratios.per_sequence, -1, float("inf"))


@pytest.mark.parametrize(
  ("written", "message"),
  [
    ("kl_k4", r"no thing 'kl_k4' \(did you mean kl_k\d\?\); there are .*kl_abs"),
    ("kl_k3(cap=1)", "kl_k3 has no argument cap; its arguments are logprobs, ref_logprobs, mask"),
    ("kl_k3(1, 2", "neither a name nor a call"),
    ("kl_k3(__import__('os').getcwd())", "not found|neither a name, a call nor a constant"),
    ("kl_k3 + 1", "neither a name, a call nor a constant"),
    ("nowhere.kl", "was not found"),
    ("math.nothing", "was not found"),
  ],
)
def test_what_is_no_name_is_said(written: str, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    find(written, kl)


def test_what_is_missing_is_named() -> None:
  with pytest.raises(ValueError, match=r"thing 'dr_grpo' needs length: name\(length=\.\.\.\)"):
    find("dr_grpo", objectives, complete=True)


def test_a_function_of_your_own_is_found_by_its_module() -> None:
  assert names.find("tests.test_train_settings.made", [kl], kind="x", accepts=callable) is not None


# ----------------------------------------------------------------------------------- the settings

DOC = experiments.train.__doc__ or ""
OBJECTIVES = re.findall(r"[\w]+", DOC.partition("Objectives:")[2].partition("Tasks:")[0])


def test_help_lists_every_objective_of_the_table() -> None:
  there = names.candidates(
    [objectives], lambda x: isinstance(x, rl.Objective) or names.returns(x, "Objective")
  )
  assert sorted(OBJECTIVES) == sorted(there)
  tasks = re.findall(r"(\w+)\(", DOC.partition("Tasks:")[2])
  assert sorted(tasks) == sorted(names.candidates(policies.TASKS, policies._is_task))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_makes_a_configuration(name: str) -> None:
  config = made(replace(KEPT, objective=name))
  row = getattr(rl, name.upper(), None) or rl.dr_grpo(8)
  assert config.update.objective == row
  assert (config.update.selection is not None) == (name in ("clip_cov", "kl_cov"))


def test_settings_become_functions() -> None:
  config = replace(
    KEPT,
    level="per_sequence",
    loss_weights="constant_length",
    importance="banded(low=0.5, high=2.0)",
    overlong="overlong_penalty(max_length=8, buffer=2)",
    reward_kl="kl_k1",
    reward_kl_coef=0.1,
    kl="with_reverse_kl_gradient(kl_k3)",
    score="linear_response_scores",
    top_k=5,
    packed=64,
  )
  result = made(config)
  objective = result.update.objective
  assert objective.level is ratios.per_sequence
  assert objective.loss_weights.keywords == {"length": 8}
  assert objective.surrogate == rl.GRPO.surrogate
  assert result.importance.func is corrections.banded
  assert result.rollout.overlong.keywords == {"max_length": 8, "buffer": 2}
  assert result.rollout.top_k == 5
  assert result.packed == 64
  assert result.reward_kl is kl.kl_k1
  assert result.update.score is scoring.linear_response_scores
  assert made(replace(KEPT, kl=None, kl_coef=0.0)).update.kl is None


def rates(config: Config, count: int) -> list[float]:
  """How far each step of gradient 1 goes."""
  optimizer = made(replace(config, optimizer="sgd")).update.optimizer
  params, found = np.zeros(1, np.float32), []
  state = optimizer.init(params)
  for _ in range(count):
    updates, state = optimizer.update(np.ones(1, np.float32), state, params)
    found.append(-float(updates[0]))
  return found


def test_the_learning_rate_warms_up_and_follows_its_schedule() -> None:
  warm = replace(KEPT, learning_rate=0.4, warmup=2)
  np.testing.assert_allclose(rates(warm, 4), [0.0, 0.2, 0.4, 0.4])
  linear = replace(warm, schedule="linear_schedule(end_value=0.0, transition_steps=2)")
  np.testing.assert_allclose(rates(linear, 5), [0.0, 0.2, 0.4, 0.2, 0.0], atol=1e-8)


def test_optimisers_are_ours_then_those_of_optax() -> None:
  params = {"kernel": np.ones(1, np.float32), "bias": np.ones(1, np.float32)}
  optimizer = made(replace(KEPT, optimizer="optimizer(weight_decay=0.5)")).update.optimizer
  updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
  assert updates["kernel"] < 0
  assert updates["bias"] == 0
  assert isinstance(
    made(replace(KEPT, optimizer="lion")).update.optimizer, optax.GradientTransformation
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"objective": "grop"},
      r"no objective 'grop' \(did you mean grpo\?\); there are .*grpo, .*ppo",
    ),
    ({"objective": "grpo(length=3)"}, "objective grpo takes no arguments"),
    ({"level": "per_word"}, "no level 'per_word'.*per_token"),
    ({"loss_weights": "mean"}, "no loss weights 'mean'.*token_mean"),
    ({"kl": "k3"}, "no estimator of the KL 'k3'.*kl_k3"),
    ({"importance": "capped"}, "no importance correction 'capped'.*truncated"),
    ({"optimizer": "adamm"}, "no optimizer 'adamm'.*adam"),
    ({"schedule": "linear_schedule"}, "needs more of its arguments end_value, transition_steps"),
    ({"schedule": "step"}, "no schedule 'step'.*constant_schedule"),
    ({"overlong": "overlong"}, "no penalty 'overlong'.*overlong_penalty"),
    ({"score": "response_logprobs"}, "no scorer 'response_logprobs'.*response_scores"),
    ({"minibatches": 3}, "minibatches = 3 does not divide"),
  ],
)
def test_a_setting_that_is_wrong_lists_what_there_is(changes: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    made(replace(KEPT, **changes))


def test_a_critic_is_the_policy_with_a_head() -> None:
  config = PolicyConfig(8, 16, 32, 1, 2, 1, 8, max_length=32)
  loaded = Pretrained(*policy.init(config, jax.random.key(0)), None)
  critic = building.critic_of(replace(KEPT, objective="ppo"), loaded)
  assert critic.config is not None
  assert critic.config.model.config.scalar_head
  assert not np.asarray(critic.params["value_head"]).any()
  jax.tree.map(
    np.testing.assert_array_equal,
    {k: v for k, v in critic.params.items() if k != "value_head"},
    loaded.params,
  )
  assert building.critic_of(KEPT, loaded) == (None, None)


def test_a_mesh_needs_its_devices() -> None:
  mesh = building.mesh_of(Mesh(data=2, fsdp=2, tensor=2))
  assert mesh is not None
  assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
  assert building.mesh_of(Mesh()) is None
  with pytest.raises(ValueError, match=r"needs 3000 devices.*device_count=3000"):
    building.mesh_of(Mesh(data=3000))


def test_the_default_settings_are_the_first_of_the_named_ones() -> None:
  """The golden is of these, and every other name is another run."""
  assert next(iter(CONFIGS)) == "default"
  assert [name for name, (config, _) in CONFIGS.items() if config == DEFAULT] == ["default"]
