"""The sweeps that keep K tokens of each distribution, and all others as one."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import vocabulary_statistics
from jaxrl_lm.vocabulary_divergence import log_normalizer
from jaxrl_lm.vocabulary_sharding import across
from jaxrl_lm.vocabulary_sweeps import Wanted, accumulate, no_sums, update
from jaxrl_lm.vocabulary_tiles import (
  Blocks,
  Head,
  Tokens,
  block_of,
  first_id,
  logits_dtype,
  logits_tile,
  loop,
  put_block,
  raw_slope,
)


def local_top_k(
  head: Head, batch: Tokens, axes: tuple[str, ...], *, k: int, memory_budget: int
) -> tuple[None, jax.Array]:
  """Ids of the k largest logits; of equal ones the first.

  Args:
    head: this device's rows.
    batch: this device's tokens, [..., T].
    axes: mesh axes over which the vocabulary is sharded.
    k: how many.
    memory_budget: bytes for tiles.

  Returns:
    No total, and ids [..., T, k], the largest first; -1 where no other token is possible.
  """
  head, batch = jax.lax.stop_gradient((head, batch))
  tokens, shape = vocabulary_statistics.flatten(batch)
  blocks = vocabulary_statistics.choose_blocks(tokens, head, memory_budget)
  count, dtype = tokens.ids.shape[0], logits_dtype(head, tokens)
  if count == 0:
    return None, jnp.zeros((*shape, k), tokens.ids.dtype)

  def best(z: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest, places = jax.lax.top_k(z, k)
    return largest, jnp.take_along_axis(ids, places, axis=1)

  def token_block(i: jax.Array, found: Any) -> Any:
    part = block_of(tokens, i, blocks.tokens)

    def vocabulary_block(j: jax.Array, found: Any) -> Any:
      z = logits_tile(head, part, j, blocks.vocabulary)
      start = first_id(head, j, blocks.vocabulary).astype(tokens.ids.dtype)
      ids = start + jnp.arange(z.shape[1], dtype=tokens.ids.dtype)
      here = (z, jnp.broadcast_to(ids[None], z.shape))
      return best(*(jnp.concatenate(pair, axis=1) for pair in zip(found, here, strict=True)))

    vocabulary = head.unembedding.shape[0]
    nothing = block_of(empty, jnp.zeros((), jnp.int32), blocks.tokens)
    found_here = loop(vocabulary, blocks.vocabulary, vocabulary_block, nothing, (head, tokens))
    return put_block(found, found_here, i, blocks.tokens)

  # Where fewer than k tokens are possible, no id is found twice.
  empty = (jnp.full((count, k), -jnp.inf, dtype), jnp.full((count, k), -1, tokens.ids.dtype))
  found = loop(count, blocks.tokens, token_block, empty, (head, tokens))
  if axes:
    found = best(*(_side_by_side(x, axes) for x in found))
  return None, found[1].reshape(*shape, k)


def _side_by_side(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """[N, k] of every device as [N, devices k], the same on all of them."""
  devices, mine = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
  place = jnp.arange(devices).reshape(1, -1, 1) == mine
  # A sum of one number and zeros; -inf * 0 would not be.
  spread = jnp.where(place, x[:, None], jnp.zeros((), x.dtype))
  return jax.lax.psum(spread, axes).reshape(x.shape[0], -1)


class _Kept(NamedTuple):
  """What is static in the sweep of K tokens and a rest."""

  blocks: Blocks
  axes: tuple[str, ...]


def local_buckets(
  head: Head, batch: tuple[Tokens, jax.Array], axes: tuple[str, ...], *, memory_budget: int
) -> tuple[None, jax.Array]:
  """Log-probs of some ids, and of all others together.

  Args:
    head: this device's rows.
    batch: this device's tokens [..., T], and ids [..., T, K], -1 = none.
    axes: mesh axes over which the vocabulary is sharded.
    memory_budget: bytes for tiles.

  Returns:
    No total, and [..., T, K + 1] log-probs, nats.
  """
  tokens, shape = vocabulary_statistics.flatten(batch[0])
  ids = batch[1].reshape(-1, batch[1].shape[-1])
  if tokens.ids.shape[0] == 0:
    return None, jnp.zeros((*shape, ids.shape[1] + 1), logits_dtype(head, tokens))
  blocks = vocabulary_statistics.choose_blocks(tokens, head, memory_budget, copies=6)
  buckets = _buckets(head, tokens, ids, _Kept(blocks, axes))
  return None, buckets.reshape(*shape, -1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _buckets(head: Head, tokens: Tokens, ids: jax.Array, kept: _Kept) -> jax.Array:
  return _buckets_forward(head, tokens, ids, kept)[0]


def _buckets_forward(head: Head, tokens: Tokens, ids: jax.Array, kept: _Kept) -> Any:
  count, vocabulary = tokens.ids.shape[0], head.unembedding.shape[0]
  blocks, like = kept.blocks, (head, tokens, ids)
  nothing = no_sums(head, tokens, Wanted())

  def token_block(i: jax.Array, found: Any) -> Any:
    part, part_ids = block_of((tokens, ids), i, blocks.tokens)

    def vocabulary_block(j: jax.Array, found: Any) -> Any:
      every, rest, chosen = found
      z = logits_tile(head, part, j, blocks.vocabulary)
      columns, inside = _columns(head, part_ids, z, j)
      here = jnp.take_along_axis(z, jnp.clip(columns, 0, z.shape[1] - 1), axis=1)
      chosen = jnp.maximum(chosen, jnp.where(inside, here, -jnp.inf))
      every = update(head, part, every, z, j)
      return every, update(head, part, rest, _without(z, columns), j), chosen

    empty = block_of((nothing, nothing, no_chosen), jnp.zeros((), jnp.int32), blocks.tokens)
    here = loop(vocabulary, blocks.vocabulary, vocabulary_block, empty, like)
    return put_block(found, here, i, blocks.tokens)

  no_chosen = jnp.full(ids.shape, -jnp.inf, logits_dtype(head, tokens))
  every, rest, chosen = loop(count, blocks.tokens, token_block, (nothing, nothing, no_chosen), like)
  chosen = across(jax.lax.pmax, chosen, kept.axes)
  normalizers = tuple(log_normalizer(x, kept.axes) for x in (every, rest))
  left = across(jax.lax.pmax, rest.largest, kept.axes) > -jnp.inf
  rest_logprob = jnp.where(left, normalizers[1] - normalizers[0], -jnp.inf)
  buckets = jnp.concatenate([chosen - normalizers[0][:, None], rest_logprob[:, None]], axis=1)
  buckets = jnp.where(tokens.mask[:, None], buckets, 0.0)
  return buckets, (head, tokens, ids, normalizers, buckets)


def _buckets_backward(kept: _Kept, residuals: Any, cotangent: jax.Array) -> Any:
  head, tokens, ids, normalizers, buckets = residuals
  # A rest of nothing does not move. An impossible token that is kept moves by the normaliser.
  nothing = jnp.isneginf(buckets).at[:, :-1].set(False)
  cotangent = jnp.where(tokens.mask[:, None] & ~nothing, cotangent, 0.0)

  def tile_slope(part: Tokens, rows: Any, j: jax.Array) -> jax.Array:
    part_ids, (every, rest), g = rows
    z = logits_tile(head, part, j, kept.blocks.vocabulary)
    columns, _ = _columns(head, part_ids, z, j)
    slope = g[:, -1:] * jnp.exp(_without(z, columns) - rest[:, None])
    slope -= jnp.sum(g, axis=1, keepdims=True) * jnp.exp(z - every[:, None])
    slope = slope.at[_row_numbers(z), columns].add(g[:, :-1], mode="drop")
    return raw_slope(head, slope, z)

  grads = accumulate(head, tokens, (ids, normalizers, cotangent), tile_slope, kept.blocks)
  return *vocabulary_statistics.input_gradients(head, tokens, grads), None


_buckets.defvjp(_buckets_forward, _buckets_backward)


def _columns(head: Head, ids: jax.Array, z: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Columns of a tile at which ids [N', K] are, and whether they are; others are past its end."""
  size = z.shape[1]
  columns = ids - first_id(head, j, size).astype(ids.dtype)
  inside = (ids >= 0) & (columns >= 0) & (columns < size)
  columns = jnp.where(inside, columns, size)
  # A column that was in the block before has been seen there.
  inside &= ~jnp.isneginf(jnp.take_along_axis(z, jnp.clip(columns, 0, size - 1), axis=1))
  return jnp.where(inside, columns, size), inside


def _without(z: jax.Array, columns: jax.Array) -> jax.Array:
  return z.at[_row_numbers(z), columns].set(-jnp.inf, mode="drop")


def _row_numbers(z: jax.Array) -> jax.Array:
  return jnp.arange(z.shape[0])[:, None]
