"""Statistics of next-token distributions from hidden states: checks, block sizes, one sweep.

What `linear_logprobs`, `linear_policy_loss` and `linear_distillation` have in common.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import checks
from jaxrl_lm.vocabulary_sharding import across, total_like
from jaxrl_lm.vocabulary_sweeps import Gradients, Slopes, Sums, Wanted, gradients, local_sums
from jaxrl_lm.vocabulary_tiles import Blocks, Head, Tokens, logits_dtype

TILE_BUDGET = 2**26  # bytes; a tile of 1024 tokens and 5376 ids, three arrays of it


class TokenStats(NamedTuple):
  """Statistics of the next-token distribution p at each index, [..., T], 0 where masked.

  Attributes:
    logprobs: log p[y] of the chosen token, nats.
    log_normalizer: log sum exp of the logits (after bias, cap and temperature), nats.
    entropy: - sum p log p, nats. None where not computed.
    sum_squares: sum p^2, the probability that two draws agree. None where not computed.
    best_logprob: largest log-prob, the greedy token's, nats. None where not computed.
  """

  logprobs: jax.Array
  log_normalizer: jax.Array
  entropy: jax.Array | None
  sum_squares: jax.Array | None
  best_logprob: jax.Array | None


def check_head(
  unembedding: Any,
  bias: Any,
  softcap: Any,
  valid_vocab: Any,
  temperature: Any,
  prefix: str = "",
) -> Head:
  """A head, checked.

  Args:
    unembedding, bias, softcap, valid_vocab, temperature: as in `linear_token_logprobs`.
    prefix: of the arguments' names in an error, such as "teacher_".

  Returns:
    Head.

  Raises:
    ValueError: shapes do not match, or a constant is out of range.
    TypeError: a dtype is not real.
  """
  name = f"{prefix}unembedding"
  unembedding = check_real(name, unembedding)
  if unembedding.ndim != 2 or 0 in unembedding.shape:
    raise ValueError(f"{name} must be [V, D], not empty, got shape {unembedding.shape}")
  if bias is not None:
    bias = check_real(f"{prefix}bias", bias)
    rows = jax.ShapeDtypeStruct(unembedding.shape[:1], unembedding.dtype)
    checks.check_same_shape(**{f"{name}[:, 0]": rows, f"{prefix}bias": bias})
  checks.check_range("temperature", temperature, low=0.0, open_low=True)
  # The hidden states may have more digits than the matrix.
  constant = partial(jnp.asarray, dtype=jnp.result_type(float))
  if softcap is not None:
    checks.check_range(f"{prefix}softcap", softcap, low=0.0, open_low=True)
    softcap = constant(softcap)
  if valid_vocab is not None:
    # Inside `shard_map` the rows may be a device's share of those that the number speaks of.
    share = jax.sharding.get_abstract_mesh().manual_axes
    most = None if share else unembedding.shape[0]
    checks.check_range("valid_vocab", valid_vocab, low=1, high=most)
    valid_vocab = jnp.asarray(checks.check_integer("valid_vocab", valid_vocab), jnp.int32)
  is_one = isinstance(temperature, float | int) and temperature == 1
  return Head(
    unembedding=unembedding,
    bias=bias,
    temperature=None if is_one else constant(temperature),
    softcap=softcap,
    first=jnp.zeros((), jnp.int32),
    end=valid_vocab,
  )


def check_tokens(hidden: Any, tokens: Any, mask: Any, head: Head, prefix: str = "") -> Tokens:
  """States and tokens, checked, not yet flat.

  Args:
    hidden, tokens, mask: as in `linear_token_logprobs`; tokens may be None, for no token.
    head: its head.
    prefix: of the arguments' names in an error, such as "teacher_".

  Returns:
    Tokens: [..., T, D], [..., T], [..., T].

  Raises:
    ValueError: shapes do not match.
    TypeError: a dtype is wrong.
  """
  name = f"{prefix}hidden"
  hidden = check_real(name, hidden)
  checks.check_rank(name, hidden, 2)
  if hidden.shape[-1] != head.unembedding.shape[1]:
    raise ValueError(
      f"{name} and {prefix}unembedding must have the same last axis: {name} is {hidden.shape}, "
      f"{prefix}unembedding is {head.unembedding.shape}"
    )
  states = jax.ShapeDtypeStruct(hidden.shape[:-1], hidden.dtype)
  if tokens is None:
    # Laid out as the states are, whatever axis of them is sharded; the sum is never computed.
    tokens = jnp.zeros_like(jnp.sum(hidden, axis=-1), jnp.int32)
  tokens = checks.check_integer("tokens", tokens)
  checks.check_same_shape(**{f"{name}[..., 0]": states, "tokens": tokens})
  # At least 32 bits: an id of the vocabulary must not wrap around in the tokens' own dtype.
  tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))
  if mask is None:
    return Tokens(hidden, tokens, jnp.ones_like(tokens, jnp.bool_))
  like: dict[str, Any] = {f"{name}[..., 0]": states}
  mask = checks.check_mask(mask, **like)
  return Tokens(hidden, tokens, mask)


def check_real(name: str, x: Any) -> jax.Array:
  """An array of floating-point numbers, in its own dtype: products of bfloat16 stay cheap.

  Args:
    name: what to call the argument in an error.
    x: array of real numbers; integers become JAX's default float.

  Returns:
    The array.

  Raises:
    TypeError: x is complex, or not numeric.
  """
  x = jnp.asarray(x)
  return x if jnp.issubdtype(x.dtype, jnp.floating) else checks.as_float(name, x)


def statistics(
  head: Head, batch: Tokens, axes: tuple[str, ...], *, wanted: Wanted, memory_budget: int
) -> tuple[None, TokenStats]:
  """Statistics of [..., T] tokens on one device, or on all that share a vocabulary.

  Args:
    head: this device's rows.
    batch: this device's tokens, [..., T].
    axes: mesh axes over which the vocabulary is sharded.
    wanted: which statistics.
    memory_budget: bytes for tiles.

  Returns:
    No total, and TokenStats, [..., T] each.
  """
  flat, shape = flatten(batch)
  if flat.ids.shape[0] == 0:
    nothing = jnp.zeros(shape, logits_dtype(head, flat))
    extra = (nothing if x else None for x in wanted)
    return None, TokenStats(nothing, nothing, *extra)
  blocks = choose_blocks(flat, head, memory_budget)
  stats = _statistics(head, flat, _Sweep(blocks, wanted, axes))
  return None, jax.tree.map(lambda x: x.reshape(shape), stats)


def flatten(batch: Any) -> tuple[Any, tuple[int, ...]]:
  """[..., T, (D)] as [N, (D)].

  Args:
    batch: Tokens.

  Returns:
    Tokens, and the shape [..., T].
  """
  shape = batch.ids.shape
  hidden = batch.hidden.reshape(-1, batch.hidden.shape[-1])
  return Tokens(hidden, batch.ids.reshape(-1), batch.mask.reshape(-1)), shape


def choose_blocks(tokens: Tokens, head: Head, memory_budget: int, *, copies: int = 3) -> Blocks:
  """Tile whose temporary copies fit a budget: up to 1024 tokens, then up to 8192 ids.

  Args:
    tokens: flat.
    head: this device's rows.
    memory_budget: bytes.
    copies: number of arrays of a tile's size.

  Returns:
    Blocks.

  Raises:
    ValueError: the budget is not positive.
    TypeError: the budget is traced.
  """
  budget = check_budget(memory_budget)
  logits = max(budget // (copies * logits_dtype(head, tokens).itemsize), 1)
  rows = block_size(tokens.ids.shape[0], min(1024, logits))
  return Blocks(rows, block_size(head.unembedding.shape[0], min(8192, max(logits // rows, 1))))


def check_budget(memory_budget: Any) -> int:
  """A number of bytes, checked: it decides shapes, so it is known while tracing.

  Args:
    memory_budget: bytes.

  Returns:
    The same as an int.

  Raises:
    ValueError: it is not positive, or infinite.
    TypeError: it is traced.
  """
  if isinstance(memory_budget, jax.core.Tracer):
    raise TypeError("memory_budget must be known while tracing, got a traced number")
  checks.check_range("memory_budget", memory_budget, low=1, high=2**62)
  return int(memory_budget)


def block_size(total: int, largest: int) -> int:
  """Length of equal blocks that cover an axis with the least overlap.

  Args:
    total: length of the axis.
    largest: longest block allowed.

  Returns:
    A multiple of 128 between half the largest and the largest, or all, or less if it must be.
  """
  if total <= largest:
    return max(total, 1)
  if largest < 128:
    return largest
  lengths = range(largest - largest % 128, largest // 2, -128)
  return min(lengths, key=lambda length: -(-total // length) * length)


class _Sweep(NamedTuple):
  """What is static in a sweep."""

  blocks: Blocks
  wanted: Wanted
  axes: tuple[str, ...]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _statistics(head: Head, tokens: Tokens, sweep: _Sweep) -> TokenStats:
  return _statistics_forward(head, tokens, sweep)[0]


def _statistics_forward(head: Head, tokens: Tokens, sweep: _Sweep) -> Any:
  sums = whole_sums(local_sums(head, tokens, sweep.blocks, sweep.wanted), sweep.axes)
  return stats_of(head, tokens, sums, sweep.axes), (head, tokens, sums)


def _statistics_backward(sweep: _Sweep, residuals: Any, cotangents: TokenStats) -> Any:
  head, tokens, sums = residuals
  slopes = slopes_of(head, tokens, sums, cotangents, sweep.axes)
  return input_gradients(head, tokens, gradients(head, tokens, slopes, sweep.blocks))


_statistics.defvjp(_statistics_forward, _statistics_backward)


def input_gradients(head: Head, tokens: Tokens, grads: Gradients) -> tuple[Any, Any]:
  """Gradients of everything a sweep reads; None for constants.

  Args:
    head, tokens: of the sweep.
    grads: of a sweep, this device's part.

  Returns:
    Head and Tokens of gradients.
  """
  bias = None
  if head.bias is not None and grads.bias is not None:
    bias = total_like(head.bias, grads.bias)
  matrix = total_like(head.unembedding, grads.unembedding)
  nothing: Any = None
  hidden = total_like(tokens.hidden, grads.hidden)
  return Head(matrix, bias, None, None, nothing, None), Tokens(hidden, nothing, nothing)


def whole_sums(sums: Sums, axes: tuple[str, ...]) -> Sums:
  """Sums over the whole vocabulary from those of each device: collectives of size N.

  Args:
    sums: over this device's rows.
    axes: mesh axes over which the vocabulary is sharded.

  Returns:
    Sums over all rows.
  """
  if not axes:
    return sums
  largest = jax.lax.pmax(sums.largest, axes)
  empty = jnp.isneginf(sums.largest)
  shift = jnp.where(empty, 0.0, sums.largest - largest)
  shrink = jnp.where(empty, 0.0, jnp.exp(shift))
  mean = squares = best = None
  if sums.mean is not None:
    mean = jax.lax.psum(shrink * (sums.mean + sums.total * shift), axes)
  if sums.squares is not None:
    squares = jax.lax.psum(jnp.square(shrink) * sums.squares, axes)
  if sums.best is not None:
    mine = sums.largest == largest
    best = jax.lax.pmin(jnp.where(mine, sums.best, jnp.iinfo(sums.best.dtype).max), axes)
  return Sums(
    largest=largest,
    total=jax.lax.psum(shrink * sums.total, axes),
    token=jax.lax.pmax(sums.token, axes),
    mean=mean,
    squares=squares,
    best=best,
  )


def stats_of(head: Head, tokens: Tokens, sums: Sums, axes: tuple[str, ...]) -> TokenStats:
  """Statistics of the distribution from the sums over its logits; 0 where masked.

  Args:
    head: of the sweep.
    tokens: of the sweep.
    sums: over the whole vocabulary.
    axes: mesh axes over which the vocabulary is sharded.

  Returns:
    TokenStats, [N] each.
  """
  log_total = jnp.log(sums.total)
  logprobs = jnp.where(_known(head, tokens, axes), (sums.token - sums.largest) - log_total, jnp.nan)
  stats = TokenStats(
    logprobs=logprobs,
    log_normalizer=sums.largest + log_total,
    entropy=None if sums.mean is None else log_total - sums.mean / sums.total,
    sum_squares=None if sums.squares is None else sums.squares / jnp.square(sums.total),
    best_logprob=None if sums.best is None else -log_total,
  )
  return jax.tree.map(lambda x: jnp.where(tokens.mask, x, 0.0), stats)


def slopes_of(
  head: Head, tokens: Tokens, sums: Sums, cotangents: TokenStats, axes: tuple[str, ...]
) -> Slopes:
  """The gradient of statistics as coefficients of the gradient of the logits.

  d logprobs = 1[y] - p,  d log_normalizer = p,  d entropy = -p (z - mean),
  d sum_squares = 2 p (p - sum_squares),  d best_logprob = 1[best] - p

  Args:
    head: of the sweep.
    tokens: of the sweep.
    sums: over the whole vocabulary.
    cotangents: of the statistics.
    axes: mesh axes over which the vocabulary is sharded.

  Returns:
    Slopes, [N] each; all 0 where masked.
  """
  cotangents = jax.tree.map(lambda x: jnp.where(tokens.mask, x, 0.0), cotangents)
  chosen = jnp.where(_known(head, tokens, axes), cotangents.logprobs, 0.0)
  total = jnp.where(sums.total == 0, 1.0, sums.total)
  constant = cotangents.log_normalizer - chosen
  linear = square = None
  if sums.mean is not None and cotangents.entropy is not None:
    linear = -cotangents.entropy
    constant = constant - linear * sums.mean / total
  if sums.squares is not None and cotangents.sum_squares is not None:
    square = 2.0 * cotangents.sum_squares
    constant = constant - square * sums.squares / jnp.square(total)
  if cotangents.best_logprob is not None:
    constant = constant - cotangents.best_logprob
  # Of no logit at all there is no gradient, and none of its NaN may reach the matrix.
  empty = jnp.isneginf(sums.largest)
  return Slopes(
    largest=jnp.where(empty, 0.0, sums.largest),
    log_total=jnp.log(total),
    constant=constant,
    at_token=chosen,
    linear=linear,
    square=square,
    best=sums.best,
    at_best=None
    if cotangents.best_logprob is None
    else jnp.where(empty, 0.0, cotangents.best_logprob),
  )


def _known(head: Head, tokens: Tokens, axes: tuple[str, ...]) -> jax.Array:
  """The token is an id of the vocabulary."""
  rows = head.unembedding.shape[0] * across(jax.lax.psum, 1, axes)
  end = rows if head.end is None else jnp.minimum(head.end, rows)
  return (tokens.ids >= 0) & (tokens.ids < end)
