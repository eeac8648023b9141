"""The run: weights and problems from local files, checkpoints, one line of metrics a step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from configs.real_runs import Config
from experiments.harness import storage
from experiments.real_run import setup
from jaxrl_lm.lm import train_state, training
from jaxrl_lm.lm.checkpoints import Checkpoints
from jaxrl_lm.lm.pretrained import Pretrained, load, save
from jaxrl_lm.lm.problem_tasks import gsm8k
from jaxrl_lm.lm.processes import GracefulExit
from jaxrl_lm.lm.reports import Report
from jaxrl_lm.lm.settings import differences, settings
from jaxrl_lm.lm.tasks import Task
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import TrainState


def main(config: Config, model: Path, problems: Path, out: Path) -> None:
  """Trains until `config.steps`, or a signal; the same call goes on where the last one stopped.

  Raises:
    ValueError: the checkpoint is of another architecture, a prompt is longer than memory was
      checked for, or there are too few devices.
  """
  mesh = setup.make_mesh(config.machine)
  policy = load(model, mesh=mesh, **setup.RUN_AS)
  check_architecture(config, policy, model)
  if policy.tokenizer is None:
    raise ValueError(f"{model} has no tokenizer.json")
  task = gsm8k(problems, policy.tokenizer)
  check_prompts(config, task)
  train = setup.train_config(config, mesh)
  metrics = out / "metrics.jsonl"
  with (
    Checkpoints(out / "checkpoints", config=config) as checkpoints,
    GracefulExit() as leave,
  ):
    state = restored(checkpoints, policy, train, mesh)
    keep_steps(metrics, 0 if state is None else int(state.step))
    for reached, report in training.train(policy, task, train, state=state, mesh=mesh):
      state = reached
      with metrics.open("a") as file:
        file.write(json.dumps(row(report)) + "\n")
      done, stopped = report.step + 1, leave.requested()
      if stopped or done == config.steps or done % config.save_every == 0:
        checkpoints.save(done, state)
      if stopped:
        return
  if state is not None and not (out / "model").exists():
    save(out / "model", policy.model, state.params, tokenizer=policy.tokenizer)


def restored(
  checkpoints: Checkpoints, policy: Pretrained, train: TrainConfig, mesh: Mesh | None
) -> TrainState | None:
  """The latest state, on the devices; None at the beginning."""
  if not checkpoints.steps:
    return None
  target = jax.eval_shape(partial(train_state.init_state, train.update), policy.params)
  if mesh is not None:
    target = setup.placed(target, train_state.state_shardings(mesh, policy.model, train.update))
  return checkpoints.restore(target).state


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


def keep_steps(metrics: Path, until: int) -> None:
  """Drops the lines of steps that will be made again, and of one that was cut off by a kill."""
  lines = metrics.read_text().splitlines() if metrics.exists() else []
  storage.write(metrics, "".join(f"{line}\n" for line in lines[:until]))


def row(report: Report) -> dict[str, Any]:
  """What is kept of a step."""
  means = {f"reward/{name}": float(x.mean()) for name, x in report.rewards.items()}
  found = {
    "step": report.step,
    **means,
    "length": float(report.lengths.mean()),
    "finished": float(report.finished.mean()),
    "tokens": report.tokens,
    **{f"seconds/{part}": seconds for part, seconds in report.seconds.items()},
    "warnings": list(report.warnings),
  }
  if report.metrics is not None:
    found |= {
      "grad_norm": float(report.metrics.grad_norm.mean()),
      "clipped": float(report.metrics.clipped["clipped"].mean()),
      "skipped": int(report.metrics.skipped.total),
    }
    if report.metrics.ref_kl is not None:
      found["ref_kl"] = float(report.metrics.ref_kl["k3"].mean())
  return found
