"""Claim: `experiments.kl_estimators` finds the gradient that each estimator really has."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from configs import kl_estimators as settings
from experiments import kl_estimators
from experiments.kl_estimators.estimators import Row, coefficients, loss
from experiments.kl_estimators.moments import gradients, update_moments
from experiments.kl_estimators.setting import (
  next_logprobs,
  old_policy_at,
  policy_at,
  responses,
  sampling_probs,
  starting_point,
)
from jaxrl_lm.exact import kl_divergence

ROWS = (
  Row("k1", "loss"),
  Row("k2 of the response", "loss"),
  Row("k3", "loss"),
  Row("k3", "whole"),
  Row("k1", "to go", "sequence"),
  Row("k3", "live", "token"),
  Row("k3", "live", "prefix"),
)
EXACT = Row("exact per state", "live", "prefix")


@pytest.fixture(scope="module")
def measured():
  """Of a table: a policy at 0.3 nats from its reference, samples of itself and of an old one."""
  with jax.enable_x64(True):
    start = starting_point(settings.SMALL, settings.SMALL.table)
    policy = policy_at(start, 0.3)
    exact, found = gradients(policy, start.reference), {}
    for staleness in (0.0, 0.2):
      old = old_policy_at(start, policy, staleness)
      given = responses(policy, start.reference, old)
      factors = coefficients((*ROWS, EXACT), policy.language, given)
      moments = update_moments(factors, exact, sampling_probs(old))
      found[staleness] = old, given, factors, moments
  return start, policy, found


def test_policies_stand_where_they_should(measured, x64):
  start, policy, found = measured
  language = policy.language
  apart = kl_divergence(language, policy.logprobs(), start.reference.logprobs())
  np.testing.assert_allclose(apart.mean(), 0.3, rtol=1e-9)
  stale = kl_divergence(language, found[0.2][0].logprobs(), policy.logprobs())
  np.testing.assert_allclose(stale.mean(), 0.2, rtol=1e-9)


def test_the_gradient_of_each_estimator(measured):
  on, old = (found[-1] for found in measured[-1].values())
  target = on[ROWS[0]].target
  size = np.linalg.norm(target)
  mean = {row: moments.mean for row, moments in on.items()}
  assert np.linalg.norm(mean[Row("k1", "loss")]) < 1e-12 * size
  noise = {row: np.sum(on[row].variance) for row in ROWS}
  assert noise[Row("k1", "loss")] > 2 * noise[Row("k1", "to go", "sequence")]
  unbiased = {Row("k2 of the response", "loss"), ROWS[4], Row("k3", "live", "prefix"), EXACT}
  for row in unbiased:
    np.testing.assert_allclose(mean[row], target, atol=1e-12 * size)
  both = mean[Row("k3", "loss")] + mean[Row("k3", "whole")]
  np.testing.assert_allclose(both, target, atol=1e-12 * size)
  assert np.all(on[Row("k3", "loss")].relative_bias > 0.1)
  assert on[Row("k3", "whole")].averaged().cosine < -0.3  # away from the reference
  # On old samples k2 has no ratio, and the ratio of the token leaves the states as they are.
  for row in unbiased - {Row("k2 of the response", "loss")}:
    np.testing.assert_allclose(old[row].mean, target, atol=1e-12 * size)
  for row in (Row("k2 of the response", "loss"), Row("k3", "live", "token")):
    assert np.all(old[row].relative_bias > 0.02)


@pytest.mark.parametrize("row", [ROWS[6], EXACT], ids=lambda row: row.estimator)
def test_moments_are_those_of_every_response_s_own_gradient(measured, x64, row):
  start, policy, found = measured
  language = policy.language
  old, given, _, moments = found[0.2]
  flat, unravel = ravel_pytree(policy.params)

  @jax.jit
  def updates(flat):
    def losses(x):
      return loss(row, language, given, next_logprobs(language, policy.logprobs(unravel(x))))

    return jax.jacrev(losses)(flat)

  gradient, probs = np.asarray(updates(flat)), np.asarray(sampling_probs(old))
  mean = np.einsum("pn,pnd->pd", probs, gradient)
  np.testing.assert_allclose(moments[row].mean, mean, atol=1e-12)
  variance = np.einsum("pn,pnd->p", probs, (gradient - mean[:, None]) ** 2)
  np.testing.assert_allclose(moments[row].variance, variance, rtol=1e-9)


def test_next_logprobs_are_those_of_the_table(measured, x64):
  policy = measured[1]
  language = policy.language
  found = next_logprobs(language, policy.logprobs())
  table = jax.nn.log_softmax(policy.params, axis=-1)[:, jnp.asarray(language.states)]
  here = np.broadcast_to(language.mask, found.shape[:-1])
  np.testing.assert_allclose(found[here], table[here], atol=1e-14)


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
  out = tmp_path_factory.mktemp("kl_estimators")
  kl_estimators.main(settings.SMALL, out=out)
  return json.loads((out / "summary.json").read_text())


@pytest.mark.slow
def test_every_golden_comes_out(summary):
  assert summary["missed"] == []
  goldens = [row["name"] for row in summary["expectations"] if row["kind"] == "golden"]
  assert len(goldens) == 2 * 28
  assert len(summary["figures"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["table", "network"])
@pytest.mark.parametrize(
  ("claim", "status"),
  [
    ("cosine with grad KL of k3 in the loss", "confirmed"),
    ("size of k3 in the reward along grad KL", "confirmed"),
    ("noise of the exact KL per state times a live prefix ratio over k1 to go", "confirmed"),
    ("spread of k3 over k1 as the KL grows", "contradicted"),
    ("k2 in the loss, |E g - grad KL| / |grad KL|", "contradicted"),
    ("bias of k3 times its live token ratio on old samples", "contradicted"),
    (
      "k3 in the loss, without and with a live token ratio, cosine on-policy",
      "contradicted",
    ),
  ],
)
def test_a_claim_is_decided(summary, policy, claim, status):
  row = next(row for row in summary["expectations"] if row["name"] == f"{policy}: {claim}")
  assert row["status"] == status, row
