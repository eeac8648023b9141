"""Extreme numbers: log-ratios up to 1e30, sequences of 10^5 tokens, low precision.

Never NaN, in value or gradient; finite wherever the mathematics is bounded. Which side is
bounded is written down here from the formulas, not read off the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests.calls import Call, named, public_calls

SIZES = (0.0, 88.0, 89.0, 1e3, 1e30)  # exp overflows float32 from 88.73 on
LOG_RATIOS = (*SIZES, *(-x for x in SIZES))
DTYPES = ("float32", "bfloat16", "float64")
SLOW = pytest.mark.slow

# One row of one token for each log-ratio and each advantage.
GRID = np.array([(x, a) for x in LOG_RATIOS for a in (-1.0, 0.0, 1.0)])
X, A = GRID.T
# An old log-prob that makes both probabilities possible: log p = min(x, 0) - 0.5.
OLD = np.minimum(-X, 0.0) - 0.5

ALWAYS = np.ones(len(GRID), bool)
SMALL_RATIO = X <= 88.0


def overflows_in(dtype: str) -> np.ndarray:
  """Where exp(x) is beyond the dtype: float64 holds exp(89)."""
  return (709.0 if dtype == "float64" else 88.0) < X


# Where value and gradient are bounded, by the formula in the comment.
SURROGATES: dict[str, Callable[[str], np.ndarray]] = {
  "reinforce": lambda dtype: ALWAYS,  # A log pi: linear
  "importance_weighted": lambda dtype: (A == 0) | ~overflows_in(dtype),  # r A
  "ppo_clip": lambda dtype: (A >= 0) | ~overflows_in(dtype),  # min: no upper end for A < 0
  "dual_clip": lambda dtype: ALWAYS,  # both ends
  "sapo": lambda dtype: ALWAYS,  # a sigmoid
  "gmpo": lambda dtype: (A >= 0) | ~overflows_in(dtype),  # as PPO: min(r, high) for A > 0 only
  "cispo": lambda dtype: ALWAYS,  # at most 5 A log pi
  "topr": lambda dtype: ALWAYS,  # at most A log pi
  "vespo": lambda dtype: ALWAYS,  # w^k exp(-lam w) has a maximum
  "dppo_tv": lambda dtype: ALWAYS,  # at most 20 A log pi
  "dppo_kl": lambda dtype: ALWAYS,
  "clip_cov": lambda dtype: (A >= 0) | ~overflows_in(dtype),
  "kl_cov": lambda dtype: (A == 0) | ~overflows_in(dtype),
}
# The gradient A - beta x is bounded by x; the value has x^2, beyond float32 at 1e30.
DRO_VALUE = lambda dtype: np.abs(X) < (1e100 if dtype == "float64" else 1e19)
# Score forms that take log pi for the log-ratio if they are not told the old log-probs.
SCORES = ("reinforce", "cispo", "topr", "vespo", "dro")
# A ratio without a cap, in front of a score: finite only where r is.
UNCAPPED = ("dppo_tv", "dppo_kl")


def surrogates() -> dict[str, Callable[..., Any]]:
  selected = jnp.zeros((len(GRID), 1), bool)
  functions: dict[str, Callable[..., Any]] = {name: getattr(rl, name) for name in SURROGATES}
  for name in ("clip_cov", "kl_cov"):
    functions[name] = partial(functions[name], selected=selected)
  functions["dro"] = partial(rl.dro, beta=0.1)
  return functions | {
    f"{name} uncapped": partial(getattr(rl, name), ratio_cap=math.inf) for name in UNCAPPED
  }


def column(x: np.ndarray, dtype: str) -> jax.Array:
  """[N, 1]; float64 numbers are rounded once."""
  return jnp.asarray(np.asarray(x)[:, None], dtype)


@cache
def surrogate_results(dtype: str) -> dict[str, tuple[np.ndarray, np.ndarray, Any]]:
  """{name: (gain, gradient, dtype of the gain)}, [N] each, with and without old log-probs."""

  @jax.jit
  def run(log_ratio: jax.Array, advantages: jax.Array, old: jax.Array) -> Any:
    out = {}
    for name, gain in surrogates().items():
      for given in (True, False) if name in SCORES else (True,):
        f = partial(gain, advantages=advantages, old_logprobs=old if given else None)
        value, pull = jax.vjp(f, log_ratio)
        out[name if given else f"{name} alone"] = value, pull(jnp.ones_like(value))[0]
    return out

  with jax.enable_x64(dtype == "float64"):
    out = jax.device_get(run(column(X, dtype), column(A, dtype), column(OLD, dtype)))
  return {
    name: (value[:, 0].astype(float), gradient[:, 0].astype(float), value.dtype)
    for name, (value, gradient) in out.items()
  }


@pytest.mark.parametrize("dtype", DTYPES)
def test_surrogates(dtype: str) -> None:
  for title, (gain, gradient, got_dtype) in surrogate_results(dtype).items():
    assert got_dtype == ("float64" if dtype == "float64" else "float32")
    assert not np.isnan(gain).any(), (title, GRID[np.isnan(gain)])
    assert not np.isnan(gradient).any(), (title, GRID[np.isnan(gradient)])
    name = title.removesuffix(" alone")
    if name in SURROGATES:
      bounded = SURROGATES[name](dtype)
      assert np.isfinite(gain[bounded]).all(), (title, GRID[bounded & ~np.isfinite(gain)])
      bad = bounded & ~np.isfinite(gradient)
      assert not bad.any(), (title, GRID[bad])
    if name == "dro":
      assert np.isfinite(gain[DRO_VALUE(dtype)]).all()
      assert np.isfinite(gradient).all()
    # A token without an advantage has neither gain nor gradient, however far off it is.
    still = (A == 0) & (np.isin(X, (0.0,)) | (name not in ("dro", "kl_cov")))
    assert (gain[still] == 0).all(), title
    assert (gradient[still] == 0).all(), title


# Gain and gradient as the ratio goes to infinity and to 0: (r -> inf, r -> 0) for A = 1, A = -1.
LIMITS = {
  "ppo_clip": {1: ((1.2, 0), (0, 0)), -1: (None, (-0.8, 0))},
  "dual_clip": {1: ((1.2, 0), (0, 0)), -1: ((-3, 0), (-0.8, 0))},
  # 4 / tau sigmoid(tau (r - 1)), tau = 1 and 1.05
  "sapo": {
    1: ((4, 0), (4 / (1 + math.exp(1)), 0)),
    -1: ((-4 / 1.05, 0), (-4 / 1.05 / (1 + math.exp(1.05)), 0)),
  },
  "gmpo": {1: ((math.exp(0.4), 0), (0, 0)), -1: (None, (-math.exp(-0.4), 0))},
}
# Of the score forms, the coefficient: d gain / d log pi = weight A.
WEIGHTS = {
  "reinforce": {1: (1, 1), -1: (1, 1)},
  "cispo": {1: (5, 0), -1: (5, 0)},
  "topr": {1: (1, 1), -1: (1, 0)},
  "vespo": {1: (0, 0), -1: (0, 0)},
  # p has risen from 0 to 0.6 or fallen from 0.6 to 0. Rising it leaves the band for A > 0 and
  # keeps the largest weight for A < 0; falling, the weight r is 0 either way.
  "dppo_tv": {1: (0, 0), -1: (20, 0)},
  "dppo_kl": {1: (0, 0), -1: (20, 0)},
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits(dtype: str) -> None:
  results = surrogate_results(dtype)
  # Inputs are bfloat16, the arithmetic is float32.
  close = partial(
    np.testing.assert_allclose, rtol=1e-12 if dtype == "float64" else 2e-7, atol=1e-37
  )
  for sign in (1, -1):
    for end, there in enumerate(((X >= 89) & (sign == A), (X <= -89) & (sign == A))):
      for name, limits in LIMITS.items():
        if limits[sign][end] is not None:
          gain, gradient = limits[sign][end]
          close(results[name][0][there], gain, err_msg=name)
          close(results[name][1][there], gradient, err_msg=name)
      for name, weights in WEIGHTS.items():
        close(results[name][1][there], sign * weights[sign][end], err_msg=name)
  # Without a cap the weight is the ratio itself: inf in the limit, and not NaN.
  for name in UNCAPPED:
    rising = (X >= 1e3) & (A == -1)
    assert (results[f"{name} uncapped"][1][rising] <= -3e38).all()


def test_infinite_log_ratios_of_ratio_surrogates() -> None:
  """A probability of exactly 0 on one side, as filtered logits give it."""
  names = ("importance_weighted", "ppo_clip", "dual_clip", "sapo", "gmpo")
  log_ratio = jnp.array([[jnp.inf], [-jnp.inf]] * 3)
  advantages = jnp.repeat(jnp.array([1.0, 0.0, -1.0]), 2)[:, None]

  @jax.jit
  def run(log_ratio: jax.Array) -> Any:
    out = {}
    for name in names:
      gain, pull = jax.vjp(partial(getattr(rl, name), advantages=advantages), log_ratio)
      out[name] = gain, pull(jnp.ones_like(gain))[0]
    return out

  for name, (gain, gradient) in run(log_ratio).items():
    assert not np.isnan(gain).any(), name
    assert not np.isnan(gradient).any(), name
    if name in ("dual_clip", "sapo"):
      assert np.isfinite(gain).all(), name
      assert not gradient.any(), name


LEVELS = {
  "per_token": rl.per_token,
  "per_prefix": rl.per_prefix,
  "per_sequence": rl.per_sequence,
  "per_sequence_geometric": rl.per_sequence_geometric,
  "with_token_gradient": rl.with_token_gradient(rl.per_sequence),
  "clamped": rl.clamped(rl.per_sequence, -20.0, 20.0),
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_levels_and_surrogates_over_them(dtype: str) -> None:
  """One extreme token among ordinary ones; its row is one sequence, or two."""
  rows = np.concatenate([X[:, None], np.full((len(X), 3), [0.1, -0.2, 0.3])], axis=1)
  segment_ids = jnp.array([[1, 1, 2, 2]] * len(X))
  mask = jnp.ones(rows.shape, bool)

  @jax.jit
  def run(log_ratio: jax.Array, advantages: jax.Array) -> Any:
    out = {}
    for name, level in LEVELS.items():
      for ids in (None, segment_ids):
        value, pull = jax.vjp(lambda x, f=level, i=ids: f(x, mask, segment_ids=i), log_ratio)
        title = name if ids is None else f"{name} segments"
        out[title] = value
        for surrogate in (rl.ppo_clip, rl.cispo):
          gain, slope = jax.vjp(lambda x, f=surrogate: f(x, advantages), value)
          gradient = pull(slope(jnp.ones_like(gain))[0])[0]
          out[f"{title} {surrogate.__name__}"] = gain, gradient
    return out

  out = jax.device_get(run(jnp.asarray(rows, dtype), column(A, dtype)))
  for title, arrays in out.items():
    for x in jax.tree.leaves(arrays):
      assert not np.isnan(x.astype(float)).any(), title
    if "ppo_clip" not in title:
      for x in jax.tree.leaves(arrays):
        assert np.isfinite(x.astype(float)).all(), title
    else:
      gain, gradient = arrays
      assert np.isfinite(gain[A >= 0]).all(), title
      assert np.isfinite(gradient[A >= 0].astype(float)).all(), title
    if "segments" in title and isinstance(arrays, np.ndarray):
      # The other sequence of the row never sees the extreme token.
      others = arrays[:, 2:]
      assert (others == others[0]).all(), title


# delta = log pi - log ref: where value and gradient of each estimator are finite.
KL_VALUE = {
  "kl_k1": lambda big: ALWAYS,
  "kl_k2": lambda big: np.abs(X) < (1e100 if big else 1e19),  # delta^2 / 2
  "kl_k3": lambda big: (-709 if big else -88) <= X,  # exp(-delta)
  "kl_abs": lambda big: ALWAYS,
}
KL_GRADIENT = KL_VALUE | {"kl_k2": lambda big: ALWAYS}


@pytest.mark.parametrize("dtype", DTYPES)
def test_kl_estimators(dtype: str) -> None:
  big = dtype == "float64"
  estimators = {name: getattr(rl, name) for name in KL_VALUE}
  estimators["reverse"] = rl.with_reverse_kl_gradient(rl.kl_k3)
  mask = jnp.ones((len(X), 1), bool)

  @jax.jit
  def run(logprobs: jax.Array, ref_logprobs: jax.Array) -> Any:
    out = {}
    for name, estimator in estimators.items():
      value, pull = jax.vjp(lambda x, f=estimator: f(x, ref_logprobs, mask), logprobs)
      out[name] = value, pull(jnp.ones_like(value))[0]
    return out

  with jax.enable_x64(big):
    # log pi = min(x, 0), log ref = -max(x, 0): possible probabilities with difference x.
    new, ref = column(np.minimum(X, 0.0), dtype), column(-np.maximum(X, 0.0), dtype)
    out = jax.device_get(run(new, ref))
  for name, (value, gradient) in out.items():
    value, gradient = value[:, 0], gradient[:, 0].astype(float)
    assert value.dtype == ("float64" if big else "float32")
    assert not np.isnan(value).any(), name
    assert not np.isnan(gradient).any(), name
    if name in KL_VALUE:
      assert np.isfinite(value[KL_VALUE[name](big)]).all(), name
      assert np.isfinite(gradient[KL_GRADIENT[name](big)]).all(), name
    else:
      np.testing.assert_array_equal(gradient, X.astype(new.dtype).astype(float))
    if name not in ("kl_k1",):
      assert (value >= 0).all(), name


OFF_POLICY = [
  # log pi, log ref, log old -> exp(log pi - log old) k3(log pi - log ref)
  (-1e3, -1.0, -1.0, 1.0),  # exp(-999) (exp(999) - 1000) = 1, though the factors are 0 and inf
  (-1e3, -1.0, -2.0, math.e),  # exp(-998) exp(999)
  (-89.0, 0.0, 0.0, 1.0),
  (-1e30, -1.0, -1.0, 1.0),
  (-1.0, -1.0, -1e3, 0.0),  # ratio inf, divergence exactly 0
  (-1.0, -2.0, -1.0, math.exp(-1)),
  (-0.5, -1e3, -0.5, 998.5),  # exp(-999.5) - 1 + 999.5
  (-1.0, -2.0, -1e3, math.inf),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_off_policy_kl(dtype: str) -> None:
  with jax.enable_x64(dtype == "float64"):
    new, ref, old, want = (jnp.asarray(x, dtype) for x in np.array(OFF_POLICY).T)
    mask = jnp.ones(new.shape, bool)
    value, pull = jax.vjp(lambda x: rl.kl_k3_off_policy(x, ref, mask, old_logprobs=old), new)
    gradient = pull(jnp.ones_like(value))[0]
  value, gradient, want = (np.asarray(x) for x in (value, gradient, want))
  np.testing.assert_allclose(value[:-1], want[:-1], rtol=2e-6 if dtype == "float32" else 1e-9)
  # exp(999) is beyond both dtypes; the gradient is ratio * delta, 0 where pi has left.
  assert not np.isnan(gradient).any()
  assert value[-1] == gradient[-1] == math.inf
  assert (np.abs(gradient[:5]) < 1e-30).all()
  np.testing.assert_allclose(gradient[5:7], [1.0, 999.5], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits(dtype: str) -> None:
  """Logits that differ by 1e30: probabilities of exactly 0 and 1."""
  big = [[x, -x, 0.0] for x in (0.0, 1e3, -1e3, 1e30, -1e30)]
  mask = jnp.ones(len(big), bool)
  functions = {
    "logprobs": lambda z: rl.token_logprobs(z, jnp.zeros(len(big), jnp.int32), mask=mask),
    "next": lambda z: rl.next_token_logprobs(z, jnp.zeros(len(big), jnp.int32), mask=mask),
    "entropy": lambda z: rl.token_entropy(z, mask=mask),
    "exact_kl": lambda z: rl.exact_kl(z, -z, mask=mask),
    "top_k_kl": lambda z: rl.top_k_kl(z, -z, k=1, mask=mask),
  }

  @jax.jit
  def run(logits: jax.Array) -> Any:
    out = {}
    for name, f in functions.items():
      value, pull = jax.vjp(f, logits)
      out[name] = value, pull(jnp.ones_like(value))[0]
    return out

  with jax.enable_x64(dtype == "float64"):
    out = jax.device_get(run(jnp.asarray(big, dtype)))
  for name, (value, gradient) in out.items():
    assert np.isfinite(value).all(), name
    assert np.isfinite(gradient.astype(float)).all(), name
  # -2e30 = z[0] - max z where z[0] is the least
  np.testing.assert_allclose(
    out["logprobs"][0],
    [-math.log(3), 0, -2e3, 0, -2e30],
    rtol=1e-2 if dtype == "bfloat16" else 1e-6,
  )
  np.testing.assert_allclose(out["entropy"][0], [math.log(3), 0, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_corrections(dtype: str) -> None:
  """Bounded by what they are called with: 0 <= weight <= cap, in the band, or 0 and 1."""
  infinite = np.array([np.inf, -np.inf])
  x = np.concatenate([X[A == 0], infinite])
  segment_ids = jnp.arange(1, len(x) + 1)  # every token is a sequence
  mask = jnp.ones(len(x), bool)
  cap = {"cap": 2.0}
  weights: dict[str, tuple[Callable[..., Any], float]] = {
    "truncated": (lambda y: rl.truncated(y, mask, **cap), 2.0),
    "banded": (lambda y: rl.banded(y, mask, low=0.5, high=5.0), 5.0),
    "rejected": (lambda y: rl.rejected(y, mask, low=-1.0, high=1.0), 1.0),
    "veto": (lambda y: rl.veto(y, mask, low=1e-4, segment_ids=segment_ids), 1.0),
    "off_policy_mask": (
      lambda y: rl.off_policy_mask(
        y, -jnp.ones_like(y), mask, threshold=0.1, segment_ids=segment_ids
      ),
      1.0,
    ),
    "self_normalised": (
      lambda y: rl.self_normalised(rl.truncated(y, mask, **cap), mask, jnp.full_like(y, 0.5)),
      float(len(x)),
    ),
  }
  with jax.enable_x64(dtype == "float64"):
    out = jax.jit(lambda y: {name: f(y) for name, (f, _) in weights.items()})(jnp.asarray(x, dtype))
  for name, (_, high) in weights.items():
    got = np.asarray(out[name])
    assert got.dtype == ("float64" if dtype == "float64" else "float32")
    assert ((got >= 0) & (got <= high)).all(), name
  low = x <= -88
  for name in ("truncated", "banded", "rejected", "veto", "off_policy_mask"):
    np.testing.assert_allclose(np.asarray(out[name])[low], 0.0, atol=1e-37, err_msg=name)
  np.testing.assert_array_equal(np.asarray(out["truncated"])[x >= 88], 2.0)
  for name in ("banded", "rejected"):
    assert not np.asarray(out[name])[x >= 88].any(), name
  with jax.enable_x64(dtype == "float64"):
    y = jnp.asarray(X, dtype)
    halfway = rl.interpolated_proximal(y, -y, jnp.ones(len(X), bool), alpha=0.5)
  assert not halfway.any()


def test_weights_of_any_size_normalise() -> None:
  """The sum of the largest is beyond float32, the mean is not."""
  mask, loss_weights = jnp.ones(40, bool), jnp.full(40, 1 / 40)
  for size in (1e-37, 1.0, 1e37):
    weights = size * jnp.tile(jnp.array([1.0, 3.0]), 20)
    got = rl.self_normalised(weights, mask, loss_weights)
    np.testing.assert_allclose(got, [0.5, 1.5] * 20, rtol=1e-6)


def test_diagnostics_do_not_overflow() -> None:
  x = jnp.asarray(X[A == 0], jnp.float32)
  mask = jnp.ones(x.shape, bool)
  zeros = jnp.zeros_like(x)
  # One weight rules: w^2 / (10 w^2).
  assert rl.token_effective_sample_size(x, mask).fraction() == pytest.approx(1 / x.size)
  found = rl.ratio_extremes(x, mask)
  assert found.high == jnp.float32(1e30)
  assert found.low == jnp.float32(-1e30)
  clipped = rl.clip_fractions(x, jnp.ones_like(x), mask, clip_low=0.2, clip_high=0.2)
  assert clipped["clipped"].mean() == pytest.approx(4 / 10)
  for statistic in (rl.policy_drift(zeros, x, mask), rl.perplexity_gap(x, zeros, mask)):
    for name, part in statistic.items():
      assert not np.isnan(part.mean()), name


# Bounded for either sign of the advantage, at whatever level they take the ratio.
BOUNDED_OBJECTIVES = {
  "DUAL_CLIP_PPO": rl.DUAL_CLIP_PPO,
  "SAPO": rl.SAPO,
  "CISPO": rl.CISPO,
  "VESPO": rl.VESPO,
  "TOPR": rl.TOPR,
  "GPG": rl.GPG,
  "RLOO": rl.RLOO,
}


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(x, marks=SLOW) for x in DTYPES[1:])])
def test_bounded_objectives(dtype: str) -> None:
  """One token of a row of the batch is extreme; the loss and all gradients stay finite."""
  old = np.full((len(X), 3), -1.0)
  old[:, 1] = OLD
  log_ratio = np.full(old.shape, [0.1, 0.0, -0.1])
  log_ratio[:, 1] = X

  @jax.jit
  def run(log_ratio: jax.Array, old: jax.Array, advantages: jax.Array) -> Any:
    mask = jnp.ones(old.shape, bool)

    def loss(objective: rl.Objective, logprobs: jax.Array) -> jax.Array:
      weights = objective.loss_weights(mask)
      return rl.objective_loss(objective, logprobs, old, advantages, mask, loss_weights=weights)[0]

    return {
      name: jax.value_and_grad(partial(loss, objective))(old + log_ratio)
      for name, objective in BOUNDED_OBJECTIVES.items()
    }

  with jax.enable_x64(dtype == "float64"):
    out = run(*(jnp.asarray(x, dtype) for x in (log_ratio, old, A[:, None])))
  for name, (loss, gradient) in out.items():
    assert np.isfinite(loss), name
    assert np.isfinite(np.asarray(gradient, float)).all(), name


LONG = 100_000


def long_rows() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  half = LONG // 2
  return {
    "equal": np.full(LONG, -0.01),  # adding one by one loses 7e-4 of this
    "drift": np.concatenate([np.full(half, -0.01), np.full(half, 0.03)]),
    "noise": rng.normal(-0.01, 0.1, LONG),
    "spread": rng.exponential(1.0, LONG) * 10.0 ** rng.integers(-6, 3, LONG),
  }


@pytest.mark.parametrize("segments", [False, True])
def test_sequences_of_100000_tokens(segments: bool) -> None:
  """Relative to the sum of sizes; packed rows hold a second, short sequence."""
  mask = np.ones(LONG + 2, bool)
  ids = np.ones(LONG + 2, np.int32)
  ids[LONG:] = 2
  if not segments:
    mask[LONG:] = False

  @jax.jit
  def run(x: jax.Array, mask: jax.Array, ids: jax.Array | None) -> Any:
    levels = (rl.per_prefix, rl.per_sequence, rl.per_sequence_geometric)
    out = {level.__name__: level(x, mask, segment_ids=ids) for level in levels}
    out["segment_total"] = rl.segment_total(x, mask, ids)
    out["segment_mean"] = rl.segment_mean(x, mask, ids)
    if not segments:
      out["masked_sum"] = rl.masked_sum(x, mask)
      out["masked_mean"] = rl.masked_mean(x, mask)
      out["sequence_logprob"] = rl.sequence_logprob(x, mask)
      out["mean_logprob"] = rl.mean_logprob(x, mask)
      out["average"] = rl.average(x, mask).mean()
      out["token_mean"] = jnp.sum(rl.token_mean(mask) * jnp.where(mask, x, 0.0))
    return out

  for name, row in long_rows().items():
    x = np.concatenate([row, [0.25, 0.5]]).astype(np.float32)
    exact, size = x[:LONG].astype(float), np.abs(x[:LONG]).astype(float).sum()
    total = math.fsum(exact)
    for function, got in jax.device_get(run(x, mask, ids if segments else None)).items():
      truth = np.cumsum(exact) if function == "per_prefix" else np.asarray(total)
      mean = function in ("per_sequence_geometric", "masked_mean", "mean_logprob", "average")
      mean = mean or function in ("token_mean", "segment_mean")
      scale = LONG if mean else 1
      first = got[:LONG] if np.ndim(got) else got
      error = np.max(np.abs(np.asarray(first, float) - truth / scale)) / (size / scale)
      assert error < 1e-6, (name, function, error)
      if segments:
        tail = {mean: [0.375] * 2 for mean in ("per_sequence_geometric", "segment_mean")}
        tail["per_prefix"] = [0.25, 0.75]
        np.testing.assert_array_equal(got[LONG:], tail.get(function, [0.75] * 2))


# --------------------------------------------------------------------------------------- dtypes

# They select, and compute nothing: the dtype is that of the argument.
SELECTS = ("zero_masked", "segment_max")


def float_outputs(call: Call) -> list[Any]:
  leaves = jax.tree.leaves(jax.eval_shape(lambda arrays: call(**arrays), call.arrays))
  return [x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


LOW = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize(
  ("dtype", "x64"),
  [
    ("bfloat16", False),
    ("float64", True),
    *(pytest.param(x, False, marks=SLOW) for x in LOW[1:]),
    *(pytest.param(x, True, marks=SLOW) for x in LOW),
  ],
)
def test_low_precision_is_widened_and_high_precision_kept(dtype: str, x64: bool) -> None:
  with jax.enable_x64(x64):
    for call in public_calls(jnp.dtype(dtype)):
      if call.name in SELECTS or not call.arrays:
        continue
      data = [x for x in call.arrays.values() if jnp.issubdtype(x.dtype, jnp.floating)]
      # From a mask or lengths alone: JAX's default.
      want = max(jnp.dtype(dtype), jnp.dtype("float32"), key=lambda x: x.itemsize)
      want = want if data else jnp.dtype("float64" if x64 else "float32")
      assert set(float_outputs(call)) <= {want}, call.title


def test_values_of_low_precision_are_those_of_float32() -> None:
  """Inputs are rounded, arithmetic is not: the same as float32 on the rounded numbers."""
  for title in (
    "ppo_clip[rows]",
    "kl_k3",
    "token_logprobs",
    "per_sequence[segments]",
    "masked_mean",
  ):
    call = named()[title]
    low = {
      name: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x
      for name, x in call.arrays.items()
    }
    wide = {
      name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in low.items()
    }
    run = jax.jit(lambda arrays, call=call: call(**arrays))
    np.testing.assert_array_equal(run(low), run(wide), err_msg=title)


@jax.jit
def advantages_of(rewards: jax.Array) -> dict[str, jax.Array]:
  return {
    "raw_rewards": rl.raw_rewards(rewards),
    "group_centered": rl.group_centered(rewards),
    "group_normalized": rl.group_normalized(rewards),
    "leave_one_out": rl.leave_one_out(rewards),
    "leave_one_out_normalized": rl.leave_one_out_normalized(rewards),
    "batch_scaled": rl.batch_scaled(rewards),
    "mean_normalized": rl.mean_normalized(rewards),
    "signal_scaled": rl.signal_scaled(rewards),
    "pass_at_k": rl.pass_at_k(rewards, k=2),
    "greedy_baseline": rl.greedy_baseline(rewards, rewards[:, 0]),
    "length_weighted_baseline": rl.length_weighted_baseline(rewards, rewards + 1),
    "terminal_rewards": rl.terminal_rewards(rewards, jnp.ones((*rewards.shape, 2), bool)),
  }


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool"])
def test_rewards_may_be_integers(dtype: str) -> None:
  rewards = np.array([[1, 0, 1, 1], [0, 0, 0, 1]])
  want = advantages_of(rewards.astype(np.float32))
  for name, got in advantages_of(rewards.astype(dtype)).items():
    assert got.dtype == jnp.float32, name
    np.testing.assert_array_equal(got, want[name], err_msg=name)
