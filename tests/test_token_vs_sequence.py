"""Claim: tokens as actions and responses as actions give one gradient, until something is added.

Setting: the small configuration of the experiment. Time: fifteen seconds, and a minute of
compiling for the whole run, which is slow.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import token_vs_sequence as settings
from experiments import token_vs_sequence
from experiments.token_vs_sequence import gradients, measures
from jaxrl_lm.exact import kl_divergence, token_values

SMALL = settings.SMALL


@pytest.fixture(scope="module")
def given():
  with jax.enable_x64(True):
    return measures.problem(SMALL, SMALL.setting.policy)


def test_the_two_gradients_are_the_same_for_every_response(x64, given):
  found = measures.identity(given)
  for where in ("parameters", "log-probs", "one ratio"):
    assert found[where] < 1e-14


def test_a_critic_is_told_apart(x64, given):
  """The same measurement sees a critic, whose credit differs from token to token."""
  policy, rewards = given.policy, given.rewards
  exact = token_values(policy.language, policy.logprobs(), jnp.asarray(rewards))
  start = np.asarray(exact.values)[:, :1, 0]
  credit = measures.credit(policy.language, rewards, np.asarray(exact.values))
  assert gradients.largest_distance(policy, rewards - start, credit) > 0.1


def test_off_policy_the_coefficients_are_the_ratios(x64, given):
  language, old = given.policy.language, given.policy.logprobs()
  policy = gradients.moved(given.policy, measures.directions(given, 0)["random"], 0.1)
  log_ratio = np.where(language.mask, policy.logprobs() - old, 0.0)
  np.testing.assert_allclose(
    np.mean(np.asarray(kl_divergence(language, old, policy.logprobs()))), 0.1, rtol=1e-9
  )
  ones = np.ones(log_ratio.shape)
  token, whole, stopped = (
    gradients.coefficients(x, policy, ones, old_logprobs=old)
    for x in (gradients.TOKEN, gradients.SEQUENCE, gradients.clipped(gradients.TOKEN, 0.2))
  )
  mask, ratio = np.broadcast_to(language.mask, log_ratio.shape), np.exp(log_ratio)
  np.testing.assert_allclose(token[mask], ratio[mask], rtol=1e-12)
  product = np.exp(log_ratio.sum(axis=-1, keepdims=True)) * ones
  np.testing.assert_allclose(whole[mask], product[mask], rtol=1e-12)
  np.testing.assert_allclose(stopped[mask], np.where(ratio > 1.2, 0.0, ratio)[mask], rtol=1e-12)
  assert np.any(ratio[mask] > 1.2)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  return tmp_path_factory.mktemp("run") / "small"


@pytest.fixture(scope="module")
def summary(out):
  return token_vs_sequence.main(SMALL, out=out)


@pytest.mark.slow
def test_every_golden_comes_out(summary):
  assert summary["missed"] == []
  assert sum(x["kind"] == "golden" for x in summary["expectations"]) == 25
  assert all(x["status"] != "undecided" for x in summary["expectations"])
  assert all(x["explanation"] for x in summary["expectations"] if x["status"] == "contradicted")


@pytest.mark.slow
def test_each_addition_breaks_the_identity(summary):
  results = summary["results"]
  for policy in ("table", "network"):
    critic, kl = results[f"{policy}-critic"], results[f"{policy}-kl"]["gradient"]
    assert np.max(critic["sequence"]["apart"]) == 0.0
    # With or without a bias.
    for row in (critic["exact critic, lambda 1"], kl["token, to go"]):
      assert np.min(row["apart"]) > 0.01
      assert np.max(row["bias"]) < 1e-12
    for row in (critic["wrong critic, lambda 0.95"], kl["token, immediate"]):
      assert np.min(row["apart"]) > 0.01
      assert np.min(row["bias"]) > 1e-3
    clip = results[f"{policy}-clip"]["random"]
    token, whole = (np.array(clip[f"{name} clip"]["apart"]) for name in ("token", "sequence"))
    assert np.all(np.diff(token, axis=0) > 0)
    assert np.all(token[0] < 0.05)
    assert np.all(whole[0] < token[0])  # no response has left the band
    assert np.all(token[-1] > 0.3)


@pytest.mark.slow
def test_a_ratio_per_token_is_less_noisy_than_one_per_response(summary):
  rows = [row for row in summary["expectations"] if "variance of token ratios" in row["name"]]
  assert len(rows) == 4
  for row in rows:
    assert row["status"] == "contradicted"
    assert np.max(row["measured"]) < 0.95


@pytest.mark.slow
def test_the_three_meanings_of_a_discount(summary):
  results = summary["results"]
  for policy in ("table", "network"):
    found = results[f"{policy}-discount"]
    none = np.array(found["none"]["drift_correct"])
    drifts = {name: np.array(found[name]["drift_correct"])[0] for name in ("returns", "objective")}
    assert np.all(drifts["objective"] < none)
    assert np.all(drifts["returns"] < none)
    np.testing.assert_allclose(found["objective"]["own"], 1.0, rtol=1e-12)
    curls = results["curl"][policy]
    assert np.all(np.array(curls["objective"]) < 1e-12)
    # It vanishes with 1 - discount: 0.2 against 0.05.
    for meaning in ("returns", "prefactor"):
      strong, weak = curls[meaning]
      assert 3 < strong / weak < 6


@pytest.mark.slow
def test_the_run_is_on_disk_and_continues(out, summary, capsys):
  again = token_vs_sequence.main(SMALL, out=out)
  assert "network-discount: stored" in capsys.readouterr().out
  assert again["expectations"] == summary["expectations"]
  written = json.loads((out / "summary.json").read_text())
  assert written["figures"] == ["breakers.png", "clips.png", "discounts.png"]
  for name in written["figures"]:
    assert (out / name).stat().st_size > 10_000
