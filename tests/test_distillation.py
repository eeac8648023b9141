"""Distillation: limits, excluded tokens, extremes, buckets, meshes, and what its gradients are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_lm as rl
from tests.calls import public_calls

INF = math.inf
DIVERGENCES: dict[str, Callable[..., jax.Array]] = {
  "exact_kl": rl.exact_kl,
  "forward_kl": rl.forward_kl,
  "skewed_forward_kl": partial(rl.skewed_forward_kl, skew=0.1),
  "skewed_reverse_kl": partial(rl.skewed_reverse_kl, skew=0.1),
  "jensen_shannon": partial(rl.jensen_shannon, beta=0.3),
}
BOUNDED = [name for name in DIVERGENCES if not name.endswith(("exact_kl", "forward_kl"))]
BOUNDED += ["skewed_forward_kl"]


def two_logits(seed: int, shape: tuple[int, ...] = (7, 5)) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(seed)
  return 2 * rng.normal(size=shape), 2 * rng.normal(size=shape)


def all_values_and_gradients(logits: Any, teacher: Any) -> Any:
  """{name: (value, gradient in the student's logits)}, compiled at once."""

  @jax.jit
  def run(logits: jax.Array, teacher: jax.Array) -> Any:
    out = {}
    for name, f in DIVERGENCES.items():
      value, pull = jax.vjp(lambda z, f=f: f(z, teacher), logits)
      out[name] = value, pull(jnp.ones_like(value))[0]
    return out

  return jax.device_get(run(logits, teacher))


# -------------------------------------------------------------------------------------- limits


@pytest.mark.usefixtures("x64")
def test_jensen_shannon_between_forward_and_reverse_kl() -> None:
  """beta on a grid, traced. At the ends 0 with gradient 0; close to them JSD / beta is the forward
  and JSD / (1 - beta) the reverse KL, with their gradients; T and S swap with beta and 1 - beta."""
  logits, teacher = two_logits(1)
  near = 1e-7
  betas = jnp.array([0.0, near, 0.3, 0.7, 1 - near, 1.0])

  @jax.jit
  def run(logits: jax.Array, teacher: jax.Array, betas: jax.Array) -> Any:
    def one(f: Callable[..., jax.Array], *args: jax.Array) -> Any:
      value, pull = jax.vjp(lambda z: f(z, *args), logits)
      return value, pull(jnp.ones_like(value))[0]

    js = lambda z, beta: rl.jensen_shannon(z, teacher, beta=beta)
    swapped = jax.vmap(lambda beta: rl.jensen_shannon(teacher, logits, beta=beta))(betas)
    parts = 0.3 * rl.skewed_forward_kl(logits, teacher, skew=0.3)
    parts += 0.7 * rl.skewed_reverse_kl(logits, teacher, skew=0.7)
    kls = [one(f, teacher) for f in (rl.forward_kl, rl.exact_kl)]
    return jax.vmap(lambda beta: one(js, beta))(betas), kls, swapped, parts

  (values, gradients), (forward, reverse), swapped, parts = run(logits, teacher, betas)
  for end in (0, 5):
    assert not values[end].any()
    assert not gradients[end].any()
  for at, limit in ((1, forward), (4, reverse)):
    for got, want in zip((values[at], gradients[at]), limit, strict=True):
      np.testing.assert_allclose(got / near, want, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(swapped[::-1], values, rtol=1e-9, atol=1e-15)
  np.testing.assert_allclose(parts, values[2], rtol=1e-12)


def test_ends_are_the_paper_s_and_not_those_of_the_libraries() -> None:
  logits, teacher = two_logits(2)
  for beta in (0.0, 1.0):
    assert not rl.jensen_shannon(logits, teacher, beta=beta).any()
  assert (rl.forward_kl(logits, teacher) > 0).all()


@pytest.mark.usefixtures("x64")
def test_temperature_divides_both_and_nothing_multiplies() -> None:
  logits, teacher = two_logits(3)
  for f in DIVERGENCES.values():
    np.testing.assert_allclose(
      f(logits, teacher, temperature=0.7), f(logits / 0.7, teacher / 0.7), rtol=1e-12
    )


# ----------------------------------------------------------------------- excluded tokens, extremes

# Student, teacher -> probabilities. Row by row: both exclude a token; the teacher does; the student
# does; they share nothing.
HALF = math.log(0.5)
EXCLUDED = (
  [[HALF, HALF, -INF], [HALF, HALF, HALF], [HALF, HALF, -INF], [0.0, -INF, -INF]],
  [[math.log(0.25), math.log(0.75), -INF], [HALF, HALF, -INF], [HALF, HALF, HALF],
   [-INF, 0.0, -INF]],
)  # fmt: skip


def by_hand(s: np.ndarray, t: np.ndarray, name: str) -> float:
  """Sums over what is possible, in float64."""

  def kl(p: Any, q: Any) -> float:
    return sum(a * (math.log(a / b) if b else INF) for a, b in zip(p, q, strict=True) if a)

  mixed = lambda a, p, q: a * p + (1 - a) * q
  return {
    "exact_kl": lambda: kl(s, t),
    "forward_kl": lambda: kl(t, s),
    "skewed_forward_kl": lambda: kl(t, mixed(0.1, t, s)),
    "skewed_reverse_kl": lambda: kl(s, mixed(0.1, s, t)),
    "jensen_shannon": lambda: 0.3 * kl(t, mixed(0.3, t, s)) + 0.7 * kl(s, mixed(0.3, t, s)),
  }[name]()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_excluded_tokens(dtype: str) -> None:
  """-inf in either or both: finite wherever the sum is, +inf where it is, and never NaN."""
  with jax.enable_x64(dtype == "float64"):
    logits, teacher = (jnp.asarray(x, dtype) for x in EXCLUDED)
    out = all_values_and_gradients(logits, teacher)
  s, t = (np.exp(np.array(x)) / np.exp(np.array(x)).sum(-1, keepdims=True) for x in EXCLUDED)
  for name, (value, gradient) in out.items():
    want = np.array([by_hand(*row, name) for row in zip(s, t, strict=True)])
    np.testing.assert_allclose(value, want, rtol=2e-6, atol=1e-7, err_msg=name)
    finite = np.isfinite(want)
    assert finite.all() or name in ("exact_kl", "forward_kl")
    assert np.isfinite(gradient[finite]).all(), name
    assert not gradient[finite][np.isneginf(np.array(EXCLUDED[0]))[finite]].any(), name
  # A student that excludes what the teacher allows still learns from the other tokens.
  assert np.isfinite(out["forward_kl"][1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_extreme_logits(dtype: str) -> None:
  """Probabilities of exactly 0 and 1; the bounded divergences reach their bounds."""
  big = [[x, -x, 0.0] for x in (0.0, 88.0, 89.0, 1e3, -1e3, 1e30, -1e30)]
  with jax.enable_x64(dtype == "float64"):
    logits = jnp.asarray(big, dtype)
    out = all_values_and_gradients(logits, -logits)
  for name, (value, gradient) in out.items():
    assert value.dtype == ("float64" if dtype == "float64" else "float32")
    assert np.isfinite(value).all(), name
    assert np.isfinite(gradient.astype(float)).all(), name
    assert (value >= 0).all(), name
  bounds = {"skewed_forward_kl": -math.log(0.1), "skewed_reverse_kl": -math.log(0.1)}
  bounds["jensen_shannon"] = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
  for name, bound in bounds.items():
    np.testing.assert_allclose(out[name][0][1:], bound, rtol=1e-6, err_msg=name)


def test_equal_distributions_are_at_no_distance() -> None:
  logits = jnp.asarray(two_logits(4)[0], jnp.float32)
  for name, (value, gradient) in all_values_and_gradients(logits, logits + 3.0).items():
    assert np.abs(value).max() < 1e-6, name
    assert np.abs(gradient).max() < 1e-6, name


# -------------------------------------------------------------------------------------- buckets


def teacher_of(teacher: np.ndarray, ids: np.ndarray) -> np.ndarray:
  logprobs = teacher - np.log(np.exp(teacher).sum(-1, keepdims=True))
  return np.take_along_axis(logprobs, ids, -1)


buckets = jax.jit(rl.top_k_with_tail)


@pytest.mark.usefixtures("x64")
def test_buckets_bound_every_divergence_from_below() -> None:
  """Merging outcomes lowers a divergence; with all tokens kept, in any order, it is the same."""
  logits, teacher = two_logits(5)
  order = np.argsort(-teacher, -1)
  every = jax.jit(lambda *two: {name: f(*two) for name, f in DIVERGENCES.items()})
  full = every(logits, teacher)
  last = dict.fromkeys(full, 0.0)
  for k in range(1, 6):
    ids = order[:, :k] if k < 5 else order[:, ::-1]
    both = buckets(logits, teacher_of(teacher, ids), ids)
    assert both.logprobs.shape == (7, k + 1)
    for x in both:
      np.testing.assert_allclose(np.exp(x).sum(-1), 1.0, rtol=1e-12)
    for name, now in every(*both).items():
      assert (np.asarray(now) >= np.asarray(last[name]) - 1e-12).all(), (name, k)
      assert (np.asarray(now) <= np.asarray(full[name]) + 1e-12).all(), (name, k)
      last[name] = np.asarray(now)
  for name, value in full.items():
    np.testing.assert_allclose(last[name], value, rtol=1e-9, err_msg=name)


@pytest.mark.usefixtures("x64")
def test_without_the_tail_the_kept_tokens_are_normalised_anew() -> None:
  logits, teacher = two_logits(6)
  ids = np.argsort(-teacher, -1)[:, :3]
  both = buckets(logits, teacher_of(teacher, ids), ids)
  got = rl.forward_kl(*(x[..., :-1] for x in both))
  want = rl.forward_kl(*(np.take_along_axis(x, ids, -1) for x in (logits, teacher)))
  np.testing.assert_allclose(got, want, rtol=1e-9)


def test_slots_of_a_teacher() -> None:
  """An empty slot (-inf) is no token whatever its id; wrong ids spoil only their own token."""
  logits, half = jnp.zeros((6, 4)), math.log(0.5)
  ids = jnp.array([[1, 2], [1, -1], [1, 1], [1, 1], [1, 4], [1, -1]])
  teacher = jnp.array([[half, -INF], [half, -INF], [half, -INF], [half, half], [half, -2.0]])
  teacher = jnp.concatenate([teacher, jnp.array([[half, -2.0]])])
  student, other = (np.asarray(x) for x in buckets(logits, teacher, ids))
  for row in range(3):
    np.testing.assert_allclose(np.exp(student[row]), [0.25, 0, 0.75], rtol=1e-6)
    np.testing.assert_allclose(np.exp(other[row]), [0.5, 0, 0.5], rtol=1e-6)
  for row in (3, 4, 5):  # given twice, beyond the vocabulary, negative
    assert np.isnan(student[row]).all()
    assert np.isnan(other[row]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_teacher_that_sums_to_one_up_to_rounding(dtype: str) -> None:
  """No rest, so that a student without one is at a finite distance."""

  @jax.jit
  @partial(jax.value_and_grad, has_aux=True)
  def loss(logits: jax.Array, teacher: jax.Array) -> Any:
    both = rl.top_k_with_tail(logits, teacher, jnp.array([[2, 0, 1]]))
    return rl.forward_kl(*both)[0], both.logprobs[0, -1]

  with jax.enable_x64(dtype == "float64"):
    logits = jnp.array([[0.3, 0.1, 0.2, -INF]], dtype)
    for top in ([0.7, 0.2, 0.1], [0.7, 0.2, 0.1 + 1e-8], [0.71, 0.2, 0.1]):
      teacher = jnp.log(jnp.array([top], dtype))
      (value, rest), gradient = loss(logits, teacher)
      assert np.isneginf(rest)
      assert np.isfinite(value)
      assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_narrow_ids_do_not_wrap(dtype: str) -> None:
  logits = jnp.asarray(two_logits(7, (2, 300))[0])
  ids = np.array([[5, 100], [44, 7]])
  teacher = jnp.full((2, 2), -2.0)
  want = buckets(logits, teacher, jnp.asarray(ids))
  for a, b in zip(buckets(logits, teacher, jnp.asarray(ids, dtype)), want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_nothing_of_size_k_times_v_is_stored() -> None:
  """64 tokens, V = 4096, K = 32: [T, V] is 1 MB, [T, V, K] would be 32."""

  def loss(logits: jax.Array, teacher: jax.Array, ids: jax.Array) -> jax.Array:
    return rl.forward_kl(*rl.top_k_with_tail(logits, teacher, ids)).sum()

  shapes = [jax.ShapeDtypeStruct((64, n), t) for n, t in ((4096, "f4"), (32, "f4"), (32, "i4"))]
  compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 10 * 2**20


# ------------------------------------------------------------------------------ sharded vocabulary


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_vocabulary(axis_type: AxisType) -> None:
  """Rows over two devices, the vocabulary over four; values and gradients."""
  logits, teacher = (jnp.asarray(x, jnp.float32) for x in two_logits(8, (2, 4, 8)))
  ids = jnp.argsort(-teacher, -1)[..., :3]
  kept = jnp.asarray(teacher_of(np.asarray(teacher), np.asarray(ids)))

  def losses(logits: jax.Array, teacher: jax.Array, kept: jax.Array, ids: jax.Array) -> Any:
    out = {name: f(logits, teacher) for name, f in DIVERGENCES.items()}
    both = rl.top_k_with_tail(logits, kept, ids)
    return out | {"buckets": rl.jensen_shannon(*both, beta=0.5)}

  @jax.jit
  def run(logits: jax.Array, *others: jax.Array) -> Any:
    values, pull = jax.vjp(lambda z: losses(z, *others), logits)
    return values, pull(jax.tree.map(jnp.ones_like, values))[0]

  want = jax.device_get(run(logits, teacher, kept, ids))
  mesh = jax.make_mesh((2, 4), ("data", "model"), (axis_type,) * 2)
  with jax.set_mesh(mesh):
    vocabulary = NamedSharding(mesh, P("data", None, "model"))
    rows = NamedSharding(mesh, P("data", None, None))
    got = run(
      *(jax.device_put(x, vocabulary) for x in (logits, teacher)),
      *(jax.device_put(x, rows) for x in (kept, ids)),
    )
  for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Everything of this kind in the table of calls, whose arrays have two groups or rows in front.
ROWS = [
  call
  for call in public_calls()
  if getattr(rl, call.name).__module__.rpartition(".")[2]
  in ("distillation", "kl_control", "online_preferences", "process_rewards", "supervised")
  and all(x.shape[0] == 2 for x in call.arrays.values())
]


def every_call(arrays: dict[str, dict[str, Any]]) -> dict[str, Any]:
  return {call.name: tuple(jax.tree.leaves(call(**arrays[call.name]))) for call in ROWS}


@pytest.mark.parametrize("how", [AxisType.Auto, AxisType.Explicit, "vmap"])
def test_rows_do_not_know_of_each_other(how: Any) -> None:
  """Spread over two devices, or mapped over, every function gives what it gives at once."""
  assert len(ROWS) == 17
  arrays = {call.name: call.arrays for call in ROWS}
  want = jax.device_get(jax.jit(every_call)(arrays))
  if how == "vmap":
    got = jax.jit(jax.vmap(every_call))(arrays)
  else:
    mesh = jax.make_mesh((2,), ("data",), (how,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
      got = jax.jit(every_call)(jax.device_put(arrays, NamedSharding(mesh, P("data"))))
  for name, leaves in jax.device_get(got).items():
    for a, b in zip(leaves, want[name], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


# ----------------------------------------------------------------------- what the gradients are


@pytest.mark.usefixtures("x64")
def test_advantages_give_the_gradient_of_the_reverse_kl() -> None:
  """E over the student's tokens of A grad log S, summed over the vocabulary, is -grad KL(S || T);
  and the mean advantage is -KL(S || T)."""
  logits, teacher = two_logits(9)
  tokens = jnp.broadcast_to(jnp.arange(5), (7, 5))
  everywhere = jnp.ones((7, 5), bool)

  @jax.jit
  @partial(jax.value_and_grad, has_aux=True)
  def expected_gain(z: jax.Array) -> Any:
    every = lambda x: jnp.broadcast_to(x[:, None], (7, 5, 5))
    lp = rl.token_logprobs(every(z), tokens)
    t = rl.token_logprobs(every(jnp.asarray(teacher)), tokens)
    advantages = rl.distillation_advantages(lp, t, everywhere)
    gain = rl.reinforce(rl.on_policy_log_ratio(lp, everywhere), advantages)
    p = jax.lax.stop_gradient(jnp.exp(lp))
    return jnp.sum(p * gain), jnp.sum(p * advantages, -1)

  (_, means), gradient = expected_gain(jnp.asarray(logits))
  value, pull = jax.vjp(lambda z: rl.exact_kl(z, teacher), jnp.asarray(logits))
  np.testing.assert_allclose(means, -value, rtol=1e-9)
  np.testing.assert_allclose(gradient, -pull(jnp.ones_like(value))[0], rtol=1e-9, atol=1e-12)


def test_a_token_that_the_teacher_excludes() -> None:
  """The reverse KL is infinite there, and so is the advantage: not NaN, not a large number."""
  on = jnp.ones(1, bool)
  assert rl.distillation_advantages(jnp.array([-1.0]), jnp.array([-INF]), on)[0] == -INF
