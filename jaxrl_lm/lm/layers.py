"""The layers of a policy as Flax NNX modules; `policy` uses them as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jaxrl_lm.lm import attention, rope
from jaxrl_lm.lm.config import PolicyConfig

_INIT = nnx.initializers.normal(0.02)


class Context(NamedTuple):
  """What every layer needs to know of the tokens.

  Attributes:
    rotation: of the tokens.
    mask: [B, T, S] bool, who attends to whom.
    start: [] int32 first slot of the tokens in the cache; 0 without one.
  """

  rotation: rope.Rotation
  mask: jax.Array
  start: Any


Stored = tuple[jax.Array, jax.Array]  # keys [B, KV, D, S], values [B, KV, S, D] of a layer


def _linear(
  config: PolicyConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, bias: bool = False
) -> nnx.Linear:
  return nnx.Linear(
    inputs,
    outputs,
    use_bias=bias,
    dtype=config.compute_dtype,
    param_dtype=config.param_dtype,
    kernel_init=_INIT,
    dot_general=_product,
    rngs=rngs,
  )


def _product(x: jax.Array, kernel: jax.Array, dimensions: Any, **how: Any) -> jax.Array:
  """`jax.lax.dot_general` of x [..., D] and a kernel [D, F], as one product of two matrices.

  XLA for CPU copies the transposed gradient of a product with more axes.
  """
  del dimensions
  rows = x.reshape(-1, x.shape[-1])
  product = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **how)
  return product.reshape(*x.shape[:-1], kernel.shape[1])


class RMSNorm(nnx.Module):
  """x / sqrt(mean(x^2) + eps) * scale; the quotient in float32 at least, then cast back.

  Reference: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.
  """

  def __init__(self, config: PolicyConfig, size: int):
    self.eps = config.norm_eps
    self.scale = nnx.Param(jnp.ones(size, config.param_dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises the last axis.

    Args:
      x: [..., size]. Differentiated.

    Returns:
      The same shape and dtype.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.eps)
    scale = self.scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    return wide.astype(x.dtype) * scale


class Attention(nnx.Module):
  """Projections, norms and rotation around `attention.attend`."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.config = config
    heads, shared = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    size, bias = config.hidden_size, config.qkv_bias
    self.query = _linear(config, size, heads, rngs, bias=bias)
    self.key = _linear(config, size, shared, rngs, bias=bias)
    self.value = _linear(config, size, shared, rngs, bias=bias)
    self.output = _linear(config, heads, size, rngs, bias=config.output_bias)
    if config.qk_norm:
      self.query_norm = RMSNorm(config, config.head_dim)
      self.key_norm = RMSNorm(config, config.head_dim)

  def __call__(
    self, x: jax.Array, context: Context, stored: Stored | None
  ) -> tuple[jax.Array, Stored]:
    """Attends over the tokens, and over what is stored of those before.

    Args:
      x: [B, T, D]. Differentiated.
      context: see `Context`.
      stored: keys and values of this layer; None = there is no cache.

    Returns:
      [B, T, D], and the keys and values with those of the tokens in them.
    """
    config = self.config

    def heads(projected: jax.Array) -> jax.Array:
      return projected.reshape(*x.shape[:-1], -1, config.head_dim)

    queries, keys, values = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
    if config.qk_norm:
      queries, keys = self.query_norm(queries), self.key_norm(keys)
    interleaved = config.rope.interleaved
    queries = rope.rotate(queries, context.rotation, interleaved=interleaved)
    keys = rope.rotate(keys, context.rotation, interleaved=interleaved)
    # A NaN value would reach tokens that do not attend to it, as 0 * NaN; its key, whose scores are
    # NaN, reaches all that do.
    values = jnp.where(jnp.any(jnp.isnan(keys), axis=-1, keepdims=True), 0, values)
    keys, values = jnp.moveaxis(keys, 1, 3), jnp.moveaxis(values, 1, 2)
    if stored is not None:
      keys = attention.write(stored[0], keys, context.start, axis=3)
      values = attention.write(stored[1], values, context.start, axis=2)
    out = attention.attend(queries, keys, values, context.mask)
    return self.output(out.reshape(*x.shape[:-1], -1)), (keys, values)


