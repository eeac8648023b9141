"""Train: any objective of the table, on any task, from any checkpoint, in one resumable command.

Claim: the reward rises. By default GRPO (arXiv:2402.03300) teaches stories260K, a model of 260,032
parameters, to write of a dog and to end its story.
Setting: 8 prompts x 8 samples of up to 96 tokens in a step, AdamW at 3e-4, KL term k2 with
coefficient 0.05. Where stories260K is absent, addition on a transformer that pretrains itself.
Time: 145 seconds of a CPU, 2 minutes on two quiet cores; addition 46 seconds, pretraining included.
Expected: the reward of the last quarter of the steps exceeds that of the first by more than 5
standard errors (measured: 0.41 -> 1.42, 13 of them; held out 0.02 -> 1.43); a miss exits with an
error. With other settings it is a hypothesis.
Command: python -m experiments.train [config] [--objective gspo --learning-rate 1e-4 ...]
A run that is killed goes on by the same command; with more --steps, further.

Objectives: grpo, dr_grpo, dapo, bnpo, gspo, gspo_token, luspo, gmpo, cispo, sapo, vespo, gpg,
dppo_tv, dppo_kl, clip_cov, kl_cov, reinforce, rloo, remax, opo, topr, dro, reinforce_pp,
reinforce_pp_baseline, ppo, dual_clip_ppo.
Tasks: stories(word='dog'), addition(digits=2), digits(), countdown(numbers=3), gsm8k(path='...'),
modular_sum(targets=[1, 2]), first_token(targets=[1, 2]), or my_module.my_task.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from configs.train import DEFAULT, Config
from experiments.harness import policy_files, run, step_files, storage, training_run
from experiments.harness.held_out import Evaluation
from experiments.harness.training_run import Habits, History
from experiments.train import building, figures, policies
from jaxrl_lm.lm.text import TOKENIZER

RISE = 5.0  # standard errors


def main(config: Config = DEFAULT, *, out: Path | None = None) -> dict[str, Any]:
  with run.open("train", _identity(config), out, x64=False) as experiment:
    experiment.summary["config"] = storage.readable(config)

    def train() -> dict[str, Any]:
      return _measured(_trained(config, experiment))

    found = experiment.part(f"training-{config.steps}", train)
    _judge(experiment, config, found)
    steps, evaluations = (
      step_files.read(experiment.out / f"{name}.jsonl") for name in ("steps", "held_out")
    )
    experiment.figure("training", figures.progress(steps, evaluations, _claim(config, found)))
    _where(experiment)
  return experiment.summary


def _identity(config: Config) -> Config:
  """What must match when a run goes on: not how far it goes, nor what it shows and keeps."""
  unsaid = {"steps": 0, "show_every": 0, "checkpoint_every": 0, "tensorboard": False}
  return dataclasses.replace(config, **unsaid)  # type: ignore[arg-type]


def _trained(config: Config, experiment: run.Experiment) -> History:
  mesh = building.mesh_of(config.mesh)
  policy, task, stop_tokens, longest = policies.start(config, mesh, experiment.say)
  config = dataclasses.replace(config, max_new_tokens=longest)
  critic, critic_params = building.critic_of(config, policy)
  history = training_run.run(
    policy,
    task,
    building.train_config(config, stop_tokens, critic, mesh),
    experiment.out,
    say=experiment.say,
    evaluation=Evaluation(config.held_out_prompts, config.held_out_samples, config.evaluate_every),
    habits=Habits(config.checkpoint_every, config.show_every, config.tensorboard),
    critic_params=critic_params,
    mesh=mesh,
  )
  policy_files.save(experiment.out / "model", policy._replace(params=history.state.params))
  return history


def _measured(history: History) -> dict[str, Any]:
  steps, evaluations = history.steps, history.evaluations
  seconds = {
    name: round(sum(float(record["seconds"][name]) for record in steps), 3)
    for name in (steps[0]["seconds"] if steps else ())
  }
  tokens, whole = sum(record["tokens"] for record in steps), sum(seconds.values())
  rise = step_files.rise(step_files.series(steps, "rewards", "total"))
  ends = (("before", evaluations[:1]), ("after", evaluations[-1:]))
  return {
    "steps": len(steps),
    "rise": rise and {**rise._asdict(), "in_standard_errors": rise.in_standard_errors},
    "held_out": {name: record["rewards"] for name, found in ends for record in found},
    "skipped_updates": int(history.state.skipped),
    "tokens": tokens,
    "seconds": seconds,
    "tokens_per_second": tokens / whole if whole else None,
    "first_step_seconds": history.first_step_seconds,
  }


def _judge(experiment: run.Experiment, config: Config, found: dict[str, Any]) -> None:
  """A golden where nothing but the number of steps and the seed was changed; else a hypothesis."""
  if found["rise"] is None:
    experiment.say("fewer than 8 steps: whether the reward rises is not judged")
    return
  size = found["rise"]["in_standard_errors"]
  same = dataclasses.replace(config, steps=DEFAULT.steps, seed=DEFAULT.seed)
  if same == DEFAULT and config.steps >= DEFAULT.steps:
    name = f"the reward rises by more than {RISE:g} standard errors"
    experiment.golden(name, size > RISE, True, source="measured on two cores of a CPU")
  else:
    statement = "The reward of the last quarter of the steps exceeds that of the first."
    holds = None if abs(size) < 2 else size > 0
    experiment.hypothesis(
      "rise of the reward, standard errors",
      statement,
      size,
      holds,
      source="what training is for",
      explanation="less than 2 standard errors" if holds is None else "it fell",
    )


def _claim(config: Config, found: dict[str, Any]) -> str:
  """What the figure shows, in a sentence."""
  rise = found["rise"]
  if rise is None:
    return f"{config.objective}: {found['steps']} steps"
  return (
    f"{config.objective}: the reward goes from {rise['first']:.2f} to {rise['last']:.2f} (first "
    f"and last quarter of {found['steps']} steps, {rise['in_standard_errors']:.0f} standard errors)"
  )


def _where(experiment: run.Experiment) -> None:
  out = experiment.out
  for name in ("steps.jsonl", "held_out.jsonl", "samples.jsonl", "checkpoints"):
    experiment.say(str(out / name))
  readable = (out / "model" / TOKENIZER).exists()
  how = f": python -m experiments.generate --model {out / 'model'}" if readable else ""
  experiment.say(f"{out / 'model'}{how}")
