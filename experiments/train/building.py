"""From the settings of a run, which are names and numbers, to its functions and arrays."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

import configs.train as settings
from experiments.harness import names
from jaxrl_lm import (
  corrections,
  kl,
  loss_weights,
  objectives,
  ratios,
  returns,
  selection,
)
from jaxrl_lm.lm import (
  objective_advantages,
  optimizers,
  policy,
  scoring,
  train_state,
  update_config,
)
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.update_config import CriticConfig, UpdateConfig
from jaxrl_lm.objectives import Objective
from jaxrl_lm.vocabulary_sharding import VocabularySharding

# The fractions of the paper, arXiv:2505.22617.
SELECTIONS = {
  "clip_cov": "clip_cov_selection(fraction=0.0002)",
  "kl_cov": "kl_cov_tokens(fraction=0.002)",
}


class Critic(NamedTuple):
  """A critic's configuration and its parameters; both None without one."""

  config: CriticConfig | None
  params: Any


def objective(config: settings.Config) -> Objective:
  """The row of the table, with the slots that the settings replace."""
  length = {"length": config.max_new_tokens}
  found = names.find(
    config.objective,
    [objectives],
    kind="objective",
    accepts=lambda x: isinstance(x, Objective) or names.returns(x, "Objective"),
    given=length,
    complete=True,
  )
  slots: dict[str, Any] = {}
  if config.level is not None:
    slots["level"] = names.find(
      config.level,
      [ratios],
      kind="level",
      accepts=lambda x: _takes("log_ratio", "mask")(x) or _takes("level")(x),
    )
  if config.loss_weights is not None:
    slots["loss_weights"] = names.find(
      config.loss_weights,
      [loss_weights],
      kind="loss weights",
      accepts=_takes("mask"),
      given=length,
    )
  return dataclasses.replace(found, **slots)


def train_config(
  config: settings.Config,
  stop_tokens: tuple[int, ...] | None,
  critic: CriticConfig | None,
  mesh: Any,
) -> TrainConfig:
  """The configuration of the loop."""
  return TrainConfig(
    rollout=_rollout(config, stop_tokens),
    update=_update(config, critic, mesh),
    steps=config.steps,
    seed=config.seed,
    epochs=config.epochs,
    minibatches=config.minibatches,
    reward_kl=_estimator(config.reward_kl),
    reward_kl_coef=config.reward_kl_coef,
    importance=_optional(
      config.importance, [corrections], "importance correction", _takes("log_weights", "mask")
    ),
    packed=config.packed,
    shown=config.shown,
  )


def critic_of(config: settings.Config, loaded: Pretrained) -> Critic:
  """The policy with a scalar head, where the objective's advantages take values."""
  if "values" not in objective_advantages.needs(objective(config).advantages):
    return Critic(None, None)
  with_head = dataclasses.replace(loaded.model.config, scalar_head=True)
  model, fresh = policy.init(with_head, jax.random.key(config.seed))
  optimizer = optimizers.optimizer(config.critic.learning_rate)
  made = CriticConfig(
    model, optimizer, value_clip=config.critic.value_clip, max_grad_norm=config.max_grad_norm
  )
  return Critic(made, {**fresh, **loaded.params})


def mesh_of(sizes: settings.Mesh) -> Mesh | None:
  """The mesh; None for one device.

  Raises:
    ValueError: there are fewer devices.
  """
  shape = (sizes.data, sizes.fsdp, sizes.tensor)
  count, there = math.prod(shape), jax.device_count()
  if count == 1:
    return None
  if count > there or min(shape) < 1:
    raise ValueError(
      f"a mesh of {sizes.data} x {sizes.fsdp} x {sizes.tensor} needs {count} devices, and there "
      f"are {there} (on a CPU XLA_FLAGS=--xla_force_host_platform_device_count={count} makes them)"
    )
  axes = ("data", "fsdp", "tensor")
  types = (AxisType.Auto,) * 3
  return jax.make_mesh(shape, axes, axis_types=types, devices=jax.devices()[:count])


