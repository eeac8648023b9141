"""From the ragged rows of `reference.py` to padded or packed arrays, and back.

A layout says where every token of every row lies in an array. All positions that no token
occupies are masked, and hold garbage: a function that reads one of them returns nonsense.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# A row of one token, full rows, an empty row; of the others, two in three have interior gaps.
LENGTHS = (1, 9, 0, 5, 9, 4, 7, 2, 3, 6, 9, 1)
GROUPS = (3, 4)
WIDTH = 9
VOCABULARY = 6

# Normwise: max |a - b| <= tolerance max |b|.
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}
GARBAGE = (np.nan, 1e30, -np.inf, np.inf, -1e30)


class Layout:
  """places[i] = (index of the leading axes, positions) of row i."""

  def __init__(self, shape, places, segment_ids=None):
    self.shape, self.places, self.segment_ids = shape, places, segment_ids
    self.mask = np.zeros(shape, bool)
    for index, positions in places:
      self.mask[index][positions] = True

  def put(self, rows: list, dtype: Any) -> np.ndarray:
    """Rows of numbers, or of vectors, in an array with garbage everywhere else."""
    event = next(np.shape(x) for row in rows for x in row)
    dtype = np.dtype(dtype)
    fillers = {"f": GARBAGE, "i": (-100, 2**31 - 1), "b": (True, False)}[dtype.kind]
    count = int(np.prod(self.shape + event))
    array = np.resize(np.array(fillers, dtype), count).reshape(self.shape + event)
    for row, (index, positions) in zip(rows, self.places, strict=True):
      if len(row):
        array[index][positions] = np.asarray(row, dtype)
    return array

  def take(self, array: np.ndarray) -> np.ndarray:
    """The tokens of all rows, one after the other."""
    return np.concatenate([array[index][positions] for index, positions in self.places])


def padded() -> Layout:
  """One row of the array for each row, [3, 4, 9]."""
  rng, places = np.random.default_rng(7), []
  for i, n in enumerate(LENGTHS):
    gaps = i % 3 > 0
    positions = sorted(rng.choice(WIDTH, n, replace=False).tolist()) if gaps else list(range(n))
    places.append((np.unravel_index(i, GROUPS), positions))
  return Layout((*GROUPS, WIDTH), places)


def packed(width: int = 16) -> Layout:
  """Several rows of unequal length in one, each a segment with a gap inside; then padding."""
  places, start, row, segments = [], 0, 0, {}
  for i, n in enumerate(LENGTHS):
    span = n + (n > 2)
    if start + span > width:
      start, row = 0, row + 1
    positions = [start + t + (t > 1) for t in range(n)]
    segments.setdefault(row, []).append((start, span, 1 + 5 * (i + 1) % 13))
    places.append(((row,), positions))
    start += span
  segment_ids = np.zeros((row + 1, width), np.int32)
  for r, spans in segments.items():
    for begin, span, name in spans:
      segment_ids[r, begin : begin + span] = name
  return Layout((row + 1, width), places, segment_ids)


PADDED, PACKED = padded(), packed()


def f32(rows: Any) -> Any:
  """Numbers that float32 holds exactly, so that both precisions see the same."""
  if isinstance(rows, list):
    return [f32(x) for x in rows]
  return float(np.float32(rows))


def split(values: Any) -> list[list[float]]:
  """One value per token -> rows."""
  ends = np.cumsum(LENGTHS)
  return [f32(list(values[end - n : end])) for n, end in zip(LENGTHS, ends, strict=True)]


def normal(seed: int, scale: float = 1.0) -> list[list[float]]:
  return split(scale * np.random.default_rng(seed).normal(size=sum(LENGTHS)))


def uniform(seed: int, low: float, high: float) -> list[list[float]]:
  return split(np.random.default_rng(seed).uniform(low, high, size=sum(LENGTHS)))


def per_row(values: Any) -> list[list[float]]:
  """One value per row, repeated for its tokens."""
  return [[float(np.float32(x))] * n for x, n in zip(values, LENGTHS, strict=True)]


def logits_rows(seed: int, scale: float = 2.0) -> list[list[list[float]]]:
  values = scale * np.random.default_rng(seed).normal(size=(sum(LENGTHS), VOCABULARY))
  return split([list(v) for v in values])


def token_rows(seed: int) -> list[list[int]]:
  tokens = np.random.default_rng(seed).integers(VOCABULARY, size=sum(LENGTHS))
  return [[int(y) for y in row] for row in split(tokens)]


def policies(seed: int, scale: float) -> tuple[list, list]:
  """Log-probs of a policy and of an older one: a log-ratio of standard deviation `scale`."""
  rng = np.random.default_rng(seed)
  old = -rng.uniform(0.05, 3.0, size=sum(LENGTHS))
  new = np.minimum(old + scale * rng.normal(size=sum(LENGTHS)), -0.01)
  return split(new), split(old)


def flatten(expected: Any) -> np.ndarray:
  """Ragged rows, their vectors, or numbers, as one array of the numbers in order."""
  if isinstance(expected, list | tuple):
    parts = [flatten(x) for x in expected]
    return np.concatenate(parts) if parts else np.zeros(0)
  return np.ravel(np.asarray(expected, np.float64))


def assert_close(actual: Any, expected: Any, dtype: str, what: str = "value") -> None:
  actual, expected = np.ravel(np.asarray(actual, np.float64)), flatten(expected)
  assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
  if not expected.size:
    return
  error, size = np.max(np.abs(actual - expected)), np.max(np.abs(expected))
  where = int(np.argmax(np.abs(actual - expected)))
  assert error <= TOLERANCE[dtype] * size, (
    f"{what}, {dtype}: error {error:.3g} at {where}, "
    f"got {actual[where]:.12g}, expected {expected[where]:.12g}, largest {size:.3g}"
  )


class Checker:
  """Compares a function with the reference, in both precisions, compiled once for each.

  fn(mask=, segment_ids=, **inputs) takes arrays; `mask` and `segment_ids` only where its signature
  has them. Every floating input is differentiated: where no gradient is expected it must be
  exactly 0, as it must be at masked positions.
  """

  def __init__(self, fn: Callable, layout: Layout = PADDED, dtypes=tuple(TOLERANCE)):
    self.layout, self.dtypes = layout, dtypes
    names = inspect.signature(fn).parameters
    self.static = {"mask": layout.mask, "segment_ids": layout.segment_ids}
    self.static = {k: v for k, v in self.static.items() if k in names and v is not None}

    @jax.jit
    def value_and_pullback(floats, others, static, cotangent):
      value, pull = jax.vjp(lambda x: fn(**x, **others, **static), floats)
      return value, pull(cotangent)[0]

    self.value = jax.jit(lambda inputs, static: fn(**inputs, **static))
    self.value_and_pullback = value_and_pullback

  def _arrays(self, inputs, dtype):
    """Rows are laid out; what is an array already (per sequence, a key) is passed as it is."""
    arrays = {}
    for name, x in inputs.items():
      if isinstance(x, list):
        first = np.ravel(next(row[0] for row in x if row))[0].item()
        kinds = {bool: bool, int: np.int32, float: dtype}
        arrays[name] = self.layout.put(x, kinds[type(first)])
      else:
        arrays[name] = x.astype(dtype) if getattr(x, "dtype", None) == np.float64 else x
    return arrays

  def _check_tokens(self, array, expected, dtype, what):
    array = np.asarray(array)
    assert_close(self.layout.take(array), expected, dtype, what)
    assert not np.any(array[~self.layout.mask]), f"{what}: not 0 at a masked position"

  def values(self, expected, **inputs) -> None:
    """A per-token output that need not be differentiable."""
    for dtype in self.dtypes:
      with jax.enable_x64(dtype == "float64"):
        value = self.value(self._arrays(inputs, dtype), self.static)
        assert value.dtype in (np.dtype(dtype), np.bool_, np.int32)
        self._check_tokens(value, expected, dtype, "value")

  def reduced(self, expected, **inputs) -> None:
    """An output with fewer axes, or a structure of them: compared leaf by leaf."""
    for dtype in self.dtypes:
      with jax.enable_x64(dtype == "float64"):
        value = self.value(self._arrays(inputs, dtype), self.static)
        leaves = jax.tree.leaves(value)
        truth = expected if isinstance(expected, tuple) else (expected,)
        for leaf, true in zip(leaves, truth, strict=True):
          assert_close(leaf, true, dtype)

  def tokens(self, expected, gradients=None, cotangents=None, **inputs) -> None:
    """A per-token output and the pullback of `cotangents` to every input."""
    self._differentiate(expected, gradients or {}, cotangents, inputs)

  def scalar(self, expected, gradients=None, **inputs) -> None:
    """A scalar output and its gradients."""
    self._differentiate(expected, gradients or {}, None, inputs, scalar=True)

  def _differentiate(self, expected, gradients, cotangents, inputs, scalar=False):
    for dtype in self.dtypes:
      with jax.enable_x64(dtype == "float64"):
        arrays = self._arrays(inputs, dtype)
        floats = {k: x for k, x in arrays.items() if np.issubdtype(x.dtype, np.floating)}
        others = {k: x for k, x in arrays.items() if k not in floats}
        if scalar:
          cotangent = np.ones((), dtype)
        elif cotangents is None:
          cotangent = np.ones(self.layout.shape, dtype)
        else:
          cotangent = self.layout.put(cotangents, dtype)
          cotangent = np.where(self.layout.mask, cotangent, np.asarray(3.0, dtype))
        value, pulled = self.value_and_pullback(floats, others, self.static, cotangent)
        assert value.dtype == np.dtype(dtype)
        if scalar:
          assert_close(value, expected, dtype)
        else:
          self._check_tokens(value, expected, dtype, "value")
        for name, gradient in pulled.items():
          if name in gradients:
            self._check_tokens(gradient, gradients[name], dtype, f"gradient of {name}")
          else:
            assert not np.any(np.asarray(gradient)), f"{name} is a constant"
