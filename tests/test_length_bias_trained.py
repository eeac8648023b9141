"""Claim: 1/n lengthens wrong answers of a trained transformer, beside a division by a constant.

Setting: the small configuration, and numbers with known answers. Time: a second, and a minute for
those marked slow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import length_bias_trained as configs
from experiments import length_bias_trained
from experiments.harness import run
from experiments.length_bias_trained import expected, paths, policies
from experiments.length_bias_trained.rows import CONSTANT, LABELS, MEAN, TOKEN_MEAN, rows
from jaxrl_lm.lm import tasks


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tmp_path_factory.mktemp("run") / "small"


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory, out: Path) -> dict[str, Any]:
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run, "RESULTS", tmp_path_factory.mktemp("results"))
    return length_bias_trained.main(configs.SMALL, out=out)


def row(summary: dict[str, Any], start: str) -> dict[str, Any]:
  return next(x for x in summary["expectations"] if x["name"].startswith(start))


@pytest.mark.slow
def test_a_sum_and_a_constant_are_one_update(summary: dict[str, Any]) -> None:
  assert row(summary, "filler after the answer: cosine")["status"] == "matched"
  assert row(summary, "a run with a sum less that with a constant")["measured"] == 0.0
  cosine = summary["results"]["beginning-filler"][MEAN]["cosine"]
  assert 0.5 < cosine < 0.9999


@pytest.mark.slow
def test_the_run_is_on_disk_and_continues(
  out: Path, summary: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
  again = length_bias_trained.main(configs.SMALL, out=out)
  assert "filler-mean: stored" in capsys.readouterr().out
  assert again["expectations"] == summary["expectations"]
  written = json.loads((out / "summary.json").read_text())
  assert written["figures"] == ["lengths.png", "differences.png"]
  for name in written["figures"]:
    assert (out / name).stat().st_size > 10_000


def test_lengths_are_taken_where_a_level_is_first_reached() -> None:
  path = {"p": np.array([[0.1, 0.3, 0.2, 0.5], [0.2, 0.3, 0.3, 0.35]])}
  path["wrong"] = np.array([[10.0, 12.0, 99.0, 14.0], [5.0, 5.0, 5.0, 5.0]])
  np.testing.assert_allclose(paths.at_level(path, "wrong", 0.2), [11.0, np.nan])  # it starts there
  assert np.isnan(paths.at_level(path, "wrong", 0.4)[1])
  moved = {CONSTANT: path, MEAN: {**path, "wrong": path["wrong"] + 2.0}}
  np.testing.assert_allclose(paths.levels(moved), [0.2375, 0.275, 0.3125, 0.35])
  np.testing.assert_allclose(paths.less_constant(moved, MEAN, "wrong"), np.full((2, 4), 2.0))
  high = {CONSTANT: {"p": np.array([[0.4, 0.99]])}}
  np.testing.assert_allclose(paths.levels(high), [0.5, 0.6, 0.7, 0.8])


def test_an_interval_is_students() -> None:
  # t of 0.975 and 3 degrees of freedom: 3.182; the standard error of 1, 2, 3, 4: 0.6455.
  found = paths.interval(np.array([1.0, 2.0, 3.0, 4.0, np.nan]))
  np.testing.assert_allclose(found, (2.5, 2.054), rtol=1e-3)
  assert np.isnan(paths.interval(np.array([1.0]))).all()


@pytest.mark.parametrize(
  ("longer", "status"), [(1.0, "confirmed"), (-1.0, "contradicted"), (0.0, "undecided")]
)
def test_the_claim_is_about_the_sign_of_the_difference(
  tmp_path: Path, longer: float, status: str
) -> None:
  """Synthetic runs whose wrong answers grow by `longer`, and a little noise of the seed."""
  noise = np.array([0.1, -0.2, 0.15, -0.05])[:, None]
  p = np.tile(np.linspace(0.5, 0.9, 5), (4, 1))
  path = {"p": p, "right": 5.0 + 0 * p, "wrong": 5.0 + 0 * p}
  more = {**path, "right": path["right"] + noise[::-1], "wrong": path["wrong"] + longer + noise}
  little = {**path, "wrong": path["wrong"] + 0.02 * noise}
  with run.open("synthetic", configs.SMALL, tmp_path / "out", x64=False) as experiment:
    expected.of_training(experiment, "synthetic", {CONSTANT: path, MEAN: more, TOKEN_MEAN: little})
  golden, wrong, right, gap, token_mean = experiment.expectations.rows
  assert (golden.status, wrong.status, right.status) == ("matched", status, "undecided")
  assert gap.status == status
  assert token_mean.status == ("confirmed" if longer else "undecided")


def test_without_the_data_stories_are_left_out_and_said(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.setenv("JAXRL_LM_DATA", str(tmp_path / "nowhere"))
  with run.open("synthetic", configs.SMALL, tmp_path / "out", x64=False) as experiment:
    assert length_bias_trained._stories(experiment, configs.Stories()) == {}
  assert "stories-mean: SKIPPED, stories260K/stories260K.bin not found" in capsys.readouterr().out


@pytest.mark.slow
def test_a_story_is_right_if_it_has_the_word_and_ends(tmp_path: Path) -> None:
  model = run.data_path(policies.STORIES)
  if model is None:
    pytest.skip("stories260K is absent: set JAXRL_LM_DATA")
  short = configs.Training(num_prompts=2, max_new_tokens=16)
  settings = configs.Stories(longest=24, group_size=2, steps=1, training=short)
  rewards = policies.stories(settings, model, tmp_path / "run").task.rewards
  assert [x.name for x in rewards] == [policies.RIGHT, policies.IF_RIGHT, policies.IF_WRONG]
  mask = np.arange(16) < np.array([[5], [9], [16]])
  texts = ("They were happy.", "They were sad.", "They were happy and")
  prompts = (tasks.Prompt("A day", (1,), "happy"),) * 3
  given = tasks.Responses(prompts, np.zeros((3, 16), int), mask, np.array([1, 1, 0], bool), texts)
  found = [component.function(given) for component in rewards]
  np.testing.assert_array_equal(found, [[1, 0, 0], [5, np.nan, np.nan], [np.nan, 9, 16]])


def test_one_slot_is_changed() -> None:
  table = rows(32)
  assert list(table) == list(LABELS)
  base = table[CONSTANT]
  mask = np.arange(32) < np.array([[[4], [16]]])
  for name, objective in table.items():
    assert (objective.advantages == base.advantages) == (name != "grpo")
    assert objective.level is base.level
    weights = np.asarray(objective.loss_weights(mask))
    share = weights[0, 1].sum() / weights[0, 0].sum()
    assert share == pytest.approx({"root": 2.0, "mean": 1.0, "grpo": 1.0}.get(name, 4.0))


def test_filler_says_nothing_and_the_number_decides() -> None:
  settings = configs.Filler(mean=3.0, most=5)
  prompt = tasks.Prompt("3+4=", (1,), "7")
  rng = np.random.default_rng(0)
  for first in (False, True):
    for right in (True, False):
      texts = [policies._solution(settings, first, rng, prompt, right) for _ in range(4000)]
      assert {policies._is_right(text, "7") for text in texts} == {float(right)}
      assert {text.startswith(("7", "?")) for text in texts if len(text) > 1} == {not first}
      counts = np.bincount([text.count(".") for text in texts], minlength=6)
      # Each count is 3/4 as likely as the one before.
      share = 0.75 ** np.arange(6) / np.sum(0.75 ** np.arange(6))
      np.testing.assert_allclose(counts / 4000, share, atol=0.025)
  assert policies._is_right("7", "7") == policies._is_right("7...", "7") == 1.0  # cut off
  assert policies._is_right("7.4", "7") == policies._is_right("", "7") == 0.0
