"""jaxrl_lm.exact.vector_field: the expected update as a function, and whether it ascends one."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from jaxrl_lm.exact import (
  bias_variance,
  curl,
  enumerate_language,
  expected_reward,
  expected_update,
  jacobian,
  loop_work,
)
from jaxrl_lm.exact.problem import target_gradient
from tests.laboratory import LANGUAGE, binary_rewards, network, table

SMALL = enumerate_language(3, 2, end_token=2)
SMALL_REWARDS = binary_rewards(SMALL, seed=3)
CONSERVATIVE = {
  "sum, centred": replace(rl.REINFORCE, advantages=rl.group_centered),
  "sum, std": replace(rl.REINFORCE, advantages=rl.group_normalized),
  "sum, leave one out": rl.RLOO,
  "mean, raw rewards": replace(rl.GRPO, advantages=rl.raw_rewards),
}
ROTATING = {
  "GRPO": rl.GRPO,
  "mean, centred": replace(rl.GRPO, advantages=rl.group_centered),
  "token mean": replace(rl.GRPO, advantages=rl.group_centered, loss_weights=rl.token_mean),
}
DEFAULT = {"sum, std", "GRPO"}


def cases(objectives):
  slow = pytest.mark.slow
  return [
    pytest.param(x, id=name, marks=() if name in DEFAULT else slow)
    for name, x in objectives.items()
  ]


def field_of(objective, policy, rewards, group_size=3, **given):
  return jax.jit(expected_update(objective, policy, rewards, group_size=group_size, **given))


@pytest.mark.parametrize("make", [table, network])
def test_equals_the_mean_of_bias_variance(x64, make):
  """Here, and at other parameters than the template's."""
  policy, rewards = make(LANGUAGE), binary_rewards(LANGUAGE)
  field = field_of(rl.GRPO, policy, rewards, 4)
  for p in (policy, make(LANGUAGE, seed=5)):
    found = field(p.params)
    assert jax.tree.structure(found) == jax.tree.structure(policy.params)
    expected = bias_variance(rl.GRPO, p, rewards, group_size=4).averaged().mean[0]
    np.testing.assert_allclose(ravel_pytree(found)[0], expected, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_precision_of_the_parameters(x64):
  """Float32 in, float32 out, also where a prompt lacks a class."""
  rewards = binary_rewards(LANGUAGE)
  rewards[0] = 0.0
  fine, coarse = (network(LANGUAGE, dtype=x) for x in (np.float64, np.float32))
  one, other = (field_of(rl.GRPO, x, rewards)(x.params) for x in (fine, coarse))
  assert {x.dtype for x in jax.tree.leaves(other)} == {np.dtype("float32")}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), other, one)


@pytest.mark.parametrize("objective", cases(CONSERVATIVE))
def test_these_ascend_a_function(x64, objective):
  policy = table(SMALL)
  field = field_of(objective, policy, SMALL_REWARDS)
  assert curl(field, policy.params) < 1e-12
  assert abs(loop_work(field, policy.params, *directions(policy))) < 1e-13


@pytest.mark.parametrize("objective", cases(ROTATING))
def test_these_ascend_none(x64, objective):
  policy = table(SMALL)
  field = field_of(objective, policy, SMALL_REWARDS)
  assert curl(field, policy.params) > 1e-4
  first, second = directions(policy)
  work = loop_work(field, policy.params, first, second)
  assert abs(work) > 1e-6
  # The other way round, and with more points.
  np.testing.assert_allclose(loop_work(field, policy.params, second, first), -work, rtol=1e-9)
  more = loop_work(field, policy.params, first, second, points=128)
  np.testing.assert_allclose(more, work, rtol=1e-9)


def directions(policy):
  rng = np.random.default_rng(2)
  return rng.normal(size=(2, *policy.params.shape))


def test_work_of_a_small_loop_is_the_curl(x64):
  """Stokes: a circle of radius r does work pi r^2 (a^T J^T b - b^T J^T a)."""
  policy = table(SMALL)
  field = field_of(rl.GRPO, policy, SMALL_REWARDS)
  first, second = directions(policy)
  j = jacobian(field, policy.params)
  a, b = first.reshape(-1), second.reshape(-1)
  radius = 1e-3
  found = loop_work(field, policy.params, first, second, radius=radius)
  np.testing.assert_allclose(found, np.pi * radius**2 * (b @ j @ a - a @ j @ b), rtol=1e-4)


