"""What training carries from step to step, and where it lies on a mesh."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_lm.lm import optimizers, partition, policy
from jaxrl_lm.lm.update_config import UpdateConfig

ROW_AXES = ("data", "fsdp")


class CriticState(NamedTuple):
  """A critic and its optimiser.

  Attributes:
    params: of the critic.
    opt_state: of its optimiser, in float32 at least.
  """

  params: Any
  opt_state: Any


class TrainState(NamedTuple):
  """All that a run must keep to go on as if it had not stopped.

  Attributes:
    step: int32, steps of training done. `update` leaves it: a step may be many updates.
    cursor: int32, prompts taken from the data so far. `update` leaves it.
    skipped: int32, updates that were not made because something was not finite.
    params: of the policy.
    opt_state: of its optimiser, in float32 at least.
    critic: None without one.
  """

  step: Any
  cursor: Any
  skipped: Any
  params: Any
  opt_state: Any
  critic: CriticState | None


def init_state(config: UpdateConfig, params: Any, critic_params: Any = None) -> TrainState:
  """The state before the first step.

  Args:
    config: of the updates.
    params: of the policy. Not copied: nothing here donates or overwrites them.
    critic_params: of the critic, if the configuration has one.

  Returns:
    TrainState.

  Raises:
    ValueError: there are parameters of a critic and no configuration of one, or the reverse.
  """
  if (config.critic is None) != (critic_params is None):
    missing = "config.critic" if config.critic is None else "critic_params"
    raise ValueError(f"config.critic and critic_params go together: {missing} is None")
  critic = None
  if config.critic is not None:
    wide = optimizers.widened(critic_params)
    critic = CriticState(critic_params, config.critic.optimizer.init(wide))
  opt_state = config.optimizer.init(optimizers.widened(params))
  step, cursor, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
  return TrainState(step, cursor, skipped, params, opt_state, critic)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Where the rows of a batch lie: spread over "data" and "fsdp", the same on all of "tensor".

  Args:
    mesh: with axes "data", "fsdp" and "tensor".

  Returns:
    The sharding of every array of a `Batch`.

  Raises:
    ValueError: the mesh has other axes, or they are not Auto.
  """
  _check_mesh(mesh)
  return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def state_shardings(mesh: Mesh, model: policy.Model, config: UpdateConfig) -> TrainState:
  """Where a state lies: parameters by `param_specs`, and moments as their parameters.

  What an optimiser keeps of another shape than the parameter it is of (a factored moment, a
  counter) is whole on every device.

  Args:
    mesh: with Auto axes "data", "fsdp" and "tensor" (of size 1 where not wanted):
      `jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3)`.
    model: the policy.
    config: of the updates.

  Returns:
    A `NamedSharding` for every array of the state.

  Raises:
    ValueError: the mesh has other axes, or they are not Auto.

  Reference: sharded optimiser states: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 5.
  """
  _check_mesh(mesh)
  params = policy.abstract_params(model.config)[1]
  critic_params = config.critic and policy.abstract_params(config.critic.model.config)[1]
  state = jax.eval_shape(partial(init_state, config), params, critic_params)
  whole = NamedSharding(mesh, PartitionSpec())
  critic = None
  if config.critic is not None:
    parts = _with_optimizer(mesh, config.critic.model, critic_params, state.critic.opt_state)
    critic = CriticState(*parts)
  params, opt_state = _with_optimizer(mesh, model, params, state.opt_state)
  return TrainState(whole, whole, whole, params, opt_state, critic)


def _with_optimizer(
  mesh: Mesh, model: policy.Model, params: Any, opt_state: Any
) -> tuple[Any, Any]:
  """Shardings of the parameters of a model, and of the state of its optimiser.

  A leaf belongs to the parameter whose path its own path ends with: so whatever an optimiser wraps
  around trees like that of the parameters, and whichever parts of them it leaves out.
  """
  specs = partition.param_specs(model.config)
  shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
  whole = NamedSharding(mesh, PartitionSpec())
  of_path = {
    path: (param.shape, sharding)
    for (path, param), sharding in zip(
      jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    )
  }

  def placed(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    owners = (of_path.get(path[i:]) for i in range(len(path) + 1))
    shape, sharding = next((owner for owner in owners if owner), (None, whole))
    return sharding if leaf.shape == shape else whole

  return shardings, jax.tree_util.tree_map_with_path(placed, opt_state)


def _check_mesh(mesh: Mesh) -> None:
  names = {*ROW_AXES, "tensor"}
  if set(mesh.axis_names) != names or any(x != AxisType.Auto for x in mesh.axis_types):
    raise ValueError(
      f"the mesh must have the Auto axes {sorted(names)}, got {mesh}: "
      "jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3)"
    )
