"""A decoder-only language model as a pure function of its parameters.

  model, params = init(config, key)                    model: static; params: a pytree of arrays
  output = model.apply(params, tokens, segment_ids=...)
  logits = model.logits(params, output.hidden)          or hand hidden and
  model.unembedding(params)                             to a log-prob that never holds [N, V]

The modules of `layers` are split into structure and parameters once, here: under `jax.jit` the
model is a static argument (it hashes by its configuration), the parameters an ordinary one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_lm import checks
from jaxrl_lm.lm import attention, rope
from jaxrl_lm.lm.attention import Cache
from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.layers import Context, Decoder

__all__ = ["Cache", "Model", "Output", "PolicyConfig", "abstract_params", "init"]


class Output(NamedTuple):
  """What a forward pass gives.

  Attributes:
    hidden: [B, T, D] after the last norm, in the compute dtype; 0 at padding.
    cache: with these tokens in it; None where none was given.
    values: [B, T] of the scalar head, in the head dtype; 0 at padding. None without one.
  """

  hidden: jax.Array
  cache: Cache | None
  values: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Model:
  """The structure of a policy. Frozen and hashable; equal where the configurations are.

  Attributes:
    config: what it is made of.
    graphdef: the modules without their parameters.
  """

  config: PolicyConfig
  graphdef: nnx.GraphDef = dataclasses.field(compare=False, repr=False)

  def apply(
    self,
    params: Any,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: Cache | None = None,
  ) -> Output:
    r"""Hidden states of every token, given those before it in its segment.

    hidden[:, t] is computed from tokens[:, :t + 1]: its logits are about token t + 1
    (`jaxrl_lm.next_token_logprobs` shifts), its value is that of the state after token t.

    What stands at padding changes nothing. Rows do not influence each other.

    Args:
      params: from `init` or `jaxrl_lm.lm.pretrained`. Differentiated.
      tokens: [B, T] int ids; one outside the vocabulary, not at padding, makes NaN of itself and of
        what attends to it: the rest of its segment, within the window of every layer.
      positions: [B, T] int. None = counted from 0 within each segment, padding not counted;
        with a cache, on from what it holds of the segment.
      segment_ids: [B, T] int, equal where tokens belong to one sequence, 0 = padding. None = one
        sequence per row; with a cache, the one that the row was last in.
      cache: from `init_cache` or from the last call. Tokens beyond its slots are an error where
        its length is concrete, and NaN where it is traced.

    Returns:
      Hidden states, the cache with the tokens in it, and values.

    Raises:
      ValueError: a shape is wrong, the cache is of another model or full, a row of one sequence is
        longer than `max_length`, or the embedding is split over an Explicit mesh.
      TypeError: tokens, positions or segment ids are not integers.

    Example:
      >>> config = PolicyConfig(8, 16, 32, 1, 2, 1, 8, max_length=4)
      >>> model, params = init(config, jax.random.key(0))
      >>> output = model.apply(params, jnp.array([[1, 2, 3]]))
      >>> model.logits(params, output.hidden).shape
      (1, 3, 8)
    """
    tokens, positions, segment_ids = self._inputs(tokens, positions, segment_ids, cache)
    start, fits = jnp.int32(0), jnp.bool_(True)
    if cache is not None:
      start = cache.length
      cache = attention.remembered(cache, positions, segment_ids)
      fits = cache.length <= cache.positions.shape[1]
    config = self.config
    wide = jnp.promote_types(config.compute_dtype, jnp.float32)
    turned = rope.rotation(config.rope, positions, config.head_dim, wide)
    mask = attention.attention_mask(positions, segment_ids, cache, window=config.sliding_window)
    decoder = nnx.merge(self.graphdef, params)
    hidden, cache = decoder(tokens, Context(turned, mask, start), cache)
    hidden = jnp.where(fits, hidden, jnp.nan)
    hidden = jnp.where((segment_ids > 0)[:, :, None], hidden, 0)
    return Output(hidden, cache, self._values(params, hidden))

  def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
    """Logits of the next token.

    Args:
      params: of the model. Differentiated.
      hidden: [..., D] from `apply`. Differentiated.

    Returns:
      [..., V] in the head dtype, accumulated in float32 at least.
    """
    return self._head(hidden, self.unembedding(params))

  def unembedding(self, params: Any) -> jax.Array:
    """The output head: logits = hidden @ unembedding.T.

    Args:
      params: of the model.

    Returns:
      [V, D] in the parameters' dtype; where tied, the embedding itself.
    """
    return params["embedding" if self.config.tied else "unembedding"]

  def init_cache(self, batch: int, length: int) -> Cache:
    """An empty cache.

    Args:
      batch: B rows.
      length: S slots: prompt and response, padding included.

    Returns:
      The cache; its memory is in the docstring of `Cache`.

    Raises:
      ValueError: batch or length is below 1.
      TypeError: one is not an integer.
    """
    batch = checks.check_whole("batch", batch, low=1, static=True)
    length = checks.check_whole("length", length, low=1, static=True)
    config = self.config

    def empty(*shape: int) -> Any:
      shape = (batch, config.num_kv_heads, *shape)
      if config.scan_layers:
        return jnp.zeros((config.num_layers, *shape), config.compute_dtype)
      return tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(config.num_layers))

    keys, values = empty(config.head_dim, length), empty(length, config.head_dim)
    positions, segment_ids = (jnp.zeros((batch, length), jnp.int32) for _ in range(2))
    return Cache(keys, values, positions, segment_ids, jnp.zeros((), jnp.int32))

  def _inputs(
    self, tokens: Any, positions: Any, segment_ids: Any, cache: Cache | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checked tokens (0 at padding), positions and segment ids."""
    tokens = checks.check_integer("tokens", tokens)
    if tokens.ndim != 2 or not tokens.size:
      raise ValueError(f"tokens must be [B, T] with B, T >= 1, got shape {tokens.shape}")
    if cache is not None:
      self._check_cache(cache, tokens)
    if segment_ids is None:
      if cache is None and positions is None and tokens.shape[1] > self.config.max_length:
        raise ValueError(
          f"tokens are longer than the context: {tokens.shape[1]} in a row, "
          f"max_length is {self.config.max_length}"
        )
      segment_ids = attention.default_segment_ids(tokens.shape, cache)
    segment_ids = checks.check_integer("segment_ids", segment_ids)
    checks.check_same_shape(tokens=tokens, segment_ids=segment_ids)
    if positions is None:
      positions = attention.default_positions(segment_ids, cache)
    positions = checks.check_integer("positions", positions)
    checks.check_same_shape(tokens=tokens, positions=positions)
    return jnp.where(segment_ids > 0, tokens, 0), positions, segment_ids

  def _check_cache(self, cache: Cache, tokens: jax.Array) -> None:
    """The cache is one of this model, for as many rows."""
    if cache.positions.shape[0] != tokens.shape[0]:
      raise ValueError(
        f"cache must have a row per row of tokens: it has {cache.positions.shape[0]}, tokens "
        f"have shape {tokens.shape}"
      )
    own = jax.eval_shape(lambda: self.init_cache(*cache.positions.shape))
    for name in ("keys", "values"):
      given, expected = (
        [(x.shape, x.dtype.name) for x in jax.tree.leaves(getattr(some, name))]
        for some in (cache, own)
      )
      if given != expected:
        raise ValueError(
          f"cache must be one of this model: its {name} are {len(given)} x {given[0]}, those of "
          f"the model {len(expected)} x {expected[0]}"
        )

  def _values(self, params: Any, hidden: jax.Array) -> jax.Array | None:
    if not self.config.scalar_head:
      return None
    return self._head(hidden, params["value_head"][None])[..., 0]

  def _head(self, hidden: jax.Array, weights: jax.Array) -> jax.Array:
    """[..., V] by weights [V, D]: one product of two matrices, for the reason in `layers`.

    Not where an Explicit mesh splits an axis between: no reshape keeps it where it is.
    """
    dtype = self.config.head_dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    split = any(jax.typeof(hidden).sharding.spec[1:-1])
    rows = hidden if split else hidden.reshape(-1, hidden.shape[-1])
    out = jnp.matmul(rows, weights.T, preferred_element_type=wide).astype(dtype)
    return out if split else out.reshape(*hidden.shape[:-1], len(weights))


