"""Our value where a peer's preference loss is not a number, or is a clamped one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.parity import records
from tests.parity.records import Record

Ours = Mapping[str, np.ndarray]


def sums(record: Record, name: str = "logps") -> np.ndarray:
  x = record.inputs[name][: record.rows]
  return np.where(record.mask, x, 0.0).sum(-1)


def margins(record: Record) -> tuple[np.ndarray, np.ndarray]:
  log_ratio = sums(record) - sums(record, "ref_logps")
  count = record.rows // 2
  return log_ratio[:count], log_ratio[count:]


def tiny_gradient(record: Record, ours: Ours) -> None:
  """By sig' = sig(x) sig(-x), which is tiny and not 0 where 1 - sig(x) is."""
  assert records.error(record, "loss", ours["loss"]) <= 1e-9
  s = record.settings
  c, r = (s["beta"] * x for x in margins(record))
  if s["loss_type"] == "apo_down":  # sig(c) + sig(r - c)
    slopes = [bump(c) - bump(r - c), bump(r - c)]
  else:  # KL(sig(c - r) || 1 - e)
    e = s["label_smoothing"]
    slope = bump(c - r) * (c - r - np.log((1 - e) / e))
    slopes = [slope, -slope]
  rows = np.concatenate(slopes) * s["beta"] / len(c)
  got = ours["grad_logps"][: record.rows, : record.width]
  expected = np.where(record.mask, rows[:, None], 0.0)
  np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-300)


def bump(x: np.ndarray) -> np.ndarray:
  """Derivative of the sigmoid."""
  return np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))) ** 2


def as_large_as_it_gets(record: Record, ours: Ours) -> None:
  """One pair's score is beyond the largest float: the loss is beta / pairs of a quarter of it."""
  beta, count = record.settings["beta"], record.rows // 2
  np.testing.assert_allclose(ours["loss"], np.finfo(float).max / 4 * beta / count, rtol=1e-9)


def without_a_clamp(record: Record, ours: Ours) -> None:
  """-log sig(beta (s(c) - s(r))), s(u) = (1 - exp(-a u)) / a, in float64."""
  beta, a = record.settings["beta"], 1.0 - record.settings["f_alpha_divergence_coef"]
  c, r = ((1 - np.exp(-a * u)) / a for u in margins(record))
  np.testing.assert_allclose(ours["loss"], np.mean(np.logaddexp(0.0, beta * (r - c))), rtol=1e-9)


def logistic(record: Record, ours: Ours) -> None:
  gap = record.inputs["chosen_reward"] - record.inputs["reject_reward"]
  np.testing.assert_allclose(ours["loss"], np.mean(np.logaddexp(0.0, -gap)), rtol=1e-9)
  slope = -np.exp(-np.logaddexp(0.0, gap)) / len(gap)
  np.testing.assert_allclose(ours["grad_chosen"], slope, rtol=1e-9, atol=1e-300)
  np.testing.assert_allclose(ours["grad_rejected"], -slope, rtol=1e-9, atol=1e-300)


def log_odds(logprob: np.ndarray) -> np.ndarray:
  """With log-probs no closer to 0 than machine epsilon."""
  x = np.minimum(logprob, -np.finfo(float).eps)
  return x - np.log(-np.expm1(x))


def odds_of_epsilon(record: Record, ours: Ours) -> None:
  chosen, rejected = (record.inputs[f"{x}_logps"] for x in ("chosen", "rejected"))
  beta = record.settings["beta"]
  x = log_odds(chosen) - log_odds(rejected)
  np.testing.assert_allclose(ours["loss"], beta * np.mean(np.logaddexp(0.0, -x)), rtol=1e-9)
  odd = np.exp(-np.logaddexp(0.0, x)) / -np.expm1(np.minimum(chosen, -np.finfo(float).eps))
  np.testing.assert_allclose(ours["grad_chosen"], -beta * odd / len(x), rtol=1e-9)


def odds_with_an_empty_row(record: Record, ours: Ours) -> None:
  """Likelihood per token, odds of the sequence; the empty row has odds 1 / eps and likelihood 0."""
  count, coefficient = record.rows // 2, record.settings["lambda_orpo"]
  total = sums(record)
  x = log_odds(total[:count]) - log_odds(total[count:])
  lengths = np.maximum(record.mask.sum(-1), 1)
  likelihood = np.mean((total / lengths)[:count])
  expected = coefficient * np.mean(np.logaddexp(0.0, -x)) - likelihood
  np.testing.assert_allclose(ours["loss"], expected, rtol=1e-9)
  assert not ours["grad_logps"][: record.rows][~record.mask.any(-1)].any()
