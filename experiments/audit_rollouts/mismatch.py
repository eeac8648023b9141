r"""Sampler against trainer: ratios, what they are worth, and how that falls with length.

If the tokens' log-ratios are uncorrelated with variance v each, log rho of T tokens has variance
v T, and if rho has mean 1 and is log-normal, the effective sample size per response is exp(-v T).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.audit_rollouts import intervals
from experiments.audit_rollouts.ratios import TokenRatios


def mismatch(
  tokens: TokenRatios, horizons: Sequence[int], confidence: float
) -> dict[str, Any] | None:
  """Estimates over the responses, and predictions; None if there is no token.

  `variance` per token from whole responses, v; `token_variance` from single tokens; `doubling`: v
  over what the first halves of the responses give, 1 if the variance grows in proportion to the
  length; `k1`, `k3`: KL(sampler || trainer) per token; `excess`: mean token ratio less 1;
  `outside`: tokens out of the band; `predicted` [H, 3]: effective sample size at `horizons`, of
  which the first is the mean length; `half`: what the first halves are worth, and what their
  variance predicts for whole responses, to be held against `sequence_worth`.
  """
  x = tokens.sums
  kept = x["tokens"] > 0
  if not kept.any():
    return None
  n, s, m, h = (
    x[key][kept].astype(float) for key in ("tokens", "total", "half_tokens", "half_total")
  )
  parts = {"n": n, "s": s, "nn": n * n, "sn": s * n, "ss": s * s}
  parts |= {"m": m, "h": h, "mm": m * m, "hm": h * m, "hh": h * h}
  parts |= {key: x[key][kept] for key in ("square", "excess", "outside")}

  def of(function: Any) -> np.ndarray:
    return intervals.of_totals(function, parts, confidence)

  variance = of(_variance)
  lengths = {"mean": n.mean(), **{str(horizon): float(horizon) for horizon in horizons}}
  return {
    "responses": int(kept.sum()),
    "length": n.mean(),
    "variance": variance,
    "token_variance": of(lambda t: t["square"] / t["n"] - (t["s"] / t["n"]) ** 2),
    "doubling": of(lambda t: _variance(t) / _half_variance(t)),
    "k1": of(lambda t: -t["s"] / t["n"]),
    "k3": of(lambda t: (t["excess"] - t["s"]) / t["n"]),
    "excess": of(lambda t: t["excess"] / t["n"]),
    "outside": of(lambda t: t["outside"] / t["n"]),
    "sequences_outside": tokens.sequences_outside,
    "extremes": list(tokens.extremes),
    "token_worth": tokens.token_worth,
    "sequence_worth": tokens.sequence_worth,
    "sequence_worth_predicted": _worth_of(variance[0], n),
    "half": {
      "length": m.mean(),
      "worth": _kish(h),
      "sequence_worth_predicted": _worth_of(of(_half_variance)[0], n),
    },
    "horizons": np.array(list(lengths.values())),
    "predicted": np.stack([_worth(variance, length) for length in lengths.values()]),
  }


def _worth_of(variance: float, lengths: np.ndarray) -> float:
  """Of responses of different lengths: 1 over the mean of their second moments."""
  with np.errstate(over="ignore"):
    return float(1.0 / np.mean(np.exp(variance * lengths)))


def _kish(log_weights: np.ndarray) -> float:
  weights = np.exp(log_weights - log_weights.max())
  return float(weights.sum() ** 2 / len(weights) / np.sum(weights**2))


def _variance(t: dict[str, Any]) -> Any:
  """Of log rho, per token: sum of (s - mu n)^2 over sum of n."""
  mean = t["s"] / t["n"]
  return (t["ss"] - 2 * mean * t["sn"] + mean * mean * t["nn"]) / t["n"]


def _half_variance(t: dict[str, Any]) -> Any:
  halves = {"s": t["h"], "n": t["m"], "ss": t["hh"], "sn": t["hm"], "nn": t["mm"]}
  return _variance(halves)


def _worth(variance: np.ndarray, length: float) -> np.ndarray:
  """exp(-v T), with the ends of the interval in order."""
  value, low, high = variance
  return np.exp(-length * np.array([value, high, max(low, 0.0)]))