def init(config: PolicyConfig, key: jax.Array) -> tuple[Model, Any]:
  """A policy with random parameters.

  Embeddings and projections are normal with standard deviation 0.02, norms 1, biases and the
  scalar head 0. Scanned layers get the numbers that unrolled ones get.

  Args:
    config: what it is made of.
    key: random key.

  Returns:
    The model, and its parameters: nested dicts of arrays. Where layers are scanned, those of
    "layers" are stacked, [L, ...].

  Example:
    >>> model, params = init(PolicyConfig(8, 16, 32, 2, 2, 1, 8, max_length=4), jax.random.key(0))
    >>> sorted(params), params["layers"][1]["mlp"]["up"]["kernel"].shape
    (['embedding', 'layers', 'norm', 'unembedding'], (16, 32))
  """
  graphdef, params = nnx.split(Decoder(config, nnx.Rngs(key)))
  return Model(config, graphdef), nnx.to_pure_dict(params)


def abstract_params(config: PolicyConfig) -> tuple[Model, Any]:
  """The model, and the shapes and dtypes of its parameters, without computing any.

  Args:
    config: what it is made of.

  Returns:
    What `init` returns, with a `jax.ShapeDtypeStruct` for every array.
  """
  graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
  return Model(config, graphdef), nnx.to_pure_dict(params)
