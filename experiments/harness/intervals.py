"""Means over seeds and their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

CONFIDENCE = 0.95


def interval(by_seed: Any) -> tuple[np.ndarray, np.ndarray]:
  """Mean of [S, ...] over the seeds, and half of its 95 % t interval; infinite for one seed."""
  x = np.asarray(by_seed, float)
  if len(x) < 2:
    return x[0], np.full(x.shape[1:], np.inf)
  quantile = special.stdtrit(len(x) - 1, 0.5 + CONFIDENCE / 2)
  return x.mean(axis=0), quantile * x.std(axis=0, ddof=1) / np.sqrt(len(x))
