"""jaxrl_lm.reward_transforms: goldens, subsets, unbiasedness. Properties: test_advantages.py."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_lm import advantages, masks
from jaxrl_lm import reward_transforms as transforms
from tests import reference


def close(actual, expected, rtol=1e-6, atol=0.0):
  np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


# -- pass_at_k -------------------------------------------------------------------------------


@functools.cache
def compiled(k):
  return jax.jit(lambda rewards, where: transforms.pass_at_k(rewards, k=k, where=where))


@pytest.mark.parametrize("k", [2, 3, 4, 6])
def test_pass_at_k_against_all_subsets(k):
  """Ragged groups, ties, negative rewards; fewer than k samples give 0."""
  rng = np.random.default_rng(k)
  rewards = rng.normal(size=(6, 6)).astype(np.float32)
  rewards[1] = rng.integers(0, 3, 6)
  rewards[2] = [1, 1, 0, 0, 1, 0]
  rewards[3] = [2, 2, 2, 2, 2, 1]
  where = rng.random((6, 6)) > 0.25
  where[:3] = True
  result = np.asarray(compiled(k)(rewards, where))
  for row, valid, r in zip(result, where, rewards, strict=True):
    expected = np.zeros(6)
    if valid.sum() >= k:
      expected[valid] = reference.pass_at_k([float(x) for x in r[valid]], k)
    close(row, expected, rtol=2e-6, atol=1e-6)


def test_pass_at_k_golden():
  # n = 4, k = 2, one success: 4 / 6 for each of its 3 pairs = 2. Two successes: 2 pairs each.
  close(transforms.pass_at_k(jnp.array([1.0, 0.0, 0.0, 0.0]), k=2), [2.0, 0.0, 0.0, 0.0])
  close(transforms.pass_at_k(jnp.array([1.0, 0.0, 1.0, 0.0]), k=2), [4 / 3, 0.0, 4 / 3, 0.0])


@pytest.mark.parametrize("size", [2, 5])
def test_k_equal_to_the_group_is_best_less_second(size):
  """Times G, the mean over samples; verl's GRPO pass@k is this over G (std + eps)."""
  rewards = np.random.default_rng(0).normal(size=(3, size)).astype(np.float32)
  rewards[2, :2] = rewards[2].max() + 1  # two best: no one is missed
  second, best = np.sort(rewards, axis=-1)[:, -2:].T
  is_best = rewards == best[:, None]
  expected = np.where(is_best, size * (best - second)[:, None], 0)
  close(transforms.pass_at_k(rewards, k=size), expected, rtol=1e-6)


def test_tied_samples_get_the_same_to_the_bit():
  rewards = jnp.array([0.3, 0.7, 0.1, 0.7, 0.3, 0.7, 0.3])
  for k in (2, 3, 5):
    result = np.asarray(transforms.pass_at_k(rewards, k=k))
    assert len(set(result[[1, 3, 5]])) == 1
    assert len(set(result[[0, 4, 6]])) == 1


def test_large_groups_do_not_overflow():
  """C(256, 128) is 6e75. One success: n C(n - 1, k - 1) / C(n, k) = k."""
  rewards = jnp.zeros(256).at[17].set(1.0)
  result = np.asarray(jax.jit(functools.partial(transforms.pass_at_k, k=128))(rewards))
  close(result[17], 128.0, rtol=1e-4)
  assert not np.any(np.delete(result, 17))


def test_pass_at_k_is_unbiased():
  """Enumerated: E over groups of mean_i A_i grad log p(y_i) = grad E[max of k]."""
  theta, rewards, size, k = np.array([0.3, -0.2, 0.5]), np.array([0.0, 1.0, 3.0]), 4, 3
  p = np.exp(theta) / np.exp(theta).sum()
  score = np.eye(3) - p  # row y: gradient of log p(y) by theta
  groups = np.array(list(itertools.product(range(3), repeat=size)))
  estimates = np.asarray(
    compiled(k)(rewards[groups].astype(np.float32), np.ones(groups.shape, bool))
  )
  estimate = sum(
    p[g].prod() * np.mean(a[:, None] * score[g], axis=0)
    for g, a in zip(groups, estimates, strict=True)
  )
  exact = sum(
    p[list(ys)].prod() * rewards[list(ys)].max() * score[list(ys)].sum(0)
    for ys in itertools.product(range(3), repeat=k)
  )
  close(estimate, exact, rtol=1e-5, atol=1e-6)


# -- the others ------------------------------------------------------------------------------


