"""Truncated distributions against their definition, by sorting, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm.lm import truncation

top_k, top_p, min_p = map(
  jax.jit, (truncation.keep_top_k, truncation.keep_top_p, truncation.keep_min_p)
)


def kept(truncated: jax.Array) -> list[list[int]]:
  return [np.flatnonzero(row > -np.inf).tolist() for row in np.atleast_2d(np.asarray(truncated))]


def in_order(row: np.ndarray) -> list[int]:
  """Ids by logit, the larger first, and equal ones by id."""
  return sorted(range(len(row)), key=lambda v: (-row[v], v))


def first_k(row: np.ndarray, k: int) -> list[int]:
  return sorted(v for v in in_order(row)[:k] if row[v] > -np.inf)


def nucleus(row: np.ndarray, p: float) -> list[int]:
  probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
  found, mass = [], 0.0
  for v in in_order(row):
    if found and mass >= p:
      break
    found.append(v)
    mass += probs[v]
  return sorted(found)


def near_the_best(row: np.ndarray, share: float) -> list[int]:
  # Of logits: exp(-1e-30) is 1 even in float64, and less likely than 1 all the same.
  least = row.max() + (np.log(share) if share else -np.inf)
  return np.flatnonzero((row >= least) & (row > -np.inf)).tolist()


@pytest.mark.parametrize(
  ("function", "definition", "values"),
  [
    (top_k, first_k, (1, 2, 7, 99, 100)),
    (top_p, nucleus, (0.0, 0.1, 0.5, 0.9, 0.999)),
    (min_p, near_the_best, (0.0, 1e-3, 0.05, 0.5, 1.0)),
  ],
)
def test_it_keeps_what_its_definition_keeps(
  function: Callable[..., Any], definition: Callable[..., Any], values: Any
) -> None:
  """Flat and peaked rows, huge and tiny logits, all negative, and with -inf in them."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(8, 100)) * [[0.1], [1], [1], [3], [10], [100], [1e-30], [2]]
  logits += np.array([0, 0, 50, -50, 0, 0, 0, 1e3])[:, None]
  logits[2, ::3] = -np.inf
  logits = logits.astype(np.float32)
  for value in values:
    got = np.asarray(function(logits, value))
    assert kept(got) == [definition(row, value) for row in logits.astype(np.float64)], value
    np.testing.assert_array_equal(np.where(got > -np.inf, got, logits), logits)


@pytest.mark.parametrize(
  ("truncated", "ids"),
  [
    (lambda z: top_k(z, 1), [0]),
    (lambda z: top_k(z, 2), [0, 1]),
    (lambda z: top_k(z, 3), [0, 1, 2]),
    (lambda z: top_k(z, 5), [0, 1, 2, 3, 4]),
    # e^3 : e^2 : e^2 : e^2 : e^1 is .4466, .1643 three times, .0604
    (lambda z: top_p(z, 0.44), [0]),
    (lambda z: top_p(z, 0.6), [0, 1]),
    (lambda z: top_p(z, 0.7), [0, 1, 2]),
    (lambda z: top_p(z, 0.9), [0, 1, 2, 3]),
    (lambda z: min_p(z, 0.3), [0, 1, 2, 3]),  # e^-1 = .37
  ],
)
def test_of_equal_logits_the_smaller_ids_stay(
  truncated: Callable[..., Any], ids: list[int]
) -> None:
  assert kept(truncated(jnp.array([3.0, 2.0, 2.0, 2.0, 1.0]))) == [ids]


def test_signed_zeros_are_equal() -> None:
  assert kept(top_k(jnp.array([-0.0, 0.0, -1.0]), 1)) == [[0]]


def test_it_applies_to_every_row_alone_and_any_leading_axes() -> None:
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)), jnp.bfloat16)
  for function, value in ((top_k, 3), (min_p, 0.2)):
    got = function(logits, value)
    assert got.dtype == jnp.float32
    for i, row in enumerate(logits.reshape(6, 8)):
      np.testing.assert_array_equal(got.reshape(6, 8)[i], function(row, value))


@pytest.mark.parametrize(
  ("function", "value", "message"),
  [
    (truncation.keep_top_k, 0, r"k must lie in \[1, 3\], got 0"),
    (truncation.keep_top_k, 4, r"k must lie in \[1, 3\], got 4"),
    (truncation.keep_top_p, 1.5, "p must lie in"),
    (truncation.keep_top_p, -0.5, "p must lie in"),
    (truncation.keep_min_p, 1.5, "min_p must lie in"),
  ],
)
def test_a_constant_outside_of_its_range(
  function: Callable[..., Any], value: float, message: str
) -> None:
  with pytest.raises(ValueError, match=message):
    function(jnp.zeros(3), value)
