"""Claim: responses leave the band of the ratio while tokens do not, on a transformer that trains.

Setting: the small configuration of the experiment, without the data, on a random transformer; with
one that learns a Markov chain, slow. Time: 20 seconds, compilation included.
"""

import contextlib
import io
from dataclasses import replace

import numpy as np
import pytest

from configs import ratio_explosion
from configs.ratio_explosion_trained import FULL, SMALL, Chain
from experiments import ratio_explosion_trained
from experiments.harness import intervals, run, storage
from experiments.ratio_explosion.chains import pair
from experiments.ratio_explosion_trained import expected, measures, policies
from jaxrl_lm.lm import rollouts
from jaxrl_lm.lm.rollouts import RolloutConfig


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Summary, folder and what was said of a run where stories260K is absent."""
  folder, said = tmp_path_factory.mktemp("run"), io.StringIO()
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
    patch.setenv("JAXRL_LM_DATA", str(folder / "nothing"))
    patch.setattr(run, "RESULTS", folder)
    config = replace(SMALL, stories=True)
    summary = ratio_explosion_trained.main(config, out=folder / "out")
  return summary, folder / "out", said.getvalue()


@pytest.fixture(scope="module")
def found(finished):
  """The statistics of the first seed."""
  return storage.load(finished[1] / "parts" / "seed-0.npz")["value"]


def test_every_golden_comes_out_and_every_claim_is_explained(finished):
  summary, out, said = finished
  assert summary["missed"] == []
  rows = summary["expectations"]
  assert sum(row["kind"] == "golden" for row in rows) == 3
  assert all(row["explanation"] for row in rows if row["status"] == "contradicted")
  assert "stories260K.bin was not found" in said
  for name in ("explosion-0.003.png", "explosion-0.0003.png", "staleness.png"):
    assert (out / name).stat().st_size > 10_000


def test_responses_leave_the_band_that_tokens_do_not(found):
  held = found["0.0003"]["held_out"]
  assert held["token"][-1, -1] == 0 < 0.1 < held["sequence"][-1, -1]
  assert held["GRPO leaves out"][-1, -1] == 0 < 0.3 < held["GSPO leaves out"][-1, -1]
  assert held["variance"][-1, -1] == pytest.approx(2 * 32 * held["k3"][-1, -1], rel=0.2)


def test_a_response_is_worth_less_when_it_is_longer_or_the_policy_further(found):
  size = found["0.003"]["held_out"]["sample_size"]
  assert np.all(np.diff(size) < 0)  # with the length
  assert np.all(np.diff(size[:, -1]) < 0)  # with the updates
  assert size[-1, -1] < 0.7
  large, small = (found[name]["held_out"]["k3"][-1, -1] for name in ("0.003", "0.0003"))
  assert 0 < 10 * small < large


def test_training_on_a_response_moves_its_own_ratio_most(found):
  own, other = found["0.003"]["trained"]["pull"][-1], found["0.003"]["held_out"]["pull"][-1, -1]
  assert own > 0.2 > abs(other)


def test_without_the_data_responses_are_no_longer_than_the_chain(monkeypatch, tmp_path):
  monkeypatch.setenv("JAXRL_LM_DATA", str(tmp_path))
  config = policies.possible(FULL)
  assert (config.stories, config.tokens, config.lengths[-1]) == (False, 128, 128)


@pytest.mark.slow
def test_the_transformer_that_is_made_here_follows_the_chain(monkeypatch, tmp_path):
  monkeypatch.setattr(run, "RESULTS", tmp_path)
  config = replace(SMALL, chain=Chain(tokens=32, steps=100), warmup_steps=1)
  start = policies.start(config, tmp_path / "warm-up", lambda _: None)
  assert int(start.state.step) == 1
  rows = RolloutConfig(20, 8, 32, stop_tokens=())
  drawn = rollouts.rollout(start.policy, start.task, rows, seed=0, step=0, cursor=0)
  tokens = drawn.samples.tokens - 1  # 0 is the end
  assert np.mean(tokens < 0) < 0.06  # it knows that one token in 33 is the end, not yet which
  counts = np.zeros((6, 6))
  np.add.at(counts, (tokens[:, :-1], tokens[:, 1:]), 1)
  behaviour, _ = pair(ratio_explosion.Chain(), 2e-4)
  seen = counts[:5, :5] / counts[:5, :5].sum(axis=1, keepdims=True)
  np.testing.assert_allclose(seen, np.exp(behaviour.transition), atol=0.1)


def test_statistics_of_given_ratios():
  values = np.array([[1.0, 0.6, 0.4], [1.0, 0.9, 0.8]])
  lost = measures.crossing((1, 4, 16), values, 0.5)
  np.testing.assert_allclose(lost, [8.0, np.nan])  # half of the way from log 4 to log 16
  mean, half = intervals.interval([[1.0], [2.0], [3.0]])
  np.testing.assert_allclose([mean[0], half[0]], [2.0, 4.302653 / np.sqrt(3)], rtol=1e-6)
  assert expected.normal_share(np.array(1e-9)) == 0
  draws = np.random.default_rng(0).normal(-0.045, 0.3, 100_000)
  outside = np.mean((draws < np.log(0.8)) | (draws > np.log(1.2)))
  assert expected.normal_share(np.array(0.045)) == pytest.approx(outside, abs=0.005)
