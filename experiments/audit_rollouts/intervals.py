"""Intervals: of functions of totals over independent parts, and of slopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

_STEP = 1e-20  # of the derivative along the imaginary axis: nothing is subtracted, so none is lost

Estimate = np.ndarray
"""[3]: value, and the lower and upper end of its interval; all NaN where it is not defined."""

UNDEFINED = np.full(3, np.nan)


def of_totals(
  function: Callable[[dict[str, Any]], Any], parts: dict[str, np.ndarray], confidence: float
) -> Estimate:
  r"""Interval of a function of totals by the delta method, one part being one group or response.

  se^2 = P / (P - 1) sum_p (u_p - mean u)^2,  u_p = sum_k x_pk d f / d total_k

  What varies together within a part (the responses of a group) may do so in any way.

  Args:
    function: of {name: total}, by + - * / only.
    parts: name -> [P] what each part adds to a total.
    confidence: of the two-sided normal interval.

  Returns:
    Its estimate.
  """
  totals = {name: complex(x.sum()) for name, x in parts.items()}
  count = len(next(iter(parts.values())))
  with np.errstate(divide="ignore", invalid="ignore"):
    try:
      value = complex(function(totals)).real
      influence = np.zeros(count)
      for name, x in parts.items():
        moved = function(totals | {name: totals[name] + 1j * _STEP})
        influence = influence + x * (complex(moved).imag / _STEP)
    except ZeroDivisionError:
      return UNDEFINED
  if count < 2 or not np.isfinite(value):
    return UNDEFINED
  error = np.std(influence, ddof=1) * np.sqrt(count)
  return _interval(value, error, float(special.ndtri(0.5 + confidence / 2)))


def share(numerator: np.ndarray, denominator: np.ndarray, confidence: float) -> Estimate:
  """Wilson's interval of a share of totals, for as many independent draws as its error says.

  Args:
    numerator, denominator: [P] counts of each part.
    confidence: of the two-sided interval.

  Returns:
    Its estimate, within [0, 1].
  """
  parts = {"a": numerator.astype(float), "b": denominator.astype(float)}
  value, low, _ = of_totals(lambda total: total["a"] / total["b"], parts, confidence)
  if np.isnan(value):
    return UNDEFINED
  z = float(special.ndtri(0.5 + confidence / 2))
  error = (value - low) / z
  # Where all or none are counted the error says nothing: each part is one draw.
  draws = value * (1 - value) / error**2 if error > 0 else np.sum(denominator > 0)
  middle = (value + z * z / (2 * draws)) / (1 + z * z / draws)
  half = z / (1 + z * z / draws) * np.sqrt(value * (1 - value) / draws + (z / (2 * draws)) ** 2)
  # The interval holds the value, which at 0 or 1 is its end; rounding would miss it.
  return np.array([value, min(max(middle - half, 0.0), value), max(min(middle + half, 1.0), value)])


def slope(x: np.ndarray, y: np.ndarray, weight: np.ndarray, confidence: float) -> Estimate:
  """Interval of the slope of weighted least squares, from the scatter about the line.

  Args:
    x, y: [K].
    weight: [K] number of responses behind each y.
    confidence: of the two-sided t interval with K - 2 degrees of freedom.

  Returns:
    Its estimate, y per x.
  """
  kept = (weight > 0) & np.isfinite(y)
  x, y, weight = x[kept], y[kept], weight[kept] / weight[kept].sum()
  x = x - np.sum(weight * x)
  spread = np.sum(weight * x**2)
  freedom = len(x) - 2
  if freedom < 1 or spread == 0:
    return UNDEFINED
  value = np.sum(weight * x * y) / spread
  residual = y - np.sum(weight * y) - value * x
  error = np.sqrt(np.sum(weight * residual**2) / freedom / spread)
  return _interval(value, error, float(special.stdtrit(freedom, 0.5 + confidence / 2)))


def _interval(value: float, error: float, width: float) -> Estimate:
  return np.array([value, value - width * error, value + width * error])
