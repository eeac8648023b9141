"""Claim: a training run that is killed at any moment leaves what one leaves that was not.

Setting: a bigram of 4 tokens. Compared are parameters, moments and files, but for seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rich.text import Text

from experiments.harness import held_out, step_files
from experiments.harness.held_out import Evaluation
from experiments.harness.step_screen import sample_table
from experiments.harness.training_run import Habits, History, Stopped
from jaxrl_lm.lm.checkpoints import CheckpointError, Checkpoints
from jaxrl_lm.lm.optimizers import optimizer
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.reward_errors import RewardError
from jaxrl_lm.lm.tasks import Component, per_text
from tests.training_worker import CONFIG, POLICY, TASK, train

ROOT = Path(__file__).parents[1]
FILES = ("steps.jsonl", "held_out.jsonl", "samples.jsonl")


class Killed(BaseException):
  """Ends a run at once; nobody catches it."""


def silent(line: Any) -> None:
  """Shows nothing."""


def contents(folder: Path) -> dict[str, Any]:
  """The lines of all files, without what differs from run to run."""
  found = {name: step_files.read(folder / name) for name in FILES}
  for record in found["steps.jsonl"]:
    assert set(record.pop("seconds")) == {"sampling", "scoring", "update"}
  return found


def assert_same(folder: Path, history: History, other: Path, straight: History) -> None:
  jax.tree.map(np.testing.assert_array_equal, history.state, straight.state)
  assert contents(folder) == contents(other)


def killed_by(pattern: str, number: int) -> Any:
  """A `say` that kills the run at the number-th line of a pattern."""
  left = [number]

  def say(line: Any) -> None:
    if re.search(pattern, str(line)):
      left[0] -= 1
      if not left[0]:
        raise Killed

  return say


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
  folder = tmp_path_factory.mktemp("straight")
  return folder, train(folder, say=silent)


def test_a_run_leaves_lines_that_add_up(straight: tuple[Path, History]) -> None:
  folder, history = straight
  steps = step_files.read(folder / "steps.jsonl")
  assert [record["step"] for record in steps] == list(range(6))
  assert history.steps == steps
  assert [record["step"] for record in history.evaluations] == [0, 4, 6]
  assert history.first_step_seconds > 0
  updated = [record for record in steps if "ref_kl" in record]  # the others had no signal
  assert len(updated) >= 4
  for record in updated:
    for average in (record["rewards"]["total"], record["ref_kl"]["k3"], record["clipped"]["low"]):
      assert average["mean"] == pytest.approx(average["total"] / average["count"])
    assert record["grad_norm"]["count"] == 2  # minibatches
  assert all(record["rewards"]["total"]["count"] == 16 for record in steps)
  merged = step_files.series(steps, "ref_kl", "k3")
  whole = sum(r["ref_kl"]["k3"]["total"] for r in updated) / sum(
    r["ref_kl"]["k3"]["count"] for r in updated
  )
  assert step_files.smoothed(merged, 6)[-1] == pytest.approx(whole)
  assert step_files.smoothed(merged, 1) == pytest.approx(merged.means)
  with Checkpoints(folder / "checkpoints") as checkpoints:
    best = max(history.evaluations[1:], key=lambda x: x["rewards"]["total"]["mean"])["step"]
    assert {4, 6} | {best} == set(checkpoints.steps)


@pytest.mark.parametrize(
  ("pattern", "number"),
  [
    pytest.param(r"^ +\d/6", 1, marks=pytest.mark.slow),  # before the first checkpoint
    (r"^ +\d/6", 4),  # after step 4, whose line is written and whose checkpoint is not
    pytest.param(r"after 4 steps", 1, marks=pytest.mark.slow),  # after its evaluation
    pytest.param(r"^ +\d/6", 6, marks=pytest.mark.slow),
  ],
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
  tmp_path: Path, straight: tuple[Path, History], pattern: str, number: int
) -> None:
  with pytest.raises(Killed):
    train(tmp_path, say=killed_by(pattern, number))
  assert_same(tmp_path, train(tmp_path, say=silent), *straight)


def test_a_run_of_fewer_steps_goes_on_with_more(
  tmp_path: Path, straight: tuple[Path, History], capsys: pytest.CaptureFixture[str]
) -> None:
  train(tmp_path, replace(CONFIG, steps=4))
  assert_same(tmp_path, train(tmp_path), *straight)
  assert "4 steps are done: going on to 6" in capsys.readouterr().out
  before = {name: (tmp_path / name).read_bytes() for name in FILES}
  history = train(tmp_path)
  assert "6 steps are done: nothing is left to do" in capsys.readouterr().out
  assert history.first_step_seconds is None
  assert before == {name: (tmp_path / name).read_bytes() for name in FILES}


@pytest.mark.parametrize(
  ("number", "code"),
  [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_saves_the_step_and_says_how_to_go_on(
  tmp_path: Path, straight: tuple[Path, History], number: signal.Signals, code: int
) -> None:
  said: list[str] = []

  def say(line: Any) -> None:
    said.append(str(line))
    if re.search(r"^ +3/6", str(line)):
      os.kill(os.getpid(), number)

  with pytest.raises(Stopped) as stopped:
    train(tmp_path, say=say)
  assert stopped.value.code == code
  assert f"{number.name}: 3 of 6 steps are done and saved in {tmp_path}/checkpoints" in said[-1]
  assert said[-1].endswith("The same command continues.")
  assert len(step_files.read(tmp_path / "steps.jsonl")) == 3
  assert_same(tmp_path, train(tmp_path, say=silent), *straight)


def test_a_process_killed_for_good_goes_on(tmp_path: Path, straight: tuple[Path, History]) -> None:
  """SIGKILL, in the middle of whatever it does after the fourth step."""
  command = [sys.executable, "-m", "tests.training_worker", str(tmp_path), "100000"]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
  deadline = time.monotonic() + 60
  while len(step_files.read(tmp_path / "steps.jsonl")) < 5 and time.monotonic() < deadline:
    time.sleep(0.001)
  process.send_signal(signal.SIGKILL)
  process.wait()
  done = len(step_files.read(tmp_path / "steps.jsonl"))
  assert done >= 5
  goal = done + 2
  history = train(tmp_path, replace(CONFIG, steps=goal), say=silent)
  other = tmp_path.with_name("straight to there")
  want = train(other, replace(CONFIG, steps=goal), say=silent)
  assert_same(tmp_path, history, other, want)


@pytest.mark.slow
def test_killed_five_times_at_random_it_is_still_the_straight_run(tmp_path: Path) -> None:
  steps, folder = 100, tmp_path / "killed"
  command = [sys.executable, "-m", "tests.training_worker", str(folder), str(steps)]
  rng = np.random.default_rng(0)
  for _ in range(5):
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
      if re.search(rf"/{steps}", line):
        break
    time.sleep(float(rng.uniform(0, 0.5)))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL  # it was at work
  config = replace(CONFIG, steps=steps)
  history = train(folder, config, say=silent)
  other = tmp_path / "straight"
  assert_same(folder, history, other, train(other, config, say=silent))


def test_another_configuration_is_refused_with_the_difference(
  tmp_path: Path, straight: tuple[Path, History]
) -> None:
  folder, _ = straight
  before = {name: (folder / name).read_bytes() for name in FILES}
  update = replace(CONFIG.update, optimizer=optimizer(0.2), kl_coef=0.02)
  other = replace(CONFIG, update=update, steps=8)
  with pytest.raises(
    ValueError, match=r"(?s)another configuration:.*0\.1 there, -0\.2 now"
  ) as error:
    train(folder, other, say=silent)
  assert "config.update.kl_coef: 0.01 there, 0.02 now" in str(error.value)
  with pytest.raises(ValueError, match="prompts: "):
    train(folder, say=silent, task=replace(TASK, prompts=TASK.prompts[:2]))
  assert before == {name: (folder / name).read_bytes() for name in FILES}


BROKEN = [Path("nothing")]  # the lines of a run whose reward fails when there are three of them


def reward_that_may_fail(responses: Any) -> Any:
  if len(step_files.read(BROKEN[0])) == 3:
    return per_text(lambda text, reference: 1 / 0)(responses)
  return TASK.rewards[0].function(responses)


def test_a_reward_that_fails_shows_the_sample_and_loses_no_step(
  tmp_path: Path, straight: tuple[Path, History]
) -> None:
  task = replace(TASK, rewards=(Component("modular_sum", reward_that_may_fail),))
  BROKEN[0] = tmp_path / "steps.jsonl"
  with pytest.raises(RewardError, match=r"(?s)modular_sum.*division by zero.*text: '\d"):
    train(tmp_path, say=silent, task=task)
  BROKEN[0] = tmp_path / "nothing"
  said: list[str] = []
  history = train(tmp_path, say=lambda line: said.append(str(line)), task=task)
  assert said[0] == "3 steps are done: going on to 6"
  assert_same(tmp_path, history, *straight)


def test_a_full_disk_keeps_what_was_saved(
  tmp_path: Path, straight: tuple[Path, History], monkeypatch: pytest.MonkeyPatch
) -> None:
  save = Checkpoints.save

  def full(self: Checkpoints, step: int, *rest: Any, **more: Any) -> None:
    if step == 4:
      raise CheckpointError(f"step {step} was not saved")
    save(self, step, *rest, **more)

  with monkeypatch.context() as patched:
    patched.setattr(Checkpoints, "save", full)
    with pytest.raises(CheckpointError, match="step 4 was not saved"):
      train(tmp_path, say=silent)
  assert_same(tmp_path, train(tmp_path, say=silent), *straight)


def test_a_half_written_line_is_written_again(
  tmp_path: Path, straight: tuple[Path, History]
) -> None:
  train(tmp_path, replace(CONFIG, steps=4), say=silent)
  with (tmp_path / "steps.jsonl").open("a") as file:
    file.write('{"step": 4, "rew')
  assert_same(tmp_path, train(tmp_path, say=silent), *straight)


def test_the_screen_has_a_line_a_step_a_table_and_each_warning_once(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("COLUMNS", "100")
  nothing = replace(TASK, rewards=(Component("constant", lambda r: np.ones(len(r.texts))),))
  said: list[str] = []
  train(
    tmp_path,
    replace(CONFIG, steps=3),
    task=nothing,
    evaluation=None,
    habits=Habits(show_every=2),
    say=lambda line: said.append(line.plain if isinstance(line, Text) else line),
  )
  text = "\n".join(said)
  assert [line.split()[0] for line in said if re.match(r" +\d/3", line)] == ["1/3", "2/3", "3/3"]
  assert text.count("WARNING") == 1
  assert "no advantage of the 4 groups differs from 0" in text
  assert "samples of step 1" in text
  assert "samples of step 2" in text
  assert "constant 1.00" in text
  assert len([line for line in said if "|grad|" in line]) == 1
  assert len(said[0]) == len(said[1])


def test_event_files_have_every_number_of_a_line(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: tuple[Path, History]
) -> None:
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with pytest.raises(ImportError, match="tensorboardX"):
    train(tmp_path, say=silent, habits=Habits(tensorboard=True))
  written: list[Any] = []

  class SummaryWriter:
    def __init__(self, folder: str, *, purge_step: int) -> None:
      written.append((folder, purge_step))

    def add_scalar(self, *scalar: Any) -> None:
      written.append(scalar)

    def close(self) -> None:
      written.append("closed")

  monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
  folder, history = straight
  train(tmp_path, say=silent, habits=Habits(tensorboard=True))
  assert written[0] == (f"{tmp_path}/tensorboard", 0)
  assert written[-1] == "closed"
  updated = [record["step"] for record in history.steps if "ref_kl" in record]
  for name, steps in (
    ("rewards/total", list(range(6))),
    ("ref_kl/k3", updated),
    ("ratio_ess", updated),
    ("seconds/update", list(range(6))),
  ):
    assert [x[2] for x in written[1:-1] if x[0] == f"training/{name}"] == steps
  rewards = [x[1] for x in written[1:-1] if x[0] == "held out/rewards/total"]
  assert rewards == [x["rewards"]["total"]["mean"] for x in history.evaluations]


def test_long_responses_are_cut_in_the_table_and_say_so() -> None:
  sample = {"prompt": "p", "text": "x" * 700, "rewards": {"total": 0.5}, "length": 9}
  plain = sample_table([sample | {"finished": False}], "samples", width=80).plain
  assert plain.count("x") == 600
  assert "(100" in plain
  assert "cut off, 9" in " ".join(plain.split())


def test_an_evaluation_is_the_same_every_time_and_leaves_out_what_cannot_be_scored() -> None:
  good = TASK.rewards[0].function

  def partly(responses: Any) -> Any:
    values = np.array(good(responses), float)
    values[responses.tokens[:, 0] == 0] = np.nan
    return values

  task = replace(TASK, rewards=(Component("r", partly),))
  evaluation = Evaluation(prompts=3, samples=8)
  call = (POLICY, task, CONFIG, evaluation, Placement().rows)
  first, second = held_out.evaluate(*call), held_out.evaluate(*call)
  assert json.dumps(first) == json.dumps(second)
  assert 0 < first["rewards"]["r"]["count"] < 24
  assert first["lengths"]["count"] == 24
  assert len(first["samples"]) == 3


def test_the_standard_error_is_of_the_sampling_within_prompts() -> None:
  x = np.array([[0.0, 1.0, 1.0, 1.0], [5.0, 5.0, np.nan, 7.0]])
  found = held_out._average(x)
  assert found["mean"] == pytest.approx(np.nanmean(x))
  # Var of the total: n_p times the sample variance of prompt p, by hand.
  variance = 4 * np.var([0, 1, 1, 1], ddof=1) + 3 * np.var([5, 5, 7], ddof=1)
  assert found["standard_error"] == pytest.approx(np.sqrt(variance) / 7)
  assert np.isnan(held_out._average(np.full((2, 3), np.nan))["mean"])
  assert np.isnan(held_out._average(np.array([[1.0, np.nan], [0.0, 1.0]]))["standard_error"])


@pytest.mark.parametrize("wrong", [{"samples": 1}, {"prompts": 0}, {"every": -1}])
def test_an_evaluation_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
  with pytest.raises(ValueError, match="samples >= 2"):
    Evaluation(**wrong)


def test_the_rise_is_of_whole_quarters() -> None:
  records = [
    {"step": i, "r": {"total": 2.0 * i, "count": 2}} for i in range(9)
  ]  # means 0, 1, .., 8: quarters of two
  found = step_files.rise(step_files.series(records, "r"))
  assert found is not None
  assert (found.first, found.last) == (0.5, 7.5)
  assert found.standard_error == pytest.approx(np.sqrt((0.5 + 0.5) / 2))
  assert step_files.rise(step_files.series(records[:7], "r")) is None
