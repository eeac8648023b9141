"""Evaluation on held-out prompts, with the same random numbers every time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from jaxrl_lm.lm import rollouts, step_rows
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
    kl: also measure the KL to the policy that the run starts from.
  """

  prompts: int = 64
  samples: int = 8
  every: int = 0
  kl: bool = False

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
  policy: Pretrained,
  task: Task,
  config: TrainConfig,
  evaluation: Evaluation,
  place: Any,
  *,
  start: Any = None,
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
    start: parameters to measure the KL to; None = not.

  Returns:
    {"rewards": {name: {"mean", "standard_error", "total", "count"}}, "lengths", "finished",
    "samples", and with `start` "kl": {"k1", "k3"}, nats per response}. Standard errors are of the
    sampling: the prompts are these.
  """
  drawn = draw(policy, task, config, evaluation, place)
  record = _record(drawn, evaluation.samples)
  if start is not None:
    rows = (drawn.prompts, drawn.prompt_mask, drawn.samples.tokens, drawn.samples.mask)
    scored = policy.model, config.update.score, start, config.update.temperature
    ref = step_rows.logprobs(*scored, (tuple(map(place, rows)), {}), parts=1)
    record["kl"] = _kl(drawn, np.asarray(ref), evaluation.samples)
  return record


def draw(
  policy: Pretrained,
  task: Task,
  config: TrainConfig,
  evaluation: Evaluation,
  place: Any,
  *,
  step: int = 0,
) -> Rollout:
  """The responses that a policy is evaluated on; other steps have noise of their own."""
  task = evaluated_task(task, evaluation)
  sizes = RolloutConfig(
    num_prompts=len(task.prompts),
    group_size=evaluation.samples,
    max_new_tokens=config.rollout.max_new_tokens,
    stop_tokens=config.rollout.stop_tokens,
  )
  return rollouts.rollout(
    policy,
    task,
    sizes,
    seed=SEED + config.seed,
    step=step,
    cursor=0,
    temperature=config.update.temperature,
    place=place,
  )


def _kl(drawn: Rollout, ref: np.ndarray, size: int) -> dict[str, Any]:
  """KL(policy || start) of whole responses, nats: both estimates are unbiased."""
  now, ref, mask = (jnp.asarray(x) for x in (drawn.samples.logprobs, ref, drawn.samples.mask))
  kl = {"k1": rl.kl_k1(now, ref, mask), "k3": rl.kl_k3(now, ref, mask)}
  return {
    name: _average(np.asarray(rl.masked_sum(x, mask, axis=-1)).reshape(-1, size))
    for name, x in kl.items()
  }


def _record(drawn: Rollout, size: int) -> dict[str, Any]:
  rewards = {**drawn.scores.components, "total": drawn.scores.total}
  lengths = drawn.samples.mask.sum(axis=-1)
  every = range(0, len(lengths), size)  # the first response to each prompt
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
  return {
    "rewards": {name: _average(x.reshape(-1, size)) for name, x in rewards.items()},
    "lengths": _average(lengths.reshape(-1, size)),
    "finished": _average(drawn.samples.finished.reshape(-1, size)),
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
