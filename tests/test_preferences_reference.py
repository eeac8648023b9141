"""Preference losses against the reference: values and hand-written gradients, both precisions.

All cases are compiled as one program per precision.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference_preferences as ref
from tests.preference_tables import LABELLED, PAIRED
from tests.ragged import (
  GARBAGE,
  LENGTHS,
  PADDED,
  Checker,
  assert_close,
  f32,
  logits_rows,
  normal,
  policies,
)

DTYPES = ("float64", "float32")
COUNT = 24


def numbers(seed: int, scale: float = 1.0) -> list[float]:
  return f32(list(scale * np.random.default_rng(seed).normal(size=COUNT)))


CHOSEN, REJECTED = numbers(1, 3.0), numbers(2, 3.0)
CHOSEN[:4], REJECTED[:4] = [0.0, 2.0, -1.5, 0.0], [0.0, 2.0, -1.5, 4.0]  # ties, nothing learnt
COTANGENTS = numbers(3)
LABELS = [x > 0 for x in numbers(4)]
MARGIN = [abs(x) for x in numbers(5)]
NEGATIVE = tuple([-abs(x) - 2**-10 for x in xs] for xs in (CHOSEN, REJECTED))
WEIGHTS = (1.5, 0.8)

DEFAULTS: dict[str, dict[str, float]] = {
  name: {"beta": 0.1} for name, (_, constants) in PAIRED.items() if "beta" in constants
}
DEFAULTS |= {
  "conservative_dpo_loss": {"beta": 0.1, "label_smoothing": 0.0},
  "robust_dpo_loss": {"beta": 0.1, "label_smoothing": 0.25},
  "exo_loss": {"beta": 0.1, "label_smoothing": 1e-3},
  "discopop_loss": {"beta": 0.1, "tau": 0.05},
  "bco_pair_loss": {"beta": 0.1, "delta": 0.0},
  "simpo_loss": {"beta": 2.0, "gamma": 0.5},
}
# What the function does not have by itself and must be told.
REQUIRED = {"label_smoothing": ("conservative_dpo_loss", "robust_dpo_loss")}


def truth_of(name: str, constants: dict[str, float], pair: Any) -> tuple[Any, Any]:
  """Values, and the gradients of the sum of cotangent times loss."""
  name = name.replace("cpo_loss", "dpo_loss")
  value, slope = getattr(ref, name), getattr(ref, f"{name}_slope")
  rows = list(zip(*pair, strict=True))
  slopes = [slope(*row, **constants) for row in rows]
  pulled = [[c * s[i] for c, s in zip(COTANGENTS, slopes)] for i in (0, 1)]
  return [value(*row, **constants) for row in rows], pulled


def cases() -> dict[str, tuple[Any, Any, Any, Any]]:
  """{title: (function, arguments, values, gradients)}."""
  found: dict[str, tuple[Any, Any, Any, Any]] = {}
  for name, (names, constants) in PAIRED.items():
    pair = NEGATIVE if "logprob" in names[0] else (CHOSEN, REJECTED)
    variants = {name: constants, f"{name}, defaults": DEFAULTS.get(name, constants)}
    for title, numbers in variants.items():
      given = numbers
      if "defaults" in title:
        given = {k: x for k, x in numbers.items() if name in REQUIRED.get(k, ())}
      function = partial(getattr(rl, name), **given)
      found[title] = (function, pair, *truth_of(name, numbers, pair))

  triple = (CHOSEN, REJECTED, MARGIN)
  function = lambda c, r, m: rl.bradley_terry_loss(c, r, margin=m)
  values, pulled = truth_of("bradley_terry_loss", {}, triple)
  found["bradley_terry_loss, margin"] = function, triple, values, [*pulled, [0.0] * COUNT]

  for name, constants in LABELLED.items():
    rest = {k: x for k, x in constants.items() if "weight" not in k} | {"weights": WEIGHTS}
    rows = list(zip(CHOSEN, LABELS))
    values = [getattr(ref, name)(*row, **rest) for row in rows]
    slopes = [getattr(ref, f"{name}_slope")(*row, **rest) for row in rows]
    function = partial(labelled, name, constants)
    found[name] = function, (CHOSEN,), values, [[c * s for c, s in zip(COTANGENTS, slopes)]]

  for smoothing in (0.0, 0.1):
    constants = {"beta": 0.7, "label_smoothing": smoothing}
    values = ref.aot_unpaired_loss(CHOSEN, REJECTED, **constants)
    pulled = ref.aot_unpaired_loss_vjp(CHOSEN, REJECTED, **constants, cotangents=COTANGENTS)
    for name in ("aot_loss", "aot_unpaired_loss"):
      gradients = [pulled[0], [0.0] * COUNT] if name == "aot_loss" else list(pulled)
      function = partial(getattr(rl, name), **constants)
      found[f"{name}, {smoothing}"] = function, (CHOSEN, REJECTED), values, gradients

  scores = {f"alpha {a}": ("alpha_divergence_score", {"alpha": a}) for a in (0.0, 0.5, 1.0, -1.0)}
  scores["jensen_shannon"] = ("jensen_shannon_score", {})
  for title, (name, constants) in scores.items():
    values = [getattr(ref, name)(u, **constants) for u in CHOSEN]
    slopes = [getattr(ref, f"{name}_slope")(u, **constants) for u in CHOSEN]
    function = partial(getattr(rl, name), **constants)
    found[title] = function, (CHOSEN,), values, [[c * s for c, s in zip(COTANGENTS, slopes)]]
  return found


def labelled(name: str, constants: dict[str, float], log_ratio: jax.Array) -> jax.Array:
  return getattr(rl, name)(log_ratio, jnp.asarray(LABELS), **constants)


CASES = cases()


@cache
def results(dtype: str) -> dict[str, Any]:
  @jax.jit
  def run(arguments: Any, cotangents: Any) -> Any:
    out = {}
    for title, (function, *_) in CASES.items():
      value, pull = jax.vjp(function, *arguments[title])
      out[title] = value, pull(cotangents)
    return out

  with jax.enable_x64(dtype == "float64"):
    arguments = {
      title: [np.asarray(x, dtype) for x in given] for title, (_, given, *_) in CASES.items()
    }
    return jax.device_get(run(arguments, np.asarray(COTANGENTS, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("title", CASES)
def test_loss(title: str, dtype: str) -> None:
  value, gradients = results(dtype)[title]
  _, _, values, pulled = CASES[title]
  assert value.dtype == np.dtype(dtype)
  assert value.shape == (COUNT,)
  assert_close(value, values, dtype)
  for got, want in zip(gradients, pulled, strict=True):
    if any(want):
      assert_close(got, want, dtype, "gradient")
    else:
      assert not got.any(), "a constant"


# ----------------------------------------------------------------------------- from tokens


@pytest.mark.parametrize("name", ["sequence_log_ratio", "mean_log_ratio"])
def test_log_ratio(name: str) -> None:
  """An empty row is 0 and has no gradient; the reference has none."""
  new, old = policies(7, 0.7)
  expected = [getattr(ref, name)(x, y) for x, y in zip(new, old)]
  rows = np.asarray(COTANGENTS[: len(LENGTHS)]).reshape(PADDED.shape[:-1])
  length = [max(n, 1) if name == "mean_log_ratio" else 1 for n in LENGTHS]
  pulled = [[c / n] * k for c, n, k in zip(rows.ravel(), length, LENGTHS)]

  function = getattr(rl, name)
  Checker(lambda new, old, mask: function(new, old, mask)).reduced(expected, new=new, old=old)
  weighted = Checker(lambda new, old, rows, mask: jnp.sum(rows * function(new, old, mask)))
  for dtype in weighted.dtypes:
    with jax.enable_x64(dtype == "float64"):
      arrays = {"new": PADDED.put(new, dtype), "old": PADDED.put(old, dtype)}
      others = {"rows": rows.astype(dtype)}
      one = np.ones((), dtype)
      _, gradients = weighted.value_and_pullback(arrays, others, weighted.static, one)
      assert not np.any(gradients["old"]), "the reference is a constant"
      weighted._check_tokens(gradients["new"], pulled, dtype, "gradient")


def test_length_desensitized_weights() -> None:
  shared = [n // 2 + i % 3 for i, n in enumerate(LENGTHS)]
  array = np.asarray(shared, np.int32).reshape(PADDED.shape[:-1])
  expected = [ref.length_desensitized_weights(n, k, 0.3) for n, k in zip(LENGTHS, shared)]
  got = rl.length_desensitized_weights(jnp.asarray(PADDED.mask), array, alpha=0.3)
  assert_close(PADDED.take(np.asarray(got)), expected, "float32")
  assert not np.asarray(got)[~PADDED.mask].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_collision_probability(temperature: float) -> None:
  z, cotangents = logits_rows(8), normal(9)
  expected = [[ref.log_collision_probability(v, temperature) for v in row] for row in z]
  slopes = [[ref.log_collision_probability_slope(v, temperature) for v in row] for row in z]
  pulled = [
    [[c * s for s in v] for c, v in zip(cs, vs)] for cs, vs in zip(cotangents, slopes, strict=True)
  ]
  function = partial(rl.log_collision_probability, temperature=temperature)
  check = Checker(lambda z, mask: function(z, mask=mask))
  check.tokens(expected, {"z": pulled}, cotangents, z=z)


def test_wpo_weights() -> None:
  """1 for the policy's own samples of a uniform distribution, and for an empty response."""
  new, collision = policies(10, 0.5)
  expected = [ref.wpo_weights(x, y) for x, y in zip(new, collision)]
  check = Checker(lambda new, collision, mask: rl.wpo_weights(new, collision, mask))
  check.reduced(expected, new=new, collision=collision)
  uniform = jnp.zeros((1, 3, 4))
  logprobs, on = jnp.full((1, 3), -jnp.log(4.0)), jnp.ones((1, 3), bool)
  np.testing.assert_allclose(
    rl.wpo_weights(logprobs, rl.log_collision_probability(uniform), on), [1.0], rtol=1e-6
  )


