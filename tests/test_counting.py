"""jaxrl_lm.exact.counting: against every response, closed forms, and what long responses show."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from jaxrl_lm.exact import counting
from jaxrl_lm.exact.counting import PREFIX, SEQUENCE, TOKEN, UNWEIGHTED, RatioExponents

LENGTH = 8
LEVELS = {
  "unweighted": (UNWEIGHTED, lambda log_ratio, mask: jnp.zeros_like(log_ratio)),
  "token": (TOKEN, rl.per_token),
  "prefix": (PREFIX, rl.per_prefix),
  "sequence": (SEQUENCE, rl.per_sequence),
  "geometric": (counting.geometric(LENGTH), rl.per_sequence_geometric),
  "mixed": (
    RatioExponents(0.4, 0.7, -0.3),
    lambda log_ratio, mask: (
      0.3 * log_ratio
      + 0.7 * rl.per_prefix(log_ratio, mask)
      - 0.3 * rl.per_sequence(log_ratio, mask)
    ),
  ),
}
TOKENS = np.array(list(itertools.product((0, 1), repeat=LENGTH)))  # 1 is a
COUNTS = np.cumsum(TOKENS, axis=1) - TOKENS
REWARD = np.random.default_rng(0).normal(size=(2, LENGTH + 1))
BEHAVIOUR = np.random.default_rng(1).normal(size=(LENGTH, LENGTH + 1))


def token_logprobs(logits):
  """[N, T] of every response, by the library."""
  seen = logits[jnp.arange(LENGTH), COUNTS]
  return rl.token_logprobs(jnp.stack([jnp.zeros_like(seen), seen], axis=-1), TOKENS)


def features(length):
  t, c = np.arange(length)[:, None], np.arange(length + 1)[None]
  return np.stack(np.broadcast_arrays(t / length, c / length), axis=-1)


FEATURES = features(LENGTH)


def mlp(params):
  return jnp.tanh(FEATURES @ params["w"]) @ params["v"]


def mlp_params(seed=2):
  rng = np.random.default_rng(seed)
  return {"v": rng.normal(size=3), "w": rng.normal(size=(2, 3))}


@jax.jit
def literal_scores(params, weights):
  """Weighted score [N, D] of every response."""
  flat, unravel = jax.flatten_util.ravel_pytree(params)
  return jax.jacobian(lambda x: jnp.sum(weights * token_logprobs(mlp(unravel(x))), axis=1))(flat)


@jax.jit
def literal_table_scores(logits, weights):
  return jax.jacobian(lambda x: jnp.sum(weights * token_logprobs(x), axis=1))(logits)


def literal_moments(scores, logits, baseline):
  """Mean, target and variance, with nothing but sums over all 2^T responses."""
  probability = np.exp(token_logprobs(BEHAVIOUR).sum(axis=1))
  target = np.exp(token_logprobs(logits).sum(axis=1))
  reward = REWARD[TOKENS[:, 0], TOKENS.sum(axis=1)]
  gradients = (reward - baseline)[:, None] * scores["estimator"].reshape(len(TOKENS), -1)
  mean = probability @ gradients
  variance = probability @ np.sum((gradients - mean) ** 2, axis=1)
  return mean, (target * reward) @ scores["plain"].reshape(len(TOKENS), -1), variance


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["table", "shared"])
def test_against_every_response_at_the_levels_of_the_library(kind, level, x64):
  exponents, function = LEVELS[level]
  params = mlp_params()
  logits = np.asarray(mlp(params))
  log_ratio = token_logprobs(logits) - token_logprobs(BEHAVIOUR)
  weights = jnp.exp(function(log_ratio, np.ones_like(TOKENS, bool)))
  if kind == "table":
    moments = counting.table_gradient_moments(logits, BEHAVIOUR, REWARD, exponents, baseline=0.3)
    score, argument = literal_table_scores, logits
  else:
    moments = counting.shared_gradient_moments(
      mlp, params, BEHAVIOUR, REWARD, exponents, baseline=0.3
    )
    score, argument = literal_scores, params
  scores = {
    "estimator": np.asarray(score(argument, weights)),
    "plain": np.asarray(score(argument, jnp.ones_like(weights))),
  }
  mean, target, variance = literal_moments(scores, logits, 0.3)
  np.testing.assert_allclose(moments.mean.ravel(), mean, atol=1e-13)
  np.testing.assert_allclose(moments.target.ravel(), target, atol=1e-13)
  np.testing.assert_allclose(np.exp(moments.log_variance), variance, rtol=1e-11)
  np.testing.assert_allclose(moments.bias, np.linalg.norm(mean - target), atol=1e-13)


@pytest.mark.parametrize("level", ["token", "prefix", "sequence"])
def test_a_table_is_a_policy_that_shares_nothing(level, x64):
  logits = np.random.default_rng(4).normal(size=(LENGTH, LENGTH + 1))
  args = (BEHAVIOUR, REWARD, LEVELS[level][0])
  table = counting.table_gradient_moments(logits, *args)
  shared = counting.shared_gradient_moments(lambda x: x, jnp.asarray(logits), *args)
  np.testing.assert_allclose(shared.mean.reshape(table.mean.shape), table.mean, atol=1e-14)
  np.testing.assert_allclose(shared.log_variance, table.log_variance, rtol=1e-12)


def test_one_logit_for_all_states_has_a_closed_form(x64):
  """Independent tokens, reward 1: g = rho sum_t s_t, whose square is a power of one token's."""
  length, logit = 1024, 2.0
  p, q = 0.5, 1 / (1 + np.exp(-logit))
  ratio = np.array([(1 - q) / (1 - p), q / p])
  score = np.array([-q, 1 - q])
  root = 0.5 * np.sum(ratio**2)
  once, twice = (0.5 * np.sum(ratio**2 * score**k) / root for k in (1, 2))
  expected = length * np.log(root) + np.log(length * twice + length * (length - 1) * once**2)
  moments = counting.shared_gradient_moments(
    lambda x: jnp.broadcast_to(x, (length, length + 1)),
    jnp.asarray(logit),
    np.zeros((length, length + 1)),
    np.ones((2, length + 1)),
    SEQUENCE,
  )
  np.testing.assert_allclose(moments.log_variance, expected, rtol=1e-12)
  np.testing.assert_allclose(moments.mean, 0, atol=1e-9)
  assert moments.log_variance > 400


