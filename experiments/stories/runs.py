"""One training run: an algorithm from a seed, and what its evaluations say of it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from configs.stories import Config
from experiments.harness import held_out, step_files, training_run
from experiments.harness.training_run import Habits
from experiments.train import building
from experiments.train.policies import Start
from jaxrl_lm.lm.train_config import TrainConfig


def evaluation(config: Config) -> held_out.Evaluation:
  """How the policies are evaluated."""
  settings = config.run
  sizes = (settings.held_out_prompts, settings.held_out_samples, settings.evaluate_every)
  return held_out.Evaluation(*sizes, kl=True)


def train_config(config: Config, start: Start, algorithm: str, seed: int) -> TrainConfig:
  """The settings that all runs share, with this run's algorithm and seed."""
  own = {"objective": algorithm, "seed": seed, "max_new_tokens": start.max_new_tokens}
  settings = dataclasses.replace(config.run, **own)  # type: ignore[arg-type]
  return building.train_config(settings, start.stop_tokens, None, None)


def path(config: Config, start: Start, algorithm: str, seed: int, results: Path) -> dict[str, Any]:
  """A run, made or gone on with, by evaluation [E]: rewards, KL to the start, lengths; samples."""
  began = time.process_time()
  history = training_run.run(
    start.policy,
    start.task,
    train_config(config, start, algorithm, seed),
    results / "runs" / f"{algorithm}-{seed}",
    say=lambda line: None,
    evaluation=evaluation(config),
    habits=Habits(checkpoint_every=config.run.checkpoint_every),
  )
  records = history.evaluations

  def means(*keys: str) -> np.ndarray:
    found: list[Any] = records
    for key in keys:
      found = [x[key] for x in found]
    return np.array([x["mean"] for x in found], float)

  clipped = step_files.series(history.steps, "clipped", "clipped")
  return {
    "step": np.array([record["step"] for record in records]),
    "rewards": {name: means("rewards", name) for name in records[0]["rewards"]},
    "kl": means("kl", "k1"),
    "kl_k3": means("kl", "k3"),
    "length": means("lengths"),
    "finished": means("finished"),
    "clipped": float(clipped.totals.sum() / max(clipped.counts.sum(), 1)),
    "samples": {"before": records[0]["samples"], "after": records[-1]["samples"]},
    "cpu_seconds": round(time.process_time() - began, 1),
  }
