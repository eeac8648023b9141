"""What a policy is made of: one frozen, hashable record."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks
from jaxrl_lm.lm.rope import Rope, check_positive

_SIZES = (
  *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
  *("num_heads", "num_kv_heads", "head_dim", "max_length"),
)
_FLAGS = ("tied", "qkv_bias", "output_bias", "qk_norm", "scalar_head", "remat", "scan_layers")


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

  Llama 2 and 3, Qwen2, Qwen2.5, Qwen3, Mistral, SmolLM and llama2.c models are settings of it
  (`jaxrl_lm.lm.pretrained` reads them from a checkpoint).

  Attributes:
    vocab_size, hidden_size, intermediate_size, num_layers: V, D, width of the MLP, L.
    num_heads, num_kv_heads, head_dim: query heads, key/value heads that they share, and the
      coordinates of each. num_heads x head_dim need not be hidden_size.
    max_length: context: most tokens in a sequence.
    rope: rotary embedding.
    norm_eps: added to the mean square.
    tied: the output head is the embedding: one array.
    qkv_bias, output_bias: attention projections with a bias (Qwen2: the first only).
    qk_norm: RMSNorm of every query and key head (Qwen3).
    sliding_window: a token sees itself and the window - 1 positions before it; None = all.
    scalar_head: a value per token too, for critics and reward models.
    param_dtype: of the parameters.
    compute_dtype: of activations and the cache. Norms, angles, scores and softmax are in
      float32 at least.
    head_dtype: of logits and values, accumulated in float32 at least.
    remat: recompute a layer's activations in the backward pass instead of keeping them.
    scan_layers: one compiled layer, looped over stacked parameters [L, ...]: compiles faster;
      on CPU it runs slower than unrolled.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_length: int
  rope: Rope = Rope()
  norm_eps: float = 1e-5
  tied: bool = False
  qkv_bias: bool = False
  output_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  scalar_head: bool = False
  param_dtype: Any = jnp.float32
  compute_dtype: Any = jnp.float32
  head_dtype: Any = jnp.float32
  remat: bool = False
  scan_layers: bool = False

  def __post_init__(self) -> None:
    """Checks sizes, and brings every spelling of a dtype to one that compares equal."""
    for name in ("param_dtype", "compute_dtype", "head_dtype"):
      dtype = jnp.dtype(getattr(self, name))
      if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating dtype, got {dtype}")
      object.__setattr__(self, name, dtype)
    for name in _SIZES:
      checks.check_whole(name, getattr(self, name), low=1, high=2**31 - 1, static=True)
    for name in _FLAGS:
      if not isinstance(getattr(self, name), bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
    if not isinstance(self.rope, Rope):
      raise TypeError(f"rope must be a Rope, got {self.rope!r}")
    check_positive("norm_eps", self.norm_eps)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
        f"{self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim must be even for rotary pairs, got {self.head_dim}")
    if self.sliding_window is not None:
      checks.check_whole("sliding_window", self.sliding_window, low=1, static=True)