def test_mean_normalized_golden():
  # One success of four: (1 - 1/4) / (1/4) = 3, -1. Of -1, 1: the mean is 0. Of -3, 1: it is -1.
  rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [-1.0, 1.0, -1.0, 1.0], [-3.0, 1.0, -3.0, 1.0]])
  close(transforms.mean_normalized(rewards), [[3.0, -1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4])
  assert not np.any(transforms.mean_normalized(jnp.zeros((1, 4))))


def test_signal_scaled_golden():
  # Five valid samples, two of them in the group with spread: times 5/2.
  rewards = jnp.array([[1.0, 0.0, 9.0], [1.0, 1.0, 1.0]])
  where = jnp.array([[True, True, False], [True, True, True]])
  result = transforms.signal_scaled(rewards, where=where)
  close(result, [[1.25, -1.25, 0.0], [0.0, 0.0, 0.0]])
  assert not np.any(transforms.signal_scaled(jnp.ones((2, 3))))


def test_signal_fraction_of_the_whole_batch_under_shard_map():
  mesh = jax.make_mesh((8,), ("data",))
  rewards = np.random.default_rng(0).integers(0, 2, (8, 3)).astype(np.float32)
  rewards[0] = 1

  def local(rewards):
    signal = advantages.has_signal(rewards)
    fraction = jax.lax.pmean(masks.masked_mean(signal, jnp.ones_like(signal)), "data")
    return transforms.signal_scaled(rewards, signal_fraction=fraction)

  split = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  rows = jax.device_put(rewards, NamedSharding(mesh, P("data")))
  close(jax.jit(split)(rows), transforms.signal_scaled(rewards), rtol=1e-6)


def test_multi_reward_golden():
  # Standardised (ddof 1, pairs): +-1/sqrt(2) each, whatever the scale; 2 - 1 = 1 and -1.
  rewards = jnp.array([[[1.0, 0.0]], [[0.0, 900.0]]])
  result = transforms.multi_reward_normalized(rewards, weights=jnp.array([2.0, 1.0]), eps=0.0)
  close(result, [[0.5**0.5, -(0.5**0.5)]])


def test_one_reward_is_grpo():
  rewards = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
  result = transforms.multi_reward_normalized(rewards[None], weights=[1.0], ddof=0, eps=1e-4)
  np.testing.assert_array_equal(result, advantages.group_normalized(rewards, ddof=0, eps=1e-4))


def test_a_reward_may_be_missing_for_a_sample():
  """Excluded from that reward alone: it counts in the other."""
  rewards = jnp.array([[1.0, 0.0, jnp.nan], [0.0, 1.0, 2.0]])
  where = jnp.array([[True, True, False], [True, True, True]])
  result = transforms.multi_reward_normalized(
    rewards, weights=jnp.ones(2), where=where, ddof=0, eps=0.0
  )
  second = (1.5) ** 0.5  # deviations -1, 0, 1: variance 2/3
  close(result, [1 - second, -1.0, second])


def test_weights_are_constants():
  rewards = jnp.array([[1.0, 0.0], [0.0, 2.0]])

  def total(weights):
    return jnp.sum(transforms.multi_reward_normalized(rewards, weights=weights) ** 2)

  np.testing.assert_array_equal(jax.grad(total)(jnp.array([1.0, 3.0])), 0.0)


# -- errors ----------------------------------------------------------------------------------

R = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda: transforms.pass_at_k(R, k=1), ValueError, "k must"),
    (lambda: transforms.pass_at_k(R, k=4), ValueError, r"k must.*4.*\(2, 3\)"),
    (lambda: transforms.pass_at_k(R, k=2.0), TypeError, "k must"),
    (lambda: transforms.pass_at_k(R, k=2, where=R), TypeError, "where"),
    (lambda: transforms.mean_normalized(R, where=np.ones(3, bool)), ValueError, "where"),
    (lambda: transforms.signal_scaled(R, where=np.ones((3, 2), bool)), ValueError, "where"),
    (lambda: transforms.signal_scaled(R, signal_fraction=1.5), ValueError, "signal_fraction"),
    (
      lambda: transforms.signal_scaled(R, signal_fraction=np.ones(1)),
      ValueError,
      "signal_fraction",
    ),
    (lambda: transforms.multi_reward_normalized(R[0], weights=[1.0]), ValueError, "rewards"),
    (lambda: transforms.multi_reward_normalized(R, weights=[1.0]), ValueError, "weights"),
    (lambda: transforms.multi_reward_normalized(R, weights=1.0), ValueError, "weights"),
    (lambda: transforms.multi_reward_normalized(R, weights=[1, 1], ddof=2), ValueError, "ddof"),
  ],
)
def test_bad_inputs(call, error, message):
  with pytest.raises(error, match=message):
    call()
