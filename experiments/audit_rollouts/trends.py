"""How the lengths of correct and wrong responses drift over the steps of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.audit_rollouts import intervals
from experiments.audit_rollouts.collection import Responses

LEAST = 4  # blocks of steps for a slope


def lengths_over_steps(
  responses: Responses, wrong: np.ndarray, blocks: int, confidence: float
) -> dict[str, Any] | None:
  """Mean lengths in blocks of consecutive steps, and their change from the first to the last step.

  Changes are slope x (last - first step) / mean length. The scatter about the line is that of the
  blocks, so responses of one step need not be independent, nor neighbouring steps.

  Args:
    responses: of which step and length are read.
    wrong: [N] bool.
    blocks: at most so many, of equally many steps.
    confidence: of the intervals.

  Returns:
    {"step" [K], side: {"mean", "count" [K], "change" [3]}, "difference" [3]: change of wrong less
    correct, over the mean of all}; None where there are no steps or too few.
  """
  if responses.step is None:
    return None
  steps, place = np.unique(responses.step, return_inverse=True)
  number = min(blocks, len(steps))
  if number < LEAST:
    return None
  block = (np.arange(len(steps)) * number // len(steps))[place]
  length = responses.length.astype(float)
  span, x = float(steps[-1] - steps[0]), _mean(block, responses.step, number)
  table: dict[str, Any] = {"step": x, "steps": len(steps), "span": [steps[0], steps[-1]]}
  for side, members in (("wrong", wrong), ("correct", ~wrong)):
    mean = _mean(block[members], length[members], number)
    count = np.bincount(block[members], minlength=number).astype(float)
    rows: dict[str, Any] = {"mean": mean, "count": count, "change": intervals.UNDEFINED}
    if members.any():
      slope = intervals.slope(x, mean, count, confidence)
      rows["change"] = slope * span / length[members].mean()
    table[side] = rows
  a, b = (table[side]["count"] for side in ("wrong", "correct"))
  with np.errstate(invalid="ignore"):
    both = np.nan_to_num(a * b / (a + b))  # inverse variance of a difference of two means
  gap = table["wrong"]["mean"] - table["correct"]["mean"]
  slope = intervals.slope(x, gap, both, confidence) if both.any() else intervals.UNDEFINED
  return table | {"difference": slope * span / length.mean()}


def _mean(block: np.ndarray, x: np.ndarray, blocks: int) -> np.ndarray:
  """[K]; NaN where nothing is."""
  with np.errstate(invalid="ignore"):
    return np.bincount(block, x, blocks) / np.bincount(block, minlength=blocks)
