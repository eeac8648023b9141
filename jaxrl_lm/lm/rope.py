"""Rotary position embedding: which angles, and how a head is turned by them.

A pair of coordinates i of a head is turned by the angle position * frequency_i,

  frequency_i = theta^(-2 i / D),  i = 0 .. D/2 - 1,

possibly rescaled for contexts longer than those of pretraining. Frequencies are computed in
float64 from the configuration, angles in float32 from the positions: no table limits the length.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import checks


def check_positive(name: str, value: Any) -> None:
  """A setting is a finite number above 0.

  Args:
    name: what to call it in an error.
    value: of the setting.

  Returns:
    None.

  Raises:
    TypeError: it is not a number.
    ValueError: it is outside of the range.
  """
  if isinstance(value, bool) or not isinstance(value, int | float | np.number):
    raise TypeError(f"{name} must be a number, got {value!r}")
  checks.check_range(name, value, low=0.0, high=math.inf, open_low=True, open_high=True)


def _check_fields(record: Any, *names: str) -> None:
  for name in names:
    check_positive(name, getattr(record, name))


@dataclasses.dataclass(frozen=True)
class LinearScaling:
  """Position interpolation: every frequency divided by the factor.

  Attributes:
    factor: how much longer the context is than in pretraining.

  Reference: Chen et al. 2023, arXiv:2306.15595.
  """

  factor: float

  def __post_init__(self) -> None:
    """Checks the range."""
    _check_fields(self, "factor")

  def frequencies(self, rope: Rope, head_dim: int) -> np.ndarray:
    """Rescaled frequencies.

    Args:
      rope: whose theta counts.
      head_dim: D.

    Returns:
      [D/2] radians per position.
    """
    return _plain(rope, head_dim) / self.factor

  @property
  def magnitude(self) -> float:
    """Factor on cosine and sine."""
    return 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp in between.

  Attributes:
    factor: divisor of the low frequencies.
    low_freq_factor, high_freq_factor: the ramp runs over the wavelengths
      original_length / low_freq_factor .. original_length / high_freq_factor.
    original_length: context of pretraining, tokens.

  Reference: the `rope_type` "llama3" of Llama 3.1's configuration.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_length: int

  def __post_init__(self) -> None:
    """Checks the ranges."""
    _check_fields(self, "factor", "low_freq_factor", "high_freq_factor", "original_length")
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f"low_freq_factor must be below high_freq_factor, got {self.low_freq_factor} and "
        f"{self.high_freq_factor}"
      )

  def frequencies(self, rope: Rope, head_dim: int) -> np.ndarray:
    """Rescaled frequencies.

    Args:
      rope: whose theta counts.
      head_dim: D.

    Returns:
      [D/2] radians per position.
    """
    plain = _plain(rope, head_dim)
    turns = self.original_length * plain / (2 * math.pi)  # within the context of pretraining
    kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / self.factor

  @property
  def magnitude(self) -> float:
    """Factor on cosine and sine."""
    return 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
  """YaRN: a ramp over the pairs of a head, and attention made sharper.

  Attributes:
    factor: divisor of the low frequencies.
    original_length: context of pretraining, tokens.
    beta_fast, beta_slow: turns within original_length above which a frequency is kept, and
      below which it is divided.
    magnitude: factor on cosine and sine; `yarn_magnitude(factor)` is the paper's.
    truncate: round the ends of the ramp outwards to whole pairs.

  Reference: Peng et al. 2023, arXiv:2309.00071, section 3.2 and eq. 22.
  """

  factor: float
  original_length: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  magnitude: float = 1.0
  truncate: bool = True

  def __post_init__(self) -> None:
    """Checks the ranges."""
    _check_fields(self, "factor", "original_length", "beta_fast", "beta_slow", "magnitude")
    if self.beta_fast < self.beta_slow:
      raise ValueError(
        f"beta_fast must not be below beta_slow, got {self.beta_fast} and {self.beta_slow}"
      )

  def frequencies(self, rope: Rope, head_dim: int) -> np.ndarray:
    """Rescaled frequencies.

    Args:
      rope: whose theta counts.
      head_dim: D.

    Returns:
      [D/2] radians per position.
    """
    plain = _plain(rope, head_dim)
    low, high = (
      head_dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
      for turns in (self.beta_fast, self.beta_slow)
    )
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    divided = (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
    divided = np.clip(divided, 0.0, 1.0)
    return divided * plain / self.factor + (1 - divided) * plain


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
  r"""0.1 scale log(factor) + 1, the factor that sharpens attention over a longer context.

  Args:
    factor: how much longer the context is.
    scale: weight of the logarithm.

  Returns:
    The factor on cosine and sine.

  Reference: Peng et al. 2023, arXiv:2309.00071, eq. 22.
  """
  return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary embedding of a policy.

  Attributes:
    theta: base of the frequencies.
    scaling: for contexts longer than in pretraining; None = as they are.
    interleaved: True turns the coordinate pairs (2 i, 2 i + 1) (llama2.c, the original Llama
      release), False (i, i + D/2) (Hugging Face). The two differ by a permutation of a head.
  """

  theta: float = 10_000.0
  scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
  interleaved: bool = False

  def __post_init__(self) -> None:
    """Checks the range."""
    check_positive("theta", self.theta)
    if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
      raise ValueError(f"theta must be above 1 with YarnScaling, got {self.theta}")


def _plain(rope: Rope, head_dim: int) -> np.ndarray:
  return rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


class Rotation(NamedTuple):
  """How far each token's heads are turned.

  Attributes:
    cos, sin: [B, T, 1, D/2], float32 at least; axis 2 is for the heads.
  """

  cos: jax.Array
  sin: jax.Array


def rotation(rope: Rope, positions: jax.Array, head_dim: int, dtype: jnp.dtype) -> Rotation:
  """Cosine and sine of every token's angles.

  Args:
    rope: base and scaling.
    positions: [B, T] int.
    head_dim: D, even.
    dtype: of the result.

  Returns:
    The rotation, [B, T, 1, D/2].

  Reference: Su et al. 2021 (RoPE), arXiv:2104.09864, eq. 34.
  """
  scaling = rope.scaling
  frequencies = scaling.frequencies(rope, head_dim) if scaling else _plain(rope, head_dim)
  magnitude = scaling.magnitude if scaling else 1.0
  angles = positions.astype(dtype)[:, :, None, None] * jnp.asarray(frequencies, dtype).reshape(
    1, 1, 1, -1
  )
  return Rotation(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)


def rotate(x: jax.Array, by: Rotation, *, interleaved: bool) -> jax.Array:
  """Turns every head of every token.

  Args:
    x: [B, T, H, D]. Differentiated.
    by: the rotation of the B x T tokens.
    interleaved: which coordinates make a pair, see `Rope`.

  Returns:
    [B, T, H, D] in the dtype of x; turned in the rotation's.
  """
  pairs = x.astype(by.cos.dtype).reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
  axis = -1 if interleaved else -2
  first, second = (jax.lax.index_in_dim(pairs, i, axis, keepdims=False) for i in (0, 1))
  turned = (first * by.cos - second * by.sin, first * by.sin + second * by.cos)
  return jnp.stack(turned, axis=axis).reshape(x.shape).astype(x.dtype)
