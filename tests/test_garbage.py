"""What stands at a masked position changes no bit of any value or gradient.

Every public function with a mask, every argument, compiled once and run with zeros and with each
kind of garbage at the positions that do not count: single tokens, interior gaps, whole rows, and
everything. The gradient there is exactly 0.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import linear_tables
from tests.calls import (
  FUNCTIONS,
  VOCABULARY,
  Call,
  assert_complete,
  public_calls,
  value_and_pullback,
)

# Of each kind, in the same order; `mixed` puts all of them next to each other.
FLOATS = (np.nan, np.inf, -np.inf, 1e30, -1e30)
INTEGERS = (-1, -100, VOCABULARY, 2**31 - 1, -(2**31))
BOOLEANS = (True, False)
GARBAGE = [*range(len(FLOATS)), "mixed"]
MASKS = ("mask", "where", "within")

CALLS = [call for call in public_calls() if call.unused]
# Nothing but a mask goes in, so there is no place for garbage.
ONLY_A_MASK = [call for call in public_calls() if set(call.arrays) == {"mask"}]


def garbage_of(dtype: Any, which: Any, shape: tuple[int, ...]) -> np.ndarray:
  kinds = {"f": FLOATS, "i": INTEGERS, "b": BOOLEANS}[np.dtype(dtype).kind]
  if which == "mixed":
    return np.resize(np.array(kinds, dtype), shape)
  return np.full(shape, kinds[which % len(kinds)], dtype)


def filled(call: Call, which: Any, everywhere: bool = False) -> dict[str, np.ndarray]:
  """The arrays of a call with garbage, or zeros if `which` is None, wherever nothing counts."""
  arrays = dict(call.arrays)
  for name, unused in call.unused.items():
    x = arrays[name]
    dirt = np.zeros_like(x) if which is None else garbage_of(x.dtype, which, x.shape)
    unused = np.ones_like(unused) if everywhere else unused
    arrays[name] = np.where(unused.reshape(unused.shape + (1,) * (x.ndim - unused.ndim)), dirt, x)
  if everywhere:
    arrays |= {name: np.zeros_like(arrays[name]) for name in MASKS if name in arrays}
  return arrays


def assert_same_bits(got: Any, want: Any) -> None:
  got, want = jax.device_get((got, want))
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes(), f"{a}\n{b}"


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.title)
def test_garbage(call: Call) -> None:
  run = jax.jit(value_and_pullback(call))
  for everywhere in (False, True):
    want = run(filled(call, None, everywhere))
    values, gradients = jax.device_get(want)
    assert not any(np.isnan(x).any() for x in values if x.dtype.kind == "f")
    for name, gradient in gradients.items():
      unused = call.unused.get(name)
      if unused is not None:
        assert not gradient[unused | everywhere].any(), name
    for which in GARBAGE:
      assert_same_bits(run(filled(call, which, everywhere)), want)


def test_every_function_with_a_mask_has_a_case() -> None:
  needed = [
    name for name in FUNCTIONS if set(MASKS) & set(inspect.signature(getattr(rl, name)).parameters)
  ]
  assert_complete([call.name for call in CALLS] + [call.name for call in ONLY_A_MASK], needed)
  # In each case every array counts somewhere and garbage is put somewhere, but for the masks.
  for call in CALLS:
    free = set(call.arrays) - set(call.unused) - set(MASKS)
    # Of multi_reward_normalized, [K]; of a model.
    assert free <= {"weights", *linear_tables.HEADS}, (call.title, free)
    for name, unused in call.unused.items():
      assert unused.any(), (call.title, name)
      assert not unused.all(), (call.title, name)


def test_functions_of_a_mask_alone_take_no_other_array() -> None:
  for call in ONLY_A_MASK:
    names = set(inspect.signature(call.function).parameters)
    numbers = {"length", "alpha", "count_empty", "segment_ids", "mask"}
    assert names <= numbers, (call.title, names)


@pytest.mark.parametrize(
  "statistic", [rl.Average, rl.EffectiveSampleSize, rl.Extremes], ids=lambda x: x.__name__
)
def test_statistics(statistic: Any) -> None:
  call = next(call for call in CALLS if call.title == "average")
  run = jax.jit(statistic.of)
  want = run(*filled(call, None).values())
  for which in GARBAGE:
    assert_same_bits(run(*filled(call, which).values()), want)
