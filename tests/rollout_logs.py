"""Synthetic rollouts with a known fault, and the files in which such logs come."""

from __future__ import annotations

import csv
import json
from typing import Any

import numpy as np


def rollouts(
  seed: int = 0,
  *,
  steps: int = 40,
  prompts: int = 8,
  size: int = 8,
  growth: float = 0.0,
  shocks: float = 0.0,
  silent: float = 0.0,
  limit: int | None = None,
) -> dict[str, np.ndarray]:
  """Flat columns: step, group, reward, length, truncated; healthy by default.

  Args:
    seed: of everything.
    steps, prompts, size: steps, groups per step, responses per group.
    growth: by which part wrong answers are longer at the last step.
    shocks: standard deviation of what all lengths of a step have in common, log scale.
    silent: share of the prompts that are always or never solved.
    limit: longest length; what would be longer is cut off, and wrong.
  """
  rng = np.random.default_rng(seed)
  shape = (steps, prompts, size)
  solved = rng.beta(3.0, 3.0, (steps, prompts, 1))
  extreme = rng.random((steps, prompts, 1)) < silent
  solved = np.where(extreme, rng.integers(0, 2, (steps, prompts, 1)), solved)
  reward = (rng.random(shape) < solved).astype(float)
  progress = np.linspace(0.0, 1.0, steps)[:, None, None]
  log_length = 5.0 + rng.normal(0.0, 0.3, (steps, prompts, 1)) + rng.normal(0.0, 0.3, shape)
  log_length = log_length + rng.normal(0.0, shocks, (steps, 1, 1)) if shocks else log_length
  longer = np.where(reward == 0, 1.1 * (1.0 + growth * progress), 1.0)
  length = np.maximum(np.exp(log_length) * longer, 1.0).astype(np.int64)
  truncated = np.zeros(shape, bool) if limit is None else length > limit
  if limit is not None:
    length, reward = np.minimum(length, limit), np.where(truncated, 0.0, reward)
  step = np.broadcast_to(np.arange(steps)[:, None, None], shape)
  group = np.broadcast_to(np.arange(steps * prompts).reshape(steps, prompts, 1), shape)
  columns = {"step": step, "group": group, "reward": reward, "length": length}
  return {key: x.reshape(-1) for key, x in (columns | {"truncated": truncated}).items()}


def logprobs(
  lengths: np.ndarray,
  seed: int = 0,
  *,
  noise: float = 0.01,
  drift: float = 0.0,
  temperature: float = 1.0,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Log-probs of drawn tokens by trainer and sampler, per response.

  Args:
    lengths: tokens of each response.
    seed: of everything.
    noise: of the trainer's logits against the sampler's.
    drift: by which part the noise is larger at the end of 100 tokens.
    temperature: at which tokens are drawn and the trainer scores; the sampler reports 1.
  """
  rng = np.random.default_rng([seed, 1])
  trainer, sampler = [], []
  for length in lengths:
    logits = rng.normal(0.0, 1.5, (length, 4))
    tokens = np.argmax(logits / temperature + rng.gumbel(size=logits.shape), axis=-1)
    scale = noise * (1.0 + drift * np.arange(length) / 100.0)
    moved = logits / temperature + scale[:, None] * rng.normal(size=logits.shape)
    for rows, x in ((trainer, moved), (sampler, logits)):
      scores = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
      rows.append(np.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0])
  return trainer, sampler


def write_jsonl(path: Any, columns: dict[str, Any]) -> Any:
  rows = zip(*(_plain(column) for column in columns.values()))
  path.write_text("".join(json.dumps(dict(zip(columns, row))) + "\n" for row in rows))
  return path


def write_csv(path: Any, columns: dict[str, Any]) -> Any:
  with path.open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(zip(*(_plain(column) for column in columns.values())))
  return path


def _plain(column: Any) -> list[Any]:
  """As JSON knows it."""
  return [x.tolist() if hasattr(x, "tolist") else x for x in column]
