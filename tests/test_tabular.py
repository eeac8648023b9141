"""jaxrl_lm.exact.tabular: the two languages of the laboratory come out to their digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm.exact import (
  count_pretrained_logits,
  enumerate_language,
  first_token_reward,
  modular_sum_reward,
  response_probs,
  tabular_policy,
  token_values,
)
from tests.laboratory import LANGUAGE, network, table

compiled_values = jax.jit(token_values)

FIXED_TARGETS, ENDING_TARGETS = (1, 2, 0, 0), (0, 1, 2, 3)


def fixed_policy():
  """Five tokens, four steps."""
  language = enumerate_language(5, 4)
  logits = count_pretrained_logits(language, prompts=4, seed=1, concentration=0.3)
  return tabular_policy(language, logits)


def ending_policy():
  """Five tokens of which the last one ends, six steps."""
  language = enumerate_language(5, 6, end_token=4)
  logits = count_pretrained_logits(language, prompts=4, seed=4, concentration=0.6)
  return tabular_policy(language, logits)


def test_fixed_language(x64):
  """Recorded twice, independently, in float64: digits of the laboratory's reference policy."""
  policy = fixed_policy()
  language, logprobs = policy.language, policy.logprobs()
  probs = np.asarray(response_probs(language, logprobs))
  summed = modular_sum_reward(language, FIXED_TARGETS)
  np.testing.assert_array_equal(
    (probs * summed).sum(axis=1).round(4), [0.0175, 0.1875, 0.7073, 0.4387]
  )
  # mean |A_t| per token, and mean |r - V(x)| of the response.
  expected = {
    "sum": (summed, [0.1314, 0.0687, 0.0874, 0.1418], 0.3114),
    "first": (first_token_reward(language, FIXED_TARGETS), [0.1540, 0.0, 0.0, 0.0], 0.1540),
  }
  for rewards, per_token, per_response in expected.values():
    values = compiled_values(language, logprobs, jnp.asarray(rewards))
    size = (probs[..., None] * np.abs(values.advantages)).sum(axis=1).mean(axis=0)
    np.testing.assert_array_equal(size.round(4), per_token)
    whole = rewards - np.asarray(values.values)[..., 0]
    np.testing.assert_array_equal((probs * np.abs(whole)).sum(axis=1).mean().round(4), per_response)
    np.testing.assert_allclose(values.advantages.sum(axis=-1), whole, atol=1e-14)


def test_ending_language(x64):
  policy = ending_policy()
  language = policy.language
  probs = np.asarray(response_probs(language, policy.logprobs()))
  right = modular_sum_reward(language, ENDING_TARGETS)
  np.testing.assert_array_equal(
    (probs * right).sum(axis=1).round(4), [0.1672, 0.1968, 0.1420, 0.2901]
  )
  for rewards, expected in ((right, 4.530), (1 - right, 3.968)):
    mass = probs * rewards
    lengths = (mass * language.lengths).sum(axis=1) / mass.sum(axis=1)
    np.testing.assert_array_equal(lengths.mean().round(3), expected)
  values = compiled_values(language, policy.logprobs(), jnp.asarray(right))
  whole = right - np.asarray(values.values)[..., 0]
  np.testing.assert_allclose(values.advantages.sum(axis=-1), whole, atol=1e-14)


def literal_counts(language, *, prompts, seed, concentration, sequences):
  """The recipe with a dictionary of prefixes, one token at a time."""
  rng, v = np.random.default_rng(seed), language.vocabulary
  counts = []
  for _ in range(prompts):
    init = rng.dirichlet(concentration * np.ones(v))
    transition = rng.dirichlet(concentration * np.ones(v), size=v)
    strings = [list(rng.choice(v, size=sequences, p=init))]
    for _ in range(1, language.horizon):
      u = rng.random(sequences)
      cumulated = np.cumsum(transition, axis=1)
      drawn = [min(int((cumulated[s] < x).sum()), v - 1) for s, x in zip(strings[-1], u)]
      strings.append(drawn)
    seen = {}
    for string in zip(*strings, strict=True):
      for t, token in enumerate(string):
        prefix = tuple(int(x) for x in string[:t])
        if language.end_token not in prefix:
          seen[prefix, int(token)] = seen.get((prefix, int(token)), 0) + 1
    counts.append(seen)
  return counts


