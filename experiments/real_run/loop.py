"""The run: weights and problems from local files, a folder of `training_run`, the trained model."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from configs.real_runs import Config
from experiments.harness import policy_files, training_run
from experiments.harness.training_run import Habits
from experiments.real_run import setup
from jaxrl_lm.lm.pretrained import Pretrained, load
from jaxrl_lm.lm.problem_tasks import gsm8k
from jaxrl_lm.lm.settings import differences, settings
from jaxrl_lm.lm.tasks import Task


def main(config: Config, model: Path, problems: Path, out: Path) -> None:
  """Trains until `config.steps`; the same call goes on where the last one stopped.

  Raises:
    ValueError: the checkpoint is of another architecture, a prompt is longer than memory was
      checked for, or there are too few devices.
    Stopped: a signal came; what was done is saved.
  """
  mesh = setup.make_mesh(config.machine)
  policy = load(model, mesh=mesh, **setup.RUN_AS)
  check_architecture(config, policy, model)
  if policy.tokenizer is None:
    raise ValueError(f"{model} has no tokenizer.json")
  task = gsm8k(problems, policy.tokenizer)
  check_prompts(config, task)
  history = training_run.run(
    policy,
    task,
    setup.train_config(config, mesh),
    out,
    say=Console().print,
    habits=Habits(config.save_every),
    mesh=mesh,
  )
  policy_files.save(out / "model", policy._replace(params=history.state.params))


def check_architecture(config: Config, policy: Pretrained, path: Path) -> None:
  """The checkpoint is the model that memory was checked for."""
  wanted, found = (settings(x) for x in (setup.policy_config(config), policy.model.config))
  if different := differences(wanted, found):
    raise ValueError(f"{path} is another model than the configuration's:\n" + "\n".join(different))


def check_prompts(config: Config, task: Task) -> None:
  """No prompt is longer than those that memory was checked for."""
  longest = max(task.prompts, key=lambda prompt: len(prompt.tokens))
  if len(longest.tokens) > config.prompt_length:
    raise ValueError(
      f"memory was checked for prompts of {config.prompt_length} tokens, and one has "
      f"{len(longest.tokens)}: {longest.text!r}"
    )
