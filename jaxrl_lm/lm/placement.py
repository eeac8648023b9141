"""Where the arrays of a run lie: on the default device, or over a mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_lm.lm import train_state
from jaxrl_lm.lm.gathered import Gathered, whole_shardings
from jaxrl_lm.lm.train_state import TrainState
from jaxrl_lm.lm.update_config import UpdateConfig


@dataclasses.dataclass(frozen=True)
class Placement:
  """A mesh, or none.

  Attributes:
    mesh: with Auto axes "data", "fsdp" and "tensor"; None = the default device.
  """

  mesh: Mesh | None = None

  @property
  def shards(self) -> int:
    """In how many parts rows are cut."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[axis] for axis in train_state.ROW_AXES)

  def scored(self, model: Any) -> Any:
    """The model as `compile_update` scores with it, so that log-probs are of the same program.

    Args:
      model: a policy or a critic.

    Returns:
      It, or with its parameters gathered where it computes.
    """
    return model if self.mesh is None else Gathered(model, self.mesh)

  def sampled(self, model: Any, params: Any) -> Any:
    """Parameters whole over "fsdp", for the sampler, which reads them at every token.

    In shards, every device would compute all rows and exchange the logits of each token.

    Args:
      model: a policy.
      params: its parameters.

    Returns:
      The same.
    """
    if self.mesh is None:
      return params
    return jax.device_put(params, whole_shardings(self.mesh, model.config))

  def rows(self, x: Any) -> jax.Array:
    """Puts rows on the devices: spread over them if they divide, else whole on each.

    Args:
      x: [R, ...].

    Returns:
      The same.
    """
    if self.mesh is None:
      return jnp.asarray(x)
    spread = x.shape[0] % self.shards == 0
    whole = NamedSharding(self.mesh, PartitionSpec())
    return jax.device_put(x, train_state.batch_sharding(self.mesh) if spread else whole)

  def state(self, state: TrainState, model: Any, config: UpdateConfig) -> TrainState:
    """Puts a state, of NumPy arrays or wherever it is, on the devices.

    Args:
      state: the state.
      model: the policy.
      config: of the updates.

    Returns:
      The same.
    """
    if self.mesh is None:
      return jax.tree.map(jnp.asarray, state)
    return jax.device_put(state, train_state.state_shardings(self.mesh, model, config))