def test_second_moments_beyond_the_largest_float():
  behaviour, logits = np.full((512, 513), -2.5), np.full((512, 513), 2.5)
  moments = counting.table_gradient_moments(
    logits, behaviour, counting.first_a_reward(512), SEQUENCE
  )
  assert 1000 < moments.log_variance < np.inf
  np.testing.assert_allclose(moments.mean, moments.target, atol=1e-12)


def sampled(logits, behaviour, reward, number):
  """Token-weighted estimates [number, T, T + 1] at seeded responses."""
  length = len(logits)
  rng = np.random.default_rng(0)
  p, q = (1 / (1 + np.exp(-x)) for x in (behaviour, logits))
  count = np.zeros(number, int)
  visited, score, first = np.empty((length, number), int), np.empty((length, number)), None
  for t in range(length):
    is_a = rng.random(number) < p[t, count]
    first = is_a if t == 0 else first
    pi, mu = (np.where(is_a, x[t, count], 1 - x[t, count]) for x in (q, p))
    visited[t], score[t] = count, pi / mu * (is_a - q[t, count])
    count = count + is_a
  return visited, (reward[first.astype(int), count] - 0.5) * score


def test_against_sampling_at_length_256():
  length, number = 256, 20000
  rng = np.random.default_rng(3)
  behaviour = 0.3 * rng.normal(size=(length, length + 1))
  logits = behaviour + 0.1 * rng.normal(size=behaviour.shape)
  reward = counting.majority_reward(length)
  moments = counting.table_gradient_moments(logits, behaviour, reward, TOKEN, baseline=0.5)
  visited, values = sampled(logits, behaviour, reward, number)
  square = np.sum(values**2, axis=0)
  second = np.exp(moments.log_variance) + np.sum(moments.mean**2)
  assert abs(square.mean() - second) < 4 * square.std() / np.sqrt(number)
  # The mean in a direction: the states in the middle of the response.
  direction = np.sign(np.arange(length + 1) - length / 2)[None] * np.ones((length, 1))
  along = np.sum(values * np.take_along_axis(direction, visited, axis=1), axis=0)
  assert abs(along.mean() - np.sum(direction * moments.mean)) < 4 * along.std() / np.sqrt(number)


def measured(length, shift, reward, **options):
  """Every level, from a fair coin to a target of logits `shift`."""
  behaviour = np.zeros((length, length + 1))
  levels = {name: LEVELS[name][0] for name in ("unweighted", "token", "prefix", "sequence")}
  levels["geometric"] = counting.geometric(length)
  return {
    name: counting.table_gradient_moments(behaviour + shift, behaviour, reward, level, **options)
    for name, level in levels.items()
  }


@pytest.mark.parametrize("length", [64, 256])
def test_what_each_ratio_buys(length):
  """2e-4 nats per token. Logits of 0.04: KL = logit^2 / 8."""
  random = np.random.default_rng(0).normal(size=(length, length + 1))
  majority = counting.majority_reward(length)
  for shift in (0.04, 0.04 * random):
    at = measured(length, shift, majority, baseline=0.5)
    relative = {name: m.relative_bias for name, m in at.items()}
    log_variance = {name: m.log_variance - at["unweighted"].log_variance for name, m in at.items()}
    assert relative["sequence"] < 1e-12
    assert 0.06 < relative["unweighted"] < 0.2
    assert relative["token"] < 0.4 * relative["unweighted"]
    assert log_variance["token"] < 0
    # An exponent of 1 / T corrects a T-th part of the bias.
    assert 0.98 < relative["geometric"] / relative["unweighted"] < 1
    # The variance of the sequence ratio grows by 2 KL per token.
    np.testing.assert_allclose(log_variance["sequence"], length * 4e-4, rtol=0.2)
    assert 0 < log_variance["prefix"] < log_variance["sequence"]
    assert np.log(1e4) < at["sequence"].log_crossover(at["token"]) < np.log(2e6)


