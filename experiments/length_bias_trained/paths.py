"""Training runs, and their lengths at equal P(right)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from configs.length_bias_trained import Training
from experiments.harness import intervals, training_run
from experiments.harness.held_out import Evaluation
from experiments.harness.training_run import Habits
from experiments.length_bias_trained.policies import IF_RIGHT, IF_WRONG, RIGHT, Start
from experiments.length_bias_trained.rows import CONSTANT, rows
from jaxrl_lm.lm import optimizers
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.update_config import UpdateConfig

MEASURES = {"p": RIGHT, "right": IF_RIGHT, "wrong": IF_WRONG}
MOST = 0.8  # of P(right): beyond it few wrong responses are left to measure
TINY = 1e-20  # eps of Adam: its step is then the same for a loss that is divided by a constant

Track = Callable[[Iterable[Any]], Iterable[Any]]


def follow(
  start: Start, training: Training, row: str, seeds: tuple[int, ...], folder: Path, track: Track
) -> dict[str, Any]:
  """{"p", "right", "wrong", "finished": [seeds, evaluations]}: P(right), mean lengths, a share."""
  found = [_path(start, training, row, seed, folder / f"seed-{seed}") for seed in track(seeds)]
  return {name: np.array([path[name] for path in found]) for name in found[0]}


def _path(start: Start, training: Training, row: str, seed: int, folder: Path) -> dict[str, Any]:
  config = TrainConfig(
    RolloutConfig(training.num_prompts, training.group_size, training.max_new_tokens),
    UpdateConfig(
      rows(training.max_new_tokens)[row],
      optimizers.optimizer(training.learning_rate, eps=TINY),
      max_grad_norm=None,
    ),
    steps=training.steps,
    seed=seed,
    shown=0,
  )
  evaluation = Evaluation(
    training.held_out_prompts, training.held_out_samples, training.evaluate_every
  )
  habits = Habits(checkpoint_every=training.steps)
  history = training_run.run(
    start.policy, start.task, config, folder, say=_nothing, evaluation=evaluation, habits=habits
  )
  lines = history.evaluations
  measured = {
    # A mean of none is kept as text.
    short: [float(line["rewards"][name]["mean"]) for line in lines]
    for short, name in MEASURES.items()
  }
  return {**measured, "finished": [line["finished"]["mean"] for line in lines]}


def at_level(path: dict[str, Any], measure: str, level: float) -> np.ndarray:
  """[seeds] the measure where P(right) first reaches a level, interpolated; NaN = it never does."""

  def one(p: np.ndarray, x: np.ndarray) -> float:
    reached = np.flatnonzero(p >= level)
    if not reached.size or reached[0] == 0:
      return np.nan
    after = int(reached[0])
    share = (level - p[after - 1]) / (p[after] - p[after - 1])
    return float(x[after - 1] + share * (x[after] - x[after - 1]))

  return np.array([one(*pair) for pair in zip(path["p"], path[measure], strict=True)])


def levels(rows: dict[str, Any]) -> np.ndarray:
  """Four values of P(right) that every run goes through, where one in five at least is wrong."""
  low = max(path["p"][:, 0].max() for path in rows.values())
  high = min(MOST, *(path["p"].max(axis=1).min() for path in rows.values()))
  return np.linspace(low, high, 5)[1:]


def less_constant(rows: dict[str, Any], row: str, measure: str) -> np.ndarray:
  """[seeds, levels] the measure under an objective less that under Dr. GRPO, at equal P(right)."""
  return np.stack(
    [
      at_level(rows[row], measure, level) - at_level(rows[CONSTANT], measure, level)
      for level in levels(rows)
    ],
    axis=-1,
  )


def interval(x: np.ndarray) -> tuple[float, float]:
  """Mean and half the 95 % t interval over seeds or folds, of those that are not NaN."""
  x = x[~np.isnan(x)]
  if len(x) < 2:
    return float(np.nan), float(np.nan)
  mean, half = intervals.interval(x)
  return float(mean), float(half)


def _nothing(_: Any) -> None:
  """Says nothing: there are many runs."""
