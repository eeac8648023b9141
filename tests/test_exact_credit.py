"""`credit_moments` against the list of all responses, and `bias_variance` on groups of one."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from jaxrl_lm.exact import bias_variance
from jaxrl_lm.exact.credit import credit_moments
from tests import laboratory

pytestmark = pytest.mark.usefixtures("x64")

REWARDS = laboratory.binary_rewards(laboratory.LANGUAGE)
SHAPE = (2, *laboratory.LANGUAGE.tokens.shape)


def table_scores(policy):
  """[P, N, T, D]: in the row of its state a token's score is 1 at the token, less the softmax."""
  logits = np.asarray(policy.params)
  probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
  scores = np.zeros((*SHAPE, *logits.shape))
  language = policy.language
  for p, n, t in np.argwhere(np.broadcast_to(language.mask, SHAPE)):
    state, token = language.states[n, t], language.tokens[n, t]
    scores[p, n, t, p, state] = -probs[p, state]
    scores[p, n, t, p, state, token] += 1.0
  return scores.reshape(*SHAPE, -1)


def scores_by_differentiation(policy):
  flat, unravel = ravel_pytree(policy.params)
  return np.asarray(jax.jit(jax.jacrev(lambda x: policy.logprobs(unravel(x))))(flat))


@pytest.mark.parametrize(
  ("make", "scores_of"),
  [
    (laboratory.table, table_scores),
    pytest.param(laboratory.network, scores_by_differentiation, marks=pytest.mark.slow),
  ],
  ids=["table", "network"],
)
def test_it_is_the_sum_over_all_responses(make, scores_of):
  policy = make(laboratory.LANGUAGE)
  sampler = np.asarray(make(laboratory.LANGUAGE, seed=3).logprobs())
  credit = np.random.default_rng(0).normal(size=SHAPE)
  mask = laboratory.LANGUAGE.mask
  # What stands at masked positions is not read.
  given = {"one": np.where(mask, credit, np.nan), "two": credit**2}
  found = credit_moments(policy, given, REWARDS, sampler_logprobs=sampler)
  scores, probs = scores_of(policy), np.exp(np.where(mask, sampler, 0.0).sum(axis=-1))
  for name, coefficients in given.items():
    updates = np.einsum("pnt,pntd->pnd", np.where(mask, coefficients, 0.0), scores)
    mean = np.einsum("pn,pnd->pd", probs, updates)
    off = updates - mean[:, None]
    np.testing.assert_allclose(found[name].mean, mean, rtol=1e-10, atol=1e-13)
    variance = np.einsum("pn,pnd,pnd->p", probs, off, off)
    np.testing.assert_allclose(found[name].variance, variance, rtol=1e-10)


def test_the_reward_at_every_token_is_a_group_of_one():
  policy = laboratory.table(laboratory.LANGUAGE)
  reinforce = replace(rl.RLOO, advantages=rl.raw_rewards)
  group = bias_variance(reinforce, policy, REWARDS, group_size=1)
  credit = np.broadcast_to(REWARDS[..., None], SHAPE)
  found = credit_moments(policy, {"reward": credit}, REWARDS)["reward"]
  for got, expected in zip(found[:3], group[:3]):
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)
  assert np.all(found.relative_bias < 1e-12)


def test_what_is_not_a_coefficient_is_an_error():
  policy = laboratory.table(laboratory.LANGUAGE)
  with pytest.raises(ValueError, match=r"coefficients\['short'\] must be .*\(2, 15, 3\)"):
    credit_moments(policy, {"short": np.zeros((2, 15))}, REWARDS)
  hole = np.zeros(SHAPE)
  hole[1, 2, 0] = np.inf
  with pytest.raises(ValueError, match="'hole'.*finite"):
    credit_moments(policy, {"fine": np.zeros(SHAPE), "hole": hole}, REWARDS)