def overrides(config: settings.Config) -> dict[str, Any]:
  """Fields of the policy's configuration that the settings change."""
  computed = {"compute_dtype": jnp.bfloat16} if config.bfloat16 else {}
  return computed | ({"remat": True} if config.remat else {})


def _rollout(config: settings.Config, stop_tokens: tuple[int, ...] | None) -> RolloutConfig:
  if config.max_new_tokens is None:
    raise ValueError("max_new_tokens must be known here: `policies.start` says it")
  return RolloutConfig(
    num_prompts=config.num_prompts,
    group_size=config.group_size,
    max_new_tokens=config.max_new_tokens,
    stop_tokens=stop_tokens,
    top_k=config.top_k,
    top_p=config.top_p,
    attempts=config.attempts,
    overlong=_optional(config.overlong, [returns], "penalty", _takes("lengths")),
    drop_unfinished=config.drop_unfinished,
  )


def _update(config: settings.Config, critic: CriticConfig | None, mesh: Any) -> UpdateConfig:
  made = objective(config)
  return UpdateConfig(
    objective=made,
    optimizer=_optimizer(config),
    micro_batches=config.micro_batches,
    temperature=config.temperature,
    kl=_estimator(config.kl),
    kl_coef=config.kl_coef,
    entropy_coef=config.entropy_coef,
    selection=_selection(config, made),
    score=_score(config, mesh),
    max_grad_norm=config.max_grad_norm,
    critic=critic,
  )


def _optimizer(config: settings.Config) -> optax.GradientTransformation:
  rate: Any = config.learning_rate
  schedule = names.find(
    config.schedule,
    [optax],
    kind="schedule",
    accepts=lambda x: names.parameters(x)[:1] in (["value"], ["init_value"]),
    given={"value": rate, "init_value": rate},
  )
  if isinstance(schedule, partial):
    raise ValueError(
      f"schedule {config.schedule!r} needs more of its arguments "
      f"{', '.join(names.parameters(schedule.func)[1:])}"
    )
  if config.warmup:
    up = optax.linear_schedule(0.0, rate, config.warmup)
    schedule = optax.join_schedules([up, schedule], [config.warmup])
  return names.find(
    config.optimizer,
    [optimizers, optax],
    kind="optimizer",
    accepts=lambda x: names.parameters(x)[:1] == ["learning_rate"],
    given={"learning_rate": schedule},
    complete=True,
  )


def _selection(config: settings.Config, made: Objective) -> Any:
  surrogate = made.surrogate.func if isinstance(made.surrogate, partial) else made.surrogate
  written = config.selection or SELECTIONS.get(surrogate.__name__)
  modules = [selection, update_config]
  return _optional(written, modules, "selection", _takes("advantages", "mask", "fraction"))


def _score(config: settings.Config, mesh: Any) -> Any:
  def accepts(x: Any) -> bool:
    return names.returns(x, "TokenScores")

  score = names.find(config.score, [scoring], kind="scorer", accepts=accepts)
  if mesh is None or "sharding" not in names.parameters(score):
    return score
  rows = PartitionSpec(train_state.ROW_AXES)
  return partial(score, sharding=VocabularySharding("tensor", rows, mesh))


def _estimator(written: str | None) -> Any:
  def accepts(x: Any) -> bool:
    return _takes("logprobs", "ref_logprobs", "mask")(x) or _takes("estimator")(x)

  return _optional(written, [kl], "estimator of the KL", accepts)


def _optional(written: str | None, modules: list[Any], kind: str, accepts: Any) -> Any:
  if written is None:
    return None
  return names.find(written, modules, kind=kind, accepts=accepts)


def _takes(*wanted: str) -> Any:
  """Whether a value is a function with these parameters."""
  return lambda x: {*wanted} <= {*names.parameters(x)}
