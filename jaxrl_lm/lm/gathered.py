"""A model whose parameters lie in shards, and are whole where it computes with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_lm.lm import partition
from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.policy import Model, Output


@dataclasses.dataclass(frozen=True)
class Gathered:
  """A policy on a mesh: every parameter is gathered over "fsdp" before use, its gradient scattered.

  Left to itself the compiler may bring the rows to the shards instead: every device of "fsdp" then
  computes all rows, logits included. Over "tensor" parameters stay split. The whole parameters of
  a forward pass are kept for its backward pass, one copy per device of "data" and "fsdp".

  Has the methods of `Model` that a scorer uses; static under jit.

  Attributes:
    model: the policy.
    mesh: with Auto axes, "fsdp" and "tensor" among them.

  Reference: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 5.
  """

  model: Model
  mesh: Mesh

  @property
  def config(self) -> PolicyConfig:
    """Of the policy."""
    return self.model.config

  def apply(self, params: Any, tokens: jax.Array, **inputs: Any) -> Output:
    """`Model.apply`.

    Args:
      params: in shards.
      tokens, inputs: as of `Model.apply`.

    Returns:
      Hidden states, cache and values.
    """
    return self.model.apply(self._whole(params), tokens, **inputs)

  def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
    """`Model.logits`.

    Args:
      params: in shards.
      hidden: [..., D].

    Returns:
      [..., V].
    """
    return self.model.logits(self._whole(params), hidden)

  def unembedding(self, params: Any) -> jax.Array:
    """`Model.unembedding`.

    Args:
      params: in shards.

    Returns:
      [V, D].
    """
    return self.model.unembedding(self._whole(params))

  def _whole(self, params: Any) -> Any:
    specs = partition.param_specs(self.config)
    shards = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
    # The inner constraint is for the backward pass: it scatters the gradient.
    params = jax.lax.with_sharding_constraint(params, shards)
    return jax.lax.with_sharding_constraint(params, whole_shardings(self.mesh, self.config))


def whole_shardings(mesh: Mesh, config: PolicyConfig) -> Any:
  """Where the parameters of a policy lie that are whole over "fsdp", and split over "tensor".

  Args:
    mesh: with axes "fsdp" and "tensor".
    config: of the policy.

  Returns:
    A `NamedSharding` for every parameter.
  """

  def sharding(spec: PartitionSpec) -> NamedSharding:
    axes = (None if axis == "fsdp" else axis for axis in spec)
    return NamedSharding(mesh, PartitionSpec(*axes))

  return jax.tree.map(sharding, partition.param_specs(config))
