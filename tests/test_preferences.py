"""Properties of preference losses, and log-ratios of any size.

Never NaN, in value or gradient; finite wherever the loss is bounded or linear.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_lm as rl
from tests.preference_tables import LABELLED, PAIR, PAIRED, SORTED

# Squares overflow, everything else is at most linear in the log-ratio.
SQUARES = ("ipo_loss", "sppo_loss", "reward_centering_loss")
SLOW = pytest.mark.slow


def losses() -> dict[str, Any]:
  """All losses as functions of two arrays [N]."""
  found = {name: partial(getattr(rl, name), **constants) for name, (_, constants) in PAIRED.items()}
  found |= {
    name: partial(getattr(rl, name), **SORTED) for name in ("aot_loss", "aot_unpaired_loss")
  }
  for name, constants in LABELLED.items():
    for label in (True, False):
      found[f"{name} {label}"] = partial(of_label, name, constants, label)
  for alpha in (0.0, 0.5, 1.0, -1.0, 2.0):
    score = partial(rl.alpha_divergence_score, alpha=alpha)
    found[f"alpha {alpha}"] = partial(of_scores, score)
  return found | {"jensen_shannon": partial(of_scores, rl.jensen_shannon_score)}


def of_label(name: str, constants: Any, label: bool, log_ratio: Any, other: Any) -> jax.Array:
  return getattr(rl, name)(log_ratio, jnp.full(log_ratio.shape, label), **constants)


def of_scores(score: Any, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
  return rl.dpo_loss(score(chosen), score(rejected))


LOSSES = losses()


@cache
def values_and_gradients(dtype: str) -> tuple[Any, Any, Any]:
  """On a grid of both log-ratios: {name: (values, gradients)}, compiled at once."""
  far = 1e4 if dtype == "float16" else 1e30
  line = np.array([0.0, 1e-6, 1.0, 89.0, 1e3, far])
  line = np.concatenate([-line[:0:-1], line])
  grid = [x.ravel() for x in np.meshgrid(line, line)]

  @jax.jit
  def run(chosen: Any, rejected: Any) -> Any:
    out = {}
    for name, loss in LOSSES.items():
      value, pull = jax.vjp(loss, chosen, rejected)
      out[name] = value, pull(jnp.ones_like(value))
    return out

  with jax.enable_x64(dtype == "float64"):
    out = jax.device_get(run(*(jnp.asarray(x, dtype) for x in grid)))
  return *grid, out


@pytest.mark.parametrize(
  "dtype",
  ["float32", "bfloat16", pytest.param("float16", marks=SLOW), pytest.param("float64", marks=SLOW)],
)
def test_log_ratios_of_any_size(dtype: str) -> None:
  chosen, rejected, out = values_and_gradients(dtype)
  moderate = np.maximum(np.abs(chosen), np.abs(rejected)) <= 1e3
  for name, (value, gradients) in out.items():
    assert value.dtype == ("float64" if dtype == "float64" else "float32")
    for what, x in (("value", value), *zip(PAIR, gradients)):
      x = x.astype(np.float64)
      assert not np.isnan(x).any(), (name, what)
      if "alpha" in name and "alpha 0.0" not in name:
        continue  # exponential in the log-ratio on one side
      if name == "orpo_loss" and dtype == "float16":
        continue  # a gradient of 1 / epsilon does not fit into float16 on its way back
      assert np.isfinite(x[moderate]).all(), (name, what)
      if what != "value" or name not in SQUARES:
        assert np.isfinite(x).all(), (name, what)


def test_limits_far_out() -> None:
  """Value and gradient in chosen at a margin of +1e3 and -1e3, beta 1."""
  far, zero = jnp.array([1e3, -1e3]), jnp.zeros(2)
  limits = {
    # -log sig: 0 on the right side, linear on the wrong one
    "dpo_loss": ({}, (0, 1000), (0, -1)),
    # ... and e of the slope on the other side
    "conservative_dpo_loss": ({"label_smoothing": 0.1}, (100, 900), (0.1, -0.9)),
    "robust_dpo_loss": ({"label_smoothing": 0.1}, (-125, 1125), (-0.125, -1.125)),
    "hinge_dpo_loss": ({}, (0, 1001), (0, -1)),
    "exo_loss": ({"label_smoothing": 0.1}, (-np.log(0.9), -np.log(0.1)), (0, 0)),
    # the exponential loss is on where the margin is right; the logistic one where it is wrong
    "discopop_loss": ({}, (0, 1000), (0, -1)),
    # rejected at 0: log 2 / 2
    "nca_loss": ({}, (500 + np.log(2) / 2, 1000 + np.log(2) / 2), (0.5, -1)),
    "bco_pair_loss": ({}, (np.log(2), 1000 + np.log(2)), (0, -1)),
    "apo_zero_loss": ({}, (0.5, 1.5), (0, 0)),
    "apo_down_loss": ({}, (1, 1), (0, 0)),
  }
  for name, (constants, values, slopes) in limits.items():
    loss = partial(getattr(rl, name), beta=1.0, **constants)
    value, pull = jax.vjp(loss, far, zero)
    np.testing.assert_allclose(value, values, rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(pull(jnp.ones(2))[0], slopes, rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_saturated_sigmoid_still_has_a_gradient() -> None:
  """sig'(30) = 9.4e-14; sig (1 - sig) is 0 in float32 from 17 on."""
  want = np.exp(-30.0)
  x, zero = jnp.array([30.0]), jnp.array([0.0])
  slope = jax.grad(lambda x: rl.apo_zero_loss(x, zero, beta=1.0)[0])(x)
  np.testing.assert_allclose(slope, [-want], rtol=1e-5)
  for label, sign in ((True, -1), (False, 1)):
    loss = partial(rl.kto_loss, desirable=jnp.array([label]), baseline=0.0, beta=1.0)
    for at in (x, -x):
      np.testing.assert_allclose(jax.grad(lambda x, f=loss: f(x)[0])(at), [sign * want], rtol=1e-5)


