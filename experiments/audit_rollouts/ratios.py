"""Token log-ratios of trainer and sampler, to a few sums per response."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl

ENTRIES = 1 << 20  # of a padded batch; tokens beyond it make it one row
LARGEST = 20.0  # nats: a ratio's log is cut there where ratios are averaged


@dataclasses.dataclass(frozen=True)
class TokenRatios:
  """Log-ratios, trainer over sampler: sums over the tokens of each response, and over all.

  Attributes:
    sums: name -> [N]: tokens, total (of the log-ratio), square, excess (of the ratio over 1),
      outside (the band), half_tokens and half_total (of the first half of the tokens).
    token_worth, sequence_worth: effective sample size per token and per response.
    extremes: smallest and largest log-ratio of a token.
    sequences_outside: share of the responses whose ratio leaves the band.
  """

  sums: dict[str, np.ndarray]
  token_worth: float
  sequence_worth: float
  extremes: tuple[float, float]
  sequences_outside: float


class Accumulator:
  """Takes log-probs, keeps sums."""

  def __init__(self, band: tuple[float, float]) -> None:
    self._measure = partial(_measure, band=band)
    self._sums: list[dict[str, np.ndarray]] = []
    self._merged: Any = None

  def add(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Takes (trainer, sampler) log-probs of responses, in batches of similar shapes."""
    width = _power_of_two(max((len(row) for row, _ in pairs), default=0))
    rows = max(1, min(ENTRIES // width, _power_of_two(len(pairs))))
    for begin in range(0, len(pairs), rows):
      part = pairs[begin : begin + rows]
      padded = np.zeros((2, rows, width))
      lengths = np.zeros(rows, np.int64)
      for i, both in enumerate(part):
        lengths[i] = len(both[0])
        padded[:, i, : lengths[i]] = both
      mask = np.arange(width) < lengths[:, None]
      sums, merged = self._measure(*padded, mask)
      self._sums.append({key: np.asarray(x)[: len(part)] for key, x in sums.items()})
      self._merged = merged if self._merged is None else _merge(self._merged, merged)

  def result(self) -> TokenRatios | None:
    """None if there was no token."""
    if self._merged is None:
      return None
    sums = {key: np.concatenate([part[key] for part in self._sums]) for key in self._sums[0]}
    token, sequence, extremes, outside = self._merged
    return TokenRatios(
      sums=sums,
      token_worth=float(token.fraction()),
      sequence_worth=float(sequence.fraction()),
      extremes=(float(extremes.low), float(extremes.high)),
      sequences_outside=float(outside.mean()),
    )


@partial(jax.jit, static_argnames="band")
def _measure(trainer: Any, sampler: Any, mask: Any, *, band: tuple[float, float]) -> Any:
  log_ratio = rl.token_log_ratio(trainer, sampler, mask)
  sequence = rl.per_sequence(log_ratio, mask)
  length = rl.lengths(mask)
  half = mask & (jnp.arange(mask.shape[-1])[None] < (length // 2)[:, None])
  outside = lambda x: (x < jnp.log1p(-band[0])) | (x > jnp.log1p(band[1]))  # noqa: E731
  total = lambda x, where=mask: jnp.sum(jnp.where(where, x, 0.0), axis=-1)  # noqa: E731
  sums = {
    "tokens": length,
    "total": total(log_ratio),
    "square": total(jnp.square(log_ratio)),
    "excess": total(jnp.expm1(jnp.minimum(log_ratio, LARGEST))),
    "outside": total(outside(log_ratio)),
    "half_tokens": length // 2,
    "half_total": total(log_ratio, half),
  }
  last = rl.last_token_mask(mask)
  merged = (
    rl.token_effective_sample_size(log_ratio, mask),
    rl.sequence_effective_sample_size(sequence, mask),
    rl.ratio_extremes(log_ratio, mask),
    rl.average(outside(sequence), last),
  )
  return sums, merged


def _merge(a: Any, b: Any) -> Any:
  return a[0] + b[0], a[1] + b[1], a[2].merge(b[2]), a[3] + b[3]


def _power_of_two(number: int) -> int:
  return 1 << max(number - 1, 15).bit_length()
