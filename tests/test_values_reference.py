"""jaxrl_lm.values against the reference, and what merges or must not lose its gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference_preferences as ref
from tests.ragged import PADDED, Checker, assert_close, normal

VALUES, OLD, RETURNS, COTANGENTS = normal(1), normal(2), normal(3), normal(4)

CASES: dict[str, tuple[Any, Any, Any, dict[str, float]]] = {
  "value_loss": (rl.value_loss, ref.value_loss, ref.value_loss_slope, {}),
  "clipped": (
    rl.clipped_value_loss,
    ref.clipped_value_loss,
    ref.clipped_value_loss_slope,
    {"clip": 0.2},
  ),
  "clipped, wide": (
    rl.clipped_value_loss,
    ref.clipped_value_loss,
    ref.clipped_value_loss_slope,
    {"clip": 1.5},
  ),
  "huber": (rl.huber_value_loss, ref.huber, ref.huber_slope, {"delta": 0.7}),
  "clipped huber": (
    rl.clipped_huber_value_loss,
    ref.clipped_huber,
    ref.clipped_huber_slope,
    {"clip": 0.4, "delta": 0.7},
  ),
}


def per_token(fn: Any, *rows: Any, **constants: float) -> list[list[float]]:
  return [[fn(*x, **constants) for x in zip(*row, strict=True)] for row in zip(*rows, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_critic(case: str) -> None:
  ours, value, slope, constants = CASES[case]
  inputs = {"values": VALUES, "old_values": OLD, "returns": RETURNS}
  if "clip" not in constants:
    del inputs["old_values"]
    check = Checker(lambda values, returns, mask: ours(values, returns, mask, **constants))
  else:
    check = Checker(
      lambda values, old_values, returns, mask: ours(values, old_values, returns, mask, **constants)
    )
  rows = inputs.values()
  pulled = per_token(lambda s, c: s * c, per_token(slope, *rows, **constants), COTANGENTS)
  expected = per_token(value, *rows, **constants)
  check.tokens(expected, {"values": pulled}, COTANGENTS, **inputs)


def test_value_clip_fraction() -> None:
  clipped = per_token(ref.clipped, VALUES, OLD, RETURNS, clip=0.2)
  share = np.mean([float(x) for row in clipped for x in row])
  assert 0.1 < share < 0.9
  check = Checker(
    lambda values, old_values, returns, mask: rl.value_clip_fraction(
      values, old_values, returns, mask, clip=0.2
    ).mean()
  )
  check.reduced(share, values=VALUES, old_values=OLD, returns=RETURNS)


def test_explained_variance() -> None:
  """A good critic, an arbitrary one, and the offset that changes nothing."""
  good = per_token(lambda v, r: 0.8 * r + 0.1 * v + 3.0, VALUES, RETURNS)
  good = [[float(np.float32(x)) for x in row] for row in good]
  check = Checker(
    lambda values, returns, mask: rl.explained_variance(values, returns, mask).fraction()
  )
  for values in (good, VALUES):
    flat = [[x for row in rows for x in row] for rows in (values, RETURNS)]
    check.reduced(ref.explained_variance(*flat), values=values, returns=RETURNS)
  assert ref.explained_variance(*[[x for r in rows for x in r] for rows in (good, RETURNS)]) > 0.9


def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
  values, returns = (jnp.asarray(PADDED.put(x, np.float32)) for x in (VALUES, RETURNS))
  return values, returns, jnp.asarray(PADDED.mask)


def test_parts_merge_to_the_whole() -> None:
  """Halves of unequal size, one part that is empty, and an all-reduce."""
  values, returns, mask = arrays()
  whole = rl.explained_variance(values, returns, mask)
  part = jax.jit(rl.explained_variance)
  parts = [part(v[None], r[None], m[None]) for v, r, m in zip(values, returns, mask)]
  empty = part(values[:1], returns[:1], jnp.zeros_like(mask[:1]))
  merged = empty + parts[0] + parts[1] + empty + parts[2]
  for got, want in zip(jax.tree.leaves(merged), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5)
  reduced = jax.vmap(
    lambda v, r, m: rl.explained_variance(v, r, m).all_reduce("data").fraction(), axis_name="data"
  )(values, returns, mask)
  np.testing.assert_allclose(reduced, [whole.fraction()] * 3, rtol=1e-5)
  assert empty.fraction() == 0


@pytest.mark.parametrize(
  ("returns", "values", "fraction"),
  [
    ([0.7] * 8, [0.0, 1.0] * 4, 0.0),  # no spread, though 0.7 is rounded: nothing to explain
    ([1000.01, 999.99] * 4, [1000.01, 999.99] * 4, 1.0),
    ([1000.0, 1001.0] * 4, [1.0, 2.0] * 4, 1.0),  # an offset
    ([0.0, 1.0] * 4, [0.0] * 8, 0.0),
    ([0.0, 1.0] * 4, [1.0, 0.0] * 4, -3.0),  # errors of -1 and 1: variance 1 of 1/4
    ([5.0], [3.0], 0.0),
  ],
)
def test_explained_variance_at_the_edges(
  returns: list[float], values: list[float], fraction: float
) -> None:
  r, v = (jnp.asarray(x, jnp.float32) for x in (returns, values))
  found = rl.explained_variance(v, r, jnp.ones(len(returns), bool))
  np.testing.assert_allclose(found.fraction(), fraction, atol=1e-4)
  assert (found + found).fraction() == pytest.approx(fraction, abs=1e-4)


def test_rounding_inside_the_band_does_not_cost_the_gradient() -> None:
  """old + (V - old) may differ from V in the last bit, and the clipped loss is then the larger."""
  rng = np.random.default_rng(0)
  old, moved, target = (jnp.asarray(rng.normal(size=4096), jnp.float32) for _ in range(3))
  values, on = old + 0.19 * jnp.tanh(moved), jnp.ones(4096, bool)
  gradient = jax.grad(lambda v: rl.clipped_value_loss(v, old, target, on).sum())(values)
  np.testing.assert_array_equal(gradient, values - target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_far_values(dtype: str) -> None:
  """Squares of 1e30 overflow to inf; no gradient does, and none is NaN."""
  with jax.enable_x64(dtype == "float64"):
    far = 1e4 if dtype == "float16" else 1e30
    grid = np.array([-far, -1e3, 0.0, 1e3, far])
    v, o, r = (jnp.asarray(x.ravel(), dtype) for x in np.meshgrid(grid, grid, grid))
    on = jnp.ones(v.shape, bool)

    @jax.jit
    def run(v: Any, o: Any, r: Any) -> Any:
      losses = {
        "plain": lambda v: rl.value_loss(v, r, on),
        "clipped": lambda v: rl.clipped_value_loss(v, o, r, on),
        "huber": lambda v: rl.huber_value_loss(v, r, on, delta=10.0),
        "clipped huber": lambda v: rl.clipped_huber_value_loss(v, o, r, on, delta=10.0),
      }
      return {name: (f(v), jax.grad(lambda x, f=f: f(x).sum())(v)) for name, f in losses.items()}

    for name, (loss, gradient) in run(v, o, r).items():
      assert not np.isnan(np.asarray(loss, np.float64)).any(), name
      assert np.isfinite(np.asarray(gradient, np.float64)).all(), name
      if "huber" in name:
        assert np.isfinite(np.asarray(loss, np.float64)).all()
        assert np.abs(np.asarray(gradient, np.float64)).max() <= 10


def test_nothing_counts() -> None:
  x, off = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool)
  assert not rl.value_loss(x, x, off).any()
  assert not rl.clipped_value_loss(x, x, x, off).any()
  assert rl.value_clip_fraction(x, x, x, off).mean() == 0
  assert_close(rl.explained_variance(x, x, off).fraction(), 0.0, "float32")