def test_a_reward_gap_of_1000() -> None:
  gap, zero = jnp.array([1e3, -1e3]), jnp.zeros(2)
  value, pull = jax.vjp(rl.bradley_terry_loss, gap, zero)
  np.testing.assert_array_equal(value, [0.0, 1e3])
  np.testing.assert_array_equal(pull(jnp.ones(2))[0], [0.0, -1.0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_orpo_at_probability_one(dtype: str) -> None:
  """Finite at a log-prob of exactly 0, and the gradient in the logits stays in [0, 1]."""
  with jax.enable_x64(dtype == "float64"):
    sure, half = jnp.zeros(1, dtype), jnp.log(jnp.full(1, 0.5, dtype))
    size = -np.log(np.finfo(dtype).eps)
    np.testing.assert_allclose(rl.orpo_loss(half, sure), [size], rtol=1e-6)
    np.testing.assert_allclose(rl.orpo_loss(sure, half), [np.exp(-size)], rtol=1e-3)
    np.testing.assert_allclose(rl.orpo_loss(sure, sure), [np.log(2)], rtol=1e-6)

    def of_logits(logit: jax.Array) -> jax.Array:
      logits = jnp.stack([logit, jnp.zeros_like(logit)], -1)
      return rl.orpo_loss(rl.token_logprobs(logits, jnp.zeros(logit.shape, int)), half)[0]

    for logit in (0.0, 10.0, 15.0, 30.0, 40.0, 100.0):
      gradient = jax.grad(of_logits)(jnp.full(1, logit, dtype))
      assert np.isfinite(gradient).all()
      assert -1.01 <= float(gradient[0]) <= 0


def test_log_odds_keep_their_digits() -> None:
  """log(p / (1 - p)) from either side of the switch between its two forms, in float64 truth."""
  logprob = -np.logspace(-6, 1, 200).astype(np.float32)
  p = logprob.astype(np.float64)
  want = p - np.log(-np.expm1(p))
  got = -rl.orpo_loss(jnp.full(200, -50.0), jnp.asarray(logprob)) - (-50.0)
  np.testing.assert_allclose(got, -want, rtol=2e-6, atol=2e-5)


def random_pairs(count: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(-np.abs(rng.normal(size=count)), jnp.float32) for _ in range(2))


def test_rows_are_independent_but_for_aot() -> None:
  """f(x)[i] == f(x[i]); permuting the batch permutes the loss, and leaves AOT as it is."""
  pair = random_pairs(7)
  order = np.array([3, 1, 6, 0, 2, 5, 4])

  @jax.jit
  def run(c: jax.Array, r: jax.Array) -> Any:
    whole = {name: loss(c, r) for name, loss in LOSSES.items()}
    mixed = {name: loss(c[order], r[order]) for name, loss in LOSSES.items()}
    single = {name: jax.vmap(lambda c, r, f=f: f(c[None], r[None])[0])(c, r)
              for name, f in LOSSES.items()}  # fmt: skip
    return whole, mixed, single

  whole, mixed, single = jax.device_get(run(*pair))
  for name, loss in whole.items():
    if name.startswith("aot"):
      np.testing.assert_array_equal(mixed[name], loss)
      assert (np.abs(single[name] - loss) > 1e-3).any()
    else:
      np.testing.assert_allclose(mixed[name], loss[order], rtol=1e-6, err_msg=name)
      np.testing.assert_allclose(single[name], loss, rtol=1e-6, err_msg=name)


def test_equal_log_ratios() -> None:
  """Chosen == rejected: the margin is 0 wherever both stand, and the pull is beta / 2."""
  same = jnp.array([-1e3, -1.0, 0.0, 2.5, 1e3])
  value, pull = jax.vjp(rl.dpo_loss, same, same)
  np.testing.assert_allclose(value, np.full(5, np.log(2)), rtol=1e-6)
  for gradient, sign in zip(pull(jnp.ones(5)), (-1, 1), strict=True):
    np.testing.assert_allclose(gradient, np.full(5, sign * 0.05), rtol=1e-6)
  np.testing.assert_allclose(rl.ipo_loss(same, same), np.full(5, 25.0), rtol=1e-6)


def test_relations_between_losses() -> None:
  c, r = random_pairs(9)
  close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  beta = {"beta": 0.7}
  dpo = rl.dpo_loss(c, r, **beta)
  close(rl.conservative_dpo_loss(c, r, label_smoothing=0.0, **beta), dpo)
  close(rl.robust_dpo_loss(c, r, label_smoothing=0.0, **beta), dpo)
  close(rl.cpo_loss(c, r, **beta), dpo)
  close(rl.simpo_loss(c, r, gamma=0.0, **beta), dpo)
  close(rl.bradley_terry_loss(0.7 * c, 0.7 * r), dpo)
  close(rl.dpo_loss(*(rl.alpha_divergence_score(x, alpha=0.0) for x in (c, r)), **beta), dpo)
  near = rl.dpo_loss(*(rl.alpha_divergence_score(x, alpha=1e-4) for x in (c, r)), **beta)
  close(near, dpo, atol=1e-3)
  yes, no = jnp.ones(9, bool), jnp.zeros(9, bool)
  bco = partial(rl.bco_loss, delta=0.3, **beta)
  close(rl.bco_pair_loss(c, r, delta=0.3, **beta), bco(c, yes) + bco(r, no))
  kto = partial(rl.kto_loss, baseline=0.0, **beta)
  close(rl.apo_zero_loss(c, r, **beta), kto(c, yes) + kto(r, no))
  # Sorted alike, the sorted loss is the loss.
  order = jnp.argsort(c)
  close(rl.aot_unpaired_loss(c, c - 0.5, **beta), rl.dpo_loss(c, c - 0.5, **beta)[order])


def test_optima() -> None:
  """Where a loss stops: the margin at which its gradient is 0."""
  grad = lambda f, x: jax.grad(lambda c: f(c, jnp.zeros(1)).sum())(jnp.array([x]))
  stops = [
    (rl.ipo_loss, 5.0),  # 1 / (2 beta)
    (partial(rl.conservative_dpo_loss, label_smoothing=0.1, beta=1.0), np.log(9)),
    (partial(rl.exo_loss, label_smoothing=0.1, beta=1.0), np.log(9)),
    (rl.sppo_loss, 5.0),
    (partial(rl.nca_loss, beta=1.0), np.log(2)),  # sig = 2/3
  ]
  for loss, margin in stops:
    np.testing.assert_allclose(grad(loss, float(margin)), [0.0], atol=1e-6)


def test_scores_of_other_divergences() -> None:
  """0 with slope 1 (1/2 for Jensen-Shannon) at the reference, and increasing."""
  u = jnp.linspace(-4.0, 4.0, 9)
  for alpha in (-1.0, 0.0, 0.3, 1.0, 2.0):
    score, slope = jax.vmap(
      jax.value_and_grad(lambda x, a=alpha: rl.alpha_divergence_score(x[None], alpha=a)[0])
    )(u)
    assert score[4] == 0
    assert slope[4] == 1
    assert (np.diff(score) > 0).all()
  score = rl.jensen_shannon_score(u)
  np.testing.assert_allclose(score[4], 0.0, atol=1e-7)
  assert (np.diff(score) > 0).all()
  # Of both kinds the forward KL: one formula, whose constant cancels in a margin.
  np.testing.assert_allclose(
    rl.alpha_divergence_score(u, alpha=1.0), 1.0 - np.exp(-np.asarray(u)), rtol=1e-5
  )


def test_constants_may_be_traced() -> None:
  c, r = random_pairs(3)
  betas, smoothing = jnp.array([0.1, 0.5]), jnp.array([0.0, 0.2])
  many = jax.vmap(lambda b, e: rl.conservative_dpo_loss(c, r, beta=b, label_smoothing=e))
  for got, beta, e in zip(many(betas, smoothing), (0.1, 0.5), (0.0, 0.2), strict=True):
    want = rl.conservative_dpo_loss(c, r, beta=beta, label_smoothing=e)
    np.testing.assert_allclose(got, want, rtol=1e-6)
  alphas = jax.vmap(lambda a: rl.alpha_divergence_score(c, alpha=a))(jnp.array([0.0, 1.0]))
  np.testing.assert_allclose(alphas[0], c, rtol=1e-6)


def test_length_desensitised_dpo() -> None:
  """alpha = 1 is DPO; alpha = 0 forgets what the longer response says beyond the shorter one."""
  mask = jnp.array([[True, True, True, True], [True, False, True, False]])
  log_ratios = jnp.array([[1.0, 2.0, 4.0, 8.0], [1.0, 9.0, 1.0, 9.0]])
  shared = jnp.full(2, jnp.min(rl.lengths(mask)))
  for alpha, want in ((1.0, [15.0, 2.0]), (0.0, [3.0, 2.0]), (0.5, [9.0, 2.0])):
    weights = rl.length_desensitized_weights(mask, shared, alpha=alpha)
    np.testing.assert_array_equal(rl.sequence_logprob(weights * log_ratios, mask), want)


def test_an_impossible_token_does_not_disturb_the_collision_probability() -> None:
  logits = jnp.array([[1.0, 0.0, -jnp.inf]])
  value, gradient = jax.value_and_grad(lambda z: rl.log_collision_probability(z)[0])(logits)
  p = 1 / (1 + np.exp(-1.0))
  np.testing.assert_allclose(value, np.log(p**2 + (1 - p) ** 2), rtol=1e-6)
  assert np.isfinite(gradient).all()
  assert gradient[0, 2] == 0


@pytest.mark.parametrize("jit", [True, pytest.param(False, marks=SLOW)])
def test_rows_sharded_over_an_explicit_mesh(jit: bool) -> None:
  c, r = random_pairs(8)
  desirable, where = r > -0.7, c < -0.1

  def everything(c: Any, r: Any, desirable: Any, where: Any) -> Any:
    sort = jax.grad(lambda c: rl.aot_unpaired_loss(c, r, where=where).sum())(c)
    kto = rl.kto_loss(c, desirable, baseline=rl.kto_baseline(r, where=where))
    statistics = rl.preference_statistics(c, r, where=where)
    rest = {name: f(c, r) for name, f in LOSSES.items() if "label" not in name}
    return sort, kto, statistics["margin"].mean(), rest

  arrays = (c, r, desirable, where)
  want = jax.device_get(jax.jit(everything)(*arrays))
  mesh = jax.make_mesh((8,), ("data",))
  with jax.set_mesh(mesh):
    placed = jax.device_put(arrays, NamedSharding(mesh, P("data")))
    got = jax.device_get((jax.jit(everything) if jit else everything)(*placed))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_kto_under_shard_map() -> None:
  """Each device has two rows; the baseline is that of the whole batch, weighed by counts."""
  c, r = random_pairs(8)
  r, where = jnp.abs(r), jnp.arange(8) % 3 > 0
  desirable = c > -0.7
  want = rl.kto_loss(c, desirable, baseline=rl.kto_baseline(r, where=where))
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])

  def local(c: Any, r: Any, desirable: Any, where: Any) -> jax.Array:
    baseline = jnp.maximum(rl.average(r, where).all_reduce("data").mean(), 0.0)
    return rl.kto_loss(c, desirable, baseline=baseline)

  mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  np.testing.assert_allclose(jax.jit(mapped)(c, r, desirable, where), want, rtol=1e-6)