# ------------------------------------------------------------------------------- statistics


def test_kto_baseline() -> None:
  for xs in (CHOSEN, [-abs(x) for x in CHOSEN]):
    assert_close(rl.kto_baseline(jnp.asarray(xs)), ref.kto_baseline(xs), "float32")
  where = jnp.asarray(LABELS)
  kept = [x for x, yes in zip(MARGIN, LABELS) if yes]
  dirty = jnp.where(where, jnp.asarray(MARGIN), jnp.resize(jnp.asarray(GARBAGE), COUNT))
  assert_close(rl.kto_baseline(dirty, where=where), ref.kto_baseline(kept), "float32")
  assert rl.kto_baseline(dirty, where=jnp.zeros(COUNT, bool)) == 0


def test_preference_statistics() -> None:
  found = rl.preference_statistics(
    jnp.asarray(CHOSEN), jnp.asarray(REJECTED), where=jnp.asarray(LABELS)
  )
  kept = [(c, r) for c, r, yes in zip(CHOSEN, REJECTED, LABELS) if yes]
  want = {
    "accuracy": np.mean([c > r for c, r in kept]),
    "margin": np.mean([c - r for c, r in kept]),
    "chosen": np.mean([c for c, _ in kept]),
    "rejected": np.mean([r for _, r in kept]),
  }
  assert found.keys() == want.keys()
  for name, average in found.items():
    assert_close(average.mean(), want[name], "float32", name)
    assert average.count == len(kept)
