"""jaxrl_lm.exact.sampled: Monte Carlo agrees with the exact numbers within its own error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from jaxrl_lm.exact import bias_variance, sampled_bias_variance
from tests.laboratory import LANGUAGE, binary_rewards, literal_moments, network, table

REWARDS = binary_rewards(LANGUAGE)


def off_policy():
  old, sampler, ref = (table(LANGUAGE, seed=s).logprobs() for s in (11, 12, 13))
  mask = jnp.broadcast_to(LANGUAGE.mask, old.shape)
  weights = rl.truncated(jnp.where(mask, old - sampler, 0.0), mask, cap=1.5)
  return {
    "old_logprobs": old,
    "sampler_logprobs": sampler,
    "importance_weights": weights,
    "ref_logprobs": ref,
    "kl": rl.kl_k3,
    "kl_coef": 0.3,
  }


def only_prompt(p, policy, given):
  """The same problem with one prompt."""
  one = lambda x: x[p : p + 1] if hasattr(x, "shape") else x
  return policy._replace(params=policy.params[p : p + 1], num_prompts=1), {
    k: one(x) for k, x in given.items()
  }


@pytest.mark.parametrize("regime", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_within_four_standard_errors(x64, regime):
  given = off_policy() if regime == "off" else {}
  policy, given = only_prompt(1, table(LANGUAGE), given)
  rewards, samples = REWARDS[1:], 4000
  given |= {"group_size": 3, "direction": jnp.sin(policy.params)}
  found = sampled_bias_variance(rl.GRPO, policy, rewards, samples=samples, **given)
  exact = bias_variance(rl.GRPO, policy, rewards, **given)
  literal = literal_moments(rl.GRPO, policy, rewards, 0, **given)
  error = np.sqrt(exact.variance / samples)
  np.testing.assert_allclose(found.standard_error, error, rtol=0.1)
  assert np.linalg.norm(found.mean - exact.mean) < 4 * error
  np.testing.assert_array_equal(found.target, exact.target)
  error = np.sqrt((literal.fourth - literal.variance**2) / samples)
  assert np.abs(found.variance - exact.variance) < 4 * error
  assert np.abs(found.directional_variance / exact.directional_variance - 1) < 0.15


@pytest.mark.slow
def test_a_batch_is_the_average_over_prompts(x64):
  """Two prompts whose policies share parameters, each with a group of its own."""
  policy, samples = network(LANGUAGE), 3000
  found = sampled_bias_variance(rl.GRPO, policy, REWARDS, group_size=3, samples=samples)
  exact = bias_variance(rl.GRPO, policy, REWARDS, group_size=3).averaged()
  np.testing.assert_allclose(found.target, exact.target, atol=1e-15)
  assert np.linalg.norm(found.mean - exact.mean) < 4 * found.standard_error[0]
  np.testing.assert_allclose(found.variance, exact.variance, rtol=0.1)
  assert exact.bias[0] > 10 * found.standard_error[0]  # a bias that can be seen
  # The same draws for the same seed.
  again, other = (
    sampled_bias_variance(rl.GRPO, policy, REWARDS, group_size=3, samples=samples, seed=s)
    for s in (0, 1)
  )
  np.testing.assert_array_equal(again.mean, found.mean)
  assert not np.array_equal(other.mean, found.mean)
  # Without a difference in reward there is no update, and no root of a negative variance.
  equal = np.ones_like(REWARDS)
  found = sampled_bias_variance(rl.GRPO, policy, equal, group_size=3, samples=samples)
  np.testing.assert_allclose(found.mean, 0.0, atol=1e-15)
  assert np.all((found.variance >= 0) & (found.standard_error < 1e-15))


def batch_std(rewards, mask):
  return rl.batch_scaled(rewards)


def covariance_clip(key, logprobs, log_ratio, advantages, mask):
  return rl.clip_cov_selection(
    key, logprobs, log_ratio, advantages, mask, fraction=0.3, cov_low=-1.0
  )


def covariance_kl(key, logprobs, log_ratio, advantages, mask):
  return rl.kl_cov_selection(logprobs, advantages, mask, fraction=0.3)


@pytest.mark.parametrize(
  ("objective", "given"),
  [
    (rl.GRPO, {"advantages": batch_std}),
    (rl.REINFORCE_PP_BASELINE, {"advantages": rl.whitened_group_centered}),
    (rl.CLIP_COV, {"select": covariance_clip}),
    (rl.KL_COV, {"select": covariance_kl}),
  ],
  ids=["batch std", "whitened", "clip-cov", "KL-cov"],
)
@pytest.mark.slow
def test_objectives_that_couple_the_batch(x64, objective, given):
  policy, old = table(LANGUAGE), table(LANGUAGE, seed=11).logprobs()
  found = sampled_bias_variance(
    objective, policy, REWARDS, group_size=4, samples=200, old_logprobs=old, **given
  )
  assert found.mean.shape == found.target.shape == (1, policy.params.size)
  assert np.all(found.variance > 0)
  assert np.isfinite(found.mean).all()


def coins(key, logprobs, log_ratio, advantages, mask):
  return jax.random.bernoulli(key, 0.5, mask.shape)


def test_selection_has_a_key_of_its_own(x64):
  """Clip-Cov leaves selected tokens out: by a fair coin, half of the update is left."""
  policy, _ = only_prompt(1, table(LANGUAGE), {})
  exact = bias_variance(rl.BNPO, policy, REWARDS[1:], group_size=3)
  half = sampled_bias_variance(
    rl.CLIP_COV, policy, REWARDS[1:], group_size=3, samples=2000, select=coins
  )
  assert np.linalg.norm(half.mean - exact.mean / 2) < 4 * half.standard_error[0]


def test_bad_inputs(x64):
  policy = table(LANGUAGE)
  measure = functools.partial(sampled_bias_variance, rl.GRPO, policy, REWARDS)
  with pytest.raises(ValueError, match="samples must be at least 2, got 1"):
    measure(group_size=2, samples=1)
  with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
    measure(group_size=0, samples=2)
  with pytest.raises(TypeError, match="need more than the rewards .*: pass `advantages=`"):
    sampled_bias_variance(rl.OPO, policy, REWARDS, group_size=2, samples=2)
  with pytest.raises(ValueError, match=r"advantages of rewards \(2, 2\) and mask \(2, 2, 3\)"):
    measure(group_size=2, samples=2, advantages=lambda rewards, mask: rewards[0])
  with pytest.raises(TypeError, match="selected"):
    sampled_bias_variance(rl.KL_COV, policy, REWARDS, group_size=2, samples=2)
  with pytest.raises(ValueError, match=r"rewards must be .* = \(2, 15\), got \(15,\)"):
    sampled_bias_variance(rl.GRPO, policy, REWARDS[0], group_size=2, samples=2)
  with pytest.raises(ValueError, match="direction must be finite and not 0"):
    measure(group_size=2, samples=2, direction=0 * policy.params)
  with pytest.raises(ValueError, match="update of a sampled batch is not finite"):
    measure(group_size=2, samples=2, advantages=lambda rewards, mask: rewards / 0.0)
