"""`experiments.train`: a run leaves its files and goes on, and what is wrong is said.

Claim: the command trains, shows, keeps, and says in words what it cannot do.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import experiments.train
from configs.train import DEFAULT, SMALL, Mesh
from experiments.harness import policy_files, run, small_models
from experiments.harness.run import data_path
from experiments.train import policies
from experiments.train.command import command
from jaxrl_lm.lm import arithmetic, llama2c, number_tasks, pretrained, story_tasks
from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.tasks import Task

# -------------------------------------------------------------------------------------- the policy


def untrained(recipe: Any, prompts: Any, say: Any) -> Pretrained:
  """In place of a pretrained one."""
  made = small_models.random_policy(Characters(recipe.alphabet).vocab_size)
  return made._replace(tokenizer=Characters(recipe.alphabet))


def test_without_data_the_default_task_is_addition(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
  monkeypatch.setenv("JAXRL_LM_DATA", str(tmp_path))
  monkeypatch.setattr(run, "RESULTS", tmp_path)
  monkeypatch.setattr(small_models, "_pretrain", untrained)
  said: list[str] = []
  start = policies.start(DEFAULT, None, said.append)
  assert "stories260K/stories260K.bin was not found (set JAXRL_LM_DATA)" in said[0]
  assert "addition" in said[0]
  assert start.task.prompts[0].text.endswith("=")
  assert start.max_new_tokens == 24
  with pytest.raises(FileNotFoundError, match="set JAXRL_LM_DATA.*--model PATH"):
    policies.start(replace(DEFAULT, task="stories"), None, said.append)


def test_weights_of_rewards_are_settings() -> None:
  config = replace(DEFAULT, task="first_token", reward_weights={"first_token": 2.0})
  start = policies.start(config, None, lambda line: None)
  assert start.task.rewards[0].weight == 2.0
  assert [prompt.reference for prompt in start.task.prompts] == [1, 2, 3]
  assert start.stop_tokens == (policies.END,)
  with pytest.raises(ValueError, match=r"weights must be of \['first_token'\]"):
    policies.start(replace(config, reward_weights={"word": 1.0}), None, lambda line: None)


TINY = small_models.Recipe(
  "tiny", number_tasks.ADDITION_CHARACTERS, small_models.answer, length=10, steps=5, width=16
)
SUMS = number_tasks.addition(Characters(TINY.alphabet), prompts=40, held_out=10)


def test_a_small_model_is_the_same_every_time_and_made_once(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  said: list[str] = []
  first = small_models.pretrained_on(TINY, SUMS, tmp_path / "a", say=said.append)
  other = small_models.pretrained_on(TINY, SUMS, tmp_path / "b", say=said.append)
  jax.tree.map(np.testing.assert_array_equal, first.params, other.params)
  assert len(said) == 2
  monkeypatch.setattr(small_models, "_pretrain", None)
  again = small_models.pretrained_on(TINY, SUMS, tmp_path / "a", say=said.append)
  jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
  assert again.tokenizer is not None
  assert again.tokenizer.encode("12+7=") == Characters(TINY.alphabet).encode("12+7=")
  assert len(said) == 2
  (folder,) = (tmp_path / "a").iterdir()
  assert re.fullmatch(r"tiny-\w{8}", folder.name)


def test_solutions_are_right_or_wrong_as_they_are_to_be() -> None:
  rng = np.random.default_rng(0)
  for prompt in SUMS.prompts:
    assert small_models.answer(rng, prompt, True) == prompt.reference
    wrong = small_models.answer(rng, prompt, False)
    assert sum(a != b for a, b in zip(wrong, prompt.reference, strict=True)) == 1
  task = number_tasks.countdown(Characters(number_tasks.COUNTDOWN_CHARACTERS), prompts=20)
  right = 0
  for prompt in task.prompts:
    numbers, target = prompt.reference
    for wanted in (False, True):
      value = arithmetic.value_of(small_models.expression(rng, prompt, wanted), numbers)
      assert value is not None
      right += wanted and value == target
  assert right >= 15  # the others need parentheses


@pytest.mark.slow
def test_tokenizers_of_saved_policies_are_those_of_the_policies(tmp_path: Path) -> None:
  path = data_path("stories260K/stories260K.bin")
  if path is None:
    pytest.skip("needs stories260K")
  loaded = pretrained.load(path)
  assert isinstance(loaded.tokenizer, llama2c.Llama2cTokenizer)
  policy_files.save(tmp_path / "model", loaded)
  saved = pretrained.load(tmp_path / "model").tokenizer
  assert saved is not None
  assert (saved.bos_id, saved.eos_ids) == (loaded.tokenizer.bos_id, loaded.tokenizer.eos_ids)
  texts = [*story_tasks.OPENINGS, "", "  two  spaces", "caf\u00e9 \u2014 \u65e5\n\nnew", "a<b>c"]
  for text in texts:
    ids = loaded.tokenizer.encode(text)
    assert saved.encode(text) == ids
    assert saved.decode(ids) == loaded.tokenizer.decode(ids) == text


# ----------------------------------------------------------------------------------------- the run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
  out = tmp_path_factory.mktemp("train") / "out"
  experiments.train.main(SMALL, out=out)
  return out


def test_a_run_leaves_its_files(finished: Path) -> None:
  names_ = {path.name for path in finished.iterdir()}
  lines = {"steps.jsonl", "held_out.jsonl", "samples.jsonl", "metrics.jsonl"}
  assert lines | {"checkpoints", "model", "training.png", "summary.json"} <= names_
  summary = json.loads((finished / "summary.json").read_text())
  assert summary["config"]["steps"] == SMALL.steps
  found = summary["results"][f"training-{SMALL.steps}"]
  assert found["steps"] == SMALL.steps
  assert found["tokens"] > 0
  assert found["rise"]["last"] > found["rise"]["first"]
  assert found["held_out"]["after"]["total"]["count"] == 12
  # The last parameters, as a folder of Hugging Face.
  model = pretrained.load(finished / "model")
  assert model.model.config.vocab_size == policies.VOCABULARY


def test_a_finished_run_says_so_and_does_nothing(
  finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  before = (finished / "steps.jsonl").read_bytes()
  monkeypatch.setattr(policies, "start", None)
  experiments.train.main(SMALL, out=finished)
  assert f"training-{SMALL.steps}: stored on" in capsys.readouterr().out
  assert (finished / "steps.jsonl").read_bytes() == before


def test_more_steps_go_on(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
  arguments = ["small", "--steps", str(SMALL.steps + 1), "--out", str(finished)]
  command(arguments)
  said = capsys.readouterr().out
  assert f"{SMALL.steps} steps are done: going on to {SMALL.steps + 1}" in said
  assert len((finished / "steps.jsonl").read_text().splitlines()) == SMALL.steps + 1


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["small", "--learning-rate", "1"], "learning_rate: 0.03 there, 1.0 now"),
    (["small", "--objectiv", "rloo"], "--objective"),
  ],
)
def test_what_is_not_this_run_is_refused(
  finished: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
  before = (finished / "steps.jsonl").read_bytes()
  with pytest.raises(SystemExit) as stop:
    command([*arguments, "--out", str(finished)])
  assert stop.value.code == 2
  assert message in capsys.readouterr().err
  assert (finished / "steps.jsonl").read_bytes() == before


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--objective", "grop"], "did you mean grpo?"),
    (["--task", "sories"], "did you mean stories?"),
    (["--task", "modular_sum(target=1)"], "modular_sum has no argument target"),
    (["--model", "nowhere"], "nowhere"),
    (["--objective", "rloo", "--group-size", "1"], "compares a response with others"),
    (["--held-out-samples", "1"], "samples >= 2"),
  ],
)
def test_what_is_wrong_is_said_before_anything_is_drawn(
  tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
  with pytest.raises(SystemExit) as stop:
    command(["small", *arguments, "--out", str(tmp_path / "out")])
  assert stop.value.code == 2
  assert message in capsys.readouterr().err


def broken_task(tokenizer: Any) -> Task:
  task = policies._task("first_token", tokenizer, policies.VOCABULARY)
  reward = task.rewards[0]._replace(function=lambda responses: 1 / 0)
  return replace(task, rewards=(reward,))


def test_a_reward_that_fails_is_said_with_its_sample(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  policy_files.save(tmp_path / "model", small_models.random_policy(policies.VOCABULARY))
  task = [
    "--task",
    "tests.test_train.broken_task",
    "--model",
    str(tmp_path / "model"),
    "--stop-tokens",
    "5",
  ]
  with pytest.raises(SystemExit) as stop:
    command(["small", *task, "--out", str(tmp_path / "out")])
  assert stop.value.code == 2
  said = capsys.readouterr().err
  assert "ZeroDivisionError" in said
  assert "text:" in said


def test_help_is_good_enough_to_work_from(capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit) as stop:
    command(["--help"])
  assert stop.value.code == 0
  said = capsys.readouterr().out
  for text in (
    "Claim",
    "Objectives: grpo",
    "--objective",
    "--kl-coef",
    "--mesh.fsdp",
    "qwen_gsm8k",
  ):
    assert text in said


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ppo", "clip_cov", "reinforce_pp", "remax"])
def test_other_objectives_train(tmp_path: Path, objective: str) -> None:
  """With a critic, a selection that draws, returns of tokens, a greedy baseline."""
  config = replace(SMALL, objective=objective, steps=2, minibatches=3, epochs=2)
  summary = experiments.train.main(config, out=tmp_path)
  assert summary["results"]["training-2"]["steps"] == 2


@pytest.mark.slow
def test_eight_devices_train_the_same(finished: Path, tmp_path: Path) -> None:
  config = replace(
    SMALL, mesh=Mesh(data=2, fsdp=1, tensor=2), steps=2, evaluate_every=0, micro_batches=2
  )
  experiments.train.main(config, out=tmp_path)
  one, many = (
    json.loads((folder / "steps.jsonl").read_text().splitlines()[1])
    for folder in (finished, tmp_path)
  )
  for name in ("loss", "grad_norm"):
    assert many[name]["mean"] == pytest.approx(one[name]["mean"], rel=1e-3)
  assert many["rewards"] == one["rewards"]


@pytest.mark.slow
def test_the_self_pretrained_model_leaves_something_to_learn(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Right in 20 to 40 % of the responses before, and clearly more often after."""
  monkeypatch.setattr(run, "RESULTS", tmp_path)
  config = replace(DEFAULT, task="addition", steps=24, evaluate_every=0)
  summary = experiments.train.main(config, out=tmp_path / "out")
  held_out = summary["results"]["training-24"]["held_out"]
  before, after = (held_out[name]["total"] for name in ("before", "after"))
  assert 0.2 < held_out["before"]["right"]["mean"] < 0.4
  error = np.hypot(before["standard_error"], after["standard_error"])
  assert after["mean"] - before["mean"] > 3 * error


@pytest.mark.slow
def test_the_code_of_the_page_trains(capsys: pytest.CaptureFixture[str]) -> None:
  text = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
  (block,) = re.findall(r"^<!-- run -->\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
  names: dict[str, Any] = {}
  exec(compile(block, "training.md", "exec"), names)
  assert int(names["state"].step) == 3
  assert len(capsys.readouterr().out.splitlines()) == 3