class Mlp(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x)).

  Reference: Shazeer 2020, arXiv:2002.05202, eq. 6.
  """

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    size, width = config.hidden_size, config.intermediate_size
    self.gate = _linear(config, size, width, rngs)
    self.up = _linear(config, size, width, rngs)
    self.down = _linear(config, width, size, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies it to every token.

    Args:
      x: [B, T, D]. Differentiated.

    Returns:
      [B, T, D].
    """
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
  """One layer: attention and MLP, each on the normalised stream and added to it."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config, config.hidden_size)
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config, config.hidden_size)
    self.mlp = Mlp(config, rngs)

  def __call__(
    self, x: jax.Array, context: Context, stored: Stored | None
  ) -> tuple[jax.Array, Stored]:
    """Applies it.

    Args:
      x: [B, T, D]. Differentiated.
      context: see `Context`.
      stored: keys and values of this layer; None = there is no cache.

    Returns:
      [B, T, D], and the keys and values with those of the tokens in them.
    """
    out, stored = self.attention(self.attention_norm(x), context, stored)
    x = x + out
    return x + self.mlp(self.mlp_norm(x)), stored


class Decoder(nnx.Module):
  """Embedding, layers and the last norm; the head is applied by `Model`.

  `layers` is a list of blocks, or one block with stacked parameters where they are scanned.
  """

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.config = config
    size = (config.vocab_size, config.hidden_size)
    self.embedding = nnx.Param(_INIT(rngs.params(), size, config.param_dtype))
    blocks = [Block(config, rngs) for _ in range(config.num_layers)]
    self.layers: Any = _stacked(blocks) if config.scan_layers else nnx.List(blocks)
    self.norm = RMSNorm(config, config.hidden_size)
    if not config.tied:
      self.unembedding = nnx.Param(_INIT(rngs.params(), size, config.param_dtype))
    if config.scalar_head:
      self.value_head = nnx.Param(jnp.zeros(config.hidden_size, config.param_dtype))

  def __call__(
    self, tokens: jax.Array, context: Context, cache: attention.Cache | None
  ) -> tuple[jax.Array, attention.Cache | None]:
    """The stream after the last norm.

    Args:
      tokens: [B, T] int; an id outside the vocabulary gives NaN.
      context: see `Context`.
      cache: with the tokens' positions and segments in it (`attention.remembered`), or None.

    Returns:
      [B, T, D], and the cache with the tokens' keys and values in it.
    """
    x = _look_up(self.embedding[...], tokens).astype(self.config.compute_dtype)
    x, cache = (_scan if self.config.scan_layers else _unroll)(self, x, context, cache)
    return self.norm(x), cache


def _look_up(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
  """[B, T, D] rows of the embedding, spread over an Explicit mesh as the tokens are."""
  kept = jax.typeof(embedding).sharding
  if any(kept.spec) and AxisType.Explicit in kept.mesh.axis_types:
    raise ValueError(
      f"params must not be split over an Explicit mesh, and the embedding is ({kept.spec}): use an "
      "Auto mesh, or jax.sharding.auto_axes around the forward pass"
    )
  axes = getattr(jax.typeof(tokens).sharding, "spec", ())
  sharding = PartitionSpec(*axes, None) if any(axes) else None
  return embedding.at[tokens].get(
    mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, out_sharding=sharding
  )


Step = Callable[[Any, jax.Array, Context, Stored | None], tuple[jax.Array, Stored]]


def _step(decoder: Decoder, block: Block) -> tuple[Step, Any]:
  """A layer as a function of its parameters, and the parameters of a block."""
  graphdef, params = nnx.split(block)

  def step(
    params: Any, x: jax.Array, context: Context, stored: Stored | None
  ) -> tuple[jax.Array, Stored]:
    return nnx.merge(graphdef, params)(x, context, stored)

  return (jax.checkpoint(step) if decoder.config.remat else step), params


def _unroll(
  decoder: Decoder, x: jax.Array, context: Context, cache: attention.Cache | None
) -> tuple[jax.Array, attention.Cache | None]:
  stored = None if cache is None else list(zip(cache.keys, cache.values, strict=True))
  for i, block in enumerate(decoder.layers):
    step, params = _step(decoder, block)
    x, new = step(params, x, context, None if stored is None else stored[i])
    if stored is not None:
      stored[i] = new
  if cache is None or stored is None:
    return x, None
  keys, values = zip(*stored, strict=True)
  return x, cache._replace(keys=keys, values=values)


def _scan(
  decoder: Decoder, x: jax.Array, context: Context, cache: attention.Cache | None
) -> tuple[jax.Array, attention.Cache | None]:
  step, params = _step(decoder, decoder.layers)
  if cache is None:
    return jax.lax.scan(lambda x, params: (step(params, x, context, None)[0], None), x, params)

  # The cache is carried, not scanned over, so that each layer is updated where it is.
  def body(carry: Any, layer: Any) -> tuple[Any, None]:
    x, keys, values = carry
    params, i = layer
    stored = tuple(jax.lax.dynamic_index_in_dim(a, i, keepdims=False) for a in (keys, values))
    x, stored = step(params, x, context, stored)
    keys, values = (
      jax.lax.dynamic_update_index_in_dim(a, new, i, 0)
      for a, new in zip((keys, values), stored, strict=True)
    )
    return (x, keys, values), None

  layers = (params, jnp.arange(decoder.config.num_layers))
  (x, keys, values), _ = jax.lax.scan(body, (x, cache.keys, cache.values), layers)
  return x, cache._replace(keys=keys, values=values)


def _stacked(blocks: list[Block]) -> Block:
  graphdef, _ = nnx.split(blocks[0])
  params = [nnx.split(block)[1] for block in blocks]
  return nnx.merge(graphdef, jax.tree.map(lambda *x: jnp.stack(x), *params))
