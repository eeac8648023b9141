"""Named tensors, as Hugging Face stores them <-> the parameters of a policy.

Hugging Face keeps a projection as [outputs, inputs], one tensor per layer; the policy as
[inputs, outputs], and stacked over layers where they are scanned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.policy import Model, abstract_params

_TOP = {
  "embedding": "model.embed_tokens.weight",
  "norm.scale": "model.norm.weight",
  "unembedding": "lm_head.weight",
  "value_head": "score.weight",
}
_MODULES = {
  "attention_norm": "input_layernorm",
  "attention.query": "self_attn.q_proj",
  "attention.key": "self_attn.k_proj",
  "attention.value": "self_attn.v_proj",
  "attention.output": "self_attn.o_proj",
  "attention.query_norm": "self_attn.q_norm",
  "attention.key_norm": "self_attn.k_norm",
  "mlp_norm": "post_attention_layernorm",
  "mlp.gate": "mlp.gate_proj",
  "mlp.up": "mlp.up_proj",
  "mlp.down": "mlp.down_proj",
}
_TURNED = ("query", "key", "query_norm", "key_norm")  # modules whose outputs are rotary pairs
_IGNORED = ".rotary_emb.inv_freq"  # of old checkpoints: the configuration says the same


def read_params(
  config: PolicyConfig,
  tensors: Mapping[str, np.ndarray],
  *,
  source: str,
  place: Callable[[np.ndarray, tuple[Any, ...]], jax.Array] | None = None,
) -> tuple[Model, Any]:
  """Model and parameters from named tensors, one tensor at a time.

  A scalar head that the tensors lack is 0. Beside a tied embedding, an output head is allowed
  where it is the same numbers.

  Args:
    config: of the policy.
    tensors: by the names of Hugging Face; read when asked for.
    source: where they come from, for errors.
    place: (array, path in the tree) -> the array on its devices; None = the default device.

  Returns:
    What `init` returns.

  Raises:
    ValueError: a tensor is missing, superfluous, of another shape or quantised, or the output head
      and `tied` contradict each other.
  """
  _check_layers(config, tensors, source)
  model, abstract = abstract_params(config)
  leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
  names = {path: _names(config, path) for path, _ in leaves}
  _check_names(config, tensors, {name for some in names.values() for name in some}, source)

  def read(path: tuple[Any, ...], leaf: Any) -> jax.Array:
    shape = leaf.shape[1:] if _is_stacked(config, path) else leaf.shape
    if path[-1].key == "value_head" and _TOP["value_head"] not in tensors:
      host = np.zeros(leaf.shape, leaf.dtype)
    else:
      host = np.empty(0, leaf.dtype)
      for i, name in enumerate(names[path]):
        tensor = _from_file(path, _checked(tensors, name, path, shape, source))
        if not i:  # only now is it known that the shape is one of the file
          host = np.empty((len(names[path]), *shape), leaf.dtype)
        host[i] = tensor
      host = host.reshape(leaf.shape)
    return jnp.asarray(host) if place is None else place(host, path)

  params = [read(path, leaf) for path, leaf in leaves]
  return model, jax.tree_util.tree_unflatten(structure, params)


def named_tensors(model: Model, params: Any) -> Iterator[tuple[str, np.ndarray]]:
  """Parameters under the names of Hugging Face, one tensor at a time.

  Args:
    model: of the parameters. Interleaved rotary pairs are reordered to half-split ones.
    params: to be saved.

  Returns:
    Pairs of a name and an array on the host, contiguous.

  Raises:
    ValueError: the parameters are not those of the model; at the call, before the first tensor.
  """
  expected = jax.tree.map(jnp.shape, abstract_params(model.config)[1])
  if jax.tree.map(jnp.shape, params) != expected:
    raise ValueError("params must have the structure and shapes of the model's parameters")
  return _named_tensors(model.config, params)


def _named_tensors(config: PolicyConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    names = _names(config, path)
    for i, name in enumerate(names):
      tensor = np.asarray(leaf[i] if _is_stacked(config, path) else leaf)
      tensor = _from_file(path, tensor) if path[-1].key != "value_head" else tensor[None]
      if config.rope.interleaved and len(path) > 1 and path[-2].key in _TURNED:
        pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
        tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
      yield name, np.ascontiguousarray(tensor)


def _is_stacked(config: PolicyConfig, path: tuple[Any, ...]) -> bool:
  return config.scan_layers and path[0].key == "layers"


def _names(config: PolicyConfig, path: tuple[Any, ...]) -> list[str]:
  """What Hugging Face calls a leaf: one name, or one per layer where layers are stacked."""
  keys = [str(entry.key) for entry in path]
  if keys[0] != "layers":
    return [_TOP[".".join(keys)]]
  layers = range(config.num_layers) if config.scan_layers else [int(keys[1])]
  module = _MODULES[".".join(keys[1 if config.scan_layers else 2 : -1])]
  suffix = "bias" if keys[-1] == "bias" else "weight"
  return [f"model.layers.{i}.{module}.{suffix}" for i in layers]


def _from_file(path: tuple[Any, ...], tensor: np.ndarray) -> np.ndarray:
  """Turns [outputs, inputs] into [inputs, outputs], and back."""
  if path[-1].key == "value_head":
    return tensor[0]
  return tensor.T if path[-1].key == "kernel" else tensor


def _checked(
  tensors: Mapping[str, np.ndarray],
  name: str,
  path: tuple[Any, ...],
  shape: tuple[int, ...],
  source: str,
) -> np.ndarray:
  stored = (1, *shape) if path[-1].key == "value_head" else shape
  stored = stored[::-1] if path[-1].key == "kernel" else stored
  tensor = tensors[name]
  if tensor.shape != stored:
    raise ValueError(
      f"{source}: tensor {name} has shape {tensor.shape}, the configuration asks for {stored}"
    )
  if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize < 2:
    raise ValueError(
      f"{source}: tensor {name} is {tensor.dtype}: weights must be floats of 16 bits or more, and "
      "quantised ones are not supported"
    )
  return tensor


def _check_layers(config: PolicyConfig, tensors: Mapping[str, np.ndarray], source: str) -> None:
  """As many layers as the tensors have: before structures of that size are made."""
  numbers = [re.match(r"model\.layers\.(\d+)\.", name) for name in tensors]
  stored = 1 + max((int(number[1]) for number in numbers if number), default=-1)
  if stored != config.num_layers:
    raise ValueError(
      f"{source}: the configuration has {config.num_layers} layers (num_hidden_layers), the "
      f"tensors (model.layers.*) have {stored}"
    )


def _check_names(
  config: PolicyConfig, tensors: Mapping[str, np.ndarray], expected: set[str], source: str
) -> None:
  head, embedding = _TOP["unembedding"], _TOP["embedding"]
  stored = {name for name in tensors if not name.endswith(_IGNORED)}
  if config.tied and head in stored and embedding in stored:
    if not np.array_equal(tensors[head], tensors[embedding]):
      raise ValueError(
        f"{source}: the configuration ties head and embedding (tie_word_embeddings), but {head} "
        f"differs from {embedding}"
      )
    stored.remove(head)
  missing = expected - stored - {_TOP["value_head"]}
  if missing == {head}:
    raise ValueError(
      f"{source}: there is no {head}, but the configuration does not tie head and embedding "
      "(tie_word_embeddings)"
    )
  if missing:
    raise ValueError(f"{source}: missing tensors: {_listed(missing)}")
  if stored - expected:
    hint = " (load with scalar_head=True)" if _TOP["value_head"] in stored - expected else ""
    raise ValueError(
      f"{source}: tensors that the configuration does not have: {_listed(stored - expected)}{hint}"
    )


def _listed(names: set[str]) -> str:
  shown = sorted(names)[:5]
  return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
