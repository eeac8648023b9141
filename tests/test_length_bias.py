"""Claim: `experiments.length_bias` finds what Dr. GRPO says, in seconds on a small language."""

import json
from dataclasses import replace

import numpy as np
import pytest

from configs import length_bias as settings
from configs.policies import Network
from experiments import length_bias
from experiments.length_bias.flows import _first_passage
from experiments.length_bias.setting import grpo, reference_problem
from jaxrl_lm import sequence_mean
from jaxrl_lm.exact import bias_variance, kl_divergence, response_probs

# A minute of compiling; by default test_exact_moments asserts the claim.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  data = tmp_path_factory.mktemp("data")
  tokens = np.array([[1, 2, 3, 10], [4, 4, 4, 4], [9, 2, 5, 6]])
  correct = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]], np.int8)
  np.savez(data / "gsm8k_openai4.npz", correct=correct, len_qwen_tokens=tokens)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAXRL_LM_DATA", str(data))
    out = tmp_path_factory.mktemp("length_bias")
    length_bias.main(settings.SMALL, out=out)
  return out


@pytest.fixture(scope="module")
def summary(out):
  return json.loads((out / "summary.json").read_text())


def test_every_golden_comes_out(summary):
  assert summary["missed"] == []
  assert sum(row["kind"] == "golden" for row in summary["expectations"]) > 12


@pytest.mark.parametrize(
  "claim",
  [
    "drift of wrong lengths, 1/n less true gradient (tokens per unit of J)",
    "filler: drift within the wrong branch, 1/n (tokens per unit of J)",
    "filler: drift within the correct branch, token mean (tokens per unit of J)",
    "SGD: wrong answers at P(correct) = 0.8",
    "Adam: wrong answers at P(correct) = 0.8",
    "alpha of least error at 1 and 1024 groups",
    "curl, and work around a loop, of 1/n with centred rewards",
  ],
)
def test_a_claim_is_confirmed(summary, claim):
  row = next(row for row in summary["expectations"] if row["name"] == claim)
  assert row["status"] == "confirmed", row


def test_the_direction_of_each_reduction(summary):
  rows = summary["results"]["decomposition"]
  cosine = {name: np.array(row["centred"]["cosine"]) for name, row in rows.items()}
  np.testing.assert_allclose(cosine["sum"], 1.0, rtol=1e-12)
  assert np.all(cosine["token mean"] < 1.0 - 1e-6)
  assert np.all(cosine["1/n^0.5"] < cosine["token mean"])
  assert np.all(cosine["sequence mean"] < cosine["1/n^0.5"])


def test_the_push_on_graded_responses(summary):
  assert list(summary["skipped"]) == ["groups-MATH"]
  table = summary["results"]["groups-GSM8K"]
  assert table["groups"] == 2  # one has no signal
  # Wrong: 3 and 10 tokens at -1/2, 9 and 5 at -1/2; a fifth of four responses is one.
  assert table["sum"]["share_wrong_longest"] == pytest.approx(10 / 27)
  assert table["sequence mean"]["share_wrong_longest"] == pytest.approx(1 / 4)


def test_the_figures_are_there(out, summary):
  for name in ("bias_and_drift", "flows", "frontier_and_filler", "difficulty_and_curl"):
    assert f"{name}.png" in summary["figures"]
    assert (out / f"{name}.png").stat().st_size > 10_000


def test_what_does_not_reach_a_level_is_nan():
  best = np.array([0.1, 0.3, 0.3, 0.5])
  found = _first_passage(np.array([0.1, 0.2, 0.3, 0.4, 0.6]), best, np.array([1.0, 2.0, 9.0, 11.0]))
  np.testing.assert_allclose(found, [1.0, 1.5, 2.0, 10.0, np.nan])


def test_a_shared_policy_is_a_policy(x64):
  setting = settings.Setting(vocabulary=3, horizon=3, targets=(0, 1))
  network = replace(setting, policy=Network(width=8, steps=150))
  table, shared = (reference_problem(x, group_size=2) for x in (setting, network))
  language, policy = shared.policy.language, shared.policy
  logprobs = policy.logprobs()
  np.testing.assert_allclose(response_probs(language, logprobs).sum(-1), 1.0, rtol=1e-12)
  assert np.all(np.asarray(kl_divergence(language, table.policy.logprobs(), logprobs)) < 0.05)
  few = policy.score(policy.params, language, 1, np.arange(2))
  alone = np.where(language.mask[:2], few, 0.0)
  np.testing.assert_allclose(alone, logprobs[1, :2], rtol=1e-12)
  given, autodiff = (
    bias_variance(grpo(sequence_mean), p, shared.rewards, group_size=2)
    for p in (policy, policy._replace(score_gram=None))
  )
  np.testing.assert_allclose(given.variance, autodiff.variance, rtol=1e-10)
