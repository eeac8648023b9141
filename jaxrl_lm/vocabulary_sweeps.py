r"""Sweeps over the tiles of [tokens, vocabulary]: sums forward, gradients backward.

`local_sums` reduces the tiles; `gradients` computes them again and turns coefficients per token
into the gradients of hidden states, unembedding and bias; `sums_and_gradients` does both, with the
logits of one block of tokens kept in between. The gradient of every statistic is

  dL/dz[v] = p[v] (constant + linear (z[v] - largest) + square p[v])
             + at_token 1[v = y] + at_best 1[v = best]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm.vocabulary_tiles import (
  Blocks,
  Head,
  Tokens,
  add_block,
  block_of,
  clean_hidden,
  column_ids,
  first_id,
  logits_dtype,
  logits_tile,
  loop,
  once,
  product,
  put_block,
  raw_slope,
  unembedding_block,
)


class Wanted(NamedTuple):
  """Which statistics beside the normaliser are computed: each costs work per logit.

  Attributes:
    mean: sum p (z - largest), for the entropy.
    squares: sum p^2.
    best: id of the largest logit.
  """

  mean: bool = False
  squares: bool = False
  best: bool = False


class Sums(NamedTuple):
  """Statistics of the logits z of each token over the local rows, [N] each.

  They are centred at the largest logit: a large offset costs no digits. None where not wanted.

  Attributes:
    largest: max z; -inf if there is no logit.
    total: sum exp(z - largest).
    token: z[y]; -inf if y is not among the rows.
    mean: sum exp(z - largest) (z - largest), not divided by the total.
    squares: sum exp(2 (z - largest)), not divided by its square.
    best: id of the largest logit.
  """

  largest: jax.Array
  total: jax.Array
  token: jax.Array
  mean: jax.Array | None
  squares: jax.Array | None
  best: jax.Array | None


class Slopes(NamedTuple):
  """What the gradient of the logits is made of, [N] each; see the module. None = 0.

  Attributes:
    largest, log_total: of the whole vocabulary, p = exp(z - largest - log_total).
    constant, linear, square: factors of p, p (z - largest), p^2.
    at_token: added at the token's id.
    best, at_best: an id, and what is added there.
  """

  largest: jax.Array
  log_total: jax.Array
  constant: jax.Array
  at_token: jax.Array
  linear: jax.Array | None = None
  square: jax.Array | None = None
  best: jax.Array | None = None
  at_best: jax.Array | None = None


class Gradients(NamedTuple):
  """Of hidden states [N, D], unembedding [V, D] and bias [V], or None where there is none."""

  hidden: jax.Array
  unembedding: jax.Array
  bias: jax.Array | None


def local_sums(head: Head, tokens: Tokens, blocks: Blocks, wanted: Wanted) -> Sums:
  """Statistics of every token, in one sweep of one matrix product.

  Args:
    head: see `Head`.
    tokens: see `Tokens`.
    blocks: size of a tile.
    wanted: see `Wanted`.

  Returns:
    Sums, [N] each.
  """
  count = tokens.ids.shape[0]

  def token_block(i: jax.Array, sums: Sums) -> Sums:
    part = block_of(tokens, i, blocks.tokens)
    return put_block(sums, _over_vocabulary(head, part, blocks, wanted), i, blocks.tokens)

  return loop(count, blocks.tokens, token_block, no_sums(head, tokens, wanted), (head, tokens))


def gradients(head: Head, tokens: Tokens, slopes: Slopes, blocks: Blocks) -> Gradients:
  """Gradients of hidden states, unembedding and bias, in one sweep of three matrix products.

  The vocabulary is the outer loop: what is added up for the unembedding, in float32 at least
  whatever its dtype, is one block of it.

  Args:
    head: see `Head`.
    tokens: see `Tokens`.
    slopes: see `Slopes`.
    blocks: size of a tile.

  Returns:
    Gradients, in the dtypes of the head; that of the hidden states in float32 at least.
  """

  def tile_slope(part: Tokens, part_slopes: Slopes, j: jax.Array) -> jax.Array:
    return _slope(head, part, part_slopes, logits_tile(head, part, j, blocks.vocabulary), j)

  return accumulate(head, tokens, slopes, tile_slope, blocks)


def accumulate(
  head: Head, tokens: Tokens, rows: Any, tile_slope: Callable[..., jax.Array], blocks: Blocks
) -> Gradients:
  """The gradients that belong to a gradient of the logits, given tile by tile.

  Args:
    head: see `Head`.
    tokens: see `Tokens`.
    rows: arrays [N, ...] that the slope of a token needs.
    tile_slope: (tokens of a block, their rows, index of the block of the vocabulary) -> gradient
      of the tile's hidden @ unembedding.T + bias.
    blocks: size of a tile.

  Returns:
    Gradients, in the dtypes of the head; that of the hidden states in float32 at least.
  """
  count, vocabulary = tokens.ids.shape[0], head.unembedding.shape[0]
  dtype = logits_dtype(head, tokens)
  like = (head, tokens, rows)

  def vocabulary_block(j: jax.Array, carry: Any) -> Any:
    hidden, *outer = carry
    matrix = unembedding_block(head, j, blocks.vocabulary)

    def token_block(i: jax.Array, carry: Any) -> Any:
      hidden, *inner = carry
      part, part_rows = block_of((tokens, rows), i, blocks.tokens)
      slope = once(tile_slope(part, part_rows, j), i, blocks.tokens, count)
      hidden = add_block(hidden, product(slope, matrix, (1, 0), dtype), i, blocks.tokens)
      inner = _plus(inner, _of_block(slope, part, dtype))
      return hidden, *inner

    size = matrix.shape[0]
    block_matrix = jnp.zeros((size, tokens.hidden.shape[1]), dtype)
    block_bias = None if head.bias is None else jnp.zeros((size,), dtype)
    start = (hidden, block_matrix, block_bias)
    hidden, *inner = loop(count, blocks.tokens, token_block, start, like)
    return hidden, *(
      add_block(x, y, j, blocks.vocabulary) for x, y in zip(outer, inner, strict=True)
    )

  empty = (
    jnp.zeros(tokens.hidden.shape, dtype),
    jnp.zeros_like(head.unembedding),
    None if head.bias is None else jnp.zeros_like(head.bias),
  )
  return Gradients(*loop(vocabulary, blocks.vocabulary, vocabulary_block, empty, like))


def sums_and_gradients(
  head: Head,
  tokens: Tokens,
  rows: Any,
  slopes: Callable[[Sums, Tokens, Any], Slopes],
  blocks: Blocks,
  wanted: Wanted,
) -> tuple[Sums, Gradients]:
  """`local_sums` and `gradients` in one sweep: three matrix products instead of four.

  The logits of one block of tokens are kept between the two halves of its sweep. All rows of
  the vocabulary are local: the slopes need the whole sum.

  Args:
    head: see `Head`.
    tokens: see `Tokens`.
    rows: arrays [N, ...] that the slopes of a token need.
    slopes: (sums, tokens and rows of a block) -> slopes.
    blocks: size of a tile.
    wanted: see `Wanted`.

  Returns:
    Sums, and the gradients in float32 at least.
  """
  count, vocabulary = tokens.ids.shape[0], head.unembedding.shape[0]
  dtype = logits_dtype(head, tokens)
  like = (head, tokens, rows)

  def token_block(i: jax.Array, carry: Any) -> Any:
    sums, hidden, *outer = carry
    part, part_rows = block_of((tokens, rows), i, blocks.tokens)
    part_sums, tiles = _over_vocabulary_keeping(head, part, blocks, wanted)
    part_slopes = slopes(part_sums, part, part_rows)

    def vocabulary_block(j: jax.Array, carry: Any) -> Any:
      part_hidden, *outer = carry
      tile = jax.lax.dynamic_index_in_dim(tiles, j, keepdims=False)
      slope = once(_slope(head, part, part_slopes, tile, j), i, blocks.tokens, count)
      matrix = unembedding_block(head, j, blocks.vocabulary)
      part_hidden += product(slope, matrix, (1, 0), dtype)
      block = _of_block(slope, part, dtype)
      outer = [add_block(x, y, j, blocks.vocabulary) for x, y in zip(outer, block, strict=True)]
      return part_hidden, *outer

    empty = (jnp.zeros(part.hidden.shape, dtype), *outer)
    part_hidden, *outer = loop(vocabulary, blocks.vocabulary, vocabulary_block, empty, like)
    sums = put_block(sums, part_sums, i, blocks.tokens)
    return sums, add_block(hidden, part_hidden, i, blocks.tokens), *outer

  empty = (
    no_sums(head, tokens, wanted),
    jnp.zeros(tokens.hidden.shape, dtype),
    jnp.zeros(head.unembedding.shape, dtype),
    None if head.bias is None else jnp.zeros(head.bias.shape, dtype),
  )
  sums, *grads = loop(count, blocks.tokens, token_block, empty, like)
  return sums, Gradients(*grads)


def _slope(head: Head, part: Tokens, slopes: Slopes, z: jax.Array, j: jax.Array) -> jax.Array:
  """Gradient of a tile of hidden @ unembedding.T + bias, [N', V']."""
  shifted = _above(z - slopes.largest[:, None])
  p = jnp.exp(shifted - slopes.log_total[:, None])
  weight = slopes.constant[:, None]
  if slopes.linear is not None:
    weight = weight + slopes.linear[:, None] * shifted
  if slopes.square is not None:
    weight = weight + slopes.square[:, None] * p
  slope = p * weight + slopes.at_token[:, None] * _hit(head, part.ids, z, j)
  if slopes.best is not None and slopes.at_best is not None:
    slope += slopes.at_best[:, None] * _hit(head, slopes.best, z, j)
  return raw_slope(head, slope, z)


def _hit(head: Head, ids: jax.Array, z: jax.Array, j: jax.Array) -> jax.Array:
  """1 at the id of each token, 0 elsewhere, at excluded columns and where the id is none.

  In integer arithmetic: on a CPU a comparison here keeps the loop from being vectorised.
  """
  distance = jnp.abs(column_ids(head, j, z.shape[1])[None] - ids[:, None])
  hit = (1 - jnp.minimum(distance, 1)).astype(z.dtype)
  return hit if head.bias is None else jnp.where(jnp.isneginf(z), 0.0, hit)


def _above(shifted: jax.Array) -> jax.Array:
  """Logits below the largest one, -inf made finite; exact, for exp(-1e4) is 0 in any dtype."""
  return jnp.maximum(shifted, -1e4)


def _over_vocabulary(head: Head, part: Tokens, blocks: Blocks, wanted: Wanted) -> Sums:
  """Sums of a block of tokens; its logits are dropped tile by tile."""

  def body(j: jax.Array, sums: Sums) -> Sums:
    return update(head, part, sums, logits_tile(head, part, j, blocks.vocabulary), j)

  vocabulary = head.unembedding.shape[0]
  return loop(vocabulary, blocks.vocabulary, body, no_sums(head, part, wanted), (head, part))


def _over_vocabulary_keeping(
  head: Head, part: Tokens, blocks: Blocks, wanted: Wanted
) -> tuple[Sums, jax.Array]:
  """Sums of a block of tokens, and all its tiles."""

  def body(j: jax.Array, carry: tuple[Sums, jax.Array]) -> tuple[Sums, jax.Array]:
    sums, tiles = carry
    z = logits_tile(head, part, j, blocks.vocabulary)
    tiles = jax.lax.dynamic_update_index_in_dim(tiles, z, j, 0)
    return update(head, part, sums, z, j), tiles

  vocabulary, count = head.unembedding.shape[0], part.ids.shape[0]
  steps = -(-vocabulary // blocks.vocabulary)
  tiles = jnp.zeros((steps, count, blocks.vocabulary), logits_dtype(head, part))
  carry = (no_sums(head, part, wanted), tiles)
  return loop(vocabulary, blocks.vocabulary, body, carry, (head, part))


def update(head: Head, part: Tokens, sums: Sums, z: jax.Array, j: jax.Array) -> Sums:
  """Running sums with one more tile.

  Args:
    head: see `Head`.
    part: tokens of the block.
    sums: so far, [N'] each.
    z: [N', V'] logits.
    j: index of the block of the vocabulary.

  Returns:
    Sums.
  """
  largest = jnp.maximum(sums.largest, jnp.max(z, axis=1))
  # An anchor of -inf would give NaN: there is no logit yet.
  anchor = jnp.where(jnp.isneginf(largest), 0.0, largest)
  shrink = jnp.exp(sums.largest - anchor)
  total = shrink * sums.total + jnp.sum(jnp.exp(z - anchor[:, None]), axis=1)

  mean = squares = best = None
  if sums.mean is not None:
    # Two reductions in one loop would not be vectorised on a CPU: the barrier keeps them apart.
    apart = jax.lax.optimization_barrier((anchor, total))[0]
    shifted = _above(z - apart[:, None])
    change = _above(sums.largest - anchor)
    mean = jnp.sum(jnp.exp(shifted) * shifted, axis=1)
    mean += shrink * (sums.mean + sums.total * change)
  if sums.squares is not None:
    apart = jax.lax.optimization_barrier((anchor, total, mean))[0]
    squares = jnp.sum(jnp.exp(2.0 * (z - apart[:, None])), axis=1)
    squares += jnp.square(shrink) * sums.squares
  if sums.best is not None:
    # Not by comparing with the largest: computed twice, a logit need not be equal to itself.
    here = jnp.take(column_ids(head, j, z.shape[1]), jnp.argmax(z, axis=1))
    best = jnp.where(largest > sums.largest, here, sums.best)

  column = part.ids - first_id(head, j, z.shape[1])
  inside = (column >= 0) & (column < z.shape[1])
  found = jnp.take_along_axis(z, jnp.clip(column, 0, z.shape[1] - 1)[:, None], axis=1)[:, 0]
  # A column that was in the block before is -inf here.
  token = jnp.maximum(sums.token, jnp.where(inside, found, -jnp.inf))
  return Sums(largest, total, token, mean, squares, best)


def no_sums(head: Head, tokens: Tokens, wanted: Wanted) -> Sums:
  """Sums over no logit.

  Args:
    head: see `Head`.
    tokens: see `Tokens`.
    wanted: see `Wanted`.

  Returns:
    Sums, [N] each.
  """
  count, dtype = tokens.ids.shape[0], logits_dtype(head, tokens)
  nothing, zero = jnp.full((count,), -jnp.inf, dtype), jnp.zeros((count,), dtype)
  return Sums(
    largest=nothing,
    total=zero,
    token=nothing,
    mean=zero if wanted.mean else None,
    squares=zero if wanted.squares else None,
    best=jnp.full((count,), -1, tokens.ids.dtype) if wanted.best else None,
  )


def _of_block(slope: jax.Array, part: Tokens, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """What a tile adds to the gradients of its block of the unembedding, and of the bias."""
  return product(slope, clean_hidden(part), (0, 0), dtype), jnp.sum(slope, axis=0)


def _plus(sums: Any, parts: Any) -> list[Any]:
  return [None if x is None else x + y for x, y in zip(sums, parts, strict=True)]
