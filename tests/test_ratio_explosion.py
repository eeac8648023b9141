"""Claim: importance ratios of long responses explode while no token's ratio does.

Setting: the small configuration of the experiment, and 64 synthetic rollouts. Time: ten seconds.
"""

import itertools
import json

import numpy as np
import pytest

from configs import ratio_explosion as configs
from experiments import ratio_explosion
from experiments.ratio_explosion import chains as ratio_explosion_chains
from experiments.ratio_explosion import counting as counting_measures
from jaxrl_lm.exact import chains

SPREAD = 0.02  # of a synthetic token's log-ratio


def synthetic_rollouts(path):
  """Independent normal log-ratios of mean -KL: their variances add up, the mean ratio is 1."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(190, 256, 64)
  mask = np.arange(255) < tokens[:, None]
  sampler = -rng.exponential(1.0, mask.shape).astype(np.float32)
  moved = rng.normal(-(SPREAD**2) / 2, SPREAD, mask.shape)
  np.savez(
    path,
    tokens=np.zeros((64, 256), np.int16),
    mask=mask,
    logp_sampler_bf16w=np.where(mask, sampler, np.nan),
    logp_f32=(sampler + moved).astype(np.float32),
    logp_bf16=(sampler + moved[::-1] / 4).astype(np.float32),
  )


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  return tmp_path_factory.mktemp("run") / "small"


@pytest.fixture(scope="module")
def summary(tmp_path_factory, out):
  data = tmp_path_factory.mktemp("data")
  synthetic_rollouts(data / ratio_explosion.ROLLOUTS)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAXRL_LM_DATA", str(data))
    return ratio_explosion.main(configs.SMALL, out=out)


def statuses(summary, start):
  return [x["status"] for x in summary["expectations"] if x["name"].startswith(start)]


def test_every_golden_comes_out(summary):
  assert summary["missed"] == []
  assert sum(x["kind"] == "golden" for x in summary["expectations"]) == 7
  assert all(x["status"] != "undecided" for x in summary["expectations"])
  assert all(x["explanation"] for x in summary["expectations"] if x["status"] == "contradicted")


def test_responses_leave_the_band_that_no_token_leaves(summary):
  lengths = configs.SMALL.chain.lengths
  found = summary["results"]["clipping-0.0002"]
  outside = dict(zip(lengths, np.sum(found["sequence"], axis=1)))
  assert np.sum(found["token"]) == 0
  assert outside[16] < 0.02 < 0.5 < outside[256] < 0.55 < 0.89 < outside[4096] < 0.91
  prefix = np.sum(found["prefix"], axis=1)
  assert np.all(prefix < list(outside.values()))
  # The effective sample size is exp(-2 KL T).
  second = summary["results"]["moments-0.0002"]["log_second_moment"]
  np.testing.assert_allclose(second[-1], 2 * 2e-4 * 4096, rtol=0.01)


def test_a_band_on_the_length_normalised_ratio_is_a_threshold_in_the_end(summary):
  for name, thresholds in (("GSPO", 3e-4), ("LUSPO", 2e-3)):
    for rate in configs.SMALL.chain.rates:
      early, late = np.sum(summary["results"][f"gates-{rate:g}"][name], axis=1)
      assert (late > 0.99) if rate > thresholds else (late < 0.01)
  assert 0.5 < np.sum(summary["results"]["gates-0.0002"]["GSPO"][0]) < 0.9  # at 256 tokens


def test_how_much_a_token_ratio_removes_depends_on_the_shift(summary):
  rows = summary["results"]["counting-majority-64"]
  mild = {
    (row["shift"], row["estimator"]): row
    for row in counting_measures.select(rows, rate=configs.SMALL.counting.rates[0])
  }
  removed = {shift: mild[shift, "token"]["removed"] for shift, _ in mild}
  assert removed["constant"] > 0.85
  assert removed["reverting"] < 0.3
  assert 0.5 < removed["gradient"] < removed["random"] < 0.75
  assert mild["gradient", "prefix"]["removed"] < 0  # worse than no ratio
  for shift in removed:
    assert mild[shift, "sequence"]["relative_bias"] < 1e-9
    assert mild[shift, "geometric"]["removed"] < 0.03
    assert (
      mild[shift, "token"]["log_variance_ratio"]
      <= 0
      < mild[shift, "sequence"]["log_variance_ratio"]
    )
    assert mild[shift, "token"]["log_crossover"] > np.log(500)
  assert set(statuses(summary, "share of the bias that a token ratio removes")) == {"contradicted"}


def test_the_variances_of_independent_tokens_add_up(summary):
  assert statuses(summary, "float32 trainer: observed over predicted") == ["confirmed"] * 2
  found = summary["results"]["rollouts"]["float32 trainer"]
  np.testing.assert_allclose(found["token_variance"][0], SPREAD**2, rtol=0.05)
  np.testing.assert_allclose(found["k3"][0], SPREAD**2 / 2, rtol=0.1)
  assert found["rows"] == [64, 64]
  assert np.sum(found["token"]) == 0 < np.sum(found["sequence"][-1])


def test_the_run_is_on_disk_and_continues(out, summary, capsys):
  again = ratio_explosion.main(configs.SMALL, out=out)
  assert "counting-majority-64: stored" in capsys.readouterr().out
  assert again["expectations"] == summary["expectations"]
  written = json.loads((out / "summary.json").read_text())
  assert written["results"] == summary["results"]
  assert len(written["figures"]) == 4
  for name in written["figures"]:
    assert (out / name).stat().st_size > 10_000


def test_states_that_share_parameters(x64):
  settings = configs.Counting(policy=configs.Network(width=4), lengths=(12,), rates=(1e-3,))
  for reward, unbiased in (("majority", {"sequence"}), ("first", {"token", "prefix", "sequence"})):
    rows = counting_measures.measure(settings, reward, 12)
    assert {row["shift"] for row in rows} == {"constant", "random", "gradient"}
    for row in rows:
      if row["estimator"] in unbiased:
        assert row["relative_bias"] < 1e-9
      elif reward == "majority":
        assert row["relative_bias"] > 1e-4


def test_the_kl_of_a_shift_is_what_was_asked_for(x64):
  length = 5
  settings = configs.Counting(policy=configs.Network(), rates=(1e-2,))
  responses = np.array(list(itertools.product((0, 1), repeat=length)))
  counts = np.cumsum(responses, axis=1) - responses
  for make in (counting_measures.table_shifts, counting_measures.network_shifts):
    for _, way in make(settings, counting_measures.REWARDS["majority"](length)):
      logits = way.logits(0.0), way.logits(counting_measures.at_kl_rate(way, 1e-2))
      sign = 2 * responses - 1
      behaviour, target = (
        np.sum(-np.logaddexp(0, -sign * x[np.arange(length), counts]), axis=1) for x in logits
      )
      divergence = np.sum(np.exp(behaviour) * (behaviour - target)) / length
      np.testing.assert_allclose(divergence, 1e-2, rtol=1e-8)


def test_the_chains_are_at_their_rates():
  for rate in configs.FULL.chain.rates:
    pair = ratio_explosion_chains.pair(configs.FULL.chain, rate)
    np.testing.assert_allclose(chains.kl_rate(*pair), rate, rtol=1e-9)
