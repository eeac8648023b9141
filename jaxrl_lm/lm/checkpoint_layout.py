"""What a state looks like, as JSON: containers, dtypes, shapes; and its leaves under their paths.

The names of the leaves are those of `jax.tree_util.keystr`. A typed key is stored as its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # jax.Array or np.ndarray
Leaf = Any  # or jax.ShapeDtypeStruct
ROOT = "(state)"


def layout(state: Any) -> dict[str, Any]:
  """Every node of a tree under its path: a container's type, or a leaf's dtype and shape.

  Args:
    state: tree of arrays, or of jax.ShapeDtypeStruct; None is a node of its own.

  Returns:
    {path: name of the type} for containers, {path: [dtype, shape]} for leaves.

  Raises:
    TypeError: a leaf is no array (a number of Python has no dtype to compare); it is named.
  """
  nodes: dict[str, Any] = {}

  def visit(path: tuple[Any, ...], node: Any) -> None:
    name = jax.tree_util.keystr(path) or ROOT
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if node is not None and any(step == () for step, _ in children):
      if not isinstance(node, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(
          f"{name} is a {type(node).__name__}, not an array: make it one, or record it"
        )
      nodes[name] = [str(node.dtype), list(node.shape)]
      return
    nodes[name] = type(node).__qualname__
    for step, child in children:
      visit(path + step, child)

  visit((), state)
  return nodes


def layout_differences(
  saved: Mapping[str, Any], wanted: Mapping[str, Any], *, cast: bool
) -> list[str]:
  """Where the state that was saved is not one like the target.

  Args:
    saved: layout of the saved state.
    wanted: layout of the target.
    cast: two floating-point dtypes may differ.

  Returns:
    Lines "path: what was saved, what is wanted"; empty if the one can stand for the other.
  """
  lines: list[str] = []
  below: tuple[str, ...] = ()  # paths in a container of another type have other names, if any
  for name in {**saved, **wanted}:
    then, now = saved.get(name), wanted.get(name)
    if then == now or name.startswith(below) or (cast and _differ_in_precision(then, now)):
      continue
    lines.append(f"{name}: saved {_shown(then)}, wanted {_shown(now)}")
    root = "" if name == ROOT else name
    below = (*below, f"{root}.", f"{root}[")
  return lines


def stored_arrays(state: Any) -> dict[str, Array]:
  """The arrays that stand for the leaves of a state on disk.

  Args:
    state: tree of arrays, typed keys included.

  Returns:
    {path: array}; of keys their data, [..., words] uint32. Arrays without elements are left out:
    the layout says all about them.
  """
  return {name: _stored(leaf) for name, leaf in _leaves(state).items() if leaf.size}


def placeholders(target: Any, saved: Mapping[str, Any]) -> dict[str, Array]:
  """What Orbax must be given to read the stored arrays.

  Args:
    target: tree of arrays or jax.ShapeDtypeStruct, of the saved layout but for dtypes.
    saved: layout of the saved state.

  Returns:
    {path: jax.ShapeDtypeStruct with the target's sharding}; an empty NumPy array where it has none.

  Raises:
    ValueError: JAX cannot hold the dtype of a leaf, because 64-bit numbers are off.
  """
  leaves = _leaves(target)
  return {name: _placeholder(name, x, saved[name][0]) for name, x in leaves.items() if x.size}


def rebuilt(target: Any, arrays: Mapping[str, Array]) -> Any:
  """The state, from its stored arrays.

  Args:
    target: as for `placeholders`.
    arrays: {path: array} as Orbax has read them.

  Returns:
    A tree like the target: NumPy's arrays where the target's are, on the target's devices where it
    has a sharding, elsewhere wherever JAX puts new arrays.
  """
  leaves = [_restored(leaf, arrays.get(name)) for name, leaf in _leaves(target).items()]
  return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _leaves(state: Any) -> dict[str, Leaf]:
  paths = jax.tree_util.tree_flatten_with_path(state)[0]
  return {jax.tree_util.keystr(path) or ROOT: leaf for path, leaf in paths}


def _stored(leaf: Array) -> Array:
  if _is_key(leaf):
    return jax.random.key_data(leaf)
  return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _placeholder(name: str, target: Leaf, saved: str) -> Array:
  shape, dtype = tuple(target.shape), saved
  if _is_key(target):
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, target.dtype))
    shape, dtype = data.shape, str(data.dtype)
  if (sharding := _sharding(target)) is None:
    return np.empty(shape, jnp.dtype(dtype))
  if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
    raise ValueError(f"{name} was saved as {dtype}: set jax_enable_x64 to read it")
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def _restored(target: Leaf, array: Array | None) -> Array:
  if array is None:  # without elements
    array = np.empty(target.shape, target.dtype)
    return array if _is_host(target) else jax.device_put(array, _sharding(target))
  if _is_key(target):
    implementation: list[Any] = []
    key = jax.ShapeDtypeStruct((), target.dtype)
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), key)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=implementation[0])
  if array.dtype != target.dtype:
    array = array.astype(target.dtype)
  return array if _is_host(target) else jnp.asarray(array)


def _is_host(target: Leaf) -> bool:
  return isinstance(target, np.ndarray | np.generic)


def _is_key(leaf: Leaf) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _sharding(target: Leaf) -> jax.sharding.Sharding | None:
  """None where the array may be anywhere: it must not be pinned to one of a mesh's devices."""
  if isinstance(target, jax.Array) and not getattr(target, "committed", True):
    return None
  return getattr(target, "sharding", None)


def _differ_in_precision(then: Any, now: Any) -> bool:
  if not (isinstance(then, list) and isinstance(now, list)) or then[1] != now[1]:
    return False
  return all(
    not dtype.startswith("key<") and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    for dtype in (then[0], now[0])
  )


def _shown(node: Any) -> str:
  if node is None:
    return "nothing"
  return f"{node[0]}{node[1]}" if isinstance(node, list) else str(node)
