"""jaxrl_lm.exact.chains: against every response of a small chain, closed forms, and long T."""

import itertools
import time

import numpy as np
import pytest

from jaxrl_lm.exact import chains
from jaxrl_lm.exact.chains import MarkovChain
from jaxrl_lm.exact.ratio_distributions import sequence_band


def iid(*probs):
  row = np.log(probs)
  return MarkovChain(row, np.stack([row] * len(probs)))


def random_chain(seed, size, concentration=1.5):
  rng = np.random.default_rng(seed)
  draw = rng.dirichlet(np.full(size, concentration), size=size + 1)
  return MarkovChain(np.log(draw[0]), np.log(draw[1:]))


def token_logprobs(chain, responses):
  rows = [[chain.initial[y[0]], *(chain.transition[i, j] for i, j in zip(y, y[1:]))]
          for y in responses]  # fmt: skip
  return np.array(rows)


def enumerated(behaviour, target, length):
  """Probability [N] under the behaviour and token log-ratios [N, T] of every response."""
  size = len(behaviour.initial)
  responses = list(itertools.product(range(size), repeat=length))
  logprobs = token_logprobs(behaviour, responses)
  possible = np.isfinite(logprobs)
  log_ratio = np.where(possible, token_logprobs(target, responses), 0) - np.where(
    possible, logprobs, 0
  )
  return np.exp(logprobs.sum(axis=1)), log_ratio


BEHAVIOUR, TARGET = random_chain(0, 3), random_chain(1, 3)


def test_against_every_response():
  powers = (-0.5, 0.0, 0.5, 1.0, 2.0, 3.0)
  moments = {k: chains.log_moments(BEHAVIOUR, TARGET, k, horizon=6) for k in powers}
  mean, variance = chains.log_ratio_moments(BEHAVIOUR, TARGET, horizon=6)
  for length in range(1, 7):
    probability, log_ratio = enumerated(BEHAVIOUR, TARGET, length)
    total = log_ratio.sum(axis=1)
    for k in powers:
      expected = np.log(probability @ np.exp(k * total))
      np.testing.assert_allclose(moments[k][length - 1], expected, atol=1e-13)
    np.testing.assert_allclose(mean[length - 1], probability @ total, rtol=1e-13)
    expected = probability @ (total - probability @ total) ** 2
    np.testing.assert_allclose(variance[length - 1], expected, rtol=1e-12)


def test_independent_tokens_have_closed_forms():
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
  lengths = np.arange(1, 4097)
  moments = chains.log_moments(iid(*p), iid(*q), 2, horizon=4096)
  np.testing.assert_allclose(moments, lengths * np.log(np.sum(q**2 / p)), rtol=1e-12)
  assert moments[-1] > 2000  # far beyond the largest float64
  mean, variance = chains.log_ratio_moments(iid(*p), iid(*q), horizon=4096)
  lr = np.log(q / p)
  np.testing.assert_allclose(mean, lengths * (p @ lr), rtol=1e-12)
  np.testing.assert_allclose(variance, lengths * (p @ (lr - p @ lr) ** 2), rtol=1e-12)


def test_rates_are_what_long_responses_gain_per_token():
  for power in (-1.0, 0.5, 1.0, 2.0):
    moments = chains.log_moments(BEHAVIOUR, TARGET, power, horizon=200)
    rate = chains.log_moment_rate(BEHAVIOUR, TARGET, power)
    np.testing.assert_allclose(moments[-1] - moments[-2], rate, atol=1e-12)
  mean, _ = chains.log_ratio_moments(BEHAVIOUR, TARGET, horizon=200)
  np.testing.assert_allclose(mean[-2] - mean[-1], chains.kl_rate(BEHAVIOUR, TARGET), rtol=1e-12)


def test_stationary_distribution():
  chain = random_chain(3, 6)
  weights = chains.stationary(chain)
  np.testing.assert_allclose(weights @ np.exp(chain.transition), weights, atol=1e-15)
  with np.errstate(divide="ignore"):
    cycle = MarkovChain(np.log([1.0, 0.0, 0.0]), np.log(np.roll(np.eye(3), 1, axis=1)))
    np.testing.assert_allclose(chains.stationary(cycle), 1 / 3)
    apart = MarkovChain(np.log([0.5, 0.5]), np.log(np.eye(2)))
  with pytest.raises(ValueError, match="several stationary"):
    chains.stationary(apart)


@pytest.mark.parametrize("rate", [1e-6, 2e-4, 0.5])
def test_target_at_a_kl_rate(rate):
  direction = np.random.default_rng(2).normal(size=(4, 3))
  target = chains.at_kl_rate(BEHAVIOUR, direction[0], direction[1:], rate=rate)
  np.testing.assert_allclose(chains.kl_rate(BEHAVIOUR, target), rate, rtol=1e-9)
  # An exponential tilt by the same eps everywhere.
  change = target.transition - BEHAVIOUR.transition
  eps = (change[0, 0] - change[0, 1]) / (direction[1, 0] - direction[1, 1])
  assert eps > 0
  for lr, d in zip([target.initial - BEHAVIOUR.initial, *change], direction):
    np.testing.assert_allclose(lr - lr[0], eps * (d - d[0]), atol=1e-9)


