"""Where hidden states and unembedding lie on a mesh, and what the devices do together.

Each device sweeps over its own tokens and its own rows of the unembedding. What they exchange is
of the size of the tokens, once, after the loop: one maximum and the sums of a token forward, the
gradient of its hidden state backward. Only what belongs to a data-parallel matrix anyway is as
large as the matrix: its gradient is added up over the devices that hold the same rows, and a
matrix sharded over D, or over an axis that shards the tokens (FSDP), is gathered before the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxrl_lm.vocabulary_tiles import Head, Tokens, varying_axes


class VocabularySharding(NamedTuple):
  """How the arguments of the functions on hidden states are sharded.

  Needed under plain `jit` on a mesh of Auto axes, whose types do not show it, and inside
  `shard_map` (with check_vma, its default), where the arrays are the device's shares. On a mesh of
  Explicit axes it is read from the types.

  Attributes:
    vocabulary: mesh axis or axes over which the rows of the unembedding are sharded; None = no.
    tokens: PartitionSpec of the [..., T] arrays (inside `shard_map` it is not looked at).
    mesh: None = the mesh in context (`jax.set_mesh`, or the one of `shard_map`).

  Example:
    >>> VocabularySharding(vocabulary="tensor", tokens=PartitionSpec("data"))
    VocabularySharding(vocabulary='tensor', tokens=P...('data',), mesh=None)
  """

  vocabulary: str | tuple[str, ...] | None = None
  tokens: PartitionSpec = PartitionSpec()
  mesh: Any = None


def on_shards(
  local: Callable[..., Any], heads: Any, batch: Any, sharding: VocabularySharding | None
) -> tuple[Any, Any]:
  """`local(heads, batch, axes)` on every device's share.

  Args:
    local: function of a device's heads and batch and of the names of the axes that its rows of
      the vocabulary are sharded over; returns a total over its tokens (or None), and arrays
      [..., T].
    heads: `Head` or a tuple of them, whole.
    batch: `Tokens` [..., T], or a tuple that begins with them, and arrays like them; whole.
    sharding: see `VocabularySharding`.

  Returns:
    The total over all tokens (inside `shard_map`: of the device) and the arrays, whole.

  Raises:
    ValueError: inside `shard_map` without check_vma.
  """
  names = _manual_names(sharding)
  if names:
    if not varying_axes(jax.lax.axis_index(names)):
      raise ValueError(
        "sharding: inside shard_map a sharded vocabulary needs check_vma=True, its default"
      )
    return local(_at_its_rows(heads, names), batch, names)
  if sharding is None:
    sharding = _of_types(heads, batch)
  if sharding is None or jax.sharding.get_abstract_mesh().manual_axes:
    return local(heads, batch, ())
  return _shard_mapped(local, heads, batch, sharding)


def vocabulary_size(head: Head, sharding: VocabularySharding | None) -> int:
  """Number of rows of the whole unembedding, of which a device has its share inside `shard_map`.

  Args:
    head: as the caller gave it.
    sharding: see `VocabularySharding`.

  Returns:
    V.
  """
  return head.unembedding.shape[0] * across(jax.lax.psum, 1, _manual_names(sharding))


def across(reduce: Callable[..., jax.Array], x: Any, axes: tuple[str, ...]) -> Any:
  """A collective, or nothing where the vocabulary is whole.

  Args:
    reduce: jax.lax.psum, pmax or pmin.
    x: array or number.
    axes: names of the mesh axes.

  Returns:
    Array like x.
  """
  return reduce(x, axes) if axes else x


def total_like(primal: jax.Array, gradient: jax.Array) -> Any:
  """A gradient, added up over the mesh axes that its primal does not vary over.

  Args:
    primal: the array that was differentiated.
    gradient: each device's part of the gradient.

  Returns:
    The gradient in the primal's dtype.
  """
  axes = tuple(varying_axes(gradient) - varying_axes(primal))
  return across(jax.lax.psum, gradient, axes).astype(primal.dtype)


def _shard_mapped(
  local: Callable[..., Any], heads: Any, batch: Any, sharding: VocabularySharding
) -> Any:
  """Plain `jit` on a mesh: heads and tokens are laid out, then every device works alone."""
  token_axes = [name for entry in sharding.tokens for name in _names(entry)]
  # FSDP may shard the matrix over an axis of the tokens: every device then needs all rows.
  names = tuple(name for name in _names(sharding.vocabulary) if name not in token_axes)
  rows = PartitionSpec(names or None)
  head_specs = jax.tree.map(lambda x: rows if jnp.ndim(x) else PartitionSpec(), heads)
  specs = (head_specs, jax.tree.map(lambda x: sharding.tokens, batch))

  mesh = sharding.mesh if sharding.mesh is not None else jax.sharding.get_abstract_mesh()
  arguments = (heads, batch)
  if AxisType.Explicit in mesh.axis_types:
    arguments = jax.tree.map(
      lambda x, spec: jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec)),
      arguments,
      specs,
    )

  def share(heads: Any, batch: Any) -> Any:
    total, arrays = local(_at_its_rows(heads, names), batch, names)
    return jax.tree.map(lambda x: across(jax.lax.psum, x, tuple(token_axes)), total), arrays

  mapped = jax.shard_map(
    share,
    mesh=mesh,
    in_specs=specs,
    out_specs=(PartitionSpec(), sharding.tokens),
    axis_names={*token_axes, *names},
  )
  return mapped(*arguments)


def _of_types(heads: Any, batch: Any) -> VocabularySharding | None:
  """The sharding that types on an Explicit mesh show; None if nothing is sharded."""
  first = jax.tree.leaves(heads, is_leaf=lambda x: isinstance(x, Head))[0]
  tokens = batch if isinstance(batch, Tokens) else batch[0]
  types = [jax.typeof(first.unembedding), jax.typeof(tokens.ids)]
  matrix, states = ([*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))] for x in types)
  if all(name is None for name in (*matrix, *states)):
    return None
  mesh = next(x.sharding.mesh for x in types if any(x.sharding.spec))
  return VocabularySharding(_names(matrix[0]), PartitionSpec(*states), mesh)


def _at_its_rows(heads: Any, names: tuple[str, ...]) -> Any:
  """Heads that know the id of the first row of this device."""

  def one(head: Head) -> Head:
    if not names:
      return head
    first = jax.lax.axis_index(names) * head.unembedding.shape[0]
    return head._replace(first=first.astype(head.first.dtype))

  return jax.tree.map(one, heads, is_leaf=lambda x: isinstance(x, Head))


def _manual_names(sharding: VocabularySharding | None) -> tuple[str, ...]:
  """Axes that shard the vocabulary, if we are inside a `shard_map` over them."""
  names = () if sharding is None else _names(sharding.vocabulary)
  manual = jax.sharding.get_abstract_mesh().manual_axes
  return names if set(names) <= set(manual) else ()


def _names(entry: Any) -> tuple[str, ...]:
  """An entry of a PartitionSpec as a tuple of names."""
  if entry is None:
    return ()
  return entry if isinstance(entry, tuple) else (entry,)
