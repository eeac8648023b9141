"""From settings to what the library takes: a policy's configuration, a mesh, a `TrainConfig`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh

import jaxrl_lm as rl
from configs.real_runs import Config, Machine
from jaxrl_lm.lm import optimizers, scoring, train_state
from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.huggingface_config import read_config
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.update_config import UpdateConfig
from jaxrl_lm.vocabulary_sharding import VocabularySharding

# How the policy is run: float32 weights, so that small steps are not rounded away.
RUN_AS: dict[str, Any] = {
  "param_dtype": jnp.float32,
  "compute_dtype": jnp.bfloat16,
  "remat": True,
  "scan_layers": True,
}


def policy_config(config: Config) -> PolicyConfig:
  return dataclasses.replace(read_config(config.published), **RUN_AS)


def make_mesh(machine: Machine) -> Mesh | None:
  """None for one device."""
  if machine.count == 1:
    return None
  if jax.device_count() < machine.count:
    raise ValueError(f"{machine.count} devices are needed, and there are {jax.device_count()}")
  sizes = (machine.data, machine.fsdp, machine.tensor)
  names, devices = ("data", "fsdp", "tensor"), jax.devices()[: machine.count]
  return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3, devices=devices)


def train_config(config: Config, mesh: Mesh | None) -> TrainConfig:
  sharding = None
  if mesh is not None:
    rows = train_state.batch_sharding(mesh).spec
    vocabulary = "tensor" if config.machine.tensor > 1 else None
    sharding = VocabularySharding(vocabulary, tokens=rows, mesh=mesh)
  update = UpdateConfig(
    rl.GRPO,
    optimizers.optimizer(optax.linear_schedule(0.0, config.learning_rate, config.warmup)),
    micro_batches=config.micro_batches,
    kl=rl.kl_k2 if config.kl_coef else None,
    kl_coef=config.kl_coef,
    score=partial(scoring.linear_response_scores, sharding=sharding),
  )
  rollout = RolloutConfig(config.num_prompts, config.group_size, config.max_new_tokens)
  return TrainConfig(
    rollout, update, config.steps, seed=config.seed, minibatches=config.minibatches
  )


def placed(shapes: Any, shardings: Any) -> Any:
  """Shapes with their places on a mesh."""

  def leaf(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

  return jax.tree.map(leaf, shapes, shardings)
