"""Which axis of which parameter goes over which axis of a device mesh."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.policy import abstract_params

_TO_WIDE = ("query", "key", "value", "gate", "up")  # outputs split over "tensor"


def param_specs(config: PolicyConfig) -> Any:
  """Where each parameter lies on a mesh with axes "fsdp" and "tensor" (and others, for rows).

  Matrices are split both ways: heads, MLP width and vocabulary over "tensor", hidden_size over
  "fsdp". Norms, the scalar head and the biases of outputs are whole everywhere. For meshes with
  Auto axes, where the compiler places the activations.

  Args:
    config: of the policy.

  Returns:
    A `PartitionSpec` for every parameter, in the structure of `params`.

  Example:
    >>> config = PolicyConfig(8, 16, 32, 1, 2, 1, 8, max_length=4)
    >>> tuple(param_specs(config)["layers"][0]["mlp"]["down"]["kernel"])
    ('tensor', 'fsdp')

  Reference: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
  """
  _, params = abstract_params(config)

  def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    names = [str(entry.key) for entry in path]
    stacked = (None,) if config.scan_layers and names[0] == "layers" else ()
    return PartitionSpec(*stacked, *_axes(names))

  return jax.tree_util.tree_map_with_path(spec, params)


def _axes(names: list[str]) -> tuple[str, ...]:
  module, leaf = names[-2] if len(names) > 1 else "", names[-1]
  if leaf in ("embedding", "unembedding"):
    return ("tensor", "fsdp")
  if leaf == "kernel":
    return ("fsdp", "tensor") if module in _TO_WIDE else ("tensor", "fsdp")
  return ("tensor",) if leaf == "bias" and module in _TO_WIDE else ()
