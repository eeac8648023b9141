"""Evaluation on held-out prompts, with the same random numbers every time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxrl_lm.lm import rollouts
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import Rollout, RolloutConfig
from jaxrl_lm.lm.tasks import Task
from jaxrl_lm.lm.train_config import TrainConfig

SEED = 10**6  # apart from those of training: a seed is a run's, and its noise is drawn from it


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How a policy is evaluated: at the temperature of training, on whole distributions.

  Attributes:
    prompts: at most, the first of the task's held-out ones.
    samples: responses to each, at least 2.
    every: steps from one evaluation to the next; 0 = only at the beginning and the end.
  """

  prompts: int = 64
  samples: int = 8
  every: int = 0

  def __post_init__(self) -> None:
    if self.prompts < 1 or self.samples < 2 or self.every < 0:
      raise ValueError(
        "an evaluation needs prompts >= 1, samples >= 2 and every >= 0, got "
        f"{self.prompts}, {self.samples} and {self.every}"
      )

  def due(self, step: int, last: int) -> bool:
    """Whether to evaluate after `step` steps of `last`."""
    return step in (0, last) or (self.every > 0 and step % self.every == 0)


def evaluated_task(task: Task, evaluation: Evaluation) -> Task:
  """The task with the prompts to evaluate on as its prompts."""
  prompts = (task.held_out or task.prompts)[: evaluation.prompts]
  return dataclasses.replace(task, prompts=prompts, held_out=())


def evaluate(
  policy: Pretrained, task: Task, config: TrainConfig, evaluation: Evaluation, place: Any
) -> dict[str, Any]:
  """Rewards of responses to held-out prompts; to its own where the task has none.

  Two evaluations in one run, and in runs of one seed, share their noise: policies that differ
  little draw much the same, and a difference is less noisy than both.

  Args:
    policy: to evaluate.
    task: prompts and rewards.
    config: of the run: lengths, stop tokens, temperature.
    evaluation: how many.
    place: puts rows on the devices.

  Returns:
    {"rewards": {name: {"mean", "standard_error", "total", "count"}}, "lengths", "finished",
    "samples"}. Standard errors are of the sampling: the prompts are these.
  """
  task = evaluated_task(task, evaluation)
  sizes = RolloutConfig(
    num_prompts=len(task.prompts),
    group_size=evaluation.samples,
    max_new_tokens=config.rollout.max_new_tokens,
    stop_tokens=config.rollout.stop_tokens,
  )
  drawn = rollouts.rollout(
    policy,
    task,
    sizes,
    seed=SEED + config.seed,
    step=0,
    cursor=0,
    temperature=config.update.temperature,
    place=place,
  )
  return _record(drawn, sizes)


def _record(drawn: Rollout, sizes: RolloutConfig) -> dict[str, Any]:
  rewards = {**drawn.scores.components, "total": drawn.scores.total}
  lengths = drawn.samples.mask.sum(axis=-1)
  every = np.arange(sizes.num_prompts) * sizes.group_size  # the first response to each prompt
  samples = [
    {
      "prompt": drawn.responses.prompts[i].text,
      "text": drawn.responses.texts[i],
      "rewards": {name: float(x[i]) for name, x in rewards.items()},
      "length": int(lengths[i]),
      "finished": bool(drawn.samples.finished[i]),
    }
    for i in every
  ]
  groups = (sizes.num_prompts, sizes.group_size)
  return {
    "rewards": {name: _average(x.reshape(groups)) for name, x in rewards.items()},
    "lengths": _average(lengths.reshape(groups)),
    "finished": _average(drawn.samples.finished.reshape(groups)),
    "samples": samples,
  }


def _average(x: np.ndarray) -> dict[str, Any]:
  """Of all numbers [P, G] that are not NaN; the error from the variance within each prompt."""
  x = x.astype(float)
  scored = ~np.isnan(x)
  counts, total = scored.sum(axis=-1), float(np.sum(x[scored]))
  means = np.where(scored, x, 0).sum(axis=-1) / np.maximum(counts, 1)
  squares = np.where(scored, np.square(x - means[:, None]), 0).sum(axis=-1)
  # Var of the total: each response of a prompt adds the variance of that prompt's.
  variance = np.where(counts > 1, counts * squares / np.maximum(counts - 1, 1), np.nan)
  count = int(counts.sum())
  error = float(np.sqrt(np.sum(variance[counts > 0])) / count) if count else float("nan")
  mean = total / count if count else float("nan")
  return {"mean": mean, "standard_error": error, "total": total, "count": count}
