"""jaxrl_lm.exact.backward_induction: against a recursion over the tree, and closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from jaxrl_lm.exact import (
  entropy,
  enumerate_language,
  expected_reward,
  first_token_reward,
  kl_divergence,
  pass_at_k,
  regularised_optimum,
  regularised_reward,
  response_probs,
  tabular_policy,
  token_values,
)
from jaxrl_lm.exact.backward_induction import check_distribution
from jaxrl_lm.exact.problem import target_gradient
from tests.laboratory import LANGUAGE, network, table

values_of = jax.jit(token_values)
optimum_of = jax.jit(regularised_optimum)
MASK = LANGUAGE.mask
REWARDS = np.random.default_rng(9).normal(size=(2, len(LANGUAGE.tokens)))


def prefixes(language):
  """State of each prefix, and reward index of each response, as dictionaries."""
  states = {}
  for n, t in np.argwhere(language.mask):
    states[tuple(language.tokens[n, :t].tolist())] = language.states[n, t]
  lengths = language.mask.sum(axis=1)
  responses = {tuple(y[:n].tolist()): i for i, (y, n) in enumerate(zip(language.tokens, lengths))}
  return states, responses


def tree_values(language, logits, rewards):
  """V and Q by recursion: the value of a prefix is the mean over its next tokens."""
  states, responses = prefixes(language)
  values, action_values = {}, {}

  def value(prefix):
    row = np.exp(logits[states[prefix]])
    total = 0.0
    for a, p in enumerate(row / row.sum()):
      after = (*prefix, a)
      q = rewards[responses[after]] if after in responses else value(after)
      action_values[after] = q
      total += p * q
    values[prefix] = total
    return total

  value(())
  return values, action_values


@pytest.mark.parametrize(
  "shape",
  [
    (3, 3, 1),
    (3, 3, None),
    *(pytest.param(x, marks=pytest.mark.slow) for x in ((2, 1, 0), (2, 4, 1))),
  ],
)
def test_values_against_a_recursion(x64, shape):
  language = enumerate_language(*shape[:2], end_token=shape[2])
  policy = table(language, seed=1)
  rewards = np.random.default_rng(2).normal(size=(2, len(language.tokens)))
  found = values_of(language, policy.logprobs(), rewards)
  for p in range(2):
    values, action_values = tree_values(language, np.asarray(policy.params[p]), rewards[p])
    for n, t in np.ndindex(language.tokens.shape):
      y = tuple(language.tokens[n].tolist())
      v, q = (values[y[:t]], action_values[y[: t + 1]]) if language.mask[n, t] else (0.0, 0.0)
      expected = [v, q, q - v]
      np.testing.assert_allclose([x[p, n, t] for x in found], expected, atol=1e-14)
  np.testing.assert_allclose(
    found.advantages.sum(axis=-1), rewards - found.values[..., 0], atol=1e-14
  )
  np.testing.assert_allclose(
    found.values[:, 0, 0], expected_reward(language, policy.logprobs(), rewards), atol=1e-14
  )


def test_sum_and_mean_rank_two_responses_in_opposite_order():
  """Sums -14.616 and -8.991; means -14.616 / 5 = -2.9232 and -8.991 / 3 = -2.997."""
  logprobs = np.array(
    [
      [-2.2320, -2.8010, -3.9580, -3.3960, -2.2290],
      [-4.4220, -1.5100, -3.0590, np.nan, np.nan],
    ]
  )
  mask = np.arange(5)[None] < np.array([[5], [3]])
  np.testing.assert_allclose(rl.sequence_logprob(logprobs, mask), [-14.616, -8.991], rtol=1e-6)
  np.testing.assert_allclose(rl.mean_logprob(logprobs, mask), [-2.9232, -2.997], rtol=1e-6)


@pytest.mark.parametrize("make", [pytest.param(table, marks=pytest.mark.slow), network])
def test_gradients_against_finite_differences(x64, make):
  policy, other = make(LANGUAGE, seed=1), table(LANGUAGE, seed=2).logprobs()
  flat, unravel = jax.flatten_util.ravel_pytree(policy.params)
  targets = [
    expected_reward,
    functools.partial(regularised_reward, ref_logprobs=other, kl_coef=0.3),
    lambda language, logprobs, rewards: entropy(language, logprobs),
    functools.partial(pass_at_k, k=3),
  ]
  for target in targets:
    value = jax.jit(lambda x, f=target: f(LANGUAGE, policy.logprobs(unravel(x)), REWARDS))
    found = target_gradient(policy, REWARDS, target)
    assert found.shape == (2, flat.size)
    step = 1e-5 * np.eye(flat.size)
    differences = np.stack([(value(flat + s) - value(flat - s)) / 2e-5 for s in step], axis=1)
    np.testing.assert_allclose(found, differences, atol=1e-8)


def test_policy_gradient_theorem(x64):
  """grad J = E sum_t A_t grad log pi_t, with the exact A."""
  policy = network(LANGUAGE)
  logprobs = policy.logprobs()
  weights = response_probs(LANGUAGE, logprobs)[..., None]
  weights = weights * values_of(LANGUAGE, logprobs, REWARDS).advantages
  pull = jax.jit(jax.grad(lambda x, w: jnp.sum(w * policy.logprobs(x))))
  flat = jax.flatten_util.ravel_pytree(pull(policy.params, weights))[0]
  expected = target_gradient(policy, REWARDS).sum(axis=0)
  np.testing.assert_allclose(flat, expected, atol=1e-13)


def test_kl_and_entropy_against_direct_sums(x64):
  one, other = table(LANGUAGE, seed=1), table(LANGUAGE, seed=2)
  logprobs, ref = one.logprobs(), other.logprobs()
  log_p, log_q = (np.asarray(x).sum(axis=-1) for x in (logprobs, ref))
  p = np.exp(log_p)
  kl = kl_divergence(LANGUAGE, logprobs, ref)
  np.testing.assert_allclose(kl, (p * (log_p - log_q)).sum(axis=1), rtol=1e-13)
  np.testing.assert_allclose(entropy(LANGUAGE, logprobs), -(p * log_p).sum(axis=1), rtol=1e-13)
  # The chain rule: the sum of the KL of the states on the way.
  per_state = rl.exact_kl(one.params, other.params)
  on_the_way = np.where(MASK, np.asarray(per_state)[:, LANGUAGE.states], 0.0).sum(axis=-1)
  np.testing.assert_allclose(kl, (p * on_the_way).sum(axis=1), rtol=1e-13)
  np.testing.assert_allclose(kl_divergence(LANGUAGE, logprobs, logprobs), 0.0, atol=1e-15)


def logits_of(language, logprobs):
  """The table whose log-probs these are."""
  logits = np.zeros((len(logprobs), language.num_states, language.vocabulary))
  for n, t in np.argwhere(language.mask):
    logits[:, language.states[n, t], language.tokens[n, t]] = logprobs[:, n, t]
  return logits


@pytest.mark.parametrize("kl_coef", [1e-4, 0.01, 0.5, 100.0])
def test_regularised_optimum(x64, kl_coef):
  """Its value is kl_coef log E_ref exp(r / kl_coef), the gradient there is 0, others are below."""
  ref = table(LANGUAGE, seed=2).logprobs()
  best = optimum_of(LANGUAGE, ref, REWARDS, kl_coef=kl_coef)
  check_distribution(LANGUAGE, best)
  value = functools.partial(regularised_reward, ref_logprobs=ref, kl_coef=kl_coef)
  log_ref = np.asarray(ref).sum(axis=-1)
  log_z = np.logaddexp.reduce(log_ref + REWARDS / kl_coef, axis=1)
  np.testing.assert_allclose(value(LANGUAGE, best, REWARDS), kl_coef * log_z, rtol=1e-11)
  tilted = log_ref + REWARDS / kl_coef - log_z[:, None]
  np.testing.assert_allclose(best.sum(axis=-1), tilted, rtol=1e-11, atol=1e-11)

  policy = tabular_policy(LANGUAGE, logits_of(LANGUAGE, np.asarray(best)))
  np.testing.assert_allclose(policy.logprobs(), best, rtol=1e-11, atol=1e-11)
  gradient = target_gradient(policy, REWARDS, value)
  np.testing.assert_allclose(gradient, 0.0, atol=1e-10)
  rng = np.random.default_rng(0)
  for _ in range(5):
    moved = policy.logprobs(policy.params + rng.normal(0, 0.3, policy.params.shape))
    assert np.all(value(LANGUAGE, moved, REWARDS) < value(LANGUAGE, best, REWARDS))


def test_optimum_where_no_right_answer_is_left(x64):
  """At a small coefficient exp(-1 / kl_coef) underflows; wrong prefixes keep the reference."""
  language = enumerate_language(3, 3)
  ref = table(language).logprobs()
  rewards = first_token_reward(language, [1, 2])
  best = np.asarray(optimum_of(language, ref, rewards, kl_coef=1e-4))
  assert np.isfinite(best).all()
  np.testing.assert_allclose(best[..., 1:], np.asarray(ref)[..., 1:], atol=1e-12)
  np.testing.assert_allclose(best[..., 0], np.where(rewards == 1, 0.0, best[..., 0]), atol=1e-12)
  np.testing.assert_allclose(
    best[..., 0][rewards == 0], np.asarray(ref)[..., 0][rewards == 0] - 1e4, rtol=1e-3
  )


def test_pass_at_k_is_of_k_samples(x64):
  policy = table(LANGUAGE)
  rewards = np.random.default_rng(1).integers(0, 2, REWARDS.shape).astype(float)
  p = np.asarray(expected_reward(LANGUAGE, policy.logprobs(), rewards))
  found = target_gradient(policy, rewards, functools.partial(pass_at_k, k=4))
  slope = 4 * (1 - p[:, None]) ** 3
  np.testing.assert_allclose(found, slope * target_gradient(policy, rewards), rtol=1e-12)


def excluding(policy, token=2):
  """The same policy without a token at the first prefix."""
  return policy._replace(params=policy.params.at[:, 0, token].set(-jnp.inf))


def test_responses_of_probability_0(x64):
  policy = excluding(table(LANGUAGE))
  never = LANGUAGE.tokens[:, 0] == 2
  logprobs, ref = policy.logprobs(), table(LANGUAGE).logprobs()
  check_distribution(LANGUAGE, logprobs)
  probs = np.asarray(response_probs(LANGUAGE, logprobs))
  assert np.all((probs == 0) == never[None])
  for x in (entropy(LANGUAGE, logprobs), kl_divergence(LANGUAGE, logprobs, ref)):
    assert np.isfinite(x).all()
  found = values_of(LANGUAGE, logprobs, REWARDS)
  assert all(np.isfinite(x).all() for x in found)
  for target in (
    expected_reward,
    functools.partial(regularised_reward, ref_logprobs=ref, kl_coef=0.1),
  ):
    assert np.isfinite(target_gradient(policy, REWARDS, target)).all()
  # What the reference excludes stays excluded.
  best = np.asarray(optimum_of(LANGUAGE, logprobs, REWARDS, kl_coef=0.5))
  check_distribution(LANGUAGE, best)
  assert np.all(np.isneginf(best.sum(axis=-1)) == never[None])


def test_infinite_kl_is_an_error(x64):
  policy, ref = table(LANGUAGE), excluding(table(LANGUAGE, seed=1)).logprobs()
  with pytest.raises(ValueError, match="KL is infinite: ref_logprobs excludes"):
    kl_divergence(LANGUAGE, policy.logprobs(), ref)
  target = functools.partial(regularised_reward, ref_logprobs=ref, kl_coef=0.1)
  with pytest.raises(ValueError, match="target's gradient is not finite: is its KL infinite"):
    target_gradient(policy, REWARDS, target)


def test_bad_inputs(x64):
  logprobs = table(LANGUAGE).logprobs()
  with pytest.raises(ValueError, match=r"logprobs must end in .*\(15, 3\), got \(2, 14, 3\)"):
    response_probs(LANGUAGE, logprobs[:, :-1])
  for function in (expected_reward, token_values):
    with pytest.raises(ValueError, match="rewards must have the shape of"):
      function(LANGUAGE, logprobs, REWARDS[0])
  for kl_coef in (0.0, -1.0):
    with pytest.raises(ValueError, match="kl_coef"):
      regularised_optimum(LANGUAGE, logprobs, REWARDS, kl_coef=kl_coef)
  with pytest.raises(ValueError, match="k must lie in"):
    pass_at_k(LANGUAGE, logprobs, REWARDS, k=0)
  with pytest.raises(ValueError, match="15 responses must sum to 1"):
    check_distribution(LANGUAGE, logprobs - 1e-3)
  with pytest.raises(ValueError, match="must sum to 1"):
    check_distribution(LANGUAGE, logprobs * np.nan)
