"""Logits as tiles: a block of tokens times a block of the vocabulary.

Blocks that do not divide the sizes overlap the block before them, and what was counted there is
masked: nothing is padded or copied. The rows of the unembedding may be one device's share of the
vocabulary; `vocabulary_sharding` says what the devices do together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Head(NamedTuple):
  """What turns hidden states into logits: z = cap(hidden @ unembedding.T + bias) / temperature.

  Attributes:
    unembedding: [V, D], all rows of the vocabulary or this device's.
    bias: [V], or None. -inf excludes a token.
    temperature: scalar, or None = 1.
    softcap: scalar of cap(x) = softcap tanh(x / softcap), or None.
    first: scalar int, the id of the first row.
    end: scalar int, the first id that does not exist, or None.
  """

  unembedding: jax.Array
  bias: jax.Array | None
  temperature: jax.Array | None
  softcap: jax.Array | None
  first: jax.Array
  end: jax.Array | None


class Tokens(NamedTuple):
  """The states to score and the tokens chosen there, flat.

  Attributes:
    hidden: [N, D].
    ids: [N] int.
    mask: [N] bool; hidden states elsewhere are replaced by 0.
  """

  hidden: jax.Array
  ids: jax.Array
  mask: jax.Array


class Blocks(NamedTuple):
  """Size of a tile.

  Attributes:
    tokens: rows of a tile.
    vocabulary: columns of a tile.
  """

  tokens: int
  vocabulary: int


def loop(size: int, block: int, body: Callable[..., Any], carry: Any, like: Any) -> Any:
  """`body(i, carry)` for every block of an axis.

  Args:
    size: length of the axis.
    block: length of a block.
    body: (index of the block, carry) -> carry.
    carry: the first carry.
    like: what the body reads. Inside `shard_map` a carry must vary over the same mesh axes as what
      is added to it, from the start.

  Returns:
    The last carry.
  """
  steps = -(-size // block)
  carry = jax.tree.map(lambda x: varying_like(x, like), carry)
  if steps == 1:
    return body(jnp.zeros((), jnp.int32), carry)
  return jax.lax.fori_loop(0, steps, body, carry)


def varying_like(x: jax.Array, like: Any) -> jax.Array:
  """An array whose type varies over the manual mesh axes that any of `like` varies over.

  Args:
    x: array.
    like: arrays.

  Returns:
    The same array.
  """
  axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(like)))
  missing = tuple(axes - varying_axes(x))
  return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: jax.Array) -> frozenset[str]:
  """Manual mesh axes that an array varies over, by its type; none outside `shard_map`.

  Args:
    x: array.

  Returns:
    Names of the axes.
  """
  return jax.typeof(x).manual_axis_type.varying


def logits_tile(head: Head, part: Tokens, j: jax.Array, size: int) -> jax.Array:
  """Logits of a block of tokens over block j of the vocabulary.

  Args:
    head: see `Head`.
    part: tokens of the block.
    j: index of the block of the vocabulary.
    size: columns of a tile.

  Returns:
    [N', V'] in float32 at least; -inf for what is excluded or was in the block before.
  """
  dtype = logits_dtype(head, part)
  z = product(clean_hidden(part), unembedding_block(head, j, size), (1, 1), dtype)
  bias = _bias_block(head, j, size, dtype)
  if bias is not None:
    z += bias[None]
  if head.softcap is not None:
    z = head.softcap.astype(dtype) * jnp.tanh(z / head.softcap.astype(dtype))
    if bias is not None:
      # The cap makes a finite logit of what the bias excludes.
      z += jnp.where(jnp.isneginf(bias), -jnp.inf, 0.0).astype(dtype)[None]
  if head.temperature is not None:
    z = z / head.temperature.astype(dtype)
  if head.unembedding.shape[0] % size == 0 and head.end is None:
    return z
  return z + jnp.where(column_ids(head, j, size) < 0, -jnp.inf, 0.0).astype(dtype)[None]


def raw_slope(head: Head, slope: jax.Array, z: jax.Array) -> jax.Array:
  """Gradient of hidden @ unembedding.T + bias from that of the logits.

  Args:
    head: see `Head`.
    slope: [N', V'], 0 where z is -inf.
    z: [N', V'] logits.

  Returns:
    [N', V'].
  """
  temperature = 1.0 if head.temperature is None else head.temperature.astype(z.dtype)
  if head.temperature is not None:
    slope = slope / temperature
  if head.softcap is None:
    return slope
  # At least -1, also where z is -inf.
  tanh = jnp.maximum(z * (temperature / head.softcap.astype(z.dtype)), -1.0)
  return slope * (1.0 - jnp.square(tanh))


def logits_dtype(head: Head, tokens: Tokens) -> Any:
  """Dtype of logits and sums: float32 at least.

  Args:
    head: see `Head`.
    tokens: see `Tokens`.

  Returns:
    A dtype.
  """
  both = jnp.promote_types(head.unembedding.dtype, tokens.hidden.dtype)
  return jnp.promote_types(both, jnp.float32)


def product(x: jax.Array, y: jax.Array, axes: tuple[int, int], dtype: Any) -> jax.Array:
  """Matrix product over one axis of each.

  Args:
    x, y: matrices.
    axes: the axis of each that is summed over.
    dtype: of the sum and the result.

  Returns:
    A matrix.
  """
  same = jnp.promote_types(x.dtype, y.dtype)
  contracted = (((axes[0],), (axes[1],)), ((), ()))
  return jax.lax.dot_general(
    x.astype(same), y.astype(same), contracted, preferred_element_type=dtype
  )


def clean_hidden(part: Tokens) -> jax.Array:
  """Hidden states, 0 where masked.

  Args:
    part: tokens.

  Returns:
    [N', D].
  """
  return jnp.where(part.mask[:, None], part.hidden, 0)


def unembedding_block(head: Head, j: jax.Array, size: int) -> jax.Array:
  """Rows of block j of the vocabulary; those that do not exist are 0, whatever stands there.

  Args:
    head: see `Head`.
    j: index of the block.
    size: rows of a block.

  Returns:
    [V', D].
  """
  rows = block_of(head.unembedding, j, size)
  if head.end is None:
    return rows
  return jnp.where((_every_id(head, j, size) < head.end)[:, None], rows, 0)


def _bias_block(head: Head, j: jax.Array, size: int, dtype: Any) -> jax.Array | None:
  """[V'] of block j; 0 for rows that do not exist, whatever stands there."""
  if head.bias is None:
    return None
  bias = block_of(head.bias, j, size).astype(dtype)
  return bias if head.end is None else jnp.where(_every_id(head, j, size) < head.end, bias, 0.0)


def column_ids(head: Head, j: jax.Array, size: int) -> jax.Array:
  """Ids of the columns of block j; -1 for one that was in the block before or does not exist.

  Args:
    head: see `Head`.
    j: index of the block.
    size: columns of a block.

  Returns:
    [V'] int.
  """
  vocabulary = head.unembedding.shape[0]
  ids = _every_id(head, j, size)
  if vocabulary % size:
    ids = jnp.where(_repeated(j, size, vocabulary), -1, ids)
  return ids if head.end is None else jnp.where(ids < head.end, ids, -1)


def first_id(head: Head, j: jax.Array, size: int) -> jax.Array:
  """Id of the first column of block j.

  Args:
    head: see `Head`.
    j: index of the block.
    size: columns of a block.

  Returns:
    Scalar int.
  """
  return head.first + _start(j, size, head.unembedding.shape[0]).astype(head.first.dtype)


def _every_id(head: Head, j: jax.Array, size: int) -> jax.Array:
  return first_id(head, j, size) + jnp.arange(size, dtype=head.first.dtype)


def _start(index: jax.Array, size: int, total: int) -> jax.Array:
  """First entry of a block; the last block reaches back so as to end with the axis."""
  return jnp.minimum(index * size, total - size)


def _repeated(index: jax.Array, size: int, total: int) -> jax.Array:
  """[size] bool: the entry was in the block before."""
  return _start(index, size, total) + jnp.arange(size) < index * size


def once(rows: jax.Array, index: jax.Array, size: int, total: int) -> jax.Array:
  """Rows of a block, 0 where they were in the block before.

  Args:
    rows: [size, ...].
    index: of the block.
    size: length of a block.
    total: length of the axis.

  Returns:
    [size, ...].
  """
  if total % size == 0:
    return rows
  return jnp.where(_repeated(index, size, total)[:, None], 0.0, rows)


def block_of(arrays: Any, index: jax.Array, size: int) -> Any:
  """A block of the first axis of every array.

  Args:
    arrays: pytree of [N, ...].
    index: of the block.
    size: length of a block.

  Returns:
    Pytree of [size, ...].
  """

  def one(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, _start(index, size, x.shape[0]), size)

  return jax.tree.map(one, arrays)


def put_block(arrays: Any, parts: Any, index: jax.Array, size: int) -> Any:
  """Arrays with a block of the first axis written.

  Args:
    arrays: pytree of [N, ...].
    parts: pytree of [size, ...].
    index: of the block.
    size: length of a block.

  Returns:
    Pytree like arrays.
  """

  def one(x: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, _start(index, size, x.shape[0]), 0)

  return jax.tree.map(one, arrays, parts)


def add_block(array: jax.Array | None, part: jax.Array, index: jax.Array, size: int) -> Any:
  """An array with a block of the first axis added to.

  Args:
    array: [N, ...], or None.
    part: [size, ...].
    index: of the block.
    size: length of a block.

  Returns:
    Array like the first, or None.
  """
  if array is None:
    return None
  block = block_of(array, index, size)
  return put_block(array, (block + part).astype(array.dtype), index, size)
