"""Corners that no formula shows: narrow integers, empty arrays, zeros beside infinities, meshes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_lm as rl

ON = jnp.ones((1, 3), bool)
LOGPROBS = jnp.full((1, 3), -1.0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_narrow_token_ids_do_not_wrap(dtype: str) -> None:
  """A vocabulary of 300 and rows of 300 tokens, in integers that end at 127 or 255."""
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)))
  tokens = np.arange(300) % 120
  want = rl.next_token_logprobs(logits, jnp.asarray(tokens))
  got = rl.next_token_logprobs(logits, jnp.asarray(tokens, dtype))
  np.testing.assert_array_equal(got, want)
  assert (np.asarray(want)[1:] < 0).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_segment_ids_of_any_integer_type(dtype: str) -> None:
  ids = jnp.asarray([5, 5, 100, 5, 100], dtype)
  x, on = jnp.arange(5.0), jnp.ones(5, bool)
  np.testing.assert_array_equal(rl.per_sequence(x, on, segment_ids=ids), [4, 4, 6, 4, 6])
  # A segment is a set of tokens, contiguous or not, for every level.
  np.testing.assert_array_equal(rl.per_prefix(x, on, segment_ids=ids), [0, 1, 2, 4, 6])


@pytest.mark.parametrize("largest", [1e30, 1.5e38, 2e38])
def test_packed_sums_reach_as_far_as_unpacked_ones(largest: float) -> None:
  x, on, ids = jnp.asarray([largest, -largest / 2, 0.0]), jnp.ones(3, bool), jnp.ones(3, int)
  packed, unpacked = rl.per_sequence(x, on, segment_ids=ids), rl.per_sequence(x, on)
  np.testing.assert_allclose(packed, unpacked, rtol=1e-6)


def loss_and_gradient(logprobs: jax.Array = LOGPROBS, **changes: Any) -> tuple[Any, Any]:
  arguments = {"loss_weights": jnp.array([[0.5, 0.0, 0.5]])} | changes

  def loss(logprobs: jax.Array) -> jax.Array:
    old = LOGPROBS - 0.1
    return rl.objective_loss(rl.GRPO, logprobs, old, jnp.ones((1, 1)), ON, **arguments)[0]

  return jax.value_and_grad(loss)(logprobs)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_no_weight_wins_over_an_infinite_one(bad: float) -> None:
  want = loss_and_gradient()
  for importance, weights in (([1, bad, 1], [0.5, 0, 0.5]), ([1, 0, 1], [0.5, bad, 0.5])):
    got = loss_and_gradient(
      importance_weights=jnp.array([importance], float), loss_weights=jnp.array([weights])
    )
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(a, b)


def test_a_coefficient_of_zero_takes_out_an_infinite_kl() -> None:
  """k3 at delta = -200 is exp(200): inf in float32."""
  far = {"ref_logprobs": LOGPROBS + 200.0, "kl": rl.kl_k3}
  for a, b in zip(loss_and_gradient(kl_coef=0.0, **far), loss_and_gradient(), strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.isposinf(loss_and_gradient(kl_coef=0.1, **far)[0])


@pytest.mark.parametrize("log_ratio", [89.0, 1e3, 1e30])
def test_a_token_left_out_by_clip_cov_cannot_overflow(log_ratio: float) -> None:
  """PPO does not clip A < 0 at a large ratio, so the selection may draw such a token."""
  selected = jnp.array([True, False])

  def gain(x: jax.Array) -> jax.Array:
    return rl.clip_cov(x, jnp.array([-1.0, -1.0]), selected=selected).sum()

  value, gradient = jax.value_and_grad(gain)(jnp.array([log_ratio, 0.0]))
  assert value == -1
  np.testing.assert_array_equal(gradient, [0, -1])


def test_a_nan_weight_is_not_normalised_away() -> None:
  weights, on = jnp.array([1.0, jnp.nan, 2.0]), jnp.ones(3, bool)
  for normalise in (rl.self_normalised, jax.jit(rl.self_normalised)):
    assert np.isnan(normalise(weights, on, jnp.ones(3))).all()


@pytest.mark.parametrize(
  ("old", "new", "kl"),
  [
    # p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), in exact arithmetic
    (-2e-7, -1e-8, 4.0914641e-7),
    (-1e-6, -2e-8, 2.9320230e-6),
  ],
)
def test_the_kl_of_confident_tokens_keeps_its_digits(old: float, new: float, kl: float) -> None:
  """In float32 exp rounds both probabilities to 1, and their rests to 0."""

  def kept(width: float) -> bool:
    log_ratio, one = jnp.array([new - old]), jnp.array([1.0])
    gradient = jax.grad(
      lambda x: rl.dppo_kl(x, one, old_logprobs=jnp.array([old]), clip_high=width).sum()
    )
    return bool(gradient(log_ratio)[0] > 0)

  assert kept(kl * 1.01)
  assert not kept(kl * 0.99)


def test_k3_keeps_its_digits_near_zero() -> None:
  """exp(-d) - 1 + d in float64; as a sum of three terms float32 loses all digits of d^2 / 2."""
  delta = np.array([1e-6, -1e-4, 1e-3, 9e-3, 0.09, -0.09, 0.11, -0.11, 1.0], np.float32)
  exact = delta.astype(float)
  want = np.where(np.abs(exact) < 2e-3, exact**2 / 2 - exact**3 / 6, np.expm1(-exact) + exact)
  got = rl.kl_k3(jnp.asarray(delta), jnp.zeros(9), jnp.ones(9, bool))
  np.testing.assert_allclose(got, want, rtol=3e-6)


def test_curvature_of_the_off_policy_kl_at_the_reference() -> None:
  """d^2 / dx^2 of rho k3 is rho (1 + delta): 1 at delta = 0, rho = 1."""
  x, on = jnp.array([-1.0]), jnp.array([True])
  curvature = jax.hessian(lambda y: rl.kl_k3_off_policy(y, x, on, old_logprobs=x)[0])(x)
  np.testing.assert_allclose(curvature, [[1.0]])


def test_gradient_in_the_temperature_with_an_excluded_token() -> None:
  """log p_0 = -log(1 + e^(-1/t)): derivative -p_1 / t^2 = -0.268941 at t = 1."""
  logits = jnp.array([[1.0, 0.0, -jnp.inf]])
  gradient = jax.grad(lambda t: rl.token_logprobs(logits, jnp.array([0]), temperature=t)[0])(1.0)
  np.testing.assert_allclose(gradient, -0.26894142, rtol=1e-6)
  # H of (p, 1 - p): dH/dt = p (1 - p) / t^3; and KL to the uniform is log 2 - H.
  slope = jax.grad(lambda t: rl.token_entropy(logits, temperature=t)[0])(1.0)
  np.testing.assert_allclose(slope, 0.19661193, rtol=1e-6)
  uniform = jnp.array([[0.0, 0.0, -jnp.inf]])
  slope = jax.grad(lambda t: rl.exact_kl(logits, uniform, temperature=t)[0])(1.0)
  np.testing.assert_allclose(slope, -0.19661193, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_nothing_to_do_is_done(shape: tuple[int, int]) -> None:
  x, on, ids = jnp.zeros(shape), jnp.zeros(shape, bool), jnp.zeros(shape, int)
  for level in (rl.per_token, rl.per_prefix, rl.per_sequence, rl.per_sequence_geometric):
    assert level(x, on, segment_ids=ids).shape == shape
  assert rl.gae(x, x, on).shape == rl.gae(x, x, on, segment_ids=ids).shape == shape
  assert rl.terminal_rewards(x.sum(axis=-1), on).shape == shape
  assert rl.last_token_mask(on, segment_ids=ids).shape == shape
  assert rl.top_entropy_mask(x, on, fraction=0.2).shape == shape
  assert rl.self_normalised(x, on, x).shape == shape
  assert rl.whiten(x, on).shape == shape
  assert rl.token_effective_sample_size(x, on).fraction() == 0
  assert rl.ratio_extremes(x, on).low_position == -1
  for weights in (rl.token_mean, rl.sequence_mean, rl.sequence_sum, rl.token_sum):
    assert weights(on).shape == shape
  assert rl.objective_loss(rl.GSPO, x, x, x, on, loss_weights=x)[0] == 0


@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_functions_of_the_whole_batch_take_rows_sharded_over_an_explicit_mesh(jit: bool) -> None:
  rng = np.random.default_rng(0)
  x, on = jnp.asarray(rng.normal(size=(8, 6))), jnp.asarray(rng.random((8, 6)) < 0.8)
  logits = jnp.asarray(rng.normal(size=(8, 6, 10)))
  rewards, groups = jnp.arange(8.0), jnp.asarray([7, 3, 7, 3, 7, 3, 1, 1])

  def everything(x: Any, on: Any, logits: Any, rewards: Any, groups: Any) -> Any:
    found = rl.to_groups(rewards, groups, num_groups=3, group_size=3)
    return {
      "entropy": rl.top_entropy_mask(x, on, fraction=0.3),
      "kl_cov": rl.kl_cov_selection(x, x, on, fraction=0.3),
      "clip_cov": rl.clip_cov_selection(jax.random.key(0), x, x, x, on, fraction=0.3, cov_low=-1.0),
      "top_k": jax.grad(lambda y: rl.top_k_kl(y, y * 0, k=3).sum())(logits),
      "groups": found.values,
      "flat": rl.from_groups(found.values, found.slots),
    }

  arrays = (x, on, logits, rewards, groups)
  want = jax.jit(everything)(*arrays)
  mesh = jax.make_mesh((8,), ("data",))
  with jax.set_mesh(mesh):
    placed = jax.device_put(arrays, NamedSharding(mesh, P("data")))
    got = jax.device_get((jax.jit(everything) if jit else everything)(*placed))
  for name, value in got.items():
    np.testing.assert_allclose(value, want[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
  "call",
  [
    lambda x: rl.ppo_clip(jnp.zeros((3, 3)), jnp.zeros((3, 3)), clip_high=x),
    lambda x: rl.dro(jnp.zeros((3, 3)), jnp.zeros((3, 3)), beta=x),
    lambda x: rl.token_logprobs(jnp.zeros((3, 3, 3)), jnp.zeros((3, 3), int), temperature=x),
    lambda x: rl.constant_length(jnp.ones((3, 3), bool), length=x),
    lambda x: rl.truncated(jnp.zeros((3, 3)), jnp.ones((3, 3), bool), cap=x),
    lambda x: loss_and_gradient(ref_logprobs=LOGPROBS, kl=rl.kl_k2, kl_coef=x),
  ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_a_constant_is_one_number(call: Any, jit: bool) -> None:
  with pytest.raises(ValueError, match=r"must be one number, got shape \(3,\)"):
    (jax.jit(call) if jit else call)(jnp.ones(3))