def test_tokens_without_mass():
  with np.errstate(divide="ignore"):
    behaviour = MarkovChain(np.log([0.5, 0.5, 0.0]), np.log(0.5 * (1 - np.eye(3))))
    target = MarkovChain(
      np.log([0.6, 0.4, 0.0]), np.log([[0.0, 0.7, 0.3], [0.2, 0.0, 0.8], [0.5, 0.5, 0.0]])
    )
    narrow = MarkovChain(np.log([1.0, 0.0, 0.0]), target.transition)
  probability, log_ratio = enumerated(behaviour, target, 5)
  total = log_ratio.sum(axis=1)
  moments = chains.log_moments(behaviour, target, 2, horizon=5)
  np.testing.assert_allclose(moments[-1], np.log(probability @ np.exp(2 * total)), rtol=1e-13)
  mean, _ = chains.log_ratio_moments(behaviour, target, horizon=5)
  np.testing.assert_allclose(mean[-1], probability @ total, rtol=1e-13)
  # A target with less support: ratios of 0 are no trouble to a moment, but to a logarithm.
  np.testing.assert_allclose(chains.log_moments(behaviour, narrow, 1, horizon=9), 0, atol=1e-14)
  assert chains.log_moments(behaviour, narrow, 0, horizon=1) == 0
  for call in (
    lambda: chains.log_ratio_moments(behaviour, narrow, horizon=3),
    lambda: chains.log_moments(behaviour, narrow, -1, horizon=3),
    lambda: sequence_band(behaviour, narrow, 3, -0.1, 0.1),
  ):
    with pytest.raises(ValueError, match=r"target.initial has no mass.*infinite"):
      call()


def test_single_precision_log_probs_are_normalised():
  chain = MarkovChain(*(np.float32(x) for x in BEHAVIOUR))
  assert abs(np.exp(np.float64(chain.transition)).sum(axis=1) - 1).max() > 1e-9
  moments = chains.log_moments(chain, TARGET, 1, horizon=1000)
  np.testing.assert_allclose(moments, 0, atol=1e-12)


def five_token_chain():
  """The chain of the headline: a random target at 2e-4 nats of KL per token."""
  behaviour = random_chain(0, 5, concentration=2.0)
  direction = np.random.default_rng(1).normal(size=(6, 5))
  return behaviour, chains.at_kl_rate(behaviour, direction[0], direction[1:], rate=2e-4)


def test_long_responses_explode_while_their_tokens_stay():
  start = time.thread_time()
  behaviour, target = five_token_chain()
  mean, variance = chains.log_ratio_moments(behaviour, target, horizon=4096)
  np.testing.assert_allclose(-mean[-1] / 4096, 2e-4, rtol=2e-3)
  np.testing.assert_allclose(variance[-1] / 4096, 4e-4, rtol=2e-2)  # v ~ 2 KL
  np.testing.assert_allclose(chains.log_moments(behaviour, target, 1, horizon=4096), 0, atol=1e-12)
  second = chains.log_moments(behaviour, target, 2, horizon=4096)
  np.testing.assert_allclose(second[-1] / 4096, 4e-4, rtol=2e-2)  # e^(2 KL) per token
  assert 0.15 < np.exp(-second[-1]) < 0.25  # effective samples per sample
  token = np.exp(target.transition - behaviour.transition)
  assert token.min() > 0.8
  assert token.max() < 1.2
  outside = {n: 1 - sequence_band(behaviour, target, n, np.log(0.8), np.log(1.2)).inside
             for n in (16, 256, 4096)}  # fmt: skip
  assert outside[16] < 0.02
  assert 0.45 < outside[256] < 0.6
  assert 0.87 < outside[4096] < 0.93
  assert time.thread_time() - start < 10


def test_bad_inputs():
  good = iid(0.5, 0.5)
  with pytest.raises(ValueError, match=r"behaviour.*\(2,\) and \(2, 3\)"):
    chains.kl_rate(MarkovChain(good.initial, np.zeros((2, 3))), good)
  with pytest.raises(ValueError, match=r"target is \(3, 3\), behaviour is \(2, 2\)"):
    chains.kl_rate(good, iid(0.2, 0.3, 0.5))
  with pytest.raises(ValueError, match=r"target.transition.*sum to 1"):
    chains.kl_rate(good, MarkovChain(good.initial, good.transition + 1e-11))
  with pytest.raises(ValueError, match=r"behaviour.initial.*sum to 1"):
    chains.kl_rate(MarkovChain(np.array([np.nan, 0.0]), good.transition), good)
  with np.errstate(divide="ignore"):
    one = iid(1.0, 0.0)
  with pytest.raises(ValueError, match=r"target.initial has mass where behaviour.initial has none"):
    chains.log_moments(one, good, 2, horizon=3)
  for horizon in (0, 2.5):
    with pytest.raises(ValueError, match="horizon"):
      chains.log_moments(good, good, 2, horizon=horizon)
    with pytest.raises(ValueError, match="length"):
      sequence_band(good, good, horizon, -1.0, 1.0)
  zeros = np.zeros((2, 2))
  with pytest.raises(ValueError, match="rate"):
    chains.at_kl_rate(good, [0.0, 1.0], zeros, rate=0.0)
  with pytest.raises(ValueError, match="transition_direction is constant"):
    chains.at_kl_rate(good, [0.0, 1.0], zeros, rate=1e-3)
  with pytest.raises(ValueError, match=r"initial_direction.*\(2,\).*\(3,\)"):
    chains.at_kl_rate(good, [0.0, 1.0, 2.0], zeros, rate=1e-3)