def test_jacobian_against_finite_differences(x64):
  policy = network(SMALL)
  field = field_of(rl.GRPO, policy, SMALL_REWARDS)
  flat, unravel = ravel_pytree(policy.params)
  value = jax.jit(lambda x: ravel_pytree(field(unravel(x)))[0])
  found = jacobian(field, policy.params)
  columns = [(value(flat + s) - value(flat - s)) / 2e-5 for s in 1e-5 * np.eye(flat.size)]
  np.testing.assert_allclose(found, np.stack(columns, axis=1), atol=1e-8)


@pytest.mark.slow
def test_the_field_of_reinforce_is_the_gradient(x64):
  policy = network(SMALL)
  field = field_of(rl.RLOO, policy, SMALL_REWARDS)
  expected = target_gradient(policy, SMALL_REWARDS).mean(axis=0)
  np.testing.assert_allclose(ravel_pytree(field(policy.params))[0], expected, atol=1e-14)


def test_a_flow_ascends(x64):
  """The field is jitted once and followed: every step of exact gradient ascent adds to J."""
  policy = table(SMALL)
  field = field_of(rl.RLOO, policy, SMALL_REWARDS)
  value = jax.jit(lambda x: expected_reward(SMALL, policy.logprobs(x), SMALL_REWARDS).mean())
  params, values = policy.params, []
  for _ in range(20):
    values.append(float(value(params)))
    params = params + 0.5 * field(params)
  assert np.all(np.diff(values) > 0)


@pytest.mark.slow
def test_an_excluded_token_stays_excluded(x64):
  policy = table(SMALL)
  shut = policy._replace(params=policy.params.at[:, 0, 0].set(-jnp.inf))
  field = field_of(rl.GRPO, policy, SMALL_REWARDS)
  found = np.asarray(field(shut.params))
  expected = bias_variance(rl.GRPO, shut, SMALL_REWARDS, group_size=3).averaged().mean[0]
  np.testing.assert_allclose(found.reshape(-1), expected, atol=1e-14)
  # The template's excluded tokens do not stay behind in the coefficients.
  template = field_of(rl.GRPO, shut, SMALL_REWARDS)
  np.testing.assert_array_equal(template(policy.params), field(policy.params))


def test_curl_of_known_fields():
  turn = np.array([[0.0, -1.0], [1.0, 0.0]], np.float32)
  one = np.eye(2, dtype=np.float32)
  for matrix, expected in ((turn, 1.0), (one, 0.0), (one + turn, np.sqrt(0.5))):
    field = functools.partial(jnp.matmul, matrix)
    np.testing.assert_allclose(curl(field, jnp.ones(2)), expected, atol=1e-6)
    np.testing.assert_allclose(jacobian(field, jnp.ones(2)), matrix, atol=1e-6)


def unlikely_tokens(log_ratio, advantages, *, mask=None, old_logprobs=None, segment_ids=None):
  gain = rl.reinforce(log_ratio, advantages, mask=mask, old_logprobs=old_logprobs)
  return jnp.where(jax.lax.stop_gradient(log_ratio + old_logprobs) < np.log(0.25), gain, 0.0)


def test_coefficients_that_depend_on_the_parameters(x64):
  """They cannot be tabulated; a uniform template does not hide it."""
  policy = table(SMALL, spread=0.0)
  objective = replace(rl.GRPO, surrogate=unlikely_tokens)
  with pytest.raises(ValueError, match="different coefficients on-policy"):
    expected_update(objective, policy, SMALL_REWARDS, group_size=3)


@pytest.mark.slow
def test_coarser_statistic(x64):
  policy = network(LANGUAGE)
  rewards = binary_rewards(LANGUAGE)
  # On-policy the geometric level takes back the length that it divides by.
  one, other = (
    field_of(rl.LUSPO, policy, rewards, statistic=s)(policy.params) for s in (None, rewards)
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-14), one, other)
  with pytest.raises(ValueError, match="statistic does not determine the loss weights"):
    expected_update(rl.GSPO, policy, rewards, group_size=3, statistic=rewards)


def test_bad_inputs(x64):
  policy = table(SMALL)
  with pytest.raises(ValueError, match="rewards must be"):
    expected_update(rl.GRPO, policy, SMALL_REWARDS[0], group_size=2)
  with pytest.raises(TypeError, match="pass `advantages=`"):
    expected_update(rl.OPO, policy, SMALL_REWARDS, group_size=2)
  with pytest.raises(ValueError, match="more than the limit of 3"):
    expected_update(rl.GRPO, policy, SMALL_REWARDS, group_size=2, max_groups=3)
