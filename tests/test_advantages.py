"""jaxrl_lm.advantages: goldens, and the properties of every estimator of groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_lm import advantages as adv
from jaxrl_lm import masks, whitening
from jaxrl_lm import reward_transforms as transforms

LENGTHS = np.array([3, 1, 7, 2, 5])


def several(rewards, where=None):
  """Two rewards, the second of another scale, for the interface of one."""
  rewards = jnp.stack([rewards, jnp.abs(rewards) * 8])
  where = None if where is None else jnp.stack([where, where])
  return transforms.multi_reward_normalized(rewards, weights=jnp.array([1.0, 0.5]), where=where)


ESTIMATORS = {
  "raw_rewards": adv.raw_rewards,
  "group_centered": adv.group_centered,
  "group_normalized": adv.group_normalized,
  "group_normalized_plain": functools.partial(adv.group_normalized, ddof=0, eps=0.0),
  "leave_one_out": adv.leave_one_out,
  "leave_one_out_normalized": adv.leave_one_out_normalized,
  "batch_scaled": adv.batch_scaled,
  "greedy_baseline": lambda r, where=None: adv.greedy_baseline(
    r, jnp.full_like(r[..., 0], 0.5), where=where
  ),
  "length_weighted_baseline": lambda r, where=None: adv.length_weighted_baseline(
    r, jnp.zeros_like(r) + LENGTHS[: r.shape[-1]].reshape((1,) * (r.ndim - 1) + (-1,)), where=where
  ),
  "pass_at_2": functools.partial(transforms.pass_at_k, k=2),
  "pass_at_4": functools.partial(transforms.pass_at_k, k=4),
  "mean_normalized": transforms.mean_normalized,
  "signal_scaled": transforms.signal_scaled,
  "multi_reward_normalized": several,
}
COUPLES_GROUPS = {"batch_scaled", "signal_scaled"}
FOLLOWS_PLACES = {"length_weighted_baseline"}  # its lengths are fixed above
BASELINE_FROM_GROUP = sorted(set(ESTIMATORS) - {"raw_rewards", "greedy_baseline"})
EVERY = pytest.mark.parametrize("name", sorted(ESTIMATORS))


@jax.jit
def every(rewards, where):
  """One program of all estimators: compiling them one by one would take most of the time."""
  return {name: estimator(rewards, where=where) for name, estimator in ESTIMATORS.items()}


def run(name, rewards, where):
  return np.asarray(every(rewards, where)[name])


def batch(dtype=np.float32):
  """Four groups of five: ragged, with ties, with one valid sample, without signal."""
  rewards = np.random.default_rng(0).normal(size=(4, 5)).astype(dtype) + 0.5
  rewards[1] = [1, 0, 1, 0, 0]
  rewards[3] = 0.7
  where = np.ones((4, 5), bool)
  where[0, 2] = where[1, 4] = False
  where[2, 1:] = False
  return rewards, where


def close(actual, expected, rtol=1e-6, atol=0.0):
  np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


# -- goldens ---------------------------------------------------------------------------------


def test_ddof_golden():
  """[0, 0, 0, 1]: mean 1/4; squares 3/16 + 9/16 = 3/4; std sqrt(3)/4 (ddof 0), 1/2 (ddof 1)."""
  rewards = jnp.array([0.0, 0.0, 0.0, 1.0])
  plain = functools.partial(adv.group_normalized, eps=0.0)
  close(plain(rewards, ddof=0), [-1 / 3**0.5] * 3 + [3**0.5])  # -.57735, 1.732051
  close(plain(rewards, ddof=1), [-0.5, -0.5, -0.5, 1.5])
  # Two samples: ddof alone is a factor sqrt(2).
  pair = jnp.array([1.0, 0.0])
  close(plain(pair, ddof=0), [1.0, -1.0])
  close(plain(pair, ddof=1), [0.5**0.5, -(0.5**0.5)])


def test_epsilon_is_added_to_the_standard_deviation():
  # std of [0, 0, 0, 1] is 1/2 (ddof 1): 0.75 / (0.5 + 0.25) = 1, -0.25 / 0.75 = -1/3.
  close(adv.group_normalized(jnp.array([0.0, 0.0, 0.0, 1.0]), eps=0.25), [-1 / 3] * 3 + [1.0])


def test_defaults_are_ddof_1_and_1e_6():
  rewards = jnp.array([1.0, 2.0, 6.0])
  same = adv.group_normalized(rewards, ddof=1, eps=1e-6)
  np.testing.assert_array_equal(adv.group_normalized(rewards), same)
  # Deviations -2, -1, 3: squares 14, std sqrt(14 / 2) = sqrt(7).
  close(same, np.array([-2.0, -1.0, 3.0]) / 7**0.5, rtol=2e-6)


def test_groups_do_not_mix():
  """[1, 0], [0, 1], [5, 7]: means .5, .5, 6, not one mean of the batch."""
  rewards = jnp.array([[1.0, 0.0], [0.0, 1.0], [5.0, 7.0]])
  close(adv.group_centered(rewards), [[0.5, -0.5], [-0.5, 0.5], [-1.0, 1.0]])
  close(adv.leave_one_out(rewards), [[1.0, -1.0], [-1.0, 1.0], [-2.0, 2.0]])


def test_leave_one_out_normalized_golden():
  # [0, 2, 4, 0]: for the 4 the others are 0, 2, 0: mean 2/3, variance (4/9 + 16/9 + 4/9)/2 = 4/3.
  result = adv.leave_one_out_normalized(jnp.array([0.0, 2.0, 4.0, 0.0]), eps=0.0)
  # For a 0: others 2, 4, 0: mean 2, std 2. For the 2: others 0, 4, 0: mean 4/3, variance 16/3.
  close(result, [-1.0, (2 / 3) / (16 / 3) ** 0.5, (10 / 3) / (4 / 3) ** 0.5, -1.0])
  # Where the others are equal nothing is divided: no closed-form variance of 1e-8 either.
  close(adv.leave_one_out_normalized(jnp.array([0.1, 0.1, 0.1, 0.9]))[3], 0.8)
  pair = jnp.array([0.1, 0.9])
  np.testing.assert_array_equal(adv.leave_one_out_normalized(pair), adv.leave_one_out(pair))


def test_batch_scaled_golden():
  # Centred: +-1, 0, 0. Batch 1, -1, 3, 3: mean 1.5, squares .25 + 6.25 + 2.25 + 2.25 = 11.
  result = adv.batch_scaled(jnp.array([[1.0, -1.0], [3.0, 3.0]]), eps=0.0)
  close(result, np.array([[1.0, -1.0], [0.0, 0.0]]) / (11 / 3) ** 0.5)


def test_greedy_baseline_golden():
  result = adv.greedy_baseline(jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([1.0, 0.25]))
  close(result, [[0.0, -1.0], [0.75, 0.75]])  # equal rewards above the greedy one do teach


def test_length_weighted_baseline_golden():
  # (1 * 1 + 0 * 2 + 2 * 5) / 8 = 11/8.
  result = adv.length_weighted_baseline(jnp.array([1.0, 0.0, 2.0]), jnp.array([1, 2, 5]))
  close(result, [-3 / 8, -11 / 8, 5 / 8])
  # No tokens at all: the plain mean.
  result = adv.length_weighted_baseline(jnp.array([1.0, 0.0]), jnp.array([0, 0]))
  close(result, [0.5, -0.5])


# -- groups without a signal -----------------------------------------------------------------


@pytest.mark.parametrize("name", BASELINE_FROM_GROUP)
def test_group_without_spread_gives_exactly_zero(name):
  """Equal rewards whose mean is not representable, one sample, no sample; the last has signal."""
  rewards = np.full((4, 5), 0.7, np.float32)
  rewards[1, 1:] = 1e30
  rewards[2] = np.nan
  rewards[3] = [1, 0, 0, 1, 0]
  where = np.array([[True] * 5, [True] + [False] * 4, [False] * 5, [True] * 5])
  result = run(name, rewards, where)
  assert not np.any(result[:3])
  assert np.all(np.isfinite(result[3]))
  assert np.any(result[3])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("value", [0.1, 0.7, -1000.01, 1e-20, 0.0])
def test_equal_rewards_are_zero_at_every_size(size, value):
  rewards = jnp.full((1, size), value)
  assert not np.any(adv.group_normalized(rewards, eps=0.0))
  assert not np.any(adv.leave_one_out(rewards))
  assert not np.any(adv.has_signal(rewards))


def test_rounding_is_not_a_signal_and_more_is():
  """The threshold is 4 machine eps times the largest |r|: rewards summed in another order."""
  eps = np.finfo(np.float32).eps
  below = np.array([1, 1 + 2 * eps, 1 + 4 * eps], np.float32)
  above = np.array([1, 1 + 2 * eps, 1 + 6 * eps], np.float32)
  assert not np.any(adv.group_normalized(below, eps=0.0))
  assert np.all(np.asarray(adv.group_normalized(above, eps=0.0)) != 0)
  np.testing.assert_array_equal(adv.has_signal(np.stack([below, above])), [False, True])
  assert not adv.has_signal(-below)


def test_precision_is_relative_to_the_spread():
  """1000 +- 0.01 in float32: two passes keep it, a one-pass variance is off by orders."""
  rewards = (1000 + 0.01 * np.random.default_rng(0).normal(size=(3, 8))).astype(np.float32)
  wide = rewards.astype(np.float64)
  center = wide - wide.mean(-1, keepdims=True)
  close(adv.group_centered(rewards), center, atol=1e-9, rtol=1e-5)
  expected = center / wide.std(-1, ddof=1, keepdims=True)
  close(adv.group_normalized(rewards, eps=0.0), expected, rtol=1e-4, atol=1e-6)


def test_has_signal_counts_only_valid_samples():
  rewards = jnp.array([[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
  where = jnp.array([[True, False, True], [True, True, False]])
  np.testing.assert_array_equal(adv.has_signal(rewards, where=where), [False, True])
  np.testing.assert_array_equal(adv.has_signal(rewards), [True, True])


# -- excluded samples ------------------------------------------------------------------------


@EVERY
def test_excluded_samples_change_no_bit(name):
  rewards, where = batch()
  clean = run(name, np.where(where, rewards, 0), where)
  assert not np.any(clean[~where])
  for garbage in (np.nan, np.inf, -np.inf, 1e30):
    dirty = run(name, np.where(where, rewards, garbage).astype(np.float32), where)
    np.testing.assert_array_equal(dirty, clean)


def test_excluded_lengths_and_greedy_rewards_are_not_read():
  rewards, where = batch()
  where[2] = False
  lengths = np.where(where, LENGTHS[None], 0).astype(np.float32)
  clean = adv.length_weighted_baseline(rewards, lengths, where=where)
  dirty = adv.length_weighted_baseline(rewards, np.where(where, lengths, np.nan), where=where)
  np.testing.assert_array_equal(dirty, clean)
  greedy = np.where(where.any(-1), 0.5, np.nan).astype(np.float32)
  assert np.all(np.isfinite(adv.greedy_baseline(rewards, greedy, where=where)))


@pytest.mark.parametrize("name", sorted(set(BASELINE_FROM_GROUP) - COUPLES_GROUPS - FOLLOWS_PLACES))
def test_subset_by_where_equals_the_smaller_group(name):
  """A ragged group is worth what it is worth alone."""
  rewards, _ = batch()
  where = np.array([[True, True, False, True, True]] * 4)
  compact = rewards[:, where[0]]
  close(
    run(name, rewards, where)[:, where[0]],
    run(name, compact, np.ones_like(compact, bool)),
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - COUPLES_GROUPS))
def test_nan_that_counts_stays_in_its_group_and_is_seen(name):
  rewards, where = batch()
  clean = run(name, rewards, where)
  rewards[0, 0] = np.nan
  dirty = run(name, rewards, where)
  assert np.isnan(dirty[0, 0])
  assert not np.any(dirty[~where])
  np.testing.assert_array_equal(dirty[1:], clean[1:])


# -- transformations -------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - FOLLOWS_PLACES))
def test_permutation_within_groups(name):
  rewards, where = batch()
  order = np.array([3, 0, 4, 2, 1])
  permuted = run(name, rewards[:, order], where[:, order])
  close(permuted, run(name, rewards, where)[:, order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["leave_one_out_normalized", "pass_at_4"])
def test_jit_equals_eager(name):
  rewards, where = batch()
  eager = ESTIMATORS[name](jnp.asarray(rewards), where=jnp.asarray(where))
  close(run(name, rewards, where), eager, rtol=1e-6, atol=1e-7)


mapped = jax.jit(jax.vmap(every))


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - COUPLES_GROUPS))
def test_groups_are_independent(name):
  rewards, where = batch()
  whole = run(name, rewards, where)
  np.testing.assert_array_equal(mapped(rewards, where)[name], whole)
  close(run(name, rewards[1], where[1]), whole[1], rtol=1e-6)


@EVERY
def test_leading_axes(name):
  rewards, where = batch()
  deep = run(name, rewards.reshape(2, 2, 5), where.reshape(2, 2, 5))
  close(deep, run(name, rewards, where).reshape(2, 2, 5), rtol=1e-6, atol=1e-7)


jacobians = jax.jit(jax.jacfwd(every))


@EVERY
def test_result_is_a_constant(name):
  """Exactly 0, not NaN, also where the standard deviation is 0."""
  rewards, where = batch()
  np.testing.assert_array_equal(jacobians(rewards, where)[name], 0.0)


def test_constants_carry_no_gradient():
  rewards = jnp.array([[1.0, 0.0, 3.0]])
  for function in (
    lambda eps: adv.group_normalized(rewards, eps=eps),
    lambda eps: adv.leave_one_out_normalized(rewards, eps=eps),
    lambda x: adv.batch_scaled(rewards, moments=(x, x)),
    lambda x: adv.greedy_baseline(rewards, x[None]),
    lambda x: adv.length_weighted_baseline(rewards, jnp.ones((1, 3)) * x),
  ):
    assert jax.grad(lambda x, f=function: jnp.sum(f(x) ** 2))(jnp.float32(0.5)) == 0.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_widened(dtype):
  rewards, where = batch()
  narrow = jnp.asarray(rewards, dtype)
  wide, expected = every(narrow, where), every(narrow.astype(jnp.float32), where)
  for name in ESTIMATORS:
    assert wide[name].dtype == jnp.float32
    if name not in FOLLOWS_PLACES:  # its lengths would be rounded too
      close(wide[name], expected[name], rtol=1e-6, atol=1e-7)


def test_double_precision_stays_and_float32_is_not_widened(x64):
  rewards, where = batch(np.float64)
  for dtype in (np.float32, np.float64):
    shapes = jax.eval_shape(every, rewards.astype(dtype), where)
    assert {name: x.dtype for name, x in shapes.items()} == dict.fromkeys(ESTIMATORS, dtype)
  expected = (rewards[0, [0, 1, 3, 4]] - rewards[0, [0, 1, 3, 4]].mean()) / (
    rewards[0, [0, 1, 3, 4]].std(ddof=1) + 1e-6
  )
  close(adv.group_normalized(rewards, where=where)[0, [0, 1, 3, 4]], expected, rtol=1e-12)


def test_whole_numbers_and_booleans_are_rewards():
  expected = adv.leave_one_out(jnp.array([[1.0, 0.0, 0.0]]))
  np.testing.assert_array_equal(adv.leave_one_out(np.array([[1, 0, 0]])), expected)
  np.testing.assert_array_equal(adv.leave_one_out(jnp.array([[True, False, False]])), expected)


def test_leave_one_out_is_centred_times_n_over_n_minus_1():
  rewards, where = batch()
  n = where.sum(-1, keepdims=True)
  factor = np.where(n > 1, n / np.maximum(n - 1, 1), 0)
  centered = np.asarray(adv.group_centered(rewards, where=where))
  close(adv.leave_one_out(rewards, where=where), factor * centered, rtol=1e-6)


def test_constants_may_be_traced_and_mapped():
  rewards = jnp.array([[1.0, 0.0, 0.0, 0.0]])
  swept = jax.vmap(lambda eps: adv.group_normalized(rewards, eps=eps))(jnp.array([0.0, 0.25]))
  close(swept[:, 0, 0], [1.5, 1.0])  # 0.75 / 0.5, 0.75 / 0.75


# -- devices ---------------------------------------------------------------------------------


def test_moments_of_the_whole_batch_under_shard_map():
  mesh = jax.make_mesh((8,), ("data",))
  rewards = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
  where = np.random.default_rng(2).random((8, 4)) > 0.2
  where[0] = False
  expected = adv.batch_scaled(rewards, where=where)
  moments = whitening.masked_moments(rewards, where)

  def local(rewards, where, moments):
    return adv.batch_scaled(rewards, where=where, moments=moments)

  def reduced_inside(rewards, where):
    number = jax.lax.psum(jnp.sum(where), "data")
    mean = jax.lax.psum(masks.masked_sum(rewards, where), "data") / number
    squares = jax.lax.psum(masks.masked_sum((rewards - mean) ** 2, where), "data")
    return adv.batch_scaled(rewards, where=where, moments=(mean, squares / (number - 1)))

  rows = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (rewards, where)]
  split = functools.partial(jax.shard_map, mesh=mesh, out_specs=P("data"))
  given = split(local, in_specs=(P("data"), P("data"), P()))
  close(jax.jit(given)(*rows, moments), expected, rtol=1e-6)
  inside = split(reduced_inside, in_specs=P("data"))
  close(jax.jit(inside)(*rows), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "axis_type",
  [
    pytest.param(jax.sharding.AxisType.Auto, marks=pytest.mark.slow),
    jax.sharding.AxisType.Explicit,
  ],
  ids=str,
)
def test_sharded_rows_agree(axis_type):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
  rewards, where = batch()

  expected = every(rewards, where)
  with jax.set_mesh(mesh):
    rows = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (rewards, where)]
    actual = every(*rows)
  for name in ESTIMATORS:
    close(actual[name], expected[name], rtol=1e-6, atol=1e-7)


# -- errors ----------------------------------------------------------------------------------

R = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda: adv.group_centered(R, where=np.ones((2, 4), bool)), ValueError, r"where.*\(2, 4\)"),
    (lambda: adv.group_centered(R, where=np.ones((2, 3))), TypeError, "where must be boolean"),
    (lambda: adv.group_centered(np.float32(1)), ValueError, "rewards"),
    (lambda: adv.group_centered(R + 1j), TypeError, "rewards"),
    (lambda: adv.group_normalized(R, ddof=2), ValueError, "ddof"),
    (lambda: adv.group_normalized(R, ddof=-1), ValueError, "ddof"),
    (lambda: adv.group_normalized(R, eps=-1e-6), ValueError, "eps"),
    (lambda: adv.group_normalized(R, eps=np.zeros(3)), ValueError, "eps"),
    (lambda: adv.leave_one_out_normalized(R, eps=-1.0), ValueError, "eps"),
    (lambda: adv.batch_scaled(R, ddof=3), ValueError, "ddof"),
    (lambda: adv.batch_scaled(R, moments=(R, R)), ValueError, "variance"),
    (lambda: adv.greedy_baseline(R, np.zeros(3)), ValueError, r"greedy_rewards.*\(3,\)"),
    (lambda: adv.greedy_baseline(R, R), ValueError, "greedy_rewards"),
    (lambda: adv.length_weighted_baseline(R, np.zeros(2)), ValueError, r"lengths.*\(2,\)"),
  ],
)
def test_bad_inputs(call, error, message):
  with pytest.raises(error, match=message):
    call()
