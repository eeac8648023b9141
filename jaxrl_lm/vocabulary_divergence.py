"""The sweeps of a divergence: two tiles of logits at a time, and the terms between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import vocabulary_statistics
from jaxrl_lm.vocabulary_sharding import across
from jaxrl_lm.vocabulary_sweeps import Sums, Wanted, accumulate, local_sums
from jaxrl_lm.vocabulary_tiles import (
  Blocks,
  Head,
  Tokens,
  block_of,
  logits_dtype,
  logits_tile,
  loop,
  put_block,
  raw_slope,
  varying_like,
)

Terms = Callable[[jax.Array, jax.Array], jax.Array]


class _Pair(NamedTuple):
  """What is static in the sweep of a divergence; the terms as a jaxpr of a tile's size."""

  terms: Any
  blocks: Blocks
  axes: tuple[str, ...]


def local_divergence(
  heads: tuple[Head, Head],
  batch: tuple[Tokens, jax.Array],
  axes: tuple[str, ...],
  *,
  terms: Terms,
  memory_budget: int,
) -> tuple[None, jax.Array]:
  """Divergence at each of a device's tokens.

  Args:
    heads: of student and teacher, this device's rows.
    batch: the student's tokens [..., T], and the teacher's hidden states [..., T, D'].
    axes: mesh axes over which the vocabulary is sharded.
    terms: see `linear_divergence`.
    memory_budget: bytes for tiles.

  Returns:
    No total, and [..., T] nats.

  Raises:
    ValueError: the terms are not elementwise.
  """
  tokens, shape = vocabulary_statistics.flatten(batch[0])
  other = tokens._replace(hidden=batch[1].reshape(-1, batch[1].shape[-1]))
  if tokens.ids.shape[0] == 0:
    return None, jnp.zeros(shape, logits_dtype(heads[0], tokens))
  # Two tiles of logits, and their terms.
  blocks = vocabulary_statistics.choose_blocks(tokens, heads[0], memory_budget, copies=6)
  # What the terms close over, such as a traced constant, becomes an argument of the rule.
  tile = varying_like(jnp.zeros(blocks, logits_dtype(heads[0], tokens)), (heads, tokens, other))
  traced = jax.make_jaxpr(terms)(tile, tile)
  if [x.shape for x in traced.out_avals] != [tile.shape]:
    shapes = [x.shape for x in traced.out_avals]
    raise ValueError(f"terms must be elementwise: of two arrays {tile.shape} they made {shapes}")
  pair = _Pair(traced.jaxpr, blocks, axes)
  divergence = _divergence(heads[0], tokens, heads[1], other, tuple(traced.consts), pair)
  return None, divergence.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _divergence(
  head: Head, tokens: Tokens, teacher: Head, other: Tokens, constants: Any, pair: _Pair
) -> jax.Array:
  return _divergence_forward(head, tokens, teacher, other, constants, pair)[0]


def _divergence_forward(
  head: Head, tokens: Tokens, teacher: Head, other: Tokens, constants: Any, pair: _Pair
) -> Any:
  normalizers = tuple(
    log_normalizer(local_sums(h, x, pair.blocks, Wanted()), pair.axes)
    for h, x in ((head, tokens), (teacher, other))
  )
  both = (head, tokens, teacher, other, normalizers)
  count, vocabulary = tokens.ids.shape[0], head.unembedding.shape[0]
  size = pair.blocks.tokens

  def token_block(i: jax.Array, totals: Any) -> Any:
    part, other_part, logs = block_of((tokens, other, normalizers), i, size)

    def vocabulary_block(j: jax.Array, totals: Any) -> Any:
      z = logits_tile(head, part, j, pair.blocks.vocabulary)
      value, slope = _value_and_slope(pair, constants, z, teacher, other_part, logs, j)
      # Two reductions in one loop would not be vectorised on a CPU: the barrier keeps them apart.
      value, slope = jax.lax.optimization_barrier((value, slope))
      return totals[0] + jnp.sum(value, axis=1), totals[1] + jnp.sum(slope, axis=1)

    empty = (jnp.zeros_like(logs[0]),) * 2
    sums = loop(vocabulary, pair.blocks.vocabulary, vocabulary_block, empty, both)
    return put_block(totals, sums, i, size)

  empty = (jnp.zeros_like(normalizers[0]),) * 2
  totals = loop(count, size, token_block, empty, both)
  value, slope = (across(jax.lax.psum, x, pair.axes) for x in totals)
  value, slope = (jnp.where(tokens.mask, x, 0.0) for x in (value, slope))
  return value, (*both, constants, slope)


def _divergence_backward(pair: _Pair, residuals: Any, cotangent: jax.Array) -> Any:
  head, tokens, teacher, other, normalizers, constants, total_slope = residuals
  cotangent = jnp.where(tokens.mask, cotangent, 0.0)

  def tile_slope(part: Tokens, rows: Any, j: jax.Array) -> jax.Array:
    other_part, logs, total, g = rows
    z = logits_tile(head, part, j, pair.blocks.vocabulary)
    _, slope = _value_and_slope(pair, constants, z, teacher, other_part, logs, j)
    slope -= jnp.exp(z - logs[0][:, None]) * total[:, None]
    # Not a product: the slope may be infinite where the teacher excludes a token.
    slope = jnp.where(g[:, None] == 0, 0.0, g[:, None] * slope)
    return raw_slope(head, slope, z)

  rows = (other, normalizers, total_slope, cotangent)
  grads = accumulate(head, tokens, rows, tile_slope, pair.blocks)
  return *vocabulary_statistics.input_gradients(head, tokens, grads), None, None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)


def _value_and_slope(
  pair: _Pair,
  constants: Any,
  z: jax.Array,
  teacher: Head,
  other: Tokens,
  logs: Any,
  j: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Terms of a tile and their derivative in the student's log-probs."""
  student = z - logs[0][:, None]
  theirs = logits_tile(teacher, other, j, pair.blocks.vocabulary) - logs[1][:, None]
  like = (student, theirs, teacher, other)
  student, theirs = (varying_like(x.astype(z.dtype), like) for x in (student, theirs))

  def terms(student: jax.Array) -> jax.Array:
    return jax.core.eval_jaxpr(pair.terms, constants, student, theirs)[0]

  return jax.jvp(terms, (student,), (jnp.ones_like(student),))


def log_normalizer(sums: Sums, axes: tuple[str, ...]) -> jax.Array:
  """Log sum exp of the logits; 0 where there is none.

  Args:
    sums: over this device's rows.
    axes: mesh axes over which the vocabulary is sharded.

  Returns:
    [N], over all rows.
  """
  sums = vocabulary_statistics.whole_sums(sums, axes)
  normalizer = sums.largest + jnp.log(sums.total)
  return jnp.where(jnp.isneginf(sums.largest), 0.0, normalizer)
