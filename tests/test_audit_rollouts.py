"""Claim: an audit finds the fault that a log has, and none where there is none.

Setting: synthetic rollouts with a known fault, over seeds; formulas against the library's masks,
against a policy that is really moved, and against plain loops. Time: half a minute.
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

import jaxrl_lm as rl
from configs.audit_rollouts import FULL, Rules
from experiments.audit_rollouts import (
  command,
  figures,
  findings,
  intervals,
  measure,
  mismatch,
  report,
  shares,
  trends,
  weights,
)
from experiments.audit_rollouts.collection import Log, Responses
from experiments.audit_rollouts.ratios import Accumulator, TokenRatios
from experiments.length_bias.groups import token_weights
from tests.rollout_logs import logprobs, rollouts, write_jsonl

ROOT = Path(__file__).parents[1]


def responses(columns):
  return Responses(*(columns.get(k) for k in ("group", "length", "reward", "step", "truncated")))


def log_of(columns, pairs=None):
  accumulator = Accumulator(FULL.band)
  if pairs is not None:
    accumulator.add(list(zip(*pairs)))
  return Log(responses(columns), accumulator.result(), "tokens", {}, [])


def synthetic(seed, *, healthy=False, **fault):
  """A log with a fault; a healthy one may have steps whose responses are all longer or shorter."""
  of_tokens = {key: fault.pop(key) for key in ("noise", "temperature", "drift") if key in fault}
  columns = rollouts(seed, shocks=0.05 * (seed % 2) if healthy else 0.0, **fault)
  lengths = np.random.default_rng(seed).integers(40, 120, 100)
  return log_of(columns, logprobs(lengths, seed, **of_tokens))


def found(measured, rules=FULL.rules, kind="fault"):
  judged = findings.judge(measured, rules, "tokens")
  return {row.name for row in judged if row.status == findings.FOUND and row.kind == kind}


FAULTS = {
  "wrong answers grow": {"growth": 0.5},
  "wrong answers outgrow correct ones": {"growth": 0.5},
  "groups without signal": {"silent": 0.75},
  "truncation": {"limit": 250},
  "sampler mismatch": {"noise": 0.1},
  "sampler log-probs are not the sampler's": {"temperature": 0.7},
  "few effective samples": {"noise": 0.25},
  "mismatch grows faster than length": {"drift": 4.0},
}
# What comes with a fault, as it must: a large mismatch costs samples.
BESIDE = {
  "wrong answers grow": {"wrong answers outgrow correct ones"},
  "wrong answers outgrow correct ones": {"wrong answers grow"},
  "sampler log-probs are not the sampler's": {"sampler mismatch", "few effective samples"},
  "few effective samples": {"sampler mismatch"},
  "mismatch grows faster than length": set(),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_known_fault_is_found_and_no_other(name, x64):
  for seed in range(3):
    seen = found(measure(synthetic(seed, **FAULTS[name]), FULL))
    assert name in seen, seed
    assert seen <= {name} | BESIDE.get(name, set()), seed


def false_alarms(seeds):
  """Of healthy logs: at the thresholds, and with thresholds at no effect."""
  strict = replace(Rules(), growth=0.0, normalised=0.0)
  at_default, at_zero = Counter(), Counter()
  for seed in seeds:
    measured = measure(synthetic(seed, healthy=True), FULL)
    at_default.update(found(measured))
    at_zero.update(found(measured, strict))
  return at_default.total(), at_zero.total()


def test_a_healthy_log_raises_no_alarm(x64):
  # At no effect 3 one-sided rules at 0.5 %, two-sided 1 %, one-sided 0.5 %: 3 % of the logs.
  at_default, at_zero = false_alarms(range(30))
  assert at_default == 0
  assert at_zero <= stats.binom.isf(1e-3, 30, 0.03)


@pytest.mark.slow
def test_the_rate_of_false_alarms(x64):
  at_default, at_zero = false_alarms(range(1000, 1300))
  assert at_default <= stats.binom.isf(1e-3, 300, 0.01)
  assert at_zero <= stats.binom.isf(1e-3, 300, 0.03)


@pytest.fixture(scope="module")
def ragged():
  """Groups of 1 to 5 in three steps, one response empty, one group silent; scattered rows."""
  rng = np.random.default_rng(0)
  sizes = [3, 1, 5, 2, 4, 4]
  group = np.repeat(np.arange(6), sizes)
  columns = {
    "group": group,
    "length": rng.integers(1, 9, len(group)),
    "reward": rng.choice([0.0, 0.25, 1.0], len(group)),
    "step": np.repeat([4, 4, 4, 9, 9, 11], sizes),
  }
  columns["length"][4] = 0
  columns["reward"][group == 3] = 0.5
  order = rng.permutation(len(group))
  return responses({key: x[order] for key, x in columns.items()})


@jax.jit
def of_the_library(mask):
  return {
    "sequence sum": rl.sequence_sum(mask),
    "token mean": rl.token_mean(mask),
    "group token mean": rl.group_token_mean(mask),
    "sequence mean": rl.sequence_mean(mask),
  }


def test_weights_and_advantages_are_the_librarys(ragged, x64, monkeypatch):
  got = weights.weights(ragged)
  for step in np.unique(ragged.step):
    mask = np.zeros((6, 5, 8), bool)  # groups of other steps are empty, and not counted
    rows = {group: np.flatnonzero(ragged.group == group) for group in range(6)}
    rows = {group: x for group, x in rows.items() if ragged.step[x[0]] == step}
    for group, members in rows.items():
      mask[group, : len(members)] = np.arange(8) < ragged.length[members, None]
    for name, library in of_the_library(mask).items():
      total = np.asarray(library.sum(-1))
      for group, members in rows.items():
        want = total[group, : len(members)]
        np.testing.assert_allclose(got[name][members] * ragged.length[members], want, rtol=1e-12)
  advantages, signal = weights.group_advantages(ragged)
  for group in range(6):
    rewards = ragged.reward[ragged.group == group]
    centred = rewards - rewards.mean()
    np.testing.assert_allclose(advantages[ragged.group == group], centred, atol=1e-15)
    assert signal[group] == (np.ptp(rewards) > 0)
  assert weights.disagreement(ragged) < 1e-12
  monkeypatch.setattr(
    weights, "weights", lambda x: {"token mean": got["sequence mean"][: len(x.group)]}
  )
  assert weights.disagreement(ragged) > 0.1


def test_the_drift_is_that_of_a_policy_that_is_moved(x64):
  """One logit per response, two prompts, small groups that are the whole language."""
  group = np.repeat([0, 1], 6)
  length = np.array([2, 9, 4, 7, 3, 5, 8, 1, 6, 2, 7, 4])
  reward = np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0.25, 1])
  columns = {"group": group, "length": length, "reward": reward}
  wrong = reward <= 0.5
  advantages, _ = weights.group_advantages(responses(columns))
  table = weights.shifts(responses(columns), advantages, wrong, 0.99)
  for name, w in weights.expected_weights(responses(columns)).items():

    def moved(eta, w=w):
      probs = np.exp(eta * advantages * w)
      within = lambda x, where: [  # noqa: E731
        np.average(x[where & (group == g)], weights=probs[where & (group == g)]) for g in (0, 1)
      ]
      lengths, gains = within(length, wrong), within(reward, np.ones(12, bool))
      return np.average(lengths, weights=[3, 3]), np.mean(gains)

    (after, gain_after), (before, gain_before) = moved(1e-5), moved(-1e-5)
    # The probabilities are known here; in a sample of them a covariance divides by n - 1: twice.
    want = (after - before) / (gain_after - gain_before) * (3 / 2) / (6 / 5)
    assert table["wrong"][name]["drift"] == pytest.approx(want, rel=1e-6)


def test_with_binary_rewards_only_what_divides_by_a_length_shifts_lengths(x64):
  columns = responses(rollouts(0))
  advantages, _ = weights.group_advantages(columns)
  wrong = columns.reward == 0
  table = weights.shifts(columns, advantages, wrong, 0.99)
  assert abs(table["wrong"]["sequence sum"]["drift"]) < 1e-12
  mean, of_group, of_batch = (
    table["wrong"][name]["shift"] for name in ("sequence mean", "group token mean", "token mean")
  )
  assert mean[1] > of_group[2] > of_group[1] > of_batch[2] > 0
  # A group of 8 contains the response itself: an eighth of the shift.
  assert of_group[0] / mean[0] == pytest.approx(1 / 8, rel=0.25)
  assert table["correct"]["sequence mean"]["shift"][2] < 0
  same = replace(columns, length=np.full_like(columns.length, 100))
  assert weights.shifts(same, advantages, wrong, 0.99)["wrong"]["sequence mean"]["shift"][0] == 0


@pytest.mark.slow
def test_the_push_is_that_of_the_length_bias_experiment(tmp_path, x64):
  columns = rollouts(0, steps=4)
  grouped = {key: columns[key].reshape(-1, 8) for key in ("reward", "length")}
  np.savez(tmp_path / "a.npz", correct=grouped["reward"], len_qwen_tokens=grouped["length"])
  want = token_weights(tmp_path / "a.npz")
  flat = replace(responses(columns), step=None)
  advantages, signal = weights.group_advantages(flat)
  got = weights.push(flat, advantages, signal, flat.reward == 0, 5)
  # There a batch is the groups with signal, here all: the same but for a constant.
  assert got["groups"] == want["groups"]
  for here, there in (("sequence mean", "sequence mean"), ("sequence sum", "sum")):
    for side in ("wrong", "correct"):
      np.testing.assert_allclose(got[here][side], want[there][side], rtol=1e-12)
    assert got[here]["longest"] == pytest.approx(want[there]["share_wrong_longest"])
  assert got["longest_tokens"] == pytest.approx(want["share_tokens"])


def test_ratios_are_those_of_a_loop(x64):
  trainer, sampler = logprobs(np.array([1, 30, 200, 7] * 9), noise=0.2)
  accumulator = Accumulator((0.2, 0.2))
  for begin in (0, 10, 20):  # what comes in parts is the same
    end = {20: None}.get(begin, begin + 10)
    accumulator.add(list(zip(trainer[begin:end], sampler[begin:end])))
  got = accumulator.result()
  ratios = [a - b for a, b in zip(trainer, sampler)]
  tokens, total = np.concatenate(ratios), np.array([x.sum() for x in ratios])
  want = {
    "tokens": [len(x) for x in ratios],
    "total": total,
    "square": [np.sum(x**2) for x in ratios],
    "excess": [np.sum(np.exp(x) - 1) for x in ratios],
    "outside": [np.sum((np.exp(x) < 0.8) | (np.exp(x) > 1.2)) for x in ratios],
    "half_tokens": [len(x) // 2 for x in ratios],
    "half_total": [np.sum(x[: len(x) // 2]) for x in ratios],
  }
  for key, x in want.items():
    np.testing.assert_allclose(got.sums[key], x, rtol=1e-10, atol=1e-12, err_msg=key)
  kish = lambda w: np.sum(w) ** 2 / len(w) / np.sum(w**2)  # noqa: E731
  assert got.token_worth == pytest.approx(kish(np.exp(tokens)))
  assert got.sequence_worth == pytest.approx(kish(np.exp(total)))
  assert got.extremes == pytest.approx((tokens.min(), tokens.max()))
  outside = (np.exp(total) < 0.8) | (np.exp(total) > 1.2)
  assert got.sequences_outside == pytest.approx(outside.mean())


def test_the_variance_predicts_what_longer_responses_are_worth(x64):
  """From 32 tokens to 256: independent normal log-ratios of a known variance."""
  rng, spread = np.random.default_rng(0), 0.05

  def drawn(tokens):
    n = rng.integers(tokens - 8, tokens + 9, 4000)
    token = rng.normal(-(spread**2) / 2, spread, (4000, tokens + 8))
    token, half = (np.where(np.arange(tokens + 8) < x[:, None], token, 0.0) for x in (n, n // 2))
    sums = {"tokens": n, "total": token.sum(1), "half_tokens": n // 2, "half_total": half.sum(1)}
    sums |= {"square": (token**2).sum(1), "excess": np.expm1(token).sum(1), "outside": 0 * n}
    worth = np.exp(sums["total"]).mean() ** 2 / np.exp(2 * sums["total"]).mean()
    return mismatch.mismatch(TokenRatios(sums, 1.0, worth, (0.0, 0.0), 0.0), (256,), 0.999)

  short, long = drawn(32), drawn(256)
  _, low, high = short["variance"]
  assert low < spread**2 < high
  _, low, high = short["predicted"][1]
  assert low < np.exp(-(spread**2) * 256) < high
  assert low < long["sequence_worth"] < high
  assert long["sequence_worth_predicted"] == pytest.approx(long["sequence_worth"], abs=0.03)
  # The first halves alone say what the whole responses are worth.
  half = long["half"]
  assert half["worth"] == pytest.approx(np.exp(-(spread**2) * 128), abs=0.03)
  assert half["sequence_worth_predicted"] == pytest.approx(long["sequence_worth"], abs=0.03)
  for table in (short, long):
    assert table["doubling"][1] < 1 < table["doubling"][2]
    assert table["k1"][1] < spread**2 / 2 < table["k1"][2]


def test_a_ratio_that_overflows_is_a_large_number(x64):
  accumulator = Accumulator((0.2, 0.2))
  accumulator.add([(np.array([-1.0, -1.0]), np.array([-1.0, -1e4]))] * 40)
  table = mismatch.mismatch(accumulator.result(), (256,), 0.99)
  assert table["extremes"] == [0.0, 9999.0]
  assert np.isfinite(table["k3"]).all()
  assert "sampler mismatch" in found({"mismatch": table})


def test_equal_log_probs_have_no_mismatch(x64):
  accumulator = Accumulator((0.2, 0.2))
  accumulator.add([(np.full(9, -1.0), np.full(9, -1.0))] * 40)
  table = mismatch.mismatch(accumulator.result(), (256,), 0.99)
  assert (table["variance"] == 0).all()
  assert (table["predicted"] == 1).all()
  judged = findings.judge({"mismatch": table}, FULL.rules, "tokens")
  assert {row.status for row in judged} == {findings.NOT_FOUND, findings.UNDECIDED}


def test_a_limit_shows_without_a_flag(x64):
  columns = rollouts(0, limit=300)
  flagged = shares.truncation(responses(columns), columns["reward"] == 0, 0.99)
  inferred = shares.truncation(
    responses(columns | {"truncated": None}), columns["reward"] == 0, 0.99
  )
  assert (flagged["flag"], inferred["flag"]) == (True, False)
  assert inferred["limit"] == 300
  np.testing.assert_allclose(inferred["all"][0], flagged["all"][0], atol=0.003)  # ties below it
  open_ended = rollouts(0)
  table = shares.truncation(
    responses(open_ended | {"truncated": None}), columns["reward"] == 0, 0.9
  )
  assert table["limit"] == 0


@pytest.mark.parametrize(
  "draw",
  [
    lambda rng: rng.integers(1, 3, 800),
    lambda rng: rng.binomial(10, 0.9, 800),
    lambda rng: 64 * rng.integers(1, 9, 800),
    lambda rng: np.where(rng.random(800) < 0.5, 40, 200),
  ],
  ids=["one or two tokens", "short", "rounded", "two templates"],
)
def test_lengths_that_repeat_are_no_limit(draw):
  rng = np.random.default_rng(0)
  columns = {"group": np.arange(800) // 8, "length": draw(rng), "reward": np.ones(800)}
  table = shares.truncation(responses(columns), np.zeros(800, bool), 0.99)
  assert table["limit"] == 0
  assert table["all"][0] == 0


def test_shares_of_groups():
  columns = {
    "group": np.array([0, 0, 1, 1, 2, 2, 3, 4, 4]),
    "reward": np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.7, 0.6]),
    "length": np.ones(9, int),
  }
  signal = np.array([False, False, True, False, True])
  table = shares.silent_groups(responses(columns), signal, columns["reward"] <= 0.5, 0.99)
  assert (table["groups"], table["single"]) == (4, 1)
  got = {key: table[key][0] for key in ("silent", "all_correct", "all_wrong")}
  assert got == {"silent": 0.5, "all_correct": 0.5, "all_wrong": 0.25}


def test_a_slope_is_that_of_least_squares():
  rng = np.random.default_rng(0)
  x, y = np.arange(12.0), rng.normal(size=12)
  want = stats.linregress(x, y)
  half = want.stderr * stats.t.isf(0.005, 10)
  got = intervals.slope(x, y, np.full(12, 7.0), 0.99)
  np.testing.assert_allclose(got, [want.slope, want.slope - half, want.slope + half], rtol=1e-12)
  # A weight of 2 is two points: the slope of the repeated ones.
  weight = rng.integers(1, 4, 12).astype(float)
  repeated = stats.linregress(np.repeat(x, weight.astype(int)), np.repeat(y, weight.astype(int)))
  assert intervals.slope(x, y, weight, 0.99)[0] == pytest.approx(repeated.slope)
  assert np.isnan(intervals.slope(x[:2], y[:2], np.ones(2), 0.99)).all()


def test_an_interval_of_a_ratio_covers_it():
  rng, inside = np.random.default_rng(0), 0
  for _ in range(400):
    size = rng.integers(1, 9, 60)
    p = rng.beta(1.0, 3.0, 60)
    _, low, high = intervals.share(rng.binomial(size, p), size, 0.95)
    inside += low < 0.25 < high
  assert stats.binom.ppf(1e-4, 400, 0.93) <= inside  # small samples: a little below 95 %


def test_blocks_of_steps_are_means(x64):
  columns = rollouts(0, steps=50, growth=0.4)
  wrong = columns["reward"] == 0
  table = trends.lengths_over_steps(responses(columns), wrong, 20, 0.99)
  block = (columns["step"] * 20 // 50)[wrong]
  want = [columns["length"][wrong][block == k].mean() for k in range(20)]
  np.testing.assert_allclose(table["wrong"]["mean"], want)
  assert table["wrong"]["count"].sum() == wrong.sum()
  # From 1 to 1.4 of what they were at first: 0.4 of 1, of a mean of 1.2.
  _, low, high = table["wrong"]["change"]
  assert low < 0.4 / 1.2 < high
  assert trends.lengths_over_steps(responses(columns | {"step": None}), wrong, 20, 0.99) is None


def test_a_change_is_a_share_of_the_mean_of_its_kind():
  step = np.repeat(np.arange(11), 4)
  wrong = np.tile([True, False, True, False], 11)
  length = np.where(wrong, 100 + 4 * step, 50)  # from 100 to 140, of a mean of 120; 85 of all
  columns = {"group": step, "step": step, "length": length, "reward": 1.0 - wrong}
  table = trends.lengths_over_steps(responses(columns), wrong, 20, 0.99)
  np.testing.assert_allclose(table["wrong"]["change"], 40 / 120, rtol=1e-9)
  np.testing.assert_allclose(table["correct"]["change"], 0.0, atol=1e-12)
  np.testing.assert_allclose(table["difference"], 40 / 85, rtol=1e-9)


def test_few_groups_decide_nothing(x64):
  measured = measure(synthetic(0, steps=4, prompts=4, silent=1.0), FULL)
  judged = {row.name: row for row in findings.judge(measured, FULL.rules, "tokens")}
  assert judged["groups without signal"].status == findings.UNDECIDED
  assert "Too few" in judged["groups without signal"].sentence


ODD = {
  "no tokens": {"length": [0, 0, 0, 0]},
  "all correct": {"reward": [1, 1, 1, 1]},
  "all wrong": {"reward": [0, 0, 0, 0]},
  "one length": {"length": [5, 5, 5, 5]},
  "a large and a small group": {
    "group": [0] * 3000 + [1, 1],
    "reward": [0, 1] * 1501,
    "length": list(range(3002)),
  },
  "rewards without a scale": {"reward": [-3.5, -3.4, 120.0, 3.0]},
  "one step": {"step": [7, 7, 7, 7]},
  "five steps, each of one kind": {
    "group": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
    "reward": [0, 0, 1, 1, 0, 0, 1, 1, 0, 0],
    "length": [3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    "step": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
  },
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_log_is_audited(name, x64, capsys):
  usual = {"group": [0, 0, 1, 1], "reward": [0, 1, 1, 0], "length": [3, 4, 5, 6]}
  columns = {key: np.array(x) for key, x in (usual | ODD[name]).items()}
  measured = measure(log_of(columns), FULL)
  judged = findings.judge(measured, FULL.rules, "tokens")
  assert {row.status for row in judged} == {findings.UNDECIDED}
  report.show(measured, judged, "tokens", [])
  assert "Not decided: " in capsys.readouterr().out
  assert len(figures.page(measured, "tokens", name).axes) == 6


@pytest.mark.slow
def test_the_check_of_the_weights_takes_part_of_a_large_group(x64):
  group = np.repeat([0, 1, *range(2, 40)], [3000, 2, *[4] * 38])
  columns = {"group": group, "reward": group % 2, "length": np.arange(len(group)) * 50}
  assert weights.disagreement(responses(columns)) < 1e-12


def test_responses_without_a_token_have_no_ratios(x64):
  accumulator = Accumulator((0.2, 0.2))
  accumulator.add([])
  assert accumulator.result() is None
  accumulator.add([(np.zeros(0), np.zeros(0))] * 3)
  assert mismatch.mismatch(accumulator.result(), (256,), 0.99) is None


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
  """The command, on a run whose wrong answers grow, with log-probs, written in two files."""
  folder = tmp_path_factory.mktemp("audit")
  columns = rollouts(0, steps=30, prompts=4, size=4, growth=0.8)
  trainer, sampler = logprobs(columns["length"] // 8)
  columns |= {"length": columns["length"] // 8}
  columns |= {"trainer_logprobs": trainer, "sampler_logprobs": sampler}
  half = len(trainer) // 2
  parts = [slice(None, half), slice(half, None)]
  paths = [
    write_jsonl(folder / f"{i}.jsonl", {key: x[part] for key, x in columns.items()})
    for i, part in enumerate(parts)
  ]
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("COLUMNS", "100")
    command.cli([*map(str, paths), "--out", str(folder / "out"), "--bins", "4"])
  return folder


def test_the_command_finds_it_and_says_so_in_its_summary(audited):
  summary = json.loads((audited / "out" / "summary.json").read_text())
  assert summary["missed"] == []
  assert summary["figures"] == ["audit.png"]
  assert (audited / "out" / "audit.png").stat().st_size > 50_000
  assert summary["config"]["config"]["bins"] == 4
  results = summary["results"]["audit"]
  assert results["log"]["counts"] == {"files": 2, "responses": 480, "skipped": 0, "unscored": 0}
  status = {row["name"]: row["status"] for row in results["findings"]}
  assert status["wrong answers outgrow correct ones"] == "found"
  assert status["sequence mean would lengthen wrong answers"] == "found"
  assert status["sampler mismatch"] == "not found"
  assert len(results["push"]["sequence mean"]["wrong"]) == 4
  assert any("outgrew correct ones by" in line for line in results["sentences"])


@pytest.mark.slow
def test_the_same_command_says_the_same_and_another_one_does_not_overwrite(audited, capsys):
  paths = [str(audited / f"{i}.jsonl") for i in range(2)]
  before = (audited / "out" / "audit.png").read_bytes()
  command.cli([*paths, "--out", str(audited / "out"), "--bins", "4"])
  assert "FAULT, wrong answers outgrow correct ones" in capsys.readouterr().out
  assert (audited / "out" / "audit.png").read_bytes() == before
  with pytest.raises(SystemExit) as stopped:
    command.cli([*paths[:1], "--out", str(audited / "out"), "--bins", "4"])
  assert stopped.value.code == 2
  assert "holds results of another configuration" in capsys.readouterr().err


@pytest.mark.slow
def test_a_million_rows_within_a_minute_and_little_memory(tmp_path):
  columns = rollouts(0, steps=1000, prompts=125, size=8)
  names = ("step", "group", "reward", "length")
  rows = zip(*(columns[name].tolist() for name in names))
  line = '{{"step": {}, "group": "{}", "reward": {}, "length": {}, "output": "{}"}}\n'.format
  with (tmp_path / "log.jsonl").open("w") as file:
    file.writelines(line(*row, "x" * 200) for row in rows)
  code = """
import resource, sys, time
from experiments.audit_rollouts import command
command.cli([sys.argv[1], "--out", sys.argv[2]])
usage = resource.getrusage(resource.RUSAGE_SELF)
print("used", usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
"""
  used = []
  for number in (1000, None):
    path = tmp_path / "log.jsonl"
    if number:
      path = tmp_path / "short.jsonl"
      with (tmp_path / "log.jsonl").open() as file:
        path.write_text("".join(next(file) for _ in range(number)))
    done = subprocess.run(
      [sys.executable, "-c", code, str(path), str(tmp_path / f"out{number}")],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=True,
    )
    used.append([float(x) for x in done.stdout.splitlines()[-1].split()[1:]])
  (_, before), (seconds, after) = used
  assert seconds < 60  # of processor time: a busy machine is not the audit's fault
  assert after - before < 250  # MiB; the log itself has 270