@pytest.mark.parametrize("end", [None, 0, 1, 2])
def test_pretraining_counts(end):
  language = enumerate_language(3, 4, end_token=end)
  recipe = {"prompts": 2, "seed": 3, "concentration": 0.5, "sequences": 300}
  logits = count_pretrained_logits(language, smoothing=0.25, **recipe)
  expected = np.full(logits.shape, np.log(0.25))
  prefixes = {}
  for n, t in np.argwhere(language.mask):
    prefixes[tuple(language.tokens[n, :t].tolist())] = language.states[n, t]
  for p, seen in enumerate(literal_counts(language, **recipe)):
    for (prefix, token), count in seen.items():
      expected[p, prefixes[prefix], token] = np.log(count + 0.25)
  np.testing.assert_array_equal(logits, expected)


def test_pretraining_of_a_long_response():
  """2^70 strings do not fit into 64 bits; every step is counted all the same."""
  language = enumerate_language(2, 70, end_token=1)
  logits = count_pretrained_logits(language, prompts=1, seed=0, concentration=3.0, sequences=500)
  counts = (np.exp(logits) - 0.5).sum(axis=-1)[0]
  assert round(counts[0]) == 500
  # Who has not ended after t tokens chooses once more.
  np.testing.assert_allclose(counts[1:], (np.exp(logits[0, :-1, 0]) - 0.5), atol=1e-9)


def test_log_probs_of_a_table(x64):
  policy = table(LANGUAGE, seed=5)
  logits = np.asarray(policy.params)
  logprobs = np.asarray(policy.logprobs())
  for p in range(2):
    for n, t in np.ndindex(LANGUAGE.tokens.shape):
      row = logits[p, LANGUAGE.states[n, t]]
      expected = (
        row[LANGUAGE.tokens[n, t]] - np.log(np.exp(row).sum()) if LANGUAGE.mask[n, t] else 0
      )
      np.testing.assert_allclose(logprobs[p, n, t], expected, atol=1e-14)
  np.testing.assert_allclose(response_probs(LANGUAGE, logprobs).sum(axis=1), 1.0, rtol=1e-14)
  np.testing.assert_allclose(policy.logprobs(2 * policy.params).shape, logprobs.shape)


def test_closed_form_gram(x64):
  """Inner products of token scores: the table's closed form against its Jacobian."""
  policy, rows = table(LANGUAGE), np.arange(len(LANGUAGE.tokens))
  score = lambda x: jnp.where(LANGUAGE.mask, policy.score(x, LANGUAGE, 1, rows), 0.0)
  scores = np.asarray(jax.jit(jax.jacobian(score))(policy.params)).reshape(
    len(rows), LANGUAGE.horizon, -1
  )
  expected = np.einsum("ntd,nud->ntu", scores, scores)
  found = policy.score_gram(policy.params, LANGUAGE, 1, rows)
  np.testing.assert_allclose(found, expected, atol=1e-14)


def test_a_shared_policy_is_a_distribution(x64):
  policy = network(LANGUAGE)
  probs = response_probs(LANGUAGE, policy.logprobs())
  np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-14)


def test_bad_inputs():
  for shape in ((1, 6, 3), (1, 7, 2), (2, 21)):
    with pytest.raises(ValueError, match="logits must"):
      tabular_policy(LANGUAGE, np.zeros(shape))
  with pytest.raises(ValueError, match="smoothing must"):
    count_pretrained_logits(LANGUAGE, prompts=1, seed=0, concentration=1.0, smoothing=0.0)
