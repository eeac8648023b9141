"""Claims: rewards rise, and none lies above what its KL to the start can buy.

Setting: the small configuration of the experiment, a random policy on tokens. Time: 5 seconds, and
40 of a CPU for the tests marked slow.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from configs import stories as configs
from experiments import stories
from experiments.harness import held_out
from experiments.stories import expected, frontier, measures, report, runs
from experiments.train import policies
from jaxrl_lm.lm import scoring

END, VOCABULARY = policies.END, policies.VOCABULARY


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tmp_path_factory.mktemp("run") / "small"


@pytest.fixture(scope="module")
def summary(out: Path) -> dict[str, Any]:
  return stories.main(configs.SMALL, out=out)


@pytest.mark.slow
def test_rewards_rise_and_stay_below_the_optimum(summary: dict[str, Any]) -> None:
  assert summary["missed"] == []
  assert sum(x["kind"] == "golden" for x in summary["expectations"]) == 4
  at_start = summary["results"]["start"]
  curve = frontier.optimum(*(np.array(at_start[x]) for x in ("levels", "probabilities")))
  assert curve.reward[0] == pytest.approx(1 / 6, abs=0.1)  # a random policy, one token of six
  for name, seed in itertools.product(configs.SMALL.algorithms, configs.SMALL.seeds):
    found = summary["results"][f"{name}-{seed}"]
    reward, kl = (np.array(x) for x in (found["rewards"]["total"], found["kl"]))
    assert reward[-1] > reward[0] + 0.4
    assert abs(kl[0]) < 1e-4 < 1.0 < kl[-1]
    # Far below the curve, not only within errors of it.
    assert np.all(reward[1:] < curve.at(kl[1:]))
  assert 0.2 < summary["rows"]["grpo"]["share at matched KL"][0] < 1


@pytest.mark.slow
def test_a_run_leaves_its_files_and_does_not_run_twice(
  summary: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  for name in ("frontier.png", "steps.png", "summary.json", "samples.md"):
    assert (out / name).stat().st_size > 100
  text = (out / "samples.md").read_text()
  assert text.count("\n## ") == 3
  assert text.count("**start**") == text.count("**rloo**") == 3
  monkeypatch.setattr(runs, "path", lambda *_: pytest.fail("a stored run was made again"))
  again = stories.main(configs.SMALL, out=out)
  assert again["rows"] == summary["rows"]


def test_without_the_model_the_task_is_addition(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("JAXRL_LM_DATA", "nowhere")
  found, line = stories._with_data(configs.FULL)
  assert found.run == configs.ADDITION
  assert found != configs.FULL  # another identity of the folder: nothing is mixed
  assert "instead of stories the task is addition" in line
  assert stories._with_data(configs.SMALL) == (configs.SMALL, "")


# ------------------------------------------------------------------------------------ the frontier


def divergence(q: np.ndarray, p: np.ndarray) -> float:
  return float(np.where(q > 0, q * np.log(np.where(q > 0, q, 1) / p), 0).sum(axis=-1).mean())


def test_no_policy_lies_above_the_curve_and_tilted_ones_on_it() -> None:
  rng = np.random.default_rng(0)
  levels, p = np.array([0.0, 0.5, 2.0]), rng.dirichlet(np.ones(3), size=4)
  curve = frontier.optimum(levels, p)
  for sharpness in (0.3, 1.0, 5.0):
    for _ in range(200):
      q = np.array([rng.dirichlet(sharpness * row / row.max()) for row in p])
      assert (q @ levels).mean() < curve.at(divergence(q, p)) + 1e-3
  tilted = p * np.exp(levels / 0.7)
  tilted /= tilted.sum(axis=-1, keepdims=True)
  reward, kl = (tilted @ levels).mean(), divergence(tilted, p)
  assert curve.at(kl) == pytest.approx(reward, abs=1e-3)
  assert curve.least_kl(reward) == pytest.approx(kl, abs=1e-3)
  assert curve.least_kl(2.1) == np.inf


def test_of_two_rewards_the_best_of_n_is_optimal() -> None:
  p = 0.05
  levels, table = np.array([0.0, 1.0]), np.array([[1 - p, p]])
  best, curve = frontier.best_of(levels, table), frontier.optimum(levels, table)
  n = frontier.BEST_OF
  np.testing.assert_allclose(best.reward, 1 - (1 - p) ** n)
  np.testing.assert_allclose(best.reward, curve.at(best.kl), atol=1e-3)
  assert np.all(best.kl < np.log(n) - (n - 1) / n)
  assert curve.kl[-1] == pytest.approx(-np.log(p), rel=1e-3)
  # Of three it is not, and of several prompts neither.
  levels, table = np.array([0.0, 0.1, 2.0]), np.array([[0.6, 0.35, 0.05], [0.1, 0.1, 0.8]])
  best, curve = frontier.best_of(levels, table), frontier.optimum(levels, table)
  assert np.all(best.reward < curve.at(best.kl) + 1e-3)
  assert np.any(best.reward < curve.at(best.kl) - 0.01)


# ------------------------------------------------------------------------------------ the measures


def path(reward: list[float], kl: list[float]) -> dict[str, Any]:
  return {"reward": np.array([reward]), "kl": np.array([kl])}


def test_rewards_are_compared_where_a_run_first_reached_a_kl() -> None:
  there_and_back = path([0.0, 0.4, 0.9], [0.0, 2.0, 1.0])
  assert measures.reward_at(there_and_back, 1.0) == pytest.approx(0.2)
  table = {"a": there_and_back, "b": path([0.0, 0.5, 1.0], [0.0, 1.0, 5.0])}
  assert measures.matched_kl(table) == 2.0


def test_intervals_are_those_of_t() -> None:
  x = [1.0, 2.0, 4.0, 4.5]
  low, high = stats.t.interval(0.95, 3, np.mean(x), stats.sem(x))
  found = measures.mean(x)
  assert (found.value - found.half, found.value + found.half) == pytest.approx((low, high))
  assert found.resolved == (low > 0)
  assert not measures.mean([-1.0, 2.0]).resolved


def test_a_run_above_the_curve_is_found() -> None:
  levels, p = np.array([0.0, 1.0]), np.array([[0.9, 0.1]])
  curve = frontier.optimum(levels, p)
  kl = np.array([[0.0, 0.5, 1.0]] * 3)
  noise = np.array([[-0.01], [0.0], [0.01]])
  runs_ = {"reward": curve.at(kl) + noise, "kl": kl}
  others = [curve, curve]
  assert expected.excess({"a": runs_}, curve, others)["a"].max() < 1e-6
  above = {"a": {"reward": runs_["reward"] + 0.1, "kl": kl}}
  assert expected.excess(above, curve, others)["a"].min() > expected.ERRORS


def test_samples_say_what_they_are() -> None:
  sample = {"prompt": "One day", "text": " a\ndog", "rewards": {"total": 1.0}, "length": 3}
  path = {
    "samples": {"before": [sample | {"finished": True}], "after": [sample | {"finished": False}]}
  }
  text = report.samples({"grpo": path})
  assert "- **start** (reward 1, 3 tokens, ended): a dog" in text
  assert "- **grpo** (reward 1, 3 tokens, cut off): a dog" in text


# ------------------------------------------------------------------------------------------ the KL


def test_the_kl_of_an_evaluation_is_that_of_all_responses() -> None:
  start = policies.start(configs.SMALL.run, None, lambda line: None)
  policy, rng = start.policy, np.random.default_rng(0)
  moved = jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape, np.float32), policy.params)
  train, shape = (
    runs.train_config(configs.SMALL, start, "grpo", 0),
    runs.evaluation(configs.SMALL),
  )
  call = (start.task, train, shape, jnp.asarray)
  found = held_out.evaluate(policy._replace(params=moved), *call, start=policy.params)["kl"]

  tokens = [[END, 0], *([a, b] for a in range(VOCABULARY) for b in range(VOCABULARY) if a != END)]
  mask = np.array([[True, row[0] != END] for row in tokens])
  score = jax.jit(partial(scoring.response_logprobs, policy.model))
  exact = []
  for prompt in start.task.prompts:
    prompts = np.full((len(tokens), 1), prompt.tokens)
    rows = (prompts, np.ones_like(prompts, bool), np.array(tokens), mask)
    p, q = (np.asarray(score(x, *rows), float).sum(axis=1) for x in (moved, policy.params))
    assert np.exp(p).sum() == pytest.approx(1, abs=1e-4)
    exact.append(np.sum(np.exp(p) * (p - q)))
  assert min(exact) > 0.05
  for name in ("k1", "k3"):
    assert abs(found[name]["mean"] - np.mean(exact)) < 4 * found[name]["standard_error"]
  assert found["k1"]["standard_error"] < 0.25 * np.mean(exact)
  same = held_out.evaluate(policy, *call, start=policy.params)["kl"]
  assert abs(same["k1"]["mean"]) < 1e-5
  assert "kl" not in held_out.evaluate(policy, *call)