def test_a_token_ratio_is_exact_where_no_later_state_matters():
  at = measured(128, 0.04, counting.first_a_reward(128), baseline=0.5)
  assert at["token"].relative_bias < 1e-12 < 0.01 < at["unweighted"].relative_bias
  assert at["sequence"].log_crossover(at["token"]) == np.inf
  assert at["token"].log_crossover(at["sequence"]) == -np.inf


def test_a_token_ratio_leaves_the_bias_of_the_states():
  """Where the target holds the count near half, its states matter, and no token's ratio knows."""
  length = 256
  excess = np.arange(length + 1)[None] - np.arange(length)[:, None] / 2
  shift = -0.04 * np.tanh(2 * excess / np.sqrt(length))
  at = measured(length, shift, counting.majority_reward(length), baseline=0.5)
  assert at["token"].bias > 0.7 * at["unweighted"].bias
  assert at["token"].log_variance <= at["unweighted"].log_variance + 1e-3


def test_squared_error_and_crossover():
  at = measured(64, 0.2, counting.majority_reward(64))
  sequence, token = at["sequence"], at["token"]
  crossover = sequence.log_crossover(token)
  for n, better in ((np.exp(crossover - 0.01), token), (np.exp(crossover + 0.01), sequence)):
    worse = sequence if better is token else token
    assert better.log_mse(n) < worse.log_mse(n)
  expected = token.bias**2 + np.exp(token.log_variance) / np.array([1, 10])
  np.testing.assert_allclose(token.log_mse([1, 10]), np.log(expected), rtol=1e-13)
  assert token.log_crossover(sequence) == np.inf
  assert token.log_crossover(token._replace(mean=token.mean + 1)) == -np.inf


def test_on_policy_every_ratio_is_one():
  logits = np.random.default_rng(5).normal(size=(32, 33))
  reward = counting.majority_reward(32)
  plain = counting.table_gradient_moments(logits, logits, reward, UNWEIGHTED)
  for level in (TOKEN, PREFIX, SEQUENCE, counting.geometric(32)):
    moments = counting.table_gradient_moments(logits, logits, reward, level)
    np.testing.assert_array_equal(moments.mean, plain.mean)
    assert moments.log_variance == plain.log_variance
    assert moments.bias < 1e-15


def test_entries_that_no_response_reaches_are_not_read():
  reward = counting.majority_reward(4)
  logits, behaviour = np.random.default_rng(6).normal(size=(2, 4, 5))
  clean = counting.table_gradient_moments(logits, behaviour, reward, SEQUENCE)
  unread = np.triu(np.ones((4, 5), bool), 1)
  dirty = counting.table_gradient_moments(
    np.where(unread, np.nan, logits), np.where(unread, -np.inf, behaviour), reward, SEQUENCE
  )
  np.testing.assert_array_equal(dirty.mean, clean.mean)
  assert dirty.log_variance == clean.log_variance


def test_bad_inputs():
  good, reward = np.zeros((3, 4)), counting.majority_reward(3)
  with pytest.raises(ValueError, match="behaviour_logits"):
    counting.table_gradient_moments(good, np.zeros((3, 3)), reward, TOKEN)
  with pytest.raises(ValueError, match=r"logits must be \[T, T \+ 1\]"):
    counting.table_gradient_moments(np.zeros((3, 3)), np.zeros((3, 3)), reward, TOKEN)
  with pytest.raises(ValueError, match="behaviour_logits must be finite.*KL is infinite"):
    counting.table_gradient_moments(good, good - np.inf, reward, TOKEN)
  for bad in (np.zeros(4), np.zeros((2, 3)), reward * np.nan):
    with pytest.raises(ValueError, match=r"reward.*\(2, 4\)"):
      counting.table_gradient_moments(good, good, bad, TOKEN)
  with pytest.raises(ValueError, match="baseline"):
    counting.table_gradient_moments(good, good, reward, TOKEN, baseline=np.zeros(3))
  with pytest.raises(ValueError, match=r"logits is \(2, 3\)"):
    counting.shared_gradient_moments(lambda x: jnp.zeros((2, 3)), 0.0, good, reward, TOKEN)
  for function in (counting.geometric, counting.majority_reward, counting.first_a_reward):
    with pytest.raises(ValueError, match="length"):
      function(0)
