"""Claim: exact advantages telescope, and what each assignment of credit costs is what theory says.

Setting: the small configuration of the experiment, table and network. Time: ten seconds.
"""

import json

import numpy as np
import pytest

from configs import credit_assignment as settings
from experiments import credit_assignment
from experiments.credit_assignment import measures
from experiments.harness import storage
from jaxrl_lm.exact.credit import credit_moments

LAMBDAS = list(settings.SMALL.lambdas)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  return tmp_path_factory.mktemp("run") / "small"


@pytest.fixture(scope="module")
def summary(out):
  return credit_assignment.main(settings.SMALL, out=out)


@pytest.fixture(scope="module")
def found(out, summary):  # `summary` is the run that stores them
  """By policy and reward: what the parts have stored."""
  parts = out / "parts"
  return {name: storage.load(parts / f"{name}.npz")["value"] for name in ("table", "network")}


def rows(summary, start, end):
  chosen = [x for x in summary["expectations"] if x["name"].startswith(start) and end in x["name"]]
  assert chosen
  return chosen


def test_every_golden_comes_out(summary):
  assert summary["missed"] == []
  assert sum(x["kind"] == "golden" for x in summary["expectations"]) == 28
  assert all(x["status"] != "undecided" for x in summary["expectations"])
  assert all(x["explanation"] for x in summary["expectations"] if x["status"] == "contradicted")


def test_the_exact_advantage_leaves_less_than_a_baseline(found):
  for policy in found.values():
    for row in policy.values():
      exact, baseline = (row["rows"][name]["variance"] for name in ("A", "V(x)"))
      assert np.all(exact < baseline)


def test_the_exact_advantage_is_not_almost_the_best(summary):
  for row in rows(summary, "table", "variance of A with the best state baseline"):
    assert row["status"] == "contradicted"
    assert min(row["measured"]) < 0.4


def test_only_the_first_token_is_credited_where_it_decides(found):
  given = found["table"]["first"]["advantages"]
  np.testing.assert_allclose(given["tokens"][:, 0], given["response"], rtol=1e-12)
  np.testing.assert_allclose(given["tokens"][:, 1:], 0.0, atol=1e-12)
  assert np.all(found["table"]["sum"]["advantages"]["tokens"] > 1e-3)


def test_what_lambda_does_depends_on_the_critic(found):
  for policy in found.values():
    grids = policy["sum"]["grids"]
    middle = LAMBDAS.index(0.95)
    assert np.all(grids["exact critic"]["bias"] < 1e-12)
    assert np.all(np.diff(grids["exact critic"]["batch_variance"]) > 0)
    flat, wrong = (grids[f"{name} critic"]["batch_raw_bias"] for name in ("uninformative", "wrong"))
    assert np.all(np.diff(flat) < 0)
    assert 0.005 < wrong[middle] < 0.5 * flat[middle]


def test_the_uninformative_critic_decays_the_credit():
  language = measures.enumerate_language(2, 3)
  rewards, values = np.zeros((1, 8)), np.full((1, 8, 3), 0.25)
  rewards[0, 5] = 1.0
  credit = measures.credit(language, rewards, values, gae_lambda=0.5)
  np.testing.assert_allclose(credit[0, 5], [0.1875, 0.375, 0.75])  # 0.75 of 0.5^2, 0.5, 1
  np.testing.assert_allclose(credit[0, 0], [-0.0625, -0.125, -0.25])


def test_the_best_baselines_are_best(x64):
  """Anything added to them adds variance; to the state baseline in a table."""
  given = measures.problems(settings.SMALL, settings.SMALL.table)["sum"]
  credit = measures.whole_returns(given)
  states = given.policy.language.states
  moved = np.random.default_rng(0).normal(0.0, 0.1, given.policy.language.num_states)[states]
  rows = {name: credit[name] for name in ("b*(x)", "A - c*(s)")}
  for sign in (1.0, -1.0):
    rows[f"b*(x) {sign}"] = credit["b*(x)"] + sign * 0.1
    rows[f"A - c*(s) {sign}"] = credit["A - c*(s)"] + sign * moved
  found = credit_moments(given.policy, rows, given.rewards)
  for name in ("b*(x)", "A - c*(s)"):
    for sign in (1.0, -1.0):
      assert np.all(found[f"{name} {sign}"].variance > found[name].variance)
      assert np.all(found[f"{name} {sign}"].relative_bias < 1e-12)


def test_the_error_of_many_responses_is_bias_and_variance():
  grid = {"batch_bias": np.array([0.1, 0.0]), "batch_variance": np.array([1.0, 4.0])}
  error = measures.squared_error(grid, (1, 100))
  np.testing.assert_allclose(error, [[1.01, 0.02], [4.0, 0.04]])


@pytest.mark.slow
def test_the_run_is_on_disk_and_continues(out, summary, capsys):
  again = credit_assignment.main(settings.SMALL, out=out)
  assert "network: stored" in capsys.readouterr().out
  assert again["expectations"] == summary["expectations"]
  written = json.loads((out / "summary.json").read_text())
  assert written["figures"] == ["advantages.png", "variance.png", "gae.png"]
  for name in written["figures"]:
    assert (out / name).stat().st_size > 10_000
